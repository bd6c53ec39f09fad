"""Anthropic's Messages API through the real `anthropic` client; the embedded model calls and thinks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from live_server import LiveServer, live_server

KEY = "secret"
MODEL = "tiny"
APPLES = "Tom has 12 apples. He buys 30 more and then gives 5 away. How many does he have now?"
ADD = "Use the tool to add 12 and 30."
TIME = "What time is it in Paris?"


def tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"name": name, "description": description, "input_schema": schema}


TOOLS = [
    tool("add_numbers", "Adds two numbers.", a={"type": "integer"}, b={"type": "integer"}),
    tool("get_time", "Returns the time in a city.", city={"type": "string"}),
]
QUIET = {"type": "disabled"}
GREEDY = {"temperature": 0}
"""The API has the field, though newer clients do not name it."""


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    parsers = ("--tool-call-parser", "auto", "--reasoning-parser", "auto")
    with live_server(*parsers, "--served-model-name", MODEL, "--api-key", KEY, "--enable-cache-report") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    """It sends its key as `x-api-key`."""
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=300) as connected:
        yield connected


def ask(client: anthropic.Anthropic, *content: Any, **options: Any) -> Any:
    """`content`: of messages of the user and the assistant in turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": entry} for number, entry in enumerate(content)]
    fixed = {"model": MODEL, "max_tokens": 200, "messages": messages, "extra_body": GREEDY}
    return client.messages.create(**{**fixed, **options})


def post(server: LiveServer, path: str = "/v1/messages", **body: Any) -> httpx.Response:
    fixed = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
    body = {name: value for name, value in {**fixed, **body}.items() if value is not None}
    return httpx.post(server.url + path, json=body, headers={"x-api-key": KEY}, timeout=300)


def test_text(client: anthropic.Anthropic) -> None:
    answer = ask(client, TIME, thinking=QUIET)
    assert answer.id.startswith("msg_") and (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    (block,) = answer.content
    assert block.type == "text" and block.text
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens > 0 and answer.usage.output_tokens > 0


def test_blocks_are_the_text_of_a_string(client: anthropic.Anthropic) -> None:
    blocks = [{"type": "text", "text": TIME, "cache_control": {"type": "ephemeral"}}]
    system = [{"type": "text", "text": "Be brief."}]
    whole = ask(client, TIME, system="Be brief.", thinking=QUIET)
    assert ask(client, blocks, system=system, thinking=QUIET, metadata={"user_id": "u"}).content == whole.content


def test_thinking(client: anthropic.Anthropic) -> None:
    answer = ask(client, APPLES, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000)
    thinking, text = answer.content
    assert "42 - 5 = 37" in thinking.thinking and text.text == "The answer is 37."
    assert 0 < answer.usage.output_tokens_details.thinking_tokens < answer.usage.output_tokens
    assert [block.type for block in ask(client, APPLES, thinking=QUIET).content] == ["text"]


def test_thoughts_that_are_not_shown(client: anthropic.Anthropic) -> None:
    """The client sends the answer back as it came, and the model reads its thoughts."""
    messages: Any = [{"role": "user", "content": APPLES}]
    hidden: Any = {"thinking": {"type": "adaptive", "display": "omitted"}, "extra_body": GREEDY}
    whole = ask(client, APPLES, thinking={"type": "adaptive", "display": "summarized"})
    answer = ask(client, APPLES, **hidden)
    with client.messages.stream(model=MODEL, max_tokens=200, messages=messages, **hidden) as stream:
        streamed = stream.get_final_message()
    assert whole.content[0].thinking and not whole.content[0].signature
    for reply in (answer, streamed):
        thoughts, text = reply.content
        assert (thoughts.type, thoughts.thinking, text.text) == ("thinking", "", whole.content[1].text)
        assert thoughts.signature == answer.content[0].signature != ""

    def count(*content: Any) -> int:
        """Tokens of a conversation in which the thoughts end in a call."""
        result = {"type": "tool_result", "tool_use_id": CALL["id"], "content": "noon"}
        turns = [{"role": "assistant", "content": [*content, CALL]}, {"role": "user", "content": [result]}]
        return client.messages.count_tokens(model=MODEL, messages=[*messages, *turns]).input_tokens

    assert count(answer.content[0]) == count(whole.content[0]) > count()


@pytest.mark.parametrize("content", [APPLES, ADD], ids=["thoughts", "call"])
def test_stream_is_the_whole_message(client: anthropic.Anthropic, content: str) -> None:
    whole = ask(client, content, tools=TOOLS)
    messages: Any = [{"role": "user", "content": content}]
    tools: Any = TOOLS
    with client.messages.stream(
        model=MODEL, max_tokens=200, messages=messages, tools=tools, extra_body=GREEDY
    ) as stream:
        final = stream.get_final_message()
    assert [plain(block) for block in final.content] == [plain(block) for block in whole.content]
    assert (final.stop_reason, final.model) == (whole.stop_reason, whole.model)
    assert final.usage.output_tokens == whole.usage.output_tokens


def plain(block: Any) -> dict[str, Any]:
    return {name: value for name, value in block.to_dict().items() if name in ("type", "text", "thinking", "input")}


def test_order_of_events(server: LiveServer) -> None:
    tools: Any = [*TOOLS]
    messages = [{"role": "user", "content": ADD}]
    reply = post(server, messages=messages, tools=tools, stream=True, max_tokens=200, temperature=0)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = [re.fullmatch(r"event: (\w+)\ndata: (.*)", event) for event in reply.text.strip().split("\n\n")]
    pairs = [(event[1], json.loads(event[2])) for event in events if event is not None]
    assert len(pairs) == len(events) and all(name == data["type"] for name, data in pairs)
    names = [name for name, _ in pairs]
    assert names[:2] == ["message_start", "ping"] and names[-2:] == ["message_delta", "message_stop"]
    open_index = None
    for name, data in pairs:
        if name == "content_block_start":
            assert open_index is None
            open_index = data["index"]
        elif name == "content_block_delta":
            assert data["index"] == open_index
        elif name == "content_block_stop":
            assert data["index"] == open_index
            open_index = None
    assert [data["index"] for name, data in pairs if name == "content_block_stop"] == list(
        range(names.count("content_block_start"))
    )
    pieces = [data["delta"]["partial_json"] for _, data in pairs if "partial_json" in data.get("delta", {})]
    assert len(pieces) > 3 and json.loads("".join(pieces)) == {"a": 12, "b": 30}


@pytest.mark.parametrize("choice", [{"type": "auto", "disable_parallel_tool_use": True}, {"type": "any"}])
def test_call_and_its_result(client: anthropic.Anthropic, choice: dict[str, Any]) -> None:
    answer = ask(client, TIME, tools=TOOLS, tool_choice=choice)
    assert answer.stop_reason == "tool_use"
    call = answer.content[-1]
    assert re.fullmatch("toolu_[0-9a-f]{24}", call.id)
    assert (call.type, call.name, call.input) == ("tool_use", "get_time", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "noon"}]}
    last = ask(client, TIME, answer.content, [result, {"type": "text", "text": "Thanks."}], tools=TOOLS)
    assert last.stop_reason == "end_turn" and last.content[-1].type == "text"


