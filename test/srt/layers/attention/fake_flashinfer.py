"""FlashInfer's wrappers, as far as they are used: they plan into the buffers that they are given and attend, in torch,
over the pages that were planned."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import torch

from srt.layers.attention.reference import attend, visible_keys


class FakeWrapper:
    """What both of FlashInfer's wrappers have in common."""

    log: list[str]
    checks_lists = True

    def __init__(self, workspace: torch.Tensor, layout: str, use_tensor_cores: bool = False, **buffers: Any) -> None:
        assert layout == "NHD"
        self.in_graphs = buffers.pop("use_cuda_graph", False)
        self.backend = buffers.pop("backend", None)
        self.indptr = buffers.get("paged_kv_indptr_buffer")
        self.indices = buffers.get("paged_kv_indices_buffer")
        self.last_len = buffers.get("paged_kv_last_page_len_buffer")

    def reset_workspace_buffer(self, floats: torch.Tensor, ints: torch.Tensor) -> None:
        self.lists = ints

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_len: torch.Tensor, num_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, window_left: int, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert "graph" not in self.log, "a wrapper cannot plan in a graph"
        self.log.append("plan")
        self.lists[:8].view(torch.int64)[0] = id(self)  # whose lists these are
        assert len(indices) == indptr[-1] and len(last_len) == len(indptr) - 1
        if self.in_graphs:
            assert len(indices) <= len(self.indices) and len(indptr) == len(self.indptr)
            self.indptr.copy_(indptr)
            self.indices[: len(indices)] = indices
            self.last_len.copy_(last_len)
        else:
            self.indptr, self.indices, self.last_len = indptr.clone(), indices.clone(), last_len.clone()
        self.page_size, self.group, self.window = page_size, num_heads // num_kv_heads, window_left + 1
        self.new_lens = [1] * len(last_len)

    def run(
        self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], k_scale: float, v_scale: float,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        mine = self.lists[:8].view(torch.int64)[0] == id(self)
        assert mine or not self.checks_lists, "another wrapper's lists lie where this one's were"
        rows, start = [], 0
        for i, (last, new) in enumerate(zip(self.last_len.tolist(), self.new_lens, strict=True)):
            pages = self.indices[self.indptr[i] : self.indptr[i + 1]].long()
            length = (len(pages) - 1) * self.page_size + last
            k, v = (c[pages].flatten(0, 1)[:length] for c in cache)
            seen = visible_keys(torch.arange(length - new, length), length, window=self.window)
            rows.append(attend(q[start : start + new], k, v, seen, q.shape[-1] ** -0.5 * k_scale) * v_scale)
            start += new
        out[:start].copy_(torch.cat(rows))


class FakePrefillWrapper(FakeWrapper):
    def plan(self, qo_indptr: torch.Tensor, *pages_and_shape: Any, causal: bool, **options: Any) -> None:
        assert causal
        super().plan(*pages_and_shape, **options)
        self.new_lens = qo_indptr.diff().tolist()


