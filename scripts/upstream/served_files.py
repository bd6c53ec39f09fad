"""Files of the server that stand in the target, too: the same text, but for the modules that they import."""

from __future__ import annotations

import importlib
import types
from pathlib import Path

_PYTHON = Path(__file__).parents[2] / "python"
_LICENSE = "# SPDX-License-Identifier: Apache-2.0\n"

_OPS = "sglang.srt.layers.attention.triton_ops"
SERVED = {
    "pdl": "sglang.srt.layers.triton_ops.pdl",
    "selection": "sglang.srt.layers.attention.selection",
    "entry_shares": "sglang.srt.layers.attention.entry_shares",
    "attention_parts": f"{_OPS}.common",
    "select_entries": f"{_OPS}.select_entries",
    "index_logits": f"{_OPS}.index_logits",
    "sparse_steps": f"{_OPS}.sparse_steps",
    "sparse_packed": f"{_OPS}.sparse_packed",
    "sparse_attention": f"{_OPS}.sparse_attention",
}
"""Name in the target -> module of the server. They import Python, torch, Triton and each other."""


def served_text(name: str) -> str:
    """Returns the text that stands in the target."""
    text = _PYTHON.joinpath(*SERVED[name].split(".")).with_suffix(".py").read_text(encoding="utf-8")
    for target, module in SERVED.items():
        package, _, own = module.rpartition(".")
        text = text.replace(f"from {module} import ", f"from sglang.srt.sm120.{target} import ")
        text = text.replace(f"from {package} import {own}\n", f"from sglang.srt.sm120 import {target}\n")
    return _LICENSE + text


def served_module(name: str) -> types.ModuleType:
    """Returns the server's module."""
    return importlib.import_module(SERVED[name])
