"""Launches of blocks/kimi_delta."""

from __future__ import annotations

import itertools

import torch

from sglang.srt.blocks.kimi_delta.kernels import channel_recurrence
from sglang.srt.blocks.kimi_delta.spec import KimiDelta
from sglang.srt.blocks.recurrent_state.kernels import causal_conv, gated_norm
from sglang.srt.blocks.recurrent_state.rule import kimi_delta_rule
from sglang.srt.hardware.arch import ArchTraits

from .inputs import BF16, REQUESTS, empty
from .recurrent_state import launch_verify, verified_rows


def launch_kimi_delta(mixer: KimiDelta, tp_size: int, arch: ArchTraits) -> None:
    """With states of both types, with and without a bound of the decays."""
    heads, dim, width = mixer.num_heads // tp_size, mixer.head_dim, mixer.width(tp_size)
    conv = (empty(3 * width, mixer.conv_kernel), None, empty(REQUESTS + 1, mixer.conv_kernel - 1, 3 * width))
    slots, a_log = empty(8, dtype=torch.int64), empty(heads, dtype=torch.float32)
    ragged = (slots, slots, empty(8, dtype=torch.int32), empty(9, dtype=torch.int32))
    for tokens, dtype, bound in itertools.product((8, 2000), (torch.float32, BF16), (0.0, -5.0)):
        x, out, result = empty(tokens, 3 * width), empty(tokens, 3 * width), empty(tokens, heads, dim)
        causal_conv.causal_conv_extend(x, *conv, *ragged, out, 2 * heads, dim)
        q, k, v = (part.unflatten(-1, (heads, dim)) for part in out.split([width] * 3, -1))
        gates = (empty(tokens, heads, dim), empty(tokens, heads), a_log, empty(heads, dim, dtype=torch.float32), None)
        given = (kimi_delta_rule(dim, bound), q, k, v, *gates)
        states = empty(REQUESTS + 1, heads, dim, dim, dtype=dtype)
        channel_recurrence.channel_recurrence_extend(*given, states, *ragged, result)
        if tokens == 8:
            causal_conv.causal_conv_decode(x, *conv, slots, out, 2 * heads, dim)
            for num_sms in (1, 1000):
                channel_recurrence.channel_recurrence_decode(*given, states, slots, result, num_sms)
            kept = verified_rows(x, k, v, states, conv[-1], (heads, dim))
            launch_verify(channel_recurrence.CHANNEL_RECURRENCE, x, given, kept, conv, out, result, (2 * heads, dim))
        gated_norm.gated_rmsnorm(result, empty(tokens, width), empty(dim), 1e-6, sigmoid=True)
