"""Request bodies of the OpenAI routes. Used for validation and for `/openapi.json`; responses are built by hand.

Value ranges of sampling parameters are checked in one place for all routes (`SamplingParams.verify`), not here.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta

from sglang.srt.entrypoints.http_body import Body
from sglang.srt.entrypoints.http_errors import bad_request, from_decode_error
from sglang.srt.entrypoints.unsupported_fields import CHAT, COMPLETIONS

MAX_MESSAGES = 16_384
MAX_TOOLS = 4_096
MAX_TEXTS = 4_096
"""Texts or token lists of one call."""

MAX_PARSED_CHARS = 1 << 21
"""The limit of an output that a client wants parsed."""

Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""An integer that the messages between the processes can carry. No field of a body has a wider one."""
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Name = Annotated[str, Meta(max_length=4096)]
"""A model's name or path, which every event of the response repeats."""
Retention = Annotated[str, Meta(max_length=64)]
RETENTION_S = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43_200.0, "24h": 86_400.0}
"""What asks for the prompt to stay cached, of OpenAI and of Anthropic's cache_control. Other values ask for nothing."""


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class PromptCacheOptions(msgspec.Struct):
    """`ttl`: as `prompt_cache_retention`. No value of the other hints ends a request."""

    ttl: Any = None
    prewarm: bool | None = False

    def __post_init__(self) -> None:
        if self.prewarm:
            raise ValueError("prewarm is not supported: send a request with one token of output")


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    schema: dict[str, Any] | None = None
    name: str = "schema"
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The last type, structural_tag, has `format`, or `structures` and `triggers`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: Any = UNSET
    structures: Any = UNSET
    triggers: Any = UNSET

    def __post_init__(self) -> None:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema is None):
            raise ValueError('type "json_schema" needs "json_schema": {"name": ..., "schema": {...}}')


class SamplingFields(Body, kw_only=True):
    """Fields that chat and completion requests share. None means: not given."""

    model: Name | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None

    top_k: Int | None = None
    min_p: float | None = None
    min_tokens: Int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[Int] | None = None
    stop_regex: str | list[str] | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | None = None
    structural_tag: str | dict[str, Any] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None

    rid: str | list[str] | None = None
    priority: Int | None = None
    cache_salt: str | list[str | None] | None = None
    extra_key: str | list[str | None] | None = None
    lora_path: str | list[str | None] | None = None
    return_spec_tokens_details: bool | None = False
    prompt_cache_key: Annotated[str, Meta(max_length=1024)] | None = None
    """Changes nothing: prompts that begin alike share their prefix, and come to the replica that has it, anyway."""
    prompt_cache_retention: Retention | None = None
    """How long the prompt stays cached before others."""
    prompt_cache_options: PromptCacheOptions | None = None

    @property
    def keep_s(self) -> float:
        """Returns the seconds for which the prompt should stay cached; 0: as usual."""
        options = self.prompt_cache_options
        wanted = [self.prompt_cache_retention, None if options is None else options.ttl]
        return max(RETENTION_S.get(ttl, 0.0) if isinstance(ttl, str) else 0.0 for ttl in wanted)

    @property
    def num_choices(self) -> int:
        """Returns the number of choices of each prompt."""
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        """Returns whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Returns whether every chunk of a stream has token counts."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class CompletionRequest(SamplingFields, kw_only=True):
    unsupported: ClassVar = COMPLETIONS

    prompt: str | list[str | Int | list[Int]]
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    suffix: str | None = None
    echo: bool | None = False
    best_of: Int | None = None
    logprobs: Annotated[int, Meta(ge=0, le=100)] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.prompt, list) and len(set(map(type, self.prompt))) > 1:
            raise bad_request("prompt must hold texts only, token ids only, or lists of token ids only", param="prompt")


Detail = Literal["auto", "low", "high", "original", "default"]
"""low shows an image at 512 pixels a side at most, the others as large as the model reads it."""


class MediaUrl(msgspec.Struct):
    """`url`: http, https, data or file."""

    url: str
    detail: Detail | None = None


class ContentPart(msgspec.Struct):
    """A part of the type text, refusal, image_url or video_url."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | MediaUrl | None = None
    video_url: str | MediaUrl | None = None


