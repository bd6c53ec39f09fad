"""Absorbed latent attention (MLA) with FlashInfer's kernels (flashinfer-python 0.6 and 0.7): FA3's on GPUs with wgmma,
elsewhere FA2's, which need no more than 99 KB of shared memory. Imported only when the plan chooses it.

As in `flashinfer_backend` the wrappers plan on the host, and page indices are gathered on the device. Keys and values
are views of the latent cache, which is read in place. With DCP (`token_shares`) a page holds only this rank's entries,
and prompts read gathered tokens, each of which is a page of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper

from sglang.srt.errors import UserError
from sglang.srt.layers.attention.flashinfer_backend import (
    PLAN_BYTES,
    PLANS_AT_ONCE,
    PlannedWrapper,
    WrapperPlan,
    library_kernels,
)
from sglang.srt.layers.attention.page_table import gather_pages
from sglang.srt.layers.attention.workspaces import zero_workspace
from sglang.srt.mem_cache.memory_pool import storage_dtype

if TYPE_CHECKING:
    from sglang.srt.layers.attention.attention_layer import AttentionLayer
    from sglang.srt.layers.step_rows import DecodeRows, ExtendRows
    from sglang.srt.plan.layer_spec import AttentionShape, AttentionSite
    from sglang.srt.plan.plan import Plan

WORKSPACE_BYTES = 128 << 20
MAX_WORKS, WORK_ROWS = 16384, 128
"""Capacity of the library planner's lists, which it does not check: tiles of WORK_ROWS queries times heads, and two
more per SM."""
DCP_SHARDED = -1
"""Index of the row table of DCP-sharded caches."""


class FlashInferMLABackend:
    """Implements PartBackend for 16-bit caches. All wrappers share one workspace: prompts and decoding requests of a
    step are both planned before either runs, and run one after the other."""

    reads_new_tokens = True

    def __init__(self, plan: Plan, device: torch.device | str) -> None:
        self._plan = plan
        self._workspace = zero_workspace(WORKSPACE_BYTES, device)

    def decode_builder(self, site: AttentionSite) -> FlashInferMLADecode:
        return FlashInferMLADecode(_Options(self._plan, site.shape, self._plan.page_size), self._workspace)

    def part_builder(self, shape: AttentionShape, max_rows: int) -> FlashInferMLADecode:
        share = self._plan.page_size // self._plan.ranks.dcp_size
        return FlashInferMLADecode(_Options(self._plan, shape, share, DCP_SHARDED), self._workspace)

    def extend_builder(self, site: AttentionSite) -> FlashInferMLAExtend:
        pages = (self._plan.page_size, 0) if site.dcp_size == 1 else (1, DCP_SHARDED)
        return FlashInferMLAExtend(_Options(self._plan, site.shape, *pages), self._workspace)


class _Options:
    """Options for planning wrappers."""

    def __init__(self, plan: Plan, shape: AttentionShape, page_size: int, table: int = 0) -> None:
        scales = {mixer.softmax_scale for layer in plan.description.layers if (mixer := layer.mixer.latents)}
        assert len(scales) <= 1, "one plan of a step serves all layers"
        self.scale = next(iter(scales), 1.0)  # a stage of a hybrid may have no such layer: nothing runs what is planned
        self.rank, self.page_size, self.table = shape.v_head_dim, page_size, table
        self.shape = (shape.num_heads, self.rank, shape.head_dim - self.rank, page_size)
        self.dtypes = (getattr(torch, plan.dtype), storage_dtype(plan.kv_cache_dtype))
        self.max_pages_each = -(-plan.context_len // plan.page_size)
        self.kernels = library_kernels(plan.arch)
        self.max_works = MAX_WORKS - 2 * plan.arch.num_sms

    def lists(self, rows: DecodeRows | ExtendRows, new_lens: Sequence[int]) -> _Lists:
        pages = gather_pages(rows, self.table, self.page_size, entered=self.table == DCP_SHARDED)
        return _Lists.of(new_lens, pages.indptr, pages.indices, torch.tensor(rows.seq_lens_cpu, dtype=torch.int32))

    def plan(self, wrapper: PlannedWrapper, lists: _Lists, causal: bool) -> WrapperPlan:
        """Plans a wrapper. Raises UserError for more tokens than the library can plan."""
        tokens, heads = int(lists.starts[-1]), self.shape[0]
        if len(lists.lens) + tokens * heads // WORK_ROWS > self.max_works:
            raise UserError(
                f"FlashInfer cannot plan {tokens:,} new tokens of {heads} heads in a step; use --chunked-prefill-size "
                f"{self.max_works * WORK_ROWS // heads // 2} or --attention-backend triton"
            )
        return wrapper.plan(
            lists.starts, lists.indptr, lists.indices, lists.lens, *self.shape, causal, self.scale, *self.dtypes
        )

    def run(self, plan: WrapperPlan, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor, **sums: Any) -> None:
        """Runs a plan on q [T, H, rank + rope]: absorbed queries, whose last dims carry RoPE."""
        latents = layer.cache.k[:, 0].unflatten(0, (-1, self.page_size))
        rank = self.rank
        plan.run(q[..., :rank], q[..., rank:], latents[..., :rank], latents[..., rank:], out=out, **sums)

    def wrapper(self, workspace: torch.Tensor, lists: torch.Tensor, **buffers: Any) -> PlannedWrapper:
        wrapper = BatchMLAPagedAttentionWrapper(workspace, backend=self.kernels, **buffers)
        return _LatentWrapper(wrapper, torch.cuda.Event() if workspace.is_cuda else None, lists, bool(buffers))


class _LatentWrapper(PlannedWrapper):
    """A wrapper for latents, which has no method to replace its lists as FlashInfer's others have.

    In 0.6 it has an attribute for them. From 0.7 on each plan makes an object that has them, which outside of graphs
    always allocates its own; in graphs it takes those of the object before it.
    """

    def __init__(self, wrapper: Any, copied: torch.cuda.Event | None, lists: torch.Tensor, in_graphs: bool) -> None:
        super().__init__(wrapper, copied)
        wrapper._int_workspace_buffer = lists
        self._lists, self._in_graphs = lists, in_graphs

    def plan(self, *args: Any, **options: Any) -> WrapperPlan:
        plan = super().plan(*args, **options)
        planned = getattr(self._wrapper, "_planned_backend", None)
        if planned is None or not self._in_graphs or planned._int_workspace_buffer is self._lists:
            return plan
        planned._int_workspace_buffer = self._lists  # before any launch is captured
        return super().plan(*args, **options)


@dataclass(frozen=True, slots=True)
class _Lists:
    """A wrapper's planning inputs, int32, on the host except `indices`: starts [R + 1] of queries, indptr [R + 1] of
    pages, indices [indptr[-1]], lens [R]."""

    starts: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    lens: torch.Tensor

    @staticmethod
    def of(new_lens: Sequence[int], indptr: torch.Tensor, indices: torch.Tensor, lens: torch.Tensor) -> _Lists:
        starts = torch.from_numpy(np.concatenate(([0], np.cumsum(new_lens))).astype(np.int32))
        return _Lists(starts, indptr, indices, lens)


class FlashInferMLAExtend:
    """Implements ExtendBuilder with one wrapper, planned for the metadata built last. Earlier metadata plans it again
    when it attends, which happens when the runs of DCP prompts are gathered one after the other."""

    plans_on_host = True
    in_graphs = False

    def __init__(self, options: _Options, workspace: torch.Tensor) -> None:
        self.options = options
        lists = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=workspace.device)
        self._wrapper = options.wrapper(workspace, lists)
        self._planned_for: FlashInferMLAExtendMetadata | None = None

    def build(self, rows: ExtendRows, causal: bool = True) -> FlashInferMLAExtendMetadata:
        assert causal, "plan.needs asks for no other"
        metadata = FlashInferMLAExtendMetadata(
            self, self.options.lists(rows, rows.new_lens_cpu), sum(rows.new_lens_cpu)
        )
        self.plan_for(metadata)
        return metadata

    def plan_for(self, metadata: FlashInferMLAExtendMetadata) -> WrapperPlan:
        """Returns a plan for the metadata, made again if the wrapper was planned for another."""
        if self._planned_for is not metadata:
            self.options.plan(self._wrapper, metadata.lists, causal=True)
            self._planned_for = metadata
        return self._wrapper.current()

    def num_parts(self, new_lens: Sequence[int], prefix_lens: Sequence[int]) -> int:
        return 1


@dataclass(slots=True, eq=False)
class FlashInferMLAExtendMetadata:
    """Implements ExtendMetadata."""

    builder: FlashInferMLAExtend
    lists: _Lists
    num_tokens: int

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, out: torch.Tensor
    ) -> None:
        first = len(q) - self.num_tokens
        self.builder.options.run(self.builder.plan_for(self), q[first:], layer, out[first:])


class FlashInferMLADecode:
    """Implements DecodeBuilder and PartBuilder. Outside of graphs PLANS_AT_ONCE wrappers are used in rotation. Graphs'
    wrappers are planned directly before each replay and share the lists of the first of these."""

    plans_on_host = True
    in_graphs = True

    def __init__(self, options: _Options, workspace: torch.Tensor) -> None:
        self.options, self._workspace = options, workspace
        lists = torch.empty((PLANS_AT_ONCE, PLAN_BYTES), dtype=torch.uint8, device=workspace.device)
        self._lists_of_graphs = lists[0]
        self._eager = itertools.cycle([options.wrapper(workspace, each) for each in lists])
        self._in_graphs: dict[int, PlannedWrapper] = {}

    def build(self, rows: DecodeRows) -> FlashInferMLADecodeMetadata:
        return FlashInferMLADecodeMetadata(self.options, self._plan(next(self._eager), rows), rows.seq_lens == 0)

    def _plan(self, wrapper: PlannedWrapper, rows: DecodeRows) -> WrapperPlan:
        return self.options.plan(wrapper, self.options.lists(rows, [1] * len(rows)), causal=False)

    def prepare_graphs(self, batch_sizes: tuple[int, ...]) -> None:
        """Creates one wrapper per batch size, planned for one page per request, because a graph's launches depend on
        the batch size alone. All share buffers, of which smaller ones use the front."""
        largest, device = batch_sizes[-1], self._workspace.device
        starts, indptr = torch.zeros(2, largest + 1, dtype=torch.int32, device=device)
        lens = torch.ones(largest, dtype=torch.int32, device=device)
        indices = torch.zeros(largest * self.options.max_pages_each, dtype=torch.int32, device=device)
        for size in batch_sizes:
            self._in_graphs[size] = self.options.wrapper(
                self._workspace,
                self._lists_of_graphs,
                use_cuda_graph=True,
                qo_indptr=starts[: size + 1],
                kv_indptr=indptr[: size + 1],
                kv_indices=indices,
                kv_len_arr=lens[:size],
            )
            one_page_each = _Lists.of(
                [1] * size,
                torch.arange(size + 1, dtype=torch.int32),
                torch.zeros(size, dtype=torch.int32, device=device),
                torch.ones(size, dtype=torch.int32),
            )
            self.options.plan(self._in_graphs[size], one_page_each, causal=False)

    def build_in_graph(self, rows: DecodeRows) -> FlashInferMLADecodeMetadata:
        return FlashInferMLADecodeMetadata(self.options, self._in_graphs[len(rows)].current(), rows.seq_lens == 0)

    def refresh(self, rows: DecodeRows) -> None:
        self._plan(self._in_graphs[len(rows)], rows)


@dataclass(slots=True)
class FlashInferMLADecodeMetadata:
    """Implements DecodeMetadata and PartMetadata."""

    options: _Options
    plan: WrapperPlan
    empty: torch.Tensor  # [D] bool, rows without tokens

    def attend(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        self.options.run(self.plan, q, layer, out)

    def attend_part(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Attends as `dcp.PartMetadata` says; rows without tokens are masked, whatever the kernels wrote for them. The
        log-sum-exp is taken to base 2 and converted here, because FlashInfer's `return_lse_base_on_e` has a race: 64
        threads in two warps multiply one number in place, so that a warp may multiply the other's result."""
        self.options.run(self.plan, q, layer, out, lse=lse, return_lse=True)
        lse.mul_(math.log(2)).masked_fill_(self.empty[:, None], float("-inf"))
