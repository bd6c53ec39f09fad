"""Bodies that are correct JSON and would cost a careless server its memory, its time or its answers to others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fuzz.scale import LONG

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
SESSIONS = {"list": {"streaming": True}, "tree": {}}
"""Sessions that are open during the attacks, by what opens them."""
REFUSED, EITHER = (400, 413, 422), (200, 400, 413, 422)


@dataclass(frozen=True)
class Hostile:
    name: str
    path: str
    make_body: Callable[[], Any]
    statuses: tuple[int, ...] = EITHER
    """What the answer may be. As a rule it is the server's choice what it serves and what it refuses."""
    copies: int = 1
    """How many are sent at the same time."""
    leave_after_s: float | None = None
    """The client closes the connection then."""


def generate(**params: Any) -> dict[str, Any]:
    return {"text": "a", "sampling_params": {"max_new_tokens": 4, **params}}


def in_session(name: str, **fields: Any) -> dict[str, Any]:
    return {"session_params": {"id": name}, "sampling_params": {"max_new_tokens": 1}, **fields}


def chat(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **fields}


def items(count: int, text: str) -> list[Any]:
    return [{"role": "user", "content": text}] * count


def marked(text: str) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "f"}}
    return {"text": text, "tools": [tool], "tool_call_parser": "gpt-oss"}


# --- lists ------------------------------------------------------------------------------------------------------------

MANY = 300_000
LISTS: list[tuple[str, str, Callable[[list[Any]], Any]]] = [
    (GENERATE, "input_ids", lambda many: {"input_ids": many}),
    (GENERATE, "input_ids of a session", lambda many: in_session("tree", input_ids=many)),
    (GENERATE, "text of a session", lambda many: in_session("list", text=many)),
    (GENERATE, "text", lambda many: {"text": many}),
    (GENERATE, "sampling_params", lambda many: {"text": "a", "sampling_params": many}),
    (GENERATE, "stop", lambda many: generate(stop=many)),
    (GENERATE, "rid", lambda many: {"text": "a", "rid": many}),
    (GENERATE, "token_ids_logprob", lambda many: {"text": "a", "token_ids_logprob": many}),
    (COMPLETIONS, "prompt", lambda many: {"prompt": many}),
    (COMPLETIONS, "stop", lambda many: {"prompt": "a", "stop": many}),
    (COMPLETIONS, "stop_token_ids", lambda many: {"prompt": "a", "stop_token_ids": many}),
    (COMPLETIONS, "logit_bias", lambda many: {"prompt": "a", "logit_bias": many}),
    (CHAT, "messages", lambda many: {"messages": many}),
    (CHAT, "content", chat),
    (CHAT, "tools", lambda many: chat(tools=many)),
    (CHAT, "tool_calls", lambda many: {"messages": [{"role": "assistant", "content": "a", "tool_calls": many}]}),
    ("/tokenize", "prompt", lambda many: {"prompt": many}),
    ("/detokenize", "tokens", lambda many: {"tokens": many}),
]
ELEMENTS: list[Any] = [{}, [[]], "x", [], None, -1.5] if LONG else [{}, "x"]


def lists_of_wrong_things() -> Iterator[Hostile]:
    """An element may be wrong in every way that its field knows; the cost must not be a multiple of the body for it."""
    for path, field, make in LISTS:
        for element in ELEMENTS:
            yield Hostile(f"{path} {field} of {MANY:,} {element}", path, lambda m=make, e=element: m([e] * MANY))


# --- texts and tokens -------------------------------------------------------------------------------------------------