class ChatMessage(msgspec.Struct):
    """One message. Fields that only some templates know (`reasoning_content`, ...) are passed on to them."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    refusal: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    function_call: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.function_call:
            raise ValueError("function_call is not supported; send tool_calls")
        if self.audio:
            raise ValueError("audio is not supported; send what was said as content")


class FunctionSpec(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    """A tool as templates get it, with all fields that the client sends."""

    function: FunctionSpec
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct, frozen=True):
    name: str


class NamedTool(msgspec.Struct):
    function: FunctionName
    type: Literal["function"] = "function"


class AllowedTools(msgspec.Struct):
    """The model sees these of the tools only."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(max_length=MAX_TOOLS)]


class NamedToolChoice(msgspec.Struct):
    """`function`, or with the type allowed_tools a choice among those, which a request then has instead."""

    function: FunctionName = FunctionName("")
    type: Literal["function", "allowed_tools"] = "function"
    allowed_tools: AllowedTools | None = None


class ReasoningControls(msgspec.Struct):
    """`reasoning_effort`, `thinking_budget` and `enable_thinking` in the form of OpenRouter's clients."""

    effort: Name | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    """As `include_reasoning` false."""


class ThinkingControls(msgspec.Struct):
    """The switch in the form of Anthropic's, DeepSeek's and GLM's APIs."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    clear_thinking: bool | None = None
    """A variable of GLM's templates: thoughts of earlier turns are not shown."""


MessageFields = Annotated[dict[str, Any], Meta(extra_json_schema={"$ref": "#/components/schemas/ChatMessage"})]
ToolFields = Annotated[dict[str, Any], Meta(extra_json_schema={"$ref": "#/components/schemas/Tool"})]


