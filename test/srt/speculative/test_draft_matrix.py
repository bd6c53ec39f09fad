"""Every kind of draft x every kind of model x every layout: a schedule gives what it gives without drafts. It has
greedy, sampled, penalized, biased and stopped requests, grammars, log probabilities, an abort, retraction, and cached
prefixes.

`make test` runs the cases of QUICK; `make thorough` runs all of them."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from matrix import FEATURES, KINDS, WHOLE, cells, flags_of, kinds, why_not
from pairs import some_of, with_each_value
from rank_processes import run_ranks

from sglang.srt.constrained.grammar import Grammar
from sglang.srt.distributed import parallel_state
from sglang.srt.layers import native_ops
from sglang.srt.managers.scheduler.attention_groups import AttentionGroups
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.managers.wire.io_struct import AbortReq, FinishReason
from sglang.srt.model_executor.graph_runner import GraphSizes
from sglang.srt.sampling.output_logprobs import OutputLogprobs
from sglang.srt.server_args import ServerArgs
from srt.constrained import turned_grammar
from srt.managers.fake_runner import assert_clean, request
from srt.managers.test_fp4_schedules import quantize_rounded
from srt.model_executor.graph_stand_ins import DeviceLengths, in_graphs, with_attention
from srt.models import (
    test_dflash_drafts,
    test_dspark_drafts,
    test_eagle3_drafts,
    test_mtp_drafts,
    test_other_drafts,
    test_stream_drafts,
)
from srt.models.depth_drafts import DEPTH_FORMS, build_depths
from srt.models.harness import VOCAB, save_tiny
from srt.models.muse_assistant import save_assistant
from srt.models.v4_drafts import save_v4
from srt.sampling.packed_logprobs import unpacked

NEW_TOKENS, ABORT_AT, SECOND_WAVE_AT = 16, 9, 14
NAMES = kinds(lacking="repeats, for ranks, embedded")
LAUNCHES = {"eager": "one rank", "graphs": "one rank", "TP2": "TP2", "PP2": "PP2"}
"""How steps run, and on which layout of `matrix`."""
GROUP_LAYOUTS = ("DP2", "TP4 x DP2", "DP2 x PP2", "TP4 x DP2 x DCP2")
"""Attention groups with requests of their own."""


def save_target(name: str, target: Path) -> None:
    """Inkling without padding behind its vocabulary, which the drafts here have as long."""
    save_tiny(name, target, **({"unpadded_vocab_size": None} if name == "inkling" else {}))


def no_weights(name: str, target: Path, folder: Path) -> dict[str, Any]:
    """N-grams."""
    save_target(name, target)
    return {"speculative_algorithm": "NGRAM", "speculative_ngram_external_corpus_max_tokens": 100}


def small_model(name: str, target: Path, folder: Path) -> dict[str, Any]:
    save_target(name, target)
    save_tiny("llama", folder)
    return {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(folder)}


def eagle(name: str, target: Path, folder: Path) -> dict[str, Any]:
    save_target(name, target)
    test_eagle3_drafts.save(folder, test_other_drafts.EAGLE_CONFIG, test_other_drafts.eagle1_weights(True))
    return {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(folder)}


def eagle3(name: str, target: Path, folder: Path) -> dict[str, Any]:
    """A head that captures three layers, the last one of which is the target's."""
    save_target(name, target)
    config = test_eagle3_drafts.CONFIG | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    test_eagle3_drafts.save(folder, config, test_eagle3_drafts.weights(config))
    return {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(folder)}


def own_layers(name: str, target: Path, folder: Path) -> dict[str, Any]:
    if name == "deepseek_v4":
        save_v4(target, dspark=False, name=name)
        return {"speculative_algorithm": "NEXTN"}
    target.mkdir(exist_ok=True)
    if name == "qwen4_exp":
        test_stream_drafts.build(target)
    else:
        (build_depths if name in DEPTH_FORMS else test_mtp_drafts.build)(name, target)
    return {"speculative_algorithm": "NEXTN"}