LARGE: dict[str, tuple[str, Callable[[], Any]]] = {
    "a stop string of 40,000 characters": (GENERATE, lambda: generate(stop="ab" * 20_000)),
    "32 stop strings of 40,000 characters": (GENERATE, lambda: generate(stop=[f"{i}" * 40_000 for i in range(32)])),
    "a stop string of 5,000,000 characters": (GENERATE, lambda: generate(stop="ab" * 2_500_000)),
    "200,000 stop tokens": (GENERATE, lambda: generate(stop_token_ids=[5] * 200_000)),
    "a bias for every token": (GENERATE, lambda: generate(logit_bias={str(i): 1.0 for i in range(4_000)})),
    "a bias for 100,000 tokens": (GENERATE, lambda: generate(logit_bias={str(i): 1.0 for i in range(100_000)})),
    "28 MB in a session": (GENERATE, lambda: in_session("tree", text="word " * 5_600_000)),
    "28 MB of one letter in a session": (GENERATE, lambda: in_session("tree", text="a" * 28_000_000)),
    "28 MB in a streaming session": (GENERATE, lambda: in_session("list", text="word " * 5_600_000)),
    "2,000,000 ids in a session": (GENERATE, lambda: in_session("tree", input_ids=[5] * 2_000_000)),
    "2,000,000 ids in a streaming session": (GENERATE, lambda: in_session("list", input_ids=[5] * 2_000_000)),
    "an id of a session of 20 MB": (GENERATE, lambda: in_session("s" * 20_000_000, text="a")),
    "a session with a name of 20 MB": (
        "/open_session",
        lambda: {"capacity_of_str_len": 9, "session_id": "s" * 20_000_000},
    ),
    "a prompt of 20 MB": (GENERATE, lambda: {"text": "word " * 4_000_000}),
    "a prompt of 20 MB without a space": (COMPLETIONS, lambda: {"prompt": "a" * 20_000_000}),
    "a prompt of 512 characters a token": (COMPLETIONS, lambda: {"prompt": "a" * (256 * 512 - 1)}),
    "a message of 20 MB": (CHAT, lambda: chat("word " * 4_000_000)),
    "20,000 messages": (CHAT, lambda: {"messages": [{"role": "user", "content": "a"}] * 20_000}),
    "20,000 tools": (CHAT, lambda: chat(tools=[{"type": "function", "function": {"name": "f"}}] * 20_000)),
    "a model name of 1 MB": (CHAT, lambda: chat(model="m" * 1_000_000)),
    "a rid of 1 MB": (GENERATE, lambda: {"text": "a", "rid": "r" * 1_000_000}),
    "20 MB to tokenize": ("/tokenize", lambda: {"prompt": "a b" * 7_000_000}),
    "5 MB of one letter to tokenize": ("/tokenize", lambda: {"prompt": "a" * 5_000_000}),
    "100,000 texts to tokenize": ("/tokenize", lambda: {"prompt": ["a b c"] * 100_000}),
    "2,000,000 ids to detokenize": ("/detokenize", lambda: {"tokens": [5] * 2_000_000}),
    "3 MB of messages to count": ("/v1/messages/count_tokens", lambda: chat("word " * 600_000)),
    "3 MB of items to cut": ("/v1/responses", lambda: {"input": items(300, "word " * 2_000), "truncation": "auto"}),
    "a call's marker 50,000 times": ("/parse_function_call", lambda: marked("<|channel|>" * 50_000)),
    "a query of 1 MB for 2,048 items": (
        "/v1/score",
        lambda: {"query": "word " * 200_000, "items": ["a"] * 2_048, "label_token_ids": [5]},
    ),
    "a query of 1 MB for 2,048 documents": (
        "/v1/rerank",
        lambda: {"query": "word " * 200_000, "documents": ["a"] * 2_048},
    ),
    "17 MB of tools for later": (
        "/v1/responses",
        lambda: {"input": "a", "background": True, "tools": [{"type": "function", "name": "f" * 17_000_000}]},
    ),
    "log probabilities of 200,000 tokens": (
        GENERATE,
        lambda: {**generate(), "return_logprob": True, "token_ids_logprob": [5] * 200_000},
    ),
    "log probabilities of all": (
        GENERATE,
        lambda: {**generate(), "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 4_000},
    ),
}

STRANGE = {"a lone surrogate": "\ud800", "half a pair": "a\udc00b", "NUL": "\0", "no character": "\U0010ffff\ufffe"}
STRANGE_ARGUMENTS = {**STRANGE, "nesting": "[" * 100_000, "half an object": '{"a": ', "NaN": '{"a": NaN}'}
TEXT_FIELDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "content": (CHAT, chat),
    "stop": (CHAT, lambda text: chat(stop=text)),
    "rid": (CHAT, lambda text: chat(rid=text)),
    "model": (CHAT, lambda text: chat(model=text)),
    "regex": (CHAT, lambda text: chat(regex=text)),
    "stop_regex": (CHAT, lambda text: chat(stop_regex=text)),
    "ebnf": (CHAT, lambda text: chat(ebnf=f'root ::= "{text}"')),
    "an unknown field": (CHAT, lambda text: chat(**{text: text})),
    "a template argument": (CHAT, lambda text: chat(chat_template_kwargs={text: text})),
    "a tool": (CHAT, lambda text: chat(tools=[{"function": {"name": text, "parameters": {text: text}}}])),
    "a schema": (GENERATE, lambda text: generate(json_schema=json.dumps({"enum": [text]}))),
    "text": (GENERATE, lambda text: {**generate(), "text": text}),
    "text of a session": (GENERATE, lambda text: in_session("list", text=text)),
    "name of a session": (GENERATE, lambda text: in_session(text, text="a")),
    "request of a session": (GENERATE, lambda text: {**generate(), "session_params": {"id": "tree", "rid": text}}),
    "/open_session": ("/open_session", lambda text: {"capacity_of_str_len": 9, "session_id": text}),
    "/tokenize": ("/tokenize", lambda text: {"prompt": text}),
    "/abort_request": ("/abort_request", lambda text: {"rid": text}),
}
TEMPLATE_NAMES = ("messages", "bos_token", "raise_exception", "tools", "add_generation_prompt", "__class__")


