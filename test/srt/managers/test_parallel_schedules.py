"""Ranks that share a model in every way take the same decisions and give the tokens of one process: requests with
common prefixes, prompts in chunks beside decoding, penalties, seeds, grammars, an abort, and a pool so small that some
go back to the queue. Without stages the decisions are those of one process too; with stages, steps bring the tokens of
fewer."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from matrix import KINDS, LAYOUTS, cells, kinds, layouts, save_kind
from pairs import some
from rank_processes import run_ranks

from sglang.srt.constrained.grammar import Grammar
from sglang.srt.distributed import parallel_state
from sglang.srt.layers import embedding
from sglang.srt.managers.scheduler.attention_groups import AttentionGroups
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.schedule_batch import Req
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.managers.wire.io_struct import AbortReq
from sglang.srt.model_executor.graph_runner import GraphSizes
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plan.ranks import ONE_RANK, RankLayout
from sglang.srt.server_args import ServerArgs
from srt.constrained import turned_grammar
from srt.managers.fake_runner import Collector, add, assert_clean, request, run_to_end
from srt.model_executor.graph_stand_ins import DeviceLengths, in_graphs, with_attention
from srt.model_executor.known_texts import KnownTexts, verifying_runner
from srt.models.harness import VOCAB

NEW_TOKENS, POOL, CHUNK = 32, 150, 16
ABORT_AT, SECOND_WAVE_AT = 12, 20
GRAMMAR, COMPILED_AT = (6, 14), 3
"""Tokens of an output with a grammar, at least and at most; the step at which those of the second wave have theirs."""
ALL_KINDS = kinds(lacking="repeats, cut heads")
QUIRKS = (("TP3", "experts, 8 heads"), ("EP3", "experts, 8 heads"), ("PP3", "tied embedding"))
CELLS = (*cells(ALL_KINDS, layouts(lacking="DCP, DP")[1:]), *QUIRKS)
DRAFT_CELLS = tuple(cells(ALL_KINDS, ("one rank", "TP2", "PP2", "TP2 x PP2")))
Groups = dict[str, tuple[str, ...]]
"""Names of kinds by layout, whose models the same ranks serve one after the other."""
QUICK: Groups = {
    "TP2": ("chunks",),
    "EP2": ("experts",),
    "PP2": ("latents", "selected blocks", "relative biases", "class of transformers"),
    "TP2 x PP2": ("experts",),
}
"""What `make test` runs: each mechanism in a layout. Other layouts have the same paths."""
QUICK_DRAFTS: Groups = {"TP2": ("gated delta, tied",), "PP2": ("windows",)}
IN_QUICK_CASES = {name for layouts in (QUICK, QUICK_DRAFTS) for names in layouts.values() for name in names}


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


TRUNK = prompt(1, 30)
PROMPTS = {
    "plain": [*TRUNK, 7, 8],
    "aborted": prompt(2, 21),
    "penalized": prompt(3, 9),
    "sampled": prompt(4, 40),
    "same prefix": [*TRUNK, 9],
    "same prompt": [*TRUNK, 7, 8],
    "biased": prompt(5, 12),
    "grammar": [*TRUNK, 12],
    "sampled grammar": prompt(6, 11),
}


@dataclass
class Attention:
    """backends: of requests that decode and of prompts; graphs: those that these can be in."""

    backends: Callable[[ModelRunner], tuple[Any, Any]]
    graphs: GraphSizes


@dataclass
class Outcome:
    tokens: dict[str, list[int]]
    finishes: dict[str, str]
    num_steps: int
    num_retracted: int
    num_cached: int
    logprobs: list[float] = field(default_factory=list, compare=False)
    """Of one request's tokens, with the two likeliest and two that it names, on ranks that have them."""

    def has_logprobs_of(self, other: Outcome) -> bool:
        return self.logprobs == pytest.approx(other.logprobs, abs=1e-3)


