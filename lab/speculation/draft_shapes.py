"""Models and drafts of published shapes, written as config.json files: what `bench_blocks.py` measures.

Sizes are those of the published config.json files; where fewer layers or experts are taken than published, the case's
text says so. DFlash's and DSpark's sizes for these models are those of drafts that are published for models of this
width, or of the formats' descriptions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Config = dict[str, Any]
_FP8: Config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@dataclass(frozen=True, slots=True)
class Case:
    """A target with its draft. `target` and `draft` make their configs, of few layers or of all that are measured;
    `flags`: of the drafts, without the path; `sizes`: numbers of requests; `beside_peer`: upstream serves it, too."""

    what: str
    target: Callable[[bool], Config]
    flags: tuple[str, ...]
    accept_length: float
    draft: Config = field(default_factory=dict)
    sizes: tuple[int, ...] = (1, 8, 32)
    beside_peer: bool = False

    def write(self, folder: Path, few_layers: bool) -> list[str]:
        """Writes the directories. Returns the server's flags."""
        flags = ["--model-path", str(_save(folder / "target", self.target(few_layers))), *self.flags]
        if self.draft:
            path = _save(folder / "draft", self.draft)
            flags += ["--speculative-draft-model-path", str(path), "--speculative-draft-load-format", "dummy"]
        return flags


def _save(folder: Path, config: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def qwen3_5_27b(few_layers: bool) -> Config:
    layers = 4 if few_layers else 64
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    wide = [f"model.layers.{i}.linear_attn.in_proj_{part}" for i in range(layers) for part in "ab"]
    return {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 5120,
        "intermediate_size": 17408, "num_hidden_layers": layers, "num_attention_heads": 24, "num_key_value_heads": 4,
        "head_dim": 256, "hidden_act": "silu", "rms_norm_eps": 1e-6, "vocab_size": 248320, "attn_output_gate": True,
        "attention_bias": False, "tie_word_embeddings": False, "max_position_embeddings": 262144, "dtype": "bfloat16",
        "layer_types": kinds, "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        "quantization_config": {**_FP8, "modules_to_not_convert": ["lm_head", "model.embed_tokens", *wide]},
    }  # fmt: skip


DFLASH_27B: Config = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 17408,
    "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 10000000, "max_position_embeddings": 262144, "vocab_size": 248320,
    "tie_word_embeddings": False, "dtype": "bfloat16", "block_size": 16,
    "dflash_config": {"mask_token_id": 248070},
}  # fmt: skip


