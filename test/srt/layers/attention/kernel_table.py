"""What the table of kernels repeats of an attention backend."""

from __future__ import annotations

from typing import Any

from sglang.srt.kernels.tables import TABLES


def check_table(name: str, module: Any, classes: list[str]) -> None:
    decode, extend = (getattr(module, cls) for cls in classes)
    rows = {
        op: next(spec for spec in TABLES[op] if spec.name == name) for op in ("decode_attention", "extend_attention")
    }
    assert rows["decode_attention"].graph_safe == decode.in_graphs
    assert rows["extend_attention"].graph_prefill == extend.in_graphs
    assert not (extend.in_graphs and extend.plans_on_host), "prompts in graphs are never planned on the host"
