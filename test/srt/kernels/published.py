"""Published configs by name: directories with nothing but config.json and hf_quant_config.json, and the files of the
golden outputs of `explain`.

Numbers are as published; names and numbers of models whose directory is short come from their model cards. The
`vision_config` of Llama 4 is as public listings of Scout's config.json and TensorRT-LLM's tests of Maverick repeat it
(`hidden_size`, `image_size` and `vision_output_dim` are not the defaults of transformers' `Llama4VisionConfig`). Of
`block_configs` in Nemotron-Labs-3-Puzzle its authors state how many blocks there are of each kind and between which
numbers their sizes lie: which layer has which is made up here, so that the weights are as many.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sglang.srt.errors import UserError
from sglang.srt.plan.layout import check_layout
from sglang.srt.plan.model_description import ModelDescription, describe_model
from sglang.srt.plan.ranks import RankLayout

HERE = Path(__file__).parent
LAYOUTS = (1, 2, 3, 4, 6, 8)
"""Tensor-parallel ranks of one host, as hosts have GPUs. What is launched with expert parallelism is launched with
fewer of those too."""


def config_files() -> dict[str, Path]:
    """The config.json of every model."""
    files = {path.parent.name: path for path in sorted((HERE / "published").glob("*/config.json"))}
    return files | {
        path.stem: path for path in sorted((HERE / "configs").glob("*.json")) if "hf_quant" not in path.name
    }


def checkpoint(name: str, folder: Path) -> Path:
    """A directory as published, but for its weights; made in `folder` where there is none."""
    config = config_files()[name]
    if config.name == "config.json":
        return config.parent
    written = json.loads(config.read_text())
    if isinstance(written.get("quantization_config", {}).get("quantized_layers"), list):
        written["quantization_config"] = in_full(written["quantization_config"])
    (folder / "config.json").write_text(json.dumps(written))
    modelopt = config.with_name(f"{name}.hf_quant_config.json")
    if modelopt.exists():
        shutil.copy(modelopt, folder / "hf_quant_config.json")
    return folder


def module_names(templates: list[str | list[Any]]) -> list[str]:
    names: list[str] = []
    for entry in templates:
        if isinstance(entry, str):
            names.append(entry)
            continue
        template, layers, experts = entry
        names += [template.format(layer, e) for layer in layers for e in range(max(1, experts))]
    return names


def in_full(quantization: dict[str, Any]) -> dict[str, Any]:
    written = dict(quantization)
    for key in written.keys() & {"ignore", "exclude_modules"}:
        written[key] = module_names(written[key])
    if "quantized_layers" in written:
        written["quantized_layers"] = {
            name: quant for quant, templates in written["quantized_layers"] for name in module_names(templates)
        }
    for group in written.get("config_groups", {}).values():
        group["targets"] = module_names(group["targets"])
    return written


def hybrid_checkpoint(name: str, folder: Path) -> Path:
    """The same for models whose configs, with lists of modules written short, are in one file."""
    files = json.loads((HERE / "configs" / "hybrids.json").read_text())[name]
    if "quantization_config" in files["config"]:
        files["config"]["quantization_config"] = in_full(files["config"]["quantization_config"])
    (folder / "config.json").write_text(json.dumps(files["config"]))
    if "hf_quant_config" in files:
        files["hf_quant_config"]["quantization"] = in_full(files["hf_quant_config"]["quantization"])
        (folder / "hf_quant_config.json").write_text(json.dumps(files["hf_quant_config"]))
    return folder


def every_name() -> list[str]:
    """Of all models whose config is here."""
    hybrids = json.loads((HERE / "configs" / "hybrids.json").read_text())
    return sorted({*config_files(), *hybrids} - {"hybrids"})


def any_checkpoint(name: str, folder: Path) -> Path:
    """`checkpoint` or `hybrid_checkpoint`."""
    folder.mkdir(parents=True, exist_ok=True)
    return checkpoint(name, folder) if name in config_files() else hybrid_checkpoint(name, folder)


def configs() -> dict[str, dict[str, Any]]:
    """Of every model, without its quantization: any 16-bit checkpoint may be quantized by whoever serves it."""
    return {name: _in_16_bits(json.loads(path.read_text())) for name, path in config_files().items()}


def _in_16_bits(config: dict[str, Any]) -> dict[str, Any]:
    for part in (config, config.get("text_config", {})):
        part.pop("quantization_config", None)
    return config


def described(names: Sequence[str] = ()) -> Iterator[tuple[str, ModelDescription]]:
    """Those of known families (or those named), with the shared expert among the routed ones and beside them."""
    for name, config in configs().items():
        if names and name not in names:
            continue
        try:
            fused, apart = (describe_model(config, None, fuse) for fuse in (True, False))
        except UserError:
            continue  # of layers that are not described
        if fused.known:
            yield from ((name, model) for model in ([fused] if fused == apart else [fused, apart]))


def accepted_layouts(model: ModelDescription, sizes: Sequence[int] = LAYOUTS) -> Iterator[int]:
    for tp_size in sizes:
        try:
            check_layout(model, RankLayout(tp_size))
        except UserError:
            continue
        yield tp_size