def large_texts() -> Iterator[Hostile]:
    for name, (path, make) in LARGE.items():
        yield Hostile(name, path, make)


def strange_texts() -> Iterator[Hostile]:
    for field, (path, make) in TEXT_FIELDS.items():
        for name, text in STRANGE.items():
            yield Hostile(f"{field} of {name}", path, lambda m=make, t=text: m(t))
    for name, arguments in STRANGE_ARGUMENTS.items():
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        yield Hostile(f"tool_calls arguments of {name}", CHAT, lambda m=message: {"messages": [m], "max_tokens": 2})
    for key in TEMPLATE_NAMES:
        yield Hostile(f"template argument {key}", CHAT, lambda k=key: chat(chat_template_kwargs={k: [["x"]]}))


# --- sequences --------------------------------------------------------------------------------------------------------


def batch(num_prompts: int, n: int) -> Any:
    return {"text": ["a"] * num_prompts, "sampling_params": {"n": n, "max_new_tokens": 1}}


def many_sequences() -> Iterator[Hostile]:
    completions = {"prompt": ["a"] * 4_096, "n": 128, "max_tokens": 1}
    yield Hostile("5,000 prompts", GENERATE, lambda: batch(5_000, 1), REFUSED)
    yield Hostile("4,096 prompts x 128", GENERATE, lambda: batch(4_096, 128), leave_after_s=2.0)
    yield Hostile("4,096 completions x 128", COMPLETIONS, lambda: completions, leave_after_s=2.0)
    yield Hostile("4,096 prompts x 5", GENERATE, lambda: batch(4_096, 5), leave_after_s=0.5)
    yield Hostile("200 prompts x 128", GENERATE, lambda: batch(200, 128), leave_after_s=0.5)
    for session in SESSIONS:
        name, body = (
            f"28 MB in the session {session}, four times, and gone",
            in_session(session, text="a " * 14_000_000),
        )
        yield Hostile(name, GENERATE, lambda body=body: body, copies=4, leave_after_s=0.5)
    yield Hostile("128 samples", GENERATE, lambda: batch(1, 128), (200,))
