"""The FlashInfer backend of latent attention: on the CPU over a wrapper that plans into the buffers it is given and
attends, in torch, over the pages that were planned; on a GPU that has the package against the native backend."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.blocks.mla.spec import MLA
from sglang.srt.errors import UserError
from sglang.srt.layers.attention.call_site import Attention
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor import graph_runner
from srt.layers.attention.backend_harness import (
    FakeArch,
    FakePlan,
    Mode,
    batch_of,
    layer_of,
    mixed_batch_of,
    plan_of,
    share_cache,
    sites_of,
    store_new_tokens,
)
from srt.layers.attention.decode_steps import DIM, DecodeSteps, reexecuting_capture
from srt.layers.attention.fake_flashinfer import FakeLatentWrapper, NewLatentWrapper, fake_flashinfer
from srt.layers.attention.kernel_table import check_table
from srt.layers.attention.reference import Problem, relative_error

MODULES = ("sglang.srt.layers.attention.flashinfer_mla_backend", "sglang.srt.layers.attention.flashinfer_backend")
BOUND = 6e-3  # probabilities and outputs are rounded to bf16
RANK = 48
HAS_FLASHINFER = torch.cuda.is_available() and importlib.util.find_spec("flashinfer") is not None


def described(heads: int, dim: int, rank: int) -> SimpleNamespace:
    """A model whose softmax has the scale dim ** -0.5."""
    mixer = MLA(heads, 0, rank, dim - 16, 16, 32)
    return SimpleNamespace(layers=[SimpleNamespace(mixer=mixer)] * 2)


@pytest.fixture(params=[FakeLatentWrapper, NewLatentWrapper], ids=["0.6", "0.7"])
def fake_backend(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The backend's module over the fake wrapper, and graphs that are the step run again."""
    log: list[str] = []
    fake = fake_flashinfer(log, request.param)
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", fake.mla)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(graph_runner, "capture", reexecuting_capture(log))
    module = importlib.import_module(MODULES[0])
    monkeypatch.setattr(module, "WORKSPACE_BYTES", 16)
    monkeypatch.setattr(module, "PLAN_BYTES", 16)
    yield module
    for name in MODULES:
        del sys.modules[name]


def test_more_than_the_library_plans_is_refused(fake_backend: ModuleType) -> None:
    """Its planner writes behind its lists."""
    e = Problem([0], [9], 128, 1, DIM, RANK)
    fake_backend.MAX_WORKS = 2 * FakeArch().num_sms + 9
    attention = sites_of(plan_for(e), fake_backend.FlashInferMLABackend(plan_for(e), "cpu"))
    with pytest.raises(UserError, match="cannot plan 9 new tokens of 128 heads in a step; use --chunked-prefill"):
        batch_of(e, Mode.EXTEND, attention)


@pytest.mark.parametrize("in_graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_every_token_is_seen(fake_backend: ModuleType, page_size: int, in_graphs: bool) -> None:
    """Three requests in a graph of four, across page boundaries, after a page of one has been another's."""
    model = described(4, DIM, RANK)
    steps = DecodeSteps(
        fake_backend.FlashInferMLABackend, [1, 14, 30], page_size, "cpu", (4, 1), RANK, description=model
    )
    if in_graphs:
        steps.capture((2, 4))
    for number in range(20):
        assert relative_error(steps.step(), steps.expected()) < BOUND, f"step {number}"


def test_graphs_of_all_sizes_share_their_lists(fake_backend: ModuleType) -> None:
    """As the plan counts them: of each size they would take 8 MiB."""
    plan = replace(plan_for(latents([9], [1])), max_running_requests=4)
    (site,) = plan.attention_sites
    builder = fake_backend.FlashInferMLABackend(plan, "cpu").decode_builder(site)
    builder.prepare_graphs((1, 2, 4))
    assert len({id(planned._wrapper._int_workspace_buffer) for planned in builder._in_graphs.values()}) == 1


def latents(lens: list[int], new: list[int], device: str = "cpu", dims: tuple[int, int] = (DIM, RANK)) -> Problem:
    return Problem(lens, new, 4, 1, *dims, page_size=16, v_in_k=True, device=device)


def plan_for(p: Problem) -> FakePlan:
    return replace(plan_of(p), description=described(p.num_heads, p.head_dim, p.v_head_dim))


def native(p: Problem, mode: Mode, layer: Attention) -> torch.Tensor:
    sites = sites_of(plan_for(p), TorchNativeAttnBackend(None, p.device))  # type: ignore[arg-type]
    return layer(p.q, p.k, p.v, batch_of(p, mode, sites)).float()


def check_prompts_behind_decodes(
    backend_class: Any, device: str, dims: tuple[int, int] = (DIM, RANK), features: frozenset[str] = frozenset()
) -> None:
    """Without and with a prefix, lengths on both sides of page boundaries; both are planned before either runs."""
    d, e = latents([0, 15, 16, 300], [1] * 4, device, dims), latents([0, 40, 300, 16], [33, 7, 20, 1], device, dims)
    share_cache(d, e)
    plan = replace(plan_for(e), arch=FakeArch(features=features))
    for p in (d, e):
        store_new_tokens(p)
    batch = mixed_batch_of(d, e, sites_of(plan, backend_class(plan, device)))
    q, k, v = (torch.cat(pair) for pair in ((d.q, e.q), (d.k, e.k), (d.v, e.v)))
    expected = torch.cat([native(d, Mode.DECODE, layer_of(d)), native(e, Mode.EXTEND, layer_of(e))])
    assert relative_error(layer_of(e)(q, k, v, batch), expected) < BOUND


def test_what_the_plan_reads_of_the_kernel(fake_backend: ModuleType) -> None:
    check_table("flashinfer_mla", fake_backend, ["FlashInferMLADecode", "FlashInferMLAExtend"])


def test_prompts_behind_decoding_requests(fake_backend: ModuleType) -> None:
    check_prompts_behind_decodes(fake_backend.FlashInferMLABackend, "cpu")


@pytest.mark.parametrize("features", [frozenset(), frozenset({"wgmma"})], ids=["fa2", "fa3"])
def test_the_kernels_are_those_of_the_architecture(fake_backend: ModuleType, features: frozenset[str]) -> None:
    p = latents([5], [1])
    backend = fake_backend.FlashInferMLABackend(replace(plan_for(p), arch=FakeArch(features=features)), "cpu")
    site = layer_of(p).site
    for wrapper in (next(backend.decode_builder(site)._eager), backend.extend_builder(site)._wrapper):
        assert wrapper._wrapper.backend == ("fa3" if features else "fa2")


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_FLASHINFER, reason="needs a GPU and FlashInfer")
class TestOnGpu:
    @pytest.mark.parametrize("kernels", ["fa2", "fa3"])
    def test_prompts_behind_decoding_requests(self, kernels: str) -> None:
        backend = importlib.import_module(MODULES[0]).FlashInferMLABackend
        check_prompts_behind_decodes(backend, "cuda", (576, 512), features_for(kernels))


def features_for(kernels: str) -> frozenset[str]:
    """Of an architecture whose kernels these are. Skips the test where the GPU has no such kernels."""
    if kernels == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs wgmma")
    return frozenset({"wgmma"}) if kernels == "fa3" else frozenset()
