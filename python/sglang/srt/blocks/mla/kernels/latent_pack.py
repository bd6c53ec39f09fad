"""Latents of sparse attention as bytes: 512 e4m3 numbers, a scale in fp32 for each 128 of them, 64 columns in bfloat16.

Reference: `reference.latent_pack_store`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops import pdl

RANK, ROT, GROUP = 512, 64, 128
PACKED_BYTES = RANK + 4 * (RANK // GROUP) + 2 * ROT
LAUNCH = {"num_warps": 4}


@triton.jit(do_not_specialize=["entry_stride"])
def latent_pack_store_kernel(
    entries,  # [T, RANK + ROT]
    numbers,  # [S, BYTES] e4m3
    scales,  # the same bytes as fp32
    rotary,  # the same bytes as bfloat16
    out_cache_loc,  # [T]
    entry_stride,
    RANK: tl.constexpr,
    ROT: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program: one token."""
    token = tl.program_id(0).to(tl.int64)
    groups: tl.constexpr = RANK // GROUP
    scales_at: tl.constexpr = RANK // 4
    rotary_at: tl.constexpr = (RANK + 4 * groups) // 2
    size: tl.constexpr = RANK + 4 * groups + 2 * ROT
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(out_cache_loc + token).to(tl.int64)
    group = tl.arange(0, groups)
    cols = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    row = entries + token * entry_stride
    values = tl.load(row + cols).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 1), 1e-4) / 448.0
    stored = tl.minimum(tl.maximum(values / scale[:, None], -448.0), 448.0)
    tl.store(numbers + slot * size + cols, stored.to(tl.float8e4nv))
    tl.store(scales + slot * (size // 4) + scales_at + group, scale)
    rot = tl.arange(0, ROT)
    tl.store(rotary + slot * (size // 2) + rotary_at + rot, tl.load(row + RANK + rot).to(tl.bfloat16))


def latent_pack_store(entries: torch.Tensor, cache: torch.Tensor, out_cache_loc: torch.Tensor) -> None:
    """Stores entries [T, 576] (row stride free) packed in cache [S, 1, 656] uint8, with contiguous slots, at
    out_cache_loc [T]."""
    if cache.shape[-1] != PACKED_BYTES or cache.stride(0) != PACKED_BYTES:
        raise ValueError(f"packed latents lie {PACKED_BYTES} bytes apart, not {cache.stride(0)}")
    if len(entries):
        views = (cache.view(dtype) for dtype in (torch.float8_e4m3fn, torch.float32, torch.bfloat16))
        latent_pack_store_kernel[(len(entries),)](
            entries, *views, out_cache_loc, entries.stride(0), RANK=RANK, ROT=ROT, GROUP=GROUP, **LAUNCH,
            **pdl.options(),
        )  # fmt: skip
