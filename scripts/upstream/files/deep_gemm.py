# SPDX-License-Identifier: Apache-2.0
"""The part of DeepGEMM that sparse-attention indexers call, in Triton, for SM12x: same names, arguments and results.

logits[m, n] = k_scale[n] * sum over heads h of weights[m, h] * max(0, q[m, h] . k[n]), q and k in float8_e4m3fn.
Positions outside a row's range are -inf. Nothing waits for the device, so CUDA graphs can capture all of it. What is
computed is a function of sm120-sglang; the layouts of keys and logits are DeepGEMM's.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from sglang.srt.sm120.index_logits import head_sums

_COLUMNS = 128
_LINES = 128
"""Heads of one or more rows whose products are computed at once."""
_ROUNDS = 4
"""How often a program does so, with the same keys."""


def get_num_sms() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def set_num_sms(num_sms: int) -> None:
    """Kernels here leave SMs to others by themselves."""


def get_paged_mqa_logits_metadata(context_lens: torch.Tensor, block_kv: int, num_sms: int) -> torch.Tensor:
    """A schedule of the shape that callers copy around; the kernels here need none."""
    return torch.zeros((num_sms + 1, 2), dtype=torch.int32, device=context_lens.device)


@triton.jit
def _paged_kernel(
    Q,
    Cache,
    CacheScales,
    Weights,
    ContextLens,
    BlockTables,
    Logits,
    num_columns,
    next_n,
    stride_q_row,
    stride_page,
    stride_w_row,
    stride_len_row,
    stride_len_next,
    stride_table_row,
    stride_logits_row,
    LAST_LEN: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
):
    """One row of logits for one page. LAST_LEN: lengths are those of a sequence's last query, not of each."""
    row = tl.program_id(0).to(tl.int64)
    page = tl.program_id(1)
    sequence = row // next_n
    query = row % next_n
    length = tl.load(ContextLens + sequence * stride_len_row + query * stride_len_next)
    if LAST_LEN:
        length = length - next_n + query + 1

    offs_n = tl.arange(0, PAGE)
    columns = page * PAGE + offs_n
    out = Logits + row * stride_logits_row + columns
    if page * PAGE >= length:
        tl.store(out, tl.full((PAGE,), float("-inf"), tl.float32), mask=columns < num_columns)
    else:
        offs_h = tl.arange(0, BLOCK_H)
        offs_d = tl.arange(0, D)
        physical = tl.load(BlockTables + sequence * stride_table_row + page).to(tl.int64)
        base = physical * stride_page
        q = tl.load(
            Q + row * stride_q_row + offs_h[:, None] * D + offs_d[None, :], mask=offs_h[:, None] < NUM_HEADS, other=0.0
        )
        k = tl.load(Cache + base + offs_n[:, None] * D + offs_d[None, :])
        weights = tl.load(Weights + row * stride_w_row + offs_h, mask=offs_h < NUM_HEADS, other=0.0).to(tl.float32)
        scales = tl.load(CacheScales + (base + PAGE * D) // 4 + offs_n)
        logits = tl.reshape(head_sums(k, tl.trans(q), weights, PAGE, 1, BLOCK_H), [PAGE]) * scales
        tl.store(out, tl.where(columns < length, logits, float("-inf")), mask=columns < num_columns)


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    schedule_metadata: Any,
    max_context_len: int,
    clean_logits: bool = True,
    **_: Any,
) -> torch.Tensor:
    """Logits of every query over the keys of its sequence.

    q               [batch, next_n, heads, 128] float8_e4m3fn
    kv_cache        [pages, page size, 1, 132] bytes; a page is all its keys, then all their float32 scales
    weights         [batch * next_n, heads] float32
    context_lens    [batch], [batch, 1] (of the last query) or [batch, next_n] (of each)
    block_tables    [batch, pages of a sequence] int32
    returns         [batch * next_n, max_context_len] float32
    """
    batch, next_n, heads, head_dim = q.shape
    page = kv_cache.shape[1]
    q = q.contiguous()
    cache = _same_memory(kv_cache, torch.float8_e4m3fn)
    scales = _same_memory(kv_cache, torch.float32)
    lens = context_lens if context_lens.dim() == 2 else context_lens.unsqueeze(-1)
    per_query = lens.shape[1] == next_n
    logits = torch.empty((batch * next_n, max_context_len), dtype=torch.float32, device=q.device)
    if logits.numel() == 0:
        return logits
    _paged_kernel[(batch * next_n, triton.cdiv(max_context_len, page))](
        q,
        cache,
        scales,
        weights,
        lens,
        block_tables,
        logits,
        max_context_len,
        next_n,
        heads * head_dim,
        kv_cache.stride(0),
        weights.stride(0),
        lens.stride(0),
        lens.stride(1) if per_query else 0,
        block_tables.stride(0),
        logits.stride(0),
        LAST_LEN=not per_query,
        NUM_HEADS=heads,
        BLOCK_H=max(16, triton.next_power_of_2(heads)),
        D=head_dim,
        PAGE=page,
        num_warps=4,
        num_stages=1,
    )
    return logits