def qwen3_6_27b_nvfp4() -> Config:
    """As published: feed-forward blocks and output head in FP4, attention and states in FP8."""
    config, fp8, fp4 = qwen3_5_27b(False), {"quant_algo": "FP8"}, {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    quantized = {"lm_head": fp4}
    for i, kind in enumerate(config["layer_types"]):
        at, mixer = f"model.layers.{i}", [f"linear_attn.{part}" for part in ("in_proj_qkv", "in_proj_z", "out_proj")]
        if kind == "full_attention":
            mixer = [f"self_attn.{part}_proj" for part in "qkvo"]
        quantized |= {f"{at}.{part}": fp8 for part in mixer}
        quantized |= {f"{at}.mlp.{part}_proj": fp4 for part in ("gate", "up", "down")}
    return config | {
        "quantization_config": {
            "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": quantized,
            "ignore": ["mtp*"], "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        }
    }  # fmt: skip


def deepseek_v4_flash(few_layers: bool, dspark: bool, whole: bool = False) -> Config:
    ratios = [4, 128] if few_layers else [0, 0, 4, 128, 4, 128, 4, 128]
    if whole:
        ratios = [0, 0, *[4, 128] * 20, 4]
    layers, stages = len(ratios), (2 if few_layers else 3) if dspark else 1
    draft: Config = {"num_nextn_predict_layers": stages, "compress_ratios": [*ratios, *[0] * stages]}
    if dspark:
        draft |= {
            "dspark_block_size": 5, "dspark_noise_token_id": 128799, "dspark_markov_rank": 256,
            "dspark_target_layer_ids": list(range(layers - stages, layers)),
        }  # fmt: skip
    return {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": 4096,
        "num_hidden_layers": layers, "num_hash_layers": 1 if few_layers else 3, "num_attention_heads": 64,
        "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_lora_rank": 1024,
        "o_groups": 8, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 512, "sliding_window": 128,
        "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "moe_intermediate_size": 2048, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 6, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "swiglu_limit": 10.0, "hidden_act": "silu",
        "attention_bias": False, "attention_dropout": 0.0, "rms_norm_eps": 1e-6, "rope_theta": 10000,
        "compress_rope_theta": 160000, "expert_dtype": "fp4", "tie_word_embeddings": False, "vocab_size": 129280,
        "max_position_embeddings": 1048576, "torch_dtype": "bfloat16",
        "rope_scaling": {
            "type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536,
        },
        "quantization_config": {**_FP8, "fmt": "e4m3", "scale_fmt": "ue8m0"},
        **draft,
    }  # fmt: skip


def glm_5(few_layers: bool) -> Config:
    layers = 4 if few_layers else 6
    return {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "hidden_size": 6144,
        "intermediate_size": 12288, "num_hidden_layers": layers, "first_k_dense_replace": 3, "moe_layer_freq": 1,
        "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 64, "kv_lora_rank": 512, "q_lora_rank": 2048,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "qk_head_dim": 256, "v_head_dim": 256, "index_head_dim": 128,
        "index_n_heads": 32, "index_topk": 2048, "indexer_rope_interleave": True, "moe_intermediate_size": 2048,
        "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "hidden_act": "silu", "attention_bias": False, "rms_norm_eps": 1e-5, "rope_interleave": True,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "tie_word_embeddings": False,
        "vocab_size": 154880, "max_position_embeddings": 202752, "dtype": "bfloat16", "num_nextn_predict_layers": 1,
        "eos_token_id": [154820], "pad_token_id": 154820,
        "quantization_config": {**_FP8, "fmt": "e4m3", "modules_to_not_convert": ["lm_head", "model.embed_tokens"]},
    }  # fmt: skip


def _gqa(layers: int, **sizes: Any) -> Config:
    common = {
        "num_hidden_layers": layers, "head_dim": 128, "hidden_act": "silu", "attention_bias": False,
        "attention_dropout": 0.0, "initializer_range": 0.02, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "use_cache": True,
    }  # fmt: skip
    return {**common, **sizes}


def _qwen3(architecture: str, layers: int, **sizes: Any) -> Config:
    common = {
        "architectures": [architecture], "rms_norm_eps": 1e-6, "rope_theta": 1000000, "rope_scaling": None,
        "max_position_embeddings": 40960, "vocab_size": 151936, "bos_token_id": 151643, "eos_token_id": 151645,
        "num_attention_heads": 32, "sliding_window": None, "use_sliding_window": False,
    }  # fmt: skip
    return _gqa(layers, **common, **sizes)


def qwen3_8b(few_layers: bool) -> Config:
    return _qwen3(
        "Qwen3ForCausalLM", 6 if few_layers else 36, model_type="qwen3", hidden_size=4096, intermediate_size=12288,
        num_key_value_heads=8, max_window_layers=36,
    )  # fmt: skip


def qwen3_30b_a3b_fp8(few_layers: bool) -> Config:
    layers = 6 if few_layers else 48
    gates = [f"model.layers.{i}.mlp.gate" for i in range(layers)]
    return _qwen3(
        "Qwen3MoeForCausalLM", layers, model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144,
        num_key_value_heads=4, max_window_layers=48, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], router_aux_loss_coef=0.001,
        output_router_logits=False,
        quantization_config={**_FP8, "fmt": "e4m3", "modules_to_not_convert": ["lm_head", *gates]},
    )  # fmt: skip


def glm_4_7_fp8(few_layers: bool) -> Config:
    floats = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"], "weights": {**floats, "strategy": "channel", "dynamic": False},
        "input_activations": {**floats, "strategy": "token", "dynamic": True}, "output_activations": None,
    }  # fmt: skip
    return _gqa(
        4 if few_layers else 10, architectures=["Glm4MoeForCausalLM"], model_type="glm4_moe", hidden_size=5120,
        intermediate_size=12288, num_attention_heads=96, num_key_value_heads=8, attention_bias=True, use_qk_norm=True,
        partial_rotary_factor=0.5, rope_theta=1000000, rope_scaling=None, rms_norm_eps=1e-5, first_k_dense_replace=3,
        n_routed_experts=160, n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=1536, n_group=1,
        topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5, num_nextn_predict_layers=1, vocab_size=151552,
        max_position_embeddings=202752, eos_token_id=[151329, 151336, 151338], pad_token_id=151329,
        quantization_config={
            "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ["lm_head"],
        },
    )  # fmt: skip


