"""Templates run in processes with limits: what one does with a conversation is that conversation's trouble alone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from forked_servers import forked_children

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.entrypoints.http_errors import ApiError
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.template_pool import TemplateLimits, TemplatePool, template_limits
from sglang.srt.entrypoints.openai.template_process import TemplateSource
from sglang.srt.errors import UserError
from sglang.srt.server_args import ServerArgs

FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
BY_WORD = (
    "{% set word = messages[0].content %}{% set ten = 10 * messages | length %}"
    "{% if word == 'loop' %}" + FOREVER + "{% elif word == 'power' %}{{ ten ** (ten ** ten) }}"
    "{% elif word == 'memory' %}{{ 'x' * ten ** 8 ~ 'é' * ten ** 9 }}"
    "{% elif word == 'multiply' %}"
    "{% for a in range(99999) %}{% for b in range(999) %}{{ tools }}{% endfor %}{% endfor %}"
    "{% else %}<{{ word }}>{% endif %}"
)
"""What it does is what the first message says."""

pytestmark = pytest.mark.asyncio

Make = Callable[..., TemplatePool]


@pytest.fixture
def make() -> Iterator[Make]:
    pools: list[TemplatePool] = []

    def pool(source: str | None, num_long: int = 1, **limits: Any) -> TemplatePool:
        given = TemplateLimits(**{"seconds": 60.0, "contended_seconds": 60.0, **limits})
        pools.append(TemplatePool(TemplateSource(source, {"eos_token": "</s>"}, {}), given, num_long))
        pools[-1].wait_ready()
        return pools[-1]

    with forked_children():
        yield pool
        for each in pools:
            each.close()


def said(content: Any, **fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(messages=[{"role": "user", "content": content}], **fields)


async def texts(pool: TemplatePool, *bodies: ChatCompletionRequest, is_long: bool = False) -> list[str]:
    return await pool.render(bodies, is_long)


async def test_a_server_s_templates_have_ten_seconds() -> None:
    assert template_limits(ServerArgs(model_path="any"), 4096).seconds == 10


async def test_texts_in_order(make: Make) -> None:
    pool = make(BY_WORD)
    assert await texts(pool, said("a"), said("b")) == ["<a>", "<b>"]
    assert pool.render_probe([{"role": "user", "content": "c"}], None, True) == "<c>"


@pytest.mark.parametrize(
    ("word", "limits", "part"),
    [
        ("loop", {"seconds": 1.0}, "takes more than 1 s"),
        ("power", {"seconds": 1.0}, "takes more than 1 s"),
        ("memory", {}, "MemoryError"),
        ("multiply", {"max_chars": 10_000}, "makes more than 10000 characters"),
    ],
)
async def test_what_takes_too_much_is_refused_and_the_next_is_served(
    make: Make, word: str, limits: dict[str, Any], part: str
) -> None:
    pool = make(BY_WORD, **limits)
    for is_long in (False, True):
        with pytest.raises(ApiError, match=part) as refused:
            await texts(pool, said(word), is_long=is_long)
        assert refused.value.status == 400
        assert await texts(pool, said("a"), is_long=is_long) == ["<a>"]


async def test_a_conversation_is_measured_before_it_is_rendered(make: Make) -> None:
    pool = make("{{ messages[0].content | length }}", max_chars=100_000)
    assert await texts(pool, said("x" * 100_000)) == ["100000"]
    with pytest.raises(ApiError, match="longer than what a prompt may have"):
        await texts(pool, said("x" * 200_000))


async def test_short_conversations_pass_one_that_does_not_end(make: Make) -> None:
    pool = make(BY_WORD)
    endless = asyncio.ensure_future(texts(pool, said("loop"), is_long=True))
    behind = asyncio.ensure_future(texts(pool, said("b"), is_long=True))
    assert [await texts(pool, said(str(n))) for n in range(20)] == [[f"<{n}>"] for n in range(20)]
    assert not endless.done() and not behind.done()
    endless.cancel()  # as when the client leaves: the process is ended then, or the next would wait
    assert await behind == ["<b>"]


async def test_who_takes_long_gives_way_to_who_waits(make: Make) -> None:
    pool = make(BY_WORD, contended_seconds=0.5)
    endless = asyncio.ensure_future(texts(pool, said("loop"), is_long=True))
    await asyncio.sleep(0)  # it comes first
    assert await texts(pool, said("b"), is_long=True) == ["<b>"]
    with pytest.raises(ApiError, match="when no others wait") as refused:
        await endless
    assert refused.value.status == 503


async def test_a_process_that_dies_is_replaced(make: Make) -> None:
    pool = make(BY_WORD)
    assert await texts(pool, said("a")) == ["<a>"]
    for process in pool.process_ids:
        os.kill(process, signal.SIGKILL)
    outcomes = [await asyncio.gather(texts(pool, said("a"), is_long=True), return_exceptions=True) for _ in range(2)]
    assert isinstance(outcomes[0][0], ApiError) and "ended its process" in str(outcomes[0][0])
    assert outcomes[1] == [["<a>"]]


async def test_closing_ends_the_processes_in_the_middle_of_a_job(make: Make) -> None:
    pool = make(BY_WORD)
    endless = asyncio.ensure_future(texts(pool, said("power"), is_long=True))
    assert await texts(pool, said("a")) == ["<a>"]
    processes = pool.process_ids
    pool.close()
    with pytest.raises((ApiError, asyncio.CancelledError)):
        await endless
    assert len(processes) == 2 and pool.process_ids == processes  # none was started instead


@pytest.mark.parametrize(
    ("source", "limits", "part"),
    [
        (FOREVER, {"seconds": 1.0}, "does not compile within 1 s"),
        ("{% if true %}" * 2000 + "{% endif %}" * 2000, {}, "does not compile|ends the process"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", {}, "does not compile|ends the process"),
        ("{{ 10 ** (10 ** 10) }}", {"seconds": 1.0}, "does not compile within 1 s"),  # constants are computed there
        ("{% if %}", {}, "does not compile"),
    ],
)
async def test_a_template_that_loops_or_nests_is_refused_by_its_name(
    make: Make, source: str, limits: dict[str, Any], part: str
) -> None:
    with pytest.raises(UserError, match=part) as refused:
        make(source, **limits)
    assert "chat_template of the model" in str(refused.value) and "--chat-template" in str(refused.value)


@pytest.mark.parametrize("name", ["tools", "messages", "eos_token", "bos_token", "add_generation_prompt", "range"])
async def test_names_that_the_server_sets_are_refused(make: Make, name: str) -> None:
    pool = make("{{ enable_thinking }}{% for tool in tools or [] %}{{ tool }}{% endfor %}")
    with pytest.raises(ApiError, match=rf"chat_template_kwargs may not set {name}") as refused:
        await texts(pool, said("x", chat_template_kwargs={name: "x" * 10, "enable_thinking": True}))
    assert (refused.value.status, refused.value.param) == (400, "chat_template_kwargs")
    assert await texts(pool, said("x", chat_template_kwargs={"enable_thinking": True})) == ["True"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
            "json_schema {'type': 'object'}",
        ),
        ({"json_schema": '{"type": "array"}'}, "json_schema {'type': 'array'}"),
        ({"regex": "a"}, "regex"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "f"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}, ""),
        ({"reasoning_effort": "high"}, "high"),
        ({"add_generation_prompt": False}, "no answer"),
    ],
)
async def test_a_template_sees_of_a_request_what_it_should(make: Make, fields: dict[str, Any], text: str) -> None:
    pool = make(
        "{% set form = response_format or {} %}{{ form.type }} {{ (form.json_schema or {}).schema }}"
        "{% for tool in tools or [] %}"
        "{{ tool.function.name }}{% endfor %}{{ reasoning_effort }}{{ 'no answer' if not add_generation_prompt }}"
    )
    body = msgspec.convert({"messages": [{"role": "user", "content": "x"}], **fields}, ChatCompletionRequest)
    assert (await texts(pool, body))[0].strip() == text


async def test_the_data_of_pictures_stays_here(make: Make) -> None:
    pool = make("{% for part in messages[0].content %}[{{ part }}]{% endfor %}", max_chars=10_000)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}}
    (text,) = await texts(pool, said([{"type": "text", "text": "see"}, picture]))
    assert text == "[{'type': 'text', 'text': 'see'}][{'type': 'image'}]"


async def test_half_a_surrogate_pair_is_refused(make: Make) -> None:
    with pytest.raises(ApiError, match="surrogate"):
        await texts(make(BY_WORD), said("\ud800"))


@pytest.mark.parametrize("form", ["qwen", "kimi_k2"])
async def test_the_embedded_template_copies_no_text_of_tools_twice(make: Make, form: str) -> None:
    """With a longer text for each tool it would copy gigabytes, more than its process may take time or memory for."""
    pool = make((Path(DEFAULT_MODEL_PATH) / "chat_template.jinja").read_text())
    tools = [{"type": "function", "function": {"name": f"f{n}", "description": "é" * 20_000}} for n in range(1000)]
    (text,) = await texts(pool, said("x", tools=tools, chat_template_kwargs={"tool_format": form}), is_long=True)
    assert len(text) > 20_000_000
