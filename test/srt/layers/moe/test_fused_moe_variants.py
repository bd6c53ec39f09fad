"""What the experts' kernels compile to for each scheme: the instructions, and that what is not native says so."""

from __future__ import annotations

import pytest

from sglang.ledger.compile import Compiled, compile_for
from sglang.ledger.measure import variant_table
from sglang.srt.configs.quant_scheme import SCHEMES, describe_dequantization
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.ledger_file import SAME_LAUNCHES
from sglang.srt.kernels.scaled_product import product_of
from sglang.srt.kernels.spec import Tile
from sglang.srt.layers.moe.fused_moe_triton.tiles import tile
from srt.kernels.census.moe import grouped_product

SM120, SM90 = arch_by_name("sm_120").features, arch_by_name("sm_90").features
SMALL = tile(16, 64, 128, 1, 4, 3)
UPSTREAM_DEFAULT = tile(128, 128, 128, 32, 8, 4)
"""The tile that broke fused MoE on these GPUs, as our kernel counts its columns."""


def compiled_product(kind: str, scheme: str, with_tile: Tile, arch: str = "sm_120") -> Compiled:
    return compile_for(grouped_product(kind, SCHEMES[scheme], with_tile, (2048, 512), arch_by_name(arch)), arch)


@pytest.mark.parametrize(
    ("scheme", "instruction", "scale_type"),
    [
        ("fp8_channel", "m16n8k32 e4m3", ""),
        ("fp8_block", "m16n8k32 e4m3", ""),
        ("int8_channel", "m16n8k32 s8", ""),
        ("mxfp4_mxfp8", "m16n8k32 mxf8f6f4 1X", "ue8m0"),
        ("nvfp4", "m16n8k64 mxf4nvf4 4X", "ue4m3"),
        ("int4_g32", "m16n8k16 bf16", ""),
    ],
)
def test_instructions_on_sm120(scheme: str, instruction: str, scale_type: str) -> None:
    compiled = compiled_product("gate_up", scheme, SMALL)
    smem, _, spills, _, mma = compiled.measurement
    assert mma == (instruction,)
    assert smem <= arch_by_name("sm_120").smem_per_block and spills == 0
    scaled = [line for line in compiled.ptx.splitlines() if "block_scale" in line]
    assert all(scale_type in line for line in scaled) and bool(scaled) == bool(scale_type)
    assert (instruction == "m16n8k16 bf16") == ("16 bits" in describe_dequantization(SCHEMES[scheme], SM120))


def test_denormals_are_not_flushed() -> None:
    """Widened e2m1 codes pass through fp32 denormals: 0.5 would become 0."""
    ptx = compiled_product("down", "mxfp4", SMALL).ptx
    assert "mul" in ptx and not [line for line in ptx.splitlines() if "mul.ftz" in line or "fma.rn.ftz" in line]


@pytest.mark.parametrize("features", [SM120, SM90, frozenset()])
def test_what_is_widened_is_said(features: frozenset[str]) -> None:
    for scheme in SCHEMES.values():
        product = product_of(scheme, features)
        mixed = scheme.element == "e2m1" and scheme.activation == "mxfp8"
        dequantized = (
            product.kind == "planes"
            or product.weight_only
            or (product.kind == "mx" and (mixed or "block_scaled_mma" not in features))
        )
        assert dequantized == bool(describe_dequantization(scheme, features)), scheme.name


def test_few_tokens_use_wgmma_on_hopper() -> None:
    """As the narrow operand: 16 rows of x would otherwise be given to instructions of the generation before."""
    measured = compiled_product("down", "fp8_channel", SMALL, "sm_90").measurement
    assert measured[4] == ("wgmma m64n16k32 e4m3",)


def test_a_tile_for_large_gpus_shows_that_it_does_not_fit() -> None:
    smem = compiled_product("gate_up", "fp8_channel", UPSTREAM_DEFAULT).measurement[0]
    assert smem > arch_by_name("sm_120").smem_per_block


def test_every_scheme_has_rows() -> None:
    for lock in ("sm120", "sm90"):
        named = {piece for op, key, _ in variant_table(lock) if op == "fused_moe" for piece in key.split("/")}
        no_rows = {"fp8_channel_a16", "fp8_block_a16"} if lock == "sm90" else set()  # LEFT_OUT
        assert SCHEMES.keys() - SAME_LAUNCHES.keys() - no_rows <= named and "bf16" in named
