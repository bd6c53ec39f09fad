"""Request bodies of Anthropic's Messages API. Used for validation and for `/openapi.json`.

What only steers Anthropic's own service (metadata, service_tier, betas) is ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from sglang.srt.entrypoints.anthropic.context_protocol import AnyEdit, ContextManagement
from sglang.srt.entrypoints.http_body import Body
from sglang.srt.entrypoints.http_errors import ApiError, bad_request
from sglang.srt.entrypoints.openai.protocol import MAX_MESSAGES, MAX_TOOLS, Int, Name, Positive
from sglang.srt.entrypoints.unsupported_fields import MESSAGES

MAX_BLOCKS = 4_096
"""Content blocks of one message or tool result."""


class CacheControl(msgspec.Struct):
    """The whole prompt stays cached before others, for `ttl` after its last use; no part of it ends apart."""

    type: str = "ephemeral"
    ttl: str | None = None


class Block(msgspec.Struct, tag_field="type", kw_only=True):
    """A piece of content, told apart by its `type`."""

    cache_control: CacheControl | None = None


class TextBlock(Block, tag="text"):
    text: str


class ImageSource(msgspec.Struct, tag_field="type"):
    """The source of an image, told apart by its `type`."""


class Base64Source(ImageSource, tag="base64"):
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(ImageSource, tag="url"):
    url: str


class ImageBlock(Block, tag="image"):
    source: Base64Source | UrlSource


class DocumentBlock(Block, tag="document"):
    """Refused."""

    def __post_init__(self) -> None:
        raise ValueError("content of type document is not supported; send text and image blocks")


ResultContent = Annotated[list[TextBlock | ImageBlock | DocumentBlock], Meta(max_length=MAX_BLOCKS)]


class ToolResultBlock(Block, tag="tool_result"):
    tool_use_id: str
    content: str | ResultContent = ""
    is_error: bool = False


class ToolUseBlock(Block, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ThinkingBlock(Block, tag="thinking"):
    thinking: str


class RedactedThinkingBlock(Block, tag="redacted_thinking"):
    """Thoughts that only their author can read; the model does not see them."""


def blocks_of(content: Any) -> list[Any]:
    """Returns the content of a message or of a result as blocks."""
    return [TextBlock(content)] if isinstance(content, str) else content


TextBlocks = Annotated[list[TextBlock], Meta(max_length=MAX_BLOCKS)]
UserContent = Annotated[list[TextBlock | ToolResultBlock | ImageBlock | DocumentBlock], Meta(max_length=MAX_BLOCKS)]
AssistantContent = Annotated[
    list[TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock], Meta(max_length=MAX_BLOCKS)
]


class Message(msgspec.Struct, tag_field="role"):
    """A message, told apart by its `role`."""


class UserMessage(Message, tag="user"):
    content: str | UserContent


class AssistantMessage(Message, tag="assistant"):
    content: str | AssistantContent


class SystemMessage(Message, tag="system"):
    content: str | TextBlocks


AnyMessage = UserMessage | AssistantMessage | SystemMessage


class ClientTool(msgspec.Struct):
    """A function of the client. Tools that Anthropic's servers run have other types and are refused."""

    name: Annotated[str, Meta(min_length=1)]
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None


class ToolChoice(msgspec.Struct):
    """`name`: with type tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = False


class Thinking(msgspec.Struct):
    """`budget_tokens` ends the thoughts where the model's format has a token for it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Positive | None = None

    def __post_init__(self) -> None:
        if self.type == "enabled" and self.budget_tokens is None:
            raise ValueError('thinking of type "enabled" needs budget_tokens')


class OutputFormat(msgspec.Struct):
    schema: dict[str, Any]
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(msgspec.Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Body, kw_only=True):
    """The input whose tokens are counted."""

    unsupported: ClassVar = MESSAGES

    model: Name = ""
    messages: Annotated[list[AnyMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | TextBlocks | None = None
    tools: Annotated[list[ClientTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    thread: Any = None
    """A conversation that the server would hold. Refused in a way after which clients send the whole conversation."""

    def __post_init__(self) -> None:
        if self.thread is not None:
            details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            reason = "thread is not supported: this server holds no conversations; send all messages without it"
            raise ApiError(400, reason, param="thread", details=details)
        names = {tool.name for tool in self.tools or ()}
        choice = self.tool_choice
        if choice is None:
            return
        if choice.type == "any" and not names:
            raise bad_request('tool_choice of type "any" needs a non-empty "tools" list', param="tool_choice")
        if choice.type == "tool" and choice.name not in names:
            raise bad_request(
                f"tool_choice names {(choice.name or '')[:64]!r}, which is not one of the tools", param="tool_choice"
            )

    @property
    def edits(self) -> list[AnyEdit]:
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
