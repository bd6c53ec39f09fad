"""Our models against transformers, in fp32 on the CPU, from checkpoints that transformers wrote.

`make test` has prompts of each family, and decoding of each kind of model; `make thorough` decodes each family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import KINDS, kinds
from pairs import some
from transformers import PreTrainedModel

from .harness import TINY, NativePlan, TinyRunner, hf_logits, plan_for, random_tokens, save_tiny

TOLERANCE = {"rtol": 0.0, "atol": 1e-4}
RECURRENT_TOLERANCE = {"rtol": 0.0, "atol": 1e-3}
"""The reference computes prompts of recurrent layers in chunks, and our torch kernels token by token."""

NAMES = [name for name in TINY if "wide" not in name]
DECODED = {KINDS[name].tiny for name in kinds(lacking="repeats")}


def close(plan: NativePlan, got: torch.Tensor, want: torch.Tensor) -> None:
    recurrent = any(layer.mixer.attention_shape(1) is None for layer in plan.description.layers)
    torch.testing.assert_close(got, want, **(RECURRENT_TOLERANCE if recurrent else TOLERANCE))


of_kinds = pytest.mark.parametrize("pair", some(NAMES, DECODED & {*NAMES}), indirect=True)


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, object]:
    folder = tmp_path_factory.mktemp(request.param)
    return save_tiny(request.param, folder), plan_for(folder)


def test_prefill_in_chunks_over_a_cached_prefix_among_strangers(pair) -> None:
    """One of the strangers is in one piece."""
    reference, plan = pair
    tokens, stranger, other = random_tokens(40, 1), random_tokens(23, 2), random_tokens(5, 3)
    runner = TinyRunner(plan)
    first = runner.extend({5: tokens[:16], 2: stranger})
    second = runner.extend({1: other, 5: tokens[16:17]})
    third = runner.extend({5: tokens[17:]})
    got, want = torch.cat((first[0], second[1], third[0])), hf_logits(reference, tokens)
    assert want.std() > 0.1, "the reference says nothing: its logits are nearly constant"
    close(plan, got, want)
    close(plan, first[1], hf_logits(reference, stranger))
    close(plan, second[0], hf_logits(reference, other))


@of_kinds
def test_decode_in_a_batch_of_different_lengths(pair) -> None:
    reference, plan = pair
    sequences = {slot: random_tokens(length, slot) for slot, length in ((4, 30), (1, 9), (8, 70))}
    runner = TinyRunner(plan)
    runner.extend({slot: tokens[:-6] for slot, tokens in sequences.items()})
    steps = [runner.decode({slot: tokens[i] for slot, tokens in sequences.items()}) for i in range(-6, 0)]
    for row, tokens in enumerate(sequences.values()):
        got = torch.stack([logits[row] for logits in steps])
        close(plan, got, hf_logits(reference, tokens)[-6:])


@of_kinds
def test_32_greedy_tokens_are_identical(pair) -> None:
    """Those are greedy which the reference would have said behind the ones before them."""
    reference, plan = pair
    prompt = random_tokens(12, seed=4)
    runner = TinyRunner(plan)
    got = [int(runner.extend({1: prompt})[0][-1].argmax())]
    while len(got) < 32:
        got.append(int(runner.decode({1: got[-1]})[0].argmax()))
    assert got == hf_logits(reference, prompt + got)[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert len(set(got)) > 6, "the reference repeats itself: the test would see little"


@pytest.mark.parametrize(
    ("name", "config", "published"),
    [
        # As Qwen3-Next is published.
        ("qwen3_next", {"layer_types": None, "full_attention_interval": 2}, {"layer_types": None}),
        ("qwen3_5", {"layer_types": None}, {"layer_types": None}),
        ("gpt_oss", {"layer_types": None}, {"layer_types": None}),
        ("gemma3", {}, {"hidden_activation": None}),
        ("gemma4", {}, {"hidden_activation": None}),
        ("nemotron_h", {"head_dim": 128}, {"head_dim": None}),
        ("nemotron_h", {"head_dim": 24}, {"head_dim": None, "attention_head_dim": 24}),
    ],
)
def test_keys_that_published_configs_leave_out_or_call_otherwise(
    name: str, config: dict[str, Any], published: dict[str, Any], tmp_path: Path
) -> None:
    reference = save_tiny(name, tmp_path, **config)
    file = tmp_path / "config.json"
    written = json.loads(file.read_text()) | config | published
    file.write_text(json.dumps({key: value for key, value in written.items() if value is not None}))
    plan, tokens = plan_for(tmp_path), random_tokens(30, seed=6)
    close(plan, TinyRunner(plan).extend({1: tokens})[0], hf_logits(reference, tokens))


@pytest.mark.parametrize("name", ["qwen3", "qwen3_tied_bias"])
def test_logits_of_a_bf16_model_are_not_on_its_grid(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    model = TinyRunner(plan_for(tmp_path, dtype="bfloat16")).model
    weight, head = model.params["embed.weight" if "tied" in name else "lm_head.weight"].tensor, model.logits
    hidden = torch.randn(9, weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16() * 200
    exact = hidden.double() @ weight.double().T
    assert exact.abs().max() > 16, "where bf16 has a grid of 0.125"
    assert (head(hidden) - exact).abs().max() < 1e-3
