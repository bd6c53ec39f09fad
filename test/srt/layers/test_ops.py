"""Every kernel of an op takes the parameters of the op's torch reference."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.kernels.op import Op
from sglang.srt.kernels.spec import KernelSpec
from sglang.srt.kernels.tables import TABLES

SRT = Path(importlib.import_module("sglang.srt").__path__[0])
DECLARING = ["sglang.srt.layers.ops", *(
    "sglang.srt." + ".".join(path.relative_to(SRT).with_suffix("").parts)
    for path in sorted((SRT / "blocks").rglob("*.py")) if " = Op(" in path.read_text(encoding="utf-8")
)]  # fmt: skip
OPS: dict[str, Op[Any]] = {
    f"{module}.{name}": value
    for module in DECLARING
    for name, value in vars(importlib.import_module(module)).items()
    if isinstance(value, Op)
}
OTHERS = {"extend_attention", "decode_attention", "long_prompt_attention", "long_latent_prompt", "all_reduce"}
"""Ops whose kernels are backends with several methods, which have protocols."""
NO_DEFAULT = inspect.Parameter.empty


def test_every_op_of_the_tables_is_declared_once() -> None:
    assert sorted(op.name for op in DECLARED) == sorted([*(TABLES.keys() - OTHERS), "linear"])


def problems(given: list[inspect.Parameter], wanted: list[inspect.Parameter]) -> list[str]:
    """What keeps a kernel's parameters from serving every call of the reference's. It may have more, with defaults."""
    by_name = {each.name: each for each in given}
    missing = [f"{each.name} is missing" for each in wanted if each.name not in by_name]
    if missing:
        return missing
    places = [each.name for each in wanted if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    found = [] if [each.name for each in given][: len(places)] == places else [f"the first are not {places}"]
    found += [f"{each.name} is another kind" for each in wanted if by_name[each.name].kind is not each.kind]
    optional = [each for each in wanted if each.default is not NO_DEFAULT]
    found += [f"{each.name} has another default" for each in optional if by_name[each.name].default != each.default]
    more = by_name.keys() - {each.name for each in wanted}
    return found + [f"{name} has no default" for name in more if by_name[name].default is NO_DEFAULT]


DECLARED = list({id(op): op for op in OPS.values()}.values())
KERNELS = [
    pytest.param(op, spec, id=f"{op.name}-{spec.name}")
    for op in DECLARED
    for spec in TABLES[op.name]
    if spec.entry and (op.name != "linear" or spec.entry.endswith(f":{op.reference.__name__}"))
]


def functions(kernel: Any) -> dict[str, Any]:
    """The functions of a kernel by field; of one that is a function itself, by ""."""
    if inspect.isroutine(kernel):
        return {"": kernel}
    return {name: getattr(kernel, name) for name in type(kernel).__dataclass_fields__}


@pytest.mark.parametrize(("op", "spec"), KERNELS)
def test_parameters_are_those_of_the_reference(op: Op[Any], spec: KernelSpec) -> None:
    module, _, attribute = spec.entry.partition(":")
    if "triton" in module:
        pytest.importorskip("triton")
    entry = getattr(importlib.import_module(module), attribute)
    given = {"": entry.__call__} if spec.takes_plan else functions(entry)
    wanted = functions(op.reference)
    assert given.keys() == wanted.keys()
    for name, function in given.items():
        parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
        assert problems(parameters, list(inspect.signature(wanted[name]).parameters.values())) == []
