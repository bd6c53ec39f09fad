"""Absorbed latent attention with FlashInfer's FA2 kernels (flashinfer-python 0.6), which 99 KB of shared memory are
enough for. Imported only when the plan chooses it.

As in `flashinfer_backend` the wrappers plan on the host, and page indices are gathered on the device. The latents are
read where they lie: keys and values are views of one cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper

from sglang.srt.layers.attention.flashinfer_backend import PLAN_BYTES, PlannedWrapper
from sglang.srt.layers.attention.page_table import gather_pages
from sglang.srt.mem_cache.memory_pool import storage_dtype
from sglang.srt.plan.mixers import MLA

if TYPE_CHECKING:
    from sglang.srt.layers.attention.attention_layer import AttentionLayer
    from sglang.srt.layers.step_rows import DecodeRows, ExtendRows
    from sglang.srt.plan.layer_spec import AttentionSite
    from sglang.srt.plan.plan import Plan

WORKSPACE_BYTES = 128 << 20


class FlashInferMLABackend:
    """Implements AttentionBackend for a cache in 16 bits. All wrappers share a workspace: a step may have prompts and
    decoding requests, both planned before either runs; they run one after the other."""

    def __init__(self, plan: Plan, device: torch.device | str) -> None:
        self._options = _Options(plan)
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def decode_builder(self, site: AttentionSite) -> FlashInferMLADecode:
        return FlashInferMLADecode(self._options, self._workspace)

    def extend_builder(self, site: AttentionSite) -> FlashInferMLAExtend:
        return FlashInferMLAExtend(self._options, self._workspace)


class _Options:
    """Options that wrappers are planned with."""

    def __init__(self, plan: Plan) -> None:
        (shape,) = plan.attention_shapes
        scales = {layer.mixer.softmax_scale for layer in plan.description.layers if isinstance(layer.mixer, MLA)}
        assert len(scales) <= 1, "one plan of a step serves all layers"
        self.scale = next(iter(scales), 1.0)  # a stage of a hybrid may have no such layer: nothing runs what is planned
        self.rank, self.page_size = shape.v_head_dim, plan.page_size
        self.shape = (shape.num_heads, self.rank, shape.head_dim - self.rank, plan.page_size)
        self.dtypes = (getattr(torch, plan.dtype), storage_dtype(plan.kv_cache_dtype))
        self.max_pages_each = -(-plan.context_len // plan.page_size)

    def plan(self, wrapper: PlannedWrapper, rows: DecodeRows | ExtendRows, new_lens: list[int], causal: bool) -> None:
        pages = gather_pages(rows, 0, self.page_size)
        lens = torch.tensor(rows.seq_lens_cpu, dtype=torch.int32)
        self.plan_pages(wrapper, new_lens, pages.indptr, pages.indices, lens, causal)

    def plan_pages(
        self,
        wrapper: PlannedWrapper,
        new_lens: list[int],
        indptr: torch.Tensor,
        indices: torch.Tensor,
        lens: torch.Tensor,
        causal: bool,
    ) -> None:
        starts = torch.from_numpy(np.concatenate(([0], np.cumsum(new_lens))).astype(np.int32))
        wrapper.plan(starts, indptr, indices, lens, *self.shape, causal, self.scale, *self.dtypes)

    def run(self, wrapper: PlannedWrapper, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        """q [T, H, rank + rope]: absorbed queries, whose last dims are rotated."""
        latents = layer.cache.k[:, 0].unflatten(0, (-1, self.page_size))
        rank = self.rank
        wrapper.run(q[..., :rank], q[..., rank:], latents[..., :rank], latents[..., rank:], out=out)


def _planned(workspace: torch.Tensor, lists: torch.Tensor, **buffers: Any) -> PlannedWrapper:
    wrapper = BatchMLAPagedAttentionWrapper(workspace, backend="fa2", **buffers)
    # Each allocates lists of its own and, unlike FlashInfer's other wrappers, has no method that replaces them.
    wrapper._int_workspace_buffer = lists
    return PlannedWrapper(wrapper, torch.cuda.Event() if workspace.is_cuda else None)


class FlashInferMLAExtend:
    """Implements ExtendBuilder."""

    plans_on_host = True
    in_graphs = False

    def __init__(self, options: _Options, workspace: torch.Tensor) -> None:
        self.options = options
        self.wrapper = _planned(workspace, torch.empty(PLAN_BYTES, dtype=torch.uint8, device=workspace.device))

    def build(self, rows: ExtendRows, causal: bool = True) -> FlashInferMLAExtendMetadata:
        assert causal, "plan.needs asks for no other"
        self.options.plan(self.wrapper, rows, rows.new_lens_cpu, causal=True)
        return FlashInferMLAExtendMetadata(self, sum(rows.new_lens_cpu))

    def num_parts(self, new_lens: Sequence[int], prefix_lens: Sequence[int]) -> int:
        return 1


@dataclass(slots=True)
class FlashInferMLAExtendMetadata:
    builder: FlashInferMLAExtend
    num_tokens: int

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, out: torch.Tensor
    ) -> None:
        first = len(q) - self.num_tokens
        self.builder.options.run(self.builder.wrapper, q[first:], layer, out[first:])


class FlashInferMLADecode:
    """Implements DecodeBuilder."""

    plans_on_host = True
    in_graphs = True

    def __init__(self, options: _Options, workspace: torch.Tensor) -> None:
        self.options, self._workspace = options, workspace
        self._lists = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=workspace.device)
        self._eager = _planned(workspace, self._lists)
        self._in_graphs: dict[int, PlannedWrapper] = {}

    def build(self, rows: DecodeRows) -> FlashInferMLADecodeMetadata:
        self.options.plan(self._eager, rows, [1] * len(rows), causal=False)
        return FlashInferMLADecodeMetadata(self.options, self._eager)

    def prepare_graphs(self, batch_sizes: tuple[int, ...]) -> None:
        """One wrapper a batch size, since a wrapper's is fixed, planned for one page a request: what a graph's launches
        depend on is the batch size alone. They share the buffers, whose front the smaller ones use."""
        largest, device = batch_sizes[-1], self._workspace.device
        starts, indptr = torch.zeros(2, largest + 1, dtype=torch.int32, device=device)
        lens = torch.ones(largest, dtype=torch.int32, device=device)
        indices = torch.zeros(largest * self.options.max_pages_each, dtype=torch.int32, device=device)
        for size in batch_sizes:
            self._in_graphs[size] = _planned(
                self._workspace,
                self._lists,
                use_cuda_graph=True,
                qo_indptr=starts[: size + 1],
                kv_indptr=indptr[: size + 1],
                kv_indices=indices,
                kv_len_arr=lens[:size],
            )
            self.options.plan_pages(
                self._in_graphs[size],
                [1] * size,
                torch.arange(size + 1, dtype=torch.int32),
                torch.zeros(size, dtype=torch.int32, device=device),
                torch.ones(size, dtype=torch.int32),
                causal=False,
            )

    def build_in_graph(self, rows: DecodeRows) -> FlashInferMLADecodeMetadata:
        return FlashInferMLADecodeMetadata(self.options, self._in_graphs[len(rows)])

    def refresh(self, rows: DecodeRows) -> None:
        self.options.plan(self._in_graphs[len(rows)], rows, [1] * len(rows), causal=False)


@dataclass(slots=True)
class FlashInferMLADecodeMetadata:
    options: _Options
    wrapper: PlannedWrapper

    def attend(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        self.options.run(self.wrapper, q, layer, out)
