"""Prompts with images and videos through the scheduler, against transformers' whole models.

`make test` has a model of each kind: with positions in three directions, the same beside states, with latents and
frames that are pooled, and with images that see themselves. `make thorough` has every family, of which `test_towers`
has each one's answers, and every layout of ranks with each."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pairs import some_of
from rank_processes import run_ranks

from sglang.srt.distributed import parallel_state
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.rotary_embedding import SectionPositions
from sglang.srt.managers.scheduler import media_steps
from sglang.srt.managers.scheduler.attention_groups import AttentionGroups
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.prompt_media import MediaMismatch, PromptMedia, item_keys
from sglang.srt.managers.scheduler.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_plan, create_runner
from sglang.srt.managers.wire.io_struct import AbortReq, TokenizedGenerateReq
from sglang.srt.model_executor import media_pace
from sglang.srt.model_executor.media_pace import LayerTimes, MediaPace
from sglang.srt.plan.memory import feature_row_bytes
from sglang.srt.server_args import ServerArgs
from srt.managers.fake_runner import Collector, add, assert_clean, request, run_to_end
from srt.sampling.packed_logprobs import unpacked

from .media_draft_layers import add_mtp
from .media_harness import (
    ALONE,
    BOTH_WAYS,
    MERGE,
    PAGES,
    POOLED_FRAMES,
    SEEING,
    Prompt,
    ReferenceEncoder,
    again_in_graphs,
    args_of,
    greedy,
    media_request,
    reference_logits,
    save_seeing,
    seeing_scheduler,
)

NEW_TOKENS = 16


class Seeing:
    """A tiny model on disk."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.model = name, folder, save_seeing(name, folder)
        self._greedy: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def greedy(self, prompt: Prompt, output: list[int]) -> list[int]:
        """What transformers would have said; computed once for what occurs again and again."""
        key = repr(prompt), tuple(output)
        if key not in self._greedy:
            self._greedy[key] = greedy(self.model, prompt, output)
        return self._greedy[key]

    def scheduler(self, **options: Any) -> Scheduler:
        if self.name in PAGES and "page_size" in options:
            options = {**options, "page_size": max(PAGES[self.name], options["page_size"])}
        return seeing_scheduler(self.folder, ReferenceEncoder(self.model), **options)

    def check(self, scheduler: Scheduler, *prompts: Prompt, new_tokens: int = NEW_TOKENS) -> None:
        collector = Collector()
        for i, prompt in enumerate(prompts):
            add(scheduler, media_request(f"r{i}", prompt, self.folder, new_tokens))
        run_to_end(scheduler, collector)
        for i, prompt in enumerate(prompts):
            output = collector.tokens[f"r{i}"]
            assert len(output) == new_tokens and output == self.greedy(prompt, output), f"prompt {i}"
        assert_clean(scheduler)


_FURTHER = ("qwen2_5_vl", "gemma4_per_layer", "glm4v", "glm46v", "glm5_next", "qwen4_exp", "minimax_m3_vl", "step3p7")
_FURTHER += ("muse_glimmer", "llama4", "inkling_mm_model", "qwen3_vl_moe", "glm4v_moe")
"""Those of which `test_towers` has what is their own."""
_FAMILIES = [pytest.param(name, marks=[pytest.mark.thorough] * (name in _FURTHER)) for name in SEEING]


