"""Writes models in GGUF with the `gguf` package, and changes tensors as converters do."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from safetensors.torch import load_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from sglang.srt.configs.gguf.word_rules import WORD_RULES

Tensors = dict[str, torch.Tensor]
TypeOf = Callable[[str], str]
"""The type that a tensor of the file is stored in, by its name there."""

ARCHITECTURES: Mapping[str, gguf.MODEL_ARCH] = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
}


def in_f32(name: str) -> str:
    return "F32"


def convert(
    folder: Path, path: Path, type_of: TypeOf = in_f32, more: Callable[[Any], None] = lambda writer: None
) -> Path:
    """Writes the model directory `folder` as the file `path`. more: adds further metadata."""
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _write_config(writer, config, arch)
    more(writer)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, tensor in _changed(load_file(folder / "model.safetensors"), config).items():
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert known is not None, name
        add_tensor(writer, known, tensor, type_of(known) if tensor.dim() > 1 else "F32")
    return finish(writer, path)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write(path: Path, more: Callable[[Any], None], rows: int = 2048) -> Path:
    """A model with nothing but an embedding, and the metadata that `more` adds."""
    writer = gguf.GGUFWriter(path, "llama")
    for add in ("block_count", "context_length", "embedding_length", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{add}")({"block_count": 1, "context_length": 64, "head_count": 1}.get(add, 32))
    writer.add_layer_norm_rms_eps(1e-5)
    more(writer)
    add_tensor(writer, "token_embd.weight", torch.zeros(rows, 32), "F32")
    return finish(writer, path)


def split(path: Path, stem: Path, count: int) -> list[Path]:
    """Writes the model of a file as `count` parts."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    source = gguf.GGUFReader(path)
    parts = []
    for i in range(count):
        parts.append(stem.with_name(f"{stem.name}-{i + 1:05}-of-{count:05}.gguf"))
        writer = gguf.GGUFWriter(parts[-1], "llama")
        for key, field in source.fields.items() if i == 0 else ():
            if key.startswith(("llama.", "tokenizer.")):
                writer.add_key_value(key, field.contents(), field.types[0], *field.types[1:2])
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(source.tensors))
        for tensor in source.tensors[i::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        finish(writer, parts[-1])
    return parts


def add_tensor(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, kind: str) -> None:
    values = tensor.float().contiguous().numpy()
    if kind == "F32" or values.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]:
        writer.add_tensor(name, values)
    elif kind == "F16":
        writer.add_tensor(name, values.astype(np.float16))
    else:
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, blocks_of(values, kind), raw_dtype=number)


def blocks_of(values: np.ndarray, kind: str) -> np.ndarray:
    """Quantizes values; random blocks of types that the package cannot write."""
    number = gguf.GGMLQuantizationType[kind]
    try:
        blocks = gguf.quantize(values, number)
        if kind == "Q4_0":
            blocks[..., ::18] &= 0xF8  # scales that are the same in bfloat16
        return blocks
    except NotImplementedError:
        return random_blocks(kind, values.shape)


SCALES: Mapping[str, tuple[int, ...]] = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip
"""Where a block has numbers in fp16."""


def random_blocks(kind: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Blocks of random bits whose scales are finite and of the size of weights."""
    rng = np.random.default_rng(seed)
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (math.prod(shape) // elements, size), dtype=np.uint8)
    for at in SCALES[kind]:
        scales = rng.uniform(-0.01, 0.01, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(118, 124, len(blocks))
    return blocks.reshape(*shape[:-1], shape[-1] // elements * size)


def _write_config(writer: gguf.GGUFWriter, config: Mapping[str, Any], arch: gguf.MODEL_ARCH) -> None:
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    heads = config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(full.get("rope_theta", config.get("rope_theta", 10000.0)))
    writer.add_vocab_size(config["vocab_size"])
    if full.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(full["factor"])
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
        if full.get("mscale_all_dim"):
            writer.add_rope_scaling_yarn_log_mul(0.1 * full["mscale_all_dim"])
    if full.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(full["factor"])
    if arch != gguf.MODEL_ARCH.DEEPSEEK2:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        share = full.get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(int(config["head_dim"] * share))
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    _write_experts(writer, config)
    if arch == gguf.MODEL_ARCH.DEEPSEEK2:
        _write_latent(writer, config)


def _write_experts(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    experts = max(config.get(key) or 0 for key in ("n_routed_experts", "num_local_experts", "num_experts"))
    if not experts:
        return
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    if config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _write_latent(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    is_v3 = config["model_type"] == "deepseek_v3"
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
    writer.add_value_length(config["kv_lora_rank"])
    writer.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if is_v3 else gguf.ExpertGatingFuncType.SOFTMAX)
    if config.get("n_group"):
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def _changed(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """The tensors as the converters leave them, under the names that the package's map knows."""
    changed: Tensors = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        name = re.sub(r"model\.(.*)\.block_sparse_moe\.experts", r"\1.feed_forward.experts", name)
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name)
        if match:
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
        else:
            changed |= _change(name, tensor, config)
    return changed | {name: torch.stack([each[i] for i in range(len(each))]) for name, each in experts.items()}


