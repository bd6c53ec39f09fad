"""Each field of the requests of the `openai` and `anthropic` libraries has a verdict, and the server keeps to it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, get_args

import fields_page
import msgspec
import pytest
from fields_page import Form

from sglang.srt.entrypoints import unsupported_fields
from sglang.srt.entrypoints.anthropic import conversation as messages
from sglang.srt.entrypoints.http_body import parse_body
from sglang.srt.entrypoints.http_errors import ApiError
from sglang.srt.entrypoints.openai import protocol as openai_protocol
from sglang.srt.entrypoints.openai import serving_completions
from sglang.srt.entrypoints.openai.media_parts import media_of
from sglang.srt.entrypoints.openai.template_messages import CallForm, template_message
from sglang.srt.entrypoints.responses import conversation as responses
from sglang.srt.entrypoints.responses import protocol as responses_protocol

from .sdk_requests import Case, Given, Overrides, Walk

FORMS = {form.route: form for form in fields_page.forms()}
_ITEMS = get_args(responses_protocol.ConversationItem)
OVERRIDES: Overrides = {
    ("ChatCompletionRequest", "messages"): (openai_protocol.ChatMessage,),
    ("ChatCompletionRequest", "tools"): (openai_protocol.Tool,),
    ("ResponsesRequest", "input"): _ITEMS,
    ("ResponseContext", "input"): _ITEMS,
}
X: Any = {"type": "object"}
USER = {"role": "user", "content": "x"}
FIXED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [USER],
        "tools": [{"type": "function", "function": {"name": "x"}}],
        "logprobs": True,
    },
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x", "tools": [{"type": "function", "name": "x"}]},
    "/v1/responses/input_tokens": {"input": "x", "tools": [{"type": "function", "name": "x"}]},
    "/v1/messages": {"messages": [USER], "max_tokens": 1, "tools": [{"name": "x", "input_schema": X}]},
    "/v1/messages/count_tokens": {"messages": [USER], "tools": [{"name": "x", "input_schema": X}]},
    "/v1/embeddings": {"input": "x"},
}
"""Fields that the others need."""
GIVEN: Given = {
    "input_image": {"image_url": "x"},
    "function_call_output": {"call_id": "x"},
    "function_call": {"arguments": "{}"},
    "function": {"arguments": "{}", "name": "x"},
    "json_schema": {"schema": X},
    "context_management": {"type": "compaction"},
    "compaction": {"type": "compaction"},
    "allowed_tools": {"tools": [{"type": "function", "name": "x", "function": {"name": "x"}}]},
}
_CALLED = {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "x", "input": {}}]}
_CALL = {"type": "function_call", "call_id": "x", "name": "x", "arguments": "{}"}


def whole(route: str, request: dict[str, Any]) -> dict[str, Any]:
    """The request with what its fields need; a conversation with the call whose result the client may send."""
    request = {**FIXED[route], **request}
    if isinstance(request.get("messages"), list) and "/messages" in route:
        request["messages"] = [USER, _CALLED, *request["messages"], USER]
    if isinstance(request.get("input"), list) and "/responses" in route:
        request["input"] = [_CALL, *request["input"]]
    return request


def _read_chat(body: Any) -> None:
    media_of(body.messages)
    for message in body.messages:
        template_message(message, CallForm())


READERS: dict[str, Callable[[Any], Any]] = {
    "/v1/chat/completions": _read_chat,
    "/v1/completions": serving_completions._check,
    "/v1/responses": lambda body: responses.chat_request(body, responses_protocol.read_items(body.items())),
    "/v1/responses/input_tokens": lambda body: responses.chat_request(
        body, responses_protocol.read_items(body.items())
    ),
    "/v1/messages": messages.chat_request,
    "/v1/messages/count_tokens": messages.chat_request,
    "/v1/embeddings": lambda body: None,
}


def refusal(form: Form, request: dict[str, Any]) -> str | None:
    try:
        READERS[form.route](parse_body(msgspec.json.encode(whole(form.route, request)), form.body))
    except ApiError as error:
        return error.message
    return None


def verdict(form: Form, case: Case) -> str | None:
    """done, nothing or refused; None: nobody has decided."""
    given = next((form.verdicts[name] for name in names(form, case)), None)
    return given or ("done" if case.is_read else None)


def names(form: Form, case: Case) -> list[str]:
    """The names by which the table knows the field. What the server refuses by itself are fields of the request."""
    own = form.body.unsupported if case.label else {}
    return [name for name in case.names if name in form.verdicts and name not in own]


def complaint(form: Form, case: Case) -> str | None:
    decided = verdict(form, case)
    if decided is None:
        return f"{case.names[0]} has no verdict"
    reason = refusal(form, case.request)
    if decided == "refused" and _asks_for_nothing(form, case):
        return None
    if decided != "refused":
        return f"{case.names[0]} is {decided}, and refused: {reason}" if reason else None
    if reason is None:
        return f"{case.names[0]} is refused by the table alone"
    named = any(word in reason for word in (case.field, str(case.value), case.label or case.field))
    return None if named else f"{case.names[0]} is refused without its name: {reason}"


def _asks_for_nothing(form: Form, case: Case) -> bool:
    """Returns whether the value passes also where its field is refused."""
    if not case.label and case.field in form.body.unsupported:
        value = msgspec.json.encode(case.request[case.field])
        return unsupported_fields._is_neutral(value, form.body.unsupported[case.field])
    return case.value in ("null", "false") and f"={case.value}" not in names(form, case)[0]


@functools.cache
def cases(route: str) -> list[Case]:
    form = FORMS[route]
    walk = Walk(OVERRIDES, GIVEN, lambda case: bool(names(form, case)))
    return [
        case for client in form.clients for case in walk.cases(fields_page.load(client), form.body, lambda value: value)
    ]


@pytest.mark.parametrize("route", FORMS)
def test_each_field_has_its_verdict(route: str) -> None:
    form = FORMS[route]
    found = sorted({complaint(form, case) or "" for case in cases(route)} - {""})
    assert not found, "\n".join([f"{len(found)} fields; decide in scripts/request_fields.json:", *found])


def test_the_table_has_no_field_that_no_library_sends() -> None:
    """An old verdict would be taken for that of a new field of this name."""
    met = {name for route in FORMS for case in cases(route) for name in case.names}
    rows = {name for form in FORMS.values() for row in (*form.nothing, *form.refused) for name in row.names}
    assert sorted(rows - met) == []


def test_a_new_field_has_no_verdict() -> None:
    form = FORMS["/v1/messages"]
    for case in (
        Case("", "field_of_tomorrow", None, False, {"field_of_tomorrow": 1}),
        Case("user", "content", "hologram", False, {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}),
    ):
        assert "has no verdict" in str(complaint(form, case))
