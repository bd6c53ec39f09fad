"""Every kind of draft x every kind of model x every layout: a schedule gives what it gives without drafts. It has
greedy, sampled, penalized, biased and stopped requests, grammars, log probabilities, an abort, retraction, and cached
prefixes.

`make test` runs the cases of QUICK; `make thorough` runs all of them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from pairs import some_of
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

NEW_TOKENS, ABORT_AT, SECOND_WAVE_AT = 16, 9, 14
MODELS = (
    "qwen3", "qwen3_moe", "qwen3_windows", "mimo_v2", "gpt_oss", "gemma4", "deepseek_v3", "glm_moe_dsa", "deepseek_v4",
    "qwen3_next", "nemotron_h", "minimax_m3", "step3p7", "kimi_linear", "glm5_next", "qwen4_exp", "llama4",
    "inkling", "muse_glimmer",
)  # fmt: skip
"""Dense, experts, windows, sinks, heads of two sizes, latents, sparse latents, compressed entries, states, blocks,
windows of other heads with a draft layer for each depth, states beside latents, pooled keys, gated streams with
embeddings of n-grams, attention by chunks, biases by distance with convolutions, and a normed embedding."""
PAGES = {"deepseek_v4": 16, "minimax_m3": 4, "glm5_next": 4, "qwen4_exp": 4}
"""Sizes of pages that hold what these models cache or read as one."""
LAYOUTS: dict[str, dict[str, int]] = {"eager": {}, "graphs": {}, "tp2": {"tp_size": 2}, "pp2": {"pp_size": 2}}
GROUP_LAYOUTS: dict[str, dict[str, int]] = {
    "dp2": {"tp_size": 2, "attn_dp_size": 2},
    "tp4 x dp2": {"tp_size": 4, "attn_dp_size": 2},
    "dp2 x pp2": {"tp_size": 2, "attn_dp_size": 2, "pp_size": 2},
    "tp4 x dp2 x dcp2": {"tp_size": 4, "attn_dp_size": 2, "dcp_size": 2, "page_size": 2},
}
"""Attention groups with requests of their own."""
ALIKE_ON_RANKS = ("deepseek_v3", "glm_moe_dsa", "kimi_linear")
"""Models of which the ranks of a group would hold the same tokens."""


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


UNGATED = tuple(name for name in MODELS if name != "qwen4_exp")
"""Of gated streams only the model's own layer reads the hidden states."""
ONE_STREAM = tuple(name for name in UNGATED if name not in ("deepseek_v4", "glm5_next"))
"""Of several streams no EAGLE head reads the hidden states."""
OWN_LAYERS = tuple(
    name for name in MODELS if name in (*test_mtp_drafts.FORMS, *DEPTH_FORMS, "deepseek_v4", "qwen4_exp")
)
Builder = Callable[[str, Path, Path], dict[str, Any]]
DRAFTERS: dict[str, tuple[Builder, tuple[str, ...]]] = {
    "NGRAM": (no_weights, MODELS),
    "STANDALONE": (small_model, MODELS),
    "EAGLE": (eagle, ONE_STREAM),
    "EAGLE3": (eagle3, ONE_STREAM),
    "NEXTN": (own_layers, OWN_LAYERS),
    "DFLASH": (dflash, UNGATED),
    "DSPARK": (dspark, UNGATED),
    "DOMINO": (functools.partial(dflash, variant="domino"), UNGATED),
    "SELECTOR": (functools.partial(dflash, variant="selector"), UNGATED),
    "SHARED": (shared_selection, ("glm_moe_dsa",)),
    "ASSISTANT": (assistant, ("muse_glimmer",)),
}
"""How each is made beside a target, and the targets that it is served with."""
QUICK = {
    ("NGRAM", "gpt_oss", "graphs"),
    ("NGRAM", "llama4", "eager"),
    ("STANDALONE", "minimax_m3", "graphs"),
    ("STANDALONE", "qwen4_exp", "eager"),
    ("EAGLE", "deepseek_v3", "graphs"),
    ("EAGLE", "qwen3_windows", "eager"),
    ("EAGLE3", "kimi_linear", "graphs"),
    ("EAGLE3", "gemma4", "eager"),
    ("DSPARK", "qwen3", "tp2"),
    ("NEXTN", "step3p7", "graphs"),
    ("NEXTN", "deepseek_v4", "eager"),
    ("DFLASH", "mimo_v2", "graphs"),
    ("DFLASH", "qwen3_next", "eager"),
    ("DSPARK", "glm5_next", "graphs"),
    ("DSPARK", "nemotron_h", "eager"),
    ("DOMINO", "inkling", "graphs"),
    ("SELECTOR", "qwen3_moe", "eager"),
    ("SHARED", "glm_moe_dsa", "pp2"),
    ("ASSISTANT", "muse_glimmer", "graphs"),
}
"""Each model once, each kind of draft in graphs and without, and two of them on two ranks. Further forms of drafts have
one case: DFLASH with a head or of one model, NEXTN with a shared selection."""


def cases() -> list[Any]:
    every = (
        case for drafter, (_, models) in DRAFTERS.items() for case in itertools.product((drafter,), models, LAYOUTS)
    )
    return some_of(every, QUICK)


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
                    self.logprobs.setdefault(rid, []).extend(logprobs.output)
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
    page = next((tokens for name, tokens in PAGES.items() if name in folder.name), 1)
    return ServerArgs.from_kwargs(
        model_path=str(folder), device="cpu", skip_tokenizer_init=True, skip_server_warmup=True, max_total_tokens=112,
        max_running_requests=4 * groups, chunked_prefill_size=16 * groups, schedule_conservativeness=0.01,
        random_seed=3, **{"page_size": page, **drafts, **options},
    )  # fmt: skip


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


