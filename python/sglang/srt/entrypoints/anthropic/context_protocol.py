"""`context_management` of Anthropic's Messages API: parts of a conversation that are cleared before the model reads
it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sglang.srt.entrypoints.openai.protocol import MAX_TOOLS, Name, Positive

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Names = Annotated[list[Name], Meta(max_length=MAX_TOOLS)]


class ThinkingTurns(msgspec.Struct):
    """The last `value` turns; with type all every turn."""

    type: Literal["thinking_turns", "all"]
    value: Positive = 1


class ToolUses(msgspec.Struct, tag_field="type", tag="tool_uses", frozen=True):
    value: Count


class InputTokens(msgspec.Struct, tag_field="type", tag="input_tokens", frozen=True):
    value: Count


class Edit(msgspec.Struct, tag_field="type", kw_only=True):
    """One edit, told apart by its `type`."""


class ClearThinking(Edit, tag="clear_thinking_20251015"):
    """Thoughts go, except those of the last turns that have any."""

    keep: Literal["all"] | ThinkingTurns | None = None

    @property
    def kept_turns(self) -> int | None:
        """Returns how many turns keep their thoughts; None: all."""
        if self.keep is None:
            return 1
        return None if isinstance(self.keep, str) or self.keep.type == "all" else self.keep.value


class ClearToolUses(Edit, tag="clear_tool_uses_20250919"):
    """Results of calls go, except those of the last calls, once the conversation is beyond `trigger`."""

    trigger: InputTokens | ToolUses = InputTokens(100_000)
    keep: ToolUses = ToolUses(3)
    clear_at_least: InputTokens | None = None
    exclude_tools: Names | None = None
    clear_tool_inputs: bool | Names | None = None
    """True, or the names of tools: the arguments of their calls go as well."""

    @property
    def min_cleared_tokens(self) -> int:
        """Returns the fewest tokens that must be cleared for the edit to apply."""
        return 0 if self.clear_at_least is None else self.clear_at_least.value


class Compact(Edit, tag="compact_20260112"):
    """Never applied: no summary is written here, and the answer lists the edits that were applied."""


AnyEdit = ClearThinking | ClearToolUses | Compact


class ContextManagement(msgspec.Struct):
    edits: Annotated[list[AnyEdit], Meta(max_length=8)] | None = None

    def __post_init__(self) -> None:
        kinds = [type(edit) for edit in self.edits or ()]
        if len(set(kinds)) < len(kinds):
            raise ValueError("edits may have each type once")
