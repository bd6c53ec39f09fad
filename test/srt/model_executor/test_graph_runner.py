"""Decode, prefill and mixed steps through the padded static inputs of the graphs, against the same steps launched as
they are. A graph is replaced by its step here, so that a CPU can tell whether the padding changes a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from sglang.bench.direct import DirectBatch, direct_table
from sglang.srt.blocks.recurrent_state.records import RecurrentRecords
from sglang.srt.layers.row_exchange import RowExchange
from sglang.srt.layers.step_rows import DecodeRows
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.model_executor.device_state import StepShape
from sglang.srt.model_executor.graph_runner import MAX_PROMPTS, TIMED_REPLAYS, GraphRunner, GraphSizes, _one_prompt
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.step import GroupSteps, LaunchedForward, StepInput, padding_decodes, padding_prompt
from sglang.srt.plan.defaults import mixed_decode_sizes
from sglang.srt.plan.memory import verified_bytes
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.sizes import Sizes
from sglang.srt.plan.step_widths import StepWidths
from sglang.srt.server_args import ServerArgs
from srt.managers.fake_runner import Collector, add, assert_clean, request, run_to_end
from srt.model_executor.graph_stand_ins import DeviceLengths, in_graphs, with_attention
from srt.model_executor.mirrored_groups import mirror_groups
from srt.models.harness import VOCAB, save_tiny

SIZES = GraphSizes((1, 6, 24), (16, 32, 80), (0, 4, 20))


def test_sizes_of_the_decoding_part() -> None:
    assert mixed_decode_sizes((1, 2, 4, 8)) == (0, 8)
    assert mixed_decode_sizes((1, 64, 128)) == (0, 64, 128)
    assert mixed_decode_sizes((1, 512)) == (0, 64, 256, 512)


def test_one_kind_of_steps_alone_may_have_graphs() -> None:
    assert GraphSizes((1,)).any and GraphSizes((), (16,)).any and not GraphSizes().any


def test_prompts_behind_a_shared_prefix_have_no_graph() -> None:
    """Nor has the step if the prompt is another attention group's: all compute in one shape."""
    graphs = object.__new__(GraphRunner)
    attention = SimpleNamespace(shares_prefixes=lambda new, prefixes: max(prefixes, default=0) >= 8192)
    graphs.sizes, graphs.state = SIZES, cast(Any, SimpleNamespace(attention=attention, has_adapters=lambda step: False))
    for prefix in (100, 9000):
        step, in_graph = padding_prompt(16, prefix, draft_tokens=False), prefix == 100
        assert (graphs.shape_of(step) is not None) == in_graph
        groups = GroupSteps.of([padding_decodes(2, 0), None, step])
        for own in groups.steps:
            assert (graphs.shape_of(replace(own, groups=groups)) is not None) == in_graph


class WatchedRunner:
    """A runner's steps, each of which may change states of its own requests only, and those that it is told to copy."""

    def __init__(self, runner: ModelRunner) -> None:
        self.forward, self.states = runner.forward, runner.pools.states
        self.padded_steps = 0

    def __call__(self, step: StepInput) -> LaunchedForward:
        before = [states.clone() for states in self.states]
        launched = self.forward(step)
        changed = {0, *step.slots.tolist()}
        if step.table_update is not None:
            changed |= set(step.table_update.state_targets.tolist())
        for old, new in zip(before, self.states, strict=True):
            others = [row for row in range(new.shape[1]) if row not in changed]
            assert torch.equal(old[:, others], new[:, others]), (
                "a step changed the state of a request that is not in it"
            )
            self.padded_steps += not torch.equal(old[:, 0], new[:, 0])
        return launched


