"""The OpenAI routes through the real `openai` client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from sglang.srt.constrained.grammar import MAX_WHITESPACE

MODEL = "tiny"
COUNT: list[Any] = [{"role": "user", "content": "Count from 10 to 21."}]
"""The embedded model answers with 46 tokens: more than any test lets it write."""
STORY = "Question: Tom has 12 apples. He buys 30 more and then gives 5 away. How many does he have now?\nAnswer:"
"""And this one with two lines of sums and the result, in two dozen."""


def chat(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": COUNT, "max_tokens": 8, **options})


def complete(client: openai.OpenAI, **options: Any) -> Any:
    return client.completions.create(**{"model": MODEL, "prompt": STORY, "max_tokens": 8, **options})


def test_chat(client: openai.OpenAI) -> None:
    answer = chat(client, temperature=0)
    assert answer.object == "chat.completion" and answer.model == MODEL
    assert answer.id.startswith("chatcmpl-") and answer.created > 1_600_000_000
    (choice,) = answer.choices
    assert choice.index == 0 and choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason == "length" and choice.logprobs is None
    assert choice.message.model_extra == {"reasoning_content": None}
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert answer.usage.model_extra["reasoning_tokens"] == 0
    assert chat(client, temperature=0).choices[0].message.content == choice.message.content


def test_chat_stream_order_and_text(client: openai.OpenAI) -> None:
    whole = chat(client, temperature=0).choices[0].message.content
    chunks = list(chat(client, temperature=0, stream=True, stream_options={"include_usage": True}))
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and chunks[0].object == "chat.completion.chunk"
    first = chunks[0].choices[0]
    assert first.delta.role == "assistant" and first.delta.content == "" and first.finish_reason is None
    *texts, finish, usage = chunks[1:]
    assert all(c.choices[0].delta.content for c in texts)
    assert all(c.choices[0].delta.model_extra == {"reasoning_content": None} for c in texts)
    assert "".join(c.choices[0].delta.content for c in texts) == whole
    assert finish.choices[0].finish_reason == "length" and not finish.choices[0].delta.content
    assert usage.choices == [] and usage.usage.completion_tokens == 8
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_raw_stream_ends_with_done(http: httpx.Client) -> None:
    body = {"model": MODEL, "messages": COUNT, "max_tokens": 3, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = "".join(response.iter_text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events[:-1])


def test_continuous_usage(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(chat(client, stream=True, stream_options=options, extra_body={"ignore_eos": True}))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 8


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_n(client: openai.OpenAI, stream: bool) -> None:
    options = {"n": 3, "seed": 7, "temperature": 5, "extra_body": {"ignore_eos": True, "top_k": -1}}
    reference = [choice.message.content for choice in chat(client, **options).choices]
    assert len(set(reference)) > 1
    if not stream:
        assert [choice.message.content for choice in chat(client, **options).choices] == reference
        return
    texts, roles, finished = ["", "", ""], [0, 0, 0], [0, 0, 0]
    for chunk in chat(client, stream=True, **options):
        for choice in chunk.choices:
            assert not finished[choice.index]
            roles[choice.index] += choice.delta.role == "assistant"
            texts[choice.index] += choice.delta.content or ""
            finished[choice.index] += choice.finish_reason is not None
    assert texts == reference and roles == [1, 1, 1] and finished == [1, 1, 1]


def test_usage_with_n_counts_the_prompt_once(client: openai.OpenAI) -> None:
    one = chat(client).usage
    usage = chat(client, n=4, extra_body={"ignore_eos": True}).usage
    assert usage.prompt_tokens == one.prompt_tokens and usage.completion_tokens == 32


def test_cached_tokens_are_reported(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "A prompt that nobody else sends. " * 8}]
    chat(client, messages=messages)
    usage = chat(client, messages=messages).usage
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_chat_logprobs(client: openai.OpenAI) -> None:
    choice = chat(client, temperature=0, logprobs=True, top_logprobs=3).choices[0]
    entries = choice.logprobs.content
    assert len(entries) == 8
    spelled = b"".join(bytes(entry.bytes) for entry in entries).decode("utf-8", "replace")
    assert spelled == choice.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3 and entry.logprob <= 0
        assert max(top.logprob for top in entry.top_logprobs) == pytest.approx(entry.logprob)
        assert entry.token in [top.token for top in entry.top_logprobs]


def test_chat_logprobs_in_a_stream(client: openai.OpenAI) -> None:
    whole = chat(client, temperature=0, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    parts = []
    for chunk in chat(client, temperature=0, logprobs=True, top_logprobs=2, stream=True):
        for choice in chunk.choices:
            parts.extend(choice.logprobs.content if choice.logprobs else [])
    assert [part.token for part in parts] == [entry.token for entry in whole]
    assert [part.logprob for part in parts] == pytest.approx([entry.logprob for entry in whole], abs=1e-3)


def test_logit_bias_and_stop(client: openai.OpenAI) -> None:
    ids = tokenize(client, "cat")
    biased = complete(client, temperature=0, logit_bias={str(ids[0]): 100})
    assert tokenize(client, biased.choices[0].text)[:1] == ids[:1]
    whole = complete(client, temperature=0, max_tokens=24).choices[0].text
    stop = whole[6:9]
    cut = complete(client, temperature=0, max_tokens=24, stop=[stop]).choices[0]
    assert cut.finish_reason == "stop" and cut.model_extra["matched_stop"] == stop
    assert cut.text == whole[: whole.index(stop)]


def test_stop_string_never_shows_in_a_stream(client: openai.OpenAI) -> None:
    whole = complete(client, temperature=0, max_tokens=24).choices[0].text
    stop = whole[6:12]
    chunks = list(complete(client, temperature=0, max_tokens=24, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[: whole.index(stop)]
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"


def tokenize(client: openai.OpenAI, text: str) -> list[int]:
    answer = httpx.post(str(client.base_url.copy_with(path="/tokenize")), json={"prompt": text})
    tokens: list[int] = answer.json()["tokens"]
    return tokens


def test_completion(client: openai.OpenAI) -> None:
    answer = complete(client, temperature=0)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-") and answer.model == MODEL
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 8
    by_ids = complete(client, temperature=0, prompt=tokenize(client, STORY))
    assert by_ids.choices[0].text == answer.choices[0].text
    default_length = client.completions.create(model=MODEL, prompt="x", extra_body={"ignore_eos": True})
    assert default_length.usage.completion_tokens == 16


def test_completion_stream(client: openai.OpenAI) -> None:
    whole = complete(client, temperature=0).choices[0]
    chunks = list(complete(client, temperature=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_batch_of_prompts(client: openai.OpenAI) -> None:
    prompts = ["One", "Two and a half", "Three"]
    answer = complete(client, temperature=0, prompt=prompts, n=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    for position, prompt in enumerate(prompts):
        alone = complete(client, temperature=0, prompt=prompt).choices[0].text
        assert [choice.text for choice in answer.choices[2 * position : 2 * position + 2]] == [alone, alone]


def test_echo_with_logprobs_of_the_prompt(client: openai.OpenAI) -> None:
    choice = complete(client, temperature=0, echo=True, logprobs=2, max_tokens=4).choices[0]
    assert choice.text.startswith(STORY)
    found = choice.logprobs
    count = len(tokenize(client, STORY)) + 4
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == count
    assert found.token_logprobs[0] is None and all(value <= 0 for value in found.token_logprobs[1:])
    assert "".join(found.tokens) == choice.text
    for token, start in zip(found.tokens, found.text_offset, strict=True):
        assert choice.text[start:].startswith(token)
    streamed = [
        chunk.choices[0] for chunk in complete(client, temperature=0, echo=True, logprobs=2, max_tokens=4, stream=True)
    ]
    assert [token for part in streamed if part.logprobs for token in part.logprobs.tokens] == found.tokens
    assert "".join(part.text for part in streamed) == choice.text


@pytest.mark.parametrize(
    "constraint",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "answer",
                    "schema": {
                        "type": "object",
                        "properties": {"ok": {"type": "boolean"}},
                        "required": ["ok"],
                        "additionalProperties": False,
                    },
                },
            }
        },
        {"extra_body": {"regex": r'\{"ok": (true|false)\}'}},
    ],
)
def test_structured_output(client: openai.OpenAI, constraint: dict[str, Any]) -> None:
    # The longest answer that the schema allows: a dozen characters and the most whitespace at five places.
    choice = chat(client, max_tokens=12 + 5 * MAX_WHITESPACE, **constraint).choices[0]
    assert choice.finish_reason == "stop"
    assert isinstance(json.loads(choice.message.content)["ok"], bool)


def test_tools_reach_the_prompt(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    assert chat(client, tools=[tool]).usage.prompt_tokens > chat(client).usage.prompt_tokens + 10


def test_template_options(client: openai.OpenAI) -> None:
    with_thinking = chat(client, extra_body={"chat_template_kwargs": {"enable_thinking": True}}).usage.prompt_tokens
    without = chat(client, extra_body={"chat_template_kwargs": {"enable_thinking": False}}).usage.prompt_tokens
    assert with_thinking != without
    started = [*COUNT, {"role": "assistant", "content": "10, 11"}]
    continued = chat(client, messages=started, extra_body={"continue_final_message": True}).usage.prompt_tokens
    assert continued < chat(client, messages=started).usage.prompt_tokens


def test_chat_runs_to_the_context_by_default(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=COUNT, temperature=0, max_completion_tokens=140, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 140


def test_models(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert card.id == MODEL and card.owned_by == "sglang" and card.model_extra["max_model_len"] == 4096
    assert client.models.retrieve(MODEL) == card
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("other/model")
    assert missing.value.code == "model_not_found"


@pytest.mark.asyncio
async def test_async_client_sees_many_streams_at_once(client: openai.OpenAI) -> None:
    import asyncio

    async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none", timeout=300) as many:

        async def one(seed: int) -> int:
            stream = await many.chat.completions.create(
                model=MODEL, messages=COUNT, max_tokens=12, stream=True, seed=seed, extra_body={"ignore_eos": True},
                stream_options={"include_usage": True},
            )  # fmt: skip
            usage = None
            async for chunk in stream:
                usage = chunk.usage or usage
            assert usage is not None
            return usage.completion_tokens

        assert await asyncio.gather(*(one(seed) for seed in range(16))) == [12] * 16
