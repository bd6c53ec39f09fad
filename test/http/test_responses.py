"""OpenAI's Responses API through the real `openai` client; the embedded model calls and thinks."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
from live_server import LiveServer

MODEL = "tiny"
APPLES = "Tom has 12 apples. He buys 30 more and then gives 5 away. How many does he have now?"
ADD = "Use the tool to add 12 and 30."
TIME = "What time is it in Paris?"
QUIET: Any = {"effort": "none"}
LONG_TEXT = {"type": "string", "minLength": 3000}
LONG = {
    "type": "json_schema",
    "name": "long",
    "schema": {"type": "object", "properties": {"text": LONG_TEXT}, "required": ["text"]},
}


def tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "name": name, "description": description, "parameters": schema, "strict": False}


TOOLS: Any = [
    tool("add_numbers", "Adds two numbers.", a={"type": "integer"}, b={"type": "integer"}),
    tool("get_time", "Returns the time in a city.", city={"type": "string"}),
]


@pytest.fixture
def server(parsing_server: LiveServer) -> LiveServer:
    return parsing_server


@pytest.fixture(scope="module")
def client(parsing_server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{parsing_server.url}/v1", api_key="none", max_retries=0, timeout=300) as connected:
        yield connected


def ask(client: openai.OpenAI, content: Any, **options: Any) -> Any:
    return client.responses.create(**{"model": MODEL, "temperature": 0, "input": content, **options})


def post(server: LiveServer, path: str = "/v1/responses", **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json={"input": "Hi", "max_output_tokens": 4, **body}, timeout=300)


def plain(items: Any) -> list[dict[str, Any]]:
    """Items without what differs from answer to answer."""
    return [
        {k: v for k, v in item.to_dict().items() if k not in ("id", "call_id", "parsed_arguments")} for item in items
    ]


def test_text(client: openai.OpenAI) -> None:
    answer = ask(client, TIME, reasoning=QUIET, metadata={"a": "b"}, instructions="Be brief.")
    assert re.fullmatch("resp_[0-9a-f]{32}", answer.id) and answer.object == "response"
    assert (answer.status, answer.model, answer.error, answer.incomplete_details) == ("completed", MODEL, None, None)
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert answer.output_text == message.content[0].text != ""
    assert (answer.metadata, answer.instructions) == ({"a": "b"}, "Be brief.")
    usage = answer.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens and usage.output_tokens > 0
    again = ask(client, TIME, reasoning=QUIET, instructions="Be brief.").usage
    assert again.input_tokens_details.cached_tokens > 0


def test_items_are_the_text_of_a_string(client: openai.OpenAI) -> None:
    whole = ask(client, TIME, reasoning=QUIET)
    for item in (
        {"role": "user", "content": TIME},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": TIME}]},
    ):
        assert ask(client, [item], reasoning=QUIET).output_text == whole.output_text


def test_thoughts(client: openai.OpenAI) -> None:
    answer = ask(client, APPLES, reasoning={"effort": "high", "summary": "auto"})
    thoughts, message = answer.output
    assert (thoughts.type, thoughts.summary) == ("reasoning", []) and "42 - 5 = 37" in thoughts.content[0].text
    assert message.content[0].text == "The answer is 37."
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    assert [item.type for item in ask(client, APPLES, reasoning=QUIET).output] == ["message"]


@pytest.mark.parametrize("content", [APPLES, ADD, TIME], ids=["thoughts", "call", "text"])
def test_stream_is_the_whole_response(client: openai.OpenAI, content: str) -> None:
    whole = ask(client, content, tools=TOOLS)
    with client.responses.stream(model=MODEL, temperature=0, input=content, tools=TOOLS) as stream:
        names = [event.type for event in stream]
        final = stream.get_final_response()
    assert plain(final.output) == plain(whole.output) and final.status == whole.status
    assert final.usage is not None and final.usage.output_tokens == whole.usage.output_tokens
    assert names[:2] == ["response.created", "response.in_progress"] and names[-1] == "response.completed"


@pytest.mark.parametrize("content", [APPLES, ADD], ids=["thoughts", "call"])
def test_order_of_events(server: LiveServer, content: str) -> None:
    reply = post(server, input=content, tools=TOOLS, stream=True, max_output_tokens=200, temperature=0)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = [re.fullmatch(r"event: ([\w.]+)\ndata: (.*)", event) for event in reply.text.strip().split("\n\n")]
    pairs = [(event[1], json.loads(event[2])) for event in events if event is not None]
    assert len(pairs) == len(events) and all(name == data["type"] for name, data in pairs)
    assert [data["sequence_number"] for _, data in pairs] == list(range(len(pairs)))
    items = pairs[-1][1]["response"]["output"]
    open_item, texts = None, []
    for name, data in pairs[2:-1]:
        if name == "response.output_item.added":
            assert open_item is None and data["output_index"] == len(texts)
            open_item = data["item"]["id"]
            texts.append("")
        elif name == "response.output_item.done":
            assert data["item"] == items[data["output_index"]] and data["item"]["status"] == "completed"
            open_item = None
        else:
            assert (data["item_id"], data["output_index"]) == (open_item, len(texts) - 1)
        if name.endswith(".delta"):
            texts[-1] += data["delta"]
    assert open_item is None
    assert texts == [item.get("arguments") or item["content"][0]["text"] for item in items]


def test_call_and_its_result(client: openai.OpenAI) -> None:
    answer = ask(client, TIME, tools=TOOLS)
    call = answer.output[-1]
    assert re.fullmatch("call_[0-9a-f]{24}", call.call_id)
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_time", {"city": "Paris"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    items = [{"role": "user", "content": TIME}, *[item.to_dict() for item in answer.output], result]
    told = ask(client, items, tools=TOOLS)
    continued = ask(client, [result], tools=TOOLS, previous_response_id=answer.id)
    assert told.output_text and plain(told.output) == plain(continued.output)
    assert told.usage.input_tokens == continued.usage.input_tokens
    assert continued.previous_response_id == answer.id


def test_tool_choice(client: openai.OpenAI) -> None:
    """The model would take another one by itself."""
    named: Any = {"type": "function", "name": "add_numbers"}
    (call,) = ask(client, TIME, tools=TOOLS, tool_choice=named, reasoning=QUIET).output
    assert call.name == "add_numbers" and set(json.loads(call.arguments)) == {"a", "b"}
    answer = ask(client, TIME, tools=TOOLS, tool_choice="none")
    assert all(item.type != "function_call" for item in answer.output)


def test_allowed_tools(client: openai.OpenAI) -> None:
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add_numbers"}]}
    some = ask(client, ADD, tools=TOOLS, tool_choice=allowed, reasoning=QUIET)
    only = ask(client, ADD, tools=TOOLS[:1], tool_choice="required", reasoning=QUIET)
    assert plain(some.output) == plain(only.output) and some.usage.input_tokens == only.usage.input_tokens
    assert some.output[-1].name == "add_numbers" and some.tool_choice.mode == "required"


def test_instructions_are_not_carried_over(client: openai.OpenAI) -> None:
    first = ask(client, TIME, instructions="Be very brief, and say it in French.", reasoning=QUIET)
    count = client.responses.input_tokens.count
    items: Any = [{"role": "user", "content": TIME}, *[item.to_dict() for item in first.output]]
    more: Any = {"role": "user", "content": APPLES}
    whole = count(model=MODEL, input=[*items, more], reasoning=QUIET).input_tokens
    assert count(model=MODEL, input=[more], previous_response_id=first.id, reasoning=QUIET).input_tokens == whole


class Answer(pydantic.BaseModel):
    answer: int


def test_parse(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model=MODEL, input=APPLES, text_format=Answer, temperature=0, reasoning=QUIET)
    assert isinstance(parsed.output_parsed, Answer)
    format_ = parsed.text.format if parsed.text is not None else None
    assert format_ is not None and format_.type == "json_schema"
    with client.responses.stream(model=MODEL, input=APPLES, text_format=Answer, temperature=0) as stream:
        final = stream.get_final_response()
    assert final.output_parsed is not None


def test_parse_tools(client: openai.OpenAI) -> None:
    class AddNumbers(pydantic.BaseModel):
        a: int
        b: int

    answer = client.responses.parse(
        model=MODEL, input=ADD, tools=[openai.pydantic_function_tool(AddNumbers)["function"] | {"type": "function"}],
        temperature=0, tool_choice="required",
    )  # fmt: skip
    call: Any = answer.output[-1]
    assert set(json.loads(call.arguments)) == {"a", "b"}


def test_ends(client: openai.OpenAI) -> None:
    cut = ask(client, APPLES, reasoning=QUIET, max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason, cut.usage.output_tokens) == (
        "incomplete",
        "max_output_tokens",
        2,
    )
    assert cut.output[-1].status == "incomplete"
    with client.responses.stream(model=MODEL, input=APPLES, max_output_tokens=2, reasoning=QUIET) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"


def test_async_client(server: LiveServer) -> None:
    async def work() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            whole = await client.responses.create(model=MODEL, input=TIME, temperature=0)
            pieces = []
            stream = await client.responses.create(model=MODEL, input=TIME, temperature=0, stream=True)
            async for event in stream:
                if event.type == "response.output_text.delta":
                    pieces.append(event.delta)
            return whole.output_text, "".join(pieces)

    whole, streamed = asyncio.run(work())
    assert whole == streamed != ""


# --- stored responses -------------------------------------------------------------------------------------------------


def test_stored(client: openai.OpenAI) -> None:
    answer = ask(client, TIME, reasoning=QUIET)
    assert client.responses.retrieve(answer.id).to_dict() == answer.to_dict()
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(answer.id)
    with pytest.raises(openai.BadRequestError, match="not stored") as raised:
        ask(client, TIME, previous_response_id=answer.id)
    assert raised.value.code == "previous_response_not_found"


def test_not_stored(client: openai.OpenAI) -> None:
    answer = ask(client, TIME, store=False, include=["reasoning.encrypted_content"])
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_streamed_responses_are_stored(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input=TIME, temperature=0) as stream:
        final = stream.get_final_response()
    assert client.responses.retrieve(final.id).output_text == final.output_text


def test_input_items(client: openai.OpenAI) -> None:
    items: Any = [{"role": role, "content": str(number)} for number, role in enumerate(["user", "assistant", "user"])]
    answer = ask(client, items, max_output_tokens=2)
    newest_first = client.responses.input_items.list(answer.id, limit=2)
    texts = [(item.type, item.status, item.content[0].type, item.content[0].text) for item in newest_first]  # type: ignore[union-attr]
    assert texts == [
        ("message", "completed", "input_text", "2"),
        ("message", "completed", "output_text", "1"),
        ("message", "completed", "input_text", "0"),
    ]
    oldest_first = client.responses.input_items.list(answer.id, order="asc")
    assert [item.content[0].text for item in oldest_first] == ["0", "1", "2"]  # type: ignore[union-attr]


def until_ended(client: openai.OpenAI, response: Any) -> Any:
    limit = time.monotonic() + 300
    while response.status in ("queued", "in_progress") and time.monotonic() < limit:
        time.sleep(0.02)
        response = client.responses.retrieve(response.id)
    return response


def test_background(client: openai.OpenAI) -> None:
    whole = ask(client, APPLES)
    started = ask(client, APPLES, background=True)
    assert started.status == "queued" and started.output == []
    ended = until_ended(client, started)
    assert ended.status == "completed" and plain(ended.output) == plain(whole.output)
    assert client.responses.cancel(started.id).status == "completed"
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(whole.id)


def test_cancel(client: openai.OpenAI, server: LiveServer) -> None:
    started = ask(client, "Hi", background=True, text={"format": LONG}, reasoning=QUIET)
    assert client.responses.cancel(started.id).status == "cancelled"
    assert client.responses.retrieve(started.id).status == "cancelled"
    limit = time.monotonic() + 300
    while num_unfinished(server) and time.monotonic() < limit:
        time.sleep(0.02)
    assert num_unfinished(server) == 0 and client.responses.retrieve(started.id).status == "cancelled"


def num_unfinished(server: LiveServer) -> int:
    state = httpx.get(f"{server.url}/server_info").json()["internal_states"][0]
    return int(state["num_unfinished_reqs"])


def test_failure_in_the_background(client: openai.OpenAI) -> None:
    ended = until_ended(client, ask(client, "Hi " * 5000, background=True))
    assert ended.status == "failed" and "context length" in ended.error.message


def test_what_cannot_be_kept_is_not_begun_in_the_background(server: LiveServer) -> None:
    tool = {"type": "function", "name": "f", "description": "d" * (9 << 20)}
    reply = post(server, background=True, tools=[tool], tool_choice="none")
    assert reply.status_code == 413 and reply.json()["object"] == "error"


def test_truncation(client: openai.OpenAI) -> None:
    turns: Any = [
        {"role": role, "content": f"{number}: " + "one two three four five six seven " * 40}
        for number in range(40)
        for role in ("user", "assistant")
    ]
    items = [*turns, {"role": "user", "content": TIME}]
    with pytest.raises(openai.BadRequestError, match="context length"):
        ask(client, items)
    answer = ask(client, items, truncation="auto", max_output_tokens=100, instructions="Be brief.", reasoning=QUIET)
    assert answer.truncation == "auto" and answer.output_text
    assert 2000 < answer.usage.input_tokens <= 4096 - 100


def test_failure_in_a_stream(client: openai.OpenAI, server: LiveServer) -> None:
    """The answer is aborted while it runs; its format makes it long."""
    events = []
    for event in client.responses.create(
        model=MODEL,
        input="Hi",
        stream=True,
        text={"format": LONG},
        reasoning=QUIET,  # type: ignore[arg-type,typeddict-item]
    ):
        events.append(event)
        if event.type == "response.created":
            httpx.post(f"{server.url}/abort_request", json={"abort_all": True})
    last: Any = events[-1]
    assert last.type == "response.failed" and "aborted" in last.response.error.message
    assert client.responses.retrieve(last.response.id).status == "failed"


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "noon"}
MISTAKES = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [IMAGE]}, "images are not supported"),
    ({"input": [RESULT]}, "no function_call"),
    ({"input": [{"type": "web_search_call", "id": "1"}]}, "no text, call or result"),
    ({"input": [{"type": "compaction", "encrypted_content": "1"}]}, "compaction"),
    ({"input": [{"role": "nobody", "content": "a"}]}, "role"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"tools": [{"type": "computer_use_preview"}]}, "computer_use_preview"),
    ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "namespace", "name": "b"}]}]}, "namespace"),
    ({"tools": [{"type": "function"}]}, "name"),
    ({"tool_choice": "required"}, "tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "other"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "schema"),
    ({"top_p": 0}, "top_p"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"include": ["message.output_text.logprobs"]}, "message.output_text.logprobs"),
    ({"context_management": [{"type": "forget"}]}, "context_management"),
    ({"prompt_cache_options": {"prewarm": True}}, "prewarm"),
    ({"personality": "friendly"}, "personality"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"metadata": {"a": "b" * 600}}, "metadata"),
    ({"background": True, "store": False}, "store"),
    ({"background": True, "stream": True}, "background"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "message"), MISTAKES)
def test_mistakes(server: LiveServer, fields: dict[str, Any], message: str, stream: bool) -> None:
    reply = post(server, **{"stream": stream, **fields})
    body = reply.json()
    assert reply.status_code == 400 and body["object"] == "error" and message in body["message"]


@pytest.mark.parametrize("query", ["limit=0", "limit=1e3", "limit=" + "1" * 5000, "order=up", "after=none"])
def test_pages_that_are_not_there(server: LiveServer, query: str) -> None:
    response_id = post(server).json()["id"]
    reply = httpx.get(f"{server.url}/v1/responses/{response_id}/input_items?{query}")
    assert (reply.status_code, reply.json()["param"]) == (400, query.partition("=")[0])
