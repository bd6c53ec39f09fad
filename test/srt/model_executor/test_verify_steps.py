"""Steps of several tokens through a model: with the model's own earlier outputs as draft tokens, and with spoilt ones,
the tokens are those of the plain run, greedy and sampled, in graphs and without.

`make test` has each option and each model once, and every kind of draft tokens with a gated delta net; `make thorough`
has all combinations."""

from __future__ import annotations

import contextlib
import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pairs import some_of
from tokenizers import Tokenizer

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.drafts.depth import FixedDepth
from sglang.srt.errors import UserError
from sglang.srt.layers import native_draft_rows
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.model_executor import model_runner
from sglang.srt.model_executor.canary import check_runner
from sglang.srt.model_executor.device_state import DeviceState
from sglang.srt.model_executor.graph_runner import GraphSizes
from sglang.srt.model_executor.step import StepInput, step_arrays
from sglang.srt.plan.step_widths import StepWidths
from sglang.srt.server_args import ServerArgs
from srt.managers.fake_runner import Collector, add, assert_clean, request, run_to_end
from srt.model_executor.graph_stand_ins import DeviceLengths, in_graphs, with_attention
from srt.model_executor.known_texts import KnownTexts, verifying_scheduler
from srt.models.harness import VOCAB, save_tiny
from srt.sampling.packed_logprobs import unpacked

NEW_TOKENS = 15
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "top_k": 20}
GREEDY: dict[str, Any] = {"temperature": 0.0}


def test_accept() -> None:
    tokens = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 9, 3, 4], [-1, 2, 3, 4], [1, 2, 3, 4]])
    drafts = torch.tensor([[1, 2, 3], [1, 5, 3], [1, 2, 3], [0, 2, 3], [1, 2, 3]])
    widths = torch.tensor([4, 4, 4, 4, 2], dtype=torch.int32)
    assert native_draft_rows.accepted(tokens, drafts, widths).tolist() == [4, 2, 2, 1, 2]


def server_args(folder: Path, **options: Any) -> ServerArgs:
    return ServerArgs.from_kwargs(
        model_path=str(folder), skip_tokenizer_init=True,
        **{"device": "cpu", "max_total_tokens": 4096, "max_running_requests": 8, **options},
    )  # fmt: skip


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, VOCAB, (7 + 11 * i,), generator=generator).tolist() for i in range(7)]


def run(scheduler: Scheduler, params: dict[str, Any], **extra: dict[str, Any]) -> dict[int, list[int]]:
    """extra: parameters of single requests, by number."""
    collector = Collector()
    for i, ids in enumerate(prompts()):
        own = {**params, **extra.get(f"r{i}", {})}
        add(scheduler, request(f"r{i}", ids, NEW_TOKENS - i, ignore_eos=True, **own))
    run_to_end(scheduler, collector)
    assert_clean(scheduler)
    return {i: collector.tokens[f"r{i}"] for i in range(7)}


def as_outputs(tokens: dict[int, list[int]]) -> dict[tuple[int, ...], list[int]]:
    return {tuple(ids): tokens[i] for i, ids in enumerate(prompts())}


def accepted(scheduler: Scheduler) -> list[tuple[int, int]]:
    """(tokens brought, tokens that stood) of every request and step to come."""
    counts: list[tuple[int, int]] = []
    process = scheduler.process

    def spy(batch: Any) -> None:
        batch.result.wait()
        if batch.step.widths is not None:
            counts.extend(zip(batch.step.widths.tolist(), batch.result.counts.tolist(), strict=True))
        process(batch)

    scheduler.process = spy  # type: ignore[method-assign]
    return counts


