"""The embedded model's drafts: draft tokens stand in a scheduler as often as in plain torch, without cache and batches,
and the tokens are those of the plain run."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_model.block_drafts import DFlashDraft
from tiny_model.draft_heads import Eagle3Head, MtpLayer
from tiny_model.draft_texts import GREEDY
from tiny_model.drafts import DRAFT_TOKENS, Draft, Sample, acceptance, load_target
from tiny_model.model import TinyModel
from tokenizers import Tokenizer

from sglang.embedded import DEFAULT_MODEL_PATH, DFLASH_PATH, EAGLE3_PATH
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.server_args import ServerArgs
from srt.managers.fake_runner import Collector, assert_clean, request, run_to_end

QUESTIONS = ("What is 431 + 88?", "Sort these numbers: 45, 12, 78, 3, 99", "What is the capital of France?")
NEW_TOKENS = 24
FLAGS: dict[str, dict[str, Any]] = {
    "EAGLE3": {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": EAGLE3_PATH},
    "MTP": {"speculative_algorithm": "NEXTN"},
    "DFLASH": {
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": DFLASH_PATH,
        "speculative_num_steps": None,
    },
}
MODEL = Path(DEFAULT_MODEL_PATH)


@cache
def target() -> TinyModel:
    return load_target(MODEL, "cpu")


def read_draft(name: str) -> Draft:
    """As it is shipped."""
    if name == "MTP":
        layer = MtpLayer(target())
        return with_weights(layer, load_file(str(MODEL / "mtp.safetensors")))
    if name == "DFLASH":
        return with_weights(DFlashDraft(target()), load_file(str(Path(DFLASH_PATH) / "model.safetensors")))
    weights = load_file(str(Path(EAGLE3_PATH) / "model.safetensors"))
    kept = weights["d2t"] + torch.arange(len(weights["d2t"]))
    assert torch.equal(weights["t2d"].nonzero().flatten(), kept)
    return with_weights(Eagle3Head(target(), kept), weights)


def with_weights(draft: Draft, weights: dict[str, torch.Tensor]) -> Draft:
    tensors = draft.tensors()
    assert tensors.keys() == weights.keys()
    for name, tensor in tensors.items():
        tensor.copy_(weights[name])
    return draft


def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    forms = (f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS)
    return [tokenizer.encode(form, add_special_tokens=False).ids for form in forms]


def served(options: dict[str, Any]) -> tuple[list[list[int]], int]:
    """The tokens of each prompt, and how many times draft tokens of a request were verified."""
    args = ServerArgs.from_kwargs(
        model_path=DEFAULT_MODEL_PATH, device="cpu", dtype="float32", skip_tokenizer_init=True, max_total_tokens=2048,
        max_running_requests=4, chunked_prefill_size=16,
        **({"speculative_num_steps": DRAFT_TOKENS} | options if options else {}),
    )  # fmt: skip
    scheduler, collector = Scheduler(args, create_runner(args), StopChecker(None)), Collector()
    requests = []
    for i, ids in enumerate(prompts()):
        made = scheduler.add(request(f"r{i}", ids, NEW_TOKENS, temperature=0.0, ignore_eos=True), 1, frozenset())
        assert made is not None
        requests.append(made)
    run_to_end(scheduler, collector)
    assert_clean(scheduler)
    return [collector.tokens[f"r{i}"] for i in range(len(requests))], sum(made.drafts.steps for made in requests)


@cache
def plain() -> list[list[int]]:
    return served({})[0]


@pytest.mark.parametrize("name", FLAGS)
def test_draft_tokens_stand_as_often_as_in_plain_torch(name: str) -> None:
    tokens, steps = served(FLAGS[name])
    assert tokens == plain()
    texts = [
        Sample(ids + answer, [False] * len(ids) + [True] * len(answer), GREEDY)
        for ids, answer in zip(prompts(), tokens, strict=True)
    ]
    expected = acceptance(read_draft(name), target(), texts)
    assert expected.length > 1.5
    # Not to the step: where a request brings no draft tokens, its next ones begin elsewhere.
    assert abs(steps - expected.verified) <= 0.15 * expected.verified