def play(scheduler: Scheduler | AttentionGroups) -> Outcome:
    """The schedule, by numbers of steps: every rank acts at the same ones."""
    collector = Collector()
    first: dict[str, dict[str, Any]] = {
        "plain": {"temperature": 0.0},
        "aborted": {"temperature": 0.0},
        "penalized": {"temperature": 0.0, "frequency_penalty": 1.5, "repetition_penalty": 1.3},
        "sampled": {"temperature": 0.9, "top_p": 0.8, "top_k": 20},
    }
    second: dict[str, dict[str, Any]] = {
        "same prefix": {"temperature": 0.0},
        "same prompt": {"temperature": 0.0},
        "biased": {"temperature": 0.0, "logit_bias": {"11": 4.0}, "presence_penalty": 2.0},
        "grammar": {"temperature": 0.0},
        "sampled grammar": {"temperature": 0.8, "frequency_penalty": 1.0},
    }
    constrained = dict[str, Req]()
    for wave in (first, second):
        for rid, params in wave.items():
            message = request(rid, PROMPTS[rid], NEW_TOKENS, ignore_eos=True, **params)
            if rid == "biased":
                message.return_logprob, message.top_logprobs_num, message.token_ids_logprob = True, 2, [3, 11]
            add(scheduler, message)
            if "grammar" in rid:
                constrained[rid] = scheduler.reqs[rid]
                scheduler.hold(constrained[rid], None)  # type: ignore[arg-type]
        for step in range(SECOND_WAVE_AT):
            if wave is second and step == COMPILED_AT:
                for req in constrained.values():
                    req.grammar = Grammar(turned_grammar.compiled(scheduler.plan.model.vocab_size, *GRAMMAR))
                    scheduler.release_hold(req)
            if wave is first and step == ABORT_AT:
                scheduler.abort(AbortReq(["aborted"]))
            scheduler.step()
            collector.take(scheduler)
    run_to_end(scheduler, collector)
    assert all(turned_grammar.fits(collector.tokens[rid], *GRAMMAR) for rid in constrained)
    for each in scheduler.schedulers if isinstance(scheduler, AttentionGroups) else [scheduler]:
        assert_clean(each)
    finishes = {rid: reason.type for rid, reason in collector.finish.items()}
    stats = scheduler.stats
    counts = stats.decode_steps, stats.num_retracted, stats._cached
    return Outcome(collector.tokens, finishes, *counts, collector.logprobs.get("biased", []))


def outcome(
    folder: str,
    ranks: RankLayout,
    rank: int,
    rendezvous: str | None,
    replayed: set[int] | None = None,
    known: dict[str, list[int]] | None = None,
    schedule: Callable[[Scheduler | AttentionGroups], Outcome] = play,
    attention: Attention | None = None,
    **more: Any,
) -> Outcome:
    """replayed: steps go through graphs, and the numbers of requests of those that decode are added; None: no graphs.
    known: outputs of which proposes are made, of every third token wrong ones; None: no draft tokens. attention: None:
    plain torch's."""
    flags: dict[str, Any] = {"max_total_tokens": POOL, "chunked_prefill_size": CHUNK, "max_running_requests": 4, **more}
    own_heads = ranks.dp_lm_head or (known is not None and ranks.attn_dp_size > 1)  # as the flags of drafts have it
    args = ServerArgs.from_kwargs(
        model_path=folder, device="cpu", skip_tokenizer_init=True, skip_server_warmup=True, random_seed=3,
        schedule_conservativeness=0.01, tp_size=ranks.tp_size, ep_size=ranks.ep_size, pp_size=ranks.pp_size,
        dcp_size=ranks.dcp_size, attn_dp_size=ranks.attn_dp_size, enable_dp_lm_head=own_heads, **flags,
    )  # fmt: skip
    if known is None:
        runner = create_runner(args, rank, rendezvous)
    else:
        outputs = {tuple(PROMPTS[rid]): tokens for rid, tokens in known.items()}
        runner = verifying_runner(args, KnownTexts(4, 3, lookahead_slots=2), outputs, rank, rendezvous)
    create = AttentionGroups if ranks.attn_dp_size > 1 else Scheduler
    if attention is not None:
        with_attention(runner, *attention.backends(runner))
    if replayed is None:
        return schedule(create(args, runner, StopChecker(None)))
    if attention is None:
        with_attention(runner, DeviceLengths(), DeviceLengths())
    with in_graphs(
        runner, GraphSizes((1, 3, 4), (8, 20), (0, 4)) if attention is None else attention.graphs
    ) as replays:
        result = schedule(create(args, runner, StopChecker(None)))
    replayed |= {len(step.slots) for step in replays if step.prompts is None}
    return result


def graph_modes(index: int, both: bool) -> tuple[bool, ...]:
    """Returns whether the steps of a group's model with this index go through graphs: every other one's, or, with
    `both`, each model's once with graphs and once without."""
    return (True, False) if both else (index % 2 == 0,)


def _rank(
    rank: int, ranks: RankLayout, folders: dict[str, str], out: Path, known: dict[str, dict[str, list[int]]], both: bool
) -> None:
    """Steps of two rows and more leave the ranks of a stage their columns of the logits, as only those of many rows do;
    one row is whole."""
    torch.set_num_threads(1)
    embedding.MIN_SHARDED_ROWS = 2
    replayed: set[int] = set()
    for i, (name, folder) in enumerate(folders.items()):
        for graphs in graph_modes(i, both):
            meet = f"file://{out}/rendezvous{i}.{graphs}"
            result = outcome(folder, ranks, rank, meet, replayed if graphs else None, known.get(name))
            (out / f"{name}.{graphs}.{rank}.json").write_text(json.dumps(result.__dict__))
            parallel_state.shutdown()
    # Steps with padding. Of models with large pages so small a pool may hold one request at a time.
    assert 2 in replayed or (both and replayed)


