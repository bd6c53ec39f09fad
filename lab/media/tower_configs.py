"""Configs with the published encoders of images: the encoder as it is published, in front of a text model of a few
layers, which the benchmark of encoders describes and never loads."""

from __future__ import annotations

from typing import Any

_SIZES = {
    "vocab_size": 1024,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_QWEN3 = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
    "hidden_act": "gelu_pytorch_tanh",
}
_SECTIONS = {"rope_type": "default", "rope_theta": 5000000.0, "mrope_interleaved": True}
_HYBRID = {
    "head_dim": 256,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": _SECTIONS | {"mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25},
}
_GLM = {
    "moe_intermediate_size": 256,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 4,
    "attention_bias": True,
    "use_qk_norm": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
    | {"partial_rotary_factor": 0.5},
}
_GEMMA = {
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 1024,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": "vision",
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}
_KIMI = {
    "model_type": "kimi_k2",
    "num_key_value_heads": 32,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 4,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "rope_theta": 50000.0,
}
_MOONVIT = {
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmerger",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "merge_kernel_size": [2, 2],
    "patch_size": 14,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "init_pos_emb_time": 4,
    "vt_hidden_size": 1152,
    "vt_intermediate_size": 4304,
    "vt_num_attention_heads": 16,
    "vt_num_hidden_layers": 27,
}
_QWEN2_5 = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_chans": 3,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "hidden_act": "silu",
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "tokens_per_second": 2,
    "out_hidden_size": 3584,
}
_GLM_VISION = {
    "depth": 24,
    "hidden_size": 1536,
    "intermediate_size": 10944,
    "num_heads": 12,
    "in_channels": 3,
    "image_size": 336,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
    "out_hidden_size": 4096,
}
_GEMMA_VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 72,
    "hidden_activation": "gelu_pytorch_tanh",
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "position_embedding_size": 10240,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    "standardize": True,
    "use_clipped_linears": False,
}
_OF_QWEN = {"image_token_id": 1000, "video_token_id": 1001, "vision_start_token_id": 1002, "vision_end_token_id": 1003}


def _config(kind: str, architecture: str, hidden: int, text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    text_type = {"model_type": f"{kind}_text"} | text
    tokens = {"media_placeholder_token_id": 1000} if kind == "kimi_k25" else _OF_QWEN
    return {
        "architectures": [architecture],
        "model_type": kind,
        "dtype": "bfloat16",
        "text_config": _SIZES | {"hidden_size": hidden, "dtype": "bfloat16"} | text_type,
        "vision_config": vision,
        **tokens,
    }


def _qwen3_vl(text: dict[str, Any] | None = None) -> dict[str, Any]:
    rope = {"rope_parameters": _SECTIONS | {"mrope_section": [24, 20, 20]}}
    vision = _QWEN3 | {"deepstack_visual_indexes": [8, 16, 24], "out_hidden_size": 4096}
    return _config("qwen3_vl", "Qwen3VLForConditionalGeneration", 4096, rope | (text or {}), vision)


QWEN3_VL_8B = _qwen3_vl({"num_hidden_layers": 36, "intermediate_size": 12288, "vocab_size": 151936})
"""The whole of Qwen3-VL-8B; placeholders and the end have the ids that the embedded model's tokenizer leaves free."""

TOWERS: dict[str, dict[str, Any]] = {
    "Kimi K2.5": _config("kimi_k25", "KimiK25ForConditionalGeneration", 7168, _KIMI, _MOONVIT),
    "Qwen3-VL-8B": _qwen3_vl(),
    "Qwen2.5-VL-7B": _config(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        3584,
        {"rope_parameters": _SECTIONS | {"mrope_section": [16, 24, 24], "mrope_interleaved": False}},
        _QWEN2_5,
    ),
    "Gemma 4 31B": _config("gemma4", "Gemma4ForConditionalGeneration", 5376, _GEMMA, _GEMMA_VISION),
    "GLM-4.5V": _config("glm4v_moe", "Glm4vMoeForConditionalGeneration", 4096, _GLM, _GLM_VISION),
    "Qwen3.5-35B-A3B": _config(
        "qwen3_5", "Qwen3_5ForConditionalGeneration", 2048, _HYBRID, _QWEN3 | {"out_hidden_size": 2048}
    ),
}
