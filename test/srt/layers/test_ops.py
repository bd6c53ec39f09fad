"""Every kernel of an op takes what its protocol says."""

from __future__ import annotations

import importlib
import importlib.util
import inspect

import pytest

from sglang.srt.kernels.tables import TABLES
from sglang.srt.layers.ops import OPS

KERNELS = [
    (op, spec.name, spec.entry)
    for op in OPS
    for spec in TABLES[op]
    if spec.entry and not (op == "linear" and "quantized" in spec.entry)
]


def test_the_table_has_kernels_of_every_op() -> None:
    assert {op for op, _, _ in KERNELS} == set(OPS)


@pytest.mark.parametrize(("op", "name", "entry"), KERNELS)
def test_parameters_are_those_of_the_protocol(op: str, name: str, entry: str) -> None:
    module, _, attribute = entry.partition(":")
    if "triton" in module:
        pytest.importorskip("triton")
    kernel = inspect.signature(getattr(importlib.import_module(module), attribute))
    protocol = inspect.signature(OPS[op].__call__)
    wanted = [parameter for parameter in protocol.parameters.values() if parameter.name != "self"]
    given = list(kernel.parameters.values())
    assert [parameter.name for parameter in given[: len(wanted)]] == [parameter.name for parameter in wanted]
    assert all(parameter.default is not inspect.Parameter.empty for parameter in given[len(wanted) :])
    optional = [parameter.name for parameter in wanted if parameter.default is not inspect.Parameter.empty]
    assert all(kernel.parameters[name].default is not inspect.Parameter.empty for name in optional)