def test_tool_choice(client: anthropic.Anthropic) -> None:
    """The model would take another one by itself."""
    named = {"type": "tool", "name": "add_numbers"}
    (call,) = ask(client, TIME, tools=TOOLS, tool_choice=named, thinking=QUIET).content
    assert call.name == "add_numbers" and set(call.input) == {"a", "b"}
    answer = ask(client, TIME, tools=TOOLS, tool_choice={"type": "none"})
    assert answer.stop_reason == "end_turn" and all(block.type != "tool_use" for block in answer.content)


def test_ends(client: anthropic.Anthropic) -> None:
    cut = ask(client, APPLES, thinking=QUIET, max_tokens=2)
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 2
    whole = ask(client, APPLES, thinking=QUIET).content[0].text
    word = whole.split()[1]
    stopped = ask(client, APPLES, thinking=QUIET, stop_sequences=[word, "never said"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert word not in stopped.content[0].text


def test_last_message_of_the_assistant_is_continued(client: anthropic.Anthropic, server: LiveServer) -> None:
    (block,) = ask(client, APPLES, "The answer is", thinking=QUIET).content
    messages = [{"role": "user", "content": APPLES}, {"role": "assistant", "content": "The answer is"}]
    chat = post(
        server, "/v1/chat/completions", messages=messages, continue_final_message=True, max_tokens=200, **GREEDY
    )
    assert re.fullmatch(r" [0-9]+\.", block.text) and block.text == chat.json()["choices"][0]["message"]["content"]


def test_json_schema(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    config = {"format": {"type": "json_schema", "schema": schema}}
    answer = ask(client, APPLES, output_config=config, thinking=QUIET)
    assert isinstance(json.loads(answer.content[-1].text)["answer"], int)


def test_count_tokens(client: anthropic.Anthropic) -> None:
    messages: Any = [{"role": "user", "content": TIME}]
    tools: Any = TOOLS
    options = {"model": MODEL, "messages": messages, "system": "Be brief.", "tools": tools}
    count = client.messages.count_tokens(**options).input_tokens
    usage = ask(client, TIME, system="Be brief.", tools=TOOLS).usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens
    assert count > client.messages.count_tokens(model=MODEL, messages=messages).input_tokens


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "get_time", "input": {"city": "Paris"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_2", "content": "noon"}
MISTAKES = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "images are not supported"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "source"),
    ({"messages": [{"role": "user", "content": [RESULT]}]}, "no tool_use block"),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [CALL]}]}, "tool_result"),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}]}, "no text"),
    ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, "tools"),
    ({"tool_choice": {"type": "any"}}, "tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "other"),
    ({"thinking": {"type": "enabled"}}, "budget_tokens"),
    ({"top_p": 0}, "top_p"),
    ({"stop_sequences": ["a"] * 33}, "stop"),
    ({"mcp_servers": [{"url": "http://127.0.0.1"}]}, "mcp_servers"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "message"), MISTAKES)
