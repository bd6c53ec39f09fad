"""Launches whose counts are 1: Triton compiles such a number in, and it then is a Python int without tensors' methods.

Neither the interpreter nor a ledger row with larger numbers shows it. Each kernel of the ledger whose form rule counts
numbers is compiled as far as Triton's first stage, with each value of each flag that decides which of its lines exist.
Each number is 1 that its rule counts and that Triton may compile in.
"""

from __future__ import annotations

from typing import Any

import pytest

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.compiler.compiler import make_backend  # noqa: E402

from sglang.ledger.form_rules import FORM_RULES, FormRule  # noqa: E402
from sglang.ledger.measure import variant_table  # noqa: E402
from sglang.ledger.variant import Variant  # noqa: E402


def kernel_name(fn: Any) -> str:
    return f"{fn.fn.__module__.rsplit('.', 1)[-1]}.{fn.fn.__name__}"


def counted(variant: Variant) -> tuple[str, ...]:
    """The numbers that may be 1 in a launch and that Triton then compiles in."""
    fn, rule = variant.fn, FORM_RULES.get(kernel_name(variant.fn), FormRule())
    names = rule.counts - set(fn.do_not_specialize)
    return tuple(name for name in fn.arg_names if name in names and variant.signature[name] in ("i32", "i64"))


def first_stage(fn: Any, signature: dict[str, str], constexprs: dict[str, Any], launch: dict[str, int]) -> None:
    """Raises triton.CompilationError where a line has no meaning."""
    from triton._C.libtriton import ir

    backend = make_backend(target := GPUTarget("cuda", 120, 32))
    options = backend.parse_options({k: v for k, v in launch.items() if k in ("num_warps", "num_stages")})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(fn, signature, constexprs, {})
    source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)


def flags(variant: Variant) -> set[tuple[str, Any]]:
    """What decides which lines of a kernel exist: constants that are no sizes."""
    return {(k, v) for k, v in variant.constexprs.items() if isinstance(v, bool | str) or v is None}


def cases() -> list[Any]:
    """Of each kernel as many variants as have each value of each flag once."""
    by_kernel: dict[str, list[Variant]] = {}
    seen: set[tuple[Any, ...]] = set()
    for variant in variant_table("sm120").values():
        new = {(variant.fn, *flag) for flag in flags(variant) | {("kernel", True)}} - seen
        if new and counted(variant):
            seen |= new
            by_kernel.setdefault(kernel_name(variant.fn), []).append(variant)
    return [pytest.param(variants, id=kernel) for kernel, variants in sorted(by_kernel.items())]


@pytest.mark.parametrize("variants", cases())
def test_counts_may_be_one(variants: list[Variant]) -> None:
    for variant in variants:
        ones = dict.fromkeys(counted(variant), 1)
        signature = dict(variant.signature) | dict.fromkeys(ones, "constexpr")
        first_stage(variant.fn, signature, dict(variant.constexprs) | ones, dict(variant.tile))


@triton.jit
def stores_wide(out, count):
    tl.store(out, count.to(tl.int64))


def test_a_method_of_a_number_that_is_one_is_noticed() -> None:
    signature = {"out": "*i64", "count": "constexpr"}
    with pytest.raises(triton.CompilationError, match="'int' object has no attribute 'to'"):
        first_stage(stores_wide, signature, {"count": 1}, {})
