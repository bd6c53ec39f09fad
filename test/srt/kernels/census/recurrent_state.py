"""Launches of blocks/recurrent_state, by blocks/gated_delta and blocks/mamba2."""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.blocks.gated_delta.spec import GatedDelta
from sglang.srt.blocks.mamba2.spec import Mamba2
from sglang.srt.blocks.recurrent_state.kernels import causal_conv, gated_norm, recurrence
from sglang.srt.blocks.recurrent_state.rule import Rule, gated_delta_rule
from sglang.srt.blocks.recurrent_state.step_kernels import StepKernels, VerifiedRows
from sglang.srt.hardware.arch import ArchTraits

from .inputs import BF16, REQUESTS, empty


def launch_gated_delta(mixer: GatedDelta, tp_size: int, arch: ArchTraits) -> None:
    heads = (mixer.key_heads // tp_size, mixer.value_heads // tp_size, mixer.key_dim, mixer.value_dim)
    _recurrent(*heads, gated_delta_rule(mixer.key_dim), mixer.conv_kernel, False, arch)


def launch_mamba2(mixer: Mamba2, tp_size: int, arch: ArchTraits) -> None:
    heads = (mixer.num_groups // tp_size, mixer.num_heads // tp_size, mixer.state_dim, mixer.head_dim)
    _recurrent(*heads, Rule(delta=False), mixer.conv_kernel, mixer.conv_bias, arch)


def _recurrent(
    key_heads: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    rule: Rule,
    width: int,
    conv_bias: bool,
    arch: ArchTraits,
) -> None:
    """With states of both types; q, k and v are parts of what the convolution leaves, which is a part of a product."""
    keys, values, delta = key_heads * key_dim, heads * value_dim, rule.delta
    channels = 2 * keys + values
    conv = (empty(channels, width), empty(channels) if conv_bias else None, empty(REQUESTS + 1, width - 1, channels))
    heads_with_norm = (2 * key_heads, key_dim) if delta else (0, 0)
    per_head, skip = empty(heads, dtype=torch.float32), None if delta else empty(heads, dtype=torch.float32)
    slots = empty(8, dtype=torch.int64)
    ragged = (slots, slots, empty(8, dtype=torch.int32), empty(9, dtype=torch.int32))
    for tokens in (8, 2000):
        if delta:
            x, gate = empty(tokens, channels + values).split([channels, values], -1)
            b, a = empty(tokens, 2 * heads).split([heads, heads], -1)
        else:
            (gate, x, a), b = empty(tokens, values + channels + heads).split([values, channels, heads], -1), None
        out = empty(tokens, channels)
        causal_conv.causal_conv_extend(x, *conv, *ragged, out, *heads_with_norm)
        sizes = (key_dim, key_dim, value_dim)
        parts = zip(out.split([keys, keys, values], -1), sizes, strict=True)
        q, k, v = (part.unflatten(-1, (-1, dim)) for part, dim in parts)
        given = (rule, q, k, v, a, b, per_head, per_head, skip)
        result = empty(tokens, heads, value_dim)
        for dtype in (torch.float32, BF16):
            states = empty(REQUESTS + 1, heads, key_dim, value_dim, dtype=dtype)
            for num_sms in (1, 8 * heads * -(-value_dim // 32), 1 << 20):  # each number of columns
                recurrence.recurrence_extend(*given, states, *ragged, result, num_sms)
            if tokens == 8:
                causal_conv.causal_conv_decode(x, *conv, slots, out, *heads_with_norm)
                for num_sms in (1, 1000):
                    recurrence.recurrence_decode(*given, states, slots, result, num_sms)
                kept = verified_rows(x, k, v, states, conv[-1], (heads,))
                launch_verify(recurrence.RECURRENCE, x, given, kept, conv, out, result, heads_with_norm)
        groups, weight = (heads, empty(value_dim)) if delta else (key_heads, empty(values))
        for sigmoid in (False, True) if delta else (False,):
            gated_norm.gated_rmsnorm(
                result.view(tokens, groups, -1), gate, weight, 1e-6, gate_first=not delta, sigmoid=sigmoid
            )


def verified_rows(
    x: torch.Tensor, k: torch.Tensor, v: torch.Tensor, states: torch.Tensor, conv: torch.Tensor, decays: tuple[int, ...]
) -> VerifiedRows:
    tokens, heads = v.shape[:2]
    wide = empty(tokens, *decays, dtype=torch.float32), empty(tokens, heads, dtype=torch.float32)
    return VerifiedRows(states, conv, empty(*x.shape), k, v, *wide)


def launch_verify(
    kernels: StepKernels,
    x: torch.Tensor,
    given: tuple[Any, ...],
    kept: VerifiedRows,
    conv: tuple[Any, ...],
    out: torch.Tensor,
    result: torch.Tensor,
    norm: tuple[int, int],
) -> None:
    """Two tokens of each of four requests."""
    slots, counts, addresses = empty(4, dtype=torch.int64), empty(4, dtype=torch.int32), empty(1, 7, dtype=torch.int64)
    causal_conv.causal_conv_verify(x, *conv, slots, out, kept.x, *norm)
    causal_conv.CAUSAL_CONV.commit([kept], addresses, slots, counts, 2)
    kernels.verify(*given, kept.states, slots, result, kept.log_decays, kept.betas)
    kernels.commit(given[0], [kept], addresses, slots, counts, 2)
