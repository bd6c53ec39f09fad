"""`require_reasoning` of `/generate`: the output begins with thoughts, and a grammar applies after them."""

from __future__ import annotations

from typing import Any

from sglang.srt.entrypoints.http_errors import bad_request
from sglang.srt.entrypoints.openai.chat_call import MAX_THOUGHTS
from sglang.srt.entrypoints.openai.chat_output import GRAMMARS, constrained_answer, encoded_tag
from sglang.srt.entrypoints.openai.serving import OpenAIService
from sglang.srt.function_call.forcing import after_thoughts, as_message
from sglang.srt.function_call.messages import MessageFormat
from sglang.srt.function_call.reasoning import ReasoningFormat
from sglang.srt.managers.front.generate_request import GenerateRequest
from sglang.srt.sampling.grammar_names import tag_of_format
from sglang.srt.sampling.limits import MAX_GRAMMAR_LENGTH
from sglang.srt.sampling.sampling_params import grammar_text
from sglang.srt.sampling.thinking_budget import ThinkingBudget


def require_reasoning(service: OpenAIService, call: GenerateRequest) -> None:
    """Changes `call`: its thoughts are counted, and limited to a share of the output if a grammar follows them. Raises
    ApiError 400."""
    reasoning = service.formats.reasoning
    if reasoning is None:
        raise bad_request("require_reasoning needs a server with --reasoning-parser", param="require_reasoning")
    given: Any = call.sampling_params
    many = given if isinstance(given, list) else [given]
    changed = [_grammar_after_thoughts(params, reasoning) for params in many]
    call.sampling_params = changed if isinstance(given, list) else changed[0]
    begin, end = (service.tokenizer.encode(mark, add_special_tokens=False) for mark in reasoning.thought_marks)
    call.thinking = ThinkingBudget(MAX_THOUGHTS, begin, end, inside=not isinstance(reasoning, MessageFormat))
    call.counts_thoughts = True
    if any(after is not before for after, before in zip(changed, many, strict=True)):
        call.thinking_share = service.manager.args.constrained_thinking_share


def _grammar_after_thoughts(params: Any, reasoning: ReasoningFormat | MessageFormat) -> Any:
    """Returns sampling parameters whose grammar begins after the thoughts; unchanged if they have none, or will be
    refused: malformed ones, and one that is too long."""
    kinds = [name for name in GRAMMARS if isinstance(params, dict) and params.get(name) is not None]
    if len(kinds) != 1:
        return params
    try:
        source = grammar_text(kinds[0], params[kinds[0]])
    except ValueError:
        return params
    if not isinstance(source, str) or len(source) > MAX_GRAMMAR_LENGTH:
        return params
    answer = constrained_answer(kinds[0], source)
    if answer is None:
        raise bad_request("require_reasoning needs a structural_tag with a format", param="require_reasoning")
    if isinstance(reasoning, MessageFormat):
        tag = after_thoughts(as_message(answer, reasoning), reasoning, "")
    else:
        tag = after_thoughts(answer, reasoning, reasoning.begin)
    rest = {name: value for name, value in params.items() if name != kinds[0]}
    return {**rest, "structural_tag": encoded_tag(tag_of_format(kinds[0], tag))}
