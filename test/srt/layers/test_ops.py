"""Every kernel of an op serves every call of the op's torch reference."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.kernels.op import Op
from sglang.srt.kernels.spec import KernelSpec
from sglang.srt.kernels.tables import TABLES

BLOCKS = Path(importlib.import_module("sglang.srt.blocks").__path__[0])
DECLARING = [
    "sglang.srt.layers.ops",
    "sglang.srt.layers.native_latent_records",
    "sglang.srt.layers.moe.slot_ops",
    "sglang.srt.layers.moe.cpu_experts.ops",
] + [
    ".".join(("sglang.srt.blocks", *path.relative_to(BLOCKS).with_suffix("").parts))
    for path in sorted(BLOCKS.rglob("*.py"))
    if "Op(" in path.read_text(encoding="utf-8")
]
VALUES = [value for name in DECLARING for value in vars(importlib.import_module(name)).values()]
NESTED = [each for value in VALUES if isinstance(value, dict) for each in value.values()]
OPS: dict[int, Op[Any]] = {id(op): op for op in (*VALUES, *NESTED) if isinstance(op, Op)}
OTHERS = {"extend_attention", "decode_attention", "long_prompt_attention", "long_latent_prompt", "all_reduce"}
"""Ops whose kernels are classes with several methods, which have protocols."""
KERNELS = [
    pytest.param(op, spec, id=f"{op.name}-{spec.name}")
    for op in OPS.values()
    for spec in TABLES[op.name]
    if spec.entry and (op.name != "linear" or spec.entry.endswith(f":{op.reference.__name__}"))
]
NO_DEFAULT = inspect.Parameter.empty


def problems(kernel: Callable[..., Any], reference: Callable[..., Any]) -> list[str]:
    """What keeps a kernel from serving every call of the reference. It may have more parameters, with defaults."""
    given = {name: each for name, each in inspect.signature(kernel).parameters.items() if name != "self"}
    wanted = inspect.signature(reference).parameters
    missing = [f"{name} is missing" for name in wanted if name not in given]
    if missing:
        return missing
    places = [name for name, each in wanted.items() if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    found = [] if list(given)[: len(places)] == places else ["another order"]
    found += [f"{name} is another kind" for name, each in wanted.items() if given[name].kind is not each.kind]
    optional = {name: each.default for name, each in wanted.items() if each.default is not NO_DEFAULT}
    found += [f"{name} has another default" for name, default in optional.items() if given[name].default != default]
    more = [name for name, each in given.items() if name not in wanted and each.default is NO_DEFAULT]
    return found + [f"{name} has no default" for name in more]


def functions(kernel: Any) -> dict[str, Callable[..., Any]]:
    """The functions of a kernel by field; of one that is a function itself, by ""."""
    if inspect.isroutine(kernel):
        return {"": kernel}
    return {name: getattr(kernel, name) for name in type(kernel).__dataclass_fields__}


def test_every_op_of_the_tables_is_declared_once() -> None:
    again = ("linear", "linear", "fused_moe")  # of quantized weights, and of EXL3's
    assert sorted(op.name for op in OPS.values()) == sorted([*(TABLES.keys() - OTHERS), *again])


@pytest.mark.parametrize(("op", "spec"), KERNELS)
def test_kernels_have_the_parameters_of_the_reference(op: Op[Any], spec: KernelSpec) -> None:
    if spec.package is not None:
        pytest.importorskip("triton")
    module, _, attribute = spec.entry.partition(":")
    kernel = getattr(importlib.import_module(module), attribute)
    given, wanted = {"": kernel.__call__} if spec.takes_plan else functions(kernel), functions(op.reference)
    assert given.keys() == wanted.keys()
    assert not [problem for name in given for problem in problems(given[name], wanted[name])]


def test_what_would_break_a_call_is_found() -> None:
    def reference(x: int, eps: float, *, scale: float = 1.0) -> None: ...
    def more(x: int, eps: float, *, scale: float = 1.0, tile: int = 0) -> None: ...
    def short(x: int, eps: float) -> None: ...
    def other(eps: float, x: int, scale: float = 2.0, *, tile: int) -> None: ...

    assert problems(more, reference) == []
    assert problems(short, reference) == ["scale is missing"]
    assert problems(other, reference) == [
        "another order",
        "scale is another kind",
        "scale has another default",
        "tile has no default",
    ]
