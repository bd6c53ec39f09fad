"""The FlashInfer backend: the order of its host work on the CPU, its numbers on a GPU that has the package.

On the CPU FlashInfer's wrappers are replaced by ones that plan into the buffers they are given and attend, in torch,
over the pages that were planned."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

from sglang.srt.layers.attention.call_site import Attention
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.attention.workspaces import allocated_in
from sglang.srt.layers.step_rows import TokenSlots
from sglang.srt.model_executor import graph_runner
from sglang.srt.plan.cache_spec import FULL, Window, key_value_cache
from sglang.srt.plan.caches import group_caches
from sglang.srt.plan.layer_spec import AttentionSite
from srt.layers.attention.backend_harness import (
    FakeArch,
    Mode,
    batch_of,
    layer_of,
    mixed_batch_of,
    new_slots,
    plan_of,
    share_cache,
    sites_of,
    store_new_tokens,
)
from srt.layers.attention.decode_steps import DecodeSteps, reexecuting_capture
from srt.layers.attention.fake_flashinfer import fake_flashinfer
from srt.layers.attention.kernel_table import check_table
from srt.layers.attention.reference import (
    Problem,
    reference_decode,
    reference_extend,
    relative_error,
)

MODULE = "sglang.srt.layers.attention.flashinfer_backend"
BOUND = 6e-3  # probabilities and outputs are rounded to bf16
HEADS = [(4, 2), (8, 1)]  # without and with tensor cores
HAS_FLASHINFER = torch.cuda.is_available() and importlib.util.find_spec("flashinfer") is not None


@pytest.fixture
def fake_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The backend's module over the fake wrappers, and graphs that are the step run again."""
    log: list[str] = []
    fake = fake_flashinfer(log)
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setattr(graph_runner, "capture", reexecuting_capture(log))
    module = importlib.import_module(MODULE)
    monkeypatch.setattr(module, "WORKSPACE_BYTES", 16)
    yield module
    del sys.modules[MODULE]


