"""The layout of expert weights, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sglang.srt.configs.quant_scheme import SCHEMES, wants_planes
from sglang.srt.errors import UserError
from sglang.srt.layers.moe.expert_weights import ExpertWeights, repack
from sglang.srt.layers.moe.fused_moe_triton.fused_moe import product_for
from sglang.srt.layers.quantization.reference import quantize, unpack_nibbles

FOUR_BIT = [name for name, scheme in SCHEMES.items() if scheme.bits == 4]
NATIVE = frozenset({"block_scaled_mma"})


def weights(name: str, rows: int = 16, cols: int = 256) -> ExpertWeights:
    torch.manual_seed(0)
    q = quantize(torch.randn(3, rows, cols), SCHEMES[name])
    return ExpertWeights(q.data, SCHEMES[name], q.scale, q.global_scale)


@pytest.mark.parametrize("name", FOUR_BIT)
@pytest.mark.parametrize("cols", [256, 384, 96, 352])
def test_repacked_weights_are_the_same_weights(name: str, cols: int) -> None:
    if cols % SCHEMES[name].group[1]:
        pytest.skip("groups are whole")
    before = weights(name, cols=cols)
    wanted = [before.dequantized(e) for e in range(3)]
    after = repack(before, frozenset())
    assert after.data.dtype == torch.int32 and after.data.shape == (3, 16, -(-cols // 128) * 16)
    assert (after.cols, after.rows, after.num_experts) == (cols, 16, 3)
    for expert, value in enumerate(wanted):
        assert torch.equal(after.dequantized(expert), value)
    assert repack(after, frozenset()).data is after.data, "a second time there is nothing to do"


def test_place_of_a_column_in_planes() -> None:
    """Bits 4i to 4i + 3 of word j of 16 hold column 16 i + j of 128."""
    before = weights("int4_g32")
    codes = unpack_nibbles(before.data[1]).clone()
    words = repack(before, frozenset()).data[1]
    for strip, plane, word in ((0, 0, 0), (0, 3, 5), (1, 7, 15)):
        code = (words[9, 16 * strip + word].item() >> (4 * plane)) & 15
        assert code == codes[9, 128 * strip + 16 * plane + word]


def test_one_shift_of_a_word_gives_a_pair_of_bfloat16() -> None:
    """Plane p of 16 words holds columns 32 p + 2 j and the next in word j, where the kernels' shifts find them."""
    before = weights("mxfp4")
    values = before.dequantized(1) / decoded(before.scale[1]).repeat_interleave(32, -1)
    words = repack(before, frozenset()).data[1].long() & 0xFFFFFFFF
    rotated = (words >> 4) | (words << 28)
    pairs = (words << 6, words << 2, rotated, (words & 0x81808180) | ((words >> 8) & 0x00400040))
    for plane, pair in enumerate(pairs):
        for half in range(2):
            bits = (pair & 0x81C081C0) >> (16 * half) & 0xFFFF
            floats = bits.to(torch.int32).to(torch.uint16).view(torch.bfloat16).float() * 2.0**126
            columns = values.unflatten(-1, (-1, 4, 16, 2))[:, :, plane, :, half].flatten(1)
            assert torch.equal(floats, columns)


def test_a_scale_that_nobody_reads_does_not_touch_its_neighbours() -> None:
    before = weights("mxfp4")
    wanted = before.dequantized(1)
    before.scale[1, 3, 2] = 255
    after = repack(before, frozenset())
    lifted = after.scale[1, 3, :4].view(torch.int32).item() + 0x66666666
    assert lifted >> 24 & 0xFF == after.scale[1, 3, 3] + 102
    assert torch.equal(after.dequantized(1)[:, 96:128], wanted[:, 96:128])


def decoded(scale: torch.Tensor) -> torch.Tensor:
    return torch.exp2(scale.float() - 127)


def test_what_the_matrix_unit_reads_packed_stays_packed() -> None:
    for name in ("nvfp4", "mxfp4_mxfp8"):
        before = weights(name)
        assert repack(before, NATIVE).data is before.data
        assert product_for(before).kind == "mx"
    for name in ("mxfp4", "int4_g32"):
        assert wants_planes(SCHEMES[name], NATIVE)
    assert not wants_planes(SCHEMES["fp8_block"], frozenset())


def test_static_input_scales_become_one() -> None:
    own = dataclasses.replace(weights("fp8_tensor"), input_scale=torch.tensor([0.5, 2.0, 1.0]))
    assert repack(own, NATIVE).input_scale.tolist() == [2.0]


def broken(name: str, **changes: object) -> str:
    with pytest.raises(UserError) as error:
        dataclasses.replace(weights(name), **changes)
    return str(error.value)


def test_tensors_that_do_not_make_up_the_scheme_are_refused() -> None:
    fp8, nvfp4 = weights("fp8_block", 128), weights("nvfp4")
    assert "scale must be torch.float32, not torch.bfloat16" in broken(
        "fp8_channel", scale=torch.ones(3, 16).bfloat16()
    )
    # Eight bits of either kind look alike; as the wrong one every weight would be wrong, silently.
    assert "torch.float8_e4m3fn, not torch.uint8" in broken("nvfp4", scale=nvfp4.scale.view(torch.uint8))
    assert "scale must be [3, 16]" in broken("fp8_channel", scale=torch.ones(3, 15))
    assert "has no scale" in broken("int4_g32", scale=None)
    assert "needs a global scale" in broken("nvfp4", global_scale=None)
    assert "global_scale must be [3]" in broken("nvfp4", global_scale=torch.ones(4))
    assert "takes no global scale" in broken("mxfp4", global_scale=torch.ones(3))
    assert "data must be torch.int8" in broken("int8_channel", data=fp8.data[:, :16])
    with pytest.raises(UserError, match="has scales, but no scheme"):
        ExpertWeights(torch.zeros(2, 4, 8, dtype=torch.bfloat16), scale=torch.ones(2))
    with pytest.raises(UserError, match="no dtype"):
        ExpertWeights(torch.zeros(2, 4, 8, dtype=torch.int32))
    with pytest.raises(UserError, match=r"\[experts, rows, columns\]"):
        ExpertWeights(torch.zeros(4, 8))


def test_weights_that_were_not_repacked_are_refused() -> None:
    with pytest.raises(UserError, match="must be repacked"):
        product_for(weights("int4_g32"))
