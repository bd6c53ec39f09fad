"""Absorbed latent attention with FlashInfer's FA2 kernels (flashinfer-python 0.6), which 99 KB of shared memory are
enough for. Imported only when the plan chooses it.

As in `flashinfer_backend` the wrappers plan on the host, and page indices are gathered on the device. The latents are
read where they lie: keys and values are views of one cache.
"""

from __future__ import annotations

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
    from sglang.srt.layers.forward_batch import ForwardBatch
    from sglang.srt.plan.plan import Plan

WORKSPACE_BYTES = 128 << 20


class FlashInferMLABackend:
    """Implements AttentionBackend for a cache in 16 bits."""

    def __init__(self, plan: Plan, device: torch.device | str) -> None:
        (shape,) = plan.attention_shapes
        (self._scale,) = {
            layer.mixer.softmax_scale for layer in plan.description.layers if isinstance(layer.mixer, MLA)
        }
        self._rank = shape.v_head_dim
        self._shape = (shape.num_heads, self._rank, shape.head_dim - self._rank, plan.page_size)
        self._dtypes = (getattr(torch, plan.dtype), storage_dtype(plan.kv_cache_dtype))
        self._page_size = plan.page_size
        self._max_pages_each = -(-plan.context_len // plan.page_size)
        self._device = torch.device(device)
        # A step may have prompts and decoding requests, both planned before either runs; they run one after the other.
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._prefill_lists, self._decode_lists = torch.empty(2, PLAN_BYTES, dtype=torch.uint8, device=device)
        self._prefill, self._decode = self._planned(self._prefill_lists), self._planned(self._decode_lists)
        self._in_graphs: dict[int, PlannedWrapper] = {}
        self._decoding = self._decode
        """The wrapper of the current step's decoding requests."""

    def _planned(self, lists: torch.Tensor, **buffers: Any) -> PlannedWrapper:
        wrapper = BatchMLAPagedAttentionWrapper(self._workspace, backend="fa2", **buffers)
        # Each allocates lists of its own and, unlike FlashInfer's other wrappers, has no method that replaces them.
        wrapper._int_workspace_buffer = lists
        return PlannedWrapper(wrapper, torch.cuda.Event() if self._device.type == "cuda" else None)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        if batch.forward_mode.is_decode():
            self._decoding = self._decode
            self._plan_decode(self._decode, batch)
            return
        assert batch.extend_seq_lens_cpu is not None
        self._plan(self._prefill, batch, batch.extend_seq_lens_cpu, causal=True)

    def _plan_decode(self, wrapper: PlannedWrapper, batch: ForwardBatch) -> None:
        self._plan(wrapper, batch, [1] * batch.batch_size, causal=False)

    def _plan(self, wrapper: PlannedWrapper, batch: ForwardBatch, new_lens: list[int], causal: bool) -> None:
        pages = gather_pages(batch, batch.token_slots[0], self._page_size)
        assert batch.seq_lens_cpu is not None
        lens = torch.tensor(batch.seq_lens_cpu, dtype=torch.int32)
        self._plan_pages(wrapper, new_lens, pages.indptr, pages.indices, lens, causal)

    def _plan_pages(
        self,
        wrapper: PlannedWrapper,
        new_lens: list[int],
        indptr: torch.Tensor,
        indices: torch.Tensor,
        lens: torch.Tensor,
        causal: bool,
    ) -> None:
        starts = torch.from_numpy(np.concatenate(([0], np.cumsum(new_lens))).astype(np.int32))
        wrapper.plan(starts, indptr, indices, lens, *self._shape, causal, self._scale, *self._dtypes)

    def init_cuda_graph_state(self, batch_sizes: tuple[int, ...]) -> None:
        """One wrapper a batch size, since a wrapper's is fixed, planned for one page a request: what a graph's launches
        depend on is the batch size alone. They share the buffers, whose front the smaller ones use."""
        largest = batch_sizes[-1]
        starts, indptr = torch.zeros(2, largest + 1, dtype=torch.int32, device=self._device)
        lens = torch.ones(largest, dtype=torch.int32, device=self._device)
        indices = torch.zeros(largest * self._max_pages_each, dtype=torch.int32, device=self._device)
        for size in batch_sizes:
            self._in_graphs[size] = self._planned(
                self._decode_lists,
                use_cuda_graph=True,
                qo_indptr=starts[: size + 1],
                kv_indptr=indptr[: size + 1],
                kv_indices=indices,
                kv_len_arr=lens[:size],
            )
            self._plan_pages(
                self._in_graphs[size],
                [1] * size,
                torch.arange(size + 1, dtype=torch.int32),
                torch.zeros(size, dtype=torch.int32, device=self._device),
                torch.ones(size, dtype=torch.int32),
                causal=False,
            )

    def init_forward_metadata_capture(self, batch: ForwardBatch) -> None:
        self._decoding = self._in_graphs[batch.batch_size]

    def init_forward_metadata_replay(self, batch: ForwardBatch, num_reqs: int) -> None:
        self._plan_decode(self._in_graphs[batch.batch_size], batch)

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
        last = len(q) if batch.extend_seq_lens_cpu is None else first + sum(batch.extend_seq_lens_cpu)
        self._run(self._prefill, q[first:last], layer, out[first:last])

    def forward_decode(self, q: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor) -> None:
        self._run(self._decoding, q, layer, out)

    def _run(self, wrapper: PlannedWrapper, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        """q [T, H, rank + rope]: absorbed queries, whose last dims are rotated."""
        latents = layer.cache.k[:, 0].unflatten(0, (-1, self._page_size))
        rank = self._rank
        wrapper.run(q[..., :rank], q[..., rank:], latents[..., :rank], latents[..., rank:], out=out)
