"""Names of the formats in which models write tool calls and thoughts. `function_call.registry` says what they are."""

from __future__ import annotations

AUTO = "auto"
"""The format that the model's chat template shows."""

TOOL_CALL_PARSERS = (
    AUTO, "deepseekv3", "deepseekv31", "deepseekv32", "deepseekv4", "glm45", "glm47", "gpt-oss", "hermes", "kimi_k2",
    "llama3", "minimax-m2", "mistral", "pythonic", "qwen25", "qwen3_coder",
)  # fmt: skip
REASONING_PARSERS = (
    AUTO, "deepseek-r1", "deepseek-v3", "deepseek-v4", "glm45", "gpt-oss", "kimi", "kimi_k2", "minimax",
    "minimax-append-think", "mistral", "qwen3", "qwen3-thinking",
)  # fmt: skip
