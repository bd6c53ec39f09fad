"""Common parts of recurrent blocks: convolution and recurrence of a step over its requests' states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.recurrent_state.records import RecurrentRecords, join_records
from sglang.srt.blocks.recurrent_state.reference import CAUSAL_CONV1D, RECURRENCES
from sglang.srt.blocks.recurrent_state.rule import Rule
from sglang.srt.blocks.recurrent_state.step_kernels import VerifiedRows
from sglang.srt.layers.parameter import Scope
from sglang.srt.mem_cache.memory_pool import CacheStore

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch
    from sglang.srt.layers.step_rows import DecodeRows, ExtendRows


@dataclass(frozen=True, slots=True)
class Convolution:
    """Parameters of a causal convolution. The first `norm_heads` groups of `head_dim` channels get an L2 norm
    afterwards."""

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
    """This rank's heads and the order of their channels: [q, k, v], or for Mamba-2 [v, k, q]."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    values_first: bool = False

    @property
    def keys(self) -> int:
        """Returns the number of key channels."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Returns the number of value channels."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Returns the number of channels of q, k and v."""
        return 2 * self.keys + self.values

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns views q, k [T, Hk, K], v [T, H, V] of rows [T, C]."""
        if self.values_first:
            v, k, q = rows.split([self.values, self.keys, self.keys], dim=-1)
        else:
            q, k, v = rows.split([self.keys, self.keys, self.values], dim=-1)
        keys, values = (self.key_heads, self.key_dim), (self.value_heads, self.value_dim)
        return q.unflatten(-1, keys), k.unflatten(-1, keys), v.unflatten(-1, values)


Ragged = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Ragged layout of B requests with runs of tokens: the slots of their initial states and of their final states, [B]
int64; the number of tokens before, [B] int32; the start of each run, and the end, [B + 1] int32."""


class RecurrentCore:
    """Convolution and recurrence of a layer, [T, C] -> [T, H, V]. The requests' states lie by request slot."""

    def __init__(self, scope: Scope, cache: CacheStore, op: str, rule: Rule, heads: Heads) -> None:
        self.cache, self.rule, self.heads = cache, rule, heads
        self.conv = scope.plan.entry(CAUSAL_CONV1D)
        self.recurrence = scope.plan.entry(RECURRENCES[op])
        self.num_sms = scope.plan.arch.num_sms
        self.max_rows = scope.plan.decode_rows
        self._addresses: dict[tuple[int, ...], torch.Tensor] = {}
        """Tensor addresses of layers whose records begin with this one, as they are on the device."""
        self._kept: tuple[torch.Tensor, ...] = (torch.empty(0),)

    def __call__(self, x: torch.Tensor, conv: Convolution, gates: Gates, batch: ForwardBatch) -> torch.Tensor:
        out = x.new_empty((len(x), self.heads.value_heads, self.heads.value_dim))
        if batch.state_records is not None:
            assert batch.extend is not None and batch.decode is None
            rows = self._verify(x, conv, gates, batch.extend, out)
            commits = self.conv.commit, self.recurrence.commit
            record = RecurrentRecords(*commits, self.rule, batch.extend, [rows], self._addresses)
            join_records(batch.state_records, record)
            return out
        convolved = torch.empty_like(x, memory_format=torch.contiguous_format)
        if batch.decode is not None:  # first: its padding rows may lie over those of the prompts
            self._decode(x, convolved, conv, gates, batch.decode, out)
        if batch.extend is not None:
            requests = batch.extend
            slots = requests.req_pool_indices
            self._extend(x, convolved, conv, gates, (slots, slots, requests.prefix_lens, requests.start_loc), out)
        return out

    def _verify(
        self, x: torch.Tensor, conv: Convolution, gates: Gates, requests: ExtendRows, out: torch.Tensor
    ) -> VerifiedRows:
        """Computes a verify step without changing the states, and returns its record."""
        slots, cache, kept = requests.req_pool_indices, self.cache, self._kept_rows(x)
        kept_x, convolved, log_decays, betas = (tensor[: len(x)] for tensor in kept)
        self.conv.verify(
            x, conv.weight, conv.bias, cache["conv"], slots, convolved, kept_x, conv.norm_heads, conv.head_dim
        )
        q, k, v = self.heads.split(convolved)
        self.recurrence.verify(
            self.rule,
            q,
            k,
            v,
            gates.a,
            gates.b,
            gates.a_log,
            gates.dt_bias,
            gates.skip,
            cache["state"],
            slots,
            out,
            log_decays,
            betas,
        )
        return VerifiedRows(cache["state"], cache["conv"], kept_x, k, v, log_decays, betas)

    def _kept_rows(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns buffers for x and the convolved x [N, C], decays and gates in fp32, shared by all graphs of verify
        steps, which would otherwise keep one each. N is the largest step so far; earlier records keep their own
        buffers."""
        if len(x) > len(self._kept[0]):
            rows, heads = max(len(x), self.max_rows), self.heads
            decays = (heads.value_heads, heads.key_dim) if self.rule.by_channel else (heads.value_heads,)
            wide = torch.promote_types(x.dtype, torch.float32)
            self._kept = (
                x.new_empty((rows, heads.channels)),
                x.new_empty((rows, heads.channels)),
                x.new_empty((rows, *decays), dtype=wide),
                x.new_empty((rows, heads.value_heads), dtype=wide),
            )
        return self._kept

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

    def _extend(
        self,
        x: torch.Tensor,
        convolved: torch.Tensor,
        conv: Convolution,
        gates: Gates,
        ragged: Ragged,
        out: torch.Tensor,
    ) -> None:
        """Fills convolved [T, C] and out [T, H, V] from x [T, C]; `ragged` gives the states."""
        cache = self.cache
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
            self.num_sms,
        )
