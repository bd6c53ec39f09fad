"""Long prompts over latents with FlashInfer: results, over stand-ins of the wrappers and on a GPU that has the package;
which steps have them; what becomes of a library that does not work."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.blocks.mla import reference
from sglang.srt.blocks.mla.spec import MLA
from sglang.srt.hardware.arch import current_arch
from sglang.srt.layers import native_ops
from sglang.srt.layers.attention import sites
from sglang.srt.layers.attention.latent_chunks import LatentChunk, cut_prefixes
from sglang.srt.layers.attention.sites import AttentionSites
from sglang.srt.layers.step_rows import ExtendRows, TokenSlots, VerifyRows
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.model_executor.two_batch_overlap import TwoBatchOverlap
from sglang.srt.plan.ranks import RankLayout
from srt.layers.attention.fake_flashinfer import fake_flashinfer
from srt.layers.attention.reference import relative_error
from srt.model_executor.backend_matrix import play, server_args
from srt.models.harness import save_tiny

MODULE = "sglang.srt.blocks.mla.flashinfer_prompt"
MODULES = ("sglang.srt.layers.attention.flashinfer_backend", MODULE)
SMALL = MLA(3, 0, 32, 16, 8, 16)
DEEPSEEK = MLA(16, 1536, 512, 128, 64, 128)
BOUND = 8e-3  # keys, values and parts are rounded to bf16
BEFORE = 2
"""Rows of requests that decode in the same step."""


def gathered(cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, rank: int, scale: float) -> torch.Tensor:
    """`gather_latents` in plain torch."""
    entries = native_ops.load_cache(cache, slots, scale)[:, 0].to(k.dtype)
    k[..., k.shape[2] - (entries.shape[1] - rank) :] = entries[:, None, rank:]
    return entries[:, :rank]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module over the fake wrappers."""
    pytest.importorskip("triton")
    package = fake_flashinfer([])
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(MODULE)
    monkeypatch.setattr(module, "WORKSPACE_BYTES", 16)
    monkeypatch.setattr(module, "LIST_BYTES", 16)
    monkeypatch.setattr("sglang.srt.blocks.mla.kernels.latent_prompt.gather_latents", gathered)
    yield module
    for name in MODULES:
        sys.modules.pop(name, None)


def plan_of(dtype: str = "bfloat16", *features: str) -> Any:
    return SimpleNamespace(dtype=dtype, ranks=RankLayout(1), arch=SimpleNamespace(features=frozenset(features)))


@dataclass
class Step:
    """Prompts behind rows that decode, over prefixes in a scattered cache."""

    spec: MLA
    new: Sequence[int]
    prefix: Sequence[int]
    cache_dtype: torch.dtype = torch.bfloat16
    cache_scale: float = 1.0
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        spec, rank, tokens = self.spec, self.spec.kv_lora_rank, BEFORE + sum(self.new)
        self.q = self.randn(tokens, spec.num_heads, spec.qk_dim)
        self.entries = self.randn(tokens, spec.latent_dim)
        self.w_uk = self.randn(spec.num_heads, spec.nope_dim, rank, scale=rank**-0.5)
        self.w_uv = self.randn(spec.num_heads, rank, spec.v_dim, scale=rank**-0.5)
        longest = max(1, *self.prefix)
        self.table = torch.randperm(len(self.prefix) * longest).view(-1, longest).int().to(self.device)
        values = self.randn(self.table.numel(), 1, spec.latent_dim, scale=1 / self.cache_scale)
        self.cache = values.to(self.cache_dtype)
        bounds = (0, *itertools.accumulate(self.new))
        self.start_loc = torch.tensor(bounds, dtype=torch.int32, device=self.device) + BEFORE

    def randn(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape) * scale).bfloat16().to(self.device)

    def chunks(self, tokens: int) -> tuple[LatentChunk, ...]:
        rows = torch.arange(len(self.prefix), device=self.device)
        return cut_prefixes(self.table, rows, self.prefix, tokens)

    def attended(self, attend: Any, chunks: Sequence[LatentChunk]) -> torch.Tensor:
        out = torch.full(
            (len(self.q), self.spec.num_heads, self.spec.v_dim), 7.0, dtype=self.q.dtype, device=self.device
        )
        attend(
            self.q, self.entries, self.w_uk, self.w_uv, out, self.start_loc, self.cache, chunks,
            scale=self.spec.softmax_scale, cache_scale=self.cache_scale,
        )  # fmt: skip
        return out

    def wrong_by(self, attend: Any, chunks: Sequence[LatentChunk]) -> float:
        out = self.attended(attend, chunks)
        wanted = self.attended(reference.expanded_latent_attention, self.chunks(1 << 20))
        assert (out[:BEFORE] == 7.0).all()
        return relative_error(out[BEFORE:], wanted[BEFORE:].float())