class Models(Protocol):
    def __call__(self, name: str, ranks: RankLayout = ONE_RANK) -> tuple[str, Outcome]: ...


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Where each is, and what one process makes of the schedule."""

    @functools.cache
    def made(name: str, at_four: bool) -> tuple[str, Outcome]:
        ranks = LAYOUTS["TP4"] if at_four else ONE_RANK
        folder = str(save_kind(name, tmp_path_factory.mktemp("model"), ranks))
        return folder, outcome(folder, ONE_RANK, 0, None)

    return lambda name, ranks=ONE_RANK: made(name, ranks.attn_tp_size == 4 and bool(KINDS[name].at_four))


@pytest.mark.parametrize("name", some(dict.fromkeys(name for _, name in (*CELLS, *DRAFT_CELLS)), IN_QUICK_CASES))
def test_the_schedule_has_what_it_is_for(name: str, models: Models) -> None:
    _, one = models(name)
    assert (one.num_retracted > 0 or "states" in KINDS[name].tags) and one.num_cached > 0
    assert one.finishes["aborted"] == "abort" and 0 < len(one.tokens["aborted"]) < NEW_TOKENS
    whole = {rid for rid, finish in one.finishes.items() if finish == "length"}
    assert whole == {*PROMPTS} - {"aborted", "grammar", "sampled grammar"}
    assert {len(one.tokens[rid]) for rid in whole} == {NEW_TOKENS}
    assert len(one.logprobs) == 5 * NEW_TOKENS
    assert one.tokens["plain"] == one.tokens["same prompt"]


def in_groups_and_alone(every: Collection[tuple[str, str]], quick: Groups) -> pytest.MarkDecorator:
    """Quick groups, and each cell of `every`, with graphs and without."""
    others = {(layout, name) for layout, names in quick.items() for name in names} - {*every}
    assert not others, f"these are no cells: {others}"
    groups = [pytest.param(layout, names, False, id=layout) for layout, names in quick.items()]
    thorough = pytest.mark.thorough
    alone = [pytest.param(layout, (name,), True, id=f"{layout}-{name}", marks=thorough) for layout, name in every]
    return pytest.mark.parametrize(("layout", "names", "both"), [*groups, *alone])


Results = Iterator[tuple[str, int, Outcome, Outcome, Outcome]]


def results(layout: str, names: tuple[str, ...], models: Models, out: Path, drafts: bool, both: bool) -> Results:
    """Runs the schedule on the ranks. Yields (where, rank, its outcome, that of the first rank, that of a process)."""
    ranks = LAYOUTS[layout]
    alone = {name: models(name, ranks)[1] for name in names}
    known = {name: one.tokens for name, one in alone.items()} if drafts else {}
    folders = {name: models(name, ranks)[0] for name in names}
    run_ranks(_rank, (ranks, folders, out, known, both), ranks.world_size)
    for i, name in enumerate(names):
        for graphs in graph_modes(i, both):
            files = [out / f"{name}.{graphs}.{rank}.json" for rank in range(ranks.world_size)]
            every = [Outcome(**json.loads(file.read_text())) for file in files]
            for rank, got in enumerate(every):
                yield f"{name}, {graphs=}, rank {rank}", rank, got, every[0], alone[name]


def check_memory(where: str, got: Outcome, one: Outcome) -> None:
    """Some requests went back to the queue. Where prompts pause for their states there may be room for all."""
    has_states = "states" in KINDS[where.partition(", graphs=")[0]].tags
    assert got.finishes == one.finishes and (got.num_retracted > 0 or has_states), where


@in_groups_and_alone(CELLS, QUICK)
def test_ranks_give_the_tokens_of_one_process(
    layout: str, names: tuple[str, ...], both: bool, models: Models, tmp_path: Path
) -> None:
    ranks = LAYOUTS[layout]
    for where, rank, got, first, one in results(layout, names, models, tmp_path, drafts=False, both=both):
        assert got == (first if ranks.pp_size > 1 else one), where
        assert got.has_logprobs_of(one) if rank == ranks.leader else not got.logprobs, where
        check_memory(where, got, one)
        short = {rid: ids[: len(got.tokens[rid])] for rid, ids in one.tokens.items() if rid == "aborted"}
        assert got.tokens["aborted"] and got.tokens == {**one.tokens, **short}, where
        assert ranks.pp_size == 1 or got.num_steps > one.num_steps, f"{where}: all requests are in every step"


@in_groups_and_alone(DRAFT_CELLS, QUICK_DRAFTS)
def test_draft_tokens_change_no_token_of_several_ranks(
    layout: str, names: tuple[str, ...], both: bool, models: Models, tmp_path: Path
) -> None:
    ranks = LAYOUTS[layout]
    for where, rank, got, first, one in results(layout, names, models, tmp_path, drafts=True, both=both):
        assert got == first, where
        assert got.has_logprobs_of(one) if rank == ranks.leader else not got.logprobs, where
        check_memory(where, got, one)
        aborted, other = got.tokens["aborted"], one.tokens["aborted"]
        assert aborted[: len(other)] == other[: len(aborted)], where
        assert {**got.tokens, "aborted": other} == one.tokens, where
