"""Classes of transformers in the stages of a pipeline: the logits are those of one process. Processes of several ranks
are in srt/managers/test_parallel_schedules.py.

`outcomes.json` has the classes without a plan for it; with UPDATE_GOLDEN=1 a test writes what it finds.
"""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from sglang.srt.models.transformers_backend import trial
from sglang.srt.plan.stages import stage_model
from sglang.srt.plan.transformers_backend.asking import request_of
from srt.models.harness import NativePlan, TinyRunner, plan_for, random_tokens
from srt.transformers_backend.test_every_class import OUTCOMES
from srt.transformers_backend.tiny import KINDS, causal_classes, config_values, save_tiny, tiny_config

SAMPLE = ("olmo3", "gemma2", "ernie4_5_moe", "gpt_neox")
"""Norms behind blocks, windows; a scaled embedding that is the head; experts; other names of parts."""
CUTS = (0, 1, 3, 4)
"""Layers at which stages begin, and the number of layers."""
PROMPTS = {1: random_tokens(17, seed=1), 2: random_tokens(5, seed=2)}


def stages_of(folder: Path) -> list[TinyRunner]:
    runners = []
    for start, stop in pairwise(CUTS):
        plan: NativePlan = plan_for(folder, model_impl="transformers")
        plan.__dict__["description"] = stage_model(plan.description, range(start, stop))
        runners.append(TinyRunner(plan))
        held = sum(param.tensor.nbytes for param in runners[-1].model.params.values())
        assert held == plan.weight_bytes(), "the plan counts other bytes than a stage allocates"
    return runners


@torch.inference_mode()
def logits_of(stages: list[TinyRunner], new: dict[int, list[int]], decodes: bool) -> torch.Tensor:
    stream = None
    for stage in stages:
        batch = stage._batch(decodes, new)
        buffer = stage.model.input_buffer(len(batch.input_ids))
        assert (buffer is None) == (stream is None)
        if buffer is not None and stream is not None:
            assert stream.dtype == buffer.dtype
            buffer.copy_(stream)
        stream = stage.model.compute(batch, buffer)
        assert stage.model.description.last_stage or stage.model.logits(stream).shape == (len(stream), 0)
    assert stream is not None
    return stages[-1].model.logits(stream)


def check(name: str, whole: bool) -> None:
    """The record has the classes that are served and cannot be divided."""
    recorded = json.loads(OUTCOMES.read_text())
    if os.environ.get("UPDATE_GOLDEN"):
        others = {*recorded["without_stages"]} - {name}
        recorded["without_stages"] = sorted(others | {name} if whole else others)
        OUTCOMES.write_text(json.dumps(recorded, indent=1) + "\n")
    assert (name in recorded["without_stages"]) == whole


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.thorough] * (kind not in SAMPLE)) for kind in KINDS]
)
def test_stages_say_what_the_whole_says(kind: str, tmp_path: Path) -> None:
    if kind not in causal_classes():
        pytest.skip("another kind has its class, or its config has others inside")
    name = causal_classes()[kind]
    facts = trial.facts_of(request_of(config_values(tiny_config(kind), name), "", False))
    check(name, whole=not facts.problems and facts.stages is None)
    if facts.stages is None:
        assert kind not in SAMPLE
        return
    save_tiny(kind, tmp_path)
    whole, stages = TinyRunner(plan_for(tmp_path, model_impl="transformers")), stages_of(tmp_path)
    torch.testing.assert_close(logits_of(stages, PROMPTS, False), torch.cat(whole.extend(PROMPTS)))
    tokens = {1: 7, 2: 9}
    got = logits_of(stages, {slot: [token] for slot, token in tokens.items()}, True)
    torch.testing.assert_close(got, whole.decode(tokens))
    assert [len(stage.model.caches) for stage in stages] == [stop - start for start, stop in pairwise(CUTS)]
    assert set.union(*({*stage.model.params} for stage in stages)) == {*whole.model.params}
