"""Launches of products with EXL3's trellises. Sizes are multiples of 128, which cost alike."""

from __future__ import annotations

import torch

from sglang.srt.configs.activation import SILU
from sglang.srt.configs.trellis import CODEBOOKS, Trellis
from sglang.srt.hardware.arch import CPU
from sglang.srt.layers.quantization.trellis import TrellisModule, TrellisWeight
from sglang.srt.layers.quantization.trellis_banks import TrellisBank
from sglang.srt.layers.triton_ops import trellis_experts, trellis_products

from .inputs import BF16, empty

_FORMS = [Trellis(half_bits, "mul1") for half_bits in range(2, 17)] + [
    Trellis(2 * bits, codebook) for codebook in CODEBOOKS if codebook != "mul1" for bits in range(1, 9)
]
SIZE, EXPERTS = 1024, 8


def _tensors(form: Trellis, *experts: int) -> tuple[torch.Tensor, ...]:
    tiles = empty(*experts, SIZE // 16, SIZE // 16, form.words, dtype=torch.int16)
    return tiles, *(empty(*experts, SIZE, dtype=torch.float16) for _ in range(2))


def launch_trellises() -> None:
    for form in _FORMS:
        weight = TrellisWeight([TrellisModule(form, *_tensors(form), 0, SIZE)], SIZE)
        run = trellis_products.trellis_linear(weight, CPU, ())
        for tokens in (1, 4 * trellis_products.MAX_ROWS):
            for out_dtype in (None, torch.float32) if form == _FORMS[0] else (None,):
                run(empty(tokens, SIZE), None, out_dtype)
                run(empty(tokens, SIZE), empty(SIZE), out_dtype)
        bank = TrellisBank(form, *_tensors(form, EXPERTS), SIZE, SIZE, empty(SIZE // 128, 3, dtype=torch.int32))
        for tokens in (1, 256):
            ids, weights = empty(tokens, 2, dtype=torch.int32), empty(tokens, 2, dtype=torch.float32)
            trellis_experts.fused_moe(empty(tokens, SIZE, dtype=BF16), (bank, bank), (bank,), weights, ids, SILU, ())
