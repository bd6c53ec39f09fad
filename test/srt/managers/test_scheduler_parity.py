"""Scheduler and model runner together against transformers: 17 greedy tokens are the same whether a prompt is computed
at once, from the radix cache, in larger pages, or without overlap; and what else an answer may have. Chunks, strangers
and retractions are in `test_families_in_the_scheduler`, for every family.

`make test` has a model of each kind of cache; `make thorough` adds experts and another rope, which change no cache, and
each model with all pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.managers.scheduler import output, schedule_batch
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.server_args import ServerArgs
from srt.managers.fake_runner import Collector, add, assert_clean, request, run_to_end
from srt.models.harness import VOCAB, save_tiny
from srt.sampling.packed_logprobs import unpacked

NEW_TOKENS = 17


def prompt(seed: int, length: int = 50) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Reference:
    """A tiny model on disk, and what transformers says about it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        self.model = save_tiny(name, folder)
        self._outputs: dict[tuple[int, ...], list[int]] = {}

    def greedy(self, ids: list[int], answer: list[int] | None = None) -> list[int]:
        """answer: ours. One pass shows whether each of its tokens is the likeliest behind those before it."""
        key = tuple(ids)
        if key not in self._outputs and answer and len(answer) == NEW_TOKENS and self._continues(ids, answer):
            self._outputs[key] = answer
        if key not in self._outputs:
            with torch.inference_mode():
                out = self.model.generate(
                    torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
                )
            self._outputs[key] = out[0, len(ids) :].tolist()
        return self._outputs[key]

    def _continues(self, ids: list[int], answer: list[int]) -> bool:
        with torch.inference_mode():
            logits = self.model(torch.tensor([ids + answer])).logits[0]
        return logits[len(ids) - 1 : -1].argmax(-1).tolist() == answer

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(torch.tensor([ids])).logits[0].log_softmax(-1)

    def hidden(self, ids: list[int]) -> torch.Tensor:
        """Of the last token, after the final norm."""
        with torch.inference_mode():
            return self.model.model(torch.tensor([ids])).last_hidden_state[0, -1]

    def scheduler(self, **options: Any) -> Scheduler:
        args = ServerArgs.from_kwargs(
            model_path=str(self.folder), device="cpu", skip_tokenizer_init=True,
            **{"max_total_tokens": 4096, "max_running_requests": 8, **options},
        )  # fmt: skip
        return Scheduler(args, create_runner(args), StopChecker(None))


NAMES = [
    "qwen3",
    *(pytest.param(name, marks=pytest.mark.thorough) for name in ("qwen3_moe", "llama_bias_llama3")),
    *("qwen3_windows", "deepseek_v3", "qwen3_5"),
]


