"""Final hidden states of prompts and outputs against transformers: at once, in chunks, among requests that decode, from
the prefix cache, after a retraction, out of graphs, and beside draft tokens. `make test` has each model and each of
these ways, `make thorough` each way of each model."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.managers.scheduler import intake
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.managers.wire.io_struct import AbortReq
from sglang.srt.model_executor.graph_runner import GraphSizes
from sglang.srt.server_args import ServerArgs
from srt.managers.fake_runner import Collector, add, assert_clean, request, run_to_end
from srt.managers.test_scheduler_parity import prompt
from srt.model_executor.graph_stand_ins import DeviceLengths, in_graphs, with_attention
from srt.model_executor.known_texts import KnownTexts, verifying_scheduler
from srt.models.harness import save_tiny

NEW_TOKENS = 20
SIZES = GraphSizes((1, 8), (16, 96), (0, 4))


class Model:
    def __init__(self, name: str, folder: Path) -> None:
        self.folder, self.model = folder, save_tiny(name, folder)

    def args(self, **options: Any) -> ServerArgs:
        return ServerArgs.from_kwargs(
            model_path=str(self.folder), device="cpu", skip_tokenizer_init=True, enable_return_hidden_states=True,
            **{"max_total_tokens": 4096, "max_running_requests": 8, **options},
        )  # fmt: skip

    def scheduler(self, **options: Any) -> Scheduler:
        args = self.args(**options)
        return Scheduler(args, create_runner(args), StopChecker(None))

    def hidden(self, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.model.model(torch.tensor([ids])).last_hidden_state[0]


@pytest.fixture(scope="module", params=["qwen3", "qwen3_windows", "qwen3_5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model("qwen3", tmp_path_factory.mktemp("plain"))


def wanting(rid: str, ids: list[int], tokens: int = NEW_TOKENS, stream: bool = False) -> Any:
    msg = request(rid, ids, tokens, stream=stream, temperature=0.0, ignore_eos=True)
    msg.hidden_start = 0
    return msg


def run(scheduler: Scheduler, prompts: list[list[int]]) -> Collector:
    """Every second request streams, and between them are some that want nothing."""
    collector = Collector()
    for i, ids in enumerate(prompts):
        add(scheduler, wanting(f"r{i}", ids, stream=i % 2 == 1))
        add(scheduler, request(f"other{i}", ids[1:], NEW_TOKENS, temperature=0.0, ignore_eos=True))
        for _ in range(2):
            scheduler.step()
            collector.take(scheduler)
    run_to_end(scheduler, collector)
    assert_clean(scheduler)
    assert scheduler.totals.hidden_rows == 0
    return collector


def check(model: Model, collector: Collector, prompts: list[list[int]]) -> None:
    assert set(collector.hidden) == {f"r{i}" for i in range(len(prompts))}
    for i, ids in enumerate(prompts):
        expected = model.hidden(ids + collector.tokens[f"r{i}"][:-1])
        values = torch.frombuffer(bytearray(collector.hidden[f"r{i}"]), dtype=torch.float32)
        torch.testing.assert_close(values.view(expected.shape), expected, atol=1e-4, rtol=1e-4, msg=f"request {i}")


@pytest.mark.values
@pytest.mark.parametrize(
    ("options", "graphs"),
    [
        ({"page_size": 16}, False),
        ({"chunked_prefill_size": 16}, False),
        ({"chunked_prefill_size": 16}, True),
        ({}, True),
    ],
)
def test_they_are_the_model_s(model: Model, options: dict[str, Any], graphs: bool) -> None:
    """The second time what can be cached is, except for them."""
    scheduler = model.scheduler(**options)
    if graphs:
        with_attention(scheduler.runner, DeviceLengths(), DeviceLengths())
    prompts = [prompt(1, 60), prompt(2, 3), prompt(1, 60)[:40] + [9], prompt(1, 60)]
    with in_graphs(scheduler.runner, SIZES, keeps_hidden=True) if graphs else nullcontext() as replays:
        for _ in range(2):
            check(model, run(scheduler, prompts), prompts)
    if graphs:
        assert any(step.prompts is None and step.hidden_rows is not None for step in replays)
        assert any(step.prompts is not None and step.num_decodes and step.hidden_rows is not None for step in replays)


def test_after_a_retraction(plain: Model) -> None:
    scheduler = plain.scheduler(max_total_tokens=150, schedule_conservativeness=0.01, chunked_prefill_size=64)
    prompts = [prompt(seed, 20) for seed in range(5)]
    check(plain, run(scheduler, prompts), prompts)
    assert scheduler.stats.num_retracted > 0


def test_beside_draft_tokens(plain: Model) -> None:
    """Requests that want them bring none; the others do."""
    prompts = [prompt(seed, 20) for seed in range(3)]
    known = run(plain.scheduler(), prompts).tokens
    outputs = {tuple(ids): known[f"r{i}"] for i, ids in enumerate(prompts)}
    outputs |= {tuple(ids[1:]): known[f"other{i}"] for i, ids in enumerate(prompts)}
    args = plain.args()
    scheduler = verifying_scheduler(args, KnownTexts(3, spoil_every=4), outputs)
    collector = run(scheduler, prompts)
    check(plain, collector, prompts)
    assert collector.tokens == known


@pytest.mark.parametrize("tokens", [0, 1])
def test_of_the_prompt_alone(plain: Model, tokens: int) -> None:
    scheduler, collector = plain.scheduler(), Collector()
    add(scheduler, wanting("r0", prompt(3), tokens))
    run_to_end(scheduler, collector)
    assert len(collector.tokens["r0"]) == tokens
    values = torch.frombuffer(bytearray(collector.hidden["r0"]), dtype=torch.float32)
    expected = plain.hidden(prompt(3))
    torch.testing.assert_close(values.view(expected.shape), expected, atol=1e-4, rtol=1e-4)


def test_an_aborted_request_has_those_that_were_there(plain: Model) -> None:
    scheduler, collector = plain.scheduler(chunked_prefill_size=16, disable_overlap_schedule=True), Collector()
    add(scheduler, wanting("r0", prompt(3, 50)))
    add(scheduler, wanting("waits", prompt(4, 50)))
    for _ in range(2):
        scheduler.step()
    scheduler.abort(AbortReq(abort_all=True))
    run_to_end(scheduler, collector)
    values = torch.frombuffer(bytearray(collector.hidden["r0"]), dtype=torch.float32)
    expected = plain.hidden(prompt(3, 50))[:32]
    torch.testing.assert_close(values.view(expected.shape), expected, atol=1e-4, rtol=1e-4)
    assert not collector.hidden["waits"] and scheduler.totals.hidden_rows == 0


def test_what_all_requests_may_hold_is_bounded(plain: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, collector = plain.scheduler(), Collector()
    size = (50 + NEW_TOKENS - 1) * scheduler.plan.description.hidden_size * 4
    monkeypatch.setattr(intake, "MAX_HELD_BYTES", 2 * size)
    for i in range(3):
        add(scheduler, wanting(f"r{i}", prompt(i, 50)))
    embedding = request("embedding", prompt(5, 50), 0)
    embedding.hidden_start = 49
    add(scheduler, embedding)
    run_to_end(scheduler, collector)
    refused = collector.finish["r2"]
    assert refused.status_code == 503 and refused.message and "hidden states" in refused.message
    assert len(collector.hidden["r1"]) == size and collector.hidden["embedding"]
    add(scheduler, wanting("later", prompt(9, 50)))
    run_to_end(scheduler, collector)
    assert len(collector.hidden["later"]) == size


def test_nobody_pays_who_does_not_ask(plain: Model) -> None:
    scheduler, collector, steps = plain.scheduler(), Collector(), []
    forward = scheduler.runner.forward
    scheduler.runner.forward = lambda step: (steps.append(step), forward(step))[1]  # type: ignore[method-assign]
    add(scheduler, request("a", prompt(1), 5, temperature=0.0, ignore_eos=True))
    run_to_end(scheduler, collector)
    assert len(steps) == 5 and all(step.hidden_rows is None for step in steps) and not collector.hidden
