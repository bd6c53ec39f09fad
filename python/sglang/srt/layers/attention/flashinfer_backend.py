"""Attention with FlashInfer's paged wrappers (flashinfer-python 0.6). Imported only when the plan chooses it.

The wrappers plan on the host: page counts come from `seq_lens_cpu`, so nothing is read back from the GPU; page indices
are gathered on the device. Heads and a window are properties of a planned wrapper, so each of the model's attention
sites has wrappers of its own, and all of them are planned before a step runs. A window's wrapper is given the pages
that the new tokens see and no others. Layers must have neither logit caps nor sinks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

from sglang.srt.layers.attention.page_table import Pages, gather_pages
from sglang.srt.mem_cache.memory_pool import storage_dtype
from sglang.srt.plan.caches import row_tables

if TYPE_CHECKING:
    from sglang.srt.layers.attention.attention_layer import AttentionLayer
    from sglang.srt.layers.forward_batch import ForwardBatch
    from sglang.srt.plan.layer_spec import AttentionSite
    from sglang.srt.plan.plan import Plan

WORKSPACE_BYTES = 256 << 20
PLAN_BYTES = 8 << 20
"""Of the lists that a planner makes; each wrapper has as much pinned memory."""
TENSOR_CORE_GROUP = 4
"""From this many query heads a KV head on, decoding on tensor cores beats plain FMA."""


class PlannedWrapper:
    """A wrapper whose planner never overwrites lists that are still to be copied.

    `plan` writes its lists into pinned memory of the wrapper and starts their copy, which on the stream stands behind
    the steps before. The next `plan` writes the same memory, so it waits for that copy first. A step is launched when
    all but the previous one are over: then the copy is over too, or next in line, and the wait is none.
    """

    def __init__(self, wrapper: Any, copied: torch.cuda.Event | None) -> None:
        self._wrapper = wrapper
        self._copied = copied

    def plan(self, *args: Any, **options: Any) -> None:
        if self._copied is not None:
            self._copied.synchronize()  # at once if it was never recorded
        self._wrapper.plan(*args, **options)
        if self._copied is not None:
            self._copied.record()

    def run(self, *args: Any, **options: Any) -> None:
        self._wrapper.run(*args, **options)


class _SiteWrappers:
    """The wrappers of one attention site. Every plan fills its lists anew and steps run in order, so wrappers of the
    same kind share what the device reads of them. A step may have one of each kind, planned before either runs."""

    def __init__(self, plan: Plan, site: AttentionSite, workspace: torch.Tensor) -> None:
        shape = site.shape
        self._table, self._window = row_tables(plan.caches).index(site.lifetime), site.window
        self.page_size = plan.page_size
        self.head_dim = shape.head_dim
        self._shape = (shape.num_heads, shape.num_kv_heads, shape.head_dim, plan.page_size)
        self._options = {
            "q_data_type": getattr(torch, plan.dtype),
            "kv_data_type": storage_dtype(plan.kv_cache_dtype),
            "window_left": site.window - 1,  # -1: all tokens
        }
        most_tokens = min(plan.context_len, site.window + plan.page_size - 1) if site.window else plan.context_len
        self._max_pages_each = -(-most_tokens // plan.page_size)
        self._tensor_cores = shape.num_heads // shape.num_kv_heads >= TENSOR_CORE_GROUP
        self._workspace = workspace
        self._device = workspace.device
        self._prefill_lists, self._decode_lists = torch.empty(2, PLAN_BYTES, dtype=torch.uint8, device=self._device)
        self.prefill = self._planned(BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD"), self._prefill_lists)
        self._decode = self._planned(
            BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=self._tensor_cores),
            self._decode_lists,
        )
        self._in_graphs: dict[int, PlannedWrapper] = {}
        self.decoding = self._decode
        """Of the current step's decoding requests."""

    def _planned(self, wrapper: Any, lists: torch.Tensor) -> PlannedWrapper:
        wrapper.reset_workspace_buffer(self._workspace, lists)
        return PlannedWrapper(wrapper, torch.cuda.Event() if self._device.type == "cuda" else None)

    def _pages(self, batch: ForwardBatch) -> Pages:
        return gather_pages(batch, batch.token_slots[self._table], self.page_size, self._window)

    def plan(self, batch: ForwardBatch) -> None:
        pages = self._pages(batch)
        if batch.forward_mode.is_decode():
            self.decoding = self._decode
            self._plan_decode(self._decode, pages)
            return
        assert batch.extend_seq_lens_cpu is not None
        qo_indptr = np.concatenate(([0], np.cumsum(batch.extend_seq_lens_cpu))).astype(np.int32)
        self.prefill.plan(
            torch.from_numpy(qo_indptr),
            pages.indptr,
            pages.indices,
            pages.last_len,
            *self._shape,
            causal=True,
            **self._options,
        )

    def _plan_decode(self, wrapper: PlannedWrapper, pages: Pages) -> None:
        wrapper.plan(pages.indptr, pages.indices, pages.last_len, *self._shape, **self._options)

    def prepare_graphs(self, batch_sizes: tuple[int, ...]) -> None:
        """One wrapper a batch size, since a wrapper's is fixed, planned for one page a request: what a graph's launches
        depend on is the batch size alone. They share the buffers, whose front the smaller ones use."""
        largest = batch_sizes[-1]
        indptr = torch.zeros(largest + 1, dtype=torch.int32, device=self._device)
        last_len = torch.ones(largest, dtype=torch.int32, device=self._device)
        indices = torch.zeros(largest * self._max_pages_each, dtype=torch.int32, device=self._device)
        for size in batch_sizes:
            wrapper = self._in_graphs[size] = self._planned(
                BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace,
                    "NHD",
                    use_cuda_graph=True,
                    use_tensor_cores=self._tensor_cores,
                    paged_kv_indptr_buffer=indptr[: size + 1],
                    paged_kv_indices_buffer=indices,
                    paged_kv_last_page_len_buffer=last_len[:size],
                ),
                self._decode_lists,
            )
            one_page_each = Pages(
                torch.arange(size + 1, dtype=torch.int32),
                torch.ones(size, dtype=torch.int32),
                torch.zeros(size, dtype=torch.int32, device=self._device),
            )
            self._plan_decode(wrapper, one_page_each)

    def choose_graph(self, batch_size: int) -> None:
        self.decoding = self._in_graphs[batch_size]

    def plan_graph(self, batch: ForwardBatch) -> None:
        self._plan_decode(self._in_graphs[batch.batch_size], self._pages(batch))


