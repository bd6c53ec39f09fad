"""Each row of products with a quantized weight: its tile forced, on sizes that no tile divides.

Only `scripts/execute_kernels.py` runs it, over executed PTX (`@interpreter.kernel_test`).
"""

from __future__ import annotations

import dataclasses

import interpreter
import pytest
import torch
from ledger.rows.ledger_rows import parts_of, rows_of
from srt.layers.quantization.test_quant_linear import NATIVE, activations, assert_close, copy_of, expected, weight_of

from sglang.srt.layers.triton_ops.linear_products import few_rows, many_rows, pack

WIDENS = dataclasses.replace(NATIVE, features=NATIVE.features - {"block_scaled_mma"})
LIMITS = {"nvfp4": 0.15, "mxfp4_mxfp8": 0.05}


def columns(words: list[str]) -> int:
    """Returns a depth whose rows and scales have the row's alignments, and which blocks divide or not."""
    if "odd" in words:
        return 784 if words[1] == "nvfp4" else 1000
    if words[0] == "few":
        return 896 if "ragged" in words else 2048
    return 1024 if "even" in words else 640 if words[1] in ("nvfp4", "mxfp8", "mxfp4_mxfp8") else 768


@interpreter.kernel_test
@pytest.mark.parametrize("row", rows_of("linear/tiles"))
def test_tiles(row: str) -> None:
    words, tile = parts_of(row)
    scheme = words[1].removesuffix("_a16")
    arch = WIDENS if "widened" in words or words[1] != scheme else NATIVE
    if words[1] != scheme:
        arch = dataclasses.replace(arch, features=arch.features - {"fp8_mma"})
    num_cols = tile["BLOCK_N"] + (24 if "odd_rows" in words else 48)
    if scheme == "fp8_block":
        num_cols = 256
    weight = weight_of(scheme, (num_cols,), columns(words))
    held = pack(copy_of(weight), arch)
    wide = tile["BLOCK_M"] if "split" in words or tile["BLOCK_M"] < 64 else 512
    x = activations(wide + 3, columns(words)) if wide == 512 else activations(max(wide - 3, 3), columns(words))
    out = torch.float32 if "fp32" in words else torch.bfloat16
    want = expected(x, weight, held, rounded=False)
    assert_close(many_rows(x, held, tile, out_dtype=out), want, LIMITS.get(scheme, 0.04), out)


@interpreter.kernel_test
@pytest.mark.parametrize("row", rows_of("linear/few"))
def test_few_rows(row: str) -> None:
    words, tile = parts_of(row)
    arch = WIDENS if "widened" in words else NATIVE
    num_cols = 3 * tile["BLOCK_N"] + (0 if words[1] == "fp8_block" else 16)
    cols = columns(words)
    weight = weight_of(words[1], (256,) if words[1] == "fp8_block" else (num_cols,), cols)
    held = pack(copy_of(weight), arch)
    x = activations(2, cols)
    out = torch.float32 if "fp32" in words else torch.bfloat16
    assert_close(
        few_rows(x, held, tile | {"EARLY": 0}, out_dtype=out), expected(x, weight, held, rounded=False), 1e-2, out
    )
