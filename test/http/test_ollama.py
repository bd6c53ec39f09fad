"""Ollama's API through the real `ollama` client; the embedded model calls and thinks."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import ollama
import pytest
from live_server import LiveServer

MODEL = "tiny"
APPLES = "Tom has 12 apples. He buys 30 more and then gives 5 away. How many does he have now?"
TIME = "What time is it in Paris?"
GREEDY = {"temperature": 0, "num_predict": 200}


def tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    tool("add_numbers", "Adds two numbers.", a={"type": "integer"}, b={"type": "integer"}),
    tool("get_time", "Returns the time in a city.", city={"type": "string"}),
]


@pytest.fixture
def server(parsing_server: LiveServer) -> LiveServer:
    return parsing_server


@pytest.fixture(scope="module")
def client(parsing_server: LiveServer) -> ollama.Client:
    return ollama.Client(host=parsing_server.url, timeout=300)


def ask(client: ollama.Client, content: str, **options: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    return client.chat(**{"model": MODEL, "messages": messages, "options": GREEDY, **options})


def post(server: LiveServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=300)


def joined(parts: Any) -> dict[str, Any]:
    """What a client puts together from a stream."""
    whole: dict[str, Any] = {"content": "", "thinking": "", "tool_calls": []}
    last = None
    for part in parts:
        assert last is None or not last.done
        whole["content"] += part.message.content or ""
        whole["thinking"] += part.message.thinking or ""
        whole["tool_calls"] += part.message.tool_calls or []
        last = part
    assert last is not None and last.done
    return whole | {"last": last}


def test_chat(client: ollama.Client) -> None:
    answer = ask(client, TIME, think=False)
    assert (answer.model, answer.done, answer.done_reason) == (MODEL, True, "stop")
    assert answer.message.role == "assistant" and answer.message.content and not answer.message.thinking
    assert answer.prompt_eval_count > 0 and answer.eval_count > 0
    assert answer.prompt_eval_duration > 0 and answer.eval_duration > 0
    assert answer.total_duration == answer.prompt_eval_duration + answer.eval_duration


@pytest.mark.parametrize("content", [APPLES, TIME], ids=["thoughts", "text"])
def test_stream_is_the_whole_answer(client: ollama.Client, content: str) -> None:
    whole = ask(client, content)
    parts = joined(ask(client, content, stream=True))
    assert parts["content"] == whole.message.content and parts["thinking"] == (whole.message.thinking or "")
    assert parts["last"].eval_count == whole.eval_count and parts["last"].done_reason == whole.done_reason


def test_thinking(client: ollama.Client) -> None:
    answer = ask(client, APPLES, think=True)
    assert "42 - 5 = 37" in answer.message.thinking and answer.message.content == "The answer is 37."
    assert ask(client, APPLES, think="high").message.thinking


@pytest.mark.parametrize("stream", [False, True])
def test_call_and_its_result(client: ollama.Client, stream: bool) -> None:
    answer = ask(client, TIME, tools=TOOLS, stream=stream)
    message = joined(answer) if stream else answer.message
    (call,) = message["tool_calls"]
    assert (call.function.name, call.function.arguments) == ("get_time", {"city": "Paris"})
    messages = [
        {"role": "user", "content": TIME},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_name": "get_time"},
    ]
    last = client.chat(model=MODEL, messages=messages, tools=TOOLS, options=GREEDY)
    assert last.message.content and not last.message.tool_calls


def test_generate(client: ollama.Client) -> None:
    options: Any = {"model": MODEL, "prompt": TIME, "options": GREEDY, "think": False}
    whole = client.generate(**options)
    assert whole.response == ask(client, TIME, think=False).message.content and whole.done_reason == "stop"
    parts = list(client.generate(**options, stream=True))
    assert "".join(part.response or "" for part in parts) == whole.response and parts[-1].done
    system = client.generate(**options, system="Be brief.")
    assert (system.prompt_eval_count or 0) > (whole.prompt_eval_count or 0)


def test_raw(client: ollama.Client, server: LiveServer) -> None:
    raw = client.generate(model=MODEL, prompt="The capital of", raw=True, options={"temperature": 0, "num_predict": 5})
    params = {"temperature": 0, "max_new_tokens": 5}
    native = post(server, "/generate", text="The capital of", sampling_params=params).json()
    assert raw.response == native["text"] and (raw.eval_count, raw.done_reason) == (5, "length")


def test_formats(client: ollama.Client) -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    assert isinstance(json.loads(ask(client, APPLES, format=schema, think=False).message.content)["answer"], int)
    assert ask(client, APPLES, format="json", think=False).message.content.startswith("{")


def test_options(client: ollama.Client) -> None:
    fixed = {"seed": 7, "temperature": 1.5, "top_k": 0, "top_p": 0.9, "min_p": 0.01, "num_predict": 12, "num_ctx": 8192}
    texts = {ask(client, "Hi", options=fixed, think=False).message.content for _ in range(2)}
    assert len(texts) == 1
    word = ask(client, APPLES, think=False).message.content.split()[1]
    stopped = ask(client, APPLES, think=False, options={**GREEDY, "stop": [word]})
    assert word not in stopped.message.content and stopped.done_reason == "stop"


def test_nothing_to_generate(client: ollama.Client) -> None:
    """How clients load a model before they need it."""
    assert client.generate(model=MODEL).done_reason == "load"
    assert client.chat(model=MODEL, messages=[]).done_reason == "load"


def test_embed(client: ollama.Client, server: LiveServer) -> None:
    two = client.embed(model=MODEL, input=["a", "b"])
    assert two.embeddings[0] == pytest.approx(client.embed(model=MODEL, input="a").embeddings[0], abs=1e-5)
    assert sum(value * value for value in two.embeddings[1]) == pytest.approx(1)


def test_models(client: ollama.Client, server: LiveServer) -> None:
    (model,) = client.list().models
    assert model.model == MODEL and model.details is not None and model.details.format == "safetensors"
    shown = client.show(MODEL)
    assert shown.capabilities is not None and {"completion", "tools", "thinking"} <= set(shown.capabilities)
    assert shown.template and shown.modelinfo is not None and "general.architecture" in shown.modelinfo
    assert [entry.model for entry in client.ps().models] == [MODEL]
    assert httpx.get(f"{server.url}/api/version").json()["version"]


def test_async_client(server: LiveServer) -> None:
    async def work() -> str:
        client = ollama.AsyncClient(host=server.url)
        pieces = []
        messages = [{"role": "user", "content": TIME}]
        async for part in await client.chat(model=MODEL, messages=messages, options=GREEDY, think=False, stream=True):
            pieces.append(part.message.content or "")
        return "".join(pieces)

    assert asyncio.run(work())


def test_failure_in_a_stream(client: ollama.Client, server: LiveServer) -> None:
    """The answer is aborted while it runs; its format makes it long."""
    text = {"type": "string", "minLength": 3000}
    schema = {"type": "object", "properties": {"text": text}, "required": ["text"]}
    parts = []
    with pytest.raises(ollama.ResponseError, match="aborted"):
        for part in ask(client, "Hi", format=schema, think=False, stream=True, options={"temperature": 0}):
            if not parts:
                httpx.post(f"{server.url}/abort_request", json={"abort_all": True})
            parts.append(part)
    assert parts and not parts[-1].done


# What Ollama's own engine does unless it is told otherwise. Clients with a form of all options send these.
DEFAULTS = {
    "repeat_last_n": 64,
    "tfs_z": 1.0,
    "typical_p": 1.0,
    "mirostat": 0,
    "mirostat_eta": 0.1,
    "mirostat_tau": 5.0,
    "penalize_newline": True,
    "num_ctx": 2048,
    "num_keep": 4,
    "num_batch": 512,
}


def test_default_options_are_taken(client: ollama.Client) -> None:
    answer = ask(client, "What is 15+27?", options={**GREEDY, **DEFAULTS})
    assert answer.message.content == "15 + 27 = 42"


def test_embeddings_of_one_prompt(server: LiveServer) -> None:
    """The route that clients older than /api/embed call."""
    old = post(server, "/api/embeddings", model=MODEL, prompt="a b", keep_alive="5m")
    new = post(server, "/api/embed", model=MODEL, input="a b").json()["embeddings"]
    assert old.status_code == 200 and old.json() == {"embedding": pytest.approx(new[0], abs=1e-5)}
    assert post(server, "/api/embeddings", model=MODEL, prompt="").json() == {"embedding": []}


USER = [{"role": "user", "content": "a"}]
MISTAKES = [
    ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["AAAA"]}]}, "images"),
    ("/api/chat", {"messages": [{"role": "nobody", "content": "a"}]}, "role"),
    ("/api/chat", {"messages": USER, "options": {"mirostat": 2}}, "mirostat"),
    ("/api/chat", {"messages": USER, "options": {"temperature": "hot"}}, "options.temperature"),
    ("/api/chat", {"messages": USER, "options": {"top_p": 0}}, "top_p"),
    ("/api/chat", {"messages": USER, "options": []}, "options"),
    ("/api/chat", {"messages": USER, "options": {"stop": ["a"] * 33}}, "stop"),
    ("/api/chat", {"messages": USER, "logprobs": True}, "logprobs"),
    ("/api/chat", {"messages": USER, "tools": [{"type": "function"}]}, "tools"),
    ("/api/generate", {"prompt": "a", "images": ["AAAA"]}, "images"),
    ("/api/generate", {"prompt": "a", "suffix": "b"}, "suffix"),
    ("/api/generate", {"prompt": "a", "context": [1, 2]}, "context"),
    ("/api/generate", {"prompt": "a", "format": "yaml"}, "format"),
    ("/api/generate", {"prompt": "a " * 9000, "raw": True}, "context length"),
    ("/api/chat", {"messages": USER, "options": {"repeat_last_n": 16}}, "repeat_last_n"),
    ("/api/embed", {"input": [""]}, "empty"),
    ("/api/embeddings", {"prompt": ["a"]}, "prompt"),
    ("/api/show", {"model": 5.5}, "model"),
]


@pytest.mark.parametrize(("path", "body", "message"), MISTAKES)
def test_mistakes(server: LiveServer, path: str, body: dict[str, Any], message: str) -> None:
    reply = post(server, path, **body)
    assert reply.status_code == 400 and set(reply.json()) == {"error"} and message in reply.json()["error"]
