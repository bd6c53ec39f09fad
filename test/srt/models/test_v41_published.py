"""DeepSeek-V4.1 as it is published: FP8 in tiles of 32 x 32 with exponents as scales, experts in MXFP4, tables of
n-grams in FP8 with exponents by row. It computes what codes and scales stand for; what is missing is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.errors import UserError
from sglang.srt.model_loader.loader import load_model
from srt.layers.moe.expert_checkpoint import mxfp4_exponents

from .draft_harness import DraftRunner, plan_with_draft
from .harness import TinyRunner, plan_for, random_tokens
from .v41_drafts import save_v41_draft
from .v41_reference import V41, save_v41

FP8 = ("wq_a.", "wq_b.", "wkv.", "wo_a.", "wo_b.", "shared_experts.w", "main_proj.")
SIZES = {"head_dim": 64, "q_lora_rank": 32, "o_lora_rank": 32, "engram_head_dim": 64}
"""Of which tiles are whole."""
PUBLISHED = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}


def tiles(weight: torch.Tensor, rows: int = 32) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    parts = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, 32))
    scales = torch.exp2(torch.ceil(torch.log2(parts.abs().amax((1, 3)) / 448)))
    whole = scales[:, None, :, None]
    codes = (parts / whole).to(torch.float8_e4m3fn)
    exact = (codes.float() * whole).reshape(weight.shape)
    return {"weight": codes.reshape(weight.shape), "scale": scales.to(torch.float8_e8m0fnu)}, exact


def as_published(folder: Path) -> dict[str, torch.Tensor]:
    """Rewrites a checkpoint as published; returns what its tensors stand for."""
    file, published, exact = folder / "model.safetensors", {}, {}
    for name, tensor in load_file(file).items():
        stored: dict[str, torch.Tensor] | None = None
        if ".experts." in name:
            stored, exact[name] = mxfp4_exponents(tensor)
        elif "engram.embed" in name:
            stored, exact[name] = tiles(tensor, rows=1)
        elif any(module in name for module in FP8) and "compressor" not in name:
            stored, exact[name] = tiles(tensor)
        if stored is None:
            published[name] = exact[name] = tensor
        else:
            published |= {f"{name.removesuffix('weight')}{leaf}": value for leaf, value in stored.items()}
    save_file({name: tensor.contiguous() for name, tensor in published.items()}, file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": PUBLISHED}))
    return exact


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[V41, Path]:
    """With the draft, which a server without speculation does not read."""
    reference = save_v41_draft(tmp_path, **SIZES).target
    reference.w = as_published(tmp_path)
    return reference, tmp_path


def test_the_published_form(checkpoint: tuple[V41, Path]) -> None:
    reference, folder = checkpoint
    tokens, plan = random_tokens(40, seed=3), plan_for(folder)
    runner = TinyRunner(plan)
    want = reference.logits(tokens)
    assert want.std() > 0.1
    torch.testing.assert_close(runner.extend({1: tokens})[0], want, rtol=0.0, atol=2e-3)
    params = runner.model.params.values()
    assert sum(param.tensor.nbytes for param in params) == plan.weight_bytes()
    with_draft = plan_with_draft(folder, "DSPARK")
    loadables = DraftRunner(with_draft).draft.loadables()
    allocated = sum(param.tensor.nbytes for loadable, _ in loadables for param in loadable.params.values())
    assert allocated == with_draft.draft.weight_bytes("float32")


def test_without_the_draft_and_the_encoder(checkpoint: tuple[V41, Path]) -> None:
    reference, folder = checkpoint
    file = folder / "model.safetensors"
    others = ("mtp.", "vision.", "aligner.", "image_")
    save_file({name: t for name, t in load_file(file).items() if not name.startswith(others)}, file)
    tokens = random_tokens(20, seed=3)
    got = TinyRunner(plan_for(folder)).extend({1: tokens})[0]
    torch.testing.assert_close(got, reference.logits(tokens), rtol=0.0, atol=2e-3)
    with pytest.raises(UserError, match="it has no DSpark draft, which some exports leave out"):
        plan_with_draft(folder, "DSPARK")


@pytest.mark.parametrize(
    "name",
    [
        *("layers.1.attn.compressor.wgate.weight", "layers.4.attn.indexer.wk.weight", "layers.3.attn.wkv.weight"),
        *("layers.6.attn.indexer.wq_b.weight", "layers.5.engram.q_weight", "layers.1.engram.embed.weight"),
        *("layers.0.hc_attn_fn", "layers.7.ffn.gate.bias", "norm.weight"),
    ],
)  # fmt: skip
def test_a_tensor_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    save_v41(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"lacks weights of the model: {name}"):
        load_model(plan_for(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": [0, 4, 4, 4, 1, 1, 1, 1]}, "'compress_ratios' must be 0, 1, 2 for this model; got 4"),
        ({"kv_source_layer_ids": [1, 2, 4]}, r"layers \[2\] make entries, but no indexer chooses in them there"),
        ({"kv_source_layer_ids": [0, 1, 4], "index_source_layer_ids": [0, 1, 4]}, r"layers \[0\], whose"),
        ({"kv_source_layer_ids": [1, 3]}, r"up to it \(3\) makes entries of 2"),
        ({"kv_source_layer_ids": [3, 4]}, "up to it is none"),
        ({"kv_source_layer_ids": None}, "'kv_source_layer_ids' is missing"),
        ({"candidate_source_layer_id": 5}, "5 is none of 'index_source_layer_ids'"),
        ({"candidate_source_layer_id": 3}, "layer 4 reads entries of 1 tokens, but the runs that layer 3 chooses"),
        ({"candidate_block_size": 6}, "'candidate_block_size' 6 is no power of two up to 16"),
        ({"engram_num_embeddings": [300, 400]}, "layer 1's table of n-grams has 300 rows"),
        ({"engram_layer_ids": [1]}, "1 'engram_layer_ids', but 2 'engram_num_embeddings'"),
        ({"engram_compressed_vocab_size": 100}, "its tokens have 192 texts, not 100"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' is not supported"),
    ],
)
def test_other_keys_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_v41(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = {key: value for key, value in {**config["text_config"], **changes}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps({**config, "text_config": text}))
    with pytest.raises(UserError, match=message):
        load_model(plan_for(tmp_path))


def test_a_checkpoint_without_its_tokenizer_is_refused(tmp_path: Path) -> None:
    save_v41(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json is missing: the model's tables of n-grams"):
        load_model(plan_for(tmp_path))
