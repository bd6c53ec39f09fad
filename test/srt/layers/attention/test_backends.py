"""Attention backends through their Protocol: the Triton one, the choice between backends, and page tables."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import interpreter
import pytest
import torch

from sglang.srt.layers.attention.metadata import SiteMetadata
from sglang.srt.layers.attention.page_table import gather_pages
from sglang.srt.layers.attention.sites import AttentionSites, create_attention_sites
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.triton_ops import pdl
from sglang.srt.plan.layer_spec import AttentionSite
from srt.layers.attention.backend_harness import (
    FakePlan,
    Mode,
    batch_of,
    extend_rows,
    layer_of,
    mixed_batch_of,
    plan_of,
    share_cache,
    sites_of,
)
from srt.layers.attention.kernel_table import check_table
from srt.layers.attention.reference import Problem, reference_decode, reference_extend, relative_error

BF16_OUTPUT_BOUND = 2.5e-3  # the kernels' 1.6e-3, and 1.7e-3 for rounding the output
DECODE_LENS = [0, 99, 31]


@pytest.fixture(autouse=True)
def without_early_launches() -> Iterator[None]:
    """In a model other kernels lie between a plan and the attention that reads it; here there are none."""
    before = "launch_pdl" in pdl.options()
    pdl.enable(False)
    yield
    pdl.enable(before)


def extend_problem(prefix_lens: list[int], **kwargs: Any) -> Problem:
    return Problem(prefix_lens, [20, 5, 33], 4, 2, 64, 64, device=interpreter.DEVICE, **kwargs)


def decode_problem(**kwargs: Any) -> Problem:
    return Problem(DECODE_LENS, [1] * 3, 4, 2, 64, 64, device=interpreter.DEVICE, **kwargs)


def triton_sites(plan: FakePlan, device: Any) -> AttentionSites:
    return sites_of(plan, TritonAttnBackend(plan, device))  # type: ignore[arg-type]


@interpreter.kernel_test
def test_triton_extend_then_decode() -> None:
    """One backend serves steps in turn; a step without prefixes must not make the next one forget its prefixes."""
    for prefix_lens in ([0, 0, 0], [40, 0, 7]):
        p = extend_problem(prefix_lens)
        sites = triton_sites(plan_of(p), p.device)
        for problem in (extend_problem([0, 0, 0]), p):
            out = layer_of(problem)(problem.q, problem.k, problem.v, batch_of(problem, Mode.EXTEND, sites))
            expected = reference_extend(problem, 64**-0.5).flatten(1)
            assert relative_error(out, expected) < BF16_OUTPUT_BOUND


@interpreter.kernel_test
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_triton_decode(kv_dtype: torch.dtype) -> None:
    p = decode_problem(kv_dtype=kv_dtype, k_scale=0.75, v_scale=1.5)
    sites = triton_sites(plan_of(p, max_running_requests=4), p.device)
    out = layer_of(p)(p.q, p.k, p.v, batch_of(p, Mode.DECODE, sites))
    assert relative_error(out, reference_decode(p, 64**-0.5).flatten(1)) < BF16_OUTPUT_BOUND


@interpreter.kernel_test
@pytest.mark.parametrize("decodes", [3, 2], ids=["all", "padded"])
def test_triton_prompts_behind_decoding_requests(decodes: int) -> None:
    """With padding the last row of the decoding requests lies over the first token of the prompts."""
    d, e = decode_problem(), extend_problem([40, 0, 7])
    share_cache(d, e)
    sites = triton_sites(plan_of(e, max_running_requests=3), e.device)
    q, k, v = (torch.cat((a[:decodes], b)) for a, b in ((d.q, e.q), (d.k, e.k), (d.v, e.v)))
    expected = torch.cat((reference_decode(d, 64**-0.5)[:decodes], reference_extend(e, 64**-0.5))).flatten(1)
    out = layer_of(e)(q, k, v, mixed_batch_of(d, e, sites, decodes))
    assert relative_error(out[:decodes], expected[:decodes]) < BF16_OUTPUT_BOUND
    assert relative_error(out[decodes:], expected[decodes:]) < BF16_OUTPUT_BOUND


@interpreter.kernel_test
def test_a_plan_outlives_those_of_other_steps() -> None:
    """As of the halves of a step, both planned before either computes, and of a draft's first rows, which attend over
    what the target planned. The other steps have more rows, and other lengths."""
    p = decode_problem()
    sites = triton_sites(plan_of(p, max_running_requests=16), p.device)
    batch = batch_of(p, Mode.DECODE, sites)
    rows = batch.decode
    more = replace(rows, seq_lens=rows.seq_lens.repeat(4) + 60, req_pool_indices=rows.req_pool_indices.repeat(4))
    sites.metadata(replace(batch, decode=more))
    out = layer_of(p)(p.q, p.k, p.v, batch)
    assert relative_error(out, reference_decode(p, 64**-0.5).flatten(1)) < BF16_OUTPUT_BOUND


@interpreter.kernel_test
def test_graph_batches_may_exceed_the_running_requests() -> None:
    p = decode_problem()
    sites = triton_sites(plan_of(p, max_running_requests=1), p.device)
    with pytest.raises(ValueError, match="exceeds the decode workspace"):
        batch_of(p, Mode.DECODE, sites)
    sites.prepare_graphs((3,))
    batch = batch_of(p, Mode.DECODE)
    batch.metadata = sites.metadata(batch, in_graph=True)
    out = layer_of(p)(p.q, p.k, p.v, batch)
    assert relative_error(out, reference_decode(p, 64**-0.5).flatten(1)) < BF16_OUTPUT_BOUND


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
def test_a_captured_graph_follows_the_lengths() -> None:
    p = Problem([3000, 0, 700], [1] * 3, 8, 2, 128, 128, device="cuda")
    sites = triton_sites(plan_of(p, max_running_requests=3), "cuda")
    sites.prepare_graphs((3,))
    batch = batch_of(p, Mode.DECODE)
    assert batch.decode is not None
    batch.decode.seq_lens_cpu = None
    layer = layer_of(p)

    def step() -> torch.Tensor:
        batch.metadata = sites.metadata(batch, in_graph=True)
        return layer(p.q, p.k, p.v, batch)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lens in ([3000, 0, 700], [1, 2, 3], [63, 2500, 64]):
        p.prefix_lens = lens
        batch.decode.seq_lens.copy_(p.prefix + 1)
        sites.refresh(batch.decode)
        graph.replay()
        assert relative_error(out, reference_decode(p, 128**-0.5).flatten(1)) < BF16_OUTPUT_BOUND


@dataclass
class Recorder:
    """A backend and its own builders and metadata, which write down their calls."""

    name: str
    plans_on_host: bool = False
    in_graphs: bool = True
    calls: list[str] = field(default_factory=list)

    def __hash__(self) -> int:
        return id(self)

    def __getattr__(self, method: str) -> Any:
        if method.startswith("__"):
            raise AttributeError(method)
        return lambda *args: (self.calls.append(method), self)[1]


@pytest.mark.parametrize("plans_on_host", [True, False])
def test_each_kind_of_rows_has_its_backend(plans_on_host: bool) -> None:
    extend, decode = Recorder("extend", in_graphs=False), Recorder("decode", plans_on_host)
    p = Problem([3], [1], 4, 2, 64, 64)
    sites = sites_of(plan_of(p), decode, extend)
    assert (sites.decode_plans_on_host, sites.extend_plans_on_host) == (plans_on_host, False)
    assert (sites.decode_in_graphs, sites.extend_in_graphs) == (True, False)
    extend.calls.clear()
    decode.calls.clear()
    layer_of(p)(p.q, p.k, p.v, batch_of(p, Mode.EXTEND, sites))
    assert extend.calls == ["build", "attend"] and decode.calls == []
    layer_of(p)(p.q, p.k, p.v, batch_of(p, Mode.DECODE, sites))
    sites.prepare_graphs((8,))
    in_graph = batch_of(p, Mode.DECODE)
    sites.metadata(in_graph, in_graph=True)
    sites.refresh(in_graph.decode)
    assert decode.calls == ["build", "attend", "prepare_graphs", "build_in_graph"] + ["refresh"] * plans_on_host
    assert len(extend.calls) == 2


def test_sites_with_one_builder_share_what_it_builds() -> None:
    shared = Recorder("shared")
    sites = [AttentionSite(layer_of(Problem([3], [1], 4, 2, 64, 64)).site.shape, window) for window in (0, 8)]
    both = AttentionSites(dict.fromkeys(sites, shared), dict.fromkeys(sites, shared))
    metadata = both.metadata(batch_of(Problem([3], [1], 4, 2, 64, 64), Mode.DECODE))
    assert shared.calls == ["build"] and [type(metadata[site]) for site in sites] == [SiteMetadata] * 2
    assert metadata[sites[0]].decode is metadata[sites[1]].decode is shared


@dataclass
class FakeChoice:
    name: str

    def load(self) -> Any:
        return lambda plan, device: Recorder(self.name)


@pytest.mark.parametrize("names", [("a", "a"), ("a", "b")])
def test_the_plan_chooses_backends(names: tuple[str, str]) -> None:
    plan = plan_of(Problem([3], [1], 4, 2, 64, 64), description=SimpleNamespace(layers=()))
    plan.choices = dict(zip(("decode_attention", "extend_attention"), map(FakeChoice, names), strict=True))
    sites = create_attention_sites(plan, "cpu")  # type: ignore[arg-type]
    (decode,), (extend,) = sites.decode.values(), sites.extend.values()
    assert (decode.name, extend.name) == names  # type: ignore[attr-defined]
    assert (decode is extend) == (names == ("a", "a")), "one object of each backend"


BUILDERS = {
    "triton": ("triton_backend", "TritonDecode", "TritonExtend"),
    "torch_native": ("torch_native_backend", "NativeDecode", "NativeExtend"),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_what_the_plan_reads_of_a_kernel_is_what_its_builders_say(name: str) -> None:
    """The plan decides about graphs before torch is loaded, so the table repeats it."""
    module_name, *classes = BUILDERS[name]
    check_table(name, importlib.import_module(f"sglang.srt.layers.attention.{module_name}"), classes)


@pytest.mark.parametrize("page_size", [1, 16])
def test_page_table(page_size: int) -> None:
    p = Problem([0, 40, 15], [1, 7, 1], 4, 2, 64, 64, page_size=page_size)
    pages = gather_pages(extend_rows(p), 0, page_size)
    for i, total in enumerate([1, 47, 16]):
        mine = pages.indices[pages.indptr[i] : pages.indptr[i + 1]]
        slots = (mine[:, None] * page_size + torch.arange(page_size)).flatten()
        used = total - (len(mine) - 1) * page_size
        assert pages.last_len[i] == used
        assert torch.equal(slots[:total].int(), p.req_to_token[p.req_pool_indices[i], :total])


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
