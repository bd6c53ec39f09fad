"""Jinja environment of chat templates, with a limit of their output.

Follows the conventions of Hugging Face tokenizers (sandbox, whitespace control, `raise_exception`, `strftime_now`,
`tojson` that keeps non-ASCII text, `generation` blocks) without importing transformers, which would add seconds to
start-up.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MAX_RENDERED = 1 << 26
"""Characters that a template may write."""


class OutputTooLong(RuntimeError):
    """Raised when a template writes more than it may."""

    def __init__(self, max_chars: int) -> None:
        super().__init__(f"the chat template makes more than {max_chars} characters of these messages")


def write(template: jinja2.Template, variables: Mapping[str, Any], max_chars: int) -> str:
    """Returns the template's output. Stops and raises OutputTooLong as soon as it is too long."""
    parts, num_chars = [], 0
    for part in template.generate(variables):
        parts.append(part)
        num_chars += len(part)
        if num_chars > max_chars:
            raise OutputTooLong(max_chars)
    return "".join(parts)


class _GenerationBlocks(jinja2.ext.Extension):
    """Ignores `{% generation %}...{% endgeneration %}`, which marks training targets, but keeps its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _positions(values: Iterable[Any]) -> dict[Any, int]:
    """Returns the last index of each distinct value, without empty values."""
    return {value: index for index, value in enumerate(values) if value}


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def make_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Returns an environment for chat templates."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.filters["positions"] = _positions  # used by the built-in templates
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment
