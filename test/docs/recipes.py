"""The commands of the recipes, and the configs that they are for."""

from __future__ import annotations

import math
import re
import shlex

from docs.commands import ROOT

RECIPES = (ROOT / "docs" / "recipes.md").read_text()
CONFIGS = {
    "GLM-4.7-FP8": "glm47",
    "GLM-4.7-Flash": "GLM-4.7-Flash",
    "GLM-4.1V-9B-Thinking": "GLM-4.1V-9B-Thinking",
    "Kimi-K2.5 (INT4)": "kimi_k25",
    "Kimi-K2.6-NVFP4": "kimi_k26_nvfp4",
    "Kimi-K2-Thinking-NVFP4": "kimi_k2_thinking",
    "Kimi-Linear-48B-A3B": "Kimi-Linear-48B-A3B-Instruct",
    "Kimi-Linear-48B-A3B (FP8)": "Kimi-Linear-48B-A3B-FP8",
    "Kimi-Linear-48B-A3B (NVFP4)": "Kimi-Linear-48B-A3B-NVFP4",
    "Ling-3.0-flash-FP8": "Ling-3.0-flash-FP8",
    "Ling-3.0-flash-MXFP4": "Ling-3.0-flash-MXFP4",
    "Ling-3.0-flash-int4": "Ling-3.0-flash-int4",
    "Ling-3.0-tiny": "Ling-3.0-tiny",
    "Naive-N0.5-Flash-FP8": "Naive-N0.5-Flash-FP8",
    "Laguna-XS.2": "Laguna-XS.2",
    "Inkling-Small-NVFP4 (text)": "Inkling-Small-NVFP4",
    "Inkling-Small (text)": "Inkling-Small",
    "Inkling-NVFP4 (text)": "Inkling-NVFP4",
    "Llama-4-Scout": "Llama-4-Scout-17B-16E-Instruct",
    "Llama-4-Scout-NVFP4": "Llama-4-Scout-NVFP4",
    "Llama-4-Maverick-FP8": "Llama-4-Maverick-FP8",
    "MiMo-V2.5 (text)": "MiMo-V2.5",
    "MiMo-V2.5-Pro-NVFP4-MXFP8": "MiMo-V2.5-Pro-NVFP4-MXFP8",
    "MiMo-V2.6-Flash-RL": "MiMo-V2.6-Flash-RL",
    "MiMo-V2.6-Pro-RL": "MiMo-V2.6-Pro-RL",
    "dots3-note-prev-fp8": "dots3-note-prev-fp8",
    "DeepSeek-V3, R1 (FP8)": "DeepSeek-R1",
    "DeepSeek-V3.1-NVFP4": "deepseek_v31_nvfp4",
    "GPT-OSS-120B": "gpt_oss",
    "Qwen3.5-35B-A3B": "qwen35",
    "Qwen3.5-122B-A10B-NVFP4": "Qwen3.5-122B-A10B-NVFP4",
    "Qwen3.5-397B-A17B-NVFP4": "Qwen3.5-397B-A17B-NVFP4",
    "Qwen3.8-Flash-Next-NVFP4": "qwen38_flash_next_nvfp4",
    "Qwen3-0.6B": "Qwen3-0.6B",
    "Qwen3-8B": "Qwen3-8B",
    "Ministral-3-8B (text)": "Ministral-3-8B",
    "Qwen3-30B-A3B": "Qwen3-30B-A3B",
    "MiniMax-M2.5 (FP8)": "minimax_m2",
    "MiniMax-M2.5-NVFP4": "MiniMax-M2.5-NVFP4",
    "MiniMax-M3-NVFP4": "minimax_m3_nvfp4",
    "Gemma-4-31B-IT-NVFP4": "Gemma-4-31B-IT-NVFP4",
    "Gemma-4-26B-A4B-NVFP4": "Gemma-4-26B-A4B-NVFP4",
    "Nemotron-3-Nano-30B-A3B-NVFP4": "NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4",
    "Nemotron-3-Super-120B-A12B-NVFP4": "NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4",
    "Nemotron-Labs-3-Puzzle-75B-A9B-NVFP4": "Nemotron-Labs-3-Puzzle-75B-A9B-NVFP4",
    "DeepSeek-V3.2": "deepseek_v32",
    "DeepSeek-V4-Flash": "deepseek_v4",
    "DeepSeek-V4-Flash-Vision-Exp": "DeepSeek-V4-Flash-Vision-Exp",
    "DeepSeek-V4.1-Flash": "DeepSeek-V4.1-Flash",
    "Hy3-FP8": "Hy3-FP8",
    "Hy3-NVFP4": "Hy3-NVFP4",
    "Muse-Glimmer-30B": "Muse-Glimmer-30B",
    "Muse-Spark-Open-816B-A42B-NVFP4": "Muse-Spark-Open-816B-A42B-NVFP4",
    "Step-3.5-Flash-FP8": "Step-3.5-Flash-FP8",
    "Step-3.7-Flash-NVFP4": "Step-3.7-Flash-NVFP4",
    "Step-5-Preview": "Step-5-Preview",
    "GLM-5.3-NVFP4": "GLM-5.3-NVFP4",
    "GLM-5-NVFP4": "GLM-5-NVFP4",
    "GLM-5.3-Flash-NVFP4": "GLM-5.3-Flash-NVFP4",
}
ROWS = {
    cells[1]: cells
    for line in RECIPES.splitlines()
    if len(cells := [cell.strip() for cell in line.split("|")]) == 7 and cells[2].isdigit()
}


