"""Launch commands that owners of these cards published, and what stands in for the checkpoints that they name.

`published.tsv`: id, card, config (in `configs.py` or `srt/kernels`), source, flags.
"""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path

from commands.configs import dflash2_draft, laguna_draft, mimo_draft

COMMANDS = {row["id"]: row for row in csv.DictReader((Path(__file__).parent / "published.tsv").open(), delimiter="\t")}
NOT_SERVED = ("k3",)
"""Of models that are not implemented."""
OTHER_FLAWS = {
    "i40877-dsv41": "Unknown option --gpu-memory-utilization. Here that is --mem-fraction-static",
    "om-dsv4-0731": "Pass --speculative-dspark-block-size 5 or fewer",
    "v-sc-glm53f": "--dcp-size 2: entries that stand for several tokens are whole on every rank",
}
"""What messages say of commands that do not start as they are."""
MENDED = {
    "i40877-dsv41": ("--gpu-memory-utilization", "--mem-fraction-static"),
    "om-dsv4-0731": ("--speculative-dspark-block-size 7", "--speculative-dspark-block-size 5"),
    "v-sc-glm53f": ("--dcp-size 2", ""),
}
"""What these messages say to write, and instead of what."""
AS_TYPED = ("zm-fn-fp8-vllm", "zm-gemma31-vllm", "td-mimo26-vllm", "lil-fn-vllm", "lil-glm53-visual", "ft-fn")
"""Commands of other engines, of which the message says for each flag what to write here."""
STRETCHED = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 262144}
STAND_INS = {
    "rk-q397-fp8": ["--quantization", "fp8"],
    **{
        name: ["--json-model-override-args", json.dumps({"text_config": {"rope_parameters": STRETCHED}})]
        for name in ("red-fn-yaml", "uc-fn-tp2")
    },
}
"""What makes of the config what the command was for."""
BRINGS_DSPARK = {
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_markov_rank": 256,
}
"""Keys that the config of DeepSeek-V4-Flash-0731 has beside those of the model."""
DRAFTS = {
    "poolside/Laguna-XS-2.1-DFlash": laguna_draft(),
    "XiaomiMiMo/MiMo-V2.6-Flash-RL/dflash": mimo_draft(4096, 64, [0, 11, 23, 35, 47], 151675),
    "XiaomiMiMo/MiMo-V2.6-Pro-RL/dflash": mimo_draft(6144, 128, [0, 15, 31, 47, 69], 151669),
    "/model_dflash": dflash2_draft("Qwen3.6-27B-NVFP4", [1, 16, 31, 46, 61], 9, 248070),
    "incoai/GLM-5.3-Flash-DFlash2": dflash2_draft("GLM-5.3-Flash-NVFP4", [1, 11, 21, 31, 41], 8, 154820),
    "google/gemma-4-31B-it-assistant": {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": 5376,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size": 1024,
            "intermediate_size": 8192,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 4,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
            "head_dim": 256,
            "global_head_dim": 512,
            "attention_k_eq_v": True,
            "sliding_window": 1024,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size_per_layer_input": 0,
            "vocab_size": 262144,
            "rope_parameters": {
                "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            },
        },
    },
}
"""Configs of the form that such drafts have; the widths of this one are not known here."""


def draft_checkpoint(name: str, folder: Path, num_layers: int) -> str:
    """Writes a draft for a model of `num_layers`, which may be cut: of the layers that it reads, it reads those."""
    folder.mkdir()
    config = dict(DRAFTS[name])
    if "dflash_config" in config:
        read = [layer for layer in config["dflash_config"]["target_layer_ids"] if layer < num_layers]
        config["dflash_config"] = config["dflash_config"] | {"target_layer_ids": read}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def words_of(name: str, model: Path, folder: Path) -> list[str]:
    """Returns the flags of a command for a model's directory, and what makes of the model the one that it was for;
    drafts that it names are written to `folder`."""
    words = shlex.split(COMMANDS[name]["flags"])
    argv = ["--model-path", str(model)]
    text = (model / "config.json").read_text()
    config, brings_draft = json.loads(text), "dspark_block_size" in text
    inner = config.get("text_config", config)
    layers = inner.get("num_hidden_layers") or inner.get("num_layers") or 0
    if "DSPARK" in words and "--speculative-draft-model-path" not in words and not brings_draft:
        draft = {**BRINGS_DSPARK, "dspark_target_layer_ids": [layers - 3, layers - 2, layers - 1]}
        argv += ["--json-model-override-args", json.dumps(draft)]
    words = [draft_checkpoint(word, folder, layers) if word in DRAFTS else word for word in words]
    return [*argv, *words, *STAND_INS.get(name, [])]
