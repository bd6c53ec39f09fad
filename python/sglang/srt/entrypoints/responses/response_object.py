"""The response object: fields of the request, the items of the answer, usage and status."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from sglang.srt.entrypoints.responses.protocol import ResponsesRequest
from sglang.srt.entrypoints.responses.tools import ResponseTool, ToolCatalog
from sglang.srt.managers.wire.io_struct import FinishReason, TokenMeta


def item_id(prefix: str) -> str:
    """Returns a new id."""
    return f"{prefix}_{uuid.uuid4().hex}"


def text_part(text: str = "") -> dict[str, Any]:
    """Returns a content part with text of the answer."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def thought_part(text: str = "") -> dict[str, Any]:
    """Returns a content part with text of thoughts."""
    return {"type": "reasoning_text", "text": text}


def message_item(status: str, *content: dict[str, Any]) -> dict[str, Any]:
    """Returns an output item with a message of the model."""
    return {"id": item_id("msg"), "type": "message", "role": "assistant", "status": status, "content": list(content)}


def reasoning_item(status: str, *content: dict[str, Any]) -> dict[str, Any]:
    """Returns an item of thoughts. They are not summarized or encrypted: they come back as text, and the model may read
    them."""
    return {"id": item_id("rs"), "type": "reasoning", "status": status, "summary": [], "content": list(content)}


def typed_item(item: dict[str, Any]) -> dict[str, Any]:
    """Returns an item of the input as the API lists it, with type, status, and content as parts."""
    item = {"type": "message", "status": "completed", **item}
    if item["type"] == "message" and isinstance(item.get("content"), str):
        said = item.get("role") == "assistant"
        part = text_part(item["content"]) if said else {"type": "input_text", "text": item["content"]}
        item["content"] = [part]
    return item


def usage(meta: TokenMeta, reports_cached: bool) -> dict[str, Any]:
    """Returns the `usage` object. reports_cached: with the number of cached tokens."""
    return {
        "input_tokens": meta.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": meta.cached_tokens if reports_cached else 0,
            "cache_write_tokens": 0,
        },
        "output_tokens": meta.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": meta.reasoning_tokens},
        "total_tokens": meta.prompt_tokens + meta.completion_tokens,
    }


def item_status(finish: FinishReason) -> str:
    """Returns the status of the item in which the answer ended."""
    return "completed" if finish.type == "stop" else "incomplete"


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The fields that all states of one response share. `echoed`: those that repeat the request, as JSON, because they
    may be large and several events of a stream have them."""

    id: str
    created_at: int
    model: str
    background: bool
    tools: ToolCatalog
    reports_cached: bool
    echoed: Mapping[str, msgspec.Raw]
    num_echoed_bytes: int

    def call_item(self, status: str, call_id: str, name: str) -> dict[str, Any]:
        """Returns the item of a call of the tool that the model knows as `name`; `tools.fill` adds the arguments."""
        return self.tools.call_item(item_id, status, call_id, name)

    def state(self, status: str, **fields: Any) -> dict[str, Any]:
        """Returns the response with this status; `fields` are `output`, `usage`, `error` and `incomplete_details`, as
        available."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "background": self.background,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": [],
            "usage": None,
            **self.echoed,
            **fields,
        }

    def ended(self, output: list[dict[str, Any]], meta: TokenMeta, finish: FinishReason) -> dict[str, Any]:
        """Returns the response as completed, or as incomplete if the token limit cut it."""
        whole = finish.type == "stop"
        return self.state(
            "completed" if whole else "incomplete",
            incomplete_details=None if whole else {"reason": "max_output_tokens"},
            output=output,
            usage=usage(meta, self.reports_cached),
        )

    def failed(self, message: str, output: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """Returns the response as failed."""
        return self.state("failed", error={"code": "server_error", "message": message}, output=output or [])


def echoed_fields(body: ResponsesRequest) -> dict[str, msgspec.Raw]:
    """Returns the fields of a response that repeat the request, as JSON. Takes long for large tools."""
    fields = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": body.service_tier or "default",
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": _text_format(body)},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [_tool(tool) for tool in body.tools or ()],
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}


def _text_format(body: ResponsesRequest) -> dict[str, Any]:
    form = None if body.text is None else body.text.format
    if form is None or form.type != "json_schema":
        return {"type": "text" if form is None else form.type}
    return msgspec.structs.asdict(form)


def _tool(tool: ResponseTool) -> Any:
    """Returns a tool as the API lists it: a function with all of its fields, others with the client's."""
    if tool.type != "function":
        return msgspec.to_builtins(tool)
    return {name: getattr(tool, name) for name in ("type", "name", "description", "parameters", "strict")}
