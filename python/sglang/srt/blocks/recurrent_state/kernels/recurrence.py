"""Launchers of the recurrences with a state [K, V] a head: the gated delta rule and Mamba-2's state-space duality.

Both keep their states in a pool [slots, heads, K, V], fp32 or 16 bits, and compute in fp32 what the state is made of.
References: `reference.recurrence_extend`, `reference.recurrence_decode` and `reference.recurrence_verify`.
"""

from __future__ import annotations

import torch
import triton

from sglang.srt.blocks.recurrent_state.kernels import chunk_local, chunk_scan, register_scan, state_step, state_verify
from sglang.srt.blocks.recurrent_state.kernels.commit import commit_states
from sglang.srt.blocks.recurrent_state.kernels.sequences import num_blocks
from sglang.srt.blocks.recurrent_state.rule import Rule
from sglang.srt.blocks.recurrent_state.step_kernels import StepKernels
from sglang.srt.layers.triton_ops import pdl


def recurrence_extend(
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
    """Computes ragged new tokens of B sequences, each from the state of its prefix: with `register_scan` if a state
    fits into registers, else with `chunk_scan`.

    q, k [T, Hk, K], v [T, H, V]: parts of rows equally far apart; a, b [T, H]; a_log, dt_bias, skip [H]; states
    [slots, H, K, V]; initial_slots, slots [B]: where a sequence's state is read (if it has a prefix) and written;
    prefix_lens [B], start_loc [B + 1] int32; out [T, H, V], whose rows before start_loc[0] stay as they are. `num_sms`
    of the GPU decides how the work is cut. Never synchronizes; CUDA-graph safe.
    """
    num_tokens, heads, value_dim = v.shape
    key_dim, num_seqs = k.shape[2], start_loc.shape[0] - 1
    if num_tokens == 0 or num_seqs == 0:
        return
    assert len(v) == 1 or q.stride(0) == k.stride(0) == v.stride(0), "q, k and v are parts of one row"
    in_registers = key_dim <= register_scan.MAX_KEYS
    chunk = register_scan.CHUNK if in_registers else chunk_local.CHUNK
    delta, device, block_k, group = rule.delta, v.device, triton.next_power_of_2(key_dim), heads // k.shape[1]
    scores = torch.empty((num_tokens, heads, chunk), dtype=v.dtype, device=device)
    decay = torch.empty((num_tokens, heads), dtype=torch.float32, device=device)
    beta = decay if delta else torch.empty_like(decay)
    u = torch.empty((num_tokens, heads, value_dim), dtype=v.dtype, device=device) if delta else v
    w = torch.empty((num_tokens, heads, key_dim), dtype=v.dtype, device=device) if delta else k
    local_tile = register_scan.LOCAL_TILE if in_registers else chunk_local.TILE
    chunk_local.chunk_local_kernel[(num_blocks(num_tokens, num_seqs, chunk) * heads,)](
        q, k, v, a, a if b is None else b, a_log, dt_bias, start_loc, scores, decay, beta, u, w, num_seqs, heads, group,
        v.stride(0), a.stride(0), rule.scale, rule.dt_min, rule.dt_max, K=key_dim, V=value_dim, BLOCK_K=block_k,
        BLOCK_V=triton.next_power_of_2(value_dim), CHUNK=chunk, DELTA=delta, **local_tile,
    )  # fmt: skip
    if in_registers:
        scan, tile = register_scan.register_scan_kernel, register_scan.scan_tile(num_seqs * heads, value_dim, num_sms)
    else:
        scan, tile = chunk_scan.chunk_scan_kernel, chunk_scan.TILE
    scan[(triton.cdiv(value_dim, tile["BLOCK_V"]), heads, num_seqs)](
        q, k, v, scores, decay, beta, u, w, a_log if skip is None else skip, states, initial_slots, slots, prefix_lens,
        start_loc, out, heads, group, v.stride(0), out.stride(0), states.stride(0), rule.scale, K=key_dim, V=value_dim,
        BLOCK_K=block_k, CHUNK=chunk, DELTA=delta, HAS_SKIP=skip is not None, **tile,
    )  # fmt: skip


def recurrence_decode(
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
    """Computes one token for each request of `slots` [B] and replaces its state; as `recurrence_extend` otherwise. Rows
    of slot 0 are padding: they touch no state, and their output is 0. `num_sms` of the GPU decides how the work is
    cut."""
    batch, heads, value_dim = v.shape
    if batch == 0:
        return
    assert len(v) == 1 or q.stride(0) == k.stride(0) == v.stride(0), "q, k and v are parts of one row"
    key_dim = k.shape[2]
    tile = state_step.step_tile(batch, heads, value_dim, num_sms)
    state_step.state_step_kernel[(triton.cdiv(value_dim, tile["BLOCK_V"]), heads, batch)](
        q, k, v, a, a if b is None else b, a_log, dt_bias, a_log if skip is None else skip, states, slots, out, heads,
        heads // k.shape[1], v.stride(0), a.stride(0), out.stride(0), states.stride(0), rule.scale, rule.dt_min,
        rule.dt_max, K=key_dim, V=value_dim, BLOCK_K=triton.next_power_of_2(key_dim), DELTA=rule.delta,
        HAS_SKIP=skip is not None, **tile, **pdl.options(),
    )  # fmt: skip


def recurrence_verify(
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
    """Computes T tokens, the same number for each request of `slots` [B], one after the other as `recurrence_decode`
    does. The states are only read; log_decays and betas [T, H] fp32 receive what `commit.commit_states` needs."""
    num_tokens, heads, value_dim = v.shape
    if num_tokens == 0:
        return
    assert len(v) == 1 or q.stride(0) == k.stride(0) == v.stride(0), "q, k and v are parts of one row"
    assert log_decays.is_contiguous() and betas.is_contiguous()
    batch, key_dim = len(slots), k.shape[2]
    tile = state_verify.VERIFY_TILE
    state_verify.state_verify_kernel[(triton.cdiv(value_dim, tile["BLOCK_V"]), heads, batch)](
        q, k, v, a, a if b is None else b, a_log, dt_bias, a_log if skip is None else skip, states, slots, out,
        log_decays, betas, num_tokens // batch, heads, heads // k.shape[1], v.stride(0), a.stride(0), out.stride(0),
        states.stride(0), rule.scale, rule.dt_min, rule.dt_max, K=key_dim, V=value_dim,
        BLOCK_K=triton.next_power_of_2(key_dim), DELTA=rule.delta, HAS_SKIP=skip is not None, **tile, **pdl.options(),
    )  # fmt: skip


RECURRENCE = StepKernels(recurrence_extend, recurrence_decode, recurrence_verify, commit_states)
