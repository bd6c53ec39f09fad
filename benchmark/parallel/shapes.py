#!/usr/bin/env python3
"""Writes a few layers of models that need several GPUs, in their published shapes and formats, for `parts.py` and
`all_gpus.py`: config.json files with the tokenizer of the embedded model, whose weights servers draw at random.

    python benchmark/parallel/shapes.py --out DIR
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "test" / "srt" / "kernels"
TOKENIZER = ROOT / "python" / "sglang" / "embedded" / "tiny"
LAYERS = {
    "glm47": ("configs/glm47.json", 7),
    "kimi_k25": ("configs/kimi_k25.json", 5),
    "glm52": ("published/GLM-5.2-FP8/config.json", 6),
}
"""Of each: the file, and the dense layers that the model begins with, and four or three of experts."""


def cut(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The text model of a config.json, with its first layers and without those for multi-token prediction."""
    text = {**config, **config.get("text_config", {})}
    text.pop("text_config", None)
    text |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 0}
    if text["model_type"].startswith("kimi"):
        text["architectures"] = ["DeepseekV3ForCausalLM"]
    return {key: value for key, value in text.items() if not key.startswith("vision") and key != "auto_map"}


def write(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file, layers = LAYERS[name]
    config = cut(json.loads((CONFIGS / file).read_text()), layers)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for copied in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / copied, folder / copied)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    for name in LAYERS:
        print(write(out / name, name))


if __name__ == "__main__":
    main()
