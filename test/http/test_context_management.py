"""`context_management` through the real `anthropic` client: what Claude Code sends, and edits that clear something."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from live_server import LiveServer

THINKING = "clear_thinking_20251015"
TOOL_USES = "clear_tool_uses_20250919"
CLEARING: Any = {
    "edits": [
        {"type": THINKING, "keep": "all"},
        {"type": TOOL_USES, "trigger": {"type": "tool_uses", "value": 1}, "keep": {"type": "tool_uses", "value": 1}},
    ]
}


def turn(number: int) -> list[dict[str, Any]]:
    call = {"type": "tool_use", "id": f"toolu_{number}", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": "a long result " * 40}
    return [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


MESSAGES: Any = [{"role": "user", "content": "Read both."}, *turn(1), *turn(2)]


@pytest.fixture(scope="module")
def claude(parsing_server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=parsing_server.url, api_key="none", max_retries=0, timeout=300) as connected:
        yield connected


@pytest.mark.parametrize("edits", [[], [{"type": THINKING, "keep": "all"}]])
def test_edits_that_ask_for_nothing(claude: anthropic.Anthropic, edits: Any) -> None:
    betas: Any = ["context-management-2025-06-27", "interleaved-thinking-2025-05-14"]
    context: Any = {"edits": edits}
    answer = claude.beta.messages.create(
        model="tiny", max_tokens=4, messages=MESSAGES, context_management=context, betas=betas
    )
    assert answer.context_management is not None and answer.context_management.applied_edits == []


def test_results_that_go(claude: anthropic.Anthropic) -> None:
    fixed: Any = {"model": "tiny", "messages": MESSAGES}
    count = claude.beta.messages.count_tokens(**fixed, context_management=CLEARING)
    whole = claude.beta.messages.count_tokens(**fixed)
    assert count.context_management is not None and whole.context_management is None
    assert count.context_management.original_input_tokens == whole.input_tokens
    cleared = whole.input_tokens - count.input_tokens
    answer = claude.beta.messages.create(**fixed, max_tokens=4, context_management=CLEARING)
    assert (answer.usage.input_tokens or 0) + (answer.usage.cache_read_input_tokens or 0) == count.input_tokens
    with claude.beta.messages.stream(**fixed, max_tokens=4, context_management=CLEARING) as stream:
        streamed = stream.get_final_message()
    for reply in (answer, streamed):
        assert reply.context_management is not None
        (edit,) = reply.context_management.applied_edits
        assert isinstance(edit, anthropic.types.beta.BetaClearToolUses20250919EditResponse)
        assert (edit.cleared_tool_uses, edit.cleared_input_tokens) == (1, cleared) and cleared > 40


def test_an_edit_that_nobody_defines_is_named(claude: anthropic.Anthropic) -> None:
    context: Any = {"edits": [{"type": "clear_everything"}]}
    with pytest.raises(anthropic.BadRequestError, match=r"context_management\.edits"):
        claude.beta.messages.create(model="tiny", max_tokens=4, messages=MESSAGES, context_management=context)
