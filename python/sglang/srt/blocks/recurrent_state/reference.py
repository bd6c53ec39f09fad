"""Recurrent layers in plain torch: the CPU kernels, and the references for tests.

Math is done in fp32 (fp64 for fp64 inputs) and cast back. Tokens are processed one by one, so the result does not
depend on how a prompt is cut into steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from sglang.srt.blocks.recurrent_state.rule import Rule
from sglang.srt.blocks.recurrent_state.step_kernels import StepKernels, VerifiedRows
from sglang.srt.kernels.op import Op

L2_EPS = 1e-6


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype is torch.float64 else x.float()


def gates(
    rule: Rule, a: torch.Tensor, b: torch.Tensor | None, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (log decay, weight of the new value), each [.., H], of a, b [.., H], a_log and dt_bias [H]. With decays
    by channel a and the log decay are [.., H, K] and dt_bias [H, K]."""
    if rule.by_channel:
        assert b is not None
        return channel_decay(rule, a, a_log, dt_bias), _wide(b).sigmoid()
    step = F.softplus(_wide(a) + _wide(dt_bias))
    rate = -_wide(a_log).exp()
    if rule.delta:
        assert b is not None
        return rate * step, _wide(b).sigmoid()
    step = step.clamp(rule.dt_min, rule.dt_max)
    return rate * step, step


