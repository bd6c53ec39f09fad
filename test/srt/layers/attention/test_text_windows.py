"""Attention of whole texts without a cache: windows to one side and to both, and which kernel has them."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.attention_table import PREFILL_ATTENTION
from sglang.srt.kernels.spec import Need
from sglang.srt.layers.native_ops import context_attention


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [0, 1, 4, 40])
def test_a_row_sees_those_of_its_text_within_the_window(window: int, is_causal: bool) -> None:
    lengths, generator = (11, 1, 20), torch.Generator().manual_seed(0)
    q = torch.randn(32, 4, 8, generator=generator)
    k, v = (torch.randn(32, 2, 8, generator=generator) for _ in range(2))
    starts, out = torch.tensor((0, *lengths)).cumsum(0).int(), torch.empty_like(q)
    context_attention(q, k, v, out, starts, longest=20, is_causal=is_causal, sliding_window=window, tile={})
    text = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    ahead = torch.arange(32) - torch.arange(32)[:, None]
    sees = text == text[:, None]
    if window:
        sees &= ahead.abs() < window
    if is_causal:
        sees &= ahead <= 0
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, dim=1)) * 8**-0.5
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    want = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(2, dim=1))
    torch.testing.assert_close(out, want, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("arch", ["sm_120", "sm_90"])
def test_windows_to_both_sides_are_for_kernels_that_have_them(arch: str) -> None:
    """Heads of 64 dims, for which Triton's kernel comes first without such windows."""
    plain = Need("prefill_attention", 64, 64, traits=frozenset({"bidirectional"}))
    window = Need("prefill_attention", 64, 64, traits=plain.traits | {"two_sided_window"})
    first = []
    for need in (plain, window):
        kernels = [
            spec for spec in PREFILL_ATTENTION if spec.refuse is None or not spec.refuse(need, arch_by_name(arch))
        ]
        first.append(kernels[0].name)
    assert first == ["triton", "torch_flash"]