@triton.jit
def _ragged_kernel(
    Q,
    K,
    KScales,
    Weights,
    Starts,
    Ends,
    Logits,
    num_rows,
    num_columns,
    stride_q_row,
    stride_k_row,
    stride_w_row,
    stride_logits_row,
    NUM_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """ROUNDS times ROWS rows of logits over the same BLOCK_N keys, which are read once."""
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, D)
    in_range = offs_n < num_columns
    k = tl.load(K + offs_n[:, None] * stride_k_row + offs_d[None, :], mask=in_range[:, None], other=0.0)
    scales = tl.load(KScales + offs_n, mask=in_range, other=0.0)
    head = tl.arange(0, ROWS * BLOCK_H) % BLOCK_H
    first = tl.program_id(0).to(tl.int64) * (ROWS * ROUNDS)
    for begin in range(first, tl.minimum(first + ROWS * ROUNDS, num_rows), ROWS):
        rows = begin + tl.arange(0, ROWS)
        start = tl.load(Starts + rows, mask=rows < num_rows, other=0)
        end = tl.load(Ends + rows, mask=rows < num_rows, other=0)
        line_row = begin + tl.arange(0, ROWS * BLOCK_H) // BLOCK_H
        line_ok = (line_row < num_rows) & (head < NUM_HEADS)
        lines = line_row * stride_q_row + head * D
        q = tl.load(Q + lines[:, None] + offs_d[None, :], mask=line_ok[:, None], other=0.0)
        weights = tl.load(Weights + line_row * stride_w_row + head, mask=line_ok, other=0.0).to(tl.float32)
        logits = head_sums(k, tl.trans(q), weights, BLOCK_N, ROWS, BLOCK_H) * scales[:, None]
        valid = (offs_n[:, None] >= start[None, :]) & (offs_n[:, None] < end[None, :])
        out = Logits + rows[None, :] * stride_logits_row + offs_n[:, None]
        tl.store(out, tl.where(valid, logits, float("-inf")), mask=in_range[:, None] & (rows < num_rows)[None, :])


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int | None = None,
    **_: Any,
) -> torch.Tensor:
    """Logits of every query over keys [start, end) of a flat list.

    q         [queries, heads, 128] float8_e4m3fn
    kv        ([keys, 128] float8_e4m3fn, [keys] float32 scales)
    weights   [queries, heads] float32
    returns   [queries, keys] float32; with `max_seqlen_k`, not supported here
    """
    if max_seqlen_k:
        raise NotImplementedError("compressed logits are not available on SM12x")
    k, scales = kv
    num_rows, heads, head_dim = q.shape
    num_columns = k.shape[0]
    q = q.contiguous()
    scales = scales.reshape(-1)
    logits = torch.empty((num_rows, num_columns), dtype=torch.float32, device=q.device)
    if logits.numel() == 0:
        return logits
    block_h = max(16, triton.next_power_of_2(heads))
    together = max(1, _LINES // block_h)
    _ragged_kernel[(triton.cdiv(num_rows, together * _ROUNDS), triton.cdiv(num_columns, _COLUMNS))](
        q,
        k,
        scales,
        weights,
        cu_seq_len_k_start,
        cu_seq_len_k_end,
        logits,
        num_rows,
        num_columns,
        heads * head_dim,
        k.stride(0),
        weights.stride(0),
        logits.stride(0),
        NUM_HEADS=heads,
        BLOCK_H=block_h,
        D=head_dim,
        ROWS=together,
        ROUNDS=_ROUNDS,
        BLOCK_N=_COLUMNS,
        num_warps=4,
        num_stages=1,
    )
    return logits


def _same_memory(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A pointer to the tensor's first byte, typed: some bytes of a page are keys and some are scales."""
    return tensor.view(torch.uint8).as_strided((16,), (1,)).view(dtype)