def qwen3_5_35b_a3b_fp8(few_layers: bool) -> Config:
    layers = 4 if few_layers else 40
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    wide = ["lm_head", "model.language_model.embed_tokens", "mtp.fc"]
    for i in range(layers):
        at = f"model.language_model.layers.{i}"
        wide += [f"{at}.linear_attn.in_proj_{part}" for part in "ab"] + [f"{at}.linear_attn.conv1d"]
        wide += [f"{at}.mlp.gate", f"{at}.mlp.shared_expert_gate"]
    text = {
        "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": layers, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "hidden_act": "silu", "rms_norm_eps": 1e-6, "vocab_size": 248320,
        "attn_output_gate": True, "attention_bias": False, "attention_dropout": 0.0, "layer_types": kinds,
        "max_position_embeddings": 262144, "dtype": "bfloat16", "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "num_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "mlp_only_layers": [], "router_aux_loss_coef": 0.001, "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False, "eos_token_id": 248044, "initializer_range": 0.02, "use_cache": True,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    }  # fmt: skip
    vision = {
        "model_type": "qwen3_5_moe", "depth": 2 if few_layers else 27, "hidden_size": 1152, "intermediate_size": 4304,
        "num_heads": 16, "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "num_position_embeddings": 2304,
        "out_hidden_size": 2048, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "deepstack_visual_indexes": [], "initializer_range": 0.02,
    }  # fmt: skip
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": text,
        "vision_config": vision, "image_token_id": 248056, "video_token_id": 248057, "vision_start_token_id": 248053,
        "vision_end_token_id": 248054, "tie_word_embeddings": False,
        "quantization_config": {**_FP8, "fmt": "e4m3", "modules_to_not_convert": [*wide, "model.visual"]},
    }  # fmt: skip


def eagle3_head(hidden_size: int, kv_heads: int, intermediate_size: int) -> Config:
    return _gqa(
        1, architectures=["LlamaForCausalLMEagle3"], model_type="llama", hidden_size=hidden_size,
        intermediate_size=intermediate_size, num_attention_heads=32, num_key_value_heads=kv_heads, rms_norm_eps=1e-6,
        rope_theta=1000000, rope_scaling=None, max_position_embeddings=40960, vocab_size=151936, mlp_bias=False,
        draft_vocab_size=32000, pretraining_tp=1, bos_token_id=151643, eos_token_id=151645,
    )  # fmt: skip


_THREE = (
    *("--speculative-num-steps", "3"), *("--speculative-eagle-topk", "1"), *("--speculative-num-draft-tokens", "4")
)  # fmt: skip
"""As upstream wants them: all three, or none."""
_FOUR = (1, 8, 32, 64)
_DEPTH_7 = ("--speculative-num-draft-tokens", "8")
CASES: dict[str, Case] = {
    "qwen3.5-27b-dflash": Case(
        "all 64 layers in FP8 blocks, DFlash of five layers in bf16, blocks of 16, seven draft tokens",
        qwen3_5_27b, ("--speculative-algorithm", "DFLASH", *_DEPTH_7), 4.0, DFLASH_27B,
    ),
    "v4-flash-dspark": Case(
        "8 of 43 layers with all 256 experts in MXFP4, DSpark of three stages, blocks of five draft tokens",
        lambda few: deepseek_v4_flash(few, True),
        ("--speculative-algorithm", "DSPARK", "--speculative-dspark-block-size", "5"), 3.0,
    ),
    "v4-flash-mtp": Case(
        "8 of 43 layers with all 256 experts in MXFP4, its MTP layer, two draft tokens",
        lambda few: deepseek_v4_flash(few, False),
        ("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "2"), 2.2,
    ),
    "glm-5-mtp": Case(
        "6 of 78 layers with 64 of 256 experts in FP8 blocks, its MTP layer with an indexer, three draft tokens",
        glm_5, ("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3"), 2.6,
    ),
    "qwen3-8b-eagle3": Case(
        "all 36 layers in bf16, EAGLE-3 head of 32,000 tokens, three draft tokens",
        qwen3_8b, ("--speculative-algorithm", "EAGLE3", *_THREE), 2.8, eagle3_head(4096, 8, 12288), _FOUR, True,
    ),
    "qwen3-30b-eagle3": Case(
        "all 48 layers in FP8 blocks, EAGLE-3 head of 32,000 tokens, three draft tokens",
        qwen3_30b_a3b_fp8, ("--speculative-algorithm", "EAGLE3", *_THREE), 2.8, eagle3_head(2048, 4, 12288), _FOUR,
        True,
    ),
    "glm-4.7-mtp": Case(
        "10 of 92 layers in FP8 with all 160 experts, its MTP layer, three draft tokens",
        glm_4_7_fp8, ("--speculative-algorithm", "EAGLE", *_THREE), 2.8, {}, _FOUR, True,
    ),
    "qwen3.5-35b-mtp": Case(
        "all 40 layers in FP8 blocks, its MTP layer, three draft tokens",
        qwen3_5_35b_a3b_fp8, ("--speculative-algorithm", "EAGLE", *_THREE), 2.8, {}, _FOUR, True,
    ),
}  # fmt: skip


def tiny(few_layers: bool) -> Config:
    config: Config = json.loads((_EMBEDDED / "tiny" / "config.json").read_text())
    return config


_EMBEDDED = Path(__file__).resolve().parents[2] / "python" / "sglang" / "embedded"
TINY = Case(
    "the embedded model's shape with its EAGLE-3 head, to try the script on a CPU",
    tiny, ("--speculative-algorithm", "EAGLE3", *_THREE), 2.8,
    json.loads((_EMBEDDED / "eagle3" / "config.json").read_text()), (1, 2), True,
)  # fmt: skip
