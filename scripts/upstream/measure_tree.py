"""The process that examines one upstream tree for `verify`: `python -m upstream.measure_tree TREE CASES OUT.json`."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from sglang.ledger.compile import CompileFailed, measure_cached
from sglang.ledger.variant import Variant

# Ours, before `sglang` comes to mean upstream's package.
from sglang.srt.environ import envs
from upstream import stub_import
from upstream.recording import Launch as Recorded
from upstream.recording import recording
from upstream.verify import ARCH, Capture, Launch, Unchecked


def examine(tree: Path, cases: str) -> Capture:
    """Calls the cases that `cases` ("module:function") lists, and compiles what they launch."""
    import triton

    cache = envs.SGLANG_CACHE_DIR / "upstream-kernels"
    stub_import.enter(tree)
    module, _, function = cases.partition(":")
    recorded, unchecked, absent = _record(tree, getattr(importlib.import_module(module), function)())
    distinct = {_identity(variant): variant for tries in recorded for variant in tries}

    def measure(variant: Variant) -> dict[str, Any]:
        try:
            shared, registers, spills, *_ = measure_cached(variant, (ARCH,), cache)[ARCH]
        except CompileFailed as error:
            return {"failure": str(error).strip().splitlines()[-1]}
        return {"shared": shared, "registers": registers, "spills": spills}

    results = dict(zip(distinct, _in_parallel(measure, list(distinct.values())), strict=True))
    launches = [
        _best([Launch(v.op, v.key, v.fn.fn.__name__, _tile(v), **results[_identity(v)]) for v in tries])
        for tries in recorded
    ]
    return Capture(launches, unchecked, absent, triton.__version__, stub_import.FAILED_IMPORTS)


def _identity(variant: Variant) -> str:
    """The identity of code that compiles to the same, told apart without hashing any source."""
    v = variant
    return repr((id(v.fn), *v.signature.items(), *v.constexprs.items(), v.divisible_by_16, *v.tile.items()))


def _best(tries: list[Launch]) -> Launch:
    """An autotuner skips what does not fit; of what does we cannot know the fastest and show what spills least."""
    if len(tries) == 1:
        return tries[0]
    best = min(tries, key=lambda launch: (bool(launch.problem), launch.spills, launch.shared))
    return replace(best, tile=f"{best.tile} (of {len(tries)} tuned)")


def _record(tree: Path, cases: Iterable[Any]) -> tuple[list[list[Variant]], list[Unchecked], list[str]]:
    """Record what the cases launch, each with the alternatives of its autotuner; what could not be called; what is
    absent."""
    recorded: list[list[Variant]] = []
    unchecked: list[Unchecked] = []
    absent: dict[str, None] = {}
    stub_import.publish_defaults()
    for case in cases:
        try:
            launcher = stub_import.find(tree, case.launcher, case.file)
            with recording() as launches:
                _call(launcher, case.arguments(inspect.getmodule(launcher)))
            if not all(launches) or not launches:
                raise LookupError(f"{case.launcher}() launched no Triton kernel")
        except stub_import.NotFound as error:
            if case.required:
                unchecked.append(Unchecked(case.op, case.key, str(error)))
            else:
                absent[case.op] = None
        except Exception as error:  # upstream's code can raise anything, and that is a finding, not the end
            unchecked.append(Unchecked(case.op, case.key, _why(error)))
        else:
            recorded += [[_variant(case, launch) for launch in tries] for tries in launches]
    return recorded, unchecked, list(absent)


def _why(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}, `{frame.line}`)"


def _call(launcher: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """With those of the arguments that it takes. Raises TypeError if it wants one that the case does not have."""
    named = [
        p for p in inspect.signature(launcher).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    missing = [p.name for p in named if p.default is p.empty and p.name not in arguments]
    if missing:
        raise TypeError(f"{launcher.__name__}() now requires {', '.join(missing)}; add it to the case")
    launcher(**{p.name: arguments[p.name] for p in named if p.name in arguments})


def _variant(case: Any, launch: Recorded) -> Variant:
    return Variant(
        op=case.op,
        key=case.key,
        fn=launch.kernel,
        signature=launch.signature,
        constexprs=launch.constexprs,
        divisible_by_16=launch.divisible_by_16,
        tile={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
    )


_BLOCK = re.compile(r"BLOCK(?:_SIZE)?_([A-Z])")


def _tile(variant: Variant) -> str:
    """`M64 N128 K128 w4 s2`; extents that follow from the shape, such as BLOCK_DMODEL, are no choice and left out."""
    blocks = [f"{match[1]}{value}" for name, value in variant.constexprs.items() if (match := _BLOCK.fullmatch(name))]
    return " ".join([*blocks, f"w{variant.tile['num_warps']}", f"s{variant.tile['num_stages']}"])


_work: tuple[Any, Sequence[Any]] = (None, ())


def _in_parallel(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """`function` of every item, in two processes. They are forked: kernels of a loaded tree cannot be pickled."""
    global _work
    _work = (function, items)
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        return list(pool.map(_one, range(len(items))))


def _one(index: int) -> Any:
    function, items = _work
    return function(items[index])


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(asdict(examine(Path(sys.argv[1]), sys.argv[2]))))