def test_mistakes(server: LiveServer, fields: dict[str, Any], message: str, stream: bool) -> None:
    reply = post(server, **fields, stream=stream)
    body = reply.json()
    assert reply.status_code == 400 and body["type"] == "error" and set(body) == {"type", "error"}
    assert body["error"]["type"] == "invalid_request_error" and message in body["error"]["message"]


def test_errors_of_the_client(client: anthropic.Anthropic, server: LiveServer) -> None:
    with pytest.raises(anthropic.BadRequestError, match="images are not supported"):
        ask(client, [IMAGE])
    stranger = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
        ask(stranger, "Hi")
    with anthropic.Anthropic(base_url=server.url, auth_token=KEY, max_retries=0) as bearer:
        assert ask(bearer, "Hi", max_tokens=2).content
    assert httpx.get(f"{server.url}/v1/messages/none", headers={"x-api-key": KEY}).json()["error"]["type"] == (
        "not_found_error"
    )


def test_the_other_routes_keep_their_refusal(server: LiveServer) -> None:
    reply = httpx.get(f"{server.url}/v1/models", headers={"x-api-key": "wrong"})
    assert (reply.status_code, reply.json()) == (401, {"error": "Unauthorized"})


def test_failure_in_a_stream(client: anthropic.Anthropic, server: LiveServer) -> None:
    """The answer is aborted while it runs; its format makes it long."""
    text = {"type": "string", "minLength": 1000}
    schema = {"type": "object", "properties": {"text": text}, "required": ["text"]}
    config: Any = {"format": {"type": "json_schema", "schema": schema}}
    messages: Any = [{"role": "user", "content": "Hi"}]
    names = []
    with pytest.raises(anthropic.APIStatusError) as raised:
        for event in client.messages.create(
            model=MODEL, max_tokens=1500, messages=messages, stream=True, output_config=config
        ):
            names.append(event.type)
            if event.type == "message_start":
                httpx.post(f"{server.url}/abort_request", json={"abort_all": True}, headers={"x-api-key": KEY})
    body: Any = raised.value.body
    assert body["type"] == "error" and body["error"]["type"] == "overloaded_error"
    assert "aborted" in body["error"]["message"] and "message_stop" not in names


def test_a_thread_is_refused_so_that_clients_go_on_without(client: anthropic.Anthropic, server: LiveServer) -> None:
    """The tool loop of the client asks for a thread first; its second turn must have the whole history."""

    @anthropic.beta_tool
    def add_numbers(a: int, b: int) -> str:
        """Adds two numbers."""
        return json.dumps({"result": a + b})

    refusal = post(server, thread={"type": "create"})
    assert refusal.status_code == 400 and refusal.json()["error"]["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }
    assert post(server, "/v1/messages/count_tokens", max_tokens=None, thread=None).status_code == 200
    messages: Any = [{"role": "user", "content": ADD}]
    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=200, messages=messages, tools=[add_numbers], extra_body=GREEDY
    )
    turns = list(runner)
    assert [turn.stop_reason for turn in turns] == ["tool_use", "end_turn"]
    assert "42" in turns[-1].content[-1].text
    read = [turn.usage.input_tokens + turn.usage.cache_read_input_tokens for turn in turns]
    assert read[0] < read[1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("budget", [1, 6])
def test_a_thinking_budget_is_kept(client: anthropic.Anthropic, budget: int, stream: bool) -> None:
    params = {"thinking": {"type": "enabled", "budget_tokens": budget}, "max_tokens": 200}
    if stream:
        messages = [{"role": "user", "content": APPLES}]
        with client.messages.stream(model=MODEL, messages=messages, extra_body=GREEDY, **params) as events:
            answer = events.get_final_message()
    else:
        answer = ask(client, APPLES, **params)
    kinds = [block.type for block in answer.content]
    assert kinds[-1] == "text" and answer.stop_reason == "end_turn"
    thoughts = answer.usage.output_tokens_details.thinking_tokens
    assert thoughts <= budget + 2, "the tokens, and the marks around them"
