"""Request bodies of the OpenAI routes. Used for validation and for `/openapi.json`; responses are built by hand.

Value ranges of sampling parameters are checked in one place for all routes (`SamplingParams.verify`), not here.
Unknown fields are ignored, as clients send many.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""An integer that the messages between the processes can carry."""


class StreamOptions(BaseModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchemaFormat(BaseModel):
    model_config = ConfigDict(populate_by_name=True)

    name: str = "schema"
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """`type` text | json_object | json_schema | structural_tag; the last keeps its own fields."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_given(self) -> ResponseFormat:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.json_schema is None):
            raise ValueError('type "json_schema" needs "json_schema": {"name": ..., "schema": {...}}')
        return self


class SamplingFields(BaseModel):
    """What chat and completion requests share. None means: not given."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    n: int | None = Field(default=None, ge=1, le=128)
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
    cache_salt: str | None = None
    lora_path: str | None = None

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class CompletionRequest(SamplingFields):
    prompt: str | list[Int] | list[str] | list[list[Int]]
    suffix: str | None = None
    echo: bool = False
    best_of: Int | None = None
    logprobs: int | None = Field(default=None, ge=0, le=100)


class ContentPart(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    """One message; fields that only some templates know (`reasoning_content`, `name`, ...) are passed through."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class FunctionSpec(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    type: Literal["function"] = "function"
    function: FunctionSpec


class FunctionName(BaseModel):
    name: str


class NamedToolChoice(BaseModel):
    type: Literal["function"] = "function"
    function: FunctionName


class ChatCompletionRequest(SamplingFields):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=100)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool = True

    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    input_ids: list[Int] | None = None

    @model_validator(mode="after")
    def _tools_match_choice(self) -> ChatCompletionRequest:
        names = {tool.function.name for tool in self.tools or ()}
        if self.tool_choice == "required" and not names:
            raise ValueError('tool_choice "required" needs a non-empty "tools" list')
        if isinstance(self.tool_choice, NamedToolChoice) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name!r}, which is not one of the tools")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self


class TokenizeRequest(BaseModel):
    model: str = ""
    prompt: str | list[str]
    add_special_tokens: bool = True


class DetokenizeRequest(BaseModel):
    model: str = ""
    tokens: list[Int] | list[list[Int]]
    skip_special_tokens: bool = True
