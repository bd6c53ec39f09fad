"""The matrix instructions that products with quantized weights compile to, and what `explain` says of them. No GPU.

Schemes whose products are those of another one with other groups are compiled in `make thorough`."""

from __future__ import annotations

import pytest
from pairs import some

from sglang.ledger.compile import compile_variant
from sglang.ledger.measure import variant_of
from sglang.ledger.rules import spill_budget
from sglang.srt.configs.quant_scheme import SCHEMES, describe_dequantization
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.conditions import dequantized_in_registers
from sglang.srt.kernels.scaled_product import product_of
from sglang.srt.kernels.spec import Need

ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "sm_121")
ON_SM120 = {
    "fp8_tensor": "m16n8k32 e4m3",
    "fp8_channel": "m16n8k32 e4m3",
    "fp8_block": "m16n8k32 e4m3",
    "int8_channel": "m16n8k32 s8",
    "mxfp8": "m16n8k32 mxf8f6f4 1X",
    "mxfp4_mxfp8": "m16n8k32 mxf8f6f4 1X",
    "nvfp4": "m16n8k64 mxf4nvf4 4X",
    "int4_g32": "m16n8k16 bf16",
    "int4_g64": "m16n8k16 bf16",
    "int4_g128": "m16n8k16 bf16",
    "mxfp4": "m16n8k16 bf16",
    "nvfp4_a16": "m16n8k16 bf16",
    "fp8_channel_a16": "m16n8k16 bf16",
    "fp8_tensor_a16": "m16n8k16 bf16",
    "fp8_block_a16": "m16n8k16 bf16",
    "int8_g32": "m16n8k16 bf16",
    "int8_g128": "m16n8k16 bf16",
}
ROWS = {"nvfp4_a16": "nvfp4/widened", "fp8_tensor_a16": "fp8_channel_a16"}
"""Of the schemes whose products are another scheme's."""


ALIKE = {"fp8_tensor", "fp8_tensor_a16", "int4_g32", "int4_g64", "int8_g32", "nvfp4_a16"}
"""Of whose kind of product another scheme is, which takes the same instruction. Compiling takes a second."""


@pytest.mark.parametrize("scheme", some(SCHEMES, SCHEMES.keys() - ALIKE))
def test_sm120_multiplies_natively_or_says_that_it_widens(scheme: str) -> None:
    arch = arch_by_name("sm_120")
    split = "" if product_of(SCHEMES[scheme], arch.features).weight_only else "/split"
    found = variant_of("sm120", "linear", f"tiles/{ROWS.get(scheme, scheme)}{split}")
    smem, _, spills, _, mma = compile_variant(found, "sm_120")
    assert mma == (ON_SM120[scheme],)
    assert smem <= arch.smem_per_block and spills <= spill_budget("sm120", "linear", found.key)
    widens = dequantized_in_registers(Need("linear", quant=scheme), arch)
    assert ("widened to 16 bits" in widens) == mma[0].endswith("bf16"), "explain must say what the ledger shows"


@pytest.mark.parametrize("arch", ARCHS)
def test_explain_and_the_kernels_agree(arch: str) -> None:
    features = arch_by_name(arch).features
    for scheme in SCHEMES.values():
        kind = product_of(scheme, features).kind
        mixed = scheme.element == "e2m1" and scheme.activation == "mxfp8"
        converted = kind == "mx" and (mixed or "block_scaled_mma" not in features)
        widened = kind == "planes" or product_of(scheme, features).weight_only
        assert bool(describe_dequantization(scheme, features)) == (widened or converted), scheme.name