class FakeLatentWrapper:
    """`BatchMLAPagedAttentionWrapper` of FlashInfer 0.6, as far as it is used; requests without keys get no numbers."""

    log: list[str]

    def __init__(self, workspace: torch.Tensor, backend: str, use_cuda_graph: bool = False, **buffers: Any) -> None:
        assert backend in ("fa2", "fa3")
        self.backend = backend
        self.in_graphs, self.buffers = use_cuda_graph, buffers
        self._int_workspace_buffer = torch.empty(8, dtype=torch.uint8)

    def plan(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor,
        num_heads: int, head_dim_ckv: int, head_dim_kpe: int, page_size: int, causal: bool, sm_scale: float,
        q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert "graph" not in self.log, "a wrapper cannot plan in a graph"
        self._lists_of_plan()[:8].view(torch.int64)[0] = id(self)  # whose lists these are
        given = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_len_arr": kv_len_arr}
        assert len(kv_indices) == kv_indptr[-1] and len(kv_len_arr) == len(kv_indptr) - 1
        if self.in_graphs:
            for name, values in given.items():
                self.buffers[name][: len(values)] = values
        else:
            self.buffers = {name: values.clone() for name, values in given.items()}
        self.heads, self.dims, self.page_size = num_heads, (head_dim_ckv, head_dim_kpe), page_size
        self.causal, self.scale = causal, sm_scale

    def _lists_of_plan(self) -> torch.Tensor:
        return self._int_workspace_buffer

    def run(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, ckv_cache: torch.Tensor, kpe_cache: torch.Tensor,
        out: torch.Tensor, lse: torch.Tensor | None = None, return_lse: bool = False,
    ) -> None:  # fmt: skip
        assert return_lse == (lse is not None) and (lse is None or lse.dtype == torch.float32)
        assert self._lists_that_are_read()[:8].view(torch.int64)[0] == id(self), "another wrapper's lists lie there"
        assert q_nope.shape[1:] == (self.heads, self.dims[0]) and q_pe.shape[-1] == self.dims[1]
        assert ckv_cache.shape[1:] == (self.page_size, self.dims[0]) and kpe_cache.shape[-1] == self.dims[1]
        starts, indptr = self.buffers["qo_indptr"].tolist(), self.buffers["kv_indptr"].tolist()
        assert len(q_nope) == starts[-1]
        q = torch.cat((q_nope, q_pe), dim=-1)
        for i, length in enumerate(self.buffers["kv_len_arr"].tolist()):
            pages = self.buffers["kv_indices"][indptr[i] : indptr[i + 1]].long()
            ckv, kpe = (cache[pages].flatten(0, 1)[:length, None] for cache in (ckv_cache, kpe_cache))
            rows = slice(starts[i], starts[i + 1])
            new = starts[i + 1] - starts[i]
            seen = visible_keys(torch.arange(length - new, length), length, self.causal or new == 1)
            keys = torch.cat((ckv, kpe), dim=-1)
            out[rows] = attend(q[rows], keys, ckv, seen, self.scale) if length else float("nan")
            if lse is not None:
                scores = torch.einsum("nhd,ld->nhl", q[rows].float(), keys[:, 0].float()) * self.scale
                scores = scores.masked_fill(~seen[:, None], float("-inf"))
                lse[rows] = scores.logsumexp(-1) / math.log(2) if length else float("nan")

    def _lists_that_are_read(self) -> torch.Tensor:
        return self._int_workspace_buffer


class NewLatentWrapper(FakeLatentWrapper):
    """The wrapper of FlashInfer 0.7: each plan makes an object with lists of its own, or in graphs with those of the
    one before. A graph reads the lists that were there when it was captured."""

    _planned_backend: SimpleNamespace | None = None
    _captured: torch.Tensor | None = None

    def _lists_of_plan(self) -> torch.Tensor:
        before, lists = self._planned_backend, torch.empty(8, dtype=torch.uint8)
        if self.in_graphs and before is not None:
            lists = before._int_workspace_buffer
        self._planned_backend = SimpleNamespace(_int_workspace_buffer=lists)
        self._int_workspace_buffer = lists
        return lists

    def _lists_that_are_read(self) -> torch.Tensor:
        assert self._planned_backend is not None
        if not self.in_graphs:
            return self._planned_backend._int_workspace_buffer
        if self._captured is None:
            self._captured = self._planned_backend._int_workspace_buffer
        return self._captured


class FakeRaggedWrapper:
    """FlashInfer's `BatchPrefillWithRaggedKVCacheWrapper`, as far as it is used. A request without keys gets zeros, and
    a logarithm that is far below all others."""

    log: list[str]

    def __init__(self, workspace: torch.Tensor, layout: str, backend: str) -> None:
        assert layout == "NHD" and backend in ("fa2", "fa3")

    def reset_workspace_buffer(self, floats: torch.Tensor, ints: torch.Tensor) -> None:
        self.lists = ints

    def plan(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
        head_dim_vo: int, causal: bool, sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert "graph" not in self.log, "a wrapper cannot plan in a graph"
        self.log.append("plan")
        self.lists[:8].view(torch.int64)[0] = id(self)  # whose lists these are
        assert qo_indptr.dtype == kv_indptr.dtype == torch.int32 and len(qo_indptr) == len(kv_indptr)
        assert not qo_indptr[0] and not kv_indptr[0]
        self.bounds = [indptr.tolist() for indptr in (qo_indptr, kv_indptr)]
        self.sizes = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo)
        self.causal, self.scale, self.dtypes = causal, sm_scale, (q_data_type, kv_data_type)

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> None:  # fmt: skip
        assert self.lists[:8].view(torch.int64)[0] == id(self), "another wrapper's lists lie there"
        assert (q.shape[1], k.shape[1], k.shape[2], v.shape[2]) == self.sizes and (q.dtype, k.dtype) == self.dtypes
        assert (len(q), len(k), len(v)) == (self.bounds[0][-1], self.bounds[1][-1], self.bounds[1][-1])
        assert out.is_contiguous() and out.shape == (*q.shape[:2], v.shape[2]) and return_lse == (lse is not None)
        starts, keys = self.bounds
        for i, (first, end) in enumerate(itertools.pairwise(starts)):
            mine = slice(keys[i], keys[i + 1])
            scores = torch.einsum("thd,shd->ths", q[first:end].float(), k[mine].float()) * self.scale
            if self.causal:
                hidden = torch.ones(end - first, keys[i + 1] - keys[i], dtype=torch.bool).triu(1)
                scores = scores.masked_fill(hidden[:, None], float("-inf"))
            out[first:end] = torch.einsum("ths,shd->thd", scores.softmax(-1), v[mine].float()).to(out.dtype)
            if lse is not None:
                lse[first:end] = scores.logsumexp(-1).clamp(min=NO_KEYS) / math.log(2)


NO_KEYS = -3e4


def fake_flashinfer(log: list[str], latent_wrapper: type = FakeLatentWrapper) -> Any:
    """The package. `log` holds "graph" while device work of a graph runs, in which no wrapper may plan."""
    decode, prefill, latent, ragged = (
        type(f"Logged{kind.__name__}", (kind,), {"log": log})
        for kind in (FakeWrapper, FakePrefillWrapper, latent_wrapper, FakeRaggedWrapper)
    )
    return SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=decode,
        BatchPrefillWithPagedKVCacheWrapper=prefill,
        BatchPrefillWithRaggedKVCacheWrapper=ragged,
        mla=SimpleNamespace(BatchMLAPagedAttentionWrapper=latent),
    )