@pytest.mark.parametrize("in_graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_every_token_is_seen(fake_backend: ModuleType, page_size: int, in_graphs: bool) -> None:
    """Three requests in a graph of four, across page boundaries, after a page of one has been another's."""
    steps = DecodeSteps(fake_backend.FlashInferAttnBackend, [1, 14, 30], page_size, "cpu", (4, 2))
    if in_graphs:
        steps.capture((2, 4))
    for number in range(20):
        assert relative_error(steps.step(), steps.expected()) < BOUND, f"step {number}"


@pytest.mark.parametrize("in_graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("window", [1, 6, 17])
def test_a_window_is_seen_and_no_more(fake_backend: ModuleType, window: int, page_size: int, in_graphs: bool) -> None:
    steps = DecodeSteps(fake_backend.FlashInferAttnBackend, [1, 14, 30], page_size, "cpu", (4, 2), window=window)
    if in_graphs:
        steps.capture((2, 4))
    for number in range(20):
        assert relative_error(steps.step(), steps.expected()) < BOUND, f"step {number}"


def test_what_the_plan_reads_of_the_kernel(fake_backend: ModuleType) -> None:
    check_table("flashinfer", fake_backend, ["FlashInferDecode", "FlashInferExtend"])


LENS = {
    Mode.EXTEND: ([0, 0, 40, 15, 16, 30], [33, 16, 7, 1, 1, 20]),
    Mode.DECODE: ([0, 15, 16, 31], [1] * 4),
}


@pytest.mark.parametrize("mode", [Mode.EXTEND, Mode.DECODE], ids=["prefill", "decode"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("window", [1, 7, 24, 1000])
def test_layers_with_and_without_a_window_in_one_step(
    fake_backend: ModuleType, window: int, page_size: int, mode: Mode
) -> None:
    """Each kind in a table of its own, planned before either runs; what the new tokens do not see is no number."""
    check_two_kinds_of_layers(fake_backend.FlashInferAttnBackend, window, page_size, mode, "cpu")


def check_two_kinds_of_layers(backend_class: Any, window: int, page_size: int, mode: Mode, device: str) -> None:
    whole, recent = (Problem(*LENS[mode], 4, 2, 64, 64, page_size=page_size, device=device) for _ in range(2))
    share_cache(whole, recent)  # rows of the second table hold other slots
    for p in (whole, recent):
        store_new_tokens(p)
    expected = [reference(p, mode, size) for p, size in ((whole, 0), (recent, window))]
    for row, before in zip(recent.req_pool_indices.tolist(), recent.prefix_lens, strict=True):
        hidden = recent.req_to_token[row, : max(0, before - (window - 1)) // page_size * page_size].long()
        recent.k_cache[hidden] = recent.v_cache[hidden] = float("nan")
    kv = [key_value_cache("kv", 2, 64, 64, "bfloat16", lifetime) for lifetime in (FULL, Window(window))]
    plan = plan_of(whole, caches=group_caches([(cache,) for cache in kv]))
    plan.attention_sites = tuple(AttentionSite(plan.shape, size) for size in (0, window))
    layers = (layer_of(whole), layer_of(recent, sliding_window=window))
    batch = batch_of(whole, mode)
    rows = batch.decode or batch.extend
    assert rows is not None
    rows.token_slots = (*rows.token_slots, TokenSlots(recent.req_to_token, new_slots(recent)))
    layers[1].cache.table = 1
    batch.metadata = sites_of(plan, backend_class(plan, device)).metadata(batch)
    outs = [layer(p.q, p.k, p.v, batch) for layer, p in zip(layers, (whole, recent), strict=True)]
    for out, want in zip(outs, expected, strict=True):
        assert relative_error(out, want.flatten(1)) < BOUND


def reference(p: Problem, mode: Mode, window: int) -> torch.Tensor:
    compute = reference_decode if mode is Mode.DECODE else reference_extend
    return compute(p, p.head_dim**-0.5, window=window)


class Stream:
    """What was launched and has not run; an event is a point in it."""

    def __init__(self) -> None:
        self.launched: list[Any] = []
        self.recorded = 0

    def record(self) -> None:
        self.recorded = len(self.launched)

    def synchronize(self) -> None:
        for work in self.launched[: self.recorded]:
            work()
        del self.launched[: self.recorded]
        self.recorded = 0


class StagingWrapper:
    """Plans through one staging list, as FlashInfer does; `run` reads what was copied by then."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.staging: list[int] = []
        self.on_device: list[int] = []
        self.outputs: list[list[int]] = []

    def plan(self, lens: list[int]) -> None:
        self.staging[:] = lens
        self.stream.launched.append(lambda: self.on_device.__setitem__(slice(None), self.staging))

    def run(self, *args: Any) -> None:
        self.stream.launched.append(lambda: self.outputs.append(list(self.on_device)))


def test_a_plan_made_ahead_leaves_the_last_one_alone(fake_backend: ModuleType) -> None:
    """The host plans the next step while the device has not begun the last one. Who runs a plan that another one has
    replaced is told."""
    stream = Stream()
    inner = StagingWrapper(stream)
    wrapper = fake_backend.PlannedWrapper(inner, stream)
    steps = [[1, 2], [30, 4], [5, 600]]
    for lens in steps:
        plan = wrapper.plan(lens)
        plan.run(None, (None, None))
    stream.record()
    stream.synchronize()
    assert inner.outputs == steps
    wrapper.plan([7])
    with pytest.raises(AssertionError, match="planned for another step"):
        plan.run(None, (None, None))


@pytest.mark.parametrize("mode", [Mode.EXTEND, Mode.DECODE], ids=["prefill", "decode"])
def test_halves_of_a_step_and_the_whole_of_it_are_planned_before_either_attends(
    fake_backend: ModuleType, mode: Mode
) -> None:
    """Where attention groups have requests of their own, both halves may have some that decode."""
    news = ([7, 3], [6]) if mode is Mode.EXTEND else ([1, 1], [1])
    first, second = (
        Problem(lens, new, 4, 2, 64, 64, page_size=4) for lens, new in zip(([0, 9], [5]), news, strict=True)
    )
    share_cache(first, second)
    sites = sites_of(plan_of(second), fake_backend.FlashInferAttnBackend(plan_of(second), "cpu"))
    steps = (first, second, first)
    for p in steps:
        store_new_tokens(p)
    batches = [batch_of(p, mode, sites) for p in steps]
    for p, batch in zip(steps, batches, strict=True):
        layer = layer_of(p)
        assert relative_error(layer(p.q, p.k, p.v, batch), native(p, mode, layer)) < BOUND


def test_the_workspace_is_memory_that_may_sleep(fake_backend: ModuleType) -> None:
    regions: list[bool] = []

    @contextmanager
    def region() -> Iterator[None]:
        regions.append(True)
        yield

    plan = plan_of(Problem([0], [5], 8, 2, 128, 128, page_size=16))
    with allocated_in(region):
        fake_backend.FlashInferAttnBackend(plan, "cpu")
    fake_backend.FlashInferAttnBackend(plan, "cpu")
    assert regions == [True]


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_a_builder_of_long_prompts_is_checked(
    fake_backend: ModuleType, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = Problem([0], [5], 8, 2, 128, 128, page_size=page_size)
    plan = plan_of(p)
    (site,) = plan.attention_sites
    backend = fake_backend.FlashInferAttnBackend(plan, "cpu")
    assert backend.long_prompt_builder(site) is not None
    right = fake_backend.PlannedWrapper.run

    def run(self: Any, *args: Any, out: torch.Tensor, **options: Any) -> None:
        right(self, *args, out=out, **options)
        out[-1] = out[0]

    monkeypatch.setattr(fake_backend.PlannedWrapper, "run", run)
    with pytest.raises(RuntimeError, match="its attention is wrong by 0"):
        backend.long_prompt_builder(site)


@pytest.mark.parametrize(
    ("features", "dtype", "kernels"),
    [
        ({"wgmma"}, torch.bfloat16, "fa3"),
        ({"wgmma"}, torch.float8_e4m3fn, "fa2"),
        ({"mma_sync_block_scale"}, torch.bfloat16, "fa2"),
    ],
)
def test_prompts_take_the_kernels_of_the_planned_gpu(
    fake_backend: ModuleType, features: set[str], dtype: torch.dtype, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library would take those of the GPU that is there."""
    p = Problem([0], [5], 8, 2, 128, 128, kv_dtype=dtype)
    plan = plan_of(p, arch=FakeArch(features=frozenset(features)))
    planned: list[str] = []
    plan_next = fake_backend.FlashInferExtend._plan_next

    def spy(self: Any, *args: Any) -> Any:
        plan = plan_next(self, *args)
        planned.append(plan.wrapper._wrapper.backend)
        return plan

    monkeypatch.setattr(fake_backend.FlashInferExtend, "_plan_next", spy)
    batch_of(p, Mode.EXTEND, sites_of(plan, fake_backend.FlashInferAttnBackend(plan, "cpu")))
    assert planned == [kernels]


on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAS_FLASHINFER, reason="needs a GPU and FlashInfer")]


@pytest.fixture
def backend_class() -> Any:
    return importlib.import_module(MODULE).FlashInferAttnBackend


def native(p: Problem, mode: Mode, layer: Attention) -> torch.Tensor:
    sites = sites_of(plan_of(p), TorchNativeAttnBackend(None, p.device))  # type: ignore[arg-type]
    return layer(p.q, p.k, p.v, batch_of(p, mode, sites)).float()


class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
    @pytest.mark.parametrize("mode", [Mode.EXTEND, Mode.DECODE], ids=["prefill", "decode"])
    @pytest.mark.parametrize("heads", HEADS)
    @pytest.mark.parametrize("page_size", [1, 16])
    def test_against_the_native_backend(
        self, backend_class: Any, page_size: int, heads: tuple[int, int], mode: Mode, kv_dtype: torch.dtype
    ) -> None:
        """Lengths on both sides of page boundaries, without and with a prefix, and a scale that is not the default."""
        lens, new = [0, 0, 40, 15, 16, 300], [33, 16, 7, 1, 1, 20]
        if mode is Mode.DECODE:
            lens, new = [0, 15, 16, 31, 300, 47], [1] * 6
        scales = {"k_scale": 0.5, "v_scale": 1.5} if kv_dtype.itemsize == 1 else {}
        p = Problem(lens, new, *heads, 64, 64, page_size=page_size, device="cuda", kv_dtype=kv_dtype, **scales)
        store_new_tokens(p)
        layer = layer_of(p)
        layer.scale = 0.2
        plan = plan_of(p)
        batch = batch_of(p, mode, sites_of(plan, backend_class(plan, "cuda")))
        assert relative_error(layer(p.q, p.k, p.v, batch), native(p, mode, layer)) < BOUND

    @pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
    @pytest.mark.parametrize("head_dim", [128, 256])
    @pytest.mark.parametrize("page_size", [1, 64])
    def test_long_prompts(self, backend_class: Any, page_size: int, head_dim: int, kv_dtype: torch.dtype) -> None:
        p = Problem(
            [0, 700], [1900, 300], 8, 2, head_dim, head_dim, page_size=page_size, device="cuda", kv_dtype=kv_dtype
        )
        store_new_tokens(p)
        layer, plan = layer_of(p), plan_of(p)
        (site,) = plan.attention_sites
        backend = backend_class(plan, "cuda")
        attention = sites_of(plan, TorchNativeAttnBackend(None, p.device))  # type: ignore[arg-type]
        attention.long_prompts[site] = backend.long_prompt_builder(site)
        batch = batch_of(p, Mode.EXTEND, attention)
        assert type(batch.metadata[site].extend).__name__ == "FlashInferExtendMetadata"
        assert relative_error(layer(p.q, p.k, p.v, batch), native(p, Mode.EXTEND, layer)) < BOUND

    @pytest.mark.parametrize("heads", HEADS)
    def test_prompts_behind_decoding_requests(self, backend_class: Any, heads: tuple[int, int]) -> None:
        """Both are planned before either runs."""
        d, e = (
            Problem(lens, new, *heads, 64, 64, page_size=16, device="cuda")
            for lens, new in (([0, 15, 16, 300], [1] * 4), ([0, 40, 300], [33, 7, 20]))
        )
        share_cache(d, e)
        plan = plan_of(e)
        for p in (d, e):
            store_new_tokens(p)
        batch = mixed_batch_of(d, e, sites_of(plan, backend_class(plan, "cuda")))
        q, k, v = (torch.cat(pair) for pair in ((d.q, e.q), (d.k, e.k), (d.v, e.v)))
        expected = torch.cat([native(d, Mode.DECODE, layer_of(d)), native(e, Mode.EXTEND, layer_of(e))])
        assert relative_error(layer_of(e)(q, k, v, batch), expected) < BOUND

    @pytest.mark.parametrize("mode", [Mode.EXTEND, Mode.DECODE], ids=["prefill", "decode"])
    @pytest.mark.parametrize("window", [1, 7, 24, 1000])
    def test_layers_with_and_without_a_window_in_one_step(self, backend_class: Any, window: int, mode: Mode) -> None:
        check_two_kinds_of_layers(backend_class, window, 16, mode, "cuda")

    @pytest.mark.parametrize("in_graphs", [True, False], ids=["graphs", "eager"])
    @pytest.mark.parametrize("heads", HEADS)
    @pytest.mark.parametrize("page_size", [1, 16])
    def test_every_token_is_seen(
        self, backend_class: Any, page_size: int, heads: tuple[int, int], in_graphs: bool
    ) -> None:
        steps = DecodeSteps(backend_class, [1, 14, 30, 100, 63], page_size, "cuda", heads)
        if in_graphs:
            steps.capture((2, 4, 8))
        for number in range(40):
            assert relative_error(steps.step(), steps.expected()) < BOUND, f"step {number}"

    @pytest.mark.parametrize("heads", HEADS)
    def test_plans_made_ahead(self, backend_class: Any, heads: tuple[int, int]) -> None:
        """Steps of other lengths are planned while the device is busy with something else."""
        problems = [
            Problem(lens, [1] * 4, *heads, 64, 64, device="cuda", seed=i)
            for i, lens in enumerate([[3000, 1, 70, 9], [2, 2500, 1, 900], [1, 1, 1, 4000]])
        ]
        plan = plan_of(problems[0])
        sites = sites_of(plan, backend_class(plan, "cuda"))
        expected = [native(p, Mode.DECODE, layer_of(p)) for p in problems]
        first = problems[0]
        layer_of(first)(first.q, first.k, first.v, batch_of(first, Mode.DECODE, sites))  # compiles
        batches = [batch_of(p, Mode.DECODE) for p in problems]
        torch.cuda.synchronize()
        outs = []
        for p, batch in zip(problems, batches, strict=True):
            torch.cuda._sleep(200_000_000)
            batch.metadata = sites.metadata(batch)
            outs.append(layer_of(p)(p.q, p.k, p.v, batch))
        for out, want in zip(outs, expected, strict=True):
            assert relative_error(out, want) < BOUND
