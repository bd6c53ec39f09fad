"""Attention backends that hybrid models (gated delta net and full attention) may use."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import libcst as cst
import libcst.matchers as m

from upstream.change import AlreadyUpstream, Change, FailedCheck
from upstream.toolbox import Definition, code, edit, ensure_import, find
from upstream.tree import Tree


class HybridBackends(Change):
    name = "hybrid-backends"
    title = "Hybrid models: FlashInfer may serve full attention on SM12x"
    why = (
        "is_blackwell() is true on SM12x, where hybrid models were held to triton or trtllm_mha: the default, "
        "flashinfer, failed an assertion, and trtllm_mha has no prefill there."
    )
    merged = "attn_backend_wrapper accepts flashinfer on Blackwell"
    files = ("hardware.py",)

    function = "attn_backend_wrapper"

    def transform(self, tree: Tree) -> None:
        anchor = find(tree, self.function, parameters=("runner", "full_attn_backend"), near="attention_registry")
        if '"flashinfer"' in code(anchor.node):
            raise AlreadyUpstream("flashinfer is among the backends that it accepts on Blackwell")
        edit(tree, anchor, _allow)
        ensure_import(tree, anchor.path, "from sglang.srt.sm120.hardware import is_sm12x")

    def check(self, tree: Tree) -> None:
        (test,) = _conditions(find(tree, self.function, near="attention_registry").node)
        for sm12x, backend, wanted in (
            (True, "flashinfer", True),
            (False, "flashinfer", False),
            (False, "triton", True),
        ):
            runner = SimpleNamespace(server_args=SimpleNamespace(attention_backend=backend))
            if eval(code(test), {"is_sm12x": lambda sm12x=sm12x: sm12x, "runner": runner}) != wanted:
                raise FailedCheck(
                    f"{backend} {'on' if sm12x else 'off'} SM12x is not {'accepted' if wanted else 'refused'}"
                )


def _conditions(node: Definition) -> Iterator[cst.BaseExpression]:
    """The conditions that the function asserts about trtllm_mha: the list of backends for Blackwell."""
    statement: Any
    for statement in m.findall(node, m.Assert()):
        if '"trtllm_mha"' in code(statement.test):
            yield statement.test


def _allow(node: Definition) -> Definition:
    for test in list(_conditions(node)):
        wider = f'({code(test)}) or (\n    is_sm12x() and runner.server_args.attention_backend == "flashinfer"\n)'
        node = node.deep_replace(test, cst.parse_expression(f"({wider})"))
    return node
