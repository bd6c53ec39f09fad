"""Request bodies of OpenAI's Responses API. Used for validation and for `/openapi.json`.

What only steers OpenAI's own service (service_tier, prompt_cache_key, safety_identifier) is repeated in the response.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

import msgspec
from msgspec import Meta

from sglang.srt.entrypoints.http_body import Body
from sglang.srt.entrypoints.http_errors import bad_request, from_decode_error
from sglang.srt.entrypoints.openai.protocol import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Detail,
    Int,
    Name,
    Positive,
    PromptCacheOptions,
    Retention,
)
from sglang.srt.entrypoints.responses.tools import (
    LEFT_OUT,
    TEXT,
    ResponseTool,
    ToolCatalog,
    offered_name,
    written_arguments,
)
from sglang.srt.entrypoints.unsupported_fields import RESPONSES

MAX_PARTS = 4_096
"""The limit of parts in the content of one item."""
Label = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[Annotated[str, Meta(max_length=64)], Label], Meta(max_length=16)]
IGNORED_INCLUDES = (
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
)
"""Reasoning items have their text, which goes on being readable when the server stores nothing; items of the input come
back whole; and of the others there are none."""


class Part(msgspec.Struct, tag_field="type"):
    """A piece of an item's content, told apart by its `type`."""


class InputText(Part, tag="input_text"):
    text: str


class OutputText(Part, tag="output_text"):
    text: str


class Refusal(Part, tag="refusal"):
    refusal: str


class InputImage(Part, tag="input_image"):
    """`image_url`: http, https, data or file."""

    image_url: str | None = None
    detail: Detail | None = None
    file_id: str | None = None

    def __post_init__(self) -> None:
        if not self.image_url:
            raise ValueError("content of type input_image needs image_url; no files are stored here for file_id")


class InputFile(Part, tag="input_file"):
    """Refused."""

    def __post_init__(self) -> None:
        raise ValueError("content of type input_file is not supported; send input_text or input_image")


class ThoughtText(msgspec.Struct):
    """A text of a reasoning item's content or summary."""

    text: str


Content = str | Annotated[list[InputText | OutputText | Refusal | InputImage | InputFile], Meta(max_length=MAX_PARTS)]


class Item(msgspec.Struct, tag_field="type"):
    """A piece of the conversation, told apart by its `type`; one without a type is a message."""


class MessageItem(Item, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class CallItem(Item):
    """A call of the model in history."""

    def call(self) -> tuple[str | None, str, str]:
        """Returns its id, the name by which the model called the tool, and the arguments as the model wrote them."""
        raise NotImplementedError


class ResultItem(Item):
    """The result of a call: `result` returns its id and its content."""

    def result(self) -> tuple[str | None, Content]:
        """Returns the id of the call and its result."""
        raise NotImplementedError


class FunctionCallItem(CallItem, tag="function_call"):
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None

    def call(self) -> tuple[str | None, str, str]:
        """Returns the call's id, the function's name as it was offered to the model, and the arguments as JSON."""
        return self.call_id, offered_name(self.name, self.namespace), self.arguments


class FunctionResultItem(ResultItem, tag="function_call_output"):
    call_id: str
    output: Content

    def result(self) -> tuple[str | None, Content]:
        return self.call_id, self.output


class CustomCallItem(CallItem, tag="custom_tool_call"):
    call_id: str
    name: str
    input: str
    namespace: str | None = None

    def call(self) -> tuple[str | None, str, str]:
        return self.call_id, offered_name(self.name, self.namespace), written_arguments({TEXT: self.input})


class CustomResultItem(FunctionResultItem, tag="custom_tool_call_output"):
    pass


class LocalShellCallItem(CallItem, tag="local_shell_call"):
    call_id: str
    action: dict[str, Any]

    def call(self) -> tuple[str | None, str, str]:
        arguments = {name: value for name, value in self.action.items() if name != "type" and value}
        return self.call_id, "local_shell", written_arguments(arguments)


class LocalShellResultItem(ResultItem, tag="local_shell_call_output"):
    """OpenAI's description has the call's id as `id`, and clients send `call_id`."""

    output: str
    call_id: str | None = None
    id: str | None = None

    def result(self) -> tuple[str | None, Content]:
        return self.call_id or self.id, self.output


class ShellCallItem(CallItem, tag="shell_call"):
    call_id: str
    action: dict[str, Any]

    def call(self) -> tuple[str | None, str, str]:
        arguments = {name: value for name, value in self.action.items() if value is not None}
        return self.call_id, "shell", written_arguments(arguments)


class ShellResultItem(ResultItem, tag="shell_call_output"):
    call_id: str
    output: Annotated[list[dict[str, Any]], Meta(max_length=MAX_PARTS)]

    def result(self) -> tuple[str | None, Content]:
        return self.call_id, written_arguments(self.output)


class ApplyPatchCallItem(CallItem, tag="apply_patch_call"):
    call_id: str
    operation: dict[str, Any]

    def call(self) -> tuple[str | None, str, str]:
        return self.call_id, "apply_patch", written_arguments(self.operation)


class ApplyPatchResultItem(ResultItem, tag="apply_patch_call_output"):
    call_id: str
    status: str | None = None
    output: str | None = None

    def result(self) -> tuple[str | None, Content]:
        return self.call_id, self.output or self.status or ""


class ToolSearchCallItem(CallItem, tag="tool_search_call"):
    """Without an id it was OpenAI's own search."""

    arguments: Any = None
    call_id: str | None = None

    def call(self) -> tuple[str | None, str, str]:
        return self.call_id, "tool_search", written_arguments(self.arguments)


class ToolSearchResultItem(ResultItem, tag="tool_search_output"):
    """The tools are offered from here on."""

    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)]
    call_id: str | None = None

    def result(self) -> tuple[str | None, Content]:
        return self.call_id, written_arguments([offered["function"] for offered in ToolCatalog(self.tools).functions()])


