"""Request bodies of Ollama's API. Used for validation and for `/openapi.json`.

What only tunes Ollama's own engine (keep_alive, num_gpu, num_thread, ...) is ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from sglang.srt.entrypoints.embeddings.protocol import MAX_INPUTS
from sglang.srt.entrypoints.http_body import Body
from sglang.srt.entrypoints.http_errors import from_decode_error
from sglang.srt.entrypoints.openai.protocol import MAX_MESSAGES, MAX_TOOLS, Int, Name, ToolFields
from sglang.srt.entrypoints.unsupported_fields import OLLAMA, OLLAMA_OPTIONS, refuse_unsupported

Images = Annotated[list[str], Meta(max_length=1024)]
"""Images in base64."""


class Options(msgspec.Struct):
    """The options of sampling; None: the model's default. `num_predict` below 0: until the context is full."""

    num_predict: Int | None = None
    seed: Int | None = None
    temperature: float | None = None
    top_k: Int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}


class Call(msgspec.Struct):
    function: CalledFunction


class OllamaMessage(msgspec.Struct):
    """`tool_name`: of a tool's result."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Annotated[list[Call], Meta(max_length=MAX_TOOLS)] | None = None
    tool_name: str | None = None


class _GenerateFields(Body, kw_only=True):
    """`think`: whether the model thinks first, or how hard; `format`: json, or a JSON schema."""

    unsupported: ClassVar = OLLAMA

    model: Name = ""
    stream: bool | None = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Annotated[dict[str, Any], Meta(extra_json_schema={"$ref": "#/components/schemas/Options"})] | None = None
    think: bool | Literal["low", "medium", "high"] | None = None

    def read_options(self) -> Options:
        """Raises ApiError 400 for an option that is wrong or changes what this server does."""
        if self.options is None:
            return Options()
        try:
            options = msgspec.convert(self.options, Options, strict=False)
            refuse_unsupported(msgspec.json.encode(self.options), OLLAMA_OPTIONS)
        except msgspec.ValidationError as error:
            raise from_decode_error(error, inside="options") from None
        return options


class OllamaChatRequest(_GenerateFields, kw_only=True):
    messages: Annotated[list[OllamaMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    """None, or an empty list: nothing is generated."""
    tools: Annotated[list[ToolFields], Meta(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateRequest(_GenerateFields, kw_only=True):
    prompt: str | None = None
    """None, or empty: nothing is generated."""
    system: str | None = None
    images: Images | None = None
    raw: bool | None = False
    """The prompt is not put into the chat template."""


class OllamaEmbedRequest(Body, kw_only=True):
    unsupported: ClassVar = OLLAMA

    model: Name = ""
    input: str | Annotated[list[str], Meta(max_length=MAX_INPUTS)]
    dimensions: Annotated[int, Meta(ge=1, le=2**31)] | None = None


class OllamaEmbeddingsRequest(Body, kw_only=True):
    """As clients older than /api/embed send it."""

    unsupported: ClassVar = OLLAMA

    model: Name = ""
    prompt: str = ""


class ShowRequest(Body, kw_only=True):
    """`name`: as older clients call the model."""

    model: Name = ""
    name: Name = ""
    verbose: bool | None = False


BODIES = (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaEmbedRequest,
    OllamaEmbeddingsRequest,
    ShowRequest,
    Options,
)
"""The bodies that `/openapi.json` describes."""
