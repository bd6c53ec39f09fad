"""Common parts of blocks with a recurrent state: convolution and recurrence of a step, over its requests' states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from sglang.srt.layers.parameter import Scope
from sglang.srt.layers.recurrent.rule import Rule
from sglang.srt.layers.recurrent.step_kernels import ConvKernels, RecurrenceKernels
from sglang.srt.mem_cache.memory_pool import CacheStore

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch
    from sglang.srt.layers.step_rows import DecodeRows, ExtendRows


@dataclass(frozen=True, slots=True)
class Convolution:
    """`norm_heads` leading groups of `head_dim` channels get an L2 norm afterwards."""

    weight: torch.Tensor  # [C, W]
    bias: torch.Tensor | None  # [C]
    norm_heads: int = 0
    head_dim: int = 0


@dataclass(frozen=True, slots=True)
class Gates:
    """Gates of a step, a, b [T, H], and parameters of the layer, a_log, dt_bias, skip [H] fp32. With decays by channel
    a is [T, H, K] and dt_bias [H, K]."""

    a: torch.Tensor
    b: torch.Tensor | None
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    skip: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of this rank, and the order of their channels: [q, k, v], or as Mamba-2 has them [v, k, q]."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    values_first: bool = False

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        return 2 * self.keys + self.values

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, C] -> q, k [T, Hk, K], v [T, H, V]: views."""
        if self.values_first:
            v, k, q = rows.split([self.values, self.keys, self.keys], dim=-1)
        else:
            q, k, v = rows.split([self.keys, self.keys, self.values], dim=-1)
        keys, values = (self.key_heads, self.key_dim), (self.value_heads, self.value_dim)
        return q.unflatten(-1, keys), k.unflatten(-1, keys), v.unflatten(-1, values)


@dataclass(frozen=True, slots=True)
class RecurrentRecord:
    """Implements StateRecord by the inputs of the layer: k tokens of each of B requests. To go on by some of them the
    layer computes them again.

    The alternative is a ring of k states a request. Qwen3-Next's layer would write 2 MiB for each token; its inputs
    are 16.5 KiB, and are read once more."""

    core: RecurrentCore
    x: torch.Tensor  # [T, C]
    conv: Convolution
    gates: Gates
    requests: ExtendRows

    def commit(self, counts: torch.Tensor) -> None:
        num_reqs, width = len(counts), len(self.x) // len(self.requests)
        accepted = torch.arange(width, device=counts.device) < counts[:, None]
        rows = torch.argsort(~accepted.flatten(), stable=True)  # those that stand, one request after the other
        start_loc = torch.zeros(num_reqs + 1, dtype=torch.int32, device=counts.device)
        start_loc[1:] = counts.cumsum(0)
        slots, prefix_lens = self.requests.req_pool_indices[:num_reqs], self.requests.prefix_lens[:num_reqs]
        gates = self.gates
        of_rows = replace(gates, a=gates.a[rows], b=None if gates.b is None else gates.b[rows])
        x = self.x[rows]
        self.core.extend(x, torch.empty_like(x), self.conv, of_rows, (slots, slots, prefix_lens, start_loc))

    def copy(self) -> RecurrentRecord:
        gates, requests = self.gates, self.requests
        return replace(
            self,
            x=self.x.clone(),
            gates=replace(gates, a=gates.a.clone(), b=None if gates.b is None else gates.b.clone()),
            requests=replace(
                requests,
                req_pool_indices=requests.req_pool_indices.clone(),
                prefix_lens=requests.prefix_lens.clone(),
            ),
        )


Ragged = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Ragged layout of B requests with runs of tokens: the rows of states that they begin with and those that they leave
theirs in, [B] int64; the number of tokens before, [B] int32; where each run begins, and the end, [B + 1] int32."""


class RecurrentCore:
    """[T, C] as projected -> [T, H, V], with the states of the batch's requests, which lie by request slot."""

    def __init__(self, scope: Scope, cache: CacheStore, op: str, rule: Rule, heads: Heads) -> None:
        self.cache, self.rule, self.heads = cache, rule, heads
        self.conv: ConvKernels = scope.plan.entry("causal_conv1d")
        self.recurrence: RecurrenceKernels = scope.plan.entry(op)
        self.num_sms = scope.plan.arch.num_sms

    def __call__(self, x: torch.Tensor, conv: Convolution, gates: Gates, batch: ForwardBatch) -> torch.Tensor:
        convolved = torch.empty_like(x, memory_format=torch.contiguous_format)
        out = x.new_empty((len(x), self.heads.value_heads, self.heads.value_dim))
        if batch.decode is not None:  # first: its padding rows may lie over those of the prompts
            self._decode(x, convolved, conv, gates, batch.decode, out)
        if batch.extend is not None:
            rows = batch.extend
            slots = targets = rows.req_pool_indices
            if batch.state_records is not None:
                targets = torch.zeros_like(slots)  # the padding's
                batch.state_records.append(RecurrentRecord(self, x, conv, gates, rows))
            self.extend(x, convolved, conv, gates, (slots, targets, rows.prefix_lens, rows.start_loc), out)
        return out

    def _decode(
        self,
        x: torch.Tensor,
        convolved: torch.Tensor,
        conv: Convolution,
        gates: Gates,
        requests: DecodeRows,
        out: torch.Tensor,
    ) -> None:
        rows, slots, cache = slice(0, len(requests)), requests.req_pool_indices, self.cache
        self.conv.decode(
            x[rows], conv.weight, conv.bias, cache["conv"], slots, convolved[rows], conv.norm_heads, conv.head_dim
        )
        self.recurrence.decode(
            self.rule,
            *self.heads.split(convolved[rows]),
            gates.a[rows],
            None if gates.b is None else gates.b[rows],
            gates.a_log,
            gates.dt_bias,
            gates.skip,
            cache["state"],
            slots,
            out[rows],
            self.num_sms,
        )

    def extend(
        self,
        x: torch.Tensor,
        convolved: torch.Tensor,
        conv: Convolution,
        gates: Gates,
        ragged: Ragged,
        out: torch.Tensor | None = None,
    ) -> None:
        """x [T, C] -> convolved [T, C], out [T, H, V]; the states are those of `ragged`."""
        cache = self.cache
        if out is None:
            out = x.new_empty((len(x), self.heads.value_heads, self.heads.value_dim))
        self.conv.extend(x, conv.weight, conv.bias, cache["conv"], *ragged, convolved, conv.norm_heads, conv.head_dim)
        self.recurrence.extend(
            self.rule,
            *self.heads.split(convolved),
            gates.a,
            gates.b,
            gates.a_log,
            gates.dt_bias,
            gates.skip,
            cache["state"],
            *ragged,
            out,
        )