def outputs(runner: ModelRunner, args: ServerArgs, count: int = 26) -> dict[str, list[int]]:
    scheduler = Scheduler(args, runner, StopChecker(None))
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(1, VOCAB, (10,), generator=generator).tolist()
    collector = Collector()
    for i in range(count):
        length = int(torch.randint(1, 60 if i % 4 == 0 else 12, (1,), generator=generator))
        ids = shared[: i % 11] + torch.randint(1, VOCAB, (length,), generator=generator).tolist()
        add(scheduler, request(f"r{i}", ids, 3 + i % 9, temperature=0.0, ignore_eos=True))
        if i % 3 == 0:
            scheduler.step()
            collector.take(scheduler)
    run_to_end(scheduler, collector)
    assert_clean(scheduler)
    return collector.tokens


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "deepseek_v3", "qwen3_5", "nemotron_h", "gpt_oss"])
def test_padding_changes_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(name, tmp_path)
    args = ServerArgs.from_kwargs(
        model_path=str(tmp_path), device="cpu", skip_tokenizer_init=True, max_total_tokens=4096,
        max_running_requests=24, chunked_prefill_size=48,
    )  # fmt: skip
    expected = outputs(create_runner(args), args)
    runner = create_runner(args)
    with_attention(runner, DeviceLengths(), DeviceLengths())
    with in_graphs(runner, SIZES) as replays:
        watched = WatchedRunner(runner)
        monkeypatch.setattr(runner, "forward", watched)
        assert outputs(runner, args) == expected
    assert watched.padded_steps or not watched.states, "no step had padding"
    mixed = [step for step in replays if step.prompts is not None]
    prompts = [len(step.prompts.extend_lens) for step in mixed if step.prompts is not None]
    assert any(step.num_decodes == 0 for step in mixed) and any(step.num_decodes > 4 for step in mixed)
    assert any(count > 1 and step.num_decodes for step, count in zip(mixed, prompts, strict=True))
    assert max(prompts) <= MAX_PROMPTS and any(step.prompts is None for step in replays)