LENS = {
    "one prompt": ([9], [0]),
    "nothing cached": ([9, 1, 4], [0, 0, 0]),
    "prefixes": ([9, 1, 4], [17, 3, 20]),
    "some without": ([3, 9, 1, 4, 2], [0, 17, 0, 13, 0]),
    "one beside others": ([5, 8, 5], [0, 31, 0]),
}


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 100])
@pytest.mark.parametrize("lens", LENS)
def test_prompts_behind_prefixes(fake: ModuleType, lens: str, chunk_tokens: int) -> None:
    step = Step(SMALL, *LENS[lens])
    chunks = step.chunks(max(chunk_tokens, -(-sum(step.prefix) // fake.MAX_CHUNKS)))
    builder = fake.FlashInferLatentPrompt(plan_of(), SMALL, "cpu")
    attend = builder.build(step.new, chunks)
    for _ in range(2):  # layers
        assert step.wrong_by(attend, chunks) < BOUND


def test_requests_without_keys_are_left_out_at_the_ends_of_a_chunk(fake: ModuleType) -> None:
    step = Step(SMALL, *LENS["some without"])
    attend = fake.FlashInferLatentPrompt(plan_of(), SMALL, "cpu").build(step.new, step.chunks(18))
    assert [(part.first, part.end) for part in attend.cached] == [(3, 17), (13, 17)]


def test_a_cache_in_eight_bits(fake: ModuleType) -> None:
    step = Step(SMALL, *LENS["prefixes"], torch.float8_e4m3fn, 0.5)
    chunks = step.chunks(8)
    assert step.wrong_by(fake.FlashInferLatentPrompt(plan_of(), SMALL, "cpu").build(step.new, chunks), chunks) < BOUND


@pytest.mark.parametrize("chunk_tokens", [1 << 20, 20])
def test_many_chunks_lose_no_more_than_one(fake: ModuleType, chunk_tokens: int) -> None:
    """Each part is rounded once, and so is the result: not what is kept between 32 merges."""
    step = Step(SMALL, [64], [fake.MAX_CHUNKS * 20])
    chunks = step.chunks(chunk_tokens)
    attend = fake.FlashInferLatentPrompt(plan_of(), SMALL, "cpu").build(step.new, chunks)
    assert step.wrong_by(attend, chunks) < 3.5e-3  # 6e-3 where that is rounded to bf16


def test_halves_of_a_step_and_the_whole_of_it_are_planned_before_either_attends(fake: ModuleType) -> None:
    """With as many chunks as there is room for, again and again."""
    builder = fake.FlashInferLatentPrompt(plan_of(), SMALL, "cpu")
    steps = [Step(SMALL, [9, 4], [fake.MAX_CHUNKS * 2 - 3, 3]), Step(SMALL, [5], [32]), Step(SMALL, [5], [7])]
    for _ in range(2):
        chunks = [step.chunks(size) for step, size in zip(steps, (2, 1, 100), strict=True)]
        planned = [builder.build(step.new, each) for step, each in zip(steps, chunks, strict=True)]
        for step, attend, each in zip(steps, planned, chunks, strict=True):
            assert step.wrong_by(attend, each) < BOUND


def test_a_step_with_more_chunks_is_left_to_the_other_kernel(fake: ModuleType) -> None:
    builder = fake.FlashInferLatentPrompt(plan_of(), SMALL, "cpu")
    step = Step(SMALL, [9], [fake.MAX_CHUNKS + 1])
    assert builder.build(step.new, step.chunks(1)) is None and builder.build(step.new, step.chunks(2)) is not None


@pytest.mark.parametrize("spec", [SMALL, replace(DEEPSEEK, num_heads=2)], ids=["small", "wide"])
def test_the_check_at_the_start(fake: ModuleType, spec: MLA, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = fake.FlashInferLatentPrompt(plan_of(), spec, "cpu")
    builder.check()
    monkeypatch.setattr(fake, "_merge", lambda *_: None)
    with pytest.raises(RuntimeError, match=r"its attention over latents is wrong by \d\.[1-9]"):
        builder.check()


# --- which steps ------------------------------------------------------------------------------------------------------


class Builder:
    """A LongLatentsBuilder whose plan is a number."""

    def __init__(self) -> None:
        self.built: list[tuple[list[int], int]] = []

    def build(self, new_lens: Sequence[int], chunks: Sequence[LatentChunk]) -> Any:
        self.built.append((list(new_lens), len(chunks)))
        return len(self.built)

    def check(self) -> None:
        if not hasattr(self, "built"):
            raise RuntimeError("no nvcc")


class Absorbed:
    """An ExtendBuilder; prefixes are shared, which expanded prompts do not mind."""

    plans_on_host, in_graphs = False, True

    def build(self, rows: ExtendRows) -> str:
        return "absorbed"

    def num_parts(self, new_lens: Sequence[int], prefix_lens: Sequence[int]) -> int:
        return 2


def prompts(new: list[int], prefix: list[int], **changes: Any) -> ExtendRows:
    lens = torch.tensor([a + b for a, b in zip(new, prefix, strict=True)])
    table = torch.zeros((len(new), 8192), dtype=torch.int32)
    known: dict[str, Any] = {"seq_lens_cpu": lens.tolist(), **changes}
    slots = (TokenSlots(table, torch.zeros(sum(new), dtype=torch.int64)),)
    return ExtendRows(torch.arange(len(new)), lens, lens, lens, slots, new, prefix, **known)


SITES = [DEEPSEEK.attention_site(tp, 1) for tp in (1, 2)]
LONG = sites.LONG_PROMPTS
STEPS = {
    "long": (prompts([LONG - 300, 300], [0, 5000]), 2),
    "no prefix": (prompts([LONG], [0]), 0),
    "too few tokens": (prompts([LONG - 301, 300], [0, 5000]), None),
    "in a graph": (prompts([LONG], [0], seq_lens_cpu=None), None),
    "draft_tokens": (prompts([LONG], [0], draft_tokens=VerifyRows.__new__(VerifyRows)), None),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_of_long_prompts_are_planned_once_for_all_sites(name: str) -> None:
    rows, chunks = STEPS[name]
    builder = Builder()
    attention = AttentionSites(
        {}, dict.fromkeys(SITES, Absorbed()), dict.fromkeys(SITES, DEEPSEEK), 4096,
        long_latents=dict.fromkeys(SITES, builder),
    )  # fmt: skip
    built = {site: sites.SiteMetadata() for site in SITES}
    attention._build_extend(rows, built)
    assert builder.built == ([] if chunks is None else [(rows.new_lens_cpu, chunks)])
    assert [each.latent_prompt for each in built.values()] == [None if chunks is None else 1] * 2


def test_a_step_that_absorbs_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MLA, "expanding_pays", lambda *_: False)
    builder = Builder()
    attention = AttentionSites({}, {SITES[0]: Absorbed()}, {SITES[0]: DEEPSEEK}, 4096, long_latents={SITES[0]: builder})
    built = {SITES[0]: sites.SiteMetadata()}
    attention._build_extend(STEPS["long"][0], built)
    assert not builder.built and built[SITES[0]].latent_prompt is None


def chosen(entry: Any) -> Any:
    choice = SimpleNamespace(
        name="flashinfer",
        need=SimpleNamespace(op="long_latent_prompt", head_dim=192, v_head_dim=128),
        load=lambda: entry,
    )
    return SimpleNamespace(choices={"long_latent_prompt": choice}, ranks=RankLayout(1))


def layers(*mixers: MLA) -> Any:
    return [SimpleNamespace(mixer=mixer) for mixer in mixers]


def test_sites_that_one_plan_serves_have_the_builder() -> None:
    narrow = replace(DEEPSEEK, num_heads=8)
    built: list[MLA] = []

    def entry(plan: Any, spec: MLA, device: str) -> Builder:
        built.append(spec)
        return Builder()

    assert sites._long_latents(SimpleNamespace(choices={}), "cpu", layers(DEEPSEEK)) == {}
    assert sites._long_latents(chosen(entry), "cpu", layers(SMALL)) == {}
    assert list(sites._long_latents(chosen(entry), "cpu", layers(SMALL, DEEPSEEK, narrow))) == [SITES[0]]
    assert built == [DEEPSEEK]


def test_a_library_that_does_not_work_is_named_and_not_used(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        broken = sites._long_latents(chosen(lambda *_: Builder.__new__(Builder)), "cpu", layers(DEEPSEEK))
    assert broken == {} and "flashinfer does not work here" in caplog.text and "no nvcc" in caplog.text


@pytest.mark.parametrize("halves", [False, True])
def test_a_model_answers_as_without_it(
    halves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Prompts of several lengths beside requests that decode, some behind cached prefixes."""
    save_tiny("deepseek_v3", tmp_path)
    args = server_args(tmp_path)
    runner = create_runner(args)
    expected = play(runner, args)
    fake = request.getfixturevalue("fake")  # behind the plan, which looks for packages
    monkeypatch.setattr(MLA, "expanding_pays", lambda *_: True)
    monkeypatch.setattr(sites, "LONG_PROMPTS", 1)
    attention = runner.state.attention
    attention._chunk_tokens = 5
    ((site, spec),) = attention._latent.items()
    builder = fake.FlashInferLatentPrompt(runner.plan, spec, "cpu")
    planned: list[int] = []
    build = builder.build
    builder.build = lambda new, chunks: (planned.append(len(chunks)), build(new, chunks))[1]
    attention.long_latents = {site: builder}
    runner.two_batch_overlap = TwoBatchOverlap(runner.state, runner.groups, 2) if halves else None
    assert play(runner, args) == expected
    assert 0 in planned and max(planned) > 2, "no step was long, or none behind a prefix"


# --- the library itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sizes", "fit"), [([128] * 8, True), ([1024], True), ([1025], False), ([1] * 9, False)])
def test_lists_of_fa3_grow_with_heads(sizes: list[int], fit: bool, fake: ModuleType) -> None:
    """Eight tiles of queries, three heads."""
    fake.LIST_BYTES = fake.WORK_BYTES * 8 * SMALL.num_heads + fake.SM_LIST_BYTES
    fake.WORKSPACE_BYTES = 16
    hopper = fake.FlashInferLatentPrompt(plan_of("bfloat16", "wgmma"), SMALL, "cpu")
    assert hopper.kernels == "fa3" and (hopper.build(sizes, ()) is not None) == fit
    assert fake.FlashInferLatentPrompt(plan_of(), SMALL, "cpu").build(sizes, ()) is not None


HAS_FLASHINFER = torch.cuda.is_available() and importlib.util.find_spec("flashinfer") is not None


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_FLASHINFER, reason="needs a GPU and FlashInfer")
class TestOnGpu:
    """Also of prefixes in a float8 cache."""

    @pytest.mark.parametrize("cache", [(torch.bfloat16, 1.0), (torch.float8_e4m3fn, 0.5)], ids=["bf16", "fp8"])
    @pytest.mark.parametrize("heads", [8, 16, 128])
    @pytest.mark.parametrize("chunk_tokens", [300, 8192])
    def test_against_the_reference(self, heads: int, chunk_tokens: int, cache: tuple[torch.dtype, float]) -> None:
        module = importlib.import_module(MODULE)
        here = {"wgmma"} & current_arch().features
        spec = replace(DEEPSEEK, num_heads=heads)
        builder = module.FlashInferLatentPrompt(plan_of("bfloat16", *here), spec, "cuda")
        builder.check()
        steps = [
            Step(spec, new, prefix, *cache, device="cuda", seed=i)
            for i, (new, prefix) in enumerate(
                [([700, 130, 1, 512, 257], [0, 517, 0, 64, 4096]), ([600], [0]), ([512, 40], [1300, 0])]
            )
        ]
        chunks = [step.chunks(chunk_tokens) for step in steps]
        planned = [builder.build(step.new, each) for step, each in zip(steps, chunks, strict=True)]
        for step, attend, each in zip(steps, planned, chunks, strict=True):
            assert step.wrong_by(attend, each) < BOUND
