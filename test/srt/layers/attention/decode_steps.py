"""Decode steps of a model of one attention layer through the graph runner, and the fp32 answer to each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVPool
from sglang.srt.mem_cache.req_pool import ReqToTokenPool
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.model_executor.device_state import DeviceState
from sglang.srt.model_executor.step import StepInput
from sglang.srt.plan.kv_spec import KVSpec
from sglang.srt.utils.device_arrays import send, to_device
from srt.layers.attention.backend_harness import FakeModel, FakePlan
from srt.layers.attention.reference import attend

VOCAB = 97
CONTEXT = 256
NUM_SLOTS = 4096


class OneLayer:
    """Queries, keys and values are rows of random tables, by token id."""

    def __init__(self, num_heads: int, kv: KVSpec, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = ((VOCAB, heads, kv.head_dim) for heads in (num_heads, kv.num_kv_heads, kv.num_kv_heads))
        self.q, self.k, self.v = (torch.randn(s, generator=generator).bfloat16().to(device) for s in shapes)
        self.layer = RadixAttention(0, num_heads, kv.num_kv_heads, kv.head_dim, kv.head_dim**-0.5)

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        ids, pool = batch.input_ids, batch.kv_pool
        pool.k(0)[batch.out_cache_loc] = self.k[ids].to(pool.dtype)
        pool.v(0)[batch.out_cache_loc] = self.v[ids].to(pool.dtype)
        return self.layer(self.q[ids], self.k[ids], self.v[ids], batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class DecodeSteps:
    """Requests that grow by one token a step. Pages are handed out in random order, a new one as a page fills."""

    def __init__(self, backend: Any, lens: list[int], page_size: int, device: str, heads: tuple[int, int]) -> None:
        num_heads, num_kv_heads = heads
        kv = KVSpec(1, num_kv_heads, 64, 64, "bfloat16")
        self.plan = FakePlan(
            FakeModel(num_heads), kv, max_running_requests=len(lens), page_size=page_size, context_len=CONTEXT,
            device=device,
        )  # fmt: skip
        self.device, self.page_size = device, page_size
        self.kv_pool = KVPool(kv, NUM_SLOTS, device)
        self.req_pool = ReqToTokenPool(len(lens), CONTEXT, device)
        self.req_pool.device_table.fill_(NUM_SLOTS - 1)  # a slot that no request owns
        self.req_pool.device_table[0] = 0
        self.model = OneLayer(num_heads, kv, device)
        self.attn_backend = backend(self.plan, device)
        self.state = DeviceState(self.model, self.kv_pool, self.req_pool, self.attn_backend, device)  # type: ignore[arg-type]
        self.graphs: CudaGraphRunner | None = None
        self.random = np.random.default_rng(0)
        pages = NUM_SLOTS // page_size - 1
        self.free = (self.random.permutation(pages - 1) + 1).tolist()
        self.slots = np.arange(1, len(lens) + 1, dtype=np.int64)
        self.tokens: list[list[int]] = [[] for _ in lens]
        self.locs: list[list[int]] = [[] for _ in lens]
        for i, length in enumerate(lens):
            for _ in range(length):
                self._grow(i)
            ids, loc = (torch.tensor(x[i], device=device, dtype=torch.int64) for x in (self.tokens, self.locs))
            self.kv_pool.k(0)[loc], self.kv_pool.v(0)[loc] = self.model.k[ids], self.model.v[ids]
            self.req_pool.device_table[i + 1, :length] = loc.int()

    def capture(self, batch_sizes: tuple[int, ...]) -> None:
        self.graphs = CudaGraphRunner(self.state, batch_sizes)

    def _grow(self, request: int) -> None:
        self.tokens[request].append(int(self.random.integers(VOCAB)))
        loc = self.locs[request]
        full = len(loc) % self.page_size == 0
        loc.append(self.free.pop() * self.page_size if full else loc[-1] + 1)

    def step(self) -> torch.Tensor:
        """[B, Hq * D] of the next token of each request; launched, not waited for."""
        for i in range(len(self.tokens)):
            self._grow(i)
        last = np.array([0] + [ids[-1] for ids in self.tokens], np.int64)
        self.state.next_tokens[:, 0].copy_(to_device(last, self.device))
        lens = np.array([len(ids) for ids in self.tokens], np.int32)
        loc = np.array([loc[-1] for loc in self.locs], np.int32)
        if self.graphs is not None:
            return self.graphs.replay(StepInput(self.slots, lens, loc))
        sent = send(self.device, slots=self.slots, lens=lens, loc=loc.astype(np.int64))
        batch = self.state.decode_batch(sent["slots"], sent["lens"], sent["loc"])
        batch.seq_lens_cpu = lens.tolist()
        self.attn_backend.init_forward_metadata(batch)
        return self.model(batch)

    def expected(self) -> torch.Tensor:
        rows = []
        for ids in self.tokens:
            k, v = self.model.k[ids], self.model.v[ids]
            seen = torch.ones((1, len(ids)), dtype=torch.bool, device=self.device)
            rows.append(attend(self.model.q[ids[-1:]], k, v, seen, self.model.layer.scale))
        return torch.cat(rows).flatten(1)


def reexecuting_capture(recorder: list[str]) -> Any:
    """`graph_capture.capture` without a GPU: a replay runs the step again, over the same static tensors. `recorder`
    holds "graph" while device work of a graph runs, so that host work can notice that it does not belong there."""

    def capture(step: Any, pool: Any = None) -> Any:
        def run_as_graph() -> None:
            recorder.append("graph")
            step()
            recorder.remove("graph")

        step()
        step()
        run_as_graph()
        return SimpleNamespace(replay=run_as_graph, pool=lambda: None)

    return capture
