"""Attention with FlashInfer's paged wrappers (flashinfer-python 0.6). Imported only when the plan chooses it.

The wrappers plan on the host: page counts come from `seq_lens_cpu`, so nothing is read back from the GPU; page indices
are gathered on the device. Layers must have neither sliding windows nor logit caps nor sinks: those are properties of
a planned wrapper, and this backend plans one a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

from sglang.srt.layers.attention.page_table import Pages, gather_pages
from sglang.srt.mem_cache.memory_pool import storage_dtype

if TYPE_CHECKING:
    from sglang.srt.layers.attention.attention_layer import AttentionLayer
    from sglang.srt.layers.forward_batch import ForwardBatch
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


class FlashInferAttnBackend:
    """Implements AttentionBackend."""

    def __init__(self, plan: Plan, device: torch.device | str) -> None:
        self._page_size = plan.page_size
        (shape,) = plan.attention_shapes
        self._head_dim = shape.head_dim
        self._shape = (shape.num_heads, shape.num_kv_heads, shape.head_dim, plan.page_size)
        self._dtypes = {"q_data_type": getattr(torch, plan.dtype), "kv_data_type": storage_dtype(plan.kv_cache_dtype)}
        self._max_pages_each = -(-plan.context_len // plan.page_size)
        self._device = torch.device(device)
        self._tensor_cores = shape.num_heads // shape.num_kv_heads >= TENSOR_CORE_GROUP
        # Every plan fills its lists anew and steps run in order, so the wrappers share what the device reads of them. A
        # step may have one of each kind, planned before either runs.
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._prefill_lists, self._decode_lists = torch.empty(2, PLAN_BYTES, dtype=torch.uint8, device=device)
        self._prefill = self._planned(BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD"), self._prefill_lists)
        self._decode = self._planned(
            BatchDecodeWithPagedKVCacheWrapper(self._workspace, "NHD", use_tensor_cores=self._tensor_cores),
            self._decode_lists,
        )
        self._in_graphs: dict[int, PlannedWrapper] = {}
        self._decoding = self._decode
        """The wrapper of the current step's decoding requests."""

    def _planned(self, wrapper: Any, lists: torch.Tensor) -> PlannedWrapper:
        wrapper.reset_workspace_buffer(self._workspace, lists)
        return PlannedWrapper(wrapper, torch.cuda.Event() if self._device.type == "cuda" else None)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        pages = gather_pages(batch, batch.token_slots[0], self._page_size)
        if batch.forward_mode.is_decode():
            self._decoding = self._decode
            self._plan_decode(self._decode, pages)
            return
        assert batch.extend_seq_lens_cpu is not None
        qo_indptr = np.concatenate(([0], np.cumsum(batch.extend_seq_lens_cpu))).astype(np.int32)
        self._prefill.plan(
            torch.from_numpy(qo_indptr),
            pages.indptr,
            pages.indices,
            pages.last_len,
            *self._shape,
            causal=True,
            **self._dtypes,
        )

    def _plan_decode(self, wrapper: PlannedWrapper, pages: Pages) -> None:
        wrapper.plan(pages.indptr, pages.indices, pages.last_len, *self._shape, **self._dtypes)

    def init_cuda_graph_state(self, batch_sizes: tuple[int, ...]) -> None:
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

    def init_forward_metadata_capture(self, batch: ForwardBatch) -> None:
        self._decoding = self._in_graphs[batch.batch_size]

    def init_forward_metadata_replay(self, batch: ForwardBatch, num_reqs: int) -> None:
        pages = gather_pages(batch, batch.token_slots[0], self._page_size)
        self._plan_decode(self._in_graphs[batch.batch_size], pages)

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
        self._run(self._prefill, q[first:], layer, out[first:])

    def forward_decode(self, q: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor) -> None:
        self._run(self._decoding, q, layer, out)

    def _run(self, wrapper: PlannedWrapper, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        if layer.sliding_window > 0 or layer.logit_cap > 0 or layer.sinks is not None:
            raise NotImplementedError(
                "the flashinfer backend here has no sliding window, logit cap or sinks; use --attention-backend triton"
            )
        cache = layer.cache
        k_cache, v_cache = (c.unflatten(0, (-1, self._page_size)) for c in (cache.k, cache.v))
        # The wrapper was planned for head_dim ** -0.5; what differs from that goes into the scale of the keys.
        k_scale = cache.k_scale * layer.scale * self._head_dim**0.5
        wrapper.run(q, (k_cache, v_cache), k_scale=k_scale, v_scale=cache.v_scale, out=out)
