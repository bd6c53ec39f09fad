"""EAGLE-1 heads, EAGLE-3 heads with latent attention, and small models of their own as drafts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang.srt.errors import UserError

from .draft_harness import DraftRunner, check_proposals, plan_with_draft
from .draft_references import Eagle3, Target, attend, chain, gated_mlp, grouped_queries, rms, rotate
from .harness import SIZES, VOCAB, hf_logits, random_tokens, save_tiny
from .test_eagle3_drafts import CONFIG, save, weights

HIDDEN = SIZES["hidden_size"]
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Target]:
    folder = tmp_path_factory.mktemp("target")
    return folder, Target(save_tiny("llama", folder, num_hidden_layers=7))


@dataclass
class Eagle1:
    """No norm before the first layer's attention and none at the end; the target's head."""

    w: Tensors
    config: dict[str, Any]
    target: Target

    def rows(self, ids: Sequence[int], features: Tensor) -> Tensor:
        w, at = self.w, "layers.0."
        x = torch.cat((self.target.embedded(ids), features), dim=-1) @ w["fc.weight"].T + w.get("fc.bias", 0.0)
        h = x + grouped_queries(x, w, f"{at}self_attn.", self.config)
        normed = rms(h, w[f"{at}post_attention_layernorm.weight"], self.config["rms_norm_eps"])
        return h + gated_mlp(normed, w, f"{at}mlp.")

    def __call__(self, tokens: list[int], count: int) -> Tensor:
        return chain(tokens, self.target.streams(tokens[:-1])[1], self.rows, self.target.logits, count)


EAGLE_CONFIG = {key: value for key, value in CONFIG.items() if key != "draft_vocab_size"} | {
    "architectures": ["LlamaForCausalLMEagle"]
}


def eagle1_weights(bias: bool) -> Tensors:
    tensors = weights(CONFIG | {"draft_vocab_size": None}, aux_layers=2)
    for name in ("norm.weight", "layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"):
        del tensors[name]
    for part in "qkv":
        name = f"layers.0.self_attn.{part}_proj.weight"
        tensors[name] = tensors[name][:, :HIDDEN].contiguous()
    tensors["fc.weight"] *= 0.3  # without norms the features of a chain would grow
    return tensors | ({"fc.bias": torch.randn(HIDDEN)} if bias else {})


@pytest.mark.parametrize("bias", [True, False])
def test_eagle_as_published(bias: bool, target: tuple[Path, Target], tmp_path: Path) -> None:
    folder, model = target
    tensors = eagle1_weights(bias)
    copy = {"embed_tokens.weight": torch.zeros(SIZES["vocab_size"], HIDDEN)}  # never read
    draft = save(tmp_path / "draft", EAGLE_CONFIG, {f"model.{name}": t for name, t in (tensors | copy).items()})
    plan = plan_with_draft(folder, "EAGLE", draft)
    runner = DraftRunner(plan)
    check_proposals(runner, Eagle1(tensors, EAGLE_CONFIG, model), random_tokens(33, seed=2))
    held = sum(param.tensor.nbytes for loadable, _ in runner.draft.loadables() for param in loadable.params.values())
    assert held == plan.draft.weight_bytes("float32")


LATENT = {"kv_lora_rank": 16, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
MLA_CONFIG = CONFIG | LATENT | {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v3"}
MLA_CONFIG |= {"num_key_value_heads": 4, "n_routed_experts": 8, "first_k_dense_replace": 0}  # of a target
del MLA_CONFIG["head_dim"]


@dataclass
class LatentEagle3(Eagle3):
    def attention(self, x: Tensor, layer: int) -> Tensor:
        w, at, c = self.w, f"layers.{layer}.self_attn.", self.config
        heads, nope, rope, rank = 4, c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["kv_lora_rank"]
        q = rms(x @ w[f"{at}q_a_proj.weight"].T, w[f"{at}q_a_layernorm.weight"], 1e-6) @ w[f"{at}q_b_proj.weight"].T
        latent = x @ w[f"{at}kv_a_proj_with_mqa.weight"].T
        kv = rms(latent[:, :rank], w[f"{at}kv_a_layernorm.weight"], 1e-6) @ w[f"{at}kv_b_proj.weight"].T
        q, kv = q.unflatten(-1, (heads, -1)), kv.unflatten(-1, (heads, -1))
        q_rope, k_rope = (self._rotate(t) for t in (q[..., nope:], latent[:, None, rank:]))
        k = torch.cat((kv[..., :nope], k_rope.expand(-1, heads, -1)), dim=-1)
        q = torch.cat((q[..., :nope], q_rope), dim=-1)
        return attend(q, k, kv[..., nope:], (nope + rope) ** -0.5) @ w[f"{at}o_proj.weight"].T

    def _rotate(self, x: Tensor) -> Tensor:
        """Neighbours rotate together."""
        halves = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
        return rotate(halves, self.config["rope_theta"])


def latent_weights() -> Tensors:
    tensors, generator = weights(CONFIG), torch.Generator().manual_seed(4)
    heads, nope, rope, rank = 4, LATENT["qk_nope_head_dim"], LATENT["qk_rope_head_dim"], LATENT["kv_lora_rank"]
    q_rank, v_dim, at = LATENT["q_lora_rank"], LATENT["v_head_dim"], "layers.0.self_attn."
    for name in [name for name in tensors if "self_attn" in name]:
        del tensors[name]
    shapes = {
        "q_a_proj": (q_rank, 2 * HIDDEN),
        "q_b_proj": (heads * (nope + rope), q_rank),
        "kv_a_proj_with_mqa": (rank + rope, 2 * HIDDEN),
        "kv_b_proj": (heads * (nope + v_dim), rank),
        "o_proj": (HIDDEN, heads * v_dim),
    }
    tensors |= {f"{at}{name}.weight": torch.randn(s, generator=generator) * 0.15 for name, s in shapes.items()}
    norms = {"q_a_layernorm": q_rank, "kv_a_layernorm": rank}
    return tensors | {f"{at}{name}.weight": torch.rand(s, generator=generator) + 0.5 for name, s in norms.items()}


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_latent_eagle3_as_published(name: str, tmp_path: Path) -> None:
    """Behind a target of other heads, and behind one with latents, too."""
    model = Target(save_tiny(name, tmp_path / "target", num_hidden_layers=7, num_nextn_predict_layers=0))
    tensors = latent_weights()
    draft = save(tmp_path / "draft", MLA_CONFIG, tensors)
    plan = plan_with_draft(tmp_path / "target", "EAGLE3", draft)
    runner = DraftRunner(plan)
    check_proposals(runner, LatentEagle3(tensors, MLA_CONFIG, model, (1, 2, 3)), random_tokens(33, seed=2))


STANDALONE = ("llama", "qwen3_tied_bias", "deepseek_v3", "qwen3_moe", "gemma4_small")


@pytest.mark.parametrize("name", STANDALONE)
def test_any_served_family_drafts(name: str, target: tuple[Path, Target], tmp_path: Path) -> None:
    """Vocabularies that differ by padding, caches that layers share, windows that the target does not have."""
    folder, _ = target
    draft = save_tiny(name, tmp_path / "draft")

    def reference(tokens: list[int], count: int) -> Tensor:
        ids, rows = list(tokens), []
        for _ in range(count):
            row = hf_logits(draft, ids)[-1]
            missing = SIZES["vocab_size"] - len(row)
            rows.append(torch.nn.functional.pad(row, (0, missing), value=-torch.inf))
            ids.append(int(rows[-1].argmax()))
        return torch.stack(rows)

    plan = plan_with_draft(folder, "STANDALONE", tmp_path / "draft")
    runner = DraftRunner(plan)
    check_proposals(runner, reference, [token % VOCAB for token in random_tokens(33, seed=2)])
    held = sum(param.tensor.nbytes for loadable, _ in runner.draft.loadables() for param in loadable.params.values())
    assert held == plan.draft.weight_bytes("float32")


def test_an_embedding_in_main_memory_gives_the_same_draft_tokens(target: tuple[Path, Target], tmp_path: Path) -> None:
    folder, _ = target
    save_tiny("llama", tmp_path / "draft")
    plan = plan_with_draft(folder, "STANDALONE", tmp_path / "draft")
    description = plan.draft.description.with_embedding_on_host()
    on_host = replace(plan.draft, description=description, weights=replace(plan.draft.weights, model=description.model))
    size = 256 * HIDDEN * 4
    assert plan.draft.weight_bytes("float32") - on_host.weight_bytes("float32") == on_host.host_bytes("float32") == size
    tokens, states = random_tokens(33, seed=2), []
    for draft in (plan.draft, on_host):
        planned = replace(plan)
        planned.__dict__["draft"] = draft  # where the property keeps it
        runner = DraftRunner(planned)
        assert (runner.draft.model.embed.rows is None) == (draft is plan.draft)
        states.append(runner.step({1: tokens[:-1]}, {1: tokens[-1]})[1])
    assert torch.equal(*states)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("llama", {"vocab_size": 4096}, "vocab_size is 4096, and the model's 256"),
        ("qwen3_next", {}, "STANDALONE draft with GatedDelta layers is not supported"),
        ("llama", {"architectures": ["NovelForCausalLM"]}, "architecture NovelForCausalLM is not supported"),
    ],
)
def test_models_that_cannot_draft(
    name: str, keys: dict[str, Any], message: str, target: tuple[Path, Target], tmp_path: Path
) -> None:
    save_tiny(name, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    with pytest.raises(UserError, match=message):
        plan_with_draft(target[0], "STANDALONE", tmp_path)


def test_an_eagle_head_of_another_architecture(target: tuple[Path, Target], tmp_path: Path) -> None:
    draft = save(tmp_path / "draft", EAGLE_CONFIG | {"architectures": ["NovelEagle"]}, eagle1_weights(True))
    with pytest.raises(UserError, match="the draft architecture NovelEagle is not supported here"):
        plan_with_draft(target[0], "EAGLE", draft)
