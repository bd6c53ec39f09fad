"""LiteLLM's proxy in front of this server: a client of its three APIs, with the server as OpenAI's and as
Anthropic's. `make clients` gives it an environment of its own, as it pins releases of what the server needs too."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer, free_port

from .conftest import MODEL, PERSON

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PROGRAM = Path(os.environ.get("LITELLM_PROXY", ROOT / "build" / "litellm-proxy")) / "bin" / "litellm"
"""LITELLM_PROXY: the environment in which it is installed."""
START_LIMIT_S = 300
SUM = [{"role": "user", "content": "What is 15+27?"}]
ADD = [{"role": "user", "content": "Use the tool to add 12 and 30."}]
NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
NAMED = {"name": "add_numbers", "description": "Adds two numbers."}
TOOLS = [{"type": "function", "function": {**NAMED, "parameters": NUMBERS}}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
LIMITS = {"temperature": 0, "max_tokens": 200}
KINDS = ["openai", "anthropic"]


def _config(url: str) -> dict[str, Any]:
    backends = {"openai": (f"openai/{MODEL}", f"{url}/v1"), "anthropic": (f"anthropic/{MODEL}", url)}
    models = [
        {"model_name": name, "litellm_params": {"model": model, "api_base": base, "api_key": "none"}}
        for name, (model, base) in backends.items()
    ]
    return {"model_list": models, "litellm_settings": {"num_retries": 0, "telemetry": False}}


@pytest.fixture(scope="module")
def proxy(served: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    if not PROGRAM.exists():
        pytest.skip("LiteLLM's proxy is not installed: make clients")
    folder = tmp_path_factory.mktemp("litellm")
    (folder / "config.yaml").write_text(json.dumps(_config(served.url)))  # JSON is YAML too
    port, key = free_port(), f"sk-{secrets.token_hex(24)}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": key}
    words = [str(PROGRAM), "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(words, cwd=folder, env=environment, stdout=log, stderr=log)
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=300, trust_env=False) as client:
        try:
            _wait_up(client, process, folder / "log")
            yield client
        finally:
            process.kill()
            process.wait()


def _wait_up(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    started = time.monotonic()
    while process.poll() is None and time.monotonic() - started < START_LIMIT_S:
        try:
            if client.get("/health/liveliness").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise AssertionError(f"the proxy did not come up:\n{log.read_text()[-4000:]}")


def _post(proxy: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = proxy.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def _events(proxy: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    with proxy.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in data if line != "[DONE]"]


def _asked(kind: str) -> dict[str, Any]:
    return {"model": kind, **LIMITS}


@pytest.mark.parametrize("kind", KINDS)
def test_chat(proxy: httpx.Client, kind: str) -> None:
    answer = _post(proxy, "/v1/chat/completions", messages=SUM, **_asked(kind))
    assert answer["choices"][0]["message"]["content"] == "15 + 27 = 42" and answer["usage"]["completion_tokens"] > 5


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_chat_ends_with_usage(proxy: httpx.Client, kind: str) -> None:
    options = {"stream_options": {"include_usage": True}, "messages": SUM, **_asked(kind)}
    events = _events(proxy, "/v1/chat/completions", **options)
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    assert text == "15 + 27 = 42" and events[-1]["usage"]["completion_tokens"] > 5


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("kind", KINDS)
def test_tools(proxy: httpx.Client, kind: str, choice: str) -> None:
    answer = _post(proxy, "/v1/chat/completions", messages=ADD, tools=TOOLS, tool_choice=choice, **_asked(kind))
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "add_numbers"
    assert json.loads(call["function"]["arguments"]) == {"a": 12, "b": 30}


@pytest.mark.parametrize("kind", KINDS)
def test_schema(proxy: httpx.Client, kind: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
    messages = [{"role": "user", "content": PERSON}]
    answer = _post(proxy, "/v1/chat/completions", messages=messages, response_format=form, **_asked(kind))
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"name": "Ada", "age": 36}


@pytest.mark.parametrize("kind", KINDS)
def test_messages(proxy: httpx.Client, kind: str) -> None:
    tools = [{**NAMED, "input_schema": NUMBERS}]
    answer = _post(proxy, "/v1/messages", messages=ADD, tools=tools, **_asked(kind))
    (call,) = (block for block in answer["content"] if block["type"] == "tool_use")
    assert call["input"] == {"a": 12, "b": 30} and answer["stop_reason"] == "tool_use"
    events = _events(proxy, "/v1/messages", messages=SUM, **_asked(kind))
    text = "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
    assert text == "15 + 27 = 42"


@pytest.mark.parametrize("kind", KINDS)
def test_responses(proxy: httpx.Client, kind: str) -> None:
    answer = _post(proxy, "/v1/responses", model=kind, input=SUM[0]["content"], max_output_tokens=200)
    (message,) = (item for item in answer["output"] if item["type"] == "message")
    assert message["content"][0]["text"] == "15 + 27 = 42"


def test_embeddings(proxy: httpx.Client) -> None:
    answer = _post(proxy, "/v1/embeddings", model="openai", input=["a b", "c"])
    assert [len(entry["embedding"]) > 8 for entry in answer["data"]] == [True, True]


def test_fields_that_ask_for_nothing_here(proxy: httpx.Client) -> None:
    fields = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "x"}
    answer = _post(proxy, "/v1/chat/completions", messages=SUM, **fields, **_asked("openai"))
    assert answer["choices"][0]["message"]["content"] == "15 + 27 = 42"


@pytest.mark.parametrize("kind", KINDS)
def test_errors_keep_their_status_and_reason(proxy: httpx.Client, kind: str) -> None:
    for path in ("/v1/chat/completions", "/v1/messages"):
        response = proxy.post(path, json={"messages": SUM, **_asked(kind), "temperature": -1})
        assert response.status_code == 400 and "temperature must be in" in response.text


@pytest.mark.parametrize("kind", KINDS)
def test_models_are_listed(proxy: httpx.Client, kind: str) -> None:
    assert kind in [model["id"] for model in proxy.get("/v1/models").json()["data"]]