@pytest.mark.parametrize("name", ["qwen3_moe"])
def test_padding_of_several_groups_changes_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention groups bring their rows together, also those that are padding. Rows that a graph is captured with, and
    those whose time is taken, are all rows of the graph, once."""
    save_tiny(name, tmp_path)
    args = ServerArgs.from_kwargs(
        model_path=str(tmp_path), device="cpu", skip_tokenizer_init=True, max_total_tokens=4096,
        max_running_requests=6, chunked_prefill_size=24,
    )  # fmt: skip
    expected = outputs(create_runner(args), args, 9)
    mirror_groups(monkeypatch)
    runner = create_runner(args)
    runner.model.vocab_is_in_group = False  # all ranks share it
    with_attention(runner, DeviceLengths(), DeviceLengths())
    assert outputs(runner, args, 9) == expected
    computed: list[tuple[int, list[int], int]] = []
    gather = RowExchange.gather

    def watched(exchange: RowExchange, x: torch.Tensor) -> torch.Tensor:
        if exchange.order is not None and exchange.num_valid is not None:
            computed.append((exchange.each, exchange.order.tolist(), int(exchange.num_valid)))
        return gather(exchange, x)

    with monkeypatch.context() as patch:
        patch.setattr(RowExchange, "gather", watched)
        with in_graphs(runner, GraphSizes((1, 6), (16, 32), (0, 4))) as replays:
            graphs = runner.graphs
            assert graphs is not None
            patch.setattr(graphs, "_milliseconds", lambda shape, tokens=None: graphs.graphs[shape].replay() or 1.0)
            graphs.step_times()
            graphs.prompt_times()
            assert {each for each, _, _ in computed} == {1, 6, 16, 32}
            assert all(order == [*range(2 * each)] and count == 2 * each for each, order, count in computed)
            assert outputs(runner, args, 9) == expected
    assert any(count < 2 * each for each, _, count in computed), "no step had padding"
    assert any(step.prompts is None for step in replays) and any(step.prompts is not None for step in replays)


def test_tables_of_windows_are_complete_where_a_backend_plans_before_a_replay(tmp_path: Path) -> None:
    save_tiny("gpt_oss", tmp_path)
    args = ServerArgs.from_kwargs(model_path=str(tmp_path), device="cpu", skip_tokenizer_init=True)
    runner = create_runner(args)
    planned: list[list[int]] = []

    class Planner(DeviceLengths):
        plans_on_host = True

        def refresh(self, rows: DecodeRows) -> None:
            assert rows.seq_lens_cpu is not None
            real = [i for i, slot in enumerate(rows.req_pool_indices.tolist()) if slot]
            slots, last = rows.req_pool_indices[real], [rows.seq_lens_cpu[i] - 1 for i in real]
            planned.append(runner.state.req_to_token[1][slots, last].tolist())

    with_attention(runner, Planner(), DeviceLengths())
    with in_graphs(runner, GraphSizes((4,))):
        kv = direct_table(runner)
        batch = DirectBatch(runner, kv, [[5, 6, 7], [8]], 4)
        batch.prefill(64)
        planned.clear()
        for length in (0, 1, 2):
            batch.decode()
            rows = kv.windows[0].rows
            assert planned[-1] == [rows[slot, size + length] for slot, size in zip(batch.slots, (3, 1), strict=True)]
    assert all(slot for slots in planned for slot in slots)


def test_times_of_graphs_with_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each number of tokens once, with the most requests that decode; every token counts."""
    save_tiny("qwen3_moe", tmp_path)
    args = ServerArgs.from_kwargs(model_path=str(tmp_path), device="cpu", skip_tokenizer_init=True)
    runner = create_runner(args)
    assert runner.media_prompt_times() == {}, "it reads text only"
    with_attention(runner, DeviceLengths(), DeviceLengths())
    with in_graphs(runner, SIZES):
        graphs, timed = runner.graphs, []
        assert graphs is not None

        def milliseconds(shape: StepShape, tokens: torch.Tensor | None = None) -> float:
            graphs.graphs[shape].replay()
            arrays = graphs._arrays[shape.has_prompts]
            timed.append((shape.num_tokens, shape.num_decodes, int(arrays["num_tokens"])))
            return float(shape.num_tokens)

        monkeypatch.setattr(graphs, "_milliseconds", milliseconds)
        assert graphs.prompt_times() == {16: 16.0, 32: 32.0, 80: 80.0}
        assert sorted(timed) == [(16, 4, 16), (32, 20, 32), (80, 20, 80)]
        timed.clear()
        assert graphs.step_times() == {(1, 1): 1.0, (24, 1): 24.0}
        assert timed == [(1, 1, 1), (24, 24, 24)]


class StoppedClock:
    """torch.cuda.Event, of which any two are 15 ms apart."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: StoppedClock) -> float:
        return 15.0


def test_replays_whose_time_is_taken_are_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins with the same tokens of requests that have none behind them, though the one before has added some."""
    save_tiny("qwen3", tmp_path)
    args = ServerArgs.from_kwargs(
        model_path=str(tmp_path), device="cpu", skip_tokenizer_init=True, speculative_algorithm="NGRAM",
        speculative_num_steps=2, max_running_requests=4, max_total_tokens=1024,
    )  # fmt: skip
    runner = create_runner(args)
    with_attention(runner, DeviceLengths(), DeviceLengths())
    monkeypatch.setattr(torch.cuda, "Event", StoppedClock)
    with in_graphs(runner, GraphSizes((1,), (16,))):
        graphs, state, begun = runner.graphs, runner.state, []
        assert graphs is not None
        decode, prompt = StepShape(3, 1, 3), StepShape(16, 0, has_prompts=True)
        for shape in (decode, prompt):
            replay = graphs.graphs[shape].replay

            def watched(replay: Callable[[], None] = replay) -> None:
                begun.append((state.next_tokens.tolist(), state.lens.tolist()))
                state.lens += 1
                replay()

            monkeypatch.setattr(graphs.graphs[shape], "replay", watched)
        tokens = torch.arange(state.next_tokens.numel()).view_as(state.next_tokens)
        assert graphs._milliseconds(decode, tokens) == 15.0 / TIMED_REPLAYS
        assert begun == [(tokens.tolist(), [0] * len(state.lens))] * (1 + TIMED_REPLAYS)
        begun.clear()
        assert graphs._milliseconds(prompt) == 15.0 / TIMED_REPLAYS
        assert len(begun) == 1 + TIMED_REPLAYS and begun[0] != begun[1], "nothing is set back"