@pytest.mark.parametrize(("drafter", "model", "layout"), cases())
def test_drafts_change_nothing(drafter: str, model: str, layout: str, tmp_path: Path) -> None:
    build, _ = DRAFTERS[drafter]
    target = tmp_path / model
    options = build(model, target, tmp_path / "draft")
    plain = outcome(server_args(target, {}))
    assert plain.num_retracted or model == "deepseek_v4", "whose windows have room for fewer requests at once"
    assert plain.num_cached and plain.finish["stopped"].type == "stop"
    assert 3 <= len(plain.tokens["stopped"]) < NEW_TOKENS == len(plain.tokens["sampled"])
    ranks = LAYOUTS[layout]
    args = server_args(target, options | ranks)
    if ranks:
        results = on_ranks(args, tmp_path)
    else:
        results = [outcome(args, graphs=layout == "graphs")]
    for result in results:
        assert result.verified > 0
        same(result, plain)
    assert all(results[-1].logprobs[name] for name in WITH_LOGPROBS), "the last stage has them"


FP4_MODELS = ("qwen3", "qwen3_moe", "qwen3_windows", "gpt_oss", "gemma4", "qwen3_next", "nemotron_h")
"""Of grouped-query attention, in layers of their own or beside states."""
FP4_CACHE = {"kv_cache_dtype": "fp4_e2m1"}


def cases_of_fp4() -> list[Any]:
    """All of them, of which `make test` runs one."""
    quick = {("EAGLE3", "qwen3", True)}
    every = itertools.product(DRAFTERS, FP4_MODELS, (False, True))
    return [
        pytest.param(*case, marks=[] if case in quick else pytest.mark.thorough)
        for case in every
        if case[1] in DRAFTERS[case[0]][1]
    ]


@pytest.mark.parametrize(("drafter", "model", "graphs"), cases_of_fp4())
def test_drafts_change_nothing_of_four_bit_caches(
    drafter: str, model: str, graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's keys and values have four bits, too."""
    monkeypatch.setattr(native_ops, "quantize_fp4_rows", quantize_rounded)
    build, _ = DRAFTERS[drafter]
    target = tmp_path / model
    options = build(model, target, tmp_path / "draft")
    plain = outcome(server_args(target, FP4_CACHE))
    result = outcome(server_args(target, options | FP4_CACHE), graphs)
    assert result.verified > 0
    same(result, plain)


def cases_of_groups() -> list[Any]:
    """All of them, of which `make test` runs one."""
    return [
        pytest.param(
            *(drafter, model, layout, graphs),
            marks=[] if (drafter, model, layout, graphs) == ("EAGLE3", "qwen3", "dp2", True) else pytest.mark.thorough,
        )
        for drafter, (_, models) in DRAFTERS.items()
        for model in models
        for layout in GROUP_LAYOUTS
        if "dcp2" not in layout or model in ALIKE_ON_RANKS
        for graphs in (False, True)
    ]


@pytest.mark.parametrize(("drafter", "model", "layout", "graphs"), cases_of_groups())
def test_drafts_change_nothing_of_attention_groups(
    drafter: str, model: str, layout: str, graphs: bool, tmp_path: Path
) -> None:
    """In every rank's view of all groups. With graphs, steps that not all groups have one for are launched without."""
    build, _ = DRAFTERS[drafter]
    target = tmp_path / model
    options = build(model, target, tmp_path / "draft")
    plain = outcome(server_args(target, {}))
    results = on_ranks(server_args(target, options | GROUP_LAYOUTS[layout]), tmp_path, graphs)
    for result in results:
        assert result.verified > 0 and (result.tokens, result.finish) == (results[0].tokens, results[0].finish)
        same(result, plain)
    for result in results[-GROUP_LAYOUTS[layout]["tp_size"] :]:  # stages before the last one have none
        assert result == results[-1] and all(result.logprobs[name] for name in WITH_LOGPROBS)


TWO_BATCH_THRESHOLDS: dict[str, Any] = {
    "tp_size": 2,
    "enable_two_batch_overlap": True,
    "two_batch_overlap_min_tokens": 2,
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("drafter", "model"), [(drafter, model) for drafter, (_, models) in DRAFTERS.items() for model in models]
)
def test_drafts_change_nothing_of_prompts_as_halves(drafter: str, model: str, tmp_path: Path) -> None:
    """Drafts read hidden states of both halves, and attend to the prompts of the whole step."""
    target = tmp_path / model
    options = DRAFTERS[drafter][0](model, target, tmp_path / "draft")
    plain = outcome(server_args(target, {}))
    for result in on_ranks(server_args(target, options | TWO_BATCH_THRESHOLDS), tmp_path):
        assert result.verified > 0
        same(result, plain)


def test_every_drafter_model_and_layout_is_in_a_quick_case() -> None:
    quick = [case.values for case in cases() if not case.marks]
    for i, names in enumerate((DRAFTERS, MODELS, LAYOUTS)):
        assert {case[i] for case in quick} == set(names)
    assert set(quick) == QUICK, "a case that is not one"
