"""The names that `--tool-call-parser` and `--reasoning-parser` take."""

from __future__ import annotations

from typing import Any

import pytest

from sglang.srt.cli_args import flag
from sglang.srt.compat import VALUE_ALIASES
from sglang.srt.configs.output_formats import AUTO, REASONING_PARSERS, TOOL_CALL_PARSERS
from sglang.srt.entrypoints.http_errors import ApiError
from sglang.srt.entrypoints.output_formats import _name
from sglang.srt.errors import UserError
from sglang.srt.function_call.registry import REASONING_FORMATS, TOOL_CALL_FORMATS
from sglang.srt.server_args import ServerArgs

FORMATS: dict[str, Any] = {"tool_call_parser": TOOL_CALL_FORMATS, "reasoning_parser": REASONING_FORMATS}
UPSTREAM_NAMES = {
    "tool_call_parser": """apertus2509 beam cohere_command4 deepseekv3 deepseekv31 deepseekv32 deepseekv4 deepseekv41
        dots gemma4 gigachat3 gigachat35 glm glm45 glm47 gpt-oss hermes hunyuan inkling interns1 iquest_q1 k2_horizon
        kimi_k2 kimi_k3 lfm2 ling3 llama3 mimo minicpm5 minimax-m2 minimax-m3 mistral muse nanbeige poolside_v1 pythonic
        qwen qwen25 qwen3_coder response_template spark25 step3 step3p5 trinity""",
    "reasoning_parser": """apertus2509 beam cohere_command4 deepseek-r1 deepseek-v3 deepseek-v4 deepseek-v41 dots gemma4
        gigachat35 glm45 gpt-oss granite_thinking_parser hunyuan inkling interns1 iquest_q1 k2_horizon kimi kimi_k2
        kimi_k3 ling3 mimo minimax minimax-append-think minimax-m3 mistral muse nanbeige nemotron_3 poolside_v1 qwen3
        qwen3-thinking response_template step3 step3p5""",
}
"""Of SGLang 0.5.23."""
OTHER_NAMES = {
    "tool_call_parser": "qwen3 deepseek-v41 step5",
    "reasoning_parser": "step5 granite trinity lfm2 minicpm5 gigachat3",
}


def test_flags_name_every_format() -> None:
    assert set(TOOL_CALL_PARSERS) == {AUTO, *TOOL_CALL_FORMATS}
    assert set(REASONING_PARSERS) == {AUTO, *REASONING_FORMATS}


NAMES = [(field, name) for field in FORMATS for name in f"{UPSTREAM_NAMES[field]} {OTHER_NAMES[field]}".split()]
REFUSED = {"beam", "cohere_command4", "k2_horizon", "kimi_k3", "response_template"}
"""Formats of models that are not served."""


@pytest.mark.parametrize(("field", "name"), NAMES)
def test_names_of_other_releases(field: str, name: str) -> None:
    """Each is a format that is read, or is refused with what to do."""
    given = ["--model-path", "m", flag(field), name]
    if name in REFUSED or (field, name) == ("reasoning_parser", "gigachat3"):
        with pytest.raises(UserError, match=f"does not read the format {name} yet.*{flag(field)} auto"):
            ServerArgs.from_cli(given)
    else:
        assert getattr(ServerArgs.from_cli(given), field) in FORMATS[field]


def test_names_in_requests() -> None:
    """Of whole texts that are parsed on request."""
    for field, formats in FORMATS.items():
        assert _name(field, "mimo", None, formats) in formats
        with pytest.raises(ApiError, match="does not read the format beam yet"):
            _name(field, "beam", None, formats)
        with pytest.raises(ApiError, match="must be one of"):
            _name(field, "any", None, formats)


def test_aliases_name_a_format() -> None:
    aliases = [(field, name) for (field, _), name in VALUE_ALIASES.items() if field in FORMATS]
    assert len(aliases) > 20 and all(name in FORMATS[field] for field, name in aliases)
