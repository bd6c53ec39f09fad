"""Preparation of an indexer's keys and queries: layer norm of the key, RoPE of both.

Reference: `native_sparse_ops.index_norm_rope`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops import pdl
from sglang.srt.layers.triton_ops.rope_store import heads_per_program


@triton.jit(do_not_specialize=["key_stride", "first_query", "query_tokens"])
def index_norm_rope_kernel(
    keys,  # [T, DIM]
    normed,  # [T, DIM]
    queries,  # [query_tokens, QUERY_HEADS, DIM], in place
    positions,  # [T]
    cos_sin,  # [max_pos, ROT] fp32
    weight,  # [DIM] fp32
    bias,  # [DIM] fp32
    first_query,
    query_tokens,
    key_stride,
    eps,
    QUERY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROT: tl.constexpr,
    FIRST: tl.constexpr,  # of the ROT columns that rotate
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, block): block 0 the key, the others HEADS heads of the token's queries each. Queries are those of
    tokens first_query to first_query + query_tokens - 1."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    pair = tl.arange(0, HALF_BLOCK)
    in_pair = pair < ROT // 2
    if INTERLEAVED:
        first_at = 2 * pair
        second_at = 2 * pair + 1
    else:
        first_at = pair
        second_at = pair + ROT // 2
    if FIRST > 0:
        first_at += FIRST
        second_at += FIRST
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    cos_sin_row = cos_sin + tl.load(positions + token) * ROT
    cos = tl.load(cos_sin_row + pair, mask=in_pair, other=0.0)
    sin = tl.load(cos_sin_row + ROT // 2 + pair, mask=in_pair, other=0.0)
    dtype: tl.constexpr = normed.dtype.element_ty
    if block == 0:
        cols = tl.arange(0, DIM_BLOCK)
        inside = cols < DIM
        row = keys + token * key_stride
        out = normed + token * DIM
        values = tl.load(row + cols, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(values) / DIM
        centred = tl.where(inside, values - mean, 0.0)
        inverse = tl.rsqrt(tl.sum(centred * centred) / DIM + eps)
        values = centred * inverse * tl.load(weight + cols, mask=inside, other=0.0)
        values += tl.load(bias + cols, mask=inside, other=0.0)
        if FIRST > 0:
            stays = inside & ((cols < FIRST) | (cols >= FIRST + ROT))
        else:
            stays = inside & (cols >= ROT)
        tl.store(out + cols, values.to(dtype), mask=stays)
        # The rotary columns once more, in pairs.
        first = (tl.load(row + first_at, mask=in_pair, other=0.0).to(tl.float32) - mean) * inverse
        first = first * tl.load(weight + first_at, mask=in_pair, other=0.0)
        first = (first + tl.load(bias + first_at, mask=in_pair, other=0.0)).to(dtype).to(tl.float32)
        second = (tl.load(row + second_at, mask=in_pair, other=0.0).to(tl.float32) - mean) * inverse
        second = second * tl.load(weight + second_at, mask=in_pair, other=0.0)
        second = (second + tl.load(bias + second_at, mask=in_pair, other=0.0)).to(dtype).to(tl.float32)
        tl.store(out + first_at, (first * cos - second * sin).to(dtype), mask=in_pair)
        tl.store(out + second_at, (second * cos + first * sin).to(dtype), mask=in_pair)
    elif (token >= first_query) & (token < first_query + query_tokens):
        head = ((block - 1) * HEADS + tl.arange(0, HEADS))[:, None]
        mask = (head < QUERY_HEADS) & in_pair[None, :]
        heads = queries + ((token - first_query) * QUERY_HEADS + head) * DIM
        q_first = tl.load(heads + first_at[None, :], mask=mask, other=0.0).to(tl.float32)
        q_second = tl.load(heads + second_at[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(heads + first_at[None, :], (q_first * cos[None, :] - q_second * sin[None, :]).to(dtype), mask=mask)
        tl.store(heads + second_at[None, :], (q_second * cos[None, :] + q_first * sin[None, :]).to(dtype), mask=mask)


def launch_constants(dim: int, rot_dim: int, heads: int) -> dict[str, int]:
    """Returns block sizes and warps for `heads` heads per program. Threads are at most as many as pairs: a pair held by
    two warps could be read by one after the other has overwritten it."""
    half_block = triton.next_power_of_2(rot_dim // 2)
    return {
        "HEADS": heads,
        "HALF_BLOCK": half_block,
        "DIM_BLOCK": triton.next_power_of_2(dim),
        "num_warps": max(1, min(4, heads * half_block // 32)),
    }


def index_norm_rope(
    keys: torch.Tensor,
    queries: torch.Tensor | None,
    first_query: int,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    is_neox_style: bool = True,
    first_rotary: int = 0,
) -> torch.Tensor:
    """Returns keys [T, D] (row stride free) normalized and rotated; rotates queries [N, H, D] contiguous, of the tokens
    from first_query on, in place (None: no queries): rot dims from `first_rotary` on. positions [T]; cos_sin
    [max_pos, rot] fp32; weight, bias [D] fp32."""
    num_tokens, dim = keys.shape
    normed = torch.empty((num_tokens, dim), dtype=keys.dtype, device=keys.device)
    if num_tokens == 0:
        return normed
    count, num_heads = (0, 0) if queries is None else queries.shape[:2]
    heads = heads_per_program(num_tokens)
    index_norm_rope_kernel[(num_tokens, 1 + triton.cdiv(num_heads, heads))](
        keys, normed, normed if queries is None else queries, positions, cos_sin, weight, bias, first_query, count,
        keys.stride(0), eps, QUERY_HEADS=num_heads, DIM=dim, ROT=cos_sin.shape[1], FIRST=first_rotary,
        INTERLEAVED=not is_neox_style, **launch_constants(dim, cos_sin.shape[1], heads), **pdl.options(),
    )  # fmt: skip
    return normed
