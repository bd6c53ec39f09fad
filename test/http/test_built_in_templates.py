"""Servers of tiny models that are published without a chat template: chats, tools and thoughts with no flag for one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server
from srt.models import harness

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.configs.hf_config import read_config

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
NO_TEMPLATE = "this model has no chat template"


def save(name: str, folder: Path) -> None:
    """The tiny model `name` with the embedded model's tokenizer, and without a template."""
    kind, changes = harness.TINY[name]
    vocab = read_config(Path(DEFAULT_MODEL_PATH))["vocab_size"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(harness.TINY, name, (kind, changes | {"vocab_size": vocab}))
        # Grammars need transformers' tokenizer, and its config of V4 knows published runs only.
        runs = {"compress_rate_hca": 128} if name.startswith("deepseek_v4") else {}
        harness.save_tiny(name, folder, max_position_embeddings=2048, **runs)
    for file in Path(DEFAULT_MODEL_PATH).glob("*token*"):
        shutil.copy(file, folder)


@pytest.fixture(scope="module")
def v4(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("v4")
    save("deepseek_v4_small", folder)
    with live_server(
        *("--model-path", str(folder), "--max-total-tokens", "8192", "--skip-server-warmup"),
        *("--tool-call-parser", "auto", "--reasoning-parser", "auto"),
    ) as server:
        yield server


def ask(server: LiveServer, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}{path}", json={"model": "default", **body}, timeout=300)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


@pytest.mark.thorough
def test_chats(v4: LiveServer) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    chat = ask(v4, "/v1/chat/completions", messages=messages, max_tokens=4, ignore_eos=True)
    message = chat["choices"][0]["message"]
    assert chat["usage"]["completion_tokens"] == 4 and message["reasoning_content"] and not message["content"]
    off = {"chat_template_kwargs": {"thinking": False}}
    quiet = ask(v4, "/v1/chat/completions", messages=messages, max_tokens=4, ignore_eos=True, **off)
    assert quiet["choices"][0]["message"]["content"] and not quiet["choices"][0]["message"]["reasoning_content"]
    forced = ask(
        *(v4, "/v1/chat/completions"), messages=messages, tools=[TOOL], tool_choice="required", max_tokens=200, **off
    )
    (call,) = forced["choices"][0]["message"]["tool_calls"][:1]
    assert call["function"] == {"name": "f", "arguments": "{}"}
    assert forced["usage"]["prompt_tokens"] > quiet["usage"]["prompt_tokens"] + 100
    ask(v4, "/v1/messages", messages=messages, max_tokens=4)
    ask(v4, "/v1/responses", input="Hello", max_output_tokens=4)
    log = v4.log()
    assert "the built-in deepseek_v4.jinja for DeepseekV4ForCausalLM (edition first)" in log
    assert "--tool-call-parser auto: deepseekv4" in log and "--reasoning-parser auto: deepseek-v4" in log


@pytest.mark.thorough
@pytest.mark.parametrize("kept", ["flag", "own", "other", "v32"])
def test_whose_template_it_is(kept: str, tmp_path: Path) -> None:
    save({"other": "qwen3", "v32": "deepseek_v32"}.get(kept, "deepseek_v4_small"), tmp_path)
    source = "{{ messages[0].content }}"
    (tmp_path / ("chat_template.jinja" if kept == "own" else "another.jinja")).write_text(source)
    flags = ["--chat-template", str(tmp_path / "another.jinja")] if kept == "flag" else []
    messages = [{"role": "user", "content": "a b c"}]
    with live_server("--model-path", str(tmp_path), "--max-total-tokens", "2048", *flags) as server:
        if kept == "other":
            body = {"model": "default", "messages": messages}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300)
            assert answer.status_code == 400 and NO_TEMPLATE in answer.text
            return
        chat = ask(server, "/v1/chat/completions", messages=messages, max_tokens=2)
        plain = ask(server, "/tokenize", prompt="a b c", add_special_tokens=False)
        assert (chat["usage"]["prompt_tokens"] == plain["count"]) == (kept != "v32")
        assert ("built-in deepseek_v32.jinja" in server.log()) == (kept == "v32")
