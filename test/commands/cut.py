"""Published configs cut to their first layers: real widths, experts and formats, on one GPU."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from commands.processors import write_beside
from sglang.srt.blocks.ngram_embedding.spec import primes_from
from sglang.srt.plan.layer_spec import LayerSpec
from sglang.srt.plan.model_description import describe_model
from sglang.srt.utils.token_texts import text_numbers

Config = dict[str, Any]

MAX_LAYERS = 8
COUNTS = ("num_hidden_layers", "num_layers")
LAYER_INDICES = ("full_attn_layers", "kda_layers")
"""Lists of numbers of layers, counted from 1; other lists have an entry a layer."""
DROPPED = ("num_kv_shared_layers",)
SMALL_TABLE = 1 << 16
"""Rows of a head's table of n-grams in a cut model: a published one takes tens of GiB of page-locked main memory."""


def cut(config: Config, layers: int | None = None) -> Config:
    """Returns the config of the first layers: those until every kind of layer has come, or MAX_LAYERS. Lists, patterns
    and names with an entry a layer are cut as well; layers behind the last one, which draft, stay."""
    text = config.get("text_config", config)
    total = next(text[key] for key in COUNTS if key in text)
    count = min(total, layers or layers_of_every_kind(config))
    return _cut(config, total, count)


def layers_of_every_kind(config: Config) -> int:
    """Returns how many of the first layers have all kinds of mixers and feed-forward blocks, at least 2."""
    layers = describe_model(config, None, False).layers
    kinds = [_kind(layer) for layer in layers]
    last_new = max(kinds.index(kind) for kind in set(kinds))
    return min(max(2, last_new + 1), most_layers(config))


def most_layers(config: Config) -> int:
    """Returns MAX_LAYERS, or as many as make whole groups of a model whose last group may be incomplete (Ling 3.0)."""
    group = config.get("text_config", config).get("layer_group_size") or 1
    return int(MAX_LAYERS // group * group)


def _kind(layer: LayerSpec) -> tuple[object, ...]:
    return layer.mixer, layer.ffn


def _cut(value: Any, total: int, count: int, key: str = "") -> Any:
    if isinstance(value, dict):
        if key == "vision_config":
            return value
        short = {k: _cut(v, total, count, k) for k, v in value.items() if k not in DROPPED}
        return short
    if key in COUNTS and value == total:
        return count
    if key in LAYER_INDICES and isinstance(value, list):
        return [i for i in value if i <= count]
    if key.endswith("target_layer_ids") and isinstance(value, list):
        return list(range(count - len(value), count))
    if key == "moe_layers_enum" and isinstance(value, str):
        return ",".join(i for i in value.split(",") if int(i) < count)
    if isinstance(value, list | str) and len(value) >= total > 2 and key not in ("architectures",):
        behind = value[total:] if isinstance(value, list) and len(value) <= total + 8 else value[:0]
        if isinstance(value, str) and not set(value) <= set("M*E-|"):
            return value
        if isinstance(value, list) and value and isinstance(value[0], str) and "." in value[0]:
            return value
        return value[:count] + behind
    return value


def with_small_tables(config: Config, folder: Path) -> Config:
    """Returns the config with tables of n-grams of few rows, which a plain host can pin, for the tokenizer in
    `folder`."""
    small = {
        key: with_small_tables(value, folder) if isinstance(value, dict) else value for key, value in config.items()
    }
    if "ngram_vocab_size_base" in small:
        small["ngram_vocab_size_base"] = SMALL_TABLE
    if "engram_vocab_size" in small:
        heads = small["engram_n_heads"] * (small["engram_max_ngram_size"] - 1)
        primes = primes_from(SMALL_TABLE)
        texts = text_numbers(Tokenizer.from_file(str(folder / "tokenizer.json")), small["vocab_size"])
        small |= {
            "engram_vocab_size": SMALL_TABLE,
            "engram_num_embeddings": [sum(itertools.islice(primes, heads)) for _ in small["engram_num_embeddings"]],
            "engram_compressed_vocab_size": int(texts.max()) + 1,
        }
    return small


def write_cut(source: Path, folder: Path) -> Path:
    """Writes a cut checkpoint directory without weights: the config, and what lies beside it. Returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = cut(json.loads((source / "config.json").read_text()))
    if (quantization := source / "hf_quant_config.json").exists():
        (folder / quantization.name).write_text(quantization.read_text())
    write_beside(config, folder)
    (folder / "config.json").write_text(json.dumps(with_small_tables(config, folder)))
    return folder
