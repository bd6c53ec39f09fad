"""Draft models in the scheduler: the tokens of the plain run, and at every step the draft tokens of a plain reference.

`make test` has a draft of each kind. Of those with layers by depth it has one, and of DeepSeek-V4's the newest; others
of them are in `test_draft_matrix`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang.srt.drafts.drafter import DraftStep
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.server_args import ServerArgs
from srt.model_executor.test_verify_steps import GREEDY, SAMPLED, prompts, run
from srt.models import test_dflash_drafts as dflash_drafts
from srt.models import test_dspark_drafts as dspark_drafts
from srt.models.depth_drafts import build_depths
from srt.models.draft_references import DFlash, DSpark, Eagle3, Gemma4DSpark, Target
from srt.models.harness import save_tiny
from srt.models.test_eagle3_drafts import CONFIG, save, weights
from srt.models.test_mtp_drafts import build
from srt.models.v4_drafts import V4DSpark, save_v4
from srt.models.v41_drafts import save_v41_draft

Reference = Callable[[list[int], int], Tensor]


@dataclass
class Pair:
    target: Path
    flags: dict[str, Any]
    reference: Reference


def eagle3(folder: Path) -> Pair:
    target = Target(save_tiny("qwen3", folder / "target", num_hidden_layers=7))
    tensors = weights(CONFIG)
    draft = save(folder / "draft", CONFIG, tensors)
    flags = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(draft)}
    return Pair(folder / "target", flags, Eagle3(tensors, CONFIG, target, (1, 2, 3)))


def mtp(folder: Path) -> Pair:
    return Pair(folder, {"speculative_algorithm": "NEXTN"}, build("glm4_moe", folder))


def by_depth(folder: Path, name: str) -> Pair:
    return Pair(folder, {"speculative_algorithm": "NEXTN"}, build_depths(name, folder))


def dflash(folder: Path, variant: str) -> Pair:
    config = dflash_drafts.VARIANTS[variant]
    target = Target(save_tiny("qwen3", folder / "target", num_hidden_layers=dflash_drafts.LAYERS))
    tensors = dflash_drafts.weights(config)
    draft = dflash_drafts.save_draft(variant, folder / "draft")
    flags = {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": str(draft)}
    vector = dflash_drafts.MASK_VECTOR if variant == "mimo" else None
    return Pair(folder / "target", flags, DFlash(tensors, config, target, dflash_drafts.CAPTURES, vector))


def dspark(folder: Path, speculators: bool = False, **keys: Any) -> Pair:
    target = Target(save_tiny("qwen3", folder / "target", num_hidden_layers=dflash_drafts.LAYERS))
    config = dspark_drafts.CONFIG | keys
    tensors = dspark_drafts.weights(config)
    draft = save(folder / "draft", dflash_drafts.written(config, "dspark") if speculators else config, tensors)
    flags = {"speculative_algorithm": "DSPARK", "speculative_draft_model_path": str(draft)}
    return Pair(folder / "target", flags, DSpark(tensors, config, target, dflash_drafts.CAPTURES))


def gemma4_dspark(folder: Path) -> Pair:
    target = Target(dspark_drafts.gemma4_target(folder / "target"))
    config, tensors = dspark_drafts.GEMMA4_CONFIG, dspark_drafts.gemma4_weights()
    draft = save(folder / "draft", config, tensors)
    flags = {"speculative_algorithm": "DSPARK", "speculative_draft_model_path": str(draft)}
    return Pair(folder / "target", flags, Gemma4DSpark(tensors, config, target, dflash_drafts.CAPTURES))


def v4(folder: Path, dspark: bool) -> Pair:
    return Pair(folder, {"speculative_algorithm": "DSPARK" if dspark else "NEXTN"}, save_v4(folder, dspark))


PAIRS: dict[str, Callable[[Path], Pair]] = {
    "eagle3": eagle3,
    "mtp": mtp,
    "mimo_v2": functools.partial(by_depth, name="mimo_v2"),
    "step3p7": functools.partial(by_depth, name="step3p7"),
    "inkling": functools.partial(by_depth, name="inkling"),
    **{f"dflash_{name}": functools.partial(dflash, variant=name) for name in dflash_drafts.VARIANTS},
    **{f"dspark_{kind}": functools.partial(dspark, markov_head_type=kind) for kind in dspark_drafts.KINDS},
    "v4_mtp": functools.partial(v4, dspark=False),
    "v4_dspark": functools.partial(v4, dspark=True),
    "v41_dspark": lambda folder: Pair(folder, {"speculative_algorithm": "DSPARK"}, save_v41_draft(folder)),
    "dspark_shifted": functools.partial(dspark, sample_from_anchor=False),
    "gemma4_dspark": gemma4_dspark,
    "dspark_speculators": functools.partial(
        dspark, speculators=True, draft_vocab_size=dflash_drafts.DRAFT_VOCAB, markov_head_type="gated"
    ),
}


def scheduler_of(target: Path, **flags: Any) -> Scheduler:
    args = ServerArgs.from_kwargs(
        model_path=str(target),
        skip_tokenizer_init=True,
        **{"device": "cpu", "max_total_tokens": 4096, "max_running_requests": 8, **flags},
    )
    return Scheduler(args, create_runner(args), StopChecker(None))


@dataclass
class Proposals:
    """What was drafted behind which tokens."""

    scheduler: Scheduler

    def __post_init__(self) -> None:
        self.seen: list[tuple[int, int, int, list[int]]] = []
        drafter = self.scheduler.runner.drafter
        assert drafter is not None
        propose = drafter.propose

        def spy(step: DraftStep, num_speculative_tokens: int) -> Tensor:
            draft_tokens = propose(step, num_speculative_tokens)
            rows = (step.slots, step.lens, step.tokens, step.ends, draft_tokens)
            for slot, length, token, end, row in zip(*(part.tolist() for part in rows), strict=True):
                # Rows of a block behind a request's end are padding, which the others do not see.
                if (
                    slot
                    and num_speculative_tokens
                    and length + max(num_speculative_tokens, drafter.lookahead_slots) <= end
                ):
                    self.seen.append((slot, length, token, row))
            return draft_tokens

        drafter.propose = spy  # type: ignore[method-assign]

    def check(self, texts: list[list[int]], reference: Reference, count: int) -> None:
        """Some of them, spread over the run."""
        checked = 0
        for _, length, token, draft_tokens in self.seen[:: max(1, len(self.seen) // count)]:
            text = [text for text in texts if len(text) > length and text[length] == token]
            # Which request it was its draft tokens tell.
            wanted = [reference(known[: length + 1], len(draft_tokens)).argmax(-1).tolist() for known in text]
            if wanted:
                assert draft_tokens in wanted
                checked += 1
        assert checked >= count // 2


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("eagle3", {"chunked_prefill_size": 16, "page_size": 8}),
        ("mtp", {}),
        ("mimo_v2", {"chunked_prefill_size": 16}),
        pytest.param("step3p7", {"chunked_prefill_size": 16, "page_size": 8}, marks=pytest.mark.thorough),
        pytest.param("inkling", {"chunked_prefill_size": 16, "page_size": 8}, marks=pytest.mark.thorough),
        # Chunks shorter than the last depth lags.
        pytest.param("mimo_v2", {"chunked_prefill_size": 1}, marks=pytest.mark.thorough),
        pytest.param("step3p7", {"chunked_prefill_size": 2}, marks=pytest.mark.thorough),
        pytest.param("inkling", {"chunked_prefill_size": 1}, marks=pytest.mark.thorough),
        ("dflash_plain", {"chunked_prefill_size": 16, "page_size": 8}),
        ("dflash_domino", {"chunked_prefill_size": 16}),
        pytest.param("dflash_domino_in_place", {"page_size": 8}, marks=pytest.mark.thorough),
        ("dflash_selector", {"chunked_prefill_size": 16}),
        ("dflash_mimo", {"chunked_prefill_size": 16, "page_size": 8}),
        ("dflash_laguna", {"chunked_prefill_size": 16, "page_size": 8}),
        pytest.param("dflash_causal", {}, marks=pytest.mark.thorough),
        ("dflash_windows", {}),
        pytest.param("dflash_speculators_windows", {}, marks=pytest.mark.thorough),
        pytest.param("dspark_vanilla", {"chunked_prefill_size": 16, "page_size": 8}, marks=pytest.mark.thorough),
        pytest.param("dspark_gated", {}, marks=pytest.mark.thorough),
        ("dspark_rnn", {}),
        pytest.param("dspark_shifted", {}, marks=pytest.mark.thorough),
        ("dflash_speculators", {}),
        pytest.param("dflash_speculators_selector", {}, marks=pytest.mark.thorough),
        pytest.param("dspark_speculators", {"page_size": 8}, marks=pytest.mark.thorough),
        ("gemma4_dspark", {}),
        pytest.param("v4_mtp", {"chunked_prefill_size": 16}, marks=pytest.mark.thorough),
        pytest.param("v4_dspark", {"chunked_prefill_size": 16}, marks=pytest.mark.thorough),
        ("v41_dspark", {"chunked_prefill_size": 16}),
    ],
)
def test_draft_tokens_are_those_of_the_reference(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    pair = PAIRS[name](tmp_path)
    plain = run(scheduler_of(pair.target, **options), GREEDY)
    scheduler = scheduler_of(pair.target, **pair.flags, **options, speculative_num_draft_tokens=4)
    proposals = Proposals(scheduler)
    assert run(scheduler, GREEDY) == plain
    texts = [[*prompt, *plain[i]] for i, prompt in enumerate(prompts())]
    assert run(scheduler, GREEDY) == plain, "with prompts and outputs from the cache"
    proposals.check(texts, pair.reference, 16)


@pytest.mark.parametrize("name", ["dspark_rnn", "v4_dspark"])
def test_a_confidence_head_says_how_likely_draft_tokens_stand(name: str, tmp_path: Path) -> None:
    """For each request and guess what the reference says; all draft tokens of a block are made, however few a step
    takes."""
    pair = PAIRS[name](tmp_path)
    scheduler = scheduler_of(pair.target, **pair.flags, speculative_num_draft_tokens=5)
    drafter, reference = scheduler.runner.drafter, pair.reference
    assert drafter is not None and isinstance(reference, DSpark | V4DSpark)
    seen: list[tuple[int, int, list[int], list[float]]] = []
    propose = drafter.propose

    def spy(step: DraftStep, num_speculative_tokens: int) -> Tensor:
        draft_tokens = propose(step, min(num_speculative_tokens, 1))
        if not num_speculative_tokens:
            assert step.confidence is None
            return draft_tokens
        assert step.confidence is not None and draft_tokens.shape == step.confidence.shape == (len(step.slots), 4)
        for slot, length, token, end, row, likely in zip(
            step.slots.tolist(), step.lens.tolist(), step.tokens.tolist(), step.ends.tolist(), draft_tokens.tolist(),
            step.confidence.tolist(), strict=True,
        ):  # fmt: skip
            if slot and length + drafter.lookahead_slots <= end:
                seen.append((length, token, row, likely))
        return draft_tokens

    drafter.propose = spy  # type: ignore[method-assign]
    plain = run(scheduler, GREEDY)
    texts = [[*prompt, *plain[i]] for i, prompt in enumerate(prompts())]
    checked = 0
    for length, token, draft_tokens, likely in seen[:: len(seen) // 8]:
        for text in texts:
            if len(text) > length and text[length] == token:
                known = text[: length + 1]
                if reference(known, 4).argmax(-1).tolist() == draft_tokens:
                    wanted = reference.confidences(known, draft_tokens)
                    torch.testing.assert_close(torch.tensor(likely), wanted, rtol=0.0, atol=1e-3)
                    checked += 1
    assert checked >= 6


def test_sampled_tokens_are_those_of_the_plain_run(tmp_path: Path) -> None:
    pair = mtp(tmp_path)
    plain = run(scheduler_of(pair.target), SAMPLED)
    assert run(scheduler_of(pair.target, **pair.flags, speculative_num_steps=2), SAMPLED) == plain