def _change(name: str, tensor: torch.Tensor, config: Mapping[str, Any]) -> Tensors:
    kind, heads = config["model_type"], config["num_attention_heads"]
    if kind in ("llama", "mixtral") and ".q_proj" in name:
        return {name: _in_pairs(tensor, heads)}
    if kind in ("llama", "mixtral") and ".k_proj" in name:
        return {name: _in_pairs(tensor, config["num_key_value_heads"])}
    if kind == "gemma3_text" and "norm" in name:
        return {name: tensor + 1}
    if name.endswith("shared_expert_gate.weight"):
        return {name: tensor.squeeze(0)}
    if name.endswith("e_score_correction_bias"):
        return {name.replace("_bias", ".bias"): tensor}
    if name.endswith("sinks"):
        return {f"{name}.weight": tensor}
    if ".kv_b_proj." in name:
        parts = tensor.view(heads, -1, tensor.shape[-1]).split([config["qk_nope_head_dim"], config["v_head_dim"]], 1)
        return {name.replace("kv_b", "k_b"): parts[0].transpose(1, 2), name.replace("kv_b", "v_b"): parts[1]}
    if kind == "gpt_oss" and ".experts." in name:
        return _gpt_oss_experts(name, tensor)
    return {name: tensor}


def _gpt_oss_experts(name: str, tensor: torch.Tensor) -> Tensors:
    leaf = ".bias" if name.endswith("_bias") else ".weight"
    tensor = tensor.transpose(1, 2) if leaf == ".weight" else tensor
    module = name.removesuffix("_bias")
    if not module.endswith("gate_up_proj"):
        return {module + leaf: tensor}
    return {module.replace("gate_up", part) + leaf: tensor[:, i::2] for i, part in enumerate(("gate", "up"))}


def _in_pairs(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Moves the two dims of a head that rotate together next to each other."""
    return rows.view(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


# --- tokenizers ------------------------------------------------------------------------------------------------------

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens."""
TEXTS = [
    "Hello world, it's 2026!\n  The end.",
    "  two  spaces\tand\ttabs \r\n\r\n",
    "naïve café 日本語 🙂 e\u0301",
    "I'LL DON'T we'Ve 12345678 3.14",
    "<|im_start|>user\nhi<|im_end|>\n",
    "x = {'a': [1, 2]}  # comment/path/*.py",
    "",
    " ",
    "\n\n\n",
]


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
OTHERS = ["<think>", "</think>"]


def trained(pre: str) -> tokenizers.Tokenizer:
    """A small byte-level tokenizer with the rule `pre`, as checkpoints have one."""
    rule = WORD_RULES[pre]
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=rule.ignores_merges))
    if rule.composes:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in rule.patterns]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in OTHERS])
    return tokenizer


def add_byte_level(writer: Any, tokenizer: tokenizers.Tokenizer, pre: str) -> None:
    size = tokenizer.get_vocab_size()
    tokens = [tokenizer.id_to_token(i) for i in range(size)]
    types = [CONTROL if token in SPECIAL else USER_DEFINED if token in OTHERS else NORMAL for token in tokens]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(tokenizer.token_to_id("<|im_start|>"))
    writer.add_eos_token_id(tokenizer.token_to_id("<|im_end|>"))