class AdditionalToolsItem(Item, tag="additional_tools"):
    """Tools that are offered from here on."""

    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)]


class ReasoningItem(Item, tag="reasoning"):
    summary: Annotated[list[ThoughtText], Meta(max_length=MAX_PARTS)] = []
    content: Annotated[list[ThoughtText], Meta(max_length=MAX_PARTS)] | None = None


ConversationItem = (
    MessageItem
    | FunctionCallItem
    | FunctionResultItem
    | CustomCallItem
    | CustomResultItem
    | LocalShellCallItem
    | LocalShellResultItem
    | ShellCallItem
    | ShellResultItem
    | ApplyPatchCallItem
    | ApplyPatchResultItem
    | ToolSearchCallItem
    | ToolSearchResultItem
    | AdditionalToolsItem
    | ReasoningItem
)
ITEMS = get_args(ConversationItem)
HOSTED_CALLS = frozenset(
    "web_search_call file_search_call code_interpreter_call image_generation_call mcp_list_tools mcp_call "
    "mcp_approval_request mcp_approval_response program program_output".split()
)
"""Types of items for calls that OpenAI's servers ran. The model does not see them."""
ItemFields = Annotated[
    dict[str, Any],
    Meta(extra_json_schema={"anyOf": [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in ITEMS]}),
]


class NamedTool(msgspec.Struct, tag_field="type"):
    name: str
    namespace: str | None = None


class NamedFunction(NamedTool, tag="function"):
    pass


class NamedCustom(NamedTool, tag="custom"):
    pass


class AllowedTool(msgspec.Struct):
    """A tool by its name; one that has none by its type."""

    type: str
    name: str | None = None


class AllowedTools(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    """The model sees these of the tools only."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(max_length=MAX_TOOLS)]


class ReasoningOptions(msgspec.Struct):
    """`effort` none switches thinking off. Thoughts are returned whole; no summary is made of them. `context`
    current_turn keeps those of earlier turns from the model; else its template decides."""

    effort: Annotated[str, Meta(max_length=64)] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None


class TextFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    name: str = "schema"
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        if self.type == "json_schema" and self.schema is None:
            raise ValueError('type "json_schema" needs a "schema"')


class TextOptions(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """A wish, which chat templates that know the word read as the variable `verbosity`."""


class Compaction(msgspec.Struct, tag_field="type", tag="compaction"):
    """Never done: no summary is written here, and an answer has no item of one."""


class ResponseContext(Body, kw_only=True):
    """The input of the model: the body of `/v1/responses/input_tokens`."""

    unsupported: ClassVar = RESPONSES

    model: Name | None = None
    input: str | Annotated[list[ItemFields], Meta(min_length=1, max_length=MAX_MESSAGES)]
    """A text of the user, or items."""
    instructions: str | None = None
    previous_response_id: Label | None = None
    """The conversation so far is that of this response. Its instructions are not carried over."""
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | NamedCustom | AllowedTools | None = None
    parallel_tool_calls: bool | None = True
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tool_choice, str | None):
            self.chosen_names(ToolCatalog(self.tools or ()))

    def chosen_names(self, catalog: ToolCatalog) -> list[str] | None:
        """Returns the tools that `tool_choice` names, as the model knows them; None if it names none. Raises ApiError
        400."""
        choice = self.tool_choice
        if choice is None or isinstance(choice, str):
            return None
        if isinstance(choice, NamedTool):
            named = [(choice.name, choice.namespace)]
        else:
            named = [(tool.name or tool.type, None) for tool in choice.tools if tool.type not in LEFT_OUT]
        tools = [(name, catalog.find(name, namespace)) for name, namespace in named]
        unknown = next((name for name, tool in tools if tool is None), None)
        if unknown is not None:
            raise bad_request(f"tool_choice names {unknown[:64]!r}, which is not one of the tools", "tool_choice")
        return [tool.name for _, tool in tools if tool is not None]

    def items(self) -> list[dict[str, Any]]:
        """Returns `input` as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input


class ResponsesRequest(ResponseContext, kw_only=True):
    max_output_tokens: Positive | None = None
    max_tool_calls: Int | None = None
    """The limit of calls of the server's own tools, of which there are none."""
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = False
    background: bool | None = False
    store: bool | None = True
    include: Annotated[list[Label], Meta(max_length=64)] | None = None
    metadata: Metadata | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Retention | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    context_management: Annotated[list[Compaction], Meta(max_length=64)] | None = None
    service_tier: Label | None = None

    top_k: Int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        lacking = next((name for name in self.include or () if name not in IGNORED_INCLUDES), None)
        if lacking is not None:
            raise bad_request(f"include: {lacking[:64]!r} is not returned by this server", param="include")
        if self.background and self.store is False:
            raise bad_request("background needs store: the answer is fetched later", param="background")
        if self.background and self.stream:
            raise bad_request("background and stream exclude each other: fetch the response, or stream it", "stream")


def read_items(items: list[dict[str, Any]]) -> list[ConversationItem]:
    """Returns the items. Raises ApiError 400 for an unknown or incomplete item. Skips those about calls that OpenAI's
    servers ran."""
    typed = [{"type": "message", **item} for item in items if item.get("type") not in HOSTED_CALLS]
    try:
        return msgspec.convert(typed, list[ConversationItem], strict=False)
    except msgspec.ValidationError as error:
        raise from_decode_error(error, inside="input") from None


BODIES = (
    ResponsesRequest,
    ResponseContext,
    *ITEMS,
)
"""The bodies that `/openapi.json` describes."""