class ChatCompletionRequest(SamplingFields, kw_only=True):
    """`messages` and `tools` stay as they came, because templates may read any field; they are checked like
    ChatMessage and Tool."""

    unsupported: ClassVar = CHAT

    messages: Annotated[list[MessageFields], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Meta(ge=0, le=100)] | None = None
    tools: Annotated[list[ToolFields], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = True

    reasoning_effort: str | None = None
    reasoning: ReasoningControls | None = None
    thinking: bool | ThinkingControls | None = None
    enable_thinking: bool | None = None
    thinking_budget: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    """Tokens after which thoughts are ended. Other servers' names for it: the next two."""
    max_thinking_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = False
    add_generation_prompt: bool = True
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    include_reasoning: bool | None = True
    """False: the answer is without its thoughts."""
    input_ids: list[Int] | None = None

    def __post_init__(self) -> None:
        _check("messages", self.messages, list[ChatMessage])
        _check("tools", self.tools or [], list[Tool])
        self._switch_thinking()
        names = {tool["function"]["name"] for tool in self.tools or ()}
        if isinstance(self.tool_choice, NamedToolChoice) and self.tool_choice.allowed_tools is not None:
            self._allow_tools(self.tool_choice.allowed_tools, names)
        if self.tool_choice == "required" and not names:
            raise bad_request('tool_choice "required" needs a non-empty "tools" list', param="tool_choice")
        if isinstance(self.tool_choice, NamedToolChoice) and self.tool_choice.function.name not in names:
            raise bad_request(
                f"tool_choice names {self.tool_choice.function.name!r}, which is not one of the tools",
                param="tool_choice",
            )
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", param="top_logprobs")
        budgets = {self.thinking_budget, self.max_thinking_tokens, self.thinking_token_budget} - {None}
        if len(budgets) > 1:
            raise bad_request("thinking_budget is given by several names, with different values")
        self.thinking_budget = next(iter(budgets), None)

    def _allow_tools(self, allowed: AllowedTools, names: set[str]) -> None:
        """Leaves the tools that may be called."""
        kept = {tool.function.name for tool in allowed.tools}
        unknown = next((name for name in kept if name not in names), None)
        if unknown is not None:
            raise bad_request(f"tool_choice names {unknown[:64]!r}, which is not one of the tools", param="tool_choice")
        self.tools = [tool for tool in self.tools or () if tool["function"]["name"] in kept]
        self.tool_choice = allowed.mode

    def _switch_thinking(self) -> None:
        """Takes other APIs' names for the switch of thoughts and for their effort."""
        given, controls = self.thinking, self.reasoning or ReasoningControls()
        variables: dict[str, Any] = {}
        if isinstance(given, ThinkingControls) and given.clear_thinking is not None:
            variables["clear_thinking"] = given.clear_thinking
        thinks = given.type != "disabled" if isinstance(given, ThinkingControls) else given
        switches = (self.enable_thinking, thinks, controls.enabled)
        switch = next((value for value in switches if value is not None), None)
        if switch is not None:
            variables |= {"enable_thinking": switch, "thinking": switch}
        if variables:
            self.chat_template_kwargs = {**variables, **(self.chat_template_kwargs or {})}
        self.reasoning_effort = self.reasoning_effort or controls.effort

    @property
    def hides_thoughts(self) -> bool:
        """Returns whether the client wants no text of thoughts."""
        return self.include_reasoning is False or (self.reasoning is not None and bool(self.reasoning.exclude))

    @property
    def wanted_thoughts(self) -> int | None:
        """Tokens after which thoughts are ended where the model's format allows it."""
        given = self.thinking.budget_tokens if isinstance(self.thinking, ThinkingControls) else None
        return given if given is not None or self.reasoning is None else self.reasoning.max_tokens


def _check(name: str, entries: list[dict[str, Any]], kind: Any) -> None:
    """Raises ApiError 400 for the first entry that is not as `kind` says."""
    try:
        msgspec.convert(entries, kind)
    except msgspec.ValidationError as error:
        raise from_decode_error(error, inside=name) from None


class TokenizeRequest(Body, kw_only=True):
    """`prompt`, or `messages` with what a template reads of a chat request. `add_special_tokens`: left out, they are
    added to texts; templates write their own."""

    unsupported: ClassVar = CHAT

    model: Name | None = None
    prompt: str | Annotated[list[str], Meta(max_length=MAX_TEXTS)] | None = None
    messages: Annotated[list[MessageFields], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[ToolFields], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    continue_final_message: bool | None = False
    add_generation_prompt: bool | None = True
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("give either prompt or messages", param="prompt")

    def chat(self) -> ChatCompletionRequest | None:
        """The conversation as a chat request. Raises ApiError 400."""
        if self.messages is None:
            return None
        return ChatCompletionRequest(
            messages=self.messages,
            tools=self.tools,
            chat_template_kwargs=self.chat_template_kwargs,
            reasoning_effort=self.reasoning_effort,
            continue_final_message=self.continue_final_message,
            add_generation_prompt=self.add_generation_prompt is not False,
        )


class DetokenizeRequest(Body, kw_only=True):
    model: Name | None = None
    tokens: list[Int | list[Int]]
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if len(set(map(type, self.tokens))) > 1:
            raise bad_request("tokens must be a list of token ids or a list of such lists", param="tokens")


class ParseCallsRequest(Body, kw_only=True):
    """`tool_call_parser`: a format's name as the flag takes it; left out: the server's."""

    text: Annotated[str, Meta(max_length=MAX_PARSED_CHARS)]
    tools: Annotated[list[ToolFields], Meta(max_length=MAX_TOOLS)]
    tool_call_parser: str | None = None

    def __post_init__(self) -> None:
        _check("tools", self.tools, list[Tool])


class SeparateReasoningRequest(Body, kw_only=True):
    """`reasoning_parser`: a format's name as the flag takes it; left out: the server's."""

    text: Annotated[str, Meta(max_length=MAX_PARSED_CHARS)]
    reasoning_parser: str | None = None


BODIES = (
    ChatCompletionRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    ParseCallsRequest,
    SeparateReasoningRequest,
    ChatMessage,
    Tool,
)
"""The bodies that `/openapi.json` describes."""
