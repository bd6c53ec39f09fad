#!/usr/bin/env python3
"""Writes slices of published models that one GPU holds: configurations with the first layers alone, and a tokenizer.

    python benchmark/peers/slices.py --out DIR [--only NAME,NAME]

Prints the directories. Widths, experts and formats are the published ones. `compare.py --model DIR/NAME
--peer-flags="--mem-fraction-static 0.6 --trust-remote-code"` then runs this server and upstream with random weights:
upstream's own share for caches leaves no memory for long prompts of few layers, and a type of configuration that
transformers does not know comes with its class, as in the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Config = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "test" / "srt" / "kernels" / "published"
TOKENIZER = ROOT / "python" / "sglang" / "embedded" / "tiny"
LAYERS: Mapping[str, int] = {
    "MiMo-V2-Flash": 6,
    "Hy3-FP8": 6,
    "Step-3.5-Flash-FP8": 8,
    "Llama-4-Scout-17B-16E-Instruct": 6,
}
"""As many of each as take 20 to 35 GB. MiMo's sixth and Step's fifth layer are the second of full attention, Scout's
fourth the first without rotary embedding."""
CLASSES: Mapping[str, str] = {"mimo_v2_flash": "MiMoV2FlashConfig"}
"""By type of configuration, where transformers has none: the class that the directory brings."""
MODULE = "slice_config"
CLASS = '''"""A configuration as its file has it."""

from transformers import PretrainedConfig


class {class_name}(PretrainedConfig):
    model_type = "{model_type}"
'''
TEXT_ALONE = {"llama4": ("Llama4ForCausalLM", "llama4_text")}
"""Architecture and type of the text, where a configuration holds a tower as well."""


def text_of(config: Config) -> Config:
    """The configuration of the text alone."""
    if config["model_type"] not in TEXT_ALONE:
        return config
    architecture, model_type = TEXT_ALONE[config["model_type"]]
    return {**config["text_config"], "architectures": [architecture], "model_type": model_type, "dtype": "bfloat16"}


def cut(config: Config, layers: int) -> Config:
    """The first layers alone, without layers that predict more tokens. A list with an entry for each layer, or more,
    is cut as well."""
    total = config["num_hidden_layers"]
    short = {k: v[:layers] if isinstance(v, list) and len(v) >= total else v for k, v in config.items()}
    if isinstance(every := short.get("moe_layers_enum"), str):
        short["moe_layers_enum"] = ",".join(i for i in every.split(",") if int(i) < layers)
    return short | {"num_hidden_layers": layers} | ({"num_nextn_predict_layers": 0} if _PREDICTS in short else {})


_PREDICTS = "num_nextn_predict_layers"


def write(name: str, folder: Path) -> Path:
    """Writes the slice of a model to a directory of its name. Returns it."""
    config = cut(text_of(json.loads((PUBLISHED / name / "config.json").read_text())), LAYERS[name])
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    if (class_name := CLASSES.get(model_type := config["model_type"])) is not None:
        config["auto_map"] = {"AutoConfig": f"{MODULE}.{class_name}"}
        (path / f"{MODULE}.py").write_text(CLASS.format(class_name=class_name, model_type=model_type))
    (path / "config.json").write_text(json.dumps(config, indent=1))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / file, path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(LAYERS))
    options = parser.parse_args()
    for name in options.only.split(","):
        print(write(name, options.out))


if __name__ == "__main__":
    main()
