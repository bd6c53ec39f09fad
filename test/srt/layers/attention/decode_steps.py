"""Decode steps of a model of one attention layer through the graph runner, and the fp32 answer to each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from sglang.srt.layers.attention.call_site import Attention
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.mem_cache.memory_pool import CachePools, CacheStore
from sglang.srt.model_executor.device_state import DeviceState, shape_of
from sglang.srt.model_executor.graph_runner import GraphRunner, GraphSizes
from sglang.srt.model_executor.step import StepInput, step_arrays
from sglang.srt.plan.cache_spec import FULL, Window, key_value_cache, latent_cache
from sglang.srt.plan.caches import group_caches, row_tables
from sglang.srt.plan.pool_sizes import PoolSizes, WindowSize
from sglang.srt.utils.device_arrays import send, to_device
from srt.layers.attention.backend_harness import FakePlan, sites_of
from srt.layers.attention.reference import attend

VOCAB = 97
CONTEXT = 256
NUM_SLOTS = 4096
DIM = 64


class OneLayer:
    """Queries, keys and values are rows of random tables, by token id."""

    def __init__(self, heads: tuple[int, int], dim: int, device: str, latent: int = 0, window: int = 0) -> None:
        """With `latent` values are so many of the keys' first dims."""
        generator = torch.Generator().manual_seed(0)
        num_heads, num_kv_heads = heads
        shapes = ((VOCAB, n, dim) for n in (num_heads, num_kv_heads, num_kv_heads))
        self.q, self.k, self.v = (torch.randn(s, generator=generator).bfloat16().to(device) for s in shapes)
        if latent:
            self.v = self.k[..., :latent]
        self.cache = CacheStore(0, "latent" if latent else "kv")
        self.layer = Attention(self.cache, num_heads, num_kv_heads, dim, dim**-0.5, latent, window)

    description = SimpleNamespace(last_stage=True)

    def input_buffer(self, max_tokens: int) -> None:
        """Of what a stage before this one sends: there is none."""

    def compute(self, batch: ForwardBatch, received: None) -> torch.Tensor:
        ids, loc = batch.input_ids, batch.slots_of(self.cache).out_cache_loc
        self.store(loc, ids)
        return self.layer(self.q[ids], self.k[ids], self.v[ids], batch)

    def store(self, loc: torch.Tensor, ids: torch.Tensor) -> None:
        self.cache.k[loc], self.cache.v[loc] = self.k[ids], self.v[ids]

    def step_logits(
        self, hidden: torch.Tensor, exchange: None = None, adapter_slots: torch.Tensor | None = None
    ) -> torch.Tensor:
        return hidden

    def slots_of_rows(self, batch: ForwardBatch, rows: torch.Tensor | None) -> None:
        """Of LoRA adapters: there are none."""


class DecodeSteps:
    """Requests that grow by one token a step. Pages are handed out in random order, a new one as a page fills."""

    def __init__(
        self, backend: Any, lens: list[int], page_size: int, device: str, heads: tuple[int, int], latent: int = 0,
        window: int = 0, **options: Any,
    ) -> None:  # fmt: skip
        """`options`: of the plan. With a `window` the cache lies in the table of that window, and what is behind it is
        no number any more."""
        self.model = OneLayer(heads, DIM, device, latent, window)
        kv = key_value_cache("kv", heads[1], DIM, DIM, "bfloat16", Window(window) if window else FULL)
        if latent:
            kv = latent_cache("latent", DIM, latent, "bfloat16")
        groups = group_caches([(kv,)])
        self.plan = FakePlan(
            self.model.layer.site.shape, window, max_running_requests=len(lens), page_size=page_size,
            context_len=CONTEXT, device=device, caches=groups, **options,
        )  # fmt: skip
        self.device, self.page_size, self.window = device, page_size, window
        tokens = NUM_SLOTS - page_size
        sizes = PoolSizes(tokens, page_size, len(lens), CONTEXT, (WindowSize(window, tokens),) if window else ())
        cache = self.model.cache
        CachePools(groups, sizes, device).bind([cache])
        sites = sites_of(self.plan, backend(self.plan, device))
        tables = len(row_tables(groups))
        self.state = DeviceState(self.model, sites, tables, sizes, device)  # type: ignore[arg-type]
        self.state.req_to_token[:, 1:] = NUM_SLOTS - 1  # a slot that no request owns
        cache.k[NUM_SLOTS - 1] = cache.v[NUM_SLOTS - 1] = float("nan")
        self.graphs: GraphRunner | None = None
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
            self.model.store(loc, ids)
            self.state.req_to_token[-1, i + 1, :length] = loc.int()

    def capture(self, batch_sizes: tuple[int, ...]) -> None:
        self.graphs = GraphRunner(self.state, GraphSizes(batch_sizes))

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
        if self.window:
            self._move_window(lens)
        step = StepInput(self.slots, lens, loc)
        if self.graphs is not None:
            shape = self.graphs.shape_of(step)
            assert shape is not None
            return self.graphs.replay(shape, step).logits[: len(lens)]
        batch = self.state.batch(send(self.device, **step_arrays(step)), shape_of(step), step)
        return self.model.compute(batch, None)

    def _move_window(self, lens: Any) -> None:
        """The table of a window has the new slots before a step; pages behind the window are handed on."""
        for row, (length, loc) in enumerate(zip(lens.tolist(), self.locs, strict=True), 1):
            self.state.req_to_token[1, row, length - 1] = loc[-1]
            kept = max(0, length - self.window) // self.page_size * self.page_size
            self.state.req_to_token[1, row, :kept] = NUM_SLOTS - 1

    def expected(self) -> torch.Tensor:
        rows = []
        for tokens in self.tokens:
            ids = tokens[-self.window :]
            k, v = self.model.k[ids], self.model.v[ids]
            seen = torch.ones((1, len(ids)), dtype=torch.bool, device=self.device)
            rows.append(attend(self.model.q[ids[-1:]], k, v, seen, self.model.layer.scale))
        return torch.cat(rows).flatten(1)


def reexecuting_capture(recorder: list[str]) -> Any:
    """`graph_capture.capture` without a GPU: a replay runs the step again, over the same static tensors. `recorder`
    holds "graph" while device work of a graph runs, so that host work can notice that it does not belong there."""

    def capture(step: Any, pool: Any = None, producer: Any = None) -> Any:
        def run_as_graph() -> None:
            recorder.append("graph")
            step()
            recorder.remove("graph")

        for _ in range(2):
            if producer is not None:
                producer()
            step()
        run_as_graph()
        return SimpleNamespace(replay=run_as_graph, pool=lambda: None)

    return capture
