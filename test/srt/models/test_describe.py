"""What a config.json is taken to mean, and what of it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.blocks.mla.spec import MLA
from sglang.srt.blocks.mlp.spec import Dense
from sglang.srt.blocks.moe.spec import MoE, Router
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.errors import UserError
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.plan.families import FAMILIES, SERVED_ARCHITECTURES, family_of
from sglang.srt.server_args import ServerArgs

from .harness import NativePlan

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
QWEN3_0_6B = QWEN3_8B | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
QWEN3_30B_A3B = QWEN3_8B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LLAMA_8B = QWEN3_8B | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
}
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "torch_dtype": "bfloat16",
}
PUBLISHED_PARAMETERS = {  # as their model cards count them
    "Qwen3-8B": (QWEN3_8B, 8.19e9),
    "Qwen3-0.6B": (QWEN3_0_6B, 0.596e9),
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 30.53e9),
    "Llama-3.1-8B": (LLAMA_8B, 8.03e9),
    "DeepSeek-V2-Lite": (DEEPSEEK_V2_LITE, 15.7e9),
}


def _model(config: dict[str, Any], folder: Path) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig.from_server_args(ServerArgs(model_path=str(folder)))


def test_no_two_families_claim_the_same_models() -> None:
    """Two architectures have texts of several kinds, which their types of models tell apart."""
    claims = [(name, kind) for family in FAMILIES for name in family.architectures for kind in family.model_types]
    assert len(set(claims)) == len(claims)
    for family in FAMILIES:
        for name in family.architectures:
            assert all(family_of(name, kind) is family for kind in family.model_types or ("another",)), name
    architectures = [name for family in FAMILIES for name in family.architectures]
    assert sorted(set(architectures)) == list(SERVED_ARCHITECTURES)
    shared = {name for name in architectures if architectures.count(name) > 1}
    assert shared == {"Glm46VForConditionalGeneration", "Mistral3ForConditionalGeneration"}


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_planned_weight_bytes_are_those_allocated(name: str, tmp_path: Path) -> None:
    config, published = PUBLISHED_PARAMETERS[name]
    model = _model(config, tmp_path)
    plan = NativePlan(model, context_len=16)
    built = CausalLM(plan, device="meta")
    assert all(p.tensor.is_meta and p.tensor.dtype == torch.bfloat16 for p in built.params.values())
    assert plan.weight_bytes() == sum(p.tensor.nbytes for p in built.params.values())
    assert plan.weight_bytes() / 2 == pytest.approx(published, rel=0.005)


def test_which_layers_have_experts(tmp_path: Path) -> None:
    config = QWEN3_30B_A3B | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    layers = NativePlan(_model(config, tmp_path)).description.layers
    assert [type(layer.ffn) for layer in layers] == [Dense, MoE, Dense, Dense, Dense, MoE]
    assert layers[1].ffn == MoE(num_experts=128, intermediate_size=768, router=Router(top_k=8))


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (QWEN3_8B, {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        (QWEN3_8B, {"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        (QWEN3_8B, {"layer_types": ["full_attention", "sliding_attention"]}, "'layer_types' has 2 entries for 36"),
        (LLAMA_8B, {"pretraining_tp": 2}, "pretraining_tp = 2 is not supported for LlamaForCausalLM"),
        (LLAMA_8B, {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported"),
        (QWEN3_8B, {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope' is not supported"),
        (
            QWEN3_8B,
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_slow": [1]}},
            r"the rotary 'beta_slow' must be a number; got \[1\]",
        ),
        (QWEN3_8B, {"rms_norm_eps": None}, "'rms_norm_eps' is missing"),
        (LLAMA_8B, {"mlp_bias": "yes"}, "'mlp_bias' must be of type bool"),
        (QWEN3_30B_A3B, {"norm_topk_prob": 3}, "'norm_topk_prob' must be of type bool"),
    ],
)
def test_values_that_we_do_not_compute_are_refused(
    base: dict[str, Any], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = _model(base | change, tmp_path)
    with pytest.raises(UserError, match=message):
        _ = NativePlan(model).description


def test_values_that_configs_leave_out(tmp_path: Path) -> None:
    left_out = dict.fromkeys(("head_dim", "num_key_value_heads", "torch_dtype"))
    config = QWEN3_8B | left_out | {"num_attention_heads": 64}
    for architecture, head_dim, kv_heads in (("Qwen3ForCausalLM", 128, 32), ("LlamaForCausalLM", 64, 64)):
        description = NativePlan(_model(config | {"architectures": [architecture]}, tmp_path)).description
        assert (description.layers[0].mixer.head_dim, description.layers[0].mixer.num_kv_heads) == (head_dim, kv_heads)
        assert description.dtype == "bfloat16" and not description.tie_embeddings


@pytest.mark.parametrize("experts", [{"num_experts": 128}, {"num_local_experts": 128, "num_experts": None}])
def test_numbers_of_experts(tmp_path: Path, experts: dict[str, Any]) -> None:
    found = NativePlan(_model(QWEN3_30B_A3B | experts, tmp_path)).description.experts
    assert found is not None and (found.num_experts, found.top_k, found.intermediate_size) == (128, 8, 768)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT9LMHeadModel"]}, "GPT9LMHeadModel is not supported: .* Supported: .*LlamaForCausalLM"),
        ({"architectures": ["GPT2LMHeadModel"]}, "with the model type 'qwen3': its class takes 'gpt2'"),
        ({"hidden_size": None}, "key 'hidden_size' is missing"),
        ({"hidden_size": "4096"}, "'hidden_size' must be of type int; got '4096'"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' must be at least 1"),
        ({"num_hidden_layers": True}, "'num_hidden_layers' must be of type int"),
        ({"num_key_value_heads": 5}, "32 is not a multiple of num_key_value_heads 5"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' must be of type bool"),
    ],
)
def test_what_cannot_be_read_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        _ = NativePlan(_model(QWEN3_8B | change, tmp_path)).description


def test_an_impossible_router_is_a_start_up_error(tmp_path: Path) -> None:
    config = QWEN3_30B_A3B | {"num_experts_per_tok": 129}
    with pytest.raises(UserError, match="config.json: impossible routing: 129 experts cannot be chosen from 1 groups"):
        _ = NativePlan(_model(config, tmp_path)).description
    config = QWEN3_30B_A3B | {"scoring_func": "noaux"}
    with pytest.raises(UserError, match="must be one of softmax, sigmoid, sqrtsoftplus; got 'noaux'"):
        _ = NativePlan(_model(config, tmp_path)).description


WRITTEN_BY_OTHERS = {
    *("KimiK25ForConditionalGeneration", "MiMoForCausalLM", "DeepseekV4ForCausalLM"),
    *("Qwen3_8_FlashNextForConditionalGeneration", "Qwen4ExpForCausalLM", "MiniMaxM3SparseForCausalLM"),
    *("Step3p5ForCausalLM", "DeepseekV41ForCausalLM", "MiMoV2ForCausalLM"),
    *("BailingMoeV3ForCausalLM", "NaiveN05FlashForCausalLM", "Step4ForCausalLM", "Step5ForCausalLM"),
    *("MMGPTStepRoboticsForCausalLM", "Step5ForConditionalGeneration"),
    *("NemotronHPuzzleForCausalLM", "MuseSparkForConditionalGeneration", "Dots3NoteForCausalLM"),
    *("Dot3NoteForCausalLM", "Dots3NoteForConditionalGeneration"),
}
"""Architectures whose code comes with the checkpoint, those of which transformers writes keys and names that no
published checkpoint has, one whose class has no indexer by default, and those that the oldest of them lacks."""


def test_transformers_writes_what_we_read(tmp_path: Path) -> None:
    """The form that the installed transformers saves, for every architecture."""
    import transformers

    sizes = {"num_attention_heads": 16, "num_key_value_heads": 4, "num_experts_per_tok": 4}
    for name in sorted(set(SERVED_ARCHITECTURES) - WRITTEN_BY_OTHERS):
        cls = getattr(transformers, name).config_class
        if "text_config" in cls.sub_configs:
            continue  # these sizes are those of a text model
        for tied in (False, True):
            one_expert = {"num_experts_per_tok": 1} if name.startswith("Llama4") else {}
            saved = cls(architectures=[name], tie_word_embeddings=tied, **sizes | one_expert)
            saved.save_pretrained(tmp_path)
            written = json.loads((tmp_path / "config.json").read_text())
            model = ModelConfig.from_server_args(ServerArgs.from_kwargs(model_path=str(tmp_path)))
            description = NativePlan(model).description
            assert description.tie_embeddings is tied
            mixer = next(layer.mixer for layer in description.layers if isinstance(layer.mixer, GQA | MLA))
            assert mixer.num_heads == 16
            assert model.context_len == saved.max_position_embeddings
            if isinstance(mixer, MLA):
                assert (mixer.qk_dim, mixer.v_dim) == (saved.qk_head_dim, saved.v_head_dim)
                continue
            assert mixer.num_kv_heads == 4
            assert mixer.head_dim == (written.get("head_dim") or written["hidden_size"] // 16)


def test_both_names_of_layers_with_an_indexer(tmp_path: Path) -> None:
    """Later releases of transformers write the second one."""
    published = Path(__file__).parents[1] / "kernels" / "published" / "GLM-5.1-FP8" / "config.json"
    config = json.loads(published.read_text()) | {"num_hidden_layers": 5}
    kinds = (None, ["deepseek_sparse_attention"] * 5, ["indexed_attention"] * 5)
    plain, *named = (NativePlan(_model(config | {"layer_types": kind}, tmp_path)).description for kind in kinds)
    assert all(each.layers == plain.layers for each in named)


def test_gemma_3_as_it_was_published(tmp_path: Path) -> None:
    """The older keys mean what the newer ones say by layer type."""
    rope = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
    rope["sliding_attention"] = {"rope_type": "default", "rope_theta": 1e4}
    changes = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 12}
    changes |= {"hidden_act": None, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 512}
    config = QWEN3_0_6B | changes | {"query_pre_attn_scalar": 256, "use_sliding_window": None, "rope_theta": None}
    newer = {"rope_parameters": rope, "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2}
    older = {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 1e4}
    layers = [NativePlan(_model(config | form, tmp_path)).description.layers for form in (newer, older)]
    assert layers[0] == layers[1] and layers[0][5].mixer.softmax_scale == 1 / 16
    assert [layer.mixer.window for layer in layers[0][:6]] == [512] * 5 + [0]


def test_the_walk_through_shows_the_family_as_it_is() -> None:
    root = Path(__file__).parents[3]
    shown = (root / "docs/adding_a_model.md").read_text().split("```python\n")[1].split("```")[0]
    assert shown in (root / "python/sglang/srt/plan/families/glm4_moe.py").read_text()
