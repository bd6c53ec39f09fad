"""How often the draft tokens of the shipped drafts stand in plain torch, without cache and batches. A test of the
server has these figures."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from srt.speculative.test_embedded_drafts import MODEL, VERIFIED, plain, prompts
from tiny_model.block_drafts import DFlashDraft
from tiny_model.draft_batches import Sample
from tiny_model.draft_heads import Eagle3Head, MtpLayer
from tiny_model.draft_texts import GREEDY
from tiny_model.drafts import Draft, acceptance, load_target
from tiny_model.model import TinyModel

from sglang.embedded import DFLASH_PATH, EAGLE3_PATH


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


@pytest.mark.parametrize("name", VERIFIED)
def test_guesses_stand_as_often_as_the_server_expects(name: str) -> None:
    texts = [
        Sample(ids + answer, [False] * len(ids) + [True] * len(answer), GREEDY)
        for ids, answer in zip(prompts(), plain(), strict=True)
    ]
    found = acceptance(read_draft(name), target(), texts)
    assert found.length > 1.5
    assert found.verified == VERIFIED[name]
