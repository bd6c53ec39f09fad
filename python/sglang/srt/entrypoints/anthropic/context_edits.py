"""Applies the edits of `context_management` to the messages of a request. Messages that an edit changes are copied."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from sglang.srt.entrypoints.anthropic.content import blocks_of
from sglang.srt.entrypoints.anthropic.context_protocol import AnyEdit, ClearThinking, ClearToolUses, InputTokens
from sglang.srt.entrypoints.anthropic.protocol import (
    AnyMessage,
    AssistantMessage,
    CountTokensRequest,
    RedactedThinkingBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
)

CLEARED = "[The result of this call was cleared.]"
"""Text that replaces a cleared result for the model."""

Edited = tuple[list[AnyMessage], int]
"""The messages, and how many turns or calls were cleared."""


async def apply_edits(
    body: CountTokensRequest, count: Callable[[], Awaitable[int]], off_event_loop: Callable[..., Awaitable[Edited]]
) -> list[dict[str, Any]]:
    """Applies the edits of the request to its messages, and returns those that cleared something, in the answer's form.
    `count()` returns the request's present tokens; `off_event_loop` calls a function outside of the event loop."""
    applied: list[dict[str, Any]] = []
    for edit in body.edits:
        messages, num_cleared = await off_event_loop(_edited, edit, body.messages)
        if not num_cleared:
            continue
        before = await count()
        if isinstance(edit, ClearToolUses) and isinstance(edit.trigger, InputTokens) and before <= edit.trigger.value:
            continue
        whole, body.messages = body.messages, messages
        num_tokens = max(before - await count(), 0)
        if isinstance(edit, ClearToolUses) and num_tokens < edit.min_cleared_tokens:
            body.messages = whole
            continue
        kind, number = _NAMES[type(edit)]
        applied.append({"type": kind, number: num_cleared, "cleared_input_tokens": num_tokens})
    return applied


_NAMES: dict[type, tuple[str, str]] = {
    ClearThinking: ("clear_thinking_20251015", "cleared_thinking_turns"),
    ClearToolUses: ("clear_tool_uses_20250919", "cleared_tool_uses"),
}
"""For each kind of edit, its type in the answer and the name of its count."""


def _edited(edit: AnyEdit, messages: list[AnyMessage]) -> Edited:
    if isinstance(edit, ClearThinking):
        return _without_thoughts(messages, edit.kept_turns)
    return _without_results(messages, edit) if isinstance(edit, ClearToolUses) else (messages, 0)


def _without_thoughts(messages: list[AnyMessage], num_kept: int | None) -> Edited:
    """Removes thoughts of old turns. A turn ends at the next user message; tool results do not end it."""
    turns: list[list[int]] = [[]]
    """The messages with thoughts, by turn."""
    for index, message in enumerate(messages):
        if isinstance(message, UserMessage) and not _is_result(message):
            turns.append([])
        elif isinstance(message, AssistantMessage) and any(map(_is_thought, blocks_of(message.content))):
            turns[-1].append(index)
    thinking = [turn for turn in turns if turn]
    cleared = [] if num_kept is None else thinking[:-num_kept]
    edited = list(messages)
    for index in (index for turn in cleared for index in turn):
        message = messages[index]
        assert isinstance(message, AssistantMessage)
        edited[index] = AssistantMessage([block for block in blocks_of(message.content) if not _is_thought(block)])
    return edited, len(cleared)


def _is_thought(block: Any) -> bool:
    return isinstance(block, ThinkingBlock | RedactedThinkingBlock)


def _is_result(message: UserMessage) -> bool:
    return any(isinstance(block, ToolResultBlock) for block in blocks_of(message.content))


def _without_results(messages: list[AnyMessage], edit: ClearToolUses) -> Edited:
    uses = [block for message in messages for block in blocks_of(message.content) if isinstance(block, ToolUseBlock)]
    if not isinstance(edit.trigger, InputTokens) and len(uses) <= edit.trigger.value:
        return messages, 0
    older = uses[: max(len(uses) - edit.keep.value, 0)]
    excluded = frozenset(edit.exclude_tools or ())
    inputs = frozenset(edit.clear_tool_inputs) if isinstance(edit.clear_tool_inputs, list) else edit.clear_tool_inputs
    ids = {use.id for use in older if use.name not in excluded}

    def cleared(block: Any) -> Any:
        if isinstance(block, ToolResultBlock) and block.tool_use_id in ids:
            return msgspec.structs.replace(block, content=CLEARED)
        is_old_call = isinstance(block, ToolUseBlock) and block.id in ids
        if is_old_call and (block.name in inputs if isinstance(inputs, frozenset) else inputs):
            return msgspec.structs.replace(block, input={})
        return block

    edited: list[AnyMessage] = []
    num_cleared = 0
    for message in messages:
        blocks = [cleared(block) for block in blocks_of(message.content)]
        changed = [new for old, new in zip(blocks_of(message.content), blocks, strict=True) if new is not old]
        num_cleared += sum(isinstance(block, ToolResultBlock) for block in changed)
        edited.append(msgspec.structs.replace(message, content=blocks) if changed else message)
    return edited, num_cleared
