"""Classes of transformers that score labels, and those without a head, against themselves: three texts of different
lengths are computed side by side, or the class is refused with a reason.

The outcomes are in text_outcomes.json; `UPDATE_GOLDEN=1` writes them. A sample runs always, the others are thorough.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.models.transformers_backend import trial
from sglang.srt.plan.transformers_backend.asking import request_of
from sglang.srt.plan.transformers_backend.facts import CLASSIFY, EMBED
from sglang.srt.server_args import ServerArgs
from srt.transformers_backend import record
from srt.transformers_backend.text_classes import expected, save_text_model, step_of, text_classes, texts
from srt.transformers_backend.tiny import config_values, tiny_config

OUTCOMES = Path(__file__).with_name("text_outcomes.json")
SAMPLE = {("distilbert", EMBED), ("electra", CLASSIFY), ("llama", CLASSIFY), ("albert", EMBED)}
"""No segments; positions and segments of its own; the last state; refused."""
CASES = [(kind, task) for task in (EMBED, CLASSIFY) for kind in text_classes(task)]


def runner_of(folder: Path, **options: Any) -> ModelRunner:
    args = ServerArgs.from_kwargs(
        model_path=str(folder), device="cpu", skip_tokenizer_init=True, max_running_requests=4, max_total_tokens=1024,
        model_impl="transformers", is_embedding=True, **options,
    )  # fmt: skip
    return create_runner(args)


def test_the_record_has_every_class() -> None:
    assert record.outcomes(OUTCOMES).keys() == {text_classes(task)[kind] for kind, task in CASES}


@pytest.mark.parametrize(
    ("kind", "task"),
    [pytest.param(*case, marks=[pytest.mark.thorough] * (case not in SAMPLE)) for case in CASES],
)
def test_a_class_returns_what_transformers_does_or_is_refused(kind: str, task: str, tmp_path: Path) -> None:
    name = text_classes(task)[kind]
    facts = trial.facts_of(request_of(config_values(tiny_config(kind), name), str(tmp_path), False, task))
    if facts.problems:
        record.check(OUTCOMES, name, facts.problems[0])
        return
    model = save_text_model(kind, task, tmp_path)
    runner = runner_of(tmp_path)
    pooling, prompts = runner.plan.description.pooling, texts(1)
    assert pooling is not None
    got = runner.forward(step_of(prompts)).logits
    want = torch.stack([expected(model, task, ids, pooling.method) for ids in prompts])
    torch.testing.assert_close(got, want, rtol=0.0, atol=1e-4)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == runner.plan.memory.weights
    record.check(OUTCOMES, name, "")