def shared_selection(name: str, target: Path, folder: Path) -> dict[str, Any]:
    """The model's own layer, whose passes read the selection of the first one."""
    test_mtp_drafts.build(name, target, test_mtp_drafts.SHARED)
    return {"speculative_algorithm": "NEXTN"}


def dflash(name: str, target: Path, folder: Path, variant: str = "plain") -> dict[str, Any]:
    save_target(name, target)
    config = test_dflash_drafts.VARIANTS[variant]
    config = config | {"dflash_config": config["dflash_config"] | {"target_layer_ids": [0, 1]}}
    test_eagle3_drafts.save(folder, config, test_dflash_drafts.weights(config))
    test_dflash_drafts.save_mask_vector(variant, folder)
    return {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": str(folder)}


def assistant(name: str, target: Path, folder: Path) -> dict[str, Any]:
    """Muse-Glimmer's, over layers of both kinds, the last one of which is the target's."""
    save_target(name, target)
    save_assistant(folder, target_layer_ids=[1, 3, 7])
    return {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": str(folder)}


def dspark(name: str, target: Path, folder: Path) -> dict[str, Any]:
    """From a path; of DeepSeek-V4 the draft that its checkpoint brings."""
    if name == "deepseek_v4":
        save_v4(target, dspark=True, name=name)
        return {"speculative_algorithm": "DSPARK"}
    save_target(name, target)
    config = test_dspark_drafts.CONFIG | {"target_layer_ids": [0, 1], "markov_head_type": "rnn"}
    test_eagle3_drafts.save(folder, config, test_dspark_drafts.weights(config))
    return {"speculative_algorithm": "DSPARK", "speculative_draft_model_path": str(folder)}


IN_BLOCKS = tuple(name for name in NAMES if WHOLE not in KINDS[name].tags)
"""Of a class of transformers no draft reads the hidden states of layers."""
UNGATED = tuple(name for name in IN_BLOCKS if KINDS[name].attention != "pooled blocks")
"""Of gated streams only the model's own layer reads the hidden states."""
ONE_STREAM = tuple(name for name in IN_BLOCKS if "streams" not in KINDS[name].tags)
"""Of several streams no EAGLE head reads the hidden states."""
OWN_LAYERS = tuple(
    name for name in NAMES if KINDS[name].tiny in (*test_mtp_drafts.FORMS, *DEPTH_FORMS, "deepseek_v4", "qwen4_exp")
)
Builder = Callable[[str, Path, Path], dict[str, Any]]
DRAFTERS: dict[str, tuple[Builder, tuple[str, ...]]] = {
    "NGRAM": (no_weights, NAMES),
    "STANDALONE": (small_model, NAMES),
    "EAGLE": (eagle, ONE_STREAM),
    "EAGLE3": (eagle3, ONE_STREAM),
    "NEXTN": (own_layers, OWN_LAYERS),
    "DFLASH": (dflash, UNGATED),
    "DSPARK": (dspark, UNGATED),
    "DOMINO": (functools.partial(dflash, variant="domino"), UNGATED),
    "SELECTOR": (functools.partial(dflash, variant="selector"), UNGATED),
    "MASK VECTOR": (functools.partial(dflash, variant="mimo"), UNGATED),
    "CAUSAL BLOCK": (functools.partial(dflash, variant="laguna"), UNGATED),
    "SHARED": (shared_selection, ("shared selection",)),
    "ASSISTANT": (assistant, ("normed embedding",)),
}
"""How each is made beside a target, and the kinds of models that it is served with."""
PAIRS = [(drafter, name) for drafter, (_, names) in DRAFTERS.items() for name in names]
QUICK = (
    ("NGRAM", "sinks", "graphs"),
    ("NGRAM", "chunks", "eager"),
    ("STANDALONE", "selected blocks", "graphs"),
    ("STANDALONE", "n-grams", "eager"),
    ("EAGLE", "latents", "graphs"),
    ("EAGLE", "windows", "eager"),
    ("EAGLE3", "Kimi delta", "graphs"),
    ("EAGLE3", "two head dims", "eager"),
    ("DSPARK", "dense", "TP2"),
    ("NEXTN", "two head counts", "graphs"),
    ("NEXTN", "compressed", "eager"),
    ("DFLASH", "two head counts", "graphs"),
    ("MASK VECTOR", "sinks of windows", "graphs"),
    ("CAUSAL BLOCK", "gated heads", "graphs"),
    ("DFLASH", "gated delta and experts", "eager"),
    ("DSPARK", "pooled latents", "graphs"),
    ("DSPARK", "Mamba-2", "eager"),
    ("DOMINO", "relative biases", "graphs"),
    ("SELECTOR", "experts", "eager"),
    ("SHARED", "shared selection", "PP2"),
    ("ASSISTANT", "normed embedding", "graphs"),
)
"""Each kind of draft in graphs and without, and two of them on two ranks; a kind of model that is in none of them has a
case of its own. Further forms of drafts have one case: DFLASH with a head or of one model, NEXTN with a shared
selection."""


def build(drafter: str, name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Writes a model with its draft. Returns where it is, and the flags with which it is served."""
    target = folder / name
    options = DRAFTERS[drafter][0](KINDS[name].tiny, target, folder / "draft")
    return target, {"page_size": KINDS[name].page, **options}


def cases() -> list[Any]:
    every = [
        (drafter, name, launch)
        for drafter, name in PAIRS
        for launch, layout in LAUNCHES.items()
        if why_not(name, layout) is None
    ]
    return with_each_value(every, QUICK)


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


TRUNK = prompt(1, 30)
FIRST: dict[str, tuple[list[int], dict[str, Any]]] = {
    "greedy": ([*TRUNK, 7, 8], {}),
    "aborted": (prompt(2, 21), {}),
    "penalized": (prompt(3, 9), {"frequency_penalty": 1.5, "repetition_penalty": 1.3, "min_new_tokens": 9}),
    "sampled": (prompt(4, 40), {"temperature": 0.9, "top_p": 0.8, "top_k": 20}),
}
SECOND: dict[str, tuple[list[int], dict[str, Any]]] = {
    "same prefix": ([*TRUNK, 9], {"temperature": 1.0}),
    "same prompt": ([*TRUNK, 7, 8], {}),
    "biased": (prompt(5, 12), {"logit_bias": {"11": 4.0}, "presence_penalty": 2.0, "temperature": 0.7, "min_p": 0.02}),
    "stopped": (prompt(6, 28), {"stop_token_ids": list(range(0, VOCAB, 2)), "min_new_tokens": 3, "temperature": 1.0}),
    "constrained": ([*TRUNK, 12], {"frequency_penalty": 0.5}),
    "constrained sample": (prompt(7, 18), {"temperature": 0.8}),
}
GRAMMAR = (5, 12)
"""Tokens of the outputs of constrained requests, at least and at most."""
WITH_LOGPROBS = {"greedy", "sampled", "biased", "same prefix"}


@dataclass
class Outcome:
    tokens: dict[str, list[int]] = field(default_factory=dict)
    finish: dict[str, FinishReason] = field(default_factory=dict)
    logprobs: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    num_retracted: int = 0
    num_cached: int = 0
    verified: int = 0

    def take(self, scheduler: Scheduler | AttentionGroups) -> None:
        messages, scheduler.outbox = scheduler.outbox, []
        for message in messages:
            for rid, ids, finish, logprobs in zip(
                message.rids, message.new_ids, message.finish, message.logprobs, strict=True
            ):
                assert rid not in self.finish, "a message after the last one"
                self.tokens.setdefault(rid, []).extend(ids)
                if isinstance(logprobs, OutputLogprobs):
                    self.logprobs.setdefault(rid, []).extend(unpacked(logprobs).output)
                if finish is not None:
                    self.finish[rid] = finish


def play(scheduler: Scheduler | AttentionGroups) -> Outcome:
    """The schedule, by numbers of steps: every rank acts at the same ones."""
    result = Outcome()

    def step() -> None:
        scheduler.step()
        result.take(scheduler)

    for wave in (FIRST, SECOND):
        for seed, (rid, (ids, params)) in enumerate(wave.items()):
            message = request(rid, ids, NEW_TOKENS, **{"temperature": 0.0, "ignore_eos": True} | params)
            if rid in WITH_LOGPROBS:
                message = msgspec.structs.replace(message, return_logprob=True, logprob_start_len=len(ids))
            scheduler.add(message, seed=seed, stop_ids=frozenset(message.sampling_params.stop_token_ids))
            if rid.startswith("constrained"):
                grammar = turned_grammar.compiled(scheduler.plan.model.vocab_size, *GRAMMAR)
                scheduler.reqs[rid].grammar = Grammar(grammar)
        for i in range(SECOND_WAVE_AT):
            if wave is FIRST and i == ABORT_AT:
                scheduler.abort(AbortReq(["aborted"]))
            step()
    for _ in range(2000):
        if scheduler.idle:
            break
        step()
    for each in scheduler.schedulers if isinstance(scheduler, AttentionGroups) else [scheduler]:
        assert_clean(each)
    assert all(turned_grammar.fits(result.tokens[rid], *GRAMMAR) for rid in result.tokens if "constrained" in rid)
    stats = scheduler.stats
    result.num_retracted, result.num_cached = stats.num_retracted, stats._cached
    result.verified = 0 if stats.drafts is None else stats.drafts.num_steps
    return result


def server_args(folder: Path, options: dict[str, Any]) -> ServerArgs:
    drafts = {"speculative_num_draft_tokens": 4} if "speculative_algorithm" in options else {}
    groups = options.get("attn_dp_size", 1)
    return ServerArgs.from_kwargs(
        model_path=str(folder), device="cpu", skip_tokenizer_init=True, skip_server_warmup=True, max_total_tokens=112,
        max_running_requests=4 * groups, chunked_prefill_size=16 * groups, schedule_conservativeness=0.01,
        random_seed=3, **{**drafts, **options},
    )  # fmt: skip


def without_drafts(target: Path, options: dict[str, Any]) -> Outcome:
    """Returns what a server with these options for all but drafts gives."""
    return outcome(server_args(target, {key: value for key, value in options.items() if "speculative" not in key}))


def outcome(args: ServerArgs, graphs: bool = False, rank: int = 0, rendezvous: str | None = None) -> Outcome:
    runner = create_runner(args, rank, rendezvous)
    with contextlib.ExitStack() as stack:
        if graphs:
            with_attention(runner, DeviceLengths(), DeviceLengths())
            stack.enter_context(in_graphs(runner, GraphSizes((1, 3, 4), (8, 20), (0, 4))))
        create = AttentionGroups if args.attn_dp_size > 1 else Scheduler
        return play(create(args, runner, StopChecker(None)))


def _rank(rank: int, args: ServerArgs, folder: Path, graphs: bool = False) -> None:
    torch.set_num_threads(1)
    result = outcome(args, graphs, rank, f"file://{folder}/rendezvous.{graphs}")
    (folder / f"{rank}.json").write_bytes(msgspec.json.encode(result))
    parallel_state.shutdown()


def on_ranks(args: ServerArgs, folder: Path, graphs: bool = False) -> list[Outcome]:
    """What each rank knows."""
    count = args.tp_size * args.pp_size
    run_ranks(_rank, (args, folder, graphs), count)
    results = [Outcome(**json.loads((folder / f"{rank}.json").read_text())) for rank in range(count)]
    return [msgspec.convert(msgspec.to_builtins(result), Outcome) for result in results]


def same(result: Outcome, plain: Outcome) -> None:
    """The aborted request ends at a number of steps, of which drafts need fewer: what both have agrees."""
    for name in {*FIRST, *SECOND}:
        got, expected = result.tokens[name], plain.tokens[name]
        if name == "aborted":
            got, expected = got[: len(expected)], expected[: len(got)]
        else:
            assert msgspec.to_builtins(result.finish[name]) == msgspec.to_builtins(plain.finish[name]), name
        assert got == expected, name
    for name in filter(result.logprobs.get, WITH_LOGPROBS):
        values, tokens = zip(*result.logprobs[name], strict=True)
        expected_values, expected_tokens = zip(*plain.logprobs[name], strict=True)
        assert tokens == expected_tokens and values == pytest.approx(expected_values, abs=1e-4), name


@pytest.mark.parametrize(("drafter", "model", "launch"), cases())
def test_drafts_change_nothing(drafter: str, model: str, launch: str, tmp_path: Path) -> None:
    target, options = build(drafter, model, tmp_path)
    plain = without_drafts(target, options)
    assert plain.num_retracted or model == "compressed", "whose windows have room for fewer requests at once"
    assert plain.num_cached and plain.finish["stopped"].type == "stop"
    assert 3 <= len(plain.tokens["stopped"]) < NEW_TOKENS == len(plain.tokens["sampled"])
    args = server_args(target, options | flags_of(LAUNCHES[launch]))
    if LAUNCHES[launch] == "one rank":
        results = [outcome(args, graphs=launch == "graphs")]
    else:
        results = on_ranks(args, tmp_path)
    for result in results:
        assert result.verified > 0
        same(result, plain)
    (leader,) = (result for result in results if any(result.logprobs.values()))
    assert all(leader.logprobs[name] for name in WITH_LOGPROBS), "only the leader sends them"


FP4_NAMES = [name for _, name in cells(NAMES, feature="fp4")]
FP4_CASES = [(drafter, name, graphs) for drafter, name in PAIRS if name in FP4_NAMES for graphs in (False, True)]


@pytest.mark.parametrize(("drafter", "model", "graphs"), some_of(FP4_CASES, [("EAGLE3", "dense", True)]))
def test_drafts_change_nothing_of_four_bit_caches(
    drafter: str, model: str, graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's keys and values have four bits, too."""
    monkeypatch.setattr(native_ops, "quantize_fp4_rows", quantize_rounded)
    target, options = build(drafter, model, tmp_path)
    options |= FEATURES["fp4"].flags
    result = outcome(server_args(target, options), graphs)
    assert result.verified > 0
    same(result, without_drafts(target, options))


GROUP_CASES = [
    (drafter, name, layout, graphs)
    for drafter, name in PAIRS
    for layout, _ in cells([name], GROUP_LAYOUTS)
    for graphs in (False, True)
]


@pytest.mark.parametrize(
    ("drafter", "model", "layout", "graphs"), some_of(GROUP_CASES, [("EAGLE3", "dense", "DP2", True)])
)
def test_drafts_change_nothing_of_attention_groups(
    drafter: str, model: str, layout: str, graphs: bool, tmp_path: Path
) -> None:
    """In every rank's view of all groups. With graphs, steps that not all groups have one for are launched without."""
    target, options = build(drafter, model, tmp_path)
    plain, shared = without_drafts(target, options), flags_of(layout)
    options["page_size"] = max(options["page_size"], shared["dcp_size"])
    results = on_ranks(server_args(target, options | shared), tmp_path, graphs)
    for result in results:
        assert result.verified > 0 and (result.tokens, result.finish) == (results[0].tokens, results[0].finish)
        same(result, plain)
    (leader,) = (result for result in results if any(result.logprobs.values()))
    assert all(leader.logprobs[name] for name in WITH_LOGPROBS), "only the leader sends them"


@pytest.mark.thorough
@pytest.mark.parametrize(("drafter", "model"), [pair for pair in PAIRS if pair[1] in IN_BLOCKS])
def test_drafts_change_nothing_of_prompts_as_halves(drafter: str, model: str, tmp_path: Path) -> None:
    """Drafts read hidden states of both halves, and attend to the prompts of the whole step."""
    target, options = build(drafter, model, tmp_path)
    plain = without_drafts(target, options)
    options |= {**flags_of("TP2"), **FEATURES["two-batch overlap"].flags}
    for result in on_ranks(server_args(target, options), tmp_path):
        assert result.verified > 0
        same(result, plain)
