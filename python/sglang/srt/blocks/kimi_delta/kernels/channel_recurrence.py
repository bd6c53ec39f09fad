"""Launchers of Kimi delta attention: the gated delta rule with a decay for each channel of a head's keys.

They take the arguments of `recurrence`, with a [T, H, K] and dt_bias [H, K]; each head has keys of its own, and `skip`
is None. References: `reference.recurrence_extend` and `reference.recurrence_decode`.
"""

from __future__ import annotations

import torch
import triton

from sglang.srt.blocks.kimi_delta.kernels import (
    channel_decay,
    channel_local,
    channel_scan,
    channel_step,
    channel_verify,
)
from sglang.srt.blocks.recurrent_state.kernels.commit import commit_states
from sglang.srt.blocks.recurrent_state.kernels.sequences import num_blocks
from sglang.srt.blocks.recurrent_state.kernels.state_step import step_tile
from sglang.srt.blocks.recurrent_state.kernels.state_verify import VERIFY_TILE
from sglang.srt.blocks.recurrent_state.rule import Rule
from sglang.srt.blocks.recurrent_state.step_kernels import StepKernels
from sglang.srt.layers.triton_ops import pdl


def channel_recurrence_extend(
    rule: Rule,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor | None,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor | None,
    states: torch.Tensor,
    initial_slots: torch.Tensor,
    slots: torch.Tensor,
    prefix_lens: torch.Tensor,
    start_loc: torch.Tensor,
    out: torch.Tensor,
    num_sms: int = 1,
) -> None:
    """Computes ragged new tokens of B sequences, each from the state of its prefix; as
    `recurrence.recurrence_extend`."""
    num_tokens, heads, value_dim = v.shape
    key_dim, num_seqs = k.shape[2], start_loc.shape[0] - 1
    if num_tokens == 0 or num_seqs == 0:
        return
    assert b is not None and skip is None and k.shape[1] == heads, "each head has keys and a gate of its own"
    assert len(v) == 1 or q.stride(0) == k.stride(0) == v.stride(0), "q, k and v are parts of one row"
    assert a.is_contiguous()
    chunk, device = channel_local.CHUNK, v.device
    block_k, programs = triton.next_power_of_2(key_dim), num_blocks(num_tokens, num_seqs, chunk) * heads
    decay = torch.empty((num_tokens, heads, key_dim), dtype=torch.float32, device=device)
    scores = torch.empty((num_tokens, heads, chunk), dtype=v.dtype, device=device)
    pairs = torch.empty((num_tokens, heads, chunk), dtype=torch.float32, device=device)
    u, w = (torch.empty((num_tokens, heads, dim), dtype=v.dtype, device=device) for dim in (value_dim, key_dim))
    channel_decay.channel_decay_kernel[(programs,)](
        a, a_log, dt_bias, start_loc, decay, num_seqs, heads, rule.lower_bound, K=key_dim, BLOCK_K=block_k, CHUNK=chunk,
        BOUNDED=rule.lower_bound != 0.0, **channel_decay.TILE,
    )  # fmt: skip
    rows = channel_local.ROWS
    channel_local.channel_pairs_kernel[(programs * (chunk // rows),)](
        q, k, b, decay, start_loc, scores, pairs, num_seqs, heads, v.stride(0), b.stride(0), rule.scale, K=key_dim,
        BLOCK_K=block_k, CHUNK=chunk, ROWS=rows, **channel_local.PAIRS_TILE,
    )  # fmt: skip
    channel_local.channel_solve_kernel[(programs,)](
        k, v, b, decay, pairs, start_loc, u, w, num_seqs, heads, v.stride(0), b.stride(0), K=key_dim, V=value_dim,
        BLOCK_K=block_k, BLOCK_V=triton.next_power_of_2(value_dim), CHUNK=chunk, **channel_local.SOLVE_TILE,
    )  # fmt: skip
    tile = channel_scan.TILE
    channel_scan.channel_scan_kernel[(triton.cdiv(value_dim, tile["BLOCK_V"]), heads, num_seqs)](
        q, k, scores, decay, u, w, states, initial_slots, slots, prefix_lens, start_loc, out, heads, v.stride(0),
        out.stride(0), states.stride(0), rule.scale, K=key_dim, V=value_dim, BLOCK_K=block_k, CHUNK=chunk, **tile,
    )  # fmt: skip


def channel_recurrence_decode(
    rule: Rule,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor | None,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor | None,
    states: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    num_sms: int = 1,
) -> None:
    """Computes one token for each request of `slots` [B]; as `recurrence.recurrence_decode`."""
    batch, heads, value_dim = v.shape
    if batch == 0:
        return
    assert b is not None and skip is None and k.shape[1] == heads, "each head has keys and a gate of its own"
    assert len(v) == 1 or q.stride(0) == k.stride(0) == v.stride(0), "q, k and v are parts of one row"
    key_dim, tile = k.shape[2], step_tile(batch, heads, value_dim, num_sms)
    channel_step.channel_step_kernel[(triton.cdiv(value_dim, tile["BLOCK_V"]), heads, batch)](
        q, k, v, a, b, a_log, dt_bias, states, slots, out, heads, v.stride(0), a.stride(0), b.stride(0), out.stride(0),
        states.stride(0), rule.scale, rule.lower_bound, K=key_dim, V=value_dim,
        BLOCK_K=triton.next_power_of_2(key_dim), BOUNDED=rule.lower_bound != 0.0, **tile, **pdl.options(),
    )  # fmt: skip


def channel_recurrence_verify(
    rule: Rule,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor | None,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor | None,
    states: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    log_decays: torch.Tensor,
    betas: torch.Tensor,
) -> None:
    """Computes T tokens, the same number for each request of `slots` [B]; as `recurrence.recurrence_verify`, with
    log_decays [T, H, K]."""
    num_tokens, heads, value_dim = v.shape
    if num_tokens == 0:
        return
    assert b is not None and skip is None and k.shape[1] == heads, "each head has keys and a gate of its own"
    assert len(v) == 1 or q.stride(0) == k.stride(0) == v.stride(0), "q, k and v are parts of one row"
    assert log_decays.is_contiguous() and betas.is_contiguous()
    batch, key_dim = len(slots), k.shape[2]
    tile = VERIFY_TILE
    channel_verify.channel_verify_kernel[(triton.cdiv(value_dim, tile["BLOCK_V"]), heads, batch)](
        q, k, v, a, b, a_log, dt_bias, states, slots, out, log_decays, betas, num_tokens // batch, heads, v.stride(0),
        a.stride(0), b.stride(0), out.stride(0), states.stride(0), rule.scale, rule.lower_bound, K=key_dim, V=value_dim,
        BLOCK_K=triton.next_power_of_2(key_dim), BOUNDED=rule.lower_bound != 0.0, **tile, **pdl.options(),
    )  # fmt: skip


CHANNEL_RECURRENCE = StepKernels(
    channel_recurrence_extend, channel_recurrence_decode, channel_recurrence_verify, commit_states
)
