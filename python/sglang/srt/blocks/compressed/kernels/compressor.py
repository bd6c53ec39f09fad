"""Compressed entries of runs of tokens, and the tokens that later entries need. References: `reference.compress` and
`reference.keep`.

Each token has a program, which ends at once where no run of tokens does: nothing depends on what the host knows of
positions, so that graphs may hold both launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.blocks.compressed.compressor_kernels import CompressorKernels
from sglang.srt.blocks.compressed.kernels.tail_rotation import normed_and_turned
from sglang.srt.layers.triton_ops import pdl

MAX_ROWS = 16
"""Tokens of a run that a program loads at once."""
MIN_COLUMNS = 128
KEEP_BLOCK = 1024
KEEP_LAUNCH = {"BLOCK": KEEP_BLOCK, "num_warps": 4}


@triton.jit
def compress_kernel(
    rows,  # [T, 2, RUNS * DIM] fp32
    bias,  # [RATE, RUNS * DIM] fp32, or None: means
    state,  # [requests, RUNS * RATE, 2, RUNS * DIM] fp32
    slots,  # [T]
    positions,  # [T]
    firsts,  # [T]
    weight,  # [DIM]
    cos_sin,  # [max_pos, ROT] fp32, or None: rows of means have their own
    cache,  # [entries, DIM]
    out_cache_loc,  # [T]
    row_stride,
    entry_stride,
    eps,
    RATE: tl.constexpr,
    RUNS: tl.constexpr,
    DIM: tl.constexpr,
    ROT: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The entry of the run that token `program_id` completes, if it does: softmax over tokens, channel by channel, or
    without a bias their mean. With ROT 0 it is neither normed nor rotated."""
    MEAN: tl.constexpr = bias is None
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, DIM)
    if ROT > 0:
        norm_weight = tl.load(weight + cols).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    position = tl.load(positions + token).to(tl.int64)
    if (position + 1) % RATE == 0:
        SIZE: tl.constexpr = RUNS * RATE
        WIDTH: tl.constexpr = RUNS * DIM
        first_new = tl.load(firsts + token).to(tl.int64)
        kept = state + tl.load(slots + token).to(tl.int64) * (SIZE * 2 * WIDTH)
        most = tl.full((DIM,), float("-inf"), tl.float32)
        total = tl.zeros((DIM,), tl.float32)
        values = tl.zeros((DIM,), tl.float32)
        # From the last rows to the first, so that the first block has a token: runs before the first one are none.
        for block in range(SIZE // ROWS):
            row = SIZE - (block + 1) * ROWS + tl.arange(0, ROWS)
            at = position + 1 - SIZE + row
            is_token = at >= 0
            is_new = at >= first_new
            # Of the run before the first columns count, of the token's own the last ones.
            column = (row // RATE) * DIM
            # Positions of padding may be any: it reads what is there.
            recent = rows + tl.maximum(token + at - position, 0) * row_stride + column
            past = kept + (at % SIZE) * (2 * WIDTH) + column
            from_new = (is_token & is_new)[:, None]
            from_state = (is_token & ~is_new)[:, None]
            parts = tl.load(recent[:, None] + cols[None, :], mask=from_new, other=0.0)
            parts += tl.load(past[:, None] + cols[None, :], mask=from_state, other=0.0)
            if MEAN:
                values += tl.sum(parts, axis=0)
            else:
                gates = tl.load(recent[:, None] + WIDTH + cols[None, :], mask=from_new, other=0.0)
                gates += tl.load(past[:, None] + WIDTH + cols[None, :], mask=from_state, other=0.0)
                gates += tl.load(bias + ((row % RATE) * WIDTH + column)[:, None] + cols[None, :])
                gates = tl.where(is_token[:, None], gates, float("-inf"))
                new_most = tl.maximum(most, tl.max(gates, axis=0))
                shrink = tl.exp(most - new_most)
                shares = tl.exp(gates - new_most[None, :])
                values = values * shrink + tl.sum(shares * parts, axis=0)
                total = total * shrink + tl.sum(shares, axis=0)
                most = new_most
        if MEAN:
            entry = (values / RATE)[None, :]
        else:
            entry = (values / total)[None, :]
        if ROT > 0:
            if MEAN:
                first = position + 1 - RATE
                if first >= first_new:
                    cos_sin_row = rows + tl.maximum(token + 1 - RATE, 0) * row_stride + WIDTH
                else:
                    cos_sin_row = kept + (first % SIZE) * (2 * WIDTH) + WIDTH
            else:
                cos_sin_row = cos_sin + (position + 1 - RATE) * ROT
            entry = normed_and_turned(entry, norm_weight, cos_sin_row, eps, DIM, ROT, tl.float32)
        slot = tl.load(out_cache_loc + token).to(tl.int64) // RATE
        tl.store(cache + slot * entry_stride + cols[None, :], entry.to(cache.dtype.element_ty))


@triton.jit
def keep_kernel(
    rows,  # [T, width] fp32
    state,  # [requests, SIZE, width] fp32
    slots,  # [T]
    positions,  # [T]
    stops,  # [T]
    row_stride,
    width,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, columns): copies a row that later entries are made of. Slot 0 is padding."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots + token).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    stop = tl.load(stops + token).to(tl.int64)
    if (slot != 0) & (position >= stop - SIZE) & (position < stop):
        values = tl.load(rows + token * row_stride + cols, mask=cols < width, other=0.0)
        tl.store(state + (slot * SIZE + position % SIZE) * width + cols, values, mask=cols < width)


def compress_launch(dim: int, size: int) -> dict[str, int]:
    """Rows of a block and warps, for entries of `dim` channels that are made of `size` tokens."""
    return {"ROWS": min(MAX_ROWS, size), "num_warps": max(1, min(8, min(MAX_ROWS, size) * dim // 1024))}


def compress(
    rows: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    firsts: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor | None,
    cache: torch.Tensor,
    out_cache_loc: torch.Tensor,
    *,
    angles: int = 0,
) -> None:
    """Does as the reference, for rates and dims that are powers of two. Tokens of slot 0 are padding."""
    num_tokens = rows.shape[0]
    size, dim = state.shape[1], cache.shape[-1]
    rate = size if bias is None else bias.shape[0]
    if num_tokens == 0:
        return
    compress_kernel[(num_tokens,)](
        rows, bias, state, slots, positions, firsts, weight, cos_sin, cache, out_cache_loc, rows.stride(0),
        cache.stride(0), eps, RATE=rate, RUNS=size // rate, DIM=dim,
        ROT=angles if cos_sin is None else cos_sin.shape[1], **compress_launch(dim, size), **pdl.options(),
    )  # fmt: skip


def keep(
    rows: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, stops: torch.Tensor
) -> None:
    """Does as the reference; tokens of slot 0 are padding and write nothing."""
    num_tokens = rows.shape[0]
    width = rows.shape[1] * rows.shape[2]
    if num_tokens == 0:
        return
    keep_kernel[(num_tokens, triton.cdiv(width, KEEP_BLOCK))](
        rows, state, slots, positions, stops, rows.stride(0), width, SIZE=state.shape[1], **KEEP_LAUNCH,
        **pdl.options(),
    )  # fmt: skip


KV_COMPRESSOR = CompressorKernels(compress, keep)
