"""Every causal class of transformers answers as its own `generate` does, or is refused with the recorded reason.

`outcomes.json` has the reason for each class ("" for none), from which docs/transformers_models.md is made; with
UPDATE_GOLDEN=1 a test writes what it finds. `make test` tries a class for each trait, `make thorough` all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.models.transformers_backend import trial
from sglang.srt.plan.transformers_backend.asking import request_of
from sglang.srt.server_args import ServerArgs
from srt.managers.fake_runner import Collector, add, assert_clean, request, run_to_end
from srt.models.harness import TinyRunner, hf_logits, plan_for
from srt.transformers_backend import record
from srt.transformers_backend.tiny import KINDS, VOCAB, causal_classes, config_values, save_tiny, tiny_config

OUTCOMES = Path(__file__).with_name("outcomes.json")
NEW_TOKENS = 12
SAMPLE = (
    *("olmo3", "cohere2", "gemma2", "granite_swa", "phi3", "ernie4_5_moe"),
    *("gpt_neox", "opt", "nanochat", "granitemoe", "minicpm3", "diffllama"),
)
"""Norms behind blocks and windows; a block in parallel; caps of scores; sinks and scaled logits; fused products;
experts; stored as another name; learned positions; caps of logits; stacked experts; heads of latents; refused."""


def prompt(seed: int, length: int) -> list[int]:
    tokens: list[int] = torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens


def scheduler(folder: Path, **options: Any) -> Scheduler:
    args = ServerArgs.from_kwargs(
        model_path=str(folder), device="cpu", skip_tokenizer_init=True, max_running_requests=4, max_total_tokens=1024,
        model_impl="transformers", **options,
    )  # fmt: skip
    return Scheduler(args, create_runner(args), StopChecker(None))


@torch.inference_mode()
def generated(model: Any, ids: list[int]) -> list[int]:
    """What the class's own `generate` says behind a prompt."""
    out = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64), max_new_tokens=NEW_TOKENS,
        do_sample=False, eos_token_id=-1, pad_token_id=0,
    )  # fmt: skip
    tokens: list[int] = out[0, len(ids) :].tolist()
    return tokens


def answers(scheduler: Scheduler, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of prompts that are computed together."""
    collector = Collector()
    for i, ids in enumerate(prompts):
        add(scheduler, request(f"r{i}", ids, NEW_TOKENS, temperature=0.0, ignore_eos=True))
    run_to_end(scheduler, collector)
    assert_clean(scheduler)
    return [collector.tokens[f"r{i}"] for i in range(len(prompts))]


def test_the_record_has_every_class() -> None:
    assert record.outcomes(OUTCOMES).keys() == set(causal_classes().values())


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.thorough] * (kind not in SAMPLE)) for kind in KINDS]
)
def test_a_class_answers_as_transformers_does_or_is_refused(kind: str, tmp_path: Path) -> None:
    if kind not in causal_classes():
        pytest.skip("another kind has its class, or its config has others inside")
    config, name = tiny_config(kind), causal_classes()[kind]
    facts = trial.facts_of(request_of(config_values(config, name), str(tmp_path), False))
    if facts.problems:
        record.check(OUTCOMES, name, facts.problems[0])
        return
    model = save_tiny(kind, tmp_path)
    served = scheduler(tmp_path, chunked_prefill_size=7)
    prompts = [prompt(1, 29), prompt(2, 9), prompt(3, 40)]
    first = answers(served, prompts)
    assert first == [generated(model, ids) for ids in prompts]
    longer = [prompts[i] + first[i] + prompt(4 + i, 6) for i in (0, 2)]
    assert answers(served, longer) == [generated(model, ids) for ids in longer]
    assert served.stats._cached > 20, "the second prompts begin with cached ones"
    plan = plan_for(tmp_path, model_impl="transformers")
    runner = TinyRunner(plan)
    (logits,) = runner.extend({1: prompts[0]})
    torch.testing.assert_close(logits, hf_logits(model, prompts[0]), rtol=0.0, atol=1e-3)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()
    record.check(OUTCOMES, name, "")
