"""Compiles one kernel variant for an architecture that need not be present, and measures the result.

This is the only module of the package that imports Triton, and only inside functions.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import io
import json
import os
import re
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.ledger.variant import Variant
from sglang.srt.kernels.ledger_file import Measurement, tile_key

_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_MMA = re.compile(r"\bmma\.sync\.aligned\.([\w.:]+)")
_WGMMA = re.compile(r"\bwgmma\.mma_async\.sync\.aligned\.([\w.:]+)")
_SHAPE = re.compile(r"m\d+n\d+k\d+")
_MMA_KIND = re.compile(r"kind::(\w+)")
_SCALE_VEC = re.compile(r"scale_vec::(\w+)")
_INPUT_TYPES = ("bf16", "f16", "tf32", "e4m3", "e5m2", "e2m1", "s8", "u8", "f64")


class CompileFailed(RuntimeError):
    """Raised when Triton or ptxas rejects a variant."""


SHARED_PTX = {"sm_121": "sm_120"}
"""Targets that from Triton 3.8 on get the same PTX as another one, but for the target's name (a test holds that)."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """The result of compiling for one architecture."""

    measurement: Measurement
    ptx: str
    function: str


def compile_variant(variant: Variant, target: str) -> Measurement:
    """Returns shared bytes, registers, spilled bytes (stores + loads), stack bytes and matrix instructions for e.g.
    "sm_120".

    Raises CompileFailed.
    """
    return compile_for(variant, target).measurement


def compile_for(variant: Variant, target: str) -> Compiled:
    """Runs all stages, from the kernel's source to machine code. Raises CompileFailed."""
    import triton
    from triton.compiler import ASTSource

    fn = variant.fn
    attrs = {(fn.arg_names.index(name),): [["tt.divisibility", 16]] for name in variant.divisible_by_16}
    ones = dict.fromkeys(variant.ones, 1)
    signature = dict(variant.signature) | dict.fromkeys(ones, "constexpr")
    source = ASTSource(fn, signature, dict(variant.constexprs) | ones, attrs)
    log = io.StringIO()
    with tempfile.TemporaryDirectory() as cache, _environment(cache), contextlib.redirect_stdout(log):
        try:
            kernel = triton.compile(source, target=_gpu(target), options=_options(variant))
        except Exception as error:  # Triton raises many kinds; all mean that this variant does not compile
            raise _failed(variant, target, error) from error
    ptx = kernel.asm["ptx"]
    measurement = (kernel.metadata.shared, *parse_ptxas(log.getvalue()), matrix_instructions(ptx))
    return Compiled(measurement, ptx, kernel.metadata.name)


def assemble_for(variant: Variant, compiled: Compiled, source: str, target: str) -> Measurement:
    """Returns the measurement for `target` from the PTX made for `source`. Raises CompileFailed."""
    from triton.compiler.compiler import make_backend

    backend = make_backend(_gpu(target))
    ptx = compiled.ptx.replace(f".target {source}", f".target {target}")
    capability = int(target.removeprefix("sm_"))
    log = io.StringIO()
    with tempfile.TemporaryDirectory() as cache, _environment(cache), contextlib.redirect_stdout(log):
        try:
            options = backend.parse_options(_options(variant))
            backend.make_cubin(ptx, {"name": compiled.function}, options, capability)
        except Exception as error:
            raise _failed(variant, target, error) from error
    shared, mma = compiled.measurement[0], compiled.measurement[4]
    return (shared, *parse_ptxas(log.getvalue()), mma)


def shares_ptx(target: str) -> bool:
    """Returns whether this Triton makes the same PTX for `target` as for SHARED_PTX[target]."""
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return target in SHARED_PTX and version >= (3, 8)


def _gpu(target: str) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", int(target.removeprefix("sm_")), 32)


def _options(variant: Variant) -> dict[str, int]:
    return {name: value for name, value in variant.tile.items() if name in ("num_warps", "num_stages", "maxnreg")}


def _failed(variant: Variant, target: str, error: Exception) -> CompileFailed:
    name = f"{variant.op}/{variant.key} tile {tile_key(variant.tile)}"
    return CompileFailed(f"{name} does not compile for {target}: {type(error).__name__}: {error}")