SIZES_OF_PLAN = Sizes(1, 128, 64, (), 1, RankLayout())


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h", "kimi_linear"])
def test_times_of_steps_with_draft_tokens(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are of both graphs, what keeps the states of accepted tokens included, of request slots that differ in their
    tokens; and they leave the tables of requests as they were. The rows that are kept take what is planned."""
    save_tiny(name, tmp_path)
    args = ServerArgs.from_kwargs(
        model_path=str(tmp_path), device="cpu", skip_tokenizer_init=True, speculative_algorithm="NGRAM",
        speculative_num_steps=2, max_running_requests=4, max_total_tokens=1024,
    )  # fmt: skip
    runner = create_runner(args)
    with_attention(runner, DeviceLengths(), DeviceLengths())
    committed: list[list[int]] = []
    kept: list[int] = []
    commit = RecurrentRecords.commit

    def counted(records: RecurrentRecords, counts: torch.Tensor) -> None:
        rows_of = [(rows.x, rows.x, rows.log_decays, rows.betas) for rows in records.layers]
        kept.append(sum(tensor.nbytes for rows in rows_of for tensor in rows))  # what is convolved is as large as x
        committed.append([len(records.layers), *records.requests.req_pool_indices.tolist()])
        commit(records, counts)

    monkeypatch.setattr(RecurrentRecords, "commit", counted)
    with in_graphs(runner, GraphSizes((1, 4), (16,))):
        graphs, timed = runner.graphs, {}
        assert graphs is not None
        states = [store["state"] for store in runner.model.caches if store.name == "state"]
        committed.clear()

        def milliseconds(shape: StepShape, tokens: torch.Tensor) -> float:
            before = [state.clone() for state in states]
            runner.state.next_tokens.copy_(tokens)
            graphs.graphs[shape].replay()
            assert all(torch.equal(*pair) for pair in zip(before, states, strict=True)), (
                "draft tokens may be taken back"
            )
            graphs._accept[shape](graphs._tokens[:0])
            changed = [(old != new).flatten(1).any(1) for old, new in zip(before, states, strict=True)]
            assert all(rows.nonzero().flatten().tolist() == [*range(1, shape.num_decodes + 1)] for rows in changed)
            timed[shape.num_decodes, shape.width] = graphs.outputs[shape].batch.input_ids.tolist()
            return 1.0

        monkeypatch.setattr(graphs, "_milliseconds", milliseconds)
        assert graphs.step_times() == {(1, 3): 1.0, (4, 3): 1.0}
    assert committed == [[len(states), 1], [len(states), 1, 2, 3, 4]], "all layers at once"
    assert all(len(set(ids)) == len(ids) for ids in timed.values())
    tables = runner.state.next_tokens, runner.state.lens, runner.state.req_to_token
    assert not any(table.any() for table in tables)
    asked = replace(SIZES_OF_PLAN, max_running_requests=4, drafts=StepWidths((3,)))
    assert max(kept) == verified_bytes(runner.plan.description, "float32", asked)
    assert verified_bytes(runner.plan.description, "float32", replace(asked, drafts=StepWidths())) == 0


def test_the_prompt_of_a_capture_has_all_tokens() -> None:
    values = _one_prompt(StepShape(16, 2, has_prompts=True))
    assert values["start_loc"].tolist() == [0, *[16] * (MAX_PROMPTS + 1)]
    assert (values["seq_lens"].tolist(), values["num_tokens"].tolist()) == ([16], [16])
