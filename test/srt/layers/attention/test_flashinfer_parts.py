"""FlashInfer's attention to latents whose tokens ranks share out: on the CPU over wrappers in torch, on a GPU that has
the package with its kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.distributed.groups import Group
from sglang.srt.layers.attention.dcp import DcpDecode, DcpExtend, GatheredMetadata
from sglang.srt.layers.attention.token_shares import GatheredTokens
from sglang.srt.layers.step_rows import DecodeRows, ExtendRows, TokenSlots
from sglang.srt.plan.ranks import RankLayout
from srt.layers.attention.backend_harness import FakeArch, FakePlan, plan_of, store_new_tokens
from srt.layers.attention.part_problems import check_without, merged, own_layer, weighted
from srt.layers.attention.reference import Problem, reference_decode, reference_extend, relative_error
from srt.layers.attention.test_flashinfer_mla import BOUND, HAS_FLASHINFER, MODULES, described, features_for
from srt.model_executor.backend_matrix import faked_flashinfer

DIMS, HEADS = (64, 48), 4
LATENT = (576, 512)
LENS = [0, 400, 2, 1, 31, 63]
"""Tokens before the new one: some ranks have none, and pages begin and end with it."""


@pytest.fixture
def backend() -> Iterator[Any]:
    with faked_flashinfer():
        yield importlib.import_module(MODULES[0]).FlashInferMLABackend


def latents(lens: list[int], new: list[int], size: int, page_size: int, **options: Any) -> Problem:
    """page_size: entries of a page on one rank."""
    options = {"heads": HEADS, "dims": DIMS, **options}
    heads, dims = options.pop("heads"), options.pop("dims")
    return Problem(lens, new, heads, 1, *dims, page_size=size * page_size, v_in_k=True, **options)


def plan_for(p: Problem, size: int, **options: Any) -> FakePlan:
    ranks = RankLayout(size, dcp_size=size)
    return plan_of(p, ranks=ranks, description=described(p.num_heads, p.head_dim, p.v_head_dim), **options)


def check_parts(backend: Any, p: Problem, size: int, arch: FakeArch | None = None) -> None:
    model = described(p.num_heads, p.head_dim, p.v_head_dim)
    got = merged(p, size, backend, description=model, arch=arch or FakeArch())
    assert relative_error(got, reference_decode(p, p.head_dim**-0.5)) < BOUND


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_ranks_are_one_softmax(backend: Any, size: int, page_size: int) -> None:
    check_parts(backend, latents(LENS, [1] * len(LENS), size, page_size), size)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("size", [2, 4])
def test_parts_in_a_graph_follow_the_lengths(backend: Any, size: int, page_size: int) -> None:
    steps = GraphSteps(backend, size, page_size)
    assert max(steps.run(lambda graph: graph)) < BOUND


class GraphSteps:
    """Requests that grow, in steps of one graph, in which all ranks compute their parts one after the other."""

    FIRST = (0, 1, 30, 61)
    STEPS, PADDING = 20, 2

    def __init__(self, backend: Any, size: int, page_size: int, arch: FakeArch | None = None, **options: Any) -> None:
        lens = [first + self.STEPS for first in self.FIRST]
        self.p = p = latents(lens, [1] * len(lens), size, page_size, **options)
        plan = plan_for(p, size, arch=arch or FakeArch(), max_running_requests=len(lens), context_len=256)
        built, count = backend(plan, p.device), len(lens) + self.PADDING
        self.layers = [own_layer(p, rank, size) for rank in range(size)]
        self.shared = []
        for rank, layer in enumerate(self.layers):
            parts = built.part_builder(layer.site.shape, len(lens))
            parts.prepare_graphs((2, count))
            self.shared.append(DcpDecode(parts, SimpleNamespace(context=Group(rank, size))))  # type: ignore[arg-type]
        self.table = torch.zeros_like(p.req_to_token)
        slots = TokenSlots(self.table, torch.zeros(count, dtype=torch.int64, device=p.device))
        lengths = torch.ones(count, dtype=torch.int32, device=p.device)
        requests = torch.cat((p.req_pool_indices, p.req_pool_indices.new_zeros(self.PADDING)))
        self.rows = DecodeRows(requests, lengths, (slots, slots))
        self.q = torch.cat((p.q, p.q.new_zeros(self.PADDING, *p.q.shape[1:])))
        self.out = p.q.new_zeros(size, count, p.num_heads, p.v_head_dim)
        self.lse = torch.zeros((size, count, p.num_heads), device=p.device)

    def _graph(self) -> None:
        """Enters the new tokens in the table, as the first kernel of a step does, and attends."""
        rows = self.rows
        self.table[rows.req_pool_indices, rows.seq_lens.long() - 1] = rows.token_slots[0].out_cache_loc.int()
        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))
        for rank, (shared, layer) in enumerate(zip(self.shared, self.layers, strict=True)):
            shared.build_in_graph(rows).rows.attend_part(self.q, layer, self.out[rank], self.lse[rank])

    def run(self, captured: Callable[[Callable[[], None]], Callable[[], None]]) -> Iterator[float]:
        """The error of each step. captured: returns what replays a graph."""
        replay, p, rows, count = captured(self._graph), self.p, self.rows, len(self.FIRST)
        self.table.fill_(len(p.k_cache))  # no slot of the cache
        for request, first in zip(p.req_pool_indices.tolist(), self.FIRST, strict=True):
            self.table[request, :first] = p.req_to_token[request, :first]
        for step in range(self.STEPS):
            before = torch.tensor([first + step for first in self.FIRST], device=p.device)
            rows.seq_lens[:count] = before + 1
            rows.token_slots[0].out_cache_loc[:count] = p.req_to_token[p.req_pool_indices, before].long()
            rows.seq_lens_cpu = rows.seq_lens.tolist()
            for shared in self.shared:
                shared.refresh(rows)
            replay()
            for rank in range(len(self.shared)):
                check_without(self.lse[rank], rows.seq_lens <= rank)
            p.prefix_lens[:] = before.tolist()
            got = weighted(list(self.out), list(self.lse))[:count]
            yield relative_error(got, reference_decode(p, p.head_dim**-0.5))


def all_ranks_in_one(p: Problem, size: int) -> Callable[..., GatheredTokens]:
    """`GatheredTokens.of`, whose group has what the other ranks would send, too."""
    caches = [p.k_cache[rank::size] for rank in range(size)]

    def of(slots: torch.Tensor, positions: torch.Tensor, num_runs: int, context: Group) -> GatheredTokens:
        each = [gathered_of(slots, positions, num_runs, Group(rank, size)) for rank in range(size)]
        sent = torch.cat([cache[gathered.local] for cache, gathered in zip(caches, each, strict=True)])
        group = SimpleNamespace(all_gather=lambda x, dim: sent)
        return replace(each[context.rank], context=group)  # type: ignore[arg-type]

    gathered_of = GatheredTokens.of
    return of


def test_prompts_that_come_together_in_several_runs(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run is planned before any attends, and a layer attends to all of them; then so does the next layer."""
    size, new = 2, [5, 1, 20, 3]
    p = latents([40, 0, 7, 90], new, size, 2)
    store_new_tokens(p)
    monkeypatch.setattr(GatheredTokens, "of", all_ranks_in_one(p, size))
    whole = backend(plan_for(p, size), "cpu").extend_builder(own_layer(p, 1, size).site)
    parts: Any = SimpleNamespace(in_graphs=True, plans_on_host=True)
    extend = DcpExtend(whole, parts, SimpleNamespace(context=Group(1, size)), True, 60)  # type: ignore[arg-type]
    lens = [a + b for a, b in zip(p.prefix_lens, new, strict=True)]
    slots = TokenSlots(p.req_to_token, torch.zeros(sum(new), dtype=torch.int64))
    rows = ExtendRows(
        p.req_pool_indices, torch.tensor(lens), p.prefix, p.start_loc, (slots, slots), new, p.prefix_lens, lens
    )
    metadata = extend.build(rows)
    assert isinstance(metadata, GatheredMetadata) and len(metadata.runs) == 3
    assert extend.plans_on_host and not extend.in_graphs
    for _ in range(2):
        out = torch.full((sum(new), p.num_heads, p.v_head_dim), float("nan"), dtype=p.dtype)
        metadata.attend(p.q, p.k, p.v, own_layer(p, 1, size), out)
        assert relative_error(out, reference_extend(p, p.head_dim**-0.5)) < BOUND