@contextlib.contextmanager
def _environment(cache: str) -> Any:
    """Sets a private Triton cache (a cached kernel prints no ptxas log) and makes ptxas print its numbers on stdout."""
    wanted = {"TRITON_CACHE_DIR": cache, "TRITON_DUMP_PTXAS_LOG": "1", "TRITON_ALWAYS_COMPILE": "1"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def parse_ptxas(log: str) -> tuple[int, int, int]:
    """Returns (registers, spilled bytes, stack bytes) from `ptxas -v`, the largest over the listed functions."""
    registers = [int(m[1]) for m in _REGISTERS.finditer(log)]
    frames = [(int(m[1]), int(m[2]) + int(m[3])) for m in _SPILLS.finditer(log)]
    if not registers or not frames:
        raise CompileFailed(f"no resource usage in the output of ptxas: {log[-500:]!r}")
    return max(registers), max(f[1] for f in frames), max(f[0] for f in frames)


def matrix_instructions(ptx: str) -> tuple[str, ...]:
    """Returns each kind in the PTX once: "m16n8k16 bf16", "m16n8k64 mxf4nvf4 4X", "wgmma m64n64k16 bf16"."""
    kinds = {_describe(m[1]) for m in _MMA.finditer(ptx)} | {"wgmma " + _describe(m[1]) for m in _WGMMA.finditer(ptx)}
    return tuple(sorted(kinds))


def _describe(suffix: str) -> str:
    shape = _SHAPE.search(suffix)
    parts = [shape[0] if shape else ""]
    if kind := _MMA_KIND.search(suffix):
        parts.append(kind[1])
        if scale := _SCALE_VEC.search(suffix):
            parts.append(scale[1])
        return " ".join(parts)
    # Types come as d.a.b.c (mma) or d.a.b (wgmma): the first that is not the accumulator's f32 is what is multiplied.
    return " ".join([*parts, next((t for t in suffix.split(".") if t in _INPUT_TYPES), "f32")])


@functools.cache
def source_hash(fn: Any) -> str:
    """Returns the hash of a kernel's code and of every Triton function and constant it reaches; comments, layout and
    the packages around a module do not count."""
    digest = hashlib.sha256()
    for name, text in sorted(_sources(fn, {}).items()):
        digest.update(f"{name}\n{text}\n".encode())
    return digest.hexdigest()[:12]


def _sources(fn: Any, seen: dict[str, str]) -> dict[str, str]:
    import triton

    python = fn.fn
    tree = ast.parse(textwrap.dedent(inspect.getsource(python)))
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(function.body) > 1:
        function.body = function.body[1:]  # the docstring
    seen[_name_of(python)] = ast.unparse(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in python.__globals__:
            value = python.__globals__[node.id]
            if isinstance(value, triton.runtime.JITFunction):
                if _name_of(value.fn) not in seen:
                    _sources(value, seen)
            elif isinstance(value, (int, float, str, triton.language.constexpr)):
                seen[node.id] = repr(value)
    return seen


def _name_of(python: Any) -> str:
    """Returns a function's name with that of its module, as `launch_form` names kernels: where the file lies is no part
    of the code."""
    return f"{python.__module__.rpartition('.')[2]}.{python.__qualname__}"


def variant_hash(variant: Variant) -> str:
    """Returns a hash that changes whenever the variant would compile to something else."""
    launch = {k: v for k, v in variant.tile.items() if k.startswith("num_") or k == "maxnreg"}
    parts: list[Any] = [
        source_hash(variant.fn),
        list(variant.signature.items()),
        sorted((k, str(v)) for k, v in variant.constexprs.items()),
        sorted(variant.divisible_by_16),
        sorted(launch.items()),
    ]
    if variant.ones:
        parts.append(sorted(variant.ones))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def measure_cached(variant: Variant, targets: tuple[str, ...], cache_dir: Path) -> dict[str, Measurement]:
    """Measures a variant for each target; results are kept on disk under the variant's hash and the Triton version.
    Raises CompileFailed."""
    import triton

    directory, name = cache_dir / triton.__version__, f"{variant_hash(variant)}.json"
    results: dict[str, Measurement] = {}
    compiled: dict[str, Compiled] = {}
    for target in targets:
        path = directory / target / name
        if path.exists():
            smem, registers, spills, stack, mma = json.loads(path.read_text())
            results[target] = (smem, registers, spills, stack, tuple(mma))
            continue
        if shares_ptx(target):
            source = SHARED_PTX[target]
            if source not in compiled:
                compiled[source] = compile_for(variant, source)
            results[target] = assemble_for(variant, compiled[source], source, target)
        else:
            compiled[target] = compile_for(variant, target)
            results[target] = compiled[target].measurement
        _store(path, results[target])
    return results


def _store(path: Path, result: Measurement) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(result))
    partial.replace(path)
