"""Attention backends through their Protocol: the Triton one, the choice between backends, and page tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import interpreter
import pytest
import torch

from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention.attention_registry import HybridAttnBackend, create_attention_backend
from sglang.srt.layers.attention.page_table import gather_pages
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.forward_batch import ForwardMode
from srt.layers.attention.backend_harness import batch_of, layer_of, plan_of, share_cache
from srt.layers.attention.reference import Problem, reference_decode, reference_extend, relative_error

BF16_OUTPUT_BOUND = 2.5e-3  # the kernels' 1.6e-3, and 1.7e-3 for rounding the output
DECODE_LENS = [0, 99, 31]


def extend_problem(prefix_lens: list[int], **kwargs: Any) -> Problem:
    return Problem(prefix_lens, [20, 5, 33], 4, 2, 64, 64, device=interpreter.DEVICE, **kwargs)


def decode_problem(**kwargs: Any) -> Problem:
    return Problem(DECODE_LENS, [1] * 3, 4, 2, 64, 64, device=interpreter.DEVICE, **kwargs)


@interpreter.kernel_test
def test_triton_extend_then_decode() -> None:
    """One backend serves steps in turn; a step without prefixes must not make the next one forget its prefixes."""
    for prefix_lens in ([0, 0, 0], [40, 0, 7]):
        p = extend_problem(prefix_lens)
        backend = TritonAttnBackend(plan_of(p), p.device)
        for problem in (extend_problem([0, 0, 0]), p):
            batch = batch_of(problem, ForwardMode.EXTEND, backend)
            backend.init_forward_metadata(batch)
            out = layer_of(problem)(problem.q, problem.k, problem.v, batch)
            expected = reference_extend(problem, 64**-0.5).flatten(1)
            assert relative_error(out, expected) < BF16_OUTPUT_BOUND


@interpreter.kernel_test
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_triton_decode(kv_dtype: torch.dtype) -> None:
    p = decode_problem(kv_dtype=kv_dtype, k_scale=0.75, v_scale=1.5)
    backend = TritonAttnBackend(plan_of(p, max_running_requests=4), p.device)
    batch = batch_of(p, ForwardMode.DECODE, backend)
    backend.init_forward_metadata(batch)
    out = layer_of(p)(p.q, p.k, p.v, batch)
    assert relative_error(out, reference_decode(p, 64**-0.5).flatten(1)) < BF16_OUTPUT_BOUND


@interpreter.kernel_test
@pytest.mark.parametrize("decodes", [3, 2], ids=["all", "padded"])
def test_triton_prompts_behind_decoding_requests(decodes: int) -> None:
    """With padding the last row of the decoding requests lies over the first token of the prompts."""
    d, e = decode_problem(), extend_problem([40, 0, 7])
    share_cache(d, e)
    backend = TritonAttnBackend(plan_of(e, max_running_requests=3), e.device)
    batch = batch_of(e, ForwardMode.EXTEND, backend)
    batch.decodes = batch_of(d, ForwardMode.DECODE, backend)
    batch.extend_start_loc = e.start_loc + decodes
    backend.init_forward_metadata(batch.decodes)
    backend.init_forward_metadata(batch)
    q, k, v = (torch.cat((a[:decodes], b)) for a, b in ((d.q, e.q), (d.k, e.k), (d.v, e.v)))
    expected = torch.cat((reference_decode(d, 64**-0.5)[:decodes], reference_extend(e, 64**-0.5))).flatten(1)
    out = layer_of(e)(q, k, v, batch)
    assert relative_error(out[:decodes], expected[:decodes]) < BF16_OUTPUT_BOUND
    assert relative_error(out[decodes:], expected[decodes:]) < BF16_OUTPUT_BOUND


@interpreter.kernel_test
def test_graph_batches_may_exceed_the_running_requests() -> None:
    p = decode_problem()
    backend = TritonAttnBackend(plan_of(p, max_running_requests=1), p.device)
    batch = batch_of(p, ForwardMode.DECODE, backend)
    with pytest.raises(ValueError, match="exceeds the decode workspace"):
        backend.init_forward_metadata(batch)
    backend.init_cuda_graph_state((3,))
    backend.init_forward_metadata_capture(batch)
    out = layer_of(p)(p.q, p.k, p.v, batch)
    assert relative_error(out, reference_decode(p, 64**-0.5).flatten(1)) < BF16_OUTPUT_BOUND


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
def test_a_captured_graph_follows_the_lengths() -> None:
    p = Problem([3000, 0, 700], [1] * 3, 8, 2, 128, 128, device="cuda")
    backend = TritonAttnBackend(plan_of(p, max_running_requests=3), "cuda")
    backend.init_cuda_graph_state((3,))
    batch = batch_of(p, ForwardMode.DECODE, backend)
    batch.seq_lens_cpu = None
    layer = layer_of(p)

    def step() -> torch.Tensor:
        backend.init_forward_metadata_capture(batch)
        return layer(p.q, p.k, p.v, batch)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lens in ([3000, 0, 700], [1, 2, 3], [63, 2500, 64]):
        p.prefix_lens = lens
        batch.seq_lens.copy_(p.prefix + 1)
        backend.init_forward_metadata_replay(batch, 3)
        graph.replay()
        assert relative_error(out, reference_decode(p, 128**-0.5).flatten(1)) < BF16_OUTPUT_BOUND


@dataclass
class Recorder:
    """A backend that writes down its calls."""

    name: str
    calls: list[str] = field(default_factory=list)

    def __getattr__(self, method: str) -> Any:
        return lambda *args: self.calls.append(method)


def test_hybrid_sends_each_phase_to_its_backend() -> None:
    extend, decode = Recorder("extend"), Recorder("decode")
    hybrid = HybridAttnBackend(extend, decode)  # type: ignore[arg-type]
    p = Problem([3], [1], 4, 2, 64, 64)
    extend_batch, decode_batch = (batch_of(p, mode, hybrid) for mode in (ForwardMode.EXTEND, ForwardMode.DECODE))
    hybrid.init_forward_metadata(extend_batch)
    layer_of(p)(p.q, p.k, p.v, extend_batch)
    assert extend.calls == ["init_forward_metadata", "forward_extend"] and decode.calls == []
    hybrid.init_cuda_graph_state((8,))
    hybrid.init_forward_metadata(decode_batch)
    hybrid.init_forward_metadata_capture(decode_batch)
    hybrid.init_forward_metadata_replay(decode_batch, 1)
    layer_of(p)(p.q, p.k, p.v, decode_batch)
    assert decode.calls == [
        "init_cuda_graph_state", "init_forward_metadata", "init_forward_metadata_capture",
        "init_forward_metadata_replay", "forward_decode",
    ]  # fmt: skip
    assert len(extend.calls) == 2


@dataclass
class FakeChoice:
    name: str

    def load(self) -> Any:
        return lambda plan, device: Recorder(self.name)


def test_registry_composes_what_the_plan_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_registry, "PLUGIN_BACKENDS", {})
    plan = plan_of(Problem([3], [1], 4, 2, 64, 64))
    plan.choices = {"extend_attention": FakeChoice("a"), "decode_attention": FakeChoice("a")}
    assert create_attention_backend(plan).name == "a"  # type: ignore[arg-type,attr-defined]
    plan.choices["decode_attention"] = FakeChoice("b")
    both = create_attention_backend(plan)  # type: ignore[arg-type]
    assert isinstance(both, HybridAttnBackend) and (both.extend.name, both.decode.name) == ("a", "b")  # type: ignore[attr-defined]

    @attention_registry.register_attention_backend("b")
    def plugin(plan: Any, device: str) -> Any:
        return Recorder("plugin")

    both = create_attention_backend(plan)  # type: ignore[arg-type]
    assert both.decode.name == "plugin"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="registered twice"):
        attention_registry.register_attention_backend("b")(plugin)


@pytest.mark.parametrize("page_size", [1, 16])
def test_page_table(page_size: int) -> None:
    p = Problem([0, 40, 15], [1, 7, 1], 4, 2, 64, 64, page_size=page_size)
    batch = batch_of(p, ForwardMode.EXTEND, None)
    pages = gather_pages(batch, batch.token_slots[0], page_size)
    for i, total in enumerate([1, 47, 16]):
        mine = pages.indices[pages.indptr[i] : pages.indptr[i + 1]]
        slots = (mine[:, None] * page_size + torch.arange(page_size)).flatten()
        used = total - (len(mine) - 1) * page_size
        assert pages.last_len[i] == used
        assert torch.equal(slots[:total].int(), p.req_to_token[p.req_pool_indices[i], :total])


def test_in_interpreter() -> None:
    interpreter.run_file(__file__)
