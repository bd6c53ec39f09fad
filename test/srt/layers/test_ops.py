"""Every kernel of an op takes what its protocol says."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from pathlib import Path

import pytest

from sglang.srt.kernels.tables import TABLES
from sglang.srt.layers.ops import OPS

SRT = Path(importlib.import_module("sglang.srt").__path__[0])
CALLERS = sorted(path for package in ("blocks", "layers") for path in (SRT / package).rglob("*.py"))

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


def _annotated(tree: ast.AST) -> set[str]:
    """Attributes and names with a type, wherever in the module."""
    return {ast.unparse(node.target) for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)}


@pytest.mark.parametrize("path", CALLERS, ids=lambda path: path.relative_to(SRT).as_posix())
def test_what_calls_a_chosen_kernel_says_its_protocol(path: Path) -> None:
    """`plan.entry` gives Any, so a call that no protocol describes would pass type checks with any arguments."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = {
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".entry")
    }
    typed = _annotated(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in typed):
            calls -= set(ast.walk(node))
    assert not [f"{path.name}:{call.lineno}: {ast.unparse(call)}" for call in calls]