@pytest.fixture(scope="module", params=NAMES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    yield Reference(request.param, tmp_path_factory.mktemp(request.param))


def check(reference: Reference, scheduler: Scheduler, prompts: list[list[int]]) -> Collector:
    collector = Collector()
    for i, ids in enumerate(prompts):
        add(scheduler, request(f"r{i}", ids, NEW_TOKENS, temperature=0.0, ignore_eos=True))
    run_to_end(scheduler, collector)
    for i, ids in enumerate(prompts):
        answer = collector.tokens[f"r{i}"]
        assert answer == reference.greedy(ids, answer), f"prompt {i}"
    assert_clean(scheduler)
    return collector


@pytest.mark.values
@pytest.mark.parametrize("page_size", [1, 16])
def test_from_the_radix_cache(reference: Reference, page_size: int) -> None:
    scheduler = reference.scheduler(page_size=page_size)
    check(reference, scheduler, [prompt(1)])
    warm = [prompt(1), prompt(1) + [7, 8, 9], prompt(1)[:40] + [3]]
    check(reference, scheduler, warm)
    # A state is kept at the end of the prompt, where only the second request goes on, or at its last whole page.
    at_states = 50 if page_size == 1 else 2 * 48
    assert scheduler.stats._cached >= (at_states if scheduler.plan.has_states else 2 * 32)


def test_without_overlap_and_cache(reference: Reference) -> None:
    scheduler = reference.scheduler(disable_overlap_schedule=True, disable_radix_cache=True)
    check(reference, scheduler, [prompt(1), prompt(1), prompt(2)])


@pytest.mark.values
@pytest.mark.parametrize("chunk", [-1, 16])
@pytest.mark.parametrize("each", [schedule_batch.MESSAGE_LOGPROBS, 10])
def test_log_probabilities(reference: Reference, chunk: int, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt and output log probabilities, the best two, and those of named tokens, also when the prompt is cached, and
    where a message has few of them."""
    monkeypatch.setattr(schedule_batch, "MESSAGE_LOGPROBS", each)
    ids, start = prompt(4), 10
    scheduler = reference.scheduler(chunked_prefill_size=chunk)
    for attempt in range(2):
        msg = request("a", ids, NEW_TOKENS, temperature=0.0, ignore_eos=True)
        msg.return_logprob, msg.logprob_start_len, msg.top_logprobs_num, msg.token_ids_logprob = True, start, 2, [5, 9]
        add(scheduler, msg)
        seen: dict[str, list[Any]] = {"output": [], "top": [], "ids": [], "input": [], "input_top": [], "input_ids": []}
        taken: list[int] = []
        while scheduler.reqs:
            scheduler.step()
            for message in scheduler.outbox:
                got = unpacked(message.logprobs[0])
                assert len(got.output) == len(message.new_ids[0])
                assert sum(map(len, (got.output, *got.top, *got.named))) < each + 5
                taken += message.new_ids[0]
                seen["output"] += got.output
                seen["top"] += got.top
                seen["ids"] += got.named
                seen["input"] += got.input
                seen["input_top"] += got.input_top
                seen["input_ids"] += got.input_named
            scheduler.outbox.clear()
        scheduler.sync()
        full = ids + reference.greedy(ids)
        expected = reference.logprobs(full)
        assert [t for _, t in seen["output"]] == taken == reference.greedy(ids)
        assert [t for _, t in seen["input"]] == ids[start:], f"attempt {attempt}"
        positions = list(range(start, len(full)))
        chosen = torch.tensor([p for p, _ in seen["input"] + seen["output"]])
        torch.testing.assert_close(chosen, expected[[p - 1 for p in positions], full[start:]], atol=1e-4, rtol=0)
        all_best, all_named = seen["input_top"] + seen["top"], seen["input_ids"] + seen["ids"]
        for p, best, named in zip(positions, all_best, all_named, strict=True):
            values, tokens = torch.tensor([v for v, _ in best]), [t for _, t in best]
            torch.testing.assert_close(values, expected[p - 1].topk(2).values, atol=1e-4, rtol=0)
            torch.testing.assert_close(values, expected[p - 1, tokens], atol=1e-4, rtol=0)  # ties may swap tokens
            assert [t for _, t in named] == [5, 9]
            torch.testing.assert_close(torch.tensor([v for v, _ in named]), expected[p - 1, [5, 9]], atol=1e-4, rtol=0)


@pytest.mark.values
@pytest.mark.parametrize("options", [{}, {"chunked_prefill_size": 16}, {"page_size": 16}])
def test_embeddings(reference: Reference, options: dict[str, Any]) -> None:
    """Final hidden states of prompts at once, in chunks, among requests that generate, and from the prefix cache."""
    scheduler = reference.scheduler(**options)
    prompts = [prompt(5, 60), prompt(6, 3), prompt(5, 60)[:40] + [9], prompt(5, 60)]
    for attempt in range(2):
        collector = Collector()
        add(scheduler, request("other", prompt(1), NEW_TOKENS, temperature=0.0, ignore_eos=True))
        for i, ids in enumerate(prompts):
            msg = request(f"r{i}", ids, 0)
            msg.hidden_start = len(ids) - 1
            add(scheduler, msg)
        run_to_end(scheduler, collector)
        assert collector.tokens["other"] == reference.greedy(prompt(1)) and set(collector.hidden) == {
            f"r{i}" for i in range(len(prompts))
        }
        for i, ids in enumerate(prompts):
            assert not collector.tokens[f"r{i}"] and collector.finish[f"r{i}"].type == "length"
            values = torch.frombuffer(bytearray(collector.hidden[f"r{i}"]), dtype=torch.float32)
            torch.testing.assert_close(values, reference.hidden(ids), atol=1e-4, rtol=1e-4, msg=f"{attempt}, {i}")
        assert_clean(scheduler)
    assert scheduler.stats._cached >= 2 * 32 or scheduler.plan.has_states


def test_log_probability_of_the_first_token_is_none(reference: Reference) -> None:
    scheduler = reference.scheduler()
    msg = request("a", [5], 2, temperature=0.0, ignore_eos=True)
    msg.return_logprob, msg.logprob_start_len = True, 0
    add(scheduler, msg)
    run = Collector()
    inputs = []
    while scheduler.reqs:
        scheduler.step()
        inputs += [got for m in scheduler.outbox if (got := unpacked(m.logprobs[0]).input)]
        run.take(scheduler)
    assert inputs == [[(None, 5)]]


def test_a_token_that_makes_nan_harms_its_request_only(reference: Reference) -> None:
    scheduler = reference.scheduler(page_size=16)
    broken = 77
    prompts = [[t if t != broken else 78 for t in prompt(s, 40)] for s in range(4)]
    outputs = [reference.greedy(ids) for ids in prompts]
    unharmed = [i for i, ids in enumerate(outputs) if broken not in ids]
    prompts.append(prompts[0][:20] + [broken] + prompts[0][21:])
    with torch.inference_mode():
        scheduler.runner.model.embed.weight[broken] = torch.nan
    collector = Collector()
    for i, ids in enumerate(prompts):
        msg = request(f"r{i}", ids, NEW_TOKENS, temperature=0.0, ignore_eos=True)
        msg.return_logprob, msg.logprob_start_len, msg.top_logprobs_num = True, 0, 2
        add(scheduler, msg)
    run_to_end(scheduler, collector)
    assert unharmed and all(collector.tokens[f"r{i}"] == outputs[i] for i in unharmed)
    assert collector.finish["r4"].status_code == 500 and not collector.tokens["r4"]
    assert_clean(scheduler)


def test_a_message_has_few_log_probabilities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever number of requests reach it in one step: samples of a call begin and end together."""
    monkeypatch.setattr(output, "MESSAGE_BYTES", 300)
    reference = Reference("qwen3", tmp_path)
    scheduler, collector, sizes = reference.scheduler(), Collector(), list[int]()
    for number in range(7):
        msg = request(f"r{number}", prompt(1), 4, temperature=0.0, ignore_eos=True)
        msg.return_logprob, msg.top_logprobs_num = number < 6, 5
        add(scheduler, msg)
    while not scheduler.idle:
        scheduler.step()
        for message in scheduler.outbox:
            sizes.append(sum(len(each.output) for each in message.logprobs if each is not None))
        collector.take(scheduler)
    each = 4 * 4 * (2 + 2 * 5)
    assert sum(sizes) == 6 * each and max(sizes) == 2 * each
    assert collector.tokens == {f"r{number}": reference.greedy(prompt(1))[:4] for number in range(7)}


@pytest.mark.parametrize("name", ["qwen3_windows", "qwen3_windows_only"])
def test_windows_hold_no_more_than_they_need(name: str, tmp_path: Path) -> None:
    """Long requests beside each other in windows of 12 tokens, with room for little more."""
    reference = Reference(name, tmp_path)
    scheduler = reference.scheduler(
        max_total_tokens=1024, max_running_requests=3, chunked_prefill_size=16, page_size=4, context_length=256
    )
    (window,) = scheduler.kv.windows
    assert window.size <= 3 * 16 + 16 + 8, "the plan makes no more room"
    prompts = [prompt(s, 60 + 20 * s) for s in range(4)]
    check(reference, scheduler, prompts)
    turn = prompts[0] + reference.greedy(prompts[0])
    check(reference, scheduler, prompts[:1])
    before = scheduler.stats._cached
    check(reference, scheduler, [turn + [5]])
    assert scheduler.stats._cached - before == (len(turn) - 1) // 4 * 4, "the last window was cached"


@pytest.mark.values
@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h"])
def test_prompts_that_end_within_a_page_pause_at_the_last_whole_one(
    name: str, page_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All in one step, and their ends in the next; the next turns go on from there."""
    reference = Reference(name, tmp_path)
    scheduler = reference.scheduler(page_size=page_size, max_running_requests=16)  # and as many checkpoints
    prompts = [prompt(1, 70), prompt(2, 33), prompt(3, 64), prompt(4, page_size)]
    forward, prefills = scheduler.runner.forward, []
    monkeypatch.setattr(
        scheduler.runner, "forward", lambda step: (prefills.append(step.prompts is not None), forward(step))[1]
    )
    check(reference, scheduler, prompts)
    assert sum(prefills) == 2
    turns = [ids + reference.greedy(ids)[:-1] + [5, 6] for ids in prompts]
    before = scheduler.stats._cached
    check(reference, scheduler, turns)
    ends = [len(ids) + NEW_TOKENS - 1 for ids in prompts]
    at = [end // page_size * page_size for end in ends]
    assert scheduler.stats._cached - before == sum(at)
    check(reference, scheduler, turns[:2])
    assert scheduler.stats._cached - before == sum(at) + sum((len(t) - 1) // page_size * page_size for t in turns[:2])


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h", "kimi_linear"])
def test_a_hit_gives_the_same_state_to_the_last_bit(name: str, tmp_path: Path) -> None:
    reference = Reference(name, tmp_path)
    states = []
    scheduler = reference.scheduler(page_size=16)
    caches = [cache for cache in scheduler.runner.model.caches if cache.name == "state"]
    for cached in (0, 64):
        add(scheduler, request("a", prompt(1, 70), 1, temperature=0.0, ignore_eos=True))
        slot = 0
        while "a" in scheduler.reqs:
            scheduler.step()
            slot = scheduler.reqs["a"].slot if "a" in scheduler.reqs else slot
        assert scheduler.stats._cached == cached
        states.append([cache[part][slot].clone() for cache in caches for part in ("state", "conv")])
        for cache in caches:  # the next request must not find it where this one left it
            cache["state"][slot], cache["conv"][slot] = 7.0, 7.0
    for plain, hit in zip(*states, strict=True):
        assert plain.any() and torch.equal(plain, hit)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_a_second_turn_goes_on_from_the_state_of_the_first(name: str, tmp_path: Path) -> None:
    reference = Reference(name, tmp_path)
    scheduler = reference.scheduler(chunked_prefill_size=32)
    first = prompt(1, 70)
    check(reference, scheduler, [first, prompt(2, 9)])
    turn = first + reference.greedy(first) + [5, 6]
    forked = first[:64] + [9]
    check(reference, scheduler, [turn, forked])
    # The token that was sampled last was not computed; the fork goes on from the end of a chunk.
    assert scheduler.stats._cached == len(turn) - 3 + 64
