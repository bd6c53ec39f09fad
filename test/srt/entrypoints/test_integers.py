"""Integers of clients: every field has bounds within the 64 bits that messages between processes carry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sglang.srt.entrypoints import http_app
from sglang.srt.entrypoints.anthropic.protocol import MessagesRequest
from sglang.srt.entrypoints.embeddings.protocol import RerankRequest
from sglang.srt.entrypoints.http_body import Body, body_definitions, parse_body
from sglang.srt.entrypoints.http_errors import ApiError

BODIES = [body for form in http_app.FORMS for body in form.BODIES]
LOW, HIGH = -(2**63), 2**63 - 1


def unbounded(schema: Any, path: str) -> Iterator[str]:
    """Where a schema takes integers that are too wide."""
    if isinstance(schema, dict):
        if schema.get("type") == "integer" and not (
            LOW <= schema.get("minimum", LOW - 1) <= schema.get("maximum", HIGH + 1) <= HIGH
        ):
            yield path
        for name, part in schema.items():
            yield from unbounded(part, f"{path}.{name}")
    elif isinstance(schema, list):
        for part in schema:
            yield from unbounded(part, path)


def test_every_integer_of_every_body_has_bounds() -> None:
    assert len(BODIES) > 15
    assert list(unbounded(body_definitions(BODIES), "")) == []


THINKING = (
    b'"max_tokens": 2, "messages": [{"role": "user", "content": "a"}], '
    b'"thinking": {"type": "enabled", "budget_tokens": %d}'
)
RERANK = b'"query": "a", "documents": ["b"], "top_n": %d'


@pytest.mark.parametrize(
    ("body", "text", "field"),
    [(MessagesRequest, THINKING, "thinking.budget_tokens"), (RerankRequest, RERANK, "top_n")],
)
@pytest.mark.parametrize("number", [1 << 63, 1 << 64, 1 << 70, 0])
def test_a_number_out_of_bounds_is_refused_by_its_name(body: type[Body], text: bytes, field: str, number: int) -> None:
    with pytest.raises(ApiError) as refused:
        parse_body(b"{%s}" % (text % number), body)
    assert refused.value.status == 400 and field in refused.value.message
