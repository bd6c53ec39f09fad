"""Random inputs of recurrent layers, and the judge: the recurrence in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sglang.srt.blocks.recurrent_state import reference
from sglang.srt.blocks.recurrent_state.rule import Rule, gated_delta_rule, kimi_delta_rule

DELTA, SSD = "delta", "ssd"
CHANNELS, BOUNDED = "channels", "bounded channels"
"""Kimi delta attention, without and with a lower bound of the decays."""
UNUSED_SLOTS = 2
"""Behind those of the requests: nothing may touch them."""


@dataclass(frozen=True)
class Problem:
    """Arguments of `recurrence_extend` in its order; q, k, v are parts of one tensor of rows."""

    rule: Rule
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor | None
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    skip: torch.Tensor | None
    states: torch.Tensor
    initial_slots: torch.Tensor
    slots: torch.Tensor
    prefix_lens: torch.Tensor
    start_loc: torch.Tensor
    out: torch.Tensor

    def extend(self, run: object, **more: object) -> tuple[torch.Tensor, torch.Tensor]:
        """-> (out [T, H, V], states after), of copies."""
        out, states = torch.zeros_like(self.out), self.states.clone()
        given = (self.rule, self.q, self.k, self.v, self.a, self.b, self.a_log, self.dt_bias, self.skip)
        run(*given, states, self.initial_slots, self.slots, self.prefix_lens, self.start_loc, out, **more)  # type: ignore[operator]
        return out, states

    def decode(self, run: object, slots: torch.Tensor, **more: object) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows as one token each of `slots`."""
        out, states = torch.full_like(self.out, 7.0), self.states.clone()
        given = (self.rule, self.q, self.k, self.v, self.a, self.b, self.a_log, self.dt_bias, self.skip)
        run(*given, states, slots, out, **more)  # type: ignore[operator]
        return out, states

    def exact(self) -> Problem:
        """The same numbers in fp64."""

        def wide(x: torch.Tensor | None) -> torch.Tensor | None:
            return x.double() if x is not None and x.is_floating_point() else x

        return replace(
            self, **{name: wide(getattr(self, name)) for name in self.__dataclass_fields__ if name != "rule"}
        )


def problem(
    kind: str,
    lens: Sequence[int],
    prefixes: Sequence[int],
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    decay: str = "some",
    repeated: bool = False,
    lead: int = 0,
    device: str = "cpu",
) -> Problem:
    """`heads` of keys and values, `dims` of a key and a value. `decay`: "none", "some" or "strong". `repeated`: all
    keys are one. `lead`: rows before the first sequence's."""
    (key_heads, value_heads), (key_dim, value_dim), total = heads, dims, lead + sum(lens)
    width = 2 * key_heads * key_dim + value_heads * value_dim
    rows = torch.randn(total, width)
    q, k, v = rows.split([key_heads * key_dim, key_heads * key_dim, value_heads * value_dim], dim=-1)
    if repeated:
        k.copy_(k[:1].expand_as(k))
    by_channel = kind in (CHANNELS, BOUNDED)
    if kind != SSD:
        for part in (q, k):
            heads_of = part.unflatten(-1, (key_heads, key_dim))
            part.copy_((heads_of / heads_of.norm(dim=-1, keepdim=True)).flatten(1))
    rows = rows.to(dtype).to(device)
    q, k, v = rows.split([key_heads * key_dim, key_heads * key_dim, value_heads * value_dim], dim=-1)
    shift = {"none": -30.0, "some": 0.0, "strong": 6.0}[decay]
    gates = torch.randn(total, 2 * value_heads)
    gates[:, :value_heads] += 0.0 if kind == SSD and decay == "none" else shift
    gates = gates.to(dtype).to(device)
    a, dt_bias = gates[:, :value_heads], torch.randn(value_heads)
    if by_channel:
        a = (torch.randn(total, value_heads, key_dim) + shift).to(dtype).to(device)
        dt_bias = torch.randn(value_heads, key_dim)
    slots = torch.randperm(len(lens)) + 1
    a_log = torch.randn(value_heads) - (40.0 if kind == SSD and decay == "none" else 0.0)
    return Problem(
        _rule(kind, key_dim),
        q.unflatten(-1, (key_heads, key_dim)),
        k.unflatten(-1, (key_heads, key_dim)),
        v.unflatten(-1, (value_heads, value_dim)),
        a,
        gates[:, value_heads:] if kind != SSD else None,
        a_log.to(device),
        dt_bias.to(device),
        torch.randn(value_heads).to(device) if kind == SSD else None,
        torch.randn(len(lens) + 1 + UNUSED_SLOTS, value_heads, key_dim, value_dim).to(state_dtype).to(device),
        slots.to(torch.int64).to(device),
        slots.to(torch.int64).to(device),
        torch.tensor(prefixes, dtype=torch.int32).to(device),
        (torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32) + lead).to(device),
        torch.empty(total, value_heads, value_dim, dtype=dtype, device=device),
    )


def _rule(kind: str, key_dim: int) -> Rule:
    if kind == SSD:
        return Rule(delta=False, dt_min=0.001)
    if kind == DELTA:
        return gated_delta_rule(key_dim)
    return kimi_delta_rule(key_dim, -5.0 if kind == BOUNDED else 0.0)


def judge(given: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, states) of the recurrence in fp64."""
    return given.exact().extend(reference.recurrence_extend)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The error's norm over the norm of what is right."""
    difference = (actual.double() - expected).norm()
    return float(difference / expected.norm().clamp_min(1e-30))


def check_extend(given: Problem, run: object, tolerance: float, lead: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """What a kernel makes of prompts is right: the relative errors of its rows, without `lead` ones before the first
    sequence's, and of its states are below the tolerance. Returns both."""
    out, states = given.extend(run)
    expected_out, expected_states = judge(given)
    assert relative(out[lead:], expected_out[lead:]) < tolerance
    assert relative(states, expected_states) < tolerance
    return out, states
