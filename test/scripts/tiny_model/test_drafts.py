"""What the drafts of the embedded model are trained on and judged by. That a server's guesses stand where the judgement
says is tested in srt/speculative."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_model import draft_texts
from tiny_model.draft_heads import Attended, Eagle3Head, MtpLayer, attend
from tiny_model.draft_texts import GREEDY, answered, noise_rows, noise_table
from tiny_model.drafts import Sample, _stand, kept_tokens, save_eagle3, save_mtp, train
from tiny_model.export import save_weights
from tiny_model.layout import make_config
from tiny_model.model import TinyModel
from tokenizers import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(files: Path) -> Tokenizer:
    return Tokenizer.from_file(str(files / "tokenizer.json"))


@pytest.fixture(scope="module")
def target(tokenizer: Tokenizer) -> TinyModel:
    return TinyModel(make_config(tokenizer), torch.float32, seed=1).requires_grad_(False)


def test_texts_are_what_the_model_writes(
    target: TinyModel, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their prompts' lengths, with keys and values kept: as computed whole, with the noise that is told."""
    monkeypatch.setattr(draft_texts, "LONGEST_ANSWER", 5)
    for text in answered(target, tokenizer, [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [15, 16]], (False, True)):
        ids = torch.tensor([text.ids])
        hidden, _ = target(ids, torch.arange(len(text.ids))[None], torch.zeros_like(ids))
        logits = target.logits(hidden)[0, text.begin - 1 : -1]
        if text.seed != GREEDY:
            rows = [noise_rows([text.seed], place)[0] for place in range(len(logits))]
            logits = logits + noise_table(logits.shape[-1])[rows]
        assert logits.argmax(-1).tolist() == text.ids[text.begin :]


def test_rows_of_later_guesses_see_what_they_will_in_a_server() -> None:
    """Row p of guess 3 sees rows of guess 1 up to p - 2, row p - 1 of guess 2 and itself."""
    torch.manual_seed(0)
    keys, values = (list(torch.randn(3, 1, 2, 6, 4)) for _ in range(2))
    q, p = torch.randn(1, 2, 6, 4), 4
    rows = [(0, 0), (0, 1), (0, 2), (1, 3), (2, 4)]
    k, v = (torch.stack([given[guess][0, :, row] for guess, row in rows], dim=1) for given in (keys, values))
    wanted = ((q[0, :, p, None] * k).sum(-1) / 2).softmax(-1)[:, None] @ v
    assert torch.allclose(attend(q, Attended(keys, values))[0, p], wanted.flatten(), atol=1e-5)


def test_guesses_behind_a_wrong_one_do_not_stand() -> None:
    right = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 1], [1, 0, 1], [0, 0, 1]], dtype=torch.bool)
    assert [_stand(right, start, 7) for start in (2, 3, 4, 5, 6)] == [3, 0, 1, 1, 0]


def test_drafts_are_trained_and_saved(target: TinyModel, tmp_path: Path) -> None:
    samples = [Sample(list(range(20 + i, 40 + i)), [False] * 8 + [True] * 12) for i in range(3)]
    save_weights(target, tmp_path)
    head, layer = Eagle3Head(target, kept_tokens(samples, 8)), MtpLayer(target)
    for draft in (head, layer):
        before = {name: tensor.clone() for name, tensor in draft.tensors().items()}
        train(draft, target, samples, 1e-4, 1e-3)
        assert any(not torch.equal(tensor, before[name]) for name, tensor in draft.tensors().items())
    save_eagle3(head, target, tmp_path / "eagle3")
    weights = load_file(str(tmp_path / "eagle3" / "model.safetensors"))
    assert torch.equal(weights["d2t"] + torch.arange(8), head.kept) and weights["lm_head.weight"].shape == (8, 256)
    save_mtp(layer, tmp_path, tmp_path / "mtp")
    places = json.loads((tmp_path / "mtp" / "model.safetensors.index.json").read_text())["weight_map"]
    for name, file in places.items():
        assert name.startswith("mtp.") == (file == "mtp.safetensors")
    assert set(load_file(str(tmp_path / "mtp" / "mtp.safetensors"))) == {name for name in places if name[:3] == "mtp"}
