"""The config.json of a model in GGUF, made from the file's metadata and tensors, by architecture. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.configs.gguf import names
from sglang.srt.configs.gguf.files import GGUFModel
from sglang.srt.configs.gguf.header import TensorInfo
from sglang.srt.configs.gguf.metadata import Metadata, shortest
from sglang.srt.configs.gguf.names import Target
from sglang.srt.configs.gguf.rope_tables import llama3_scaling
from sglang.srt.errors import UserError

Values = dict[str, Any]


class Description:
    """What a family's function reads: the metadata, and the shapes of the tensors."""

    def __init__(self, model: GGUFModel) -> None:
        self.model, self.meta = model, Metadata(model.headers[0].metadata, model.path)
        self.tensors = model.tensors()

    def tensor(self, name: str) -> TensorInfo:
        """Returns a tensor's entry in the header. Raises UserError if it is missing."""
        if name not in self.tensors:
            raise UserError(f"{self.model.path}: the tensor {name} is missing.")
        return self.tensors[name][1]

    def has(self, name: str) -> bool:
        """Returns whether the model has a tensor of this name, in its first layer if it is of layers."""
        return name in self.tensors or f"blk.0.{name}" in self.tensors

    @property
    def num_layers(self) -> int:
        """Returns the number of layers, without those that only drafts use."""
        return self.meta.count("block_count") - self.meta.count("nextn_predict_layers", 0)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A value of general.architecture: its tensors' names, and the keys of config.json besides the usual ones."""

    targets: Mapping[str, Target]
    model_type: str
    class_name: str
    keys: Callable[[Description], Values]


HARMLESS = frozenset(
    {
        "vocab_size",  # the embedding has as many rows
        "attention.causal",
        "rope.scaling.finetuned",
        "expert_count",
        "expert_used_count",
        "interleave_moe_layer_step",
    }
)
"""Keys that do not change answers where no function reads them. Counts of experts are 0 in dense models."""


def config_of(d: Description) -> tuple[Values, Architecture]:
    """Returns config.json and the architecture. Raises UserError for one that is not known, or keys that nobody
    reads."""
    architecture = ARCHITECTURES.get(d.meta.arch)
    if architecture is None:
        known = ", ".join(ARCHITECTURES)
        raise UserError(f"{d.model.path}: models of architecture {d.meta.arch!r} are not read (has {known}).")
    values = _usual(d)
    values |= {"model_type": architecture.model_type, "architectures": [architecture.class_name]}
    values |= architecture.keys(d)
    d.meta.check_read(HARMLESS)
    return {key: value for key, value in values.items() if value is not None}, architecture


