"""Names of the formats in which models write tool calls and reasoning. `function_call.registry` implements them."""

from __future__ import annotations

AUTO = "auto"
"""Detects the format from the model's chat template."""

TOOL_CALL_PARSERS = (
    AUTO, "apertus2509", "deepseekv3", "deepseekv31", "deepseekv32", "deepseekv4", "deepseekv41", "dots", "gemma4",
    "gigachat3", "gigachat35", "glm45", "glm47", "gpt-oss", "hermes", "hunyuan", "hunyuan-opensource", "hy_v4",
    "inkling", "interns1", "iquest_q1", "kimi_k2", "lfm2", "llama3", "mimo", "minicpm5", "minimax-m2", "minimax-m3",
    "mistral", "muse", "pythonic", "qwen25", "qwen3_coder", "step3",
)  # fmt: skip
REASONING_PARSERS = (
    AUTO, "apertus2509", "deepseek-r1", "deepseek-v3", "deepseek-v4", "gemma4", "glm45", "gpt-oss", "hunyuan",
    "hunyuan-opensource", "hy_v4", "inkling", "kimi", "kimi_k2", "minimax", "minimax-append-think", "minimax-m3",
    "mistral", "muse", "qwen3", "qwen3-thinking",
)  # fmt: skip