def on_device(graph: Callable[[], None]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph()
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        graph()
    replay: Callable[[], None] = captured.replay
    return replay


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_FLASHINFER, reason="needs a GPU and FlashInfer")
@pytest.mark.parametrize("kernels", ["fa2", "fa3"])
@pytest.mark.parametrize("heads", [16, 64, 128])
class TestOnGpu:
    """Heads of which one, one and two tiles of queries are."""

    def test_parts_of_ranks_are_one_softmax(self, kernels: str, heads: int) -> None:
        arch, backend = FakeArch(features=features_for(kernels)), gpu_backend()
        for size, page_size in ((2, 1), (2, 16), (4, 8)):
            lens = [*LENS, 5000]
            p = latents(lens, [1] * len(lens), size, page_size, heads=heads, dims=LATENT, device="cuda")
            check_parts(backend, p, size, arch)

    def test_parts_in_a_graph_follow_the_lengths(self, kernels: str, heads: int) -> None:
        arch, backend = FakeArch(features=features_for(kernels)), gpu_backend()
        for page_size in (1, 16):
            steps = GraphSteps(backend, 2, page_size, arch, heads=heads, dims=LATENT, device="cuda")
            assert max(steps.run(on_device)) < BOUND


def gpu_backend() -> Any:
    return importlib.import_module(MODULES[0]).FlashInferMLABackend