class FlashInferAttnBackend:
    """Implements AttentionBackend."""

    def __init__(self, plan: Plan, device: torch.device | str) -> None:
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._sites = {(site.shape, site.window): _SiteWrappers(plan, site, workspace) for site in plan.attention_sites}

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        for wrappers in self._sites.values():
            wrappers.plan(batch)

    def init_cuda_graph_state(self, batch_sizes: tuple[int, ...]) -> None:
        for wrappers in self._sites.values():
            wrappers.prepare_graphs(batch_sizes)

    def init_forward_metadata_capture(self, batch: ForwardBatch) -> None:
        for wrappers in self._sites.values():
            wrappers.choose_graph(batch.batch_size)

    def init_forward_metadata_replay(self, batch: ForwardBatch, num_reqs: int) -> None:
        for wrappers in self._sites.values():
            wrappers.plan_graph(batch)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        first = 0 if batch.decodes is None else batch.decodes.batch_size
        wrappers = self._sites[layer.shape, layer.sliding_window]
        _run(wrappers, wrappers.prefill, q[first:], layer, out[first:])

    def forward_decode(self, q: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor) -> None:
        wrappers = self._sites[layer.shape, layer.sliding_window]
        _run(wrappers, wrappers.decoding, q, layer, out)


def _run(
    wrappers: _SiteWrappers, wrapper: PlannedWrapper, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor
) -> None:
    if layer.logit_cap > 0 or layer.sinks is not None:
        raise NotImplementedError(
            "the flashinfer backend here has neither logit caps nor sinks; use --attention-backend triton"
        )
    cache = layer.cache
    k_cache, v_cache = (c.unflatten(0, (-1, wrappers.page_size)) for c in (cache.k, cache.v))
    # The wrapper was planned for head_dim ** -0.5; what differs from that goes into the scale of the keys.
    k_scale = cache.k_scale * layer.scale * wrappers.head_dim**0.5
    wrapper.run(q, (k_cache, v_cache), k_scale=k_scale, v_scale=cache.v_scale, out=out)
