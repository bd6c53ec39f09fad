"""Problems as text: what the model reads, and which parts of it the model must write."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox

from tiny_model.problem import Message, Problem, tool_call_message

TEMPLATE_FILE = Path(__file__).with_name("template.jinja")
END_OF_TURN = "<|im_end|>"

_ASSISTANT_TURN = re.compile(r"(?<=<\|im_start\|>assistant\n)(.*?<\|im_end\|>)", re.DOTALL)
_SOLVED = re.compile(r"(?<=\nAnswer:)(.*?\n\nQuestion:)", re.DOTALL)

Segment = tuple[str, bool]
"""Text, and whether the model must write it. Segments are tokenized apart, as a prompt and an answer are."""


@cache
def template() -> jinja2.Template:
    """Set up as transformers and the server do."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise
    return environment.from_string(TEMPLATE_FILE.read_text(encoding="utf-8"))


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def chat(problem: Problem, messages: tuple[Message, ...], **options: Any) -> str:
    variables = {"tool_format": problem.tool_format, "tools": list(problem.tools) or None}
    return template().render(messages=list(messages), **variables, **options)


def prompt_text(problem: Problem, thinking: bool, system: str = "") -> str:
    """The text that the model reads before it answers."""
    if problem.prompt:
        return problem.prompt
    return chat(problem, _with_system(problem, system), add_generation_prompt=True, enable_thinking=thinking)


def answer_message(problem: Problem, thinking: bool) -> Message:
    if problem.calls:
        return tool_call_message(problem.calls)
    if problem.thought and thinking:
        return {"role": "assistant", "content": problem.answer, "reasoning_content": problem.thought}
    return {"role": "assistant", "content": problem.quiet_answer or problem.answer}


def answer_text(problem: Problem, thinking: bool) -> str:
    """The text that the model must write, the end of its turn included."""
    if problem.prompt:
        return problem.answer
    rendered = chat(problem, (*problem.messages, answer_message(problem, thinking)), add_generation_prompt=False)
    return rendered.rpartition("<|im_start|>assistant\n")[2].removesuffix("\n")


def segments(problem: Problem, thinking: bool, system: str = "", last_only: bool = False) -> list[Segment]:
    """The whole document. Unless `last_only`, earlier answers of the same kind count too, but not if thinking is off:
    then the empty thought that the last turn begins with is not there in the earlier ones."""
    prompt, answer = prompt_text(problem, thinking, system), answer_text(problem, thinking)
    if last_only:
        return [(prompt, False), (answer, True)]
    if problem.prompt:
        pattern = _SOLVED
    elif problem.past_answers and thinking:
        pattern = _ASSISTANT_TURN
    else:
        return [(prompt, False), (answer, True)]
    pieces = pattern.split(prompt + answer)
    return [(piece, number % 2 == 1) for number, piece in enumerate(pieces) if piece]


def _with_system(problem: Problem, system: str) -> tuple[Message, ...]:
    return ({"role": "system", "content": system}, *problem.messages) if system else problem.messages