def test_arrays_of_steps_have_the_types_of_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another type is another form of every kernel that reads it, which the first such request would wait for."""
    types: dict[str, set[np.dtype[Any]]] = {}

    def recorded(step: StepInput) -> dict[str, np.ndarray]:
        arrays = step_arrays(step)
        for name, array in arrays.items():
            types.setdefault(name, set()).add(array.dtype)
        return arrays

    monkeypatch.setattr(model_runner, "step_arrays", recorded)
    save_tiny("qwen3", tmp_path)
    args = server_args(
        tmp_path, chunked_prefill_size=16, speculative_algorithm="STANDALONE",
        speculative_draft_model_path=str(tmp_path), speculative_num_steps=3,
    )  # fmt: skip
    scheduler = Scheduler(args, create_runner(args), StopChecker(None))
    run(scheduler, GREEDY)
    with_attention(scheduler.runner, DeviceLengths(), DeviceLengths())
    with in_graphs(scheduler.runner, GraphSizes((1,), (16,))):
        assert scheduler.runner.graphs is not None
        fields = [arrays._fields for arrays in scheduler.runner.graphs._arrays.values()]
    for name, seen in types.items():
        expected = {np.dtype(each[name].dtype) for each in fields if name in each}
        assert seen == (expected or seen) and len(seen) == 1, name


@pytest.mark.parametrize("name", ["qwen3", "mistral_windows", "qwen3_5"])
def test_steps_that_are_computed_to_compile_leave_no_trace(name: str, tmp_path: Path) -> None:
    """Of requests that decode, plainly and with draft tokens to verify, more than the largest graph has."""
    save_tiny(name, tmp_path)
    args = server_args(tmp_path, max_running_requests=8)
    plain = run(Scheduler(args, create_runner(args), StopChecker(None)), GREEDY)
    for scheduler in (
        Scheduler(args, create_runner(args), StopChecker(None)),
        verifying_scheduler(args, KnownTexts(4), as_outputs(plain)),
    ):
        sizes: list[int] = []
        forward = scheduler.runner.forward
        scheduler.runner.forward = lambda step, f=forward, s=sizes: (s.append(len(step.slots)), f(step))[1]
        scheduler.runner.compile_decodes()
        assert sorted(set(sizes)) == [1, 7, 8]
        assert run(scheduler, GREEDY) == plain


PARAMS = {"greedy": GREEDY, "sampled": SAMPLED}


@pytest.mark.parametrize(
    ("name", "kind"),
    some_of(
        itertools.product(("qwen3", "qwen3_moe", "mistral_windows"), PARAMS),
        {("qwen3", "greedy"), ("qwen3_moe", "sampled"), ("mistral_windows", "sampled")},
    ),
)
def test_right_draft_tokens_are_all_accepted(name: str, kind: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    params = PARAMS[kind]
    args = server_args(tmp_path)
    plain = run(Scheduler(args, create_runner(args), StopChecker(None)), params)
    scheduler = verifying_scheduler(args, KnownTexts(4), as_outputs(plain))
    counts = accepted(scheduler)
    assert run(scheduler, params) == plain
    assert counts and all(width == count for width, count in counts)
    assert {width for width, _ in counts} >= {4}


OPTIONS: dict[str, dict[str, Any]] = {
    "usual": {},
    "pages": {"page_size": 16},
    "chunks": {"chunked_prefill_size": 16},
    "no overlap": {"disable_overlap_schedule": True},
}


@pytest.mark.parametrize(
    ("kind", "option"),
    some_of(
        itertools.product(PARAMS, OPTIONS),
        {("greedy", "usual"), ("sampled", "pages"), ("sampled", "chunks"), ("greedy", "no overlap")},
    ),
)
def test_spoilt_draft_tokens_change_nothing(kind: str, option: str, tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    params, args = PARAMS[kind], server_args(tmp_path, **OPTIONS[option])
    extra = {"r2": {"presence_penalty": 1.5}, "r4": {"min_new_tokens": 9, "logit_bias": {"5": 2.0}}}
    plain = run(Scheduler(args, create_runner(args), StopChecker(None)), params, **extra)
    for spoil_every in (1, 3):
        scheduler = verifying_scheduler(args, KnownTexts(4, spoil_every), as_outputs(plain))
        assert run(scheduler, params, **extra) == plain
        assert run(scheduler, params, **extra) == plain, "with prompts and outputs from the cache"


SPOILT = {"right": 0, "wrong": 1, "half-right": 3}
RECURRENT = ("qwen3_next", "qwen3_5", "nemotron_h", "kimi_linear")


@pytest.mark.parametrize(
    ("name", "spoil_every"),
    [
        # Of half-right draft tokens some are taken and some taken back: the others have these in every run.
        pytest.param(name, every, id=f"{name}-{kind}", marks=[] if quick else pytest.mark.thorough)
        for name in RECURRENT
        for kind, every in SPOILT.items()
        for quick in (name == "qwen3_next" or kind == "half-right",)
    ],
)
def test_states_are_taken_back(name: str, spoil_every: int, tmp_path: Path) -> None:
    """Recurrent states go on by the tokens that stand, in graphs and without, also where a request goes on from a
    checkpoint."""
    save_tiny(name, tmp_path)
    args = server_args(tmp_path, chunked_prefill_size=64)
    plain = run(Scheduler(args, create_runner(args), StopChecker(None)), SAMPLED)
    for graphs in (False, True):
        scheduler = verifying_scheduler(args, KnownTexts(4, spoil_every), as_outputs(plain))
        with contextlib.ExitStack() as stack:
            if graphs:
                with_attention(scheduler.runner, DeviceLengths(), DeviceLengths())
                stack.enter_context(in_graphs(scheduler.runner, GraphSizes((1, 4, 8), (16, 64), (0, 4, 8))))
            counts = accepted(scheduler)
            assert run(scheduler, SAMPLED) == plain
            assert run(scheduler, SAMPLED) == plain, "with prompts and outputs from the cache"
        assert {width for width, _ in counts} >= {4}
        assert spoil_every or all(width == count for width, count in counts)


class Widths:
    """Stands in for AdaptiveDepth: a random width in every step."""

    def __init__(self) -> None:
        self.random = random.Random(0)

    def next_width(self, num_requests: int) -> int:
        return self.random.randint(1, 4)

    def observe(self, widths: list[int], counts: list[int]) -> None:
        assert len(widths) == len(counts)


@pytest.mark.parametrize("name", ["qwen3", "nemotron_h"])
def test_every_step_may_bring_another_number_of_draft_tokens(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    args = server_args(tmp_path)
    plain = run(Scheduler(args, create_runner(args), StopChecker(None)), SAMPLED)
    for graphs in (False, True):
        scheduler = verifying_scheduler(args, KnownTexts(4, 3), as_outputs(plain))
        scheduler.depth = Widths()  # type: ignore[assignment]
        scheduler.runner.widths = StepWidths((1, 2, 3, 4))
        with contextlib.ExitStack() as stack:
            if graphs:
                with_attention(scheduler.runner, DeviceLengths(), DeviceLengths())
                stack.enter_context(in_graphs(scheduler.runner, GraphSizes((1, 4, 8), (16, 64), (0, 4, 8))))
            counts = accepted(scheduler)
            assert run(scheduler, SAMPLED) == plain
        assert {width for width, _ in counts} == {1, 2, 3, 4}


def test_many_requests_bring_fewer_draft_tokens_each(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    args = server_args(tmp_path)
    plain = run(Scheduler(args, create_runner(args), StopChecker(None)), SAMPLED)
    scheduler = verifying_scheduler(args, KnownTexts(4, 3), as_outputs(plain))
    scheduler.depth = FixedDepth(StepWidths((1, 2, 4), False, max_rows=8))
    shapes: list[tuple[int, int]] = []
    forward = scheduler.runner.forward

    def watched(step: StepInput) -> Any:
        if step.widths is not None:
            shapes.append((len(step.slots), step.width))
        return forward(step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler.runner, "forward", watched)
        assert run(scheduler, SAMPLED) == plain
    assert all(num * width <= 8 for num, width in shapes)
    assert {width for num, width in shapes if num <= 2} == {4}
    assert {width for _, width in shapes} == {1, 2, 4}


def test_retracted_requests_are_drafted_on(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    args = server_args(tmp_path, max_total_tokens=330, schedule_conservativeness=0.01)
    plain = run(Scheduler(args, create_runner(args), StopChecker(None)), GREEDY)
    scheduler = verifying_scheduler(args, KnownTexts(4, 3), as_outputs(plain))
    assert run(scheduler, GREEDY) == plain
    assert scheduler.stats.num_retracted > 0


def test_log_probabilities_of_several_tokens(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    args = server_args(tmp_path)
    ids = prompts()[3]
    results = []
    for scheduler in (
        Scheduler(args, create_runner(args), StopChecker(None)),
        verifying_scheduler(args, KnownTexts(4, 5), {tuple(ids): [*range(40)]}),
        None,
    ):
        if scheduler is None:
            tokens = [token for _, token in results[0]["output"]]
            scheduler = verifying_scheduler(args, KnownTexts(4, 5), {tuple(ids): tokens})
        msg = request("a", ids, 20, ignore_eos=True, temperature=0.0)
        msg.return_logprob, msg.logprob_start_len, msg.top_logprobs_num, msg.token_ids_logprob = True, 0, 2, [5, 9]
        add(scheduler, msg)
        seen: dict[str, list[Any]] = {"output": [], "top": [], "named": [], "input": []}
        while not scheduler.idle:
            scheduler.step()
            for message in scheduler.outbox:
                for name in seen:
                    seen[name] += getattr(unpacked(message.logprobs[0]), name)
            scheduler.outbox.clear()
        results.append(seen)
    plain, *drafted = results
    for seen in drafted:
        for name in ("output", "top", "named"):
            ours, theirs = (torch.tensor(r[name]).reshape(-1, 2) for r in (seen, plain))
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
        assert len(seen["output"]) == 20 and len(seen["input"]) == len(ids)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "glm_moe_dsa", "minimax_m3"])
def test_padding_of_graphs_changes_nothing(name: str, tmp_path: Path) -> None:
    """A graph is replaced by its step here, over the same static inputs."""
    save_tiny(name, tmp_path)
    args = server_args(tmp_path, chunked_prefill_size=64)
    plain = run(Scheduler(args, create_runner(args), StopChecker(None)), SAMPLED)
    scheduler = verifying_scheduler(args, KnownTexts(4, 3), as_outputs(plain))
    with_attention(scheduler.runner, DeviceLengths(), DeviceLengths())
    with in_graphs(scheduler.runner, GraphSizes((1, 4, 8), (16, 64), (0, 4, 8))) as replays:
        assert run(scheduler, SAMPLED) == plain
    verified = [len(step.slots) for step in replays if step.widths is not None]
    assert max(verified) > 4 and any(count not in (1, 4, 8) for count in verified)
    assert any(step.prompts is not None and step.num_decodes for step in replays)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "deepseek_v3", "glm_moe_dsa", "minimax_m3"])
def test_the_canary_verifies_draft_tokens(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    check_runner(verifying_scheduler(server_args(tmp_path), KnownTexts(4), {}).runner)


def test_the_canary_finds_draft_tokens_that_are_verified_wrongly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny("qwen3", tmp_path)
    runner = verifying_scheduler(server_args(tmp_path), KnownTexts(4), {}).runner
    verify_batch = DeviceState._verify_batch

    def of_other_tokens(*args: Any) -> Any:
        batch = verify_batch(*args)
        batch.input_ids = batch.input_ids.roll(1)
        return batch

    monkeypatch.setattr(DeviceState, "_verify_batch", of_other_tokens)
    with pytest.raises(UserError, match="a step that verifies draft tokens gives other logits"):
        check_runner(runner)


QUESTIONS = ("What is the capital of France?", "What is 2+2?", "What is 15+27?", "What is the capital of Japan?")


def answers(scheduler: Scheduler, params: dict[str, Any]) -> dict[tuple[int, ...], list[int]]:
    """By prompt. The embedded model is certain of these answers (the next best logit is 10 lower), so that products of
    another height, which round otherwise, change no token."""
    tokenizer = Tokenizer.from_file(f"{DEFAULT_MODEL_PATH}/tokenizer.json")
    collector, asked = Collector(), {}
    for i, question in enumerate(QUESTIONS):
        ids = tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").ids
        asked[f"q{i}"] = tuple(ids)
        add(scheduler, request(f"q{i}", ids, NEW_TOKENS, **params))
    run_to_end(scheduler, collector)
    assert_clean(scheduler)
    return {ids: collector.tokens[rid] for rid, ids in asked.items()}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{}, {"disable_cuda_graph": True}, {"page_size": 16}], ids=["graphs", "eager", "pages"]
)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_on_a_gpu(params: dict[str, Any], options: dict[str, Any]) -> None:
    args = server_args(Path(DEFAULT_MODEL_PATH), device="cuda", cuda_graph_max_bs=8, mem_fraction_static=0.2, **options)
    plain = answers(Scheduler(args, create_runner(args), StopChecker(None)), params)
    for spoil_every in (0, 3):
        scheduler = verifying_scheduler(args, KnownTexts(4, spoil_every), plain)
        assert ("disable_cuda_graph" in options) == (scheduler.runner.graphs is None)
        counts = accepted(scheduler)
        assert answers(scheduler, params) == plain
        assert counts and (spoil_every or all(width == count for width, count in counts))