def channel_decay(rule: Rule, a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """Returns the log decay of each channel [.., H, K] of a [.., H, K], a_log [H], dt_bias [H, K]."""
    rate, shifted = _wide(a_log).exp()[:, None], _wide(a) + _wide(dt_bias)
    if rule.lower_bound:
        return rule.lower_bound * (rate * shifted).sigmoid()
    return -rate * F.softplus(shifted)


def recurrence(
    rule: Rule,
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    skip: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Processes one token; returns (output [.., H, V], the new state). state [.., H, K, V], q and k [.., Hk, K], v [..,
    H, V], log_decay [.., H] or by channel [.., H, K], beta [.., H]."""
    group = v.shape[-2] // k.shape[-2]
    q, k = (_wide(x).repeat_interleave(group, dim=-2) for x in (q, k))
    v = _wide(v)
    decay = log_decay.exp()
    state = state * (decay[..., None] if rule.by_channel else decay[..., None, None])
    new = v - torch.einsum("...k,...kv->...v", k, state) if rule.delta else v
    state = state + k[..., None] * (new * beta[..., None])[..., None, :]
    out = torch.einsum("...k,...kv->...v", q, state) * rule.scale
    return (out if skip is None else out + v * _wide(skip)[:, None]), state


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
    """Computes what `kernels.recurrence.recurrence_extend` does."""
    log_decay, beta = gates(rule, a, b, a_log, dt_bias)
    bounds = start_loc.tolist()
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        if start == end:
            continue
        before = _wide(states[initial_slots[i]])
        state = before if prefix_lens[i] > 0 else torch.zeros_like(before)
        for t in range(start, end):
            o, state = recurrence(rule, state, q[t], k[t], v[t], log_decay[t], beta[t], skip)
            out[t] = o.to(out.dtype)
        states[slots[i]] = state.to(states.dtype)


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
    """Computes what `kernels.recurrence.recurrence_decode` does."""
    log_decay, beta = gates(rule, a, b, a_log, dt_bias)
    o, state = recurrence(rule, _wide(states[slots]), q, k, v, log_decay, beta, skip)
    live = slots > 0
    out.copy_(torch.where(live[:, None, None], o, torch.zeros_like(o)))
    states[slots[live]] = state[live].to(states.dtype)


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
    """Computes what `kernels.recurrence.recurrence_verify` does."""
    for kept, values in zip((log_decays, betas), gates(rule, a, b, a_log, dt_bias), strict=True):
        kept.copy_(values)
    state, live = _wide(states[slots]), (slots > 0)[:, None, None]
    width = len(v) // len(slots)
    for rows in torch.arange(len(v), device=v.device).view(-1, width).unbind(1):
        o, state = recurrence(rule, state, q[rows], k[rows], v[rows], log_decays[rows], betas[rows], skip)
        state = _wide(state.to(states.dtype))
        out[rows] = torch.where(live, o, torch.zeros_like(o)).to(out.dtype)


def commit_states(
    rule: Rule,
    layers: Sequence[VerifiedRows],
    addresses: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    width: int,
) -> None:
    """Computes what `kernels.commit.commit_states` does."""
    for layer in layers:
        for place in range(width):
            requests = ((counts > place) & (slots > 0)).nonzero().flatten()
            rows = requests * width + place
            state, k, v = _wide(layer.states[slots[requests]]), layer.k[rows], layer.v[rows]
            _, state = recurrence(rule, state, k, k, v, layer.log_decays[rows], layer.betas[rows])
            layer.states[slots[requests]] = state.to(layer.states.dtype)


def _convolved(
    window: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, norm_heads: int, head_dim: int
) -> torch.Tensor:
    """Returns the convolution [T, C] of window [W - 1 + T, C] by weight [C, W]."""
    width = weight.shape[1]
    tokens = window.shape[0] - width + 1
    total = sum(_wide(window[tap : tap + tokens]) * _wide(weight[:, tap]) for tap in range(width))
    assert isinstance(total, torch.Tensor)
    y = F.silu(total if bias is None else total + _wide(bias))
    if norm_heads:
        heads = y[:, : norm_heads * head_dim].unflatten(-1, (norm_heads, head_dim))
        heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + L2_EPS)
        y = torch.cat((heads.flatten(1), y[:, norm_heads * head_dim :]), dim=-1)
    return y


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
    """Computes what `kernels.causal_conv.causal_conv_extend` does."""
    bounds = start_loc.tolist()
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        if start == end:
            continue
        before = states[initial_slots[i]]
        if prefix_lens[i] <= 0:
            before = torch.zeros_like(before)
        window = torch.cat((before.to(x.dtype), x[start:end]))
        out[start:end] = _convolved(window, weight, bias, norm_heads, head_dim).to(out.dtype)
        states[slots[i]] = window[window.shape[0] - before.shape[0] :].to(states.dtype)


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
    """Computes what `kernels.causal_conv.causal_conv_decode` does."""
    for i, slot in enumerate(slots.tolist()):
        before = states[slot] if slot > 0 else torch.zeros_like(states[slot])
        window = torch.cat((before.to(x.dtype), x[i : i + 1]))
        out[i] = _convolved(window, weight, bias, norm_heads, head_dim)[0].to(out.dtype)
        if slot > 0:
            states[slot] = window[1:].to(states.dtype)


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
    """Computes what `kernels.causal_conv.causal_conv_verify` does."""
    kept.copy_(x)
    width = len(x) // len(slots)
    for i, slot in enumerate(slots.tolist()):
        before = states[slot] if slot > 0 else torch.zeros_like(states[slot])
        rows = slice(i * width, (i + 1) * width)
        window = torch.cat((before.to(x.dtype), x[rows]))
        out[rows] = _convolved(window, weight, bias, norm_heads, head_dim).to(out.dtype)


def commit_conv(
    layers: Sequence[VerifiedRows], addresses: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor, width: int
) -> None:
    """Computes what `kernels.commit.commit_conv` does."""
    for layer in layers:
        for i, (slot, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True)):
            if slot > 0:
                before = layer.conv_states[slot]
                window = torch.cat((before, layer.x[i * width : i * width + count].to(before.dtype)))
                layer.conv_states[slot] = window[count:]


def gated_rmsnorm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    gate_first: bool = False,
    sigmoid: bool = False,
) -> torch.Tensor:
    """Returns [T, groups * size] of x [T, groups, size], gate [T, groups * size]: the norm of each group, times
    silu(gate) or with `sigmoid` sigmoid(gate); with `gate_first` the gate is applied before the norm. weight: [size]
    for all groups, or [groups * size]."""
    values, gate = _wide(x), _wide(gate)
    factor = (gate.sigmoid() if sigmoid else F.silu(gate)).view(x.shape)
    if gate_first:
        values = values * factor
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    values = values * _wide(weight).view(-1, x.shape[-1])
    return (values if gate_first else values * factor).flatten(1).to(x.dtype)


CAUSAL_CONV = StepKernels(causal_conv_extend, causal_conv_decode, causal_conv_verify, commit_conv)
RECURRENCE = StepKernels(recurrence_extend, recurrence_decode, recurrence_verify, commit_states)

GATED_RMSNORM = Op("gated_rmsnorm", gated_rmsnorm)
CAUSAL_CONV1D = Op("causal_conv1d", CAUSAL_CONV)
RECURRENCES = {name: Op(name, RECURRENCE) for name in ("gated_delta_rule", "kimi_delta_rule", "state_space_duality")}
