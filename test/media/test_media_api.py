"""Images and videos in every form of the API, with the real clients; the scheduler echoes the prompt's tokens."""

from __future__ import annotations

import base64
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from live_server import LiveServer
from shared_files import arrays_of

from media.pictures import animation, data_url, encoded, picture
from media.seeing_model import IMAGE, VIDEO, VISION_END, VISION_START

SMALL = encoded(picture(64, 64))
WIDE = encoded(picture(128, 64))
SMALL_TOKENS, WIDE_TOKENS = 4, 8
PROMPT = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)


def image(data: bytes, detail: str = "auto") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), "detail": detail}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def chat(client: openai.OpenAI, content: Any, **options: Any) -> Any:
    return client.chat.completions.create(
        model="seeing", messages=[{"role": "user", "content": content}], max_tokens=2, **options
    )


def prompt_tokens(client: openai.OpenAI, content: Any) -> int:
    return int(chat(client, content).usage.prompt_tokens)


def generate(http: httpx.Client, **body: Any) -> Any:
    answer = http.post("/generate", json={"sampling_params": {"max_new_tokens": 64}, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def echoed(result: dict[str, Any]) -> list[int]:
    """The prompt's tokens."""
    return list(result["output_ids"][: result["meta_info"]["prompt_tokens"]])


def test_usage_counts_the_tokens_of_each_image(client: openai.OpenAI) -> None:
    base = prompt_tokens(client, [text("Look")])
    assert prompt_tokens(client, [text("Look"), image(SMALL)]) == base + 2 + SMALL_TOKENS
    assert prompt_tokens(client, [image(WIDE), text("Look"), image(SMALL)]) == base + 4 + WIDE_TOKENS + SMALL_TOKENS


def test_low_detail_costs_no_more_than_512_pixels_a_side(client: openai.OpenAI) -> None:
    large = encoded(picture(64, 64).resize((640, 640)))
    low, high = (prompt_tokens(client, [image(large, detail)]) for detail in ("low", "high"))
    assert low == high  # the model's own limit, 512 pixels a side, is as low
    large = encoded(picture(64, 64).resize((1600, 160)))
    low, high = (prompt_tokens(client, [image(large, detail)]) for detail in ("low", "high"))
    assert low < high


def test_a_stream_has_the_same_usage(client: openai.OpenAI) -> None:
    stream = chat(client, [image(SMALL)], stream=True, stream_options={"include_usage": True})
    assert [part.usage for part in stream][-1].prompt_tokens == prompt_tokens(client, [image(SMALL)])


def test_placeholders_become_as_many_as_the_image_has(http: httpx.Client) -> None:
    result = generate(http, text=f"a{PROMPT}b", image_data=data_url(SMALL))
    ids = echoed(result)
    start = ids.index(VISION_START)
    assert ids[start:-1] == [VISION_START, *[IMAGE] * SMALL_TOKENS, VISION_END]


@pytest.mark.parametrize(
    ("text", "data", "counts"),
    [
        (PROMPT, "small", [4]),
        (PROMPT, ["small"], [4]),
        (PROMPT * 2, ["small", "wide"], [12]),
        ([PROMPT, PROMPT], ["small", "wide"], [4, 8]),
        (["a", PROMPT * 2, PROMPT], [None, ["small", "small"], "wide"], [0, 8, 8]),
        ([PROMPT], ["small"], [4]),
    ],
)
def test_generate_takes_images_of_one_prompt_or_many(
    http: httpx.Client, text: Any, data: Any, counts: list[int]
) -> None:
    def filled(value: Any) -> Any:
        if isinstance(value, list):
            return [filled(entry) for entry in value]
        return {"small": base64.b64encode(SMALL).decode(), "wide": data_url(WIDE)}.get(value, value)

    results = generate(http, text=text, image_data=filled(data))
    results = results if isinstance(results, list) else [results]
    assert [echoed(result).count(IMAGE) for result in results] == counts


def test_generate_refuses_what_does_not_fit_together(http: httpx.Client) -> None:
    url = data_url(SMALL)
    for body, reason in (
        ({"text": "no place", "image_data": url}, "write one for each"),
        ({"text": PROMPT}, "do not write the placeholder"),
        ({"text": [PROMPT, PROMPT], "image_data": [url]}, "1 entries for 2 prompts"),
        ({"text": PROMPT, "image_data": [url, url]}, "2 images"),
        ({"text": PROMPT, "image_data": {"url": url}}, "image_data"),
    ):
        answer = http.post("/generate", json=body)
        assert answer.status_code == 400 and reason in answer.text, answer.text


def test_samples_and_token_ids(http: httpx.Client) -> None:
    results = generate(
        http,
        input_ids=[5, VISION_START, IMAGE, VISION_END, 6],
        image_data=data_url(SMALL),
        sampling_params={"max_new_tokens": 64, "n": 2},
    )
    assert [echoed(result).count(IMAGE) for result in results] == [SMALL_TOKENS] * 2


def test_a_placeholder_among_token_ids_without_an_image_is_a_token(http: httpx.Client) -> None:
    ids = [5, IMAGE, IMAGE, 6]
    result = generate(http, input_ids=ids)
    assert result["meta_info"]["prompt_tokens"] == len(ids) and echoed(result)[: len(ids)] == ids
    both = generate(http, input_ids=[ids, [5, VISION_START, IMAGE, VISION_END]], image_data=[None, data_url(SMALL)])
    assert [echoed(result).count(IMAGE) for result in both] == [2, SMALL_TOKENS]


def test_a_video_is_written_frame_by_frame_with_times(http: httpx.Client, client: openai.OpenAI) -> None:
    url = data_url(animation(8, 64, 64, 250), "image/gif")
    marks = "<|vision_start|><|video_pad|><|vision_end|>"
    result = generate(http, text=f"a{marks}b", video_data=url, sampling_params={"max_new_tokens": 200})
    ids = echoed(result)
    assert ids.count(VIDEO) == 2 * SMALL_TOKENS
    assert ids.count(VISION_START) == ids.count(VISION_END) == 2
    shown = http.post("/detokenize", json={"tokens": ids, "skip_special_tokens": False}).json()["text"]
    assert shown.replace("<|video_pad|>", "") == (
        "a<0.2 seconds><|vision_start|><|vision_end|><1.5 seconds><|vision_start|><|vision_end|>b"
    )
    base = prompt_tokens(client, [text("Look")])
    counted = prompt_tokens(client, [text("Look"), {"type": "video_url", "video_url": {"url": url}}])
    assert counted == base + len(ids) - 2


def test_a_session_keeps_the_images_of_earlier_turns(http: httpx.Client, server: LiveServer) -> None:
    session = http.post("/open_session", json={"capacity_of_str_len": 1000}).json()
    params = {"max_new_tokens": 3}
    first = generate(
        http,
        text=f"a{PROMPT}",
        image_data=data_url(SMALL),
        sampling_params=params,
        session_params={"id": session},
        rid="turn-1",
    )
    kept = arrays_of(server.log_path.parent)
    assert len(kept) == 1
    second = generate(
        http,
        text=f"b{PROMPT}",
        image_data=data_url(WIDE),
        sampling_params={"max_new_tokens": 64},
        session_params={"id": session, "rid": "turn-1"},
    )
    ids = echoed(second)
    assert ids.count(IMAGE) == SMALL_TOKENS + WIDE_TOKENS + first["output_ids"].count(IMAGE)
    assert set(kept) < set(arrays_of(server.log_path.parent))
    cut = http.post("/generate", json={"text": "c", "session_params": {"id": session, "rid": "turn-1", "offset": 4}})
    assert cut.status_code == 400 and "lies across" in cut.text
    http.post("/close_session", json={"session_id": session})
    assert arrays_of(server.log_path.parent) == []


def test_a_streaming_session_keeps_them_too(http: httpx.Client, server: LiveServer) -> None:
    session = http.post("/open_session", json={"capacity_of_str_len": 1000, "streaming": True}).json()
    turn = {"sampling_params": {"max_new_tokens": 2}, "session_params": {"id": session}}
    generate(http, text=f"a{PROMPT}", image_data=data_url(SMALL), **turn)
    second = generate(http, text="b", **turn)
    assert second["meta_info"]["prompt_tokens"] > SMALL_TOKENS and len(arrays_of(server.log_path.parent)) == 1
    http.post("/close_session", json={"session_id": session})
    assert arrays_of(server.log_path.parent) == []


def test_responses_with_images_and_a_conversation_that_goes_on(client: openai.OpenAI) -> None:
    content: Any = [
        {"type": "input_text", "text": "Look"},
        {"type": "input_image", "image_url": data_url(SMALL), "detail": "auto"},
    ]
    first = client.responses.create(model="seeing", input=[{"role": "user", "content": content}], max_output_tokens=16)
    assert first.usage is not None
    second = client.responses.create(
        model="seeing", input="And now?", previous_response_id=first.id, max_output_tokens=16
    )
    assert second.usage is not None and second.usage.input_tokens > first.usage.input_tokens > SMALL_TOKENS
    counted = client.responses.input_tokens.count(model="seeing", input=[{"role": "user", "content": content}])
    assert counted.input_tokens == first.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="image_url"):
        client.responses.create(
            model="seeing", input=[{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]
        )
    with pytest.raises(openai.BadRequestError, match="truncation"):
        client.responses.create(model="seeing", input=[{"role": "user", "content": content}], truncation="auto")


def test_messages_with_image_blocks(server: LiveServer) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=300)
    data = base64.b64encode(SMALL).decode()
    block: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    content: Any = [block, {"type": "text", "text": "Look"}]
    messages: Any = [{"role": "user", "content": content}]
    answer = client.messages.create(model="seeing", max_tokens=2, messages=messages)
    assert client.messages.count_tokens(model="seeing", messages=messages).input_tokens == answer.usage.input_tokens
    plain = client.messages.create(model="seeing", max_tokens=2, messages=[{"role": "user", "content": "Look"}])
    assert answer.usage.input_tokens == plain.usage.input_tokens + SMALL_TOKENS + 2
    wrong: Any = [{"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}]
    with pytest.raises(anthropic.BadRequestError, match="not public"):
        client.messages.create(model="seeing", max_tokens=2, messages=[{"role": "user", "content": wrong}])
    tool: Any = [
        {"role": "user", "content": "Take a picture"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "camera", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [block]}]},
    ]
    with_image = client.messages.create(model="seeing", max_tokens=2, messages=tool).usage.input_tokens
    tool[2]["content"][0]["content"] = ""
    without = client.messages.create(model="seeing", max_tokens=2, messages=tool).usage.input_tokens
    assert with_image == without + SMALL_TOKENS + 2


def test_ollama_with_images(server: LiveServer) -> None:
    client = ollama.Client(host=server.url, timeout=300)
    options = {"num_predict": 2}
    plain = client.chat(model="seeing", messages=[{"role": "user", "content": "Look"}], options=options)
    seen = client.chat(
        model="seeing", messages=[{"role": "user", "content": "Look", "images": [SMALL]}], options=options
    )
    assert seen.prompt_eval_count == (plain.prompt_eval_count or 0) + SMALL_TOKENS + 2
    generated = client.generate(model="seeing", prompt="Look", images=[SMALL], options=options)
    assert generated.prompt_eval_count == seen.prompt_eval_count
    assert "vision" in (client.show("seeing").capabilities or [])


def too_many() -> dict[str, dict[str, Any]]:
    """Bodies with 17 images, by route; 16 are the limit."""
    data, url = base64.b64encode(SMALL).decode(), data_url(SMALL)
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": [image(SMALL)] * 17}]},
        "/v1/responses": {
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "low"}] * 17}]
        },
        "/v1/messages": {
            "messages": [{"role": "user", "content": [{"type": "image", "source": source}] * 17}],
            "max_tokens": 2,
        },
        "/api/chat": {"messages": [{"role": "user", "content": "Look", "images": [data] * 17}]},
        "/api/generate": {"prompt": "Look", "images": [data] * 17},
        "/generate": {"text": "<|vision_start|><|image_pad|><|vision_end|>" * 17, "image_data": [url] * 17},
    }


@pytest.mark.parametrize("route", too_many())
def test_the_limit_of_images_holds_on_every_route(http: httpx.Client, route: str) -> None:
    answer = http.post(route, json={"model": "seeing"} | too_many()[route])
    assert answer.status_code == 400 and "16 are the limit" in answer.text, answer.text


def test_the_server_says_that_it_sees(http: httpx.Client) -> None:
    assert http.get("/model_info").json()["has_image_understanding"] is True


def test_nothing_stays_when_all_have_ended(server: LiveServer) -> None:
    assert arrays_of(server.log_path.parent) == []
