"""Causal convolution of each channel over the last tokens, SiLU, and the L2 norm of leading heads, in one pass.

    y[t, c] = silu(bias[c] + sum over j < W of weight[c, j] * x[t - W + 1 + j, c])

The first `norm_heads` groups of `HEAD_DIM` channels (queries and keys of gated delta nets) are divided by their length
afterwards. A request keeps its last W - 1 inputs in `states` [slots, W - 1, channels]: one read and one write a step.

References: `reference.causal_conv_extend`, `reference.causal_conv_decode`, `reference.causal_conv_verify`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.blocks.recurrent_state.kernels.commit import commit_conv
from sglang.srt.blocks.recurrent_state.kernels.sequences import locate, num_blocks
from sglang.srt.blocks.recurrent_state.step_kernels import StepKernels
from sglang.srt.layers.triton_ops import pdl

MAX_WIDTH = 4
"""Taps, at most: every published model has four."""
L2_EPS = 1e-6
MAX_BLOCK = 128
"""Channels of a program, at most."""
EXTEND_TILE = {"BLOCK_T": 32, "num_warps": 4}
DECODE_WARPS = 1


@triton.jit
def _activated(total, is_normed, L2_EPS: tl.constexpr):
    """[.., channels] -> silu, and divided by the length where the channels are a head with a norm."""
    y = total * tl.sigmoid(total)
    length = tl.sqrt(tl.sum(y * y, axis=-1, keep_dims=True) + L2_EPS)
    return y / tl.where(is_normed, length, 1.0)


@triton.jit
def _channels(group, norm_heads, channels, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """(channel numbers [BLOCK], which of them exist, whether the group is a head with a norm)."""
    offsets = tl.arange(0, BLOCK)
    is_normed = group < norm_heads
    first = tl.where(is_normed, group * HEAD_DIM, norm_heads * HEAD_DIM + (group - norm_heads) * BLOCK)
    end = tl.where(is_normed, first + HEAD_DIM, channels)
    cols = first + offsets
    return cols, cols < end, is_normed


# Index arrays arrive as slices of one packed buffer: their alignment must not decide about a recompilation.
@triton.jit(
    do_not_specialize=["num_seqs", "norm_heads"],
    do_not_specialize_on_alignment=["initial_slots", "slots", "prefix_lens", "start_loc"],
)
def conv_extend_kernel(
    x, weight, bias, states, initial_slots, slots, prefix_lens, start_loc, out, num_seqs, channels, norm_heads,
    x_stride, out_stride, slot_stride, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr, HAS_BIAS: tl.constexpr, L2_EPS: tl.constexpr,
):  # fmt: skip
    """x [T, channels] -> out [T, channels]. Grid: (blocks of tokens, groups of channels). The block with the first
    tokens of a sequence is the only one that reads and writes the sequence's state."""
    seq, start, length, first = locate(start_loc, num_seqs, tl.program_id(0), BLOCK_T)
    if (first < 0) | (first >= length):
        return
    cols, exists, is_normed = _channels(tl.program_id(1), norm_heads, channels, HEAD_DIM, BLOCK)
    token = first + tl.arange(0, BLOCK_T)
    rows = x + (start + token).to(tl.int64)[:, None] * x_stride + cols[None, :]
    inside = (token < length)[:, None] & exists[None, :]
    has_state = (first == 0) & (tl.load(prefix_lens + seq) > 0)
    old = states + tl.load(initial_slots + seq).to(tl.int64) * slot_stride + cols
    total = tl.zeros([BLOCK_T, BLOCK], dtype=tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + cols, mask=exists, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        source = token - (WIDTH - 1 - tap)
        value = tl.load(rows - (WIDTH - 1 - tap) * x_stride, mask=inside & (source >= 0)[:, None], other=0.0).to(
            tl.float32
        )
        if tap < WIDTH - 1:
            # What lies before the first token is in the state, the last of it at the end.
            earlier = inside & (source < 0)[:, None] & has_state
            kept = tl.load(old[None, :] + (source + WIDTH - 1)[:, None] * channels, mask=earlier, other=0.0)
            value += kept.to(tl.float32)
        total += value * tl.load(weight + cols * WIDTH + tap, mask=exists, other=0.0).to(tl.float32)[None, :]
    y = _activated(total, is_normed, L2_EPS)
    tl.store(out + (start + token).to(tl.int64)[:, None] * out_stride + cols[None, :], y.to(out.dtype.element_ty),
             mask=inside)  # fmt: skip
    if first == 0:
        tl.debug_barrier()  # every thread has read the old state
        new = states + tl.load(slots + seq).to(tl.int64) * slot_stride + cols
        # From the oldest entry on: with few new tokens an entry moves to a place that was read before.
        for entry in tl.static_range(WIDTH - 1):
            last = length - (WIDTH - 1) + entry
            recent = tl.load(x + (start + last).to(tl.int64) * x_stride + cols, mask=exists & (last >= 0), other=0.0)
            older = tl.load(old + (last + WIDTH - 1) * channels, mask=exists & (last < 0) & has_state, other=0.0)
            tl.store(new + entry * channels, tl.where(last >= 0, recent.to(older.dtype), older), mask=exists)


@triton.jit(do_not_specialize=["norm_heads"], do_not_specialize_on_alignment=["slots"])
def conv_decode_kernel(
    x, weight, bias, states, slots, out, channels, norm_heads, x_stride, out_stride, slot_stride,
    WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, L2_EPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """x [B, channels], one token a request -> out [B, channels]. Grid: (B, groups of channels). Slot 0 is nobody's."""
    row = tl.program_id(0).to(tl.int64)
    cols, exists, is_normed = _channels(tl.program_id(1), norm_heads, channels, HEAD_DIM, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + cols, mask=exists, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots + row).to(tl.int64)
    state = states + slot * slot_stride + cols
    kept = exists & (slot > 0)
    for tap in tl.static_range(WIDTH):
        if tap < WIDTH - 1:
            raw = tl.load(state + tap * channels, mask=kept, other=0.0)
        else:
            raw = tl.load(x + row * x_stride + cols, mask=exists, other=0.0).to(states.dtype.element_ty)
        if tap > 0:
            tl.store(state + (tap - 1) * channels, raw, mask=kept)
        total += raw.to(tl.float32) * tl.load(weight + cols * WIDTH + tap, mask=exists, other=0.0).to(tl.float32)
    y = _activated(total, is_normed, L2_EPS)
    tl.store(out + row * out_stride + cols, y.to(out.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["width", "norm_heads"], do_not_specialize_on_alignment=["slots"])
def conv_verify_kernel(
    x, weight, bias, states, slots, out, kept, width, channels, norm_heads, x_stride, slot_stride, WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, L2_EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [B width, channels], `width` tokens a request -> out [B width, channels], and a copy of x in `kept`. Grid: (B,
    groups of channels). Computes as `conv_decode_kernel` does, token after token, and leaves the states."""
    request = tl.program_id(0).to(tl.int64)
    cols, exists, is_normed = _channels(tl.program_id(1), norm_heads, channels, HEAD_DIM, BLOCK)
    first = tl.zeros([BLOCK], dtype=tl.float32)
    if HAS_BIAS:
        first += tl.load(bias + cols, mask=exists, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots + request).to(tl.int64)
    state = states + slot * slot_stride + cols
    before = exists & (slot > 0)
    for token in range(width):
        row = request * width + token
        total = first
        for tap in tl.static_range(WIDTH):
            source = token - (WIDTH - 1 - tap)
            raw = tl.load(
                x + (request * width + source) * x_stride + cols, mask=exists & (source >= 0), other=0.0
            ).to(states.dtype.element_ty)  # fmt: skip
            if tap < WIDTH - 1:
                raw += tl.load(state + (source + WIDTH - 1) * channels, mask=before & (source < 0), other=0.0)
            else:
                tl.store(kept + row * channels + cols, raw.to(kept.dtype.element_ty), mask=exists)
            total += raw.to(tl.float32) * tl.load(weight + cols * WIDTH + tap, mask=exists, other=0.0).to(tl.float32)
        y = _activated(total, is_normed, L2_EPS)
        tl.store(out + row * channels + cols, y.to(out.dtype.element_ty), mask=exists)


def channel_groups(channels: int, norm_heads: int, head_dim: int) -> tuple[int, int]:
    """(channels of a program, programs a token): a head each where there are heads with a norm."""
    if not norm_heads:
        return MAX_BLOCK, triton.cdiv(channels, MAX_BLOCK)
    block = triton.next_power_of_2(head_dim)
    return block, norm_heads + triton.cdiv(channels - norm_heads * head_dim, block)


def causal_conv_extend(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    initial_slots: torch.Tensor,
    slots: torch.Tensor,
    prefix_lens: torch.Tensor,
    start_loc: torch.Tensor,
    out: torch.Tensor,
    norm_heads: int = 0,
    head_dim: int = 0,
) -> None:
    """x, out [T, C] (out must not overlap x); weight [C, W], bias [C]; states [slots, W - 1, C]; initial_slots and
    slots [B]: where a sequence's state is read (with a prefix) and written; prefix_lens [B]; start_loc [B + 1] int32.
    Rows of out that no sequence has are left alone. Never synchronizes."""
    (num_tokens, channels), width = x.shape, weight.shape[1]
    num_seqs = start_loc.shape[0] - 1
    if num_tokens == 0 or num_seqs == 0:
        return
    block, groups = channel_groups(channels, norm_heads, head_dim)
    conv_extend_kernel[(num_blocks(num_tokens, num_seqs, EXTEND_TILE["BLOCK_T"]), groups)](
        x, weight, bias, states, initial_slots, slots, prefix_lens, start_loc, out, num_seqs, channels, norm_heads,
        x.stride(0), out.stride(0), states.stride(0), WIDTH=width, HEAD_DIM=head_dim, BLOCK=block,
        HAS_BIAS=bias is not None, L2_EPS=L2_EPS, **EXTEND_TILE,
    )  # fmt: skip


def causal_conv_decode(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    norm_heads: int = 0,
    head_dim: int = 0,
) -> None:
    """x [B, C], one token for each request of `slots` [B]; as `causal_conv_extend` otherwise. Rows of slot 0 are
    padding: they touch no state."""
    (batch, channels), width = x.shape, weight.shape[1]
    if batch == 0:
        return
    block, groups = channel_groups(channels, norm_heads, head_dim)
    conv_decode_kernel[(batch, groups)](
        x, weight, bias, states, slots, out, channels, norm_heads, x.stride(0), out.stride(0), states.stride(0),
        WIDTH=width, HEAD_DIM=head_dim, BLOCK=block, HAS_BIAS=bias is not None, L2_EPS=L2_EPS, num_warps=DECODE_WARPS,
        **pdl.options(),
    )  # fmt: skip


def causal_conv_verify(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    kept: torch.Tensor,
    norm_heads: int = 0,
    head_dim: int = 0,
) -> None:
    """x [T, C], as many tokens for each request of `slots` [B] -> out [T, C]; `kept` [T, C] becomes a copy of x. The
    states are read and left; as `causal_conv_decode` otherwise."""
    (num_tokens, channels), width = x.shape, weight.shape[1]
    if num_tokens == 0:
        return
    assert out.is_contiguous() and kept.is_contiguous()
    block, groups = channel_groups(channels, norm_heads, head_dim)
    conv_verify_kernel[(len(slots), groups)](
        x, weight, bias, states, slots, out, kept, num_tokens // len(slots), channels, norm_heads, x.stride(0),
        states.stride(0), WIDTH=width, HEAD_DIM=head_dim, BLOCK=block, HAS_BIAS=bias is not None, L2_EPS=L2_EPS,
        num_warps=DECODE_WARPS, **pdl.options(),
    )  # fmt: skip


CAUSAL_CONV = StepKernels(causal_conv_extend, causal_conv_decode, causal_conv_verify, commit_conv)
