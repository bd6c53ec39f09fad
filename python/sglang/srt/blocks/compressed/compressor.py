"""Computes compressed cache entries from runs of tokens, which may begin in one step and end in a later one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.compressed.reference import KV_COMPRESSOR_OP
from sglang.srt.blocks.compressed.spec import CompressedSparse
from sglang.srt.layers.compressed_step import CompressedStep, TokenRequests
from sglang.srt.layers.kept_rows import keep_rows
from sglang.srt.layers.ops import LINEAR
from sglang.srt.layers.packed_entries import Packing, rows_to_pack
from sglang.srt.layers.parameter import Init, Scope, TensorPart
from sglang.srt.mem_cache.memory_pool import CacheStore
from sglang.srt.plan.weight_names import PartKey

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch
    from sglang.srt.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class EntryNorm:
    """Processing of an entry before it is stored: a norm with `weight` [D], and a rotation by rows of `cos_sin`
    [max_pos, rot_dim] fp32 at the position of the run's first token, or, if that is None, by the `angles` numbers in
    the token's row."""

    weight: torch.Tensor
    eps: float
    cos_sin: torch.Tensor | None
    angles: int = 0


class EntryStore:
    """Stores entries in `cache` for runs that a step's tokens complete, and keeps in `state` the rows that later
    entries need.

    Entries of runs that end in rejected tokens need no cleanup: no token sees them before the run is complete, and then
    the token that completes it overwrites them."""

    def __init__(self, plan: Plan, cache: CacheStore, state: CacheStore, packing: Packing | None = None) -> None:
        """`packing`: of the cache, if it does not hold entries as they are."""
        self.cache, self.state, self.packing = cache, state, packing
        self.kernels = plan.entry(KV_COMPRESSOR_OP)

    def __call__(
        self,
        rows: torch.Tensor,
        bias: torch.Tensor | None,
        norm: EntryNorm | None,
        batch: ForwardBatch,
        step: CompressedStep,
    ) -> None:
        """Stores and keeps; a verify step records instead. rows [T,
        2, W] and bias: as in `reference.compress`."""
        requests, packing = step.requests, self.packing
        into, at = self.cache.k, batch.slots_of(self.cache).out_cache_loc
        if packing is not None:
            into = rows_to_pack(packing, len(rows), rows.device)
            at, slots = step.completed(batch, self.cache, self._rate(bias))
        self.kernels.compress(
            rows,
            bias,
            self.state["rows"],
            requests.slots,
            requests.positions,
            requests.firsts,
            None if norm is None else norm.weight,
            0.0 if norm is None else norm.eps,
            None if norm is None else norm.cos_sin,
            into,
            at,
            angles=0 if norm is None else norm.angles,
        )
        if packing is not None:
            packing(into, self.cache, slots)
        keep_rows(batch, self.keep, requests, rows)

    def _rate(self, bias: torch.Tensor | None) -> int:
        """Returns the tokens of a run: each has a row of the bias; means have one state for each."""
        return self.state["rows"].shape[1] if bias is None else len(bias)

    def keep(self, rows: torch.Tensor, requests: TokenRequests) -> None:
        """Keeps each request's last rows for later entries."""
        self.kernels.keep(rows, self.state["rows"], requests.slots, requests.positions, requests.stops)


class Compressor:
    """Stores entries in `cache` from hidden states [T, H], for tokens that complete a run."""

    def __init__(
        self,
        scope: Scope,
        spec: CompressedSparse,
        dim: int,
        eps: float,
        cache: CacheStore,
        state: CacheStore,
        packing: Packing | None,
    ) -> None:
        self.cache, self.eps = cache, eps
        self.store = EntryStore(scope.plan, cache, state, packing)
        width, rate = spec.overlap * dim, spec.rate
        matrix = scope.matrix()
        parts = {
            PartKey(name): TensorPart((width, matrix.cols), dest=(slice(i * width, (i + 1) * width), slice(None)))
            for i, name in enumerate(matrix.parts)
        }
        self.weight = scope.param("weight", (2 * width, matrix.cols), parts)
        self.bias = scope.sub("places").param("ape", (rate, width), init=Init.ZEROS, dtype=torch.float32)
        self.norm = scope.sub("norm").param("weight", (dim,), init=Init.ONES)
        self.linear = scope.plan.entry(LINEAR)

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, step: CompressedStep, cos_sin: torch.Tensor) -> None:
        rows = self.linear(x, self.weight, None, torch.float32).unflatten(1, (2, -1))
        self.store(rows, self.bias, EntryNorm(self.norm, self.eps, cos_sin), batch, step)