def _usual(d: Description) -> Values:
    meta = d.meta
    hidden, heads = meta.positive("embedding_length"), meta.positive("attention.head_count")
    rows, width = (*d.tensor("token_embd.weight").shape, 0)[:2]
    if width != hidden:
        raise UserError(f"{d.model.path}: token_embd.weight has rows of {width}, but embedding_length is {hidden}.")
    return {
        "vocab_size": rows,
        "hidden_size": hidden,
        "num_hidden_layers": d.num_layers,
        "intermediate_size": meta.count("feed_forward_length", 0) or None,
        "num_attention_heads": heads,
        "num_key_value_heads": meta.count("attention.head_count_kv", heads),
        "max_position_embeddings": meta.count("context_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in d.tensors,
        "rope_theta": meta.number("rope.freq_base", 10000.0),
        "rope_scaling": _scaling(d),
        "torch_dtype": "bfloat16",
    }


def _scaling(d: Description) -> Values | None:
    """Returns the rotary scaling of the metadata."""
    meta = d.meta
    kind, factor = meta.get("rope.scaling.type", str, "none"), meta.number("rope.scaling.factor", 0.0)
    original = meta.count("rope.scaling.original_context_length", 0)
    attn = meta.number("rope.scaling.attn_factor", 1.0) * meta.number("rope.scaling.yarn_attn_factor", 1.0)
    fast, slow = (meta.number(f"rope.scaling.yarn_beta_{side}", 0.0) for side in ("fast", "slow"))
    log_multiplier = meta.number("rope.scaling.yarn_log_multiplier", 0.0)
    if meta.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise UserError(f"{d.model.path}: a rope.scaling.yarn_ext_factor other than 1 is not supported.")
    if kind == "none" or not factor:
        return None
    if factor < 0:
        raise UserError(f"{d.model.path}: rope.scaling.factor must be positive; got {factor}.")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UserError(f"{d.model.path}: rope.scaling.type {kind!r} is not supported (has none, linear, yarn).")
    scaling: Values = {"rope_type": "yarn", "factor": factor}
    if original:
        scaling["original_max_position_embeddings"] = original
    if fast:
        scaling["beta_fast"] = fast
    if slow:
        scaling["beta_slow"] = slow
    if log_multiplier:  # the converter writes a tenth of it
        mscale = shortest(log_multiplier / 0.1)
        scaling |= {"mscale": mscale, "mscale_all_dim": mscale}
    elif attn != 1.0:
        scaling["attention_factor"] = attn * (0.1 * math.log(factor) + 1.0)
    return scaling


def _head_dim(d: Description) -> Values:
    """Returns the size of the heads, all of which rotates. Raises UserError if keys and values differ."""
    meta = d.meta
    usual = meta.positive("embedding_length") // meta.positive("attention.head_count")
    keys = meta.positive("attention.key_length", usual)
    values, rotated = meta.count("attention.value_length", keys), meta.count("rope.dimension_count", keys)
    if not keys == values == rotated:
        raise UserError(
            f"{d.model.path}: heads with keys of {keys}, values of {values} and {rotated} rotating dims are not"
            f" supported for {meta.arch}."
        )
    return {"head_dim": keys}


def _llama(d: Description) -> Values:
    if d.meta.count("expert_count", 0):
        return _mixtral(d)
    values = _head_dim(d) | {"attention_bias": d.has("attn_q.bias"), "mlp_bias": d.has("ffn_up.bias")}
    if "rope_freqs.weight" in d.tensors:
        values["rope_scaling"] = llama3_scaling(d.model, values["head_dim"], d.meta.number("rope.freq_base", 10000.0))
    return values


def _mixtral(d: Description) -> Values:
    if "blk.0.ffn_up.0.weight" in d.tensors:
        raise UserError(f"{d.model.path}: a tensor for each expert, as files of 2023 have it, is not read.")
    values = _head_dim(d) | _experts(d)
    values["num_local_experts"] = values.pop("num_experts")
    values["intermediate_size"] = values.pop("moe_intermediate_size")
    return values | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}


def _qwen(d: Description) -> Values:
    return _head_dim(d) | {"attention_bias": None}


def _experts(d: Description) -> Values:
    """Returns the counts and the size of experts."""
    size = d.meta.count("expert_feed_forward_length", 0)
    first = next((name for name in d.tensors if name.endswith(".ffn_up_exps.weight")), "blk.0.ffn_up_exps.weight")
    shape = d.tensor(first).shape
    if len(shape) != 3:
        raise UserError(f"{d.model.path}: the tensor {first} must have three dimensions.")
    return {
        "num_experts_per_tok": d.meta.count("expert_used_count"),
        "moe_intermediate_size": size or shape[1],
        "num_experts": d.meta.count("expert_count"),
    }


def _qwen2_moe(d: Description) -> Values:
    shared = d.meta.count("expert_shared_feed_forward_length", 0) or d.tensor("blk.0.ffn_up_shexp.weight").shape[0]
    return _qwen(d) | _experts(d) | {"shared_expert_intermediate_size": shared, "norm_topk_prob": False}


def _qwen3_moe(d: Description) -> Values:
    normed = d.meta.get("expert_weights_norm", bool, True)
    return _qwen(d) | _experts(d) | {"norm_topk_prob": normed, "decoder_sparse_step": 1}


_GEMMA3_27B_LAYERS = 62
"""Layers of the one Gemma 3 whose queries are scaled by the hidden size a head instead of the head's size."""


