"""Request bodies of Anthropic's Messages API. Used for validation and for `/openapi.json`.

What only steers Anthropic's own service (metadata, service_tier, betas) is ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from sglang.srt.entrypoints.anthropic.content import (
    MAX_BLOCKS,
    Block,
    CacheControl,
    DocumentBlock,
    ImageBlock,
    SearchResultBlock,
    TextBlock,
    ToolReferenceBlock,
)
from sglang.srt.entrypoints.anthropic.context_protocol import AnyEdit, ContextManagement
from sglang.srt.entrypoints.anthropic.tools import AnyHostedToolBlock, MessageTool
from sglang.srt.entrypoints.http_body import Body
from sglang.srt.entrypoints.http_errors import ApiError, bad_request
from sglang.srt.entrypoints.openai.protocol import MAX_MESSAGES, MAX_TOOLS, Int, Name, Positive
from sglang.srt.entrypoints.unsupported_fields import MESSAGES

Readable = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock
ResultContent = Annotated[list[Readable | ToolReferenceBlock], Meta(max_length=MAX_BLOCKS)]


class ToolResultBlock(Block, tag="tool_result"):
    tool_use_id: str
    content: str | ResultContent | None = None
    is_error: bool | None = False


class ToolUseBlock(Block, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] | list[Any] | str | None = None
    """An object, or what the model wrote in its place and the client could not read."""


class ThinkingBlock(Block, tag="thinking"):
    """`signature`: the thoughts again where the answer did not show them."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Block, tag="redacted_thinking"):
    """Thoughts that only their author can read; the model does not see them."""


class CompactionBlock(Block, tag="compaction"):
    """Another server's summary of the messages before it."""

    content: str | None = None


class FallbackBlock(Block, tag="fallback"):
    """The place where another server changed the model."""


TextBlocks = Annotated[list[TextBlock], Meta(max_length=MAX_BLOCKS)]
UserContent = Annotated[list[Readable | ToolResultBlock | AnyHostedToolBlock], Meta(max_length=MAX_BLOCKS)]
AssistantContent = Annotated[
    list[
        TextBlock
        | ToolUseBlock
        | ThinkingBlock
        | RedactedThinkingBlock
        | CompactionBlock
        | FallbackBlock
        | AnyHostedToolBlock
    ],
    Meta(max_length=MAX_BLOCKS),
]


Effort = Literal["low", "medium", "high", "xhigh", "max"]


class Message(msgspec.Struct, tag_field="role"):
    """A message, told apart by its `role`."""


class UserMessage(Message, tag="user"):
    content: str | UserContent


class AssistantMessage(Message, tag="assistant"):
    content: str | AssistantContent


class TurnOutputConfig(msgspec.Struct):
    effort: Effort | None = None


class SystemMessage(Message, tag="system"):
    """`clear_at` next_user_message: the model reads it until a message of the user follows. `output_config` holds from
    here on."""

    content: str | TextBlocks | None = None
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: TurnOutputConfig | None = None


AnyMessage = UserMessage | AssistantMessage | SystemMessage


class ToolChoice(msgspec.Struct):
    """`name`: with type tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = False


class Thinking(msgspec.Struct):
    """`budget_tokens` ends the thoughts where the model's format has a token for it. `display` omitted: the answer has
    them in the block's signature alone, out of which later requests give them to the model."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Positive | None = None
    display: Literal["summarized", "updates", "omitted"] | None = None

    def __post_init__(self) -> None:
        if self.type == "enabled" and self.budget_tokens is None:
            raise ValueError('thinking of type "enabled" needs budget_tokens')


class OutputFormat(msgspec.Struct):
    schema: dict[str, Any]
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(msgspec.Struct):
    """`task_budget`: refused."""

    effort: Effort | None = None
    format: OutputFormat | None = None
    task_budget: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.task_budget:
            raise ValueError("task_budget is not supported: the model is told of no budget; set max_tokens")


class CountTokensRequest(Body, kw_only=True):
    """The input whose tokens are counted."""

    unsupported: ClassVar = MESSAGES

    model: Name | None = None
    messages: Annotated[list[AnyMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | TextBlocks | None = None
    tools: Annotated[list[MessageTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The earlier place of `output_config.format`."""
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    thread: Any = None
    """A conversation that the server would hold. Refused in a way after which clients send the whole conversation."""

    def __post_init__(self) -> None:
        if self.thread is not None:
            details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            reason = "thread is not supported: this server holds no conversations; send all messages without it"
            raise ApiError(400, reason, param="thread", details=details)
        given = None if self.output_config is None else self.output_config.format
        if self.output_format is not None and given not in (None, self.output_format):
            raise bad_request("output_format and output_config.format differ: give one of them", param="output_format")
        names = {tool.name for tool in self.tools or () if tool.runs_at_client}
        choice = self.tool_choice
        if choice is None:
            return
        if choice.type == "any" and not names:
            raise bad_request('tool_choice of type "any" needs a non-empty "tools" list', param="tool_choice")
        if choice.type == "tool" and choice.name not in names:
            elsewhere = any(tool.name == choice.name for tool in self.tools or ())
            reason = "runs at Anthropic's servers, not here" if elsewhere else "is not one of the tools"
            raise bad_request(f"tool_choice names {(choice.name or '')[:64]!r}, which {reason}", param="tool_choice")

    @property
    def format(self) -> OutputFormat | None:
        """Returns the wanted format of the output, from `output_config` or `output_format`."""
        return self.output_format if self.output_config is None else self.output_config.format or self.output_format

    @property
    def hides_thoughts(self) -> bool:
        """Returns whether the client wants no text of thoughts."""
        return self.thinking is not None and self.thinking.display == "omitted"

    @property
    def edits(self) -> list[AnyEdit]:
        """Returns the requested edits of the context."""
        return [] if self.context_management is None else self.context_management.edits or []

    @property
    def retention(self) -> Literal["5m", "1h"] | None:
        """The longest `ttl` of any part; None: no part has a `cache_control`."""
        contents = [self.system, *(message.content for message in self.messages)]
        blocks = [block for content in contents if isinstance(content, list) for block in content]
        parts = [self, *(self.tools or ()), *blocks]
        ttls = {part.cache_control.ttl for part in parts if part.cache_control is not None}
        return None if not ttls else "1h" if "1h" in ttls else "5m"


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Positive
    stream: bool | None = False
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None


BODIES = (MessagesRequest, CountTokensRequest)
"""The bodies that `/openapi.json` describes."""
