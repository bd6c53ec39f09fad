"""Computes compressed cache entries from runs of tokens, which may begin in one step and end in a later one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.compressed.compressor_kernels import CompressorKernels
from sglang.srt.blocks.compressed.reference import KV_COMPRESSOR_OP
from sglang.srt.blocks.compressed.spec import CompressedSparse
from sglang.srt.layers.compressed_step import CompressedStep, TokenRequests
from sglang.srt.layers.ops import LINEAR
from sglang.srt.layers.parameter import Init, Scope, TensorPart
from sglang.srt.mem_cache.memory_pool import CacheStore
from sglang.srt.plan.weight_names import PartKey

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class CompressorRecord:
    """Implements StateRecord: rows of a verify step for later entries, which the state does not include yet.

    Entries of runs that end in rejected tokens need no cleanup: no token sees them before the run is complete, and then
    the token that completes it overwrites them."""

    kernels: CompressorKernels
    rows: torch.Tensor  # [B k, 2, W], k tokens of each request
    state: torch.Tensor
    requests: TokenRequests
    width: int
    """k."""

    def commit(self, counts: torch.Tensor) -> None:
        requests = self.requests.accepted(counts, self.width)
        rows = self.rows[: len(requests.slots)]
        self.kernels.keep(rows, self.state, requests.slots, requests.positions, requests.stops)

    def copy(self) -> CompressorRecord:
        return replace(self, rows=self.rows.clone(), requests=self.requests.copy())


@dataclass(frozen=True, slots=True)
class EntryNorm:
    """Processing of an entry before it is stored: a norm with `weight` [D], and a rotation by rows of `cos_sin`
    [max_pos, rot_dim] fp32 at the position of the run's first token, or, if that is None, by the `angles` numbers in
    the token's row."""

    weight: torch.Tensor
    eps: float
    cos_sin: torch.Tensor | None
    angles: int = 0


def store_entries(
    kernels: CompressorKernels,
    rows: torch.Tensor,
    bias: torch.Tensor | None,
    norm: EntryNorm | None,
    cache: CacheStore,
    state: torch.Tensor,
    batch: ForwardBatch,
    step: CompressedStep,
) -> None:
    """Stores the entries of runs that the step's tokens complete, and keeps in `state` the rows that later entries
    need; in a verify step it adds a record to `batch.state_records` instead. rows [T, 2, W], bias and state: as in
    `reference.compress`."""
    requests = step.requests
    kernels.compress(
        rows,
        bias,
        state,
        requests.slots,
        requests.positions,
        requests.firsts,
        None if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        None if norm is None else norm.cos_sin,
        cache.k,
        batch.slots_of(cache).out_cache_loc,
        angles=0 if norm is None else norm.angles,
    )
    if batch.state_records is None:
        kernels.keep(rows, state, requests.slots, requests.positions, requests.stops)
    else:
        assert batch.extend is not None
        width = len(rows) // len(batch.extend)
        batch.state_records.append(CompressorRecord(kernels, rows, state, requests, width))


class Compressor:
    """Stores entries in `cache` from hidden states [T, H], for tokens that complete a run."""

    def __init__(
        self, scope: Scope, spec: CompressedSparse, dim: int, eps: float, cache: CacheStore, state: CacheStore
    ) -> None:
        self.cache, self.state, self.eps = cache, state, eps
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
        self.kernels = scope.plan.entry(KV_COMPRESSOR_OP)

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, step: CompressedStep, cos_sin: torch.Tensor) -> None:
        rows = self.linear(x, self.weight, None, torch.float32).unflatten(1, (2, -1))
        norm = EntryNorm(self.norm, self.eps, cos_sin)
        store_entries(self.kernels, rows, self.bias, norm, self.cache, self.state["rows"], batch, step)