def _gemma3(d: Description) -> Values:
    values, meta = _head_dim(d), d.meta
    scalar = values["head_dim"]
    if d.num_layers == _GEMMA3_27B_LAYERS:
        scalar = meta.positive("embedding_length") // meta.positive("attention.head_count")
    return values | {
        "query_pre_attn_scalar": scalar,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": meta.count("attention.sliding_window"),
        "sliding_window_pattern": meta.count("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": meta.number("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": meta.number("final_logit_softcapping", 0.0) or None,
    }


def _gpt_oss(d: Description) -> Values:
    values = _head_dim(d) | _experts(d)
    values["num_local_experts"] = values.pop("num_experts")
    values["intermediate_size"] = values.pop("moe_intermediate_size")
    scaling = _scaling(d)
    if scaling is not None:
        scaling = {"beta_fast": 32.0, "beta_slow": 1.0, **scaling, "truncate": False}
    return values | {
        "attention_bias": True,
        "hidden_act": "silu",
        "swiglu_limit": d.meta.number("swiglu_clamp_exp", 7.0),
        "sliding_window": d.meta.count("attention.sliding_window"),
        "rope_scaling": scaling,
    }


def _glm4(d: Description) -> Values:
    meta = d.meta
    heads = meta.positive("attention.head_count")
    head_dim = meta.positive("attention.key_length", meta.positive("embedding_length") // heads)
    if meta.count("attention.value_length", head_dim) != head_dim:
        raise UserError(f"{d.model.path}: heads whose keys and values differ are not supported for glm4.")
    rotated = meta.count("rope.dimension_count", head_dim)
    return {
        "head_dim": head_dim,
        "partial_rotary_factor": rotated / head_dim,
        "attention_bias": d.has("attn_q.bias"),
    }


_SIGMOID = 2


def _deepseek2(d: Description) -> Values:
    meta = d.meta
    rope_dim, sigmoid = meta.count("rope.dimension_count"), meta.count("expert_gating_func", 1) == _SIGMOID
    key = meta.count("attention.key_length_mla", 0) or meta.count("attention.key_length")
    value = meta.count("attention.value_length_mla", 0) or meta.count("attention.value_length")
    meta.has("attention.key_length"), meta.has("attention.value_length")
    heads = meta.positive("attention.head_count")
    groups = meta.count("expert_group_count", 1)
    values = _experts(d)
    values["n_routed_experts"] = values.pop("num_experts")
    if sigmoid:
        method = "noaux_tc"
    else:
        method = "group_limited_greedy" if groups > 1 else "greedy"
    return values | {
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "architectures": ["DeepseekV3ForCausalLM" if sigmoid else "DeepseekV2ForCausalLM"],
        "num_key_value_heads": heads,
        "q_lora_rank": meta.count("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": meta.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key - rope_dim,
        "v_head_dim": value,
        "first_k_dense_replace": meta.count("leading_dense_block_count", 0),
        "n_shared_experts": meta.count("expert_shared_count", 0) or None,
        "routed_scaling_factor": meta.number("expert_weights_scale", 1.0),
        "norm_topk_prob": meta.get("expert_weights_norm", bool, False),
        "n_group": groups,
        "topk_group": meta.count("expert_group_used_count", 1),
        "topk_method": method,
        "scoring_func": "sigmoid" if sigmoid else "softmax",
        "hidden_act": "silu",
        "attention_bias": False,
    }


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(names.LLAMA, "llama", "LlamaForCausalLM", _llama),
    "qwen2": Architecture(names.QWEN2, "qwen2", "Qwen2ForCausalLM", _qwen),
    "qwen3": Architecture(names.QWEN3, "qwen3", "Qwen3ForCausalLM", _qwen),
    "qwen2moe": Architecture(names.QWEN2_MOE, "qwen2_moe", "Qwen2MoeForCausalLM", _qwen2_moe),
    "qwen3moe": Architecture(names.QWEN3_MOE, "qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe),
    "gemma3": Architecture(names.GEMMA3, "gemma3_text", "Gemma3ForCausalLM", _gemma3),
    "gpt-oss": Architecture(names.GPT_OSS, "gpt_oss", "GptOssForCausalLM", _gpt_oss),
    "glm4": Architecture(names.GLM4, "glm4", "Glm4ForCausalLM", _glm4),
    "deepseek2": Architecture(names.DEEPSEEK2, "deepseek_v3", "DeepseekV3ForCausalLM", _deepseek2),
}
"""The architectures that are read, by general.architecture."""