@pytest.fixture(scope="module", params=_FAMILIES)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def qwen3_vl(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing("gemma4", tmp_path_factory.mktemp("gemma4"))


def one_image(seed: int = 1) -> Prompt:
    return Prompt().text(5, 1).image((1, 4, 6), seed).text(4, 2)


def three_images(seed: int = 10) -> Prompt:
    conversation = Prompt().text(3, 3)
    for number, grid in enumerate([(1, 4, 4), (1, 2, 8), (1, 6, 4)]):
        conversation.image(grid, seed + number).text(6, 20 + number)
    return conversation


def a_video(name: str = "qwen3_vl") -> Prompt:
    video = Prompt().text(4, 7).image((3, 4, 4), 30, pooled=POOLED_FRAMES.get(name, 1))
    return video.text(5, 8).image((1, 4, 4), 31).text(3, 9)


def encoded(scheduler: Scheduler) -> int:
    features = scheduler.media.features
    assert features is not None
    return features.num_encoded


def test_images_of_several_sizes_and_a_video(seeing: Seeing) -> None:
    scheduler = seeing.scheduler()
    prompts = [
        one_image(),
        Prompt().image((1, 8, 2), 2).text(3, 4),
        three_images(),
        a_video(seeing.name),
        Prompt().text(9, 5),
    ]
    for prompt in prompts:
        seeing.check(scheduler, prompt)
    seeing.check(seeing.scheduler(), *prompts)


def prompt_logprobs(scheduler: Scheduler, msg: TokenizedGenerateReq) -> tuple[list[float], list[int]]:
    """Of all tokens but the first, and their ids."""
    msg.return_logprob, msg.logprob_start_len = True, 0
    add(scheduler, msg)
    inputs: list[tuple[float | None, int]] = []
    while scheduler.reqs:
        scheduler.step()
        for message in scheduler.outbox:
            inputs += unpacked(message.logprobs[0]).input
        scheduler.outbox.clear()
    scheduler.sync()
    return [value for value, _ in inputs[1:] if value is not None], [token for _, token in inputs]


@pytest.mark.values
@pytest.mark.parametrize("chunk", [-1, 7])
def test_logits(seeing: Seeing, chunk: int) -> None:
    """By the log probabilities of a prompt's tokens: placeholders are named by their token id."""
    prompt, scheduler = a_video(seeing.name), seeing.scheduler(chunked_prefill_size=chunk)
    values, ids = prompt_logprobs(scheduler, media_request("a", prompt, seeing.folder, 2))
    assert ids == prompt.ids_for(seeing.name)
    want = reference_logits(seeing.model, prompt).log_softmax(-1)[range(len(prompt.ids) - 1), prompt.ids[1:]]
    torch.testing.assert_close(torch.tensor(values), want, atol=1e-3, rtol=0.0)


def test_text_is_what_it_is_without_an_encoder(seeing: Seeing) -> None:
    """Bit by bit."""
    args = ServerArgs.from_kwargs(
        model_path=str(seeing.folder),
        device="cpu",
        skip_tokenizer_init=True,
        max_total_tokens=2048,
        language_model_only=True,
    )
    plain = Scheduler(args, create_runner(args), StopChecker(None))
    assert plain.media.features is None
    msg = request("text", Prompt().text(40, 4).ids, 2, temperature=0.0, ignore_eos=True)
    assert prompt_logprobs(plain, msg) == prompt_logprobs(seeing.scheduler(), msg)


def test_cuts_at_every_offset(seeing: Seeing) -> None:
    scheduler, prompt = seeing.scheduler(chunked_prefill_size=64, page_size=1), a_video(seeing.name)
    for chunk in range(8 if seeing.name in BOTH_WAYS else scheduler.plan.page_size, len(prompt.ids)):
        scheduler.choice.chunk = chunk
        seeing.check(scheduler, prompt, new_tokens=3)
        assert scheduler.flush_cache()


def test_an_image_is_encoded_once_and_not_for_a_cached_prefix(seeing: Seeing) -> None:
    scheduler = seeing.scheduler(page_size=16)
    features = scheduler.media.features
    assert features is not None
    shown = Prompt().text(2, 1).image((1, 8, 12), 5)
    longer = replace(shown, ids=list(shown.ids)).text(30, 6)
    other = replace(shown, ids=list(shown.ids)).text(31, 7)
    seeing.check(scheduler, longer)
    assert encoded(scheduler) == 1
    seeing.check(scheduler, longer, other)
    assert encoded(scheduler) == 1, "the features are there"
    features.clear()
    seeing.check(scheduler, longer)
    assert encoded(scheduler) == 1, "all of it is in the prefix"
    again = Prompt().text(2, 1).image((1, 8, 12), 5).text(1, 8)
    seeing.check(scheduler, again)
    cached = scheduler.stats._cached
    assert cached > 0 and encoded(scheduler) == 2, "the prefix ends inside the image"


def test_equal_placeholders_of_other_images_are_no_prefix(seeing: Seeing) -> None:
    scheduler = seeing.scheduler()
    seeing.check(scheduler, one_image(1))
    before = scheduler.stats._cached
    seeing.check(scheduler, one_image(2), three_images(10), three_images(40))
    assert scheduler.stats._cached - before <= 3 * 6, "the text before the image"
    assert encoded(scheduler) == 8


@pytest.mark.parametrize(("page", "tokens"), [(1, 160), pytest.param(16, 208, marks=pytest.mark.thorough)])
def test_short_memory(seeing: Seeing, page: int, tokens: int) -> None:
    """Requests are retracted, prefixes and features evicted, and chunks cut where no more features fit."""
    scheduler = seeing.scheduler(
        max_total_tokens=tokens, page_size=page, schedule_conservativeness=0.01, chunked_prefill_size=32
    )
    features = scheduler.media.features
    assert features is not None
    prompts = [three_images(10 * i) for i in range(1, 6)]
    items = [item for prompt in prompts for item in prompt.items(seeing.folder)]
    features.budget = 2 * max(map(features.size_of, items))
    # Requests seldom need another page where pages have several tokens: only longer outputs come to where none is free.
    in_pages = max(page, PAGES.get(seeing.name, 1)) > 1
    seeing.check(scheduler, *prompts, new_tokens=64 if in_pages else 24)
    assert scheduler.stats.num_retracted > 0 and 0 < features.used <= features.budget
    seeing.check(scheduler, prompts[0], a_video(seeing.name))


def test_decoding_goes_on_between_encoder_steps(qwen3_vl: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_steps, "PATCHES_A_STEP", 20)
    scheduler, collector, events = qwen3_vl.scheduler(), Collector(), []
    features = scheduler.media.features
    assert features is not None
    advance, launch = features.advance, scheduler.launch
    monkeypatch.setattr(features, "advance", lambda whole: (events.append("encode"), advance(whole)))

    def launched(batch: ScheduleBatch) -> None:
        events.append("step" if batch.step.prompts is None else "prompt")
        launch(batch)

    monkeypatch.setattr(scheduler, "launch", launched)
    add(scheduler, request("text", Prompt().text(6, 1).ids, 30, temperature=0.0, ignore_eos=True))
    for _ in range(3):
        scheduler.step()
    events.clear()
    add(scheduler, media_request("seen", three_images(), qwen3_vl.folder, 4))
    run_to_end(scheduler, collector)
    assert events[:10] == ["step", "encode", "step"] * 3 + ["prompt"], "the patches of each travel for a step"
    assert collector.tokens["seen"] == greedy(qwen3_vl.model, three_images(), collector.tokens["seen"])


_SLICED = (("qwen3_vl", "layers"), ("gemma4", "shares of patches"), ("kimi_k25", "shares of patches"))


def media_pace_of(kind: str, patches: int) -> MediaPace:
    """patches: of a token."""
    if kind == "layers":
        return MediaPace()
    return MediaPace(LayerTimes(1.0, 0.02, 1.0), {1: 7.5 * patches})


_PACES = ("layers", "shares of patches")


@pytest.mark.parametrize(("name", "pace"), some_of(itertools.product(SEEING, _PACES), _SLICED))
def test_slices_of_an_encoder_step(name: str, pace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside requests that decode, a decode step behind each slice, and the features are those of a whole step."""
    patches = 1 if name in ALONE else MERGE**2
    monkeypatch.setattr(media_pace, "PATCH_LAYERS_BESIDE", 5 * patches)
    model = save_seeing(name, tmp_path)
    scheduler, collector, events = seeing_scheduler(tmp_path), Collector(), []
    features, launch = scheduler.media.features, scheduler.launch
    assert features is not None
    features.pace = media_pace_of(pace, patches)
    advance = features.advance
    monkeypatch.setattr(features, "advance", lambda whole: (events.append("slice"), advance(whole)))
    monkeypatch.setattr(scheduler, "launch", lambda batch: (events.append("step"), launch(batch)))
    for number in range(2):
        add(scheduler, request(f"t{number}", Prompt().text(6, 1).ids, 140, temperature=0.0, ignore_eos=True))
    for _ in range(3):
        scheduler.step()
    events.clear()
    prompts = {"seen": a_video(name), "later": one_image()}
    for rid, prompt in prompts.items():
        add(scheduler, media_request(rid, prompt, tmp_path, NEW_TOKENS))
    run_to_end(scheduler, collector)
    counts = []
    for prompt in prompts.values():
        slices = features.pace.slices(features.description.tower, [item.grid for item in prompt.items(tmp_path)], 2)
        few = name in ("llama4", *ALONE)  # patches that see one another: those of a tile, or none
        assert (slices.cuts.rows > 1 and (slices.cuts.queries > 1 or few)) == (pace != "layers")
        counts.append(len(slices.pieces))
    assert events[: 2 * counts[0] + 1] == ["step"] + ["slice", "step"] * counts[0], "the patches travel for a step"
    assert events.count("slice") == sum(counts) and counts[0] > 3
    for rid, prompt in prompts.items():
        assert collector.tokens[rid] == greedy(model, prompt, collector.tokens[rid]), rid
    assert_clean(scheduler)


@pytest.mark.parametrize(
    ("name", "page"),
    [
        pytest.param(name, page, marks=[pytest.mark.thorough] * (page != quick))
        for name, quick in (("qwen3_vl", 16), ("gemma4", 1), ("qwen3_5", 16))
        for page in (1, 16)
    ],
)
def test_chunks_with_images_are_short_beside_others(
    name: str, page: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All images of a step together; one that is not cut goes whole, and text is not held back."""
    model = save_seeing(name, tmp_path)
    scheduler, collector, taken = seeing_scheduler(tmp_path, page_size=page), Collector(), []
    features, launch = scheduler.media.features, scheduler.launch
    assert features is not None
    monkeypatch.setattr(media_pace, "MIN_TOKENS", 2)
    features.pace = MediaPace(None, {1: 1.0}, {8: 1.0, 16: 2.0})

    def launched(batch: ScheduleBatch) -> None:
        prompts = batch.step.prompts
        if prompts is not None and prompts.media is not None and batch.step.num_decodes:
            taken.append(int(prompts.extend_lens.sum()))
        launch(batch)

    monkeypatch.setattr(scheduler, "launch", launched)
    add(scheduler, request("text", Prompt().text(6, 1).ids, 90, temperature=0.0, ignore_eos=True))
    for _ in range(3):
        scheduler.step()
    prompts = {"seen": three_images(), "video": a_video(name), "wide": Prompt().image((1, 8, 10), 5).text(30, 1)}
    for rid, prompt in prompts.items():
        add(scheduler, media_request(rid, prompt, tmp_path, NEW_TOKENS))
    run_to_end(scheduler, collector)
    for rid, prompt in prompts.items():
        assert collector.tokens[rid] == greedy(model, prompt, collector.tokens[rid]), rid
    whole = 20 if name in BOTH_WAYS else 0
    limit = max(page, features.pace.prompt_tokens(1) or 0, whole)
    assert len(taken) > 3 and max(taken) <= limit
    assert_clean(scheduler)


def test_a_step_has_a_slice_or_a_chunk(qwen3_vl: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one request is computed, the image of the next waits; and the other way round."""
    monkeypatch.setattr(media_pace, "PATCH_LAYERS_BESIDE", 20)
    scheduler, collector = seeing_scheduler(qwen3_vl.folder), Collector()
    features = scheduler.media.features
    assert features is not None
    features.pace = MediaPace(None, {1: 1.0}, {128: 1.0}, in_graphs=True)
    launch, advance, steps, slices = scheduler.launch, features.advance, [], []

    def launched(batch: ScheduleBatch) -> None:
        media = None if batch.step.prompts is None else batch.step.prompts.media
        steps.append((batch.step.num_decodes, len(slices), media is not None and bool(media.sources)))
        slices.clear()
        launch(batch)

    monkeypatch.setattr(scheduler, "launch", launched)
    monkeypatch.setattr(features, "advance", lambda whole: (slices.append(whole), advance(whole)))
    add(scheduler, request("text", Prompt().text(6, 1).ids, 120, temperature=0.0, ignore_eos=True))
    scheduler.step()
    for number in range(3):
        add(scheduler, media_request(f"r{number}", one_image(60 + number), qwen3_vl.folder, NEW_TOKENS))
    add(scheduler, media_request("again", one_image(60).text(3, 1), qwen3_vl.folder, NEW_TOKENS))
    run_to_end(scheduler, collector)
    beside = [(count, has_chunk) for decodes, count, has_chunk in steps if decodes]
    assert sum(count for count, _ in beside) >= 6 and sum(has_chunk for _, has_chunk in beside) >= 2
    assert all(count + has_chunk <= 1 for count, has_chunk in beside)
    for number in range(3):
        output = collector.tokens[f"r{number}"]
        assert output == greedy(qwen3_vl.model, one_image(60 + number), output)
    assert_clean(scheduler)


def test_a_step_goes_on_when_its_request_has_ended(qwen3_vl: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or when nothing decodes any more: then all that is left is computed at once."""
    monkeypatch.setattr(media_pace, "PATCH_LAYERS_BESIDE", 20)
    scheduler, collector = seeing_scheduler(qwen3_vl.folder), Collector()
    features = scheduler.media.features
    assert features is not None
    add(scheduler, request("text", Prompt().text(6, 1).ids, 8, temperature=0.0, ignore_eos=True))
    scheduler.step()
    add(scheduler, media_request("gone", Prompt().image((1, 12, 14), 5).text(2, 1), qwen3_vl.folder, 4))
    scheduler.step()
    scheduler.step()
    assert features.is_encoding
    scheduler.abort(AbortReq(["gone"]))
    add(scheduler, media_request("seen", one_image(), qwen3_vl.folder, NEW_TOKENS))
    run_to_end(scheduler, collector)
    assert collector.tokens["seen"] == greedy(qwen3_vl.model, one_image(), collector.tokens["seen"])
    assert encoded(scheduler) == 2 and not features.is_encoding
    assert_clean(scheduler)


def test_in_graphs(seeing: Seeing) -> None:
    """Steps with images and steps behind these; the memory plan knows what they take."""
    scheduler = seeing.scheduler(chunked_prefill_size=24)
    again_in_graphs(scheduler, lambda one: seeing.check(one, one_image(1), one_image(3).text(40, 9), three_images()))
    rows = scheduler.runner.graphs.media.rows
    planned = feature_row_bytes(scheduler.plan.description, "float32", 32)
    assert planned == (0 if rows is None else rows.buffer.nbytes) and (planned > 0) == (seeing.name not in BOTH_WAYS)


@pytest.mark.parametrize(
    "seeing",
    [pytest.param(name, marks=[pytest.mark.thorough] * (name != "qwen3_vl")) for name in SEEING],
    indirect=True,
)
def test_cuts_at_every_offset_in_graphs(seeing: Seeing) -> None:
    """Beside two requests that decode, whose positions and embeddings stay their own."""
    prompt = Prompt().text(2, 3).image((1, 4, 4), 10).image((1, 2, 4), 11).text(2, 5)
    # Two tokens of a chunk are those of the requests that decode.
    scheduler = seeing.scheduler(chunked_prefill_size=64, page_size=1)
    first = 12 if seeing.name in BOTH_WAYS else 2 + scheduler.plan.page_size

    def play(scheduler: Scheduler) -> list[dict[str, list[int]]]:
        outcomes = []
        for chunk in range(first, len(prompt.ids)):
            scheduler.choice.chunk, collector = chunk, Collector()
            for number in range(2):
                text = Prompt().text(4, number).ids
                add(
                    scheduler,
                    request(f"t{number}", text, 4 + len(prompt.ids) // chunk, temperature=0.0, ignore_eos=True),
                )
            scheduler.step()
            add(scheduler, media_request("seen", prompt, seeing.folder, 3))
            run_to_end(scheduler, collector)
            outcomes.append(collector.tokens)
            assert scheduler.flush_cache()
        return outcomes

    eager = play(scheduler)
    assert eager[0]["seen"] == greedy(seeing.model, prompt, eager[0]["seen"])
    assert all(outcome["seen"] == eager[0]["seen"] for outcome in eager)
    assert again_in_graphs(scheduler, play) == eager


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma4"])
def test_ngram_drafts(name: str, request: pytest.FixtureRequest) -> None:
    seeing: Seeing = request.getfixturevalue(name)
    scheduler = seeing.scheduler(speculative_algorithm="NGRAM", speculative_num_draft_tokens=4)
    seeing.check(scheduler, one_image(), three_images(), a_video(), new_tokens=32)
    assert scheduler.stats.drafts.num_steps > 0


def test_an_image_that_sees_itself_is_never_cut(gemma4: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside requests that decode in the same steps. What the device knows of the images is what the host knows."""
    scheduler, collector = gemma4.scheduler(chunked_prefill_size=13), Collector()
    launch, runs = scheduler.launch, []
    attention = scheduler.runner.state.attention
    metadata = attention.metadata

    def compared(batch: ForwardBatch, **options: Any) -> Any:
        if batch.extend is not None and batch.extend.images is not None:
            rows = batch.extend.images.rows
            assert rows.seq_lens.tolist() == rows.seq_lens_cpu and rows.prefix_lens.tolist() == rows.prefix_lens_cpu
            assert rows.start_loc.diff().tolist() == rows.new_lens_cpu
        return metadata(batch, **options)

    def launched(batch: ScheduleBatch) -> None:
        prompts = batch.step.prompts
        if prompts is not None and prompts.media is not None and prompts.media.runs is not None:
            runs.append((batch.step.num_decodes, prompts.media.runs.lens.tolist()))
        launch(batch)

    monkeypatch.setattr(scheduler, "launch", launched)
    monkeypatch.setattr(attention, "metadata", compared)
    for number in range(3):
        add(scheduler, request(f"t{number}", Prompt().text(6, number).ids, 60, temperature=0.0, ignore_eos=True))
    for _ in range(3):
        scheduler.step()
    prompts = {"a": three_images(), "b": a_video(), "c": one_image()}
    for rid, prompt in prompts.items():
        add(scheduler, media_request(rid, prompt, gemma4.folder, NEW_TOKENS))
    run_to_end(scheduler, collector)
    for rid, prompt in prompts.items():
        assert collector.tokens[rid] == greedy(gemma4.model, prompt, collector.tokens[rid]), rid
    assert sorted(length for _, lens in runs for length in lens) == [4, 4, 4, 4, 4, 4, 6, 6]
    assert any(decodes for decodes, _ in runs) and len(runs) > 3


def test_an_image_that_sees_itself_and_fits_no_step_is_refused(gemma4: Seeing) -> None:
    scheduler, collector = gemma4.scheduler(chunked_prefill_size=40), Collector()
    add(scheduler, media_request("large", Prompt().image((1, 12, 14), 1), gemma4.folder, 4))
    collector.take(scheduler)
    message = collector.finish["large"].message
    assert message is not None and "42 tokens that see one another" in message and "--chunked-prefill-size" in message


def test_mtp_drafts_and_their_positions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeing = Seeing("qwen3_5", tmp_path)
    add_mtp(tmp_path, layer=2)
    scheduler = seeing.scheduler(speculative_algorithm="NEXTN", speculative_num_steps=2, chunked_prefill_size=12)
    drafter = scheduler.runner.drafter
    assert drafter is not None
    batches: list[ForwardBatch] = []
    model = drafter.model
    monkeypatch.setattr(drafter, "model", Watched(model, batches))
    prompt = a_video()
    seeing.check(scheduler, prompt)
    media = PromptMedia(prompt.items(tmp_path), len(prompt.ids), scheduler.media.features.description)
    assert media.delta < 0 and len(batches) > 6
    for batch in batches:
        positions = batch.positions.numpy()
        want = np.concatenate([media.positions_of(p, p + 1) for p in positions.tolist()], axis=1)
        turning = batch.rotary_positions
        values = turning.values if isinstance(turning, SectionPositions) else turning
        here = np.broadcast_to(values.numpy(), want.shape)
        assert (here == want)[:, positions > 0].all()


class Watched:
    """A draft model whose batches are seen."""

    def __init__(self, model: Any, batches: list[ForwardBatch]) -> None:
        self.model, self.batches = model, batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, batch: ForwardBatch, features: torch.Tensor | None) -> torch.Tensor:
        self.batches.append(batch)
        return self.model(batch, features)


LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tp_size": 2},
    "TP2, shared": {"tp_size": 2, "mm_enable_dp_encoder": True},
    "PP2": {"pp_size": 2},
}
GROUPS: dict[str, dict[str, Any]] = {
    "DP2": {"tp_size": 2, "attn_dp_size": 2, "chunked_prefill_size": 32},
    "DP2 x PP2": {"tp_size": 2, "attn_dp_size": 2, "pp_size": 2, "chunked_prefill_size": 32},
}
"""Attention groups with requests of their own, each with an encoder and features of its own."""
NO_STAGES = ("gemma4_per_layer",)
"""Those with layers that attend to keys and values of earlier ones."""
QUICK_CUTS = [
    ("qwen3_vl", "PP2"),
    ("qwen3_vl", "DP2"),
    ("gemma4", "TP2"),
    ("kimi_k25", "TP2, shared"),
]
CUTS = {name: [(name, layout) for layout in LAYOUTS if layout != "PP2" or name not in NO_STAGES] for name in SEEING}


def _play(scheduler: Scheduler | AttentionGroups, folder: Path, name: str) -> dict[str, list[int]]:
    collector = Collector()
    for i, prompt in enumerate([one_image(), three_images(), a_video(name), Prompt().text(12, 4), one_image()]):
        add(scheduler, media_request(f"r{i}", prompt, folder, NEW_TOKENS))
        scheduler.step()
        collector.take(scheduler)
    run_to_end(scheduler, collector)
    for each in scheduler.schedulers if isinstance(scheduler, AttentionGroups) else [scheduler]:
        assert_clean(each)
    return collector.tokens


def _rank(rank: int, folders: dict[str, Path], out: Path, cuts: list[tuple[str, str]]) -> None:
    torch.set_num_threads(1)
    for name, layout in cuts:
        if name in folders:
            rendezvous, options = (
                f"file://{out}/{name}{layout}",
                {"chunked_prefill_size": 16} | (LAYOUTS | GROUPS)[layout],
            )
            scheduler = seeing_scheduler(folders[name], None, rank, rendezvous, **options)
            play = partial(_play, folder=folders[name], name=name)
            torch.save(play(scheduler), out / f"{name}{layout}{rank}.pt")
            torch.save(again_in_graphs(scheduler, play), out / f"{name}{layout}{rank}graphs.pt")
            parallel_state.shutdown()


@pytest.mark.parametrize(
    "cuts",
    [QUICK_CUTS, *(pytest.param(cuts, marks=pytest.mark.thorough) for cuts in CUTS.values())],
    ids=["quick", *CUTS],
)
def test_two_ranks(cuts: list[tuple[str, str]], tmp_path: Path) -> None:
    """Each with its own encoder. The stages of Qwen3-VL are cut between layers behind which features are added."""
    folders = {name: tmp_path / name for name, _ in cuts}
    for name, folder in folders.items():
        save_seeing(name, folder)
    _check_ranks(folders, tmp_path, cuts)


def _check_ranks(folders: dict[str, Path], out: Path, cuts: list[tuple[str, str]], num_ranks: int = 2) -> None:
    run_ranks(_rank, (folders, out, cuts), num_ranks)
    for name, folder in folders.items():
        one = _play(seeing_scheduler(folder, chunked_prefill_size=16), folder, name)
        for layout in [layout for one_name, layout in cuts if one_name == name]:
            for rank in range(num_ranks):
                for graphs in ("", "graphs"):
                    outputs = torch.load(out / f"{name}{layout}{rank}{graphs}.pt")
                    assert outputs == one, f"{name}, {layout}, rank {rank} {graphs}"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "name"),
    [(layout, name) for layout in ("DP2", "DP2 x PP2") for name in SEEING if layout == "DP2" or name not in NO_STAGES],
)
def test_attention_groups_see_as_one_process_does(layout: str, name: str, tmp_path: Path) -> None:
    """`test_two_ranks` has one of them in every run."""
    folder = tmp_path / name
    save_seeing(name, folder)
    _check_ranks({name: folder}, tmp_path, [(name, layout)], 2 * GROUPS[layout].get("pp_size", 1))


def test_a_request_that_ends_early_needs_no_features(qwen3_vl: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for its second image beside another that decodes."""
    monkeypatch.setattr(media_steps, "PATCHES_A_STEP", 1)
    scheduler, collector = qwen3_vl.scheduler(), Collector()
    add(scheduler, request("text", Prompt().text(6, 1).ids, 30, temperature=0.0, ignore_eos=True))
    scheduler.step()
    add(scheduler, media_request("seen", three_images(), qwen3_vl.folder, 4))
    for _ in range(4):
        scheduler.step()
    features = scheduler.media.features
    assert features is not None and encoded(scheduler) == 2
    assert any(entry.users for entry in features._entries.values())
    scheduler.abort(AbortReq(["seen"]))
    assert not any(entry.users for entry in features._entries.values())
    run_to_end(scheduler, collector)
    assert encoded(scheduler) == 2
    assert_clean(scheduler)


# --- refusals and keys ------------------------------------------------------------------------------------------------


def test_refusals(qwen3_vl: Seeing) -> None:
    scheduler, collector = qwen3_vl.scheduler(), Collector()
    assert scheduler.media.features is not None
    wrong = media_request("wrong", one_image(), qwen3_vl.folder, 4)
    wrong.media[0].grid = (1, 4, 8)
    add(scheduler, wrong)
    short = media_request("short", one_image(), qwen3_vl.folder, 4)
    short.media[0].pixels.shape[0] = 23
    add(scheduler, short)
    scheduler.media.features.budget = 100
    add(scheduler, media_request("large", one_image(), qwen3_vl.folder, 4))
    scheduler.media.features = None
    add(scheduler, media_request("blind", one_image(), qwen3_vl.folder, 4))
    collector.take(scheduler)
    messages = {rid: reason.message for rid, reason in collector.finish.items() if reason.status_code == 400}
    assert "6 placeholders for a grid of (1, 4, 8) patches" in messages["wrong"]
    assert "pixels of shape [23, 96] for a grid of (1, 4, 6) patches" in messages["short"]
    assert "send a smaller one" in messages["large"] and "reads text only" in messages["blind"]


def test_spans_that_overlap_or_end_behind_the_prompt(tmp_path: Path) -> None:
    save_seeing("kimi_k25", tmp_path)
    description, items = create_plan(args_of(tmp_path)).description.media, one_image().items(tmp_path)
    assert description is not None
    with pytest.raises(MediaMismatch, match="the tokens 6 to 12 of 11"):
        PromptMedia(items, 11, description)
    with pytest.raises(MediaMismatch, match="the tokens 6 to 12 of 40"):
        PromptMedia([*items, *items], 40, description)


def test_pixels_that_are_gone_are_encoded_for_the_next_request(qwen3_vl: Seeing) -> None:
    """As on a rank that is late: nobody hears of the first request any more."""
    scheduler, collector = qwen3_vl.scheduler(), Collector()
    msg = media_request("gone", one_image(77), qwen3_vl.folder, 2)
    (qwen3_vl.folder / msg.media[0].pixels.name).unlink()
    add(scheduler, msg)
    run_to_end(scheduler, collector)
    scheduler.kv.reset()
    qwen3_vl.check(scheduler, one_image(77))


@pytest.mark.parametrize("times", [1, 99], ids=["once", "always"])
def test_an_encoder_that_fails_ends_its_request_alone(
    qwen3_vl: Seeing, times: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It tries again for the step; what it failed at is no prefix of later requests, and is computed for them."""
    scheduler, collector = qwen3_vl.scheduler(), Collector()
    features = scheduler.media.features
    assert features is not None and features.encoder is not None
    with monkeypatch.context() as patch:
        left = [times]

        def fail(*args: Any) -> Any:
            left[0] -= 1
            if left[0] >= 0:
                raise RuntimeError("no memory for this image")
            return encode(*args)

        encode = features._computed
        patch.setattr(features, "_computed", fail)
        patch.setattr(features, "_pieces_of", lambda items, cuts: None)
        add(scheduler, request("text", Prompt().text(6, 1).ids, 8, temperature=0.0, ignore_eos=True))
        add(scheduler, media_request("seen", one_image(79), qwen3_vl.folder, NEW_TOKENS))
        run_to_end(scheduler, collector)
    assert len(collector.tokens["text"]) == 8 and "encoder of images failed" in caplog.text
    if times == 1:
        assert collector.tokens["seen"] == greedy(qwen3_vl.model, one_image(79), collector.tokens["seen"])
    else:
        assert collector.finish["seen"].status_code == 500 and not collector.tokens["seen"]
    qwen3_vl.check(scheduler, one_image(79))


def test_a_slice_that_fails_is_computed_with_the_rest(qwen3_vl: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(items: Any, cuts: Any) -> Any:
        yield
        raise RuntimeError("no memory for this piece")

    monkeypatch.setattr(media_pace, "PATCH_LAYERS_BESIDE", 20)
    scheduler, collector = seeing_scheduler(qwen3_vl.folder), Collector()
    features = scheduler.media.features
    assert features is not None
    monkeypatch.setattr(features, "_pieces_of", broken)
    add(scheduler, request("text", Prompt().text(6, 1).ids, 16, temperature=0.0, ignore_eos=True))
    scheduler.step()
    prompt = Prompt().image((1, 12, 14), 5).text(2, 1)
    add(scheduler, media_request("seen", prompt, qwen3_vl.folder, NEW_TOKENS))
    run_to_end(scheduler, collector)
    assert collector.tokens["seen"] == greedy(qwen3_vl.model, prompt, collector.tokens["seen"])


def test_an_encoder_that_fails_beside_others_ends_its_rank(qwen3_vl: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for its part."""
    features, items = qwen3_vl.scheduler().media.features, one_image(80).items(qwen3_vl.folder)
    assert features is not None

    def fail(items: Any) -> Any:
        raise RuntimeError("no memory")

    features._agreed = lambda ok: ok
    monkeypatch.setattr(features, "_computed", fail)
    features.begin(items)
    with pytest.raises(RuntimeError, match="no memory"):
        features.advance(whole=True)


def test_pixels_that_are_gone_on_another_rank(qwen3_vl: Seeing) -> None:
    """Ranks that encode together have all of an item or none of it, and compute it for the next request that asks."""
    scheduler = qwen3_vl.scheduler()
    features, items = scheduler.media.features, one_image(78).items(qwen3_vl.folder)
    assert features is not None
    asked: list[bool] = []
    features._agreed = lambda ok: bool(asked.append(ok))
    features.begin(items)
    features.advance(whole=True)
    assert asked == [True] and items[0] in features
    assert not features.rows(items[0], torch.arange(2)).any(), "nobody reads what comes of it"
    features._agreed = bool
    assert features.rows(items[0], torch.arange(2)).any()


def test_keys_of_placeholders() -> None:
    """They are no token ids, differ in every place, and depend on each word of the digest."""
    digest = bytes(range(32))
    keys = item_keys(digest, 4096)
    assert keys.dtype == np.int64 and (keys >= 1 << 62).all() and len(np.unique(keys)) == 4096
    for word in range(4):
        changed = bytearray(digest)
        changed[8 * word] ^= 1
        assert (item_keys(bytes(changed), 4096) != keys).sum() == 1024
