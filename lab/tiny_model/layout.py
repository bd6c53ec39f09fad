"""The files of the embedded model besides its weights: tokenizer, configuration, chat template."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tiny_model.corpus import texts
from tiny_model.lookup import filler
from tiny_model.mixture import TASKS, draw
from tiny_model.render import TEMPLATE_FILE, answer_text, prompt_text
from tiny_model.words import CITIES, NAMES, WORDS, facts

TOKENIZER_FILE = Path(__file__).with_name("tokenizer.json")
"""Kept, not made anew for every run: a tokenizer that follows each change of the data would orphan trained weights."""

VOCAB_SIZE = 4096
CONTEXT = 4096
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "｜DSML｜",
)
"""Single tokens that stay visible in decoded text, where parsers look for them."""

IMAGE_TOKENS = {"À": "<|vision_start|>", "Á": "<|vision_end|>", "õ": "<|image_pad|>"}
"""Tokens of bytes that no text has (0xC0, 0xC1 and 0xF5 are not in UTF-8), and the names that they have where the model
sees: the ids of all others stay what they are."""
IMAGE_SECTIONS = (12, 10, 10)
"""Frequencies of a head that turn by the time, the row and the column of a token."""
VISION_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_vl_moe",
    "depth": 4,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 8,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 64,
    "out_hidden_size": 256,
    "deepstack_visual_indexes": [1, 3],
    "hidden_act": "gelu_pytorch_tanh",
}

WORD = r" ?\p{L}+| ?[^\s\p{L}\p{N}]+|\p{N}|\s+"
"""A word or a run of punctuation takes the space before it along; digits stand alone."""

PROBLEMS_A_TASK = 400


def training_texts(seed: int = 0) -> Iterator[str]:
    """General text, samples of every task, and the words that problems are made of, alone and after a space."""
    yield from texts(seed)
    rng = random.Random(seed)
    for task in TASKS:
        for _ in range(PROBLEMS_A_TASK if "needle" not in task else PROBLEMS_A_TASK // 10):
            problem = draw(task, rng)
            yield prompt_text(problem, thinking=True) + answer_text(problem, thinking=True)
    for _ in range(2000):
        yield filler(rng)
    for word in (*WORDS, *NAMES, *CITIES):
        yield f"{word}, {word}\n" * 200
    for table in facts().values():
        for pair in table["pairs"].items():
            yield from (f" {word}." * 60 for word in pair)


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
    tokenizer.train_from_iterator(_without_markers(training_texts()), trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKERS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise SystemExit(f"the corpus gives {tokenizer.get_vocab_size()} tokens instead of {VOCAB_SIZE}; add text")
    return tokenizer


def _without_markers(source: Iterator[str]) -> Iterator[str]:
    """So that no merges are spent on what will be a token of its own."""
    for text in source:
        for marker in (*SPECIAL_TOKENS, *MARKERS):
            text = text.replace(marker, " ")
        yield text


def make_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """A dense layer, then mixtures of experts. All projections are multiples of 128, which the block formats need."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
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
        "router_aux_loss_coef": 0.01,
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


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_files(output: Path) -> Tokenizer:
    """Everything but the weights, the same bytes every time."""
    output.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(TOKENIZER_FILE, output / TOKENIZER_FILE.name)
    tokenizer = Tokenizer.from_file(str(TOKENIZER_FILE))
    write_json(output / "config.json", make_config(tokenizer))
    write_json(output / "generation_config.json", make_generation_config(tokenizer))
    write_json(output / "tokenizer_config.json", make_tokenizer_config())
    shutil.copyfile(TEMPLATE_FILE, output / "chat_template.jinja")
    return tokenizer
