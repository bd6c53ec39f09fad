"""The layer for multi-token prediction of Qwen3.8-Flash-Next, in the target's checkpoint as it is published, draft
tokens what transformers' layer of the same weights proposes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.errors import UserError
from sglang.srt.layers.quantization.dense import QuantizedLinear

from .draft_harness import DraftRunner, check_proposals, plan_with_draft
from .draft_references import Target, chain
from .harness import TINY, blocks_of, hf_model, random_tokens, share_weights
from .quantized_checkpoints import join_experts, plain, split_experts, spread

KEYS = {"indexer_budget": 256}
"""The draft attends to all tokens, as its layer would that selects so many."""
MIXER = "hyper_connection_mixer."


@dataclass
class StreamedMtp:
    """Reference: a layer and a mixer of transformers, and the projections before them as published."""

    w: dict[str, Tensor]
    target: Target
    layer: Any
    mixer: Any

    def normed(self, x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + self.w[f"mtp.pre_fc_norm_{name}.weight"])

    def rows(self, ids: Sequence[int], features: Tensor) -> Tensor:
        embedded = self.normed(self.target.embedded(ids), "embedding") @ self.w["mtp.fc_embedding.weight"].T
        streams = self.normed(features, "hidden").unflatten(-1, (-1, embedded.shape[-1]))
        streams = streams @ self.w["mtp.fc_hidden.weight"].T + embedded[:, None]
        x, count = streams.flatten(1)[None], len(ids)
        positions = torch.arange(count)[None].expand(3, 1, -1)
        rotary = self.target.model.get_decoder().rotary_emb(x, position_ids=positions)
        causal = torch.ones(count, count, dtype=torch.bool).tril()[None, None]
        return self.layer(x, position_embeddings=rotary, attention_mask=causal, past_key_values=None)[0]

    def logits(self, state: Tensor) -> Tensor:
        return self.target.logits(self.mixer(state))

    def __call__(self, tokens: list[int], count: int) -> Tensor:
        streams, _ = self.target.streams(tokens[:-1])
        return chain(tokens, streams[-1], self.rows, self.logits, count)


def build(folder: Path) -> StreamedMtp:
    """A model whose last layer becomes that of the draft; another one's mixer is the draft's."""
    kinds = TINY["qwen4_exp"][1]["layer_types"]
    whole = hf_model("qwen4_exp", **KEYS, num_hidden_layers=5, layer_types=[*kinds, "qwen_sparse_attention"])
    target, other = hf_model("qwen4_exp", **KEYS), hf_model("qwen4_exp", seed=5, **KEYS)
    share_weights(whole, target)
    whole.save_pretrained(folder / "whole")
    target.save_pretrained(folder)
    at = "model.layers.4."
    tensors = load_file(folder / "whole" / "model.safetensors")
    stored = {"mtp.layers.0." + k.removeprefix(at): v for k, v in tensors.items() if k.startswith(at)}
    mixer = other.get_decoder().hyper_connection_mixer
    stored |= {f"mtp.{MIXER}{k}": v.clone() for k, v in mixer.state_dict().items()}
    generator, size = torch.Generator().manual_seed(6), 64
    for name, width in (("embedding", size), ("hidden", 3 * size)):
        stored[f"mtp.fc_{name}.weight"] = torch.randn(size, size, generator=generator) * 0.15
        stored[f"mtp.pre_fc_norm_{name}.weight"] = torch.rand(width, generator=generator) - 0.5
    save_file(load_file(folder / "model.safetensors") | stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return StreamedMtp(stored, Target(target), whole.get_decoder().layers[4], mixer)


def test_the_layer_as_published(tmp_path: Path) -> None:
    reference = build(tmp_path)
    plan = plan_with_draft(tmp_path, "EAGLE")
    assert plan.draft.description.kind == "MTP"
    assert isinstance(plan.draft.description.model.layers[0].mixer, GQA), "it attends to all tokens"
    runner = DraftRunner(plan)
    check_proposals(runner, reference, random_tokens(33, seed=2), 1e-3, states=True)
    held = sum(param.tensor.nbytes for loadable, _ in runner.draft.loadables() for param in loadable.params.values())
    assert held == plan.draft.weight_bytes("float32"), "the plan counts other bytes than the draft allocates"


@pytest.mark.parametrize("scale", ["weight_scale_inv", "weight_scale"])
def test_experts_in_fp8_blocks_behind_a_model_in_16_bits(scale: str, tmp_path: Path) -> None:
    """ModelOpt's export names them in a table of modules, beside patterns that leave the draft alone. Scales are as
    DeepSeek's, or [N, 1, K, 1]. The head, which both use, is in FP8 with a scale a row."""
    reference = build(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    at = "mtp.layers.0.mlp.experts."
    draft = {name: tensors.pop(name) for name in list(tensors) if name.startswith(at)}
    split_experts(draft)
    write = plain("fp8_block", scale)
    write = spread(write, scale) if scale == "weight_scale" else write
    for name, weight in list(draft.items()):
        written, draft[name] = write(weight)
        tensors |= {f"{name.removesuffix('weight')}{leaf}": value.contiguous() for leaf, value in written.items()}
    join_experts(draft)
    head = reference.target.model.get_output_embeddings().weight
    written, stands_for = plain("fp8_channel", "weight_scale", "column")(tensors.pop("lm_head.weight"))
    tensors |= {f"lm_head.{leaf}": value for leaf, value in written.items()}
    head.data.copy_(stands_for)
    save_file(tensors, tmp_path / "model.safetensors")
    experts = dict(reference.layer.mlp.experts.named_parameters())
    for name, values in draft.items():
        assert not torch.equal(experts[name.removeprefix(at)], values), "rounding changes nothing"
        experts[name.removeprefix(at)].data.copy_(values)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            at[:-1]: {"quant_algo": "FP8_BLOCK_SCALES", "group_size": 128},
            "lm_head": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        },
        "ignore": ["lm_head", "model.*", "mtp*"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = plan_with_draft(tmp_path, "EAGLE")
    runner = DraftRunner(plan)
    assert blocks_of(runner.draft.layers[0])[1].experts.w13.scheme is SCHEMES["fp8_block"]
    assert runner.model.head is not None and isinstance(runner.model.head.product, QuantizedLinear)
    check_proposals(runner, reference, random_tokens(33, seed=2), 1e-3, states=True)
    held = sum(param.tensor.nbytes for loadable, _ in runner.draft.loadables() for param in loadable.params.values())
    assert held == plan.draft.weight_bytes("float32"), "the plan counts other bytes than the draft allocates"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mtp.fc_hidden.weight", r"lacks weights of the model: mtp\.fc_hidden\.weight"),
        (f"mtp.{MIXER}input_mix_weight_up.weight", r"lacks weights of the model: mtp\.hyper_connection_mixer"),
    ],
)
def test_tensors_that_are_missing(name: str, message: str, tmp_path: Path) -> None:
    build(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        DraftRunner(plan_with_draft(tmp_path, "EAGLE"))
