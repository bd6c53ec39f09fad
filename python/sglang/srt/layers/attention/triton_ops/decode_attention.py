"""Decode attention over a paged cache (flash decoding): one new token per sequence, or several draft tokens, with the
keys split between programs.

Decoding is bound by memory bandwidth, so the work is cut into pieces of equal size, whatever the lengths in the batch:
`plan_decode` (one small kernel per step) turns seq_lens into a table of pieces on the device, each program of
`decode_kernel` handles one (piece, tile of query heads), and `combine_kernel` merges the pieces of sequences that have
more than one. The grids depend on the batch size only and nothing is read back, so all of it can be captured.

Query heads that share a KV head form one tile, so each key is read once per group (MHA is a group of one). If `v_cache`
is the first columns of `k_cache` (the MLA latent), `latent_decode` computes the pieces.

Draft tokens (HAS_GUESSES) are a few new tokens per sequence, the same number for each, whose keys are in the cache
already. They act as further heads that see different numbers of keys: row r of a group is token r // GROUP, head
r % GROUP. The prompt kernel, which does not split the keys, would have only one program per KV head for them.

References: `reference_decode`, and for draft tokens `attend`, in test/srt/layers/attention/reference.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from sglang.srt.layers.attention.triton_ops.common import (
    LOG2E,
    accumulate,
    cap_scores,
    first_seen,
    load_rows,
    rows_of_tile,
    split_head_dim,
    visible,
)
from sglang.srt.layers.attention.triton_ops.decode_workspace import (
    SHORT_PIECE,
    DecodePlan,
    DecodeWorkspace,
    head_tiles,
)
from sglang.srt.layers.attention.triton_ops.latent_decode import launch_latent_decode
from sglang.srt.layers.attention.triton_ops.prefix_parts import PrefixParts
from sglang.srt.layers.triton_ops import pdl

SPREAD_COLS = 16
"""Columns per program when the pieces of a small batch are merged."""
SPREAD_SEQS, SPREAD_PROGRAMS = 8, 4096
"""Limits of a small batch: sequences, and programs that merge it."""


# Index arrays arrive as slices of one packed buffer: their alignment must not decide about a recompilation.
@triton.jit(do_not_specialize=["num_seqs", "num_slots", "num_pieces"], do_not_specialize_on_alignment=["seq_lens_ptr"])
def plan_kernel(
    seq_lens_ptr, work_ptr, pieces_ptr, num_seqs, num_slots, num_pieces, TILE: tl.constexpr, WAVES: tl.constexpr,
    SHORT_TILES: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """seq_lens [B] -> work [num_pieces, 4] = (sequence or -1, first token, end token, pieces of the sequence) and
    pieces [B, 2] = (first piece, number of pieces). `num_slots` pieces run at once. Grid: (cdiv(pieces, BLOCK_W),)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    offs_b = tl.arange(0, BLOCK_B)
    total = 0
    for b in range(0, num_seqs, BLOCK_B):
        lens = tl.load(seq_lens_ptr + b + offs_b, mask=b + offs_b < num_seqs, other=0)
        total += tl.sum((lens + TILE - 1) // TILE)
    one_wave = (total + num_slots - 1) // num_slots
    all_waves = (total + num_slots * WAVES - 1) // (num_slots * WAVES)
    tiles = tl.maximum(tl.maximum(all_waves, tl.minimum(one_wave, SHORT_TILES)), 1)
    if WAVES <= 2:
        # Few programs share an SM, and a wave that has hardly begun takes as long as a full one: of longer pieces
        # those whose waves take the least altogether, and of several the longest.
        longer = tiles + tl.arange(0, 16) * ((tiles + 7) // 8)
        pieces = tl.zeros([16], dtype=tl.int32)
        for b in range(0, num_seqs, BLOCK_B):
            lens = tl.load(seq_lens_ptr + b + offs_b, mask=b + offs_b < num_seqs, other=0)
            count = ((lens + TILE - 1) // TILE)[:, None] + longer[None, :] - 1
            pieces += tl.sum(count // longer[None, :], 0)
        time = (pieces + num_slots - 1) // num_slots * longer
        tiles = tl.max(tl.where(time == tl.min(time, 0), longer, 0), 0)

    w = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    seq = tl.zeros([BLOCK_W], dtype=tl.int32)
    first = tl.zeros([BLOCK_W], dtype=tl.int32)
    done = 0
    for b in range(0, num_seqs, BLOCK_B):
        ok = b + offs_b < num_seqs
        lens = tl.load(seq_lens_ptr + b + offs_b, mask=ok, other=0)
        count = ((lens + TILE - 1) // TILE + tiles - 1) // tiles
        ends = done + tl.cumsum(count, 0)
        before = (ends[None, :] <= w[:, None]) & ok[None, :]
        seq += tl.sum(before.to(tl.int32), 1)
        first = tl.maximum(first, tl.max(tl.where(before, ends[None, :], 0), 1))
        if tl.program_id(0) == 0:
            tl.store(pieces_ptr + (b + offs_b) * 2, ends - count, mask=ok)
            tl.store(pieces_ptr + (b + offs_b) * 2 + 1, count, mask=ok)
        done += tl.sum(count)

    used = seq < num_seqs
    length = tl.load(seq_lens_ptr + seq, mask=used, other=0)
    # The pieces of one sequence are made equal: a short last one would leave its SM idle.
    num_tiles = (length + TILE - 1) // TILE
    count = tl.maximum((num_tiles + tiles - 1) // tiles, 1)
    step = (num_tiles + count - 1) // count * TILE
    begin = (w - first) * step
    in_table = w < num_pieces
    tl.store(work_ptr + w * 4, tl.where(used, seq, -1), mask=in_table)
    tl.store(work_ptr + w * 4 + 1, begin, mask=in_table)
    tl.store(work_ptr + w * 4 + 2, tl.minimum(begin + step, length), mask=in_table)
    tl.store(work_ptr + w * 4 + 3, count, mask=in_table)


@triton.jit
def _attend(
    acc, row_max, row_sum, q, q_pe, k_base, v_base, slots, k_stride, v_stride, pos, begin, end, row_end, window, scale,
    cap, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DPE: tl.constexpr,
    BLOCK_DV: tl.constexpr, MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CHUNKS: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_GUESSES: tl.constexpr, V_IN_K: tl.constexpr,
):  # fmt: skip
    """One tile of keys at cache slots `slots` [N], admissible where begin <= pos < end; with HAS_GUESSES and MASKED
    only to the rows that see them, as `visible` says."""
    keep = (pos >= begin) & (pos < end)
    k_rows = slots.to(tl.int64) * k_stride
    k = load_rows(k_base, k_rows, keep, 0, BLOCK_D, HEAD_DIM, MASKED).to(q.dtype)
    scores = tl.dot(q, tl.trans(k))
    if BLOCK_DPE > 0:
        k_pe = load_rows(k_base, k_rows, keep, BLOCK_D, BLOCK_DPE, HEAD_DIM, MASKED)
        scores = tl.dot(q_pe, tl.trans(k_pe.to(q.dtype)), scores)
    if HAS_CAP:
        scores = cap_scores(scores, scale, cap)
        scale = 1.0
    if V_IN_K:
        v = k
    else:
        v = load_rows(v_base, slots.to(tl.int64) * v_stride, keep, 0, BLOCK_DV, V_HEAD_DIM, MASKED)
    seen = keep[None, :]
    if HAS_GUESSES and MASKED:
        seen = visible(seen, pos, row_end, window, HAS_WINDOW, HAS_CHUNKS)
    return accumulate(acc, row_max, row_sum, scores, scale, seen, v, q.dtype, MASKED)


@triton.jit(do_not_specialize=["num_tokens"],
            do_not_specialize_on_alignment=["req_pool_indices_ptr", "seq_lens_ptr", "prefix_lens_ptr"])  # fmt: skip
def decode_kernel(
    q_ptr, o_ptr, k_cache_ptr, v_cache_ptr, req_to_token_ptr, req_pool_indices_ptr, seq_lens_ptr, prefix_lens_ptr,
    sinks_ptr, work_ptr, part_o_ptr, part_lse_ptr, num_head_tiles, num_heads, num_tokens, scale, v_scale, cap, window,
    stride_qb, stride_qh, stride_ob, stride_oh, stride_kcs, stride_kch, stride_vcs, stride_vch, stride_rt,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DPE: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CHUNKS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_GUESSES: tl.constexpr, V_IN_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q [B, Hq, D], caches [S, Hkv, D/Dv] -> o [B, Hq, Dv] for sequences of one piece, otherwise the piece's normalized
    output [pieces, Hq, Dv] and base-2 log-sum-exp [pieces, Hq], both fp32. HAS_GUESSES: B is num_tokens rows of each
    sequence, and a piece has outputs of num_tokens * Hq heads. Grid: (pieces * num_head_tiles,)."""
    pid = tl.program_id(0)
    head_tile = pid % num_head_tiles
    piece = pid // num_head_tiles
    # The plan and the batch were written before q: the kernel directly ahead, alone of all, may still run.
    seq = tl.load(work_ptr + piece * 4)
    begin = tl.load(work_ptr + piece * 4 + 1)
    end = tl.load(work_ptr + piece * 4 + 2)
    num_pieces = tl.load(work_ptr + piece * 4 + 3)
    row = tl.load(req_pool_indices_ptr + tl.maximum(seq, 0))
    prefix = 0
    length = 0
    if HAS_GUESSES or HAS_WINDOW:
        length = tl.load(seq_lens_ptr + tl.maximum(seq, 0))
    if HAS_GUESSES:
        prefix = tl.load(prefix_lens_ptr + tl.maximum(seq, 0))
    if HAS_WINDOW:
        begin = tl.maximum(begin, first_seen(prefix + 1 if HAS_GUESSES else length, window, HAS_CHUNKS))
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if seq < 0:
        return

    kv_head, head, q_row, part_row, part_rows, head_ok, row_end = rows_of_tile(
        seq, prefix, length, head_tile, num_heads, num_tokens, GROUP, BLOCK_H, HAS_GUESSES)  # fmt: skip
    q_rows = q_row * stride_qb + head * stride_qh
    q = load_rows(q_ptr, q_rows, head_ok, 0, BLOCK_D, HEAD_DIM, True)
    q_pe = q
    if BLOCK_DPE > 0:
        q_pe = load_rows(q_ptr, q_rows, head_ok, BLOCK_D, BLOCK_DPE, HEAD_DIM, True)

    k_base = k_cache_ptr + kv_head * stride_kch
    v_base = v_cache_ptr + kv_head * stride_vch
    slot_ptr = req_to_token_ptr + row * stride_rt
    acc = tl.zeros([BLOCK_H, BLOCK_DV], dtype=tl.float32)
    row_max = tl.full([BLOCK_H], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_H], dtype=tl.float32)
    offs_n = tl.arange(0, BLOCK_N)
    if HAS_WINDOW:
        start = begin // BLOCK_N * BLOCK_N
    else:
        whole = end - begin  # what all rows see
        if HAS_GUESSES:
            whole = tl.maximum(tl.minimum(end, prefix + 1) - begin, 0)
        start = begin + whole // BLOCK_N * BLOCK_N
        for n in range(begin, start, BLOCK_N):
            pos = n + offs_n
            acc, row_max, row_sum = _attend(
                acc, row_max, row_sum, q, q_pe, k_base, v_base, tl.load(slot_ptr + pos), stride_kcs, stride_vcs, pos,
                begin, end, row_end, window, scale, cap, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DPE, BLOCK_DV, False,
                HAS_WINDOW, HAS_CHUNKS, HAS_CAP, HAS_GUESSES, V_IN_K)  # fmt: skip
    for n in range(start, end, BLOCK_N):
        pos = n + offs_n
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q, q_pe, k_base, v_base, tl.load(slot_ptr + pos, mask=pos < end, other=0),
            stride_kcs, stride_vcs, pos, begin, end, row_end, window, scale, cap, HEAD_DIM, V_HEAD_DIM, BLOCK_D,
            BLOCK_DPE, BLOCK_DV, True, HAS_WINDOW, HAS_CHUNKS, HAS_CAP, HAS_GUESSES, V_IN_K)  # fmt: skip

    cols = tl.arange(0, BLOCK_DV)
    mask = head_ok[:, None] & (cols < V_HEAD_DIM)[None, :]
    if num_pieces == 1:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, mask=head_ok, other=0.0) * 1.4426950408889634
            row_sum += tl.exp2(sink - row_max)
        out = acc * (v_scale / row_sum)[:, None]
        o_rows = q_row * stride_ob + head * stride_oh
        tl.store(o_ptr + o_rows[:, None] + cols[None, :], out.to(o_ptr.dtype.element_ty), mask=mask)
    else:
        # A piece of which a row sees nothing has row_sum 0: its -inf makes the combination skip its output.
        out = acc * (v_scale / row_sum)[:, None]
        part = piece.to(tl.int64) * part_rows + part_row
        tl.store(part_o_ptr + part[:, None] * V_HEAD_DIM + cols[None, :], out, mask=mask)
        tl.store(part_lse_ptr + part, row_max + tl.log2(row_sum), mask=head_ok)


@triton.jit
def combine_kernel(
    o_ptr, lse_ptr, pieces_ptr, sinks_ptr, part_o_ptr, part_lse_ptr, num_heads, num_sinks, stride_ob, stride_oh,
    V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_P: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge BLOCK_DV columns of the pieces of one (sequence, head), BLOCK_P pieces at a time; sequences of one piece
    are written already, but with HAS_LSE: then all are written here, with lse [B, Hq], the natural logarithm of their
    sums, and a sequence without pieces is zeros and -inf. Grid: (Hq, B, cdiv(Dv, BLOCK_DV))."""
    head = tl.program_id(0)
    seq = tl.program_id(1)
    # Of the plan, as `decode_kernel` reads it.
    first = tl.load(pieces_ptr + seq * 2)
    count = tl.load(pieces_ptr + seq * 2 + 1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if HAS_LSE:
        weight_sum = 0.0
    elif count <= 1:
        return
    cols = tl.program_id(2) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    offs_p = tl.arange(0, BLOCK_P)
    if HAS_SINKS:
        top = tl.load(sinks_ptr + head % num_sinks) * 1.4426950408889634
        weight_sum = 1.0
    else:
        top = float("-inf")
        weight_sum = 0.0
    acc = tl.zeros([BLOCK_DV], dtype=tl.float32)
    part_o_ptr += first.to(tl.int64) * num_heads * V_HEAD_DIM
    part_lse_ptr += first.to(tl.int64) * num_heads
    lse = tl.load(part_lse_ptr + offs_p * num_heads + head, mask=offs_p < count, other=float("-inf"))
    for p in range(0, count, BLOCK_P):
        part = (p + offs_p) * num_heads + head
        # Which outputs are read depends on the sums: those of the next step are on their way meanwhile.
        next_ok = p + BLOCK_P + offs_p < count
        next_lse = tl.load(part_lse_ptr + part + BLOCK_P * num_heads, mask=next_ok, other=float("-inf"))
        ok = (lse > float("-inf"))[:, None] & (cols < V_HEAD_DIM)[None, :]
        out = tl.load(part_o_ptr + part[:, None] * V_HEAD_DIM + cols[None, :], mask=ok, other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(lse - base)
        decay = tl.exp2(top - base)
        acc = acc * decay + tl.sum(out * weight[:, None], 0)
        weight_sum = weight_sum * decay + tl.sum(weight, 0)
        top, lse = new_top, next_lse
    if HAS_LSE:
        if tl.program_id(2) == 0:
            tl.store(lse_ptr + seq * num_heads + head, (top + tl.log2(weight_sum)) * 0.6931471805599453)
        weight_sum = tl.where(weight_sum > 0.0, weight_sum, 1.0)
    o_row = seq.to(tl.int64) * stride_ob + head * stride_oh
    tl.store(o_ptr + o_row + cols, (acc / weight_sum).to(o_ptr.dtype.element_ty), mask=cols < V_HEAD_DIM)


def plan_decode(seq_lens: torch.Tensor, workspace: DecodeWorkspace, tile: Mapping[str, int]) -> DecodePlan:
    """Cuts seq_lens [B] int32 into pieces, once per step, and returns the plan for `decode_attention_fwd`. Raises
    ValueError if the workspace is too small for B sequences.

    With programmatic dependent launch (PDL) the attention kernel reads the plan while the kernel before it still runs:
    some other kernel, such as the one that computes q, must be launched between the two."""
    num_seqs, device = seq_lens.shape[0], seq_lens.device
    if num_seqs > workspace.max_batch:
        raise ValueError(f"batch of {num_seqs} sequences exceeds the decode workspace of {workspace.max_batch}")
    num_pieces = workspace.num_pieces(num_seqs)
    plan = DecodePlan(
        num_seqs,
        tile,
        torch.empty((num_pieces, 4), dtype=torch.int32, device=device),
        torch.empty((num_seqs, 2), dtype=torch.int32, device=device),
        workspace.part_o,
        workspace.part_lse,
    )
    launch = plan_constants(tile, workspace.waves)
    plan_kernel[(triton.cdiv(num_pieces, launch["BLOCK_W"]),)](
        seq_lens, plan.work, plan.pieces, num_seqs, workspace.num_slots, num_pieces, **launch, **pdl.options(),
    )  # fmt: skip
    return plan


def plan_constants(tile: Mapping[str, int], waves: int) -> dict[str, int]:
    """Returns the constants and warps of `plan_kernel`."""
    tokens = tile["BLOCK_N"]
    blocks = {"BLOCK_B": 256, "BLOCK_W": 32, "num_warps": 4}
    return {"TILE": tokens, "WAVES": waves, "SHORT_TILES": SHORT_PIECE // tokens, **blocks}


def combine_constants(v_head_dim: int, num_heads: int, num_seqs: int) -> dict[str, int]:
    """Returns the constants and warps of `combine_kernel`. In a small batch a sequence has many pieces, and one program
    per head would leave SMs idle: each program then merges few columns of many pieces."""
    block = triton.next_power_of_2(v_head_dim)
    spread = num_heads * num_seqs * triton.cdiv(v_head_dim, SPREAD_COLS)
    if num_seqs <= SPREAD_SEQS and spread <= SPREAD_PROGRAMS:
        block = SPREAD_COLS
    return {"V_HEAD_DIM": v_head_dim, **combine_blocks(block), "num_warps": 4}


def combine_blocks(cols: int) -> dict[str, int]:
    """Returns block sizes for `cols` columns: pieces such that a thread holds 32 numbers, at least 16."""
    return {"BLOCK_DV": cols, "BLOCK_P": max(16, 4096 // cols)}


def decode_attention_fwd(
    q: torch.Tensor,
    o: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: DecodePlan,
    *,
    scale: float,
    tile: Mapping[str, int],
    sliding_window: int = 0,
    chunked: bool = False,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    lse: torch.Tensor | None = None,
    prefix_lens: torch.Tensor | None = None,
) -> None:
    """Fills o [B, Hq, Dv] with the attention of q [B, Hq, D] (bf16/fp16) over k_cache [S, Hkv, D], v_cache [S, Hkv,
    Dv].

    The caches are in q's dtype or float8 (a uint8 pool must be viewed by the caller), real value = stored value *
    k_scale / v_scale; the last dimension of all is contiguous. If v_cache starts at k_cache's address with a smaller
    head dim, and there is one KV head, it is its first columns (MLA). req_to_token [reqs, ctx] int32, req_pool_indices
    [B] int64 and seq_lens [B] int32 >= 1 (the new token included). `plan` is that of `plan_decode` for these lengths
    and this tile, launched before on the same stream, but not directly before; layers with and without a sliding window
    (which counts the query itself) share one. With `chunked` a query sees the tokens up to itself from the last
    multiple of sliding_window on. With `lse` [B, Hq] fp32, which receives the natural log-sum-exps, seq_lens may be 0,
    and `keep_all_pieces` must be called on the plan first. Raises TypeError for uint8 caches.

    With `prefix_lens` [B] int32 there are draft tokens: q [B * R, Hq, D] and o (contiguous) have R rows per sequence,
    the tokens at prefix_lens + 0 .. R - 1. Each sees the tokens up to itself that lie before seq_lens, so that rows
    behind a sequence's end are finite; the plan's workspace must be for R * Hq heads.
    """
    plan.check_rows(req_pool_indices)
    num_seqs, (_, num_heads, head_dim) = seq_lens.shape[0], q.shape
    num_tokens = q.shape[0] // num_seqs
    num_kv_heads, v_head_dim = v_cache.shape[1], v_cache.shape[2]
    if k_cache.dtype == torch.uint8:
        raise TypeError("k_cache is uint8 storage: pass it as .view(torch.float8_e4m3fn) or .view(torch.float8_e5m2)")
    tiles = head_tiles(num_heads * num_tokens, num_kv_heads, tile["BLOCK_H"])
    block_d, block_dpe = split_head_dim(head_dim)
    sinks_arg = seq_lens if sinks is None else sinks
    if num_kv_heads == 1 and v_head_dim < head_dim and v_cache.data_ptr() == k_cache.data_ptr():
        if chunked or logit_cap > 0:
            raise ValueError("attention over latents has neither chunks nor a logit cap")
        launch_latent_decode(
            q, o, k_cache, req_to_token, req_pool_indices, seq_lens, plan, tiles, prefix_lens, sinks,
            sliding_window=sliding_window, scale=scale, k_scale=k_scale, v_scale=v_scale, tile=tile,
        )  # fmt: skip
    else:
        decode_kernel[(plan.num_pieces * tiles,)](
            q, o, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
            seq_lens if prefix_lens is None else prefix_lens, sinks_arg, plan.work, plan.part_o,
            plan.part_lse, tiles, num_heads, num_tokens, scale * k_scale * LOG2E, float(v_scale),
            logit_cap * LOG2E, sliding_window, q.stride(0), q.stride(1), o.stride(0), o.stride(1), k_cache.stride(0),
            k_cache.stride(1), v_cache.stride(0), v_cache.stride(1), req_to_token.stride(0),
            GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, V_HEAD_DIM=v_head_dim, BLOCK_D=block_d,
            BLOCK_DPE=block_dpe, BLOCK_DV=triton.next_power_of_2(v_head_dim), BLOCK_H=tile["BLOCK_H"],
            BLOCK_N=tile["BLOCK_N"], HAS_WINDOW=sliding_window > 0, HAS_CHUNKS=chunked, HAS_CAP=logit_cap > 0,
            HAS_SINKS=sinks is not None, HAS_GUESSES=prefix_lens is not None, V_IN_K=False, num_warps=tile["num_warps"],
            num_stages=tile["num_stages"], **pdl.options(),
        )  # fmt: skip
    if prefix_lens is not None:  # of a piece, the draft tokens are further heads
        o = o.view(num_seqs, num_tokens * num_heads, v_head_dim)
    merge_pieces(o, plan, sinks, lse)


def keep_all_pieces(plan: DecodePlan) -> None:
    """Makes `merge_pieces` also merge sequences with a single piece, as log-sum-exps require."""
    plan.work[:, 3].clamp_(min=2)


def merge_pieces(
    o: torch.Tensor,
    parts: DecodePlan | PrefixParts,
    sinks: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """Merges the pieces `part_o`, `part_lse` into the rows of o [B, Hq, Dv] whose sequences have several; with lse [B,
    Hq] into all rows. sinks [Hq] fp32, or a number of heads that divides Hq and repeats."""
    num_seqs, num_heads, v_head_dim = o.shape
    launch = combine_constants(v_head_dim, num_heads, num_seqs)
    combine_kernel[(num_heads, num_seqs, triton.cdiv(v_head_dim, launch["BLOCK_DV"]))](
        o, parts.part_lse if lse is None else lse, parts.pieces, parts.pieces if sinks is None else sinks,
        parts.part_o, parts.part_lse, num_heads, num_heads if sinks is None else len(sinks), o.stride(0),
        o.stride(1), HAS_SINKS=sinks is not None, HAS_LSE=lse is not None, **launch, **pdl.options(),
    )  # fmt: skip
