"""Attention to selected blocks: the kernel against plain torch, and plain torch against dense attention."""

from __future__ import annotations

import interpreter
import pytest
import torch

from sglang.srt.blocks.pooled_sparse.block_selection import BlockSelection
from sglang.srt.blocks.pooled_sparse.kernels.selected_blocks import selected_block_attention_fwd
from sglang.srt.blocks.pooled_sparse.reference import attend_blocks

DEVICE = interpreter.DEVICE
BLOCKS = 40
"""Blocks of the caches; what is in the first one is nobody's."""


def selection(counts: list[int], tails: list[int], block: int, wide: int) -> BlockSelection:
    generator = torch.Generator().manual_seed(wide)
    places = torch.stack([torch.randperm(BLOCKS - 1, generator=generator)[: wide + 1] + 1 for _ in counts])
    blocks = places[:, :wide].to(torch.int32)
    blocks[torch.arange(wide) >= torch.tensor(counts)[:, None]] = -1
    numbers = (torch.tensor(numbers, dtype=torch.int32, device=DEVICE) for numbers in (counts, tails))
    counted, tail_counts = numbers
    return BlockSelection(blocks.to(DEVICE), counted, places[:, wide].to(torch.int32).to(DEVICE), tail_counts, block)


@interpreter.kernel_test
@pytest.mark.pairs
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 1), (8, 2), (40, 2), (2, 2)])
@pytest.mark.parametrize("block", [2, 4])
@pytest.mark.parametrize(("tile_n", "num_sms"), [(16, 1), (32, 8)])
def test_the_kernel(dim: int, heads: int, kv_heads: int, block: int, tile_n: int, num_sms: int) -> None:
    """With one SM a token's share is whole, with more it is cut."""
    torch.manual_seed(heads)
    counts, tails = [0, 0, 1, 5, 17, 17], [1, 0, 0, block - 1, 1, 0]
    chosen = selection(counts, tails, block, 17)
    q = torch.randn(len(counts), heads, dim, device=DEVICE).to(torch.bfloat16)
    k_cache, v_cache = (torch.randn(BLOCKS * block, kv_heads, dim, device=DEVICE).to(torch.bfloat16) for _ in range(2))
    want, got = torch.zeros_like(q), torch.ones_like(q)
    tile = {"BLOCK_H": 16, "BLOCK_N": tile_n, "num_warps": 4, "num_stages": 2, "ctas_per_sm": 2}
    attend_blocks(q, k_cache, v_cache, chosen, want, scale=dim**-0.5)
    selected_block_attention_fwd(q, k_cache, v_cache, chosen, got, scale=dim**-0.5, tile=tile, num_sms=num_sms)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    if heads == 8:
        stored = [cache.to(torch.float8_e4m3fn) for cache in (k_cache, v_cache)]
        scales = {"k_scale": 0.5, "v_scale": 2.0}
        attend_blocks(q, *stored, chosen, want, scale=dim**-0.5, **scales)
        selected_block_attention_fwd(q, *stored, chosen, got, scale=dim**-0.5, tile=tile, num_sms=num_sms, **scales)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_all_blocks_are_dense_attention() -> None:
    torch.manual_seed(0)
    length, block, dim = 11, 4, 16
    q = torch.randn(1, 4, dim, dtype=torch.float64)
    caches = [torch.randn(BLOCKS * block, 2, dim, dtype=torch.float64) for _ in range(2)]
    places = torch.randperm(BLOCKS)[:3]
    slots = (places[:, None] * block + torch.arange(block)).flatten()[:length]
    keys, values = (cache[slots].transpose(0, 1) for cache in caches)  # [2, 11, D]
    scores = (q[0].unflatten(0, (2, 2)) @ keys.transpose(1, 2)) * 0.3
    want = (scores.softmax(-1) @ values).flatten(0, 1)[None]
    numbers = [torch.tensor([number], dtype=torch.int32) for number in (2, int(places[2]), 3)]
    chosen = BlockSelection(places[None, :2].to(torch.int32), *numbers, block)
    got = torch.empty_like(q)
    attend_blocks(q, *caches, chosen, got, scale=0.3)
    torch.testing.assert_close(got, want)


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
