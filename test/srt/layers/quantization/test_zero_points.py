"""Words of a scale and a zero point hold both exactly, as far as bfloat16 does."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.errors import UserError
from sglang.srt.layers.moe.expert_weights import ExpertWeights, repack
from sglang.srt.layers.quantization.reference import pack_nibbles
from sglang.srt.layers.quantization.zero_points import pack_scales, unpack_scales
from sglang.srt.layers.triton_ops.kernel_variant import with_functions


def test_every_scale_with_every_zero_point() -> None:
    """All bfloat16 from 2**-29 up to 4, and zero."""
    first, end = (torch.tensor(value).bfloat16().view(torch.int16).item() for value in (2.0**-29, 4.0))
    scales = torch.cat((torch.zeros(1), torch.arange(first, end, dtype=torch.int16).view(torch.bfloat16).float()))
    assert len(scales) == 1 + 31 * 128
    zeros = torch.arange(16)[:, None].expand(16, len(scales))
    words = pack_scales("w", scales.expand(16, -1), zeros)
    assert words.dtype == torch.int16 and len(words.unique()) == words.numel()
    got, got_zeros = unpack_scales(words)
    assert torch.equal(got, scales.expand(16, -1)) and torch.equal(got_zeros, zeros.float())


def test_smaller_scales_are_rounded_to_the_nearest() -> None:
    scales = torch.tensor([2.0**-36, 1.4 * 2.0**-36, 1.6 * 2.0**-36, 2.0**-38, 5.3 * 2.0**-33])
    got, _ = unpack_scales(pack_scales("w", scales, torch.zeros(5, dtype=torch.int8)))
    assert torch.equal(got, torch.tensor([1.0, 1.0, 2.0, 0.0, 42.0]) * 2.0**-36)


@pytest.mark.parametrize("scale", [-1e-3, 4.0, 3.999, torch.inf, torch.nan])
def test_what_no_word_holds(scale: float) -> None:
    scales = torch.tensor([0.1, scale], dtype=torch.float32)
    with pytest.raises(UserError, match=r"experts\.w13: a group with a zero point has a scale that is negative"):
        pack_scales("experts.w13", scales, torch.zeros(2, dtype=torch.int8))


@pytest.mark.parametrize("cols", [128, 160])
def test_planes_hold_the_same_weights(cols: int) -> None:
    """Also with columns that the rows are filled up with."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(16, (2, 8, cols), generator=generator, dtype=torch.uint8)
    scale, zeros = torch.rand(2, 8, cols // 32, generator=generator), torch.randint(16, (2, 8, cols // 32))
    words = pack_scales("w", scale, zeros)
    stored = ExpertWeights(pack_nibbles(codes), SCHEMES["int4_g32"], words)
    expected = (codes.float() - zeros.repeat_interleave(32, -1)) * scale.bfloat16().float().repeat_interleave(32, -1)
    assert stored.zero_points and torch.equal(stored.dequantized(1), expected[1])
    planes = repack(stored, ())
    assert planes.plane_cols == cols and planes.zero_points
    assert torch.equal(planes.dequantized(0), expected[0])


def test_a_variant_replaces_only_what_a_kernel_calls() -> None:
    class Kernel:
        @staticmethod
        def fn() -> int:
            return abs(-1)

    with pytest.raises(ValueError, match="calls no absolute"):
        with_functions(Kernel, __name__, absolute=max)
