"""Plans of decode attention for tests that launch the kernel themselves."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sglang.srt.layers.attention.triton_ops.decode_attention import plan_decode
from sglang.srt.layers.attention.triton_ops.decode_workspace import DecodePlan, DecodeWorkspace


def plan_ahead(seq_lens: torch.Tensor, workspace: DecodeWorkspace, tile: Mapping[str, int]) -> DecodePlan:
    """Returns a plan behind which another kernel was launched: attention reads its plan while the kernel directly ahead
    of it still runs, so that must not be the one that writes the plan."""
    plan = plan_decode(seq_lens, workspace, tile)
    seq_lens.clone()
    return plan
