"""The embedded model's drafts: draft tokens stand in a scheduler as often as in plain torch, without cache and batches,
and the tokens are those of the plain run."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from sglang.embedded import DEFAULT_MODEL_PATH, DFLASH_PATH, EAGLE3_PATH
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.server_args import ServerArgs
from srt.managers.fake_runner import Collector, assert_clean, request, run_to_end

QUESTIONS = ("What is 431 + 88?", "Sort these numbers: 45, 12, 78, 3, 99", "What is the capital of France?")
NEW_TOKENS, DRAFT_TOKENS = 24, 3
VERIFIED = {"EAGLE3": 28, "MTP": 34, "DFLASH": 25}
"""How many times draft tokens for the answers are verified in plain torch:
lab/tests/tiny_model/test_shipped_drafts.py."""
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
    # Not to the step: where a request brings no draft tokens, its next ones begin elsewhere.
    assert abs(steps - VERIFIED[name]) <= 0.15 * VERIFIED[name]