OTHER_NAMES = {
    "Kimi-Linear-48B-A3B": "Kimi-Linear-48B-A3B-Instruct",
    "Llama-4-Scout": "Llama-4-Scout-17B-16E-Instruct",
    "Llama-4-Scout-NVFP4": "Llama-4-Scout-17B-16E-Instruct-FP4",
    "Llama-4-Maverick-FP8": "Llama-4-Maverick-17B-128E-Instruct-FP8",
    "DeepSeek-V3, R1 (FP8)": "DeepSeek-R1",
    "GPT-OSS-120B": "gpt-oss-120b",
    "Ministral-3-8B (text)": "Ministral-3-8B-Reasoning-2512",
    "Nemotron-3-Nano-30B-A3B-NVFP4": "NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4",
    "Nemotron-3-Super-120B-A12B-NVFP4": "NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4",
    "Nemotron-Labs-3-Puzzle-75B-A9B-NVFP4": "NVIDIA-Nemotron-Labs-3-Puzzle-75B-A9B-NVFP4",
}
"""Of checkpoints in commands, where the table calls the model otherwise."""
NO_COMMAND = {
    "GLM-5.3-NVFP4",
    "Ling-3.0-flash-MXFP4",
    "Kimi-Linear-48B-A3B (FP8)",
    "Kimi-Linear-48B-A3B (NVFP4)",
    "Qwen3-30B-A3B",
    "DeepSeek-V3.2",
    "MiMo-V2.5-Pro-NVFP4-MXFP8",
    "Hy3-NVFP4",
    "Step-3.7-Flash-NVFP4",
    "GLM-5-NVFP4",
}
"""Rows of formats for which the page has no command of its own: they have the layout alone."""


def recipe_flags(model: str) -> list[str] | None:
    """Flags of the first command for a row of the table, but those of drafts; None where the page has none."""
    name, cards = OTHER_NAMES.get(model, model.split(" (")[0]), int(ROWS[model][2])
    for line in re.findall("^sglang serve .*$", RECIPES, re.MULTILINE):
        flags = shlex.split(line.partition("#")[0])[2:]
        sizes = [int(flags[flags.index(flag) + 1]) for flag in ("--tp", "--pp-size") if flag in flags]
        if flags[0] == "--model-path" and flags[1].endswith(f"/{name}") and math.prod(sizes) == cards:
            draft = next((i for i, flag in enumerate(flags) if flag.startswith("--speculative")), len(flags))
            end = next((i for i in range(draft, len(flags), 2) if not flags[i].startswith("--spec")), len(flags))
            return flags[2:draft] + flags[end:]
    return None
