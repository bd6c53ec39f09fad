"""What the drafts of the embedded model are trained on and judged by. That a server's draft tokens stand where the
judgement says is tested in srt/speculative."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_model import draft_texts
from tiny_model.block_drafts import BLOCK_SIZE, DFlashDraft, block_loss
from tiny_model.draft_heads import CAPTURES, Attended, Eagle3Head, MtpLayer, attend
from tiny_model.draft_texts import GREEDY, answered, noise_rows, noise_table
from tiny_model.drafts import (
    Sample,
    _stand,
    computed,
    kept_tokens,
    load_target,
    save_dflash,
    save_eagle3,
    save_mtp,
    train,
)
from tiny_model.export import save_weights
from tiny_model.install import EMBEDDED
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


def test_rows_of_later_draft_tokens_see_what_they_will_in_a_server() -> None:
    """Row p of guess 3 sees rows of guess 1 up to p - 2, row p - 1 of guess 2 and itself."""
    torch.manual_seed(0)
    keys, values = (list(torch.randn(3, 1, 2, 6, 4)) for _ in range(2))
    q, p = torch.randn(1, 2, 6, 4), 4
    rows = [(0, 0), (0, 1), (0, 2), (1, 3), (2, 4)]
    k, v = (torch.stack([given[number][0, :, row] for number, row in rows], dim=1) for given in (keys, values))
    wanted = ((q[0, :, p, None] * k).sum(-1) / 2).softmax(-1)[:, None] @ v
    assert torch.allclose(attend(q, Attended(keys, values))[0, p], wanted.flatten(), atol=1e-5)


def test_draft_tokens_behind_a_wrong_one_do_not_stand() -> None:
    right = torch.tensor([[0, 0, 0], [1, 1, 1], [0, 1, 1], [1, 0, 1], [1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    assert [_stand(right, start, 7) for start in (2, 3, 4, 5, 6)] == [3, 0, 1, 2, 1]


def test_rows_of_a_block_see_what_is_before_it_and_each_other(target: TinyModel) -> None:
    """Blocks of one text do not see each other, nor what stands behind their last token."""
    torch.manual_seed(0)
    draft, tokens = DFlashDraft(target), torch.arange(30, 42)[None]
    streams = torch.randn(1, 12, len(CAPTURES), 256)
    together = draft(tokens, streams, torch.tensor([[4, 7]]))
    changed = streams.clone()
    changed[:, 7:] += 1
    alone = draft(tokens, changed, torch.tensor([[7]]))
    assert torch.allclose(together[0, 1], alone[0, 0], atol=1e-5)
    changed[:, 6] += 1
    assert not torch.allclose(together[0, 1], draft(tokens, changed, torch.tensor([[7]]))[0, 0], atol=1e-2)


def test_a_block_draft_learns_what_it_is_shown(tmp_path: Path) -> None:
    target = load_target(EMBEDDED, "cpu")
    ids = (
        Tokenizer.from_file(str(EMBEDDED / "tokenizer.json")).encode("one two three four five six seven eight nine").ids
    )
    samples = [Sample(ids, [False] * 3 + [True] * (len(ids) - 3))]
    draft = DFlashDraft(target)
    batch = computed(target, samples)
    optimizer = torch.optim.Adam(draft.parameters(), lr=2e-3)
    losses = []
    for _ in range(12):
        loss = block_loss(draft, target, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    save_dflash(draft, target, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["block_size"] == BLOCK_SIZE
    assert load_file(str(tmp_path / "model.safetensors")).keys() == draft.tensors().keys()


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
