"""Attention with FlashInfer's paged wrappers (flashinfer-python 0.6). Imported only when the plan chooses it.

The wrappers plan on the host: page counts come from `seq_lens_cpu`, so nothing is read back from the GPU; page indices
are gathered from `req_to_token` on the device. Layers must have neither
sliding windows nor logit caps nor sinks: those are properties of a planned wrapper, and this backend plans one a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

from sglang.srt.layers.attention.page_table import Pages, gather_pages

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.plan.plan import Plan

WORKSPACE_BYTES = 256 << 20
TENSOR_CORE_GROUP = 4
"""From this many query heads a KV head on, decoding on tensor cores beats plain FMA."""


@dataclass(slots=True)
class GraphBuffers:
    """What captured graphs read, for the largest batch; wrappers of smaller batches use the front of it."""

    indptr: torch.Tensor
    last_len: torch.Tensor
    indices: torch.Tensor
    wrappers: dict[int, Any] = field(default_factory=dict)


class FlashInferAttnBackend:
    """Implements AttentionBackend."""

    def __init__(self, plan: Plan, device: torch.device | str) -> None:
        self._num_heads = plan.model.num_heads // plan.tp_size
        self._num_kv_heads = plan.kv.num_kv_heads
        self._head_dim = plan.kv.head_dim
        self._page_size = plan.page_size
        self._max_pages_each = -(-plan.context_len // plan.page_size)
        self._q_dtype = getattr(torch, plan.dtype)
        self._device = device
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._tensor_cores = self._num_heads // self._num_kv_heads >= TENSOR_CORE_GROUP
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        self._decode = BatchDecodeWithPagedKVCacheWrapper(self._workspace, "NHD", use_tensor_cores=self._tensor_cores)
        self._graph: GraphBuffers | None = None
        self._decoding: Any = None
        """The decode wrapper of the current step."""

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        pages = gather_pages(batch, self._page_size)
        if batch.forward_mode.is_decode():
            self._plan_decode(self._decode, pages, batch)
            return
        assert batch.extend_seq_lens_cpu is not None
        qo_indptr = np.concatenate(([0], np.cumsum(batch.extend_seq_lens_cpu))).astype(np.int32)
        self._prefill.plan(
            torch.from_numpy(qo_indptr),
            pages.indptr,
            pages.indices,
            pages.last_len,
            self._num_heads,
            self._num_kv_heads,
            self._head_dim,
            self._page_size,
            causal=True,
            q_data_type=self._q_dtype,
            kv_data_type=batch.kv_pool.dtype,
        )

    def _plan_decode(self, wrapper: Any, pages: Pages, batch: ForwardBatch) -> None:
        wrapper.plan(
            pages.indptr,
            pages.indices,
            pages.last_len,
            self._num_heads,
            self._num_kv_heads,
            self._head_dim,
            self._page_size,
            q_data_type=self._q_dtype,
            kv_data_type=batch.kv_pool.dtype,
        )
        self._decoding = wrapper

    def init_cuda_graph_state(self, max_batch_size: int) -> None:
        self._graph = GraphBuffers(
            torch.zeros(max_batch_size + 1, dtype=torch.int32, device=self._device),
            torch.ones(max_batch_size, dtype=torch.int32, device=self._device),
            torch.zeros(max_batch_size * self._max_pages_each, dtype=torch.int32, device=self._device),
        )

    def init_forward_metadata_capture(self, batch: ForwardBatch) -> None:
        """Called before and inside a capture; only the first call for a batch size, before it, may plan."""
        assert self._graph is not None, "init_cuda_graph_state comes first"
        size = batch.batch_size
        if size not in self._graph.wrappers:
            wrapper = self._graph.wrappers[size] = BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=self._tensor_cores,
                paged_kv_indptr_buffer=self._graph.indptr[: size + 1],
                paged_kv_indices_buffer=self._graph.indices,
                paged_kv_last_page_len_buffer=self._graph.last_len[:size],
            )
            one_page = torch.arange(size + 1, dtype=torch.int32)
            pages = Pages(
                one_page, torch.ones(size, dtype=torch.int32), torch.zeros(size, dtype=torch.int32, device=self._device)
            )
            self._plan_decode(wrapper, pages, batch)
        self._decoding = self._graph.wrappers[size]

    def init_forward_metadata_replay(self, batch: ForwardBatch, num_reqs: int) -> None:
        assert self._graph is not None
        self._plan_decode(self._graph.wrappers[batch.batch_size], gather_pages(batch, self._page_size), batch)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        first = 0 if batch.decodes is None else batch.decodes.batch_size
        self._run(self._prefill, q[first:], layer, batch, out[first:])

    def forward_decode(self, q: torch.Tensor, layer: RadixAttention, batch: ForwardBatch, out: torch.Tensor) -> None:
        self._run(self._decoding, q, layer, batch, out)

    def _run(
        self, wrapper: Any, q: torch.Tensor, layer: RadixAttention, batch: ForwardBatch, out: torch.Tensor
    ) -> None:
        if layer.sliding_window > 0 or layer.logit_cap > 0 or layer.sinks is not None:
            raise NotImplementedError(
                "the flashinfer backend here has no sliding window, logit cap or sinks; use --attention-backend triton"
            )
        pool, page, layer_id = batch.kv_pool, self._page_size, layer.layer_id
        k_cache, v_cache = (c.unflatten(0, (-1, page)) for c in (pool.k(layer_id), pool.v(layer_id)))
        # The wrapper was planned for head_dim ** -0.5; what differs from that goes into the scale of the keys.
        k_scale = pool.k_scale(layer_id) * layer.scale * self._head_dim**0.5
        wrapper.run(q, (k_cache, v_cache), k_scale=k_scale, v_scale=pool.v_scale(layer_id), out=out)
