"""Writes the embedded model: a small random mixture of experts with a real tokenizer and chat template.

    python scripts/tiny_model/make_random.py [OUTPUT_DIR]

The same seed gives the same files. A trained model can take its place: sglang.embedded names the directory.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from corpus import texts
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).parent
DEFAULT_OUTPUT = HERE.parents[1] / "python" / "sglang" / "embedded" / "tiny"

VOCAB_SIZE = 2048
CONTEXT = 4096
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Single tokens that stay visible in decoded text."""

WORD = r" ?\p{L}+| ?[^\s\p{L}\p{N}]+|\p{N}|\s+"
"""A word or a run of punctuation takes the space before it along; digits stand alone."""


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS) - len(MARKERS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKERS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise SystemExit(f"the corpus gives {tokenizer.get_vocab_size()} tokens instead of {VOCAB_SIZE}; add text")
    return tokenizer


def make_config(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": CONTEXT,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "router_aux_loss_coef": 0.001,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
    }


def make_generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 50,
        "eos_token_id": [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")],
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
    }


def make_tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>"],
        "clean_up_tokenization_spaces": False,
    }


def make_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Checkpoint tensors under their published names; projections keep the scale of what passes through them."""
    generator = torch.Generator().manual_seed(seed)
    hidden, head_dim = config["hidden_size"], config["head_dim"]

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) / math.sqrt(columns)).bfloat16()

    weights = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for norm, size in (
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
            ("self_attn.q_norm", head_dim),
            ("self_attn.k_norm", head_dim),
        ):
            weights[f"{prefix}{norm}.weight"] = torch.ones(size, dtype=torch.bfloat16)
        query, key_value = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
        weights[f"{prefix}self_attn.q_proj.weight"] = matrix(query, hidden)
        weights[f"{prefix}self_attn.k_proj.weight"] = matrix(key_value, hidden)
        weights[f"{prefix}self_attn.v_proj.weight"] = matrix(key_value, hidden)
        weights[f"{prefix}self_attn.o_proj.weight"] = matrix(hidden, query)
        weights[f"{prefix}mlp.gate.weight"] = matrix(config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            inner = config["moe_intermediate_size"]
            weights[f"{prefix}mlp.experts.{expert}.gate_proj.weight"] = matrix(inner, hidden)
            weights[f"{prefix}mlp.experts.{expert}.up_proj.weight"] = matrix(inner, hidden)
            weights[f"{prefix}mlp.experts.{expert}.down_proj.weight"] = matrix(hidden, inner)
    return weights


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the embedded random model.")
    parser.add_argument("output", nargs="?", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)

    tokenizer = make_tokenizer()
    tokenizer.save(str(args.output / "tokenizer.json"))
    config = make_config(tokenizer)
    write_json(args.output / "config.json", config)
    write_json(args.output / "generation_config.json", make_generation_config(tokenizer))
    write_json(args.output / "tokenizer_config.json", make_tokenizer_config())
    shutil.copyfile(HERE / "chat_template.jinja", args.output / "chat_template.jinja")
    weights = make_weights(config, args.seed)
    save_file(weights, str(args.output / "model.safetensors"), metadata={"format": "pt"})
    (args.output / "model.safetensors").chmod(0o644)
    print(f"{args.output}: {sum(w.numel() for w in weights.values()):,} parameters, {VOCAB_SIZE} tokens")


if __name__ == "__main__":
    main()
