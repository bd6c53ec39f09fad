"""Resolves the output formats of the server's flags (`auto` by the model), and parses whole texts on request."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from sglang.srt import compat
from sglang.srt.configs.output_formats import AUTO
from sglang.srt.entrypoints.http_errors import bad_request
from sglang.srt.entrypoints.openai.protocol import ParseCallsRequest, SeparateReasoningRequest
from sglang.srt.entrypoints.openai.template_pool import TemplatePool
from sglang.srt.function_call.detection import reasoning_format, tool_call_format
from sglang.srt.function_call.events import Event, ParsedOutput, collect
from sglang.srt.function_call.messages import MessageFormat
from sglang.srt.function_call.model_formats import ModelFormats, has_hidden, tool_schemas
from sglang.srt.function_call.parser import OutputParser
from sglang.srt.function_call.registry import (
    OTHER_TAGS,
    REASONING_FORMATS,
    SUFFIXED,
    TOOL_CALL_FORMATS,
    tag_suffix,
)
from sglang.srt.managers.front.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def model_formats(args: ServerArgs, manager: TokenizerManager, template: TemplatePool) -> ModelFormats:
    """Returns the formats of the served model, and logs those that `auto` found."""
    calls, reasoning = args.tool_call_parser, args.reasoning_parser
    architecture = manager.model_config.architecture
    tokenizer = manager.tokenizer
    if tokenizer is None:
        return ModelFormats()
    if calls == AUTO:
        calls = tool_call_format(architecture, template.render_probe)
        _report("--tool-call-parser", calls)
    if reasoning == AUTO:
        reasoning = reasoning_format(architecture, template.sources, calls)
        _report("--reasoning-parser", reasoning)

    calls, reasoning = (with_tags_of(tokenizer, name) for name in (calls, reasoning))

    def shown(marker: str) -> str:
        return tokenizer.decode(tokenizer.encode(marker, add_special_tokens=False), skip_special_tokens=True)

    markers = ModelFormats(calls, reasoning).markers
    return ModelFormats(calls, reasoning, has_hidden(markers, shown))


def with_tags_of(tokenizer: Tokenizer, name: str | None) -> str | None:
    """Returns the name of the format whose tags are spelled as in the tokenizer."""
    if name in SUFFIXED:
        return name + tag_suffix(str(token) for token in tokenizer.added_tokens.values())
    other, tag = OTHER_TAGS.get(name or "", (name, ""))
    return other if tag and tokenizer.token_id(tag) is not None else name


def _report(flag: str, name: str | None) -> None:
    if name is None:
        logger.warning("%s auto: the chat template shows no format that is known; outputs stay as they are", flag)
    else:
        logger.info("%s auto: %s", flag, name)


PARSED_PIECE = 1 << 15
"""Characters that are parsed before other requests may be tokenized."""


async def parse_calls(manager: TokenizerManager, formats: ModelFormats, body: ParseCallsRequest) -> dict[str, Any]:
    """Returns the answer of `/parse_function_call`. Raises ApiError 400 for an unknown format."""
    name = _name("tool_call_parser", body.tool_call_parser, formats.calls_name, TOOL_CALL_FORMATS)
    parser = OutputParser(calls=TOOL_CALL_FORMATS[name], tools=tool_schemas(body.tools))
    parsed = await _parse(manager, parser, body.text)
    calls = [
        {"tool_index": number, "name": call.name, "parameters": call.arguments}
        for number, call in enumerate(parsed.calls)
    ]
    return {"normal_text": parsed.text, "calls": calls}


async def separate_reasoning(
    manager: TokenizerManager, formats: ModelFormats, body: SeparateReasoningRequest
) -> dict[str, Any]:
    """Returns the answer of `/separate_reasoning`. Raises ApiError 400 for an unknown format."""
    name = _name("reasoning_parser", body.reasoning_parser, formats.reasoning_name, REASONING_FORMATS)
    form = REASONING_FORMATS[name]
    inside = not isinstance(form, MessageFormat) and form.inside
    parsed = await _parse(manager, OutputParser(reasoning=form, inside=inside), body.text)
    return {"reasoning_text": parsed.reasoning, "text": parsed.text}


async def _parse(manager: TokenizerManager, parser: OutputParser, text: str) -> ParsedOutput:
    events: list[Event] = []
    for start in range(0, len(text), PARSED_PIECE):
        events += await manager.text.in_thread(len(text), parser.push, text[start : start + PARSED_PIECE])
    return await manager.text.in_thread(len(text), lambda: collect([*events, *parser.finish()]))


def _name(field: str, given: str | None, default: str | None, known: Iterable[str]) -> str:
    name = default if given in (None, "", AUTO) else compat.VALUE_ALIASES.get((field, given or ""), given)
    if default is not None and (OTHER_TAGS.get(name or "", ("",))[0] == default or default.partition(":")[0] == name):
        name = default
    if name is None or (name != default and name not in known):
        reason = compat.refusal(field, name)
        problem = f"{field}: {reason}" if reason is not None else f"{field} must be one of {', '.join(known)}"
        raise bad_request(f"{problem}; got {str(name)[:64]}", param=field)
    return name
