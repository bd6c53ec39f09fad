"""The PTX of the ledger's rows, and which forms of instructions occur in it."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterable

from sglang.ledger.ptx.driver import without_assembly
from sglang.ledger.ptx.parser import parse
from sglang.ledger.ptx.problems import Unsupported
from sglang.ledger.ptx.program import program
from sglang.ledger.variant import Variant
from sglang.srt.kernels.ledger_file import RowKey


def ptx_of(variant: Variant, target: str) -> str:
    """Returns what Triton compiles a row to, without assembling it."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fn, before = variant.fn, knobs.runtime.add_stages_inspection_hook
    attrs = {(fn.arg_names.index(name),): [["tt.divisibility", 16]] for name in variant.divisible_by_16}
    ones = dict.fromkeys(variant.ones, 1)
    signature = dict(variant.signature) | dict.fromkeys(ones, "constexpr")
    source = ASTSource(fn, signature, dict(variant.constexprs) | ones, attrs)
    options = {name: value for name, value in variant.tile.items() if name in ("num_warps", "num_stages", "maxnreg")}
    knobs.runtime.add_stages_inspection_hook = without_assembly  # type: ignore[assignment]
    cache = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory() as directory:
        os.environ["TRITON_CACHE_DIR"] = directory
        try:
            kernel = triton.compile(
                source, target=GPUTarget("cuda", int(target.removeprefix("sm_")), 32), options=options
            )
            return str(kernel.asm["ptx"])
        finally:
            knobs.runtime.add_stages_inspection_hook = before
            os.environ.pop("TRITON_CACHE_DIR")
            if cache is not None:
                os.environ["TRITON_CACHE_DIR"] = cache


def forms_of(texts: Iterable[tuple[RowKey, str]]) -> tuple[Counter[str], list[str]]:
    """Returns how many rows have each form of instruction, and why rows cannot be executed."""
    rows: Counter[str] = Counter()
    refused: list[str] = []
    for key, text in texts:
        try:
            module = parse(text)
            rows.update({instruction.opcode for instruction in module.instructions})
            program(module)
        except Unsupported as error:
            refused.append(f"{'/'.join(key)}: {error}")
    return rows, refused
