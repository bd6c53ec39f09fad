"""The process that runs one tree's attention kernels: `python -m upstream.gpu.kernels --side NAME --out DIR ...`.

`sglang` is whatever PYTHONPATH says. Of every case OUT/<number>-<side>.pt gets the result and the launches, or the
error; a case that fails takes no other with it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from upstream.gpu.cases import CASES, Case, arguments, inputs

LAUNCHERS = {
    "extend": ("extend_attention", "extend_attention_fwd"),
    "decode": ("decode_attention", "decode_attention_fwd"),
    "prefill": ("prefill_attention", "context_attention_fwd"),
}
FOLDERS = ("sglang.srt.layers.attention.triton_ops", "sglang.kernels.ops.attention")
"""Where releases keep them, the older place first."""


def launcher(op: str) -> Callable[..., Any]:
    """Upstream's function for `op`. Raises ImportError if it is at none of the known places."""
    module, function = LAUNCHERS[op]
    errors = []
    for folder in FOLDERS:
        try:
            return getattr(importlib.import_module(f"{folder}.{module}"), function)  # type: ignore[no-any-return]
        except (ImportError, AttributeError) as error:
            errors.append(f"{folder}: {error}")
    raise ImportError(f"no {function} in {'; '.join(errors)}")


@contextlib.contextmanager
def noting_launches() -> Iterator[list[dict[str, Any]]]:
    """Each Triton launch in the block adds its kernel's name, its BLOCK_* arguments and its warps to the list."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    launches: list[dict[str, Any]] = []
    kinds = [kind for kind in (JITFunction, InterpretedFunction) if "run" in vars(kind)]
    originals = [kind.run for kind in kinds]

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            tile = {name: value for name, value in kwargs.items() if name.startswith("BLOCK_")}
            launches.append({"kernel": self.fn.__name__, **tile, "num_warps": kwargs.get("num_warps")})
            return original(self, *args, **kwargs)

        return run

    for kind, original in zip(kinds, originals, strict=True):
        kind.run = noting(original)
    try:
        yield launches
    finally:
        for kind, original in zip(kinds, originals, strict=True):
            kind.run = original


def planned_tile(case: Case) -> list[int] | None:
    """[BLOCK_M, BLOCK_N, warps] that a produced tree's table has for the case; None where the table does not decide.

    That is in a pristine tree, for decode, and where a tile of the release's own may stay. Prefill takes its warps from
    upstream's rule, so that its entry has the block alone.
    """
    if case.op == "decode":
        return None
    try:
        tiles = importlib.import_module("sglang.srt.sm120.attention_tiles")
    except ModuleNotFoundError:
        return None
    if case.op == "prefill":
        return [tiles.prefill_block(case.qk)] * 2
    if case.tree:
        return list(tiles.masked_extend_tile(case.qk, case.v))
    plain = tiles.is_plain(case.window, case.cap)
    return None if plain else list(tiles.extend_tile((0, 0, 0), case.qk, case.v, 0, plain))


def run_case(case: Case, device: str, short: bool) -> dict[str, Any]:
    """{"out", "launches", "planned"} on the CPU, or {"error"} with the traceback."""
    try:
        named, out = arguments(case, inputs(case, short), device)
        function = launcher(case.op)
        with noting_launches() as launches:
            function(**named)
        if device != "cpu":
            torch.cuda.synchronize()
        return {"out": out.float().cpu(), "launches": launches, "planned": planned_tile(case)}
    except Exception:  # upstream's code can raise anything; it is the finding
        return {"error": traceback.format_exc()}


def main(arguments_: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shard", default="0/1", help="I/N: the cases whose number is I modulo N")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--short", action="store_true", help="fewer and shorter requests, for Triton's interpreter")
    options = parser.parse_args(arguments_)
    index, count = map(int, options.shard.split("/"))
    for number, case in enumerate(CASES):
        if number % count == index:
            result = run_case(case, options.device, options.short)
            torch.save(result, options.out / f"{number}-{options.side}.pt")
            print(options.side, case.name, "failed" if "error" in result else "done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
