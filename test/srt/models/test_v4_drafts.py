"""Drafts in DeepSeek-V4's checkpoints: proposals, bytes, names of what is missing or not known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.errors import UserError

from .draft_harness import DraftRunner, check_proposals, plan_with_draft
from .harness import random_tokens
from .v4_drafts import CAPTURES, HIDDEN, RANK, VOCAB, save_v4


def test_multi_token_prediction(tmp_path: Path) -> None:
    reference = save_v4(tmp_path, dspark=False)
    plan = plan_with_draft(tmp_path, "EAGLE")
    runner = DraftRunner(plan)
    check_proposals(runner, reference, random_tokens(33, seed=2), 1e-3, states=True)  # type: ignore[arg-type]
    assert held(runner) == plan.draft.weight_bytes("float32")


def test_a_block_draft(tmp_path: Path) -> None:
    save_v4(tmp_path, dspark=True)
    plan = plan_with_draft(tmp_path, "DSPARK")
    assert held(DraftRunner(plan)) == plan.draft.weight_bytes("float32")
    assert plan.aux_layers == CAPTURES and not plan.aux_keeps_streams


def held(runner: DraftRunner) -> int:
    return sum(param.tensor.nbytes for loadable, _ in runner.draft.loadables() for param in loadable.params.values())


def test_both_spellings_of_the_markov_head(tmp_path: Path) -> None:
    save_v4(tmp_path, dspark=True)
    file = tmp_path / "model.safetensors"
    names = {"markov_head.markov_w1.": "markov_head.embed.", "markov_head.markov_w2.": "markov_head.head."}
    tensors = load_file(file)
    for old, new in names.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    # Copies of the model's, as some exports have them.
    tensors |= {"mtp.0.head.weight": torch.zeros(2), "mtp.1.emb.tok_emb.weight": torch.zeros(2)}
    save_file(tensors, file)
    DraftRunner(plan_with_draft(tmp_path, "DSPARK"))


@pytest.mark.parametrize("dspark", [True, False])
@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("mtp.{last}.norm.weight", None, "lacks weights of the model: mtp.{last}.norm.weight"),
        ("mtp.{last}.hc_head_fn", None, "lacks weights of the model: mtp.{last}.hc_head_fn"),
        ("mtp.0.attn.wkv.weight", (2, 2), "tensor mtp.0.attn.wkv.weight has shape"),
        ("mtp.0.hc_attn_base", (2,), "tensor mtp.0.hc_attn_base has shape"),
        ("mtp.0.other.weight", (2, 2), "does not have: mtp.0.other.weight"),
    ],
)
def test_other_tensors_are_named(
    name: str, shape: tuple[int, ...] | None, message: str, dspark: bool, tmp_path: Path
) -> None:
    last = save_v4(tmp_path, dspark).last.removeprefix("mtp.")
    tensors, name = load_file(tmp_path / "model.safetensors"), name.format(last=last)
    tensors.pop(name, None)
    if shape is not None:
        tensors[name] = torch.ones(shape)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message.format(last=last)):
        DraftRunner(plan_with_draft(tmp_path, "DSPARK" if dspark else "EAGLE"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dspark_target_layer_ids": [0, 3]}, "not all layers of the model, which has 3"),
        ({"dspark_target_layer_ids": None}, "'dspark_target_layer_ids' is missing"),
        ({"dspark_noise_token_id": VOCAB}, f"dspark_noise_token_id {VOCAB} is no token"),
        ({"dspark_markov_head_type": "rnn"}, "dspark_markov_head_type 'rnn' is not supported"),
        ({"dspark_n_routed_experts": 4}, "the keys dspark_n_routed_experts of its DSpark draft are not known"),
    ],
)
def test_other_keys_are_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_v4(tmp_path, dspark=True, **keys)
    with pytest.raises(UserError, match=message):
        plan_with_draft(tmp_path, "DSPARK")


def test_each_checkpoint_names_the_drafter_that_it_has(tmp_path: Path) -> None:
    save_v4(tmp_path / "dspark", dspark=True)
    with pytest.raises(UserError, match="those of DSpark; take --speculative-algorithm DSPARK"):
        plan_with_draft(tmp_path / "dspark", "EAGLE")
    save_v4(tmp_path / "mtp", dspark=False)
    with pytest.raises(UserError, match="brings no DSpark draft"):
        plan_with_draft(tmp_path / "mtp", "DSPARK")
    file = tmp_path / "dspark" / "model.safetensors"
    save_file({name: t for name, t in load_file(file).items() if not name.startswith("mtp.")}, file)
    with pytest.raises(UserError, match="it has no DSpark draft, which some exports leave out"):
        plan_with_draft(tmp_path / "dspark", "DSPARK")


def test_without_weights_the_config_says_how_many_stages(tmp_path: Path) -> None:
    save_v4(tmp_path, dspark=True)
    plan = plan_with_draft(tmp_path, "DSPARK", load_format="dummy")
    assert len(plan.draft.description.model.layers) == 3
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert len(plan_with_draft(tmp_path, "DSPARK", load_format="dummy").draft.description.model.layers) == len(CAPTURES)
    sizes = {matrix.name: (matrix.rows, matrix.cols) for matrix, _ in plan.draft.weights.matrices()}
    assert sizes["fc"] == (HIDDEN, len(CAPTURES) * HIDDEN) and sizes["markov_w2"] == (VOCAB, RANK)
