"""Published configs cut to their first layers: real widths, experts and formats, on one GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from commands.processors import write_beside
from sglang.srt.plan.layer_spec import LayerSpec
from sglang.srt.plan.model_description import describe_model

Config = dict[str, Any]

MAX_LAYERS = 8
COUNTS = ("num_hidden_layers", "num_layers")
LAYER_INDICES = ("full_attn_layers", "kda_layers")
"""Lists of numbers of layers, counted from 1; other lists have an entry a layer."""
DROPPED = ("num_kv_shared_layers",)


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
    return min(max(2, last_new + 1), MAX_LAYERS)


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


def write_cut(source: Path, folder: Path) -> Path:
    """Writes a cut checkpoint directory without weights: the config, and what lies beside it. Returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = cut(json.loads((source / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(config))
    if (quantization := source / "hf_quant_config.json").exists():
        (folder / quantization.name).write_text(quantization.read_text())
    write_beside(config, folder)
    return folder
