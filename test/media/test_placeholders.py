"""Which models see, and how placeholders become spans."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang.embedded import DEFAULT_MODEL_PATH, SEEING_PATH
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.entrypoints.http_sessions import SessionParams, begin_turn
from sglang.srt.errors import UserError
from sglang.srt.managers.front.generate_request import GenerateRequest, RequestError
from sglang.srt.managers.front.media import expansion
from sglang.srt.managers.front.media.expansion import PlacedMedia, moved, whole_items
from sglang.srt.managers.front.media.media_source import Kind, MediaSource
from sglang.srt.managers.front.media.media_tokens import MediaTokens, media_tokens
from sglang.srt.managers.front.media.messages import Features
from sglang.srt.managers.front.media.served_media import served_media
from sglang.srt.managers.front.request_preparation import RequestPreparer
from sglang.srt.managers.front.sessions import SessionStore, Turn
from sglang.srt.managers.wire.io_struct import MediaItem
from sglang.srt.plan.model_planner import describe_served_model
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.shared_array import SharedArray

IMAGE, VIDEO, START, END, BOS = 90, 91, 92, 93, 94
QWEN = MediaTokens("qwen3_vl", IMAGE, VIDEO, START, END)
GEMMA = MediaTokens("gemma4", IMAGE, run_start=80, run_end=81)


def placed(kind: Kind, *parts: list[int] | int) -> PlacedMedia:
    runs = sum(isinstance(part, int) for part in parts)
    features = Features(grid=(1, 2, 2), pixels=SharedArray("a", [4, 4], "float32"), digest=bytes(32), num_runs=runs)
    return PlacedMedia(kind, [features], list(parts))


def expand(ids: list[int], media: list[PlacedMedia], tokens: MediaTokens) -> tuple[list[int], list[MediaItem]]:
    expanded, items = expansion.expand(np.array(ids, np.int32), media, tokens)
    assert expanded.dtype == np.int32
    return expanded.tolist(), items


@pytest.mark.parametrize("before", range(9))
def test_images_begin_at_multiples(before: int) -> None:
    """Of DeepSeek-V4's vision edition: of what fills the prompt before an image there is as much as it takes, and a
    prompt that begins elsewhere would need another number."""
    tokens = MediaTokens("deepseek_v4", IMAGE, fill=3)
    expanded, items = expand([*[7] * before, IMAGE, 8, IMAGE], [placed("image", 9), placed("image", 9)], tokens)
    (first,), (second,) = (item.spans for item in items)
    for begin, end in (first, second):
        assert end - begin == 9 - begin % 4 and (end - 5) % 4 == 0
    assert (
        first[0] == before
        and second[0] == first[1] + 1
        and expanded.count(IMAGE) == sum(end - begin for begin, end in (first, second))
    )
    assert moved(items, 8, tokens)[0].spans == [(first[0] + 8, first[1] + 8)]
    with pytest.raises(RequestError, match="without session_params"):
        moved(items, 5, tokens)
    assert moved([], 5, tokens) == []


@pytest.mark.parametrize(("kept", "ids"), [(8, [7, IMAGE]), (9, [BOS, 7, IMAGE]), (5, [BOS, IMAGE])])
def test_a_session_goes_on_with_an_image_behind_a_dropped_bos(kept: int, ids: list[int]) -> None:
    """The image keeps its distance from a multiple: what counts is where it comes to stand."""
    first, store = Turn("first", None, np.full(kept, 7, np.int32), kept), SessionStore()
    store.open(100, "s")
    store.begin("s", first, replaces=False)
    store.end("s", first, [])
    tokens = MediaTokens("deepseek_v4", IMAGE, fill=3)
    released: list[MediaItem] = []

    async def prompt_ids(*_: Any, **__: Any) -> Any:
        return expansion.expand(np.array(ids, np.int32), [placed("image", 9)], tokens)

    async def input_ids(prompt: Any) -> Any:
        return prompt

    manager: Any = SimpleNamespace(
        preparer=SimpleNamespace(prompt_ids=prompt_ids, input_ids=input_ids),
        tokenizer=SimpleNamespace(bos_token_id=BOS),
        media=SimpleNamespace(tokens=tokens, files=SimpleNamespace(release=released.extend)),
        replica_for=lambda *_: 0,
        abort=None,
    )
    turn = asyncio.run(begin_turn(manager, store, GenerateRequest(), SessionParams("s", "first")))
    ((begin, end),) = turn.media[0].spans
    assert turn.tokens.tolist() == [*[7] * begin, *[IMAGE] * (end - begin)] and end == len(turn.tokens)
    assert BOS not in turn.tokens and end - begin == 9 - begin % 4 and len(released) == 1


def test_an_image_and_a_video_in_one_prompt() -> None:
    ids = [1, START, IMAGE, END, 2, START, VIDEO, END, 3]
    media = [placed("image", 3), placed("video", [7, START], 2, [END, 8, START], 2, [END])]
    expanded, items = expand(ids, media, QWEN)
    image, frames = [IMAGE] * 3, [VIDEO] * 2
    assert expanded == [1, START, *image, END, 2, 7, START, *frames, END, 8, START, *frames, END, 3]
    assert [item.spans for item in items] == [[(2, 5)], [(9, 11), (14, 16)]]
    assert [item.spans for item in moved(items, 10, QWEN)] == [[(12, 15)], [(19, 21), (24, 26)]]
    assert [whole_items(items, length) for length in (2, 5, 9, 16)] == [[], items[:1], items[:1], items]
    for length in (3, 10, 13):
        with pytest.raises(RequestError, match="lies across"):
            whole_items(items, length)


def test_marks_that_the_template_leaves_out() -> None:
    expanded, items = expand([1, IMAGE, 2], [placed("image", 2)], GEMMA)
    assert expanded == [1, 80, IMAGE, IMAGE, 81, 2] and items[0].spans == [(2, 4)]


def test_frames_of_glm_have_the_placeholder_of_images() -> None:
    tokens = media_tokens({"model_type": "glm46v", "image_token_id": 5, "video_token_id": 6, "vision_config": {}})
    assert tokens is not None
    media = [placed("image", 2), placed("video", [7], 2, [8, 7], 1, [8])]
    expanded, items = expand([1, 5, 2, 6, 3], media, tokens)
    assert expanded == [1, 5, 5, 2, 7, 5, 5, 8, 7, 5, 8, 3] and items[1].spans == [(5, 7), (9, 10)]


def test_kimi_has_one_placeholder_for_images_and_videos() -> None:
    """Templates write a text for a video; items stand in the order of the text, however they came."""
    config = {"model_type": "kimi_k25", "media_placeholder_token_id": 5, "vision_config": {}}
    tokens = media_tokens(config)
    assert tokens is not None and tokens.video_frame == 5
    image, film = MediaSource("image", "i"), MediaSource("video", "v")
    text = "a<|kimi_k25_video_placeholder|>b<|media_pad|>c"
    written, media = tokens.with_placeholders(text, [image, film])
    assert written == "a<|media_pad|>b<|media_pad|>c" and media == [film, image]
    assert tokens.with_placeholders(text, [image])[1] == [image], "expand says what is missing"
    entries = [placed("video", [7], 2, [8], 1), placed("image", 3)]
    ids, items = expand([1, 5, 2, 5, 3], entries, tokens)
    assert ids == [1, 7, 5, 5, 8, 5, 2, 5, 5, 5, 3]
    assert [(item.kind, item.spans) for item in items] == [("video", [(2, 4), (5, 6)]), ("image", [(7, 10)])]
    with pytest.raises(RequestError, match="2 placeholders"):
        expand([5, 5], entries[:1], tokens)


def test_templates_of_llama4_write_another_token_than_its_placeholder() -> None:
    """`<|image|>`, which also stands before the whole of a picture, and is a mark there."""
    tokens = media_tokens({"model_type": "llama4", "vision_config": {}})
    assert tokens is not None and (tokens.image, tokens.video) == (200092, None)
    text, media = tokens.with_placeholders("a<|image|>b", [MediaSource("image", "i")])
    assert text == "a<|patch|>b" and len(media) == 1
    ids, items = expand([1, 200092, 3], [placed("image", [7], 2, [8], 2, [9, 90], 2, [10])], tokens)
    assert ids == [1, 7, *[200092] * 2, 8, *[200092] * 2, 9, 90, *[200092] * 2, 10, 3]
    assert items[0].spans == [(2, 4), (5, 7), (9, 11)]


@pytest.mark.parametrize("written", ["<|content_image|><|unused_200054|>", "<|content_image|>"])
def test_templates_of_inkling_write_a_mark_and_the_placeholder_or_the_mark_alone(written: str) -> None:
    tokens = media_tokens({"model_type": "inkling_mm_model", "vision_config": {}})
    assert tokens is not None and (tokens.image, tokens.video) == (200054, None)
    text, media = tokens.with_placeholders(f"a{written}b{written}", [MediaSource("image", "i")] * 2)
    assert text == "a<|content_image|><|unused_200054|>b<|content_image|><|unused_200054|>" and len(media) == 2
    ids, items = expand([1, 200005, 200054, 3], [placed("image", 2)], tokens)
    assert ids == [1, 200005, *[200054] * 2, 3] and items[0].spans == [(2, 4)]


def test_marks_are_left_where_no_video_stands_between_them() -> None:
    media = [placed("video", [7], 1), placed("video", [8], 1)]
    expanded, _ = expand([END, VIDEO, END, START, 5, END, START, VIDEO], media, QWEN)
    assert expanded == [END, 7, VIDEO, END, START, 5, END, 8, VIDEO]
    assert expand([START, VIDEO, END, END], media[:1], QWEN)[0] == [7, VIDEO, END]


def test_expansion_takes_the_same_steps_for_prompts_of_any_length() -> None:
    def num_lines(length: int) -> int:
        """Returns how many lines of the module run."""
        lines = 0

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal lines
            lines += event == "line"
            return trace if frame.f_code.co_filename == expansion.__file__ else None

        ids, media = np.array([1] * length + [IMAGE], np.int32), [placed("image", 2)]
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            expansion.expand(ids, media, QWEN)
        finally:
            sys.settrace(before)
        return lines

    assert num_lines(50_000) == num_lines(5)


def test_frames_of_gemma_have_marks() -> None:
    tokens = media_tokens(
        {"model_type": "gemma4", "image_token_id": 5, "video_token_id": 6, "vision_config": {}}
        | {"boi_token_id": 80, "eoi_token_id": 81}
    )
    assert tokens is not None
    expanded, _ = expand([1, 6, 3], [placed("video", [7], 2, [8], 1)], tokens)
    assert expanded == [1, 7, 80, 6, 6, 81, 8, 80, 6, 81, 3]


@pytest.mark.parametrize(
    ("config", "family"),
    [
        ({"model_type": "qwen3_vl_moe", "image_token_id": 5, "vision_config": {}}, "qwen3_vl"),
        ({"model_type": "qwen3_5", "image_token_id": 5, "vision_config": {}}, "qwen3_vl"),
        ({"model_type": "kimi_k25", "media_placeholder_token_id": 5, "vision_config": {}}, "kimi_k25"),
        ({"model_type": "gemma4", "image_token_id": 5, "vision_config": {}}, "gemma4"),
        ({"model_type": "qwen4_exp", "image_token_id": 5, "vision_config": {}}, "qwen3_vl"),
        ({"model_type": "minimax_m3_vl", "image_token_index": 5, "vision_config": {}}, "minimax_m3"),
        ({"model_type": "step3p7", "image_token_id": 5, "vision_config": {}}, "step3p7"),
        ({"model_type": "muse_glimmer", "vision_config": {}}, "muse_glimmer"),
        ({"model_type": "mimo_v2", "vision_config": {}}, "mimo_v2"),
        ({"model_type": "mimo_v2"}, None),
        ({"model_type": "dots3_note", "vision_config": {}}, "dots3_note"),
        ({"model_type": "llama4", "image_token_index": 5, "vision_config": {}}, "llama4"),
        ({"model_type": "inkling_mm_model", "vision_config": {}}, "inkling"),
        ({"model_type": "deepseek_v41", "image_token_id": 5, "vision_config": {}}, "deepseek_v41"),
        ({"model_type": "deepseek_v41", "image_token_id": 5}, None),
        ({"model_type": "inkling_mm_model"}, None),
        ({"model_type": "gemma4", "image_token_id": 5}, None),
        ({"model_type": "llama", "vision_config": {}}, None),
    ],
)
def test_which_models_see(config: dict[str, Any], family: str | None) -> None:
    tokens = media_tokens(config)
    assert (None if tokens is None else tokens.family) == family


def test_placeholders_that_a_config_may_leave_out() -> None:
    """Those of every published model, which transformers' config has without being told."""
    tokens = media_tokens({"model_type": "muse_glimmer", "vision_config": {}})
    assert tokens is not None and (tokens.image, tokens.video) == (200092, 200091)
    tokens = media_tokens({"model_type": "muse_glimmer", "vision_config": {}, "image_token_id": 7, "video_token_id": 8})
    assert tokens is not None and (tokens.image, tokens.video) == (7, 8)
    assert media_tokens({"model_type": "step3p7", "vision_config": {}}) is None


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_placeholder_that_is_no_token_of_the_model_is_refused(kind: str, tmp_path: Path) -> None:
    """A GPU would read past the end of the embedding."""
    config = json.loads((Path(SEEING_PATH) / "config.json").read_text())
    vocab_size = config["text_config"]["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(config | {f"{kind}_token_id": vocab_size}))
    args = ServerArgs.from_kwargs(model_path=str(tmp_path))
    with pytest.raises(UserError, match=f"the placeholder of {kind}s has the id {vocab_size:,}.*--language-model-only"):
        describe_served_model(args, ModelConfig.from_server_args(args))
    args = ServerArgs.from_kwargs(model_path=str(tmp_path), language_model_only=True)
    assert describe_served_model(args, ModelConfig.from_server_args(args)).media is None


def test_language_model_only_leaves_images_out(seeing_model: Path) -> None:
    args = ServerArgs.from_kwargs(model_path=str(seeing_model))
    assert served_media(args, ModelConfig.from_server_args(args)) is not None
    blind = ServerArgs.from_kwargs(model_path=str(seeing_model), disable_multimodal=True)
    assert blind.language_model_only
    assert served_media(blind, ModelConfig.from_server_args(blind)) is None


@pytest.mark.parametrize(("only_text", "reason"), [(False, "text only"), (True, "--language-model-only")])
def test_images_are_refused_where_nothing_reads_them(only_text: bool, reason: str) -> None:
    args = ServerArgs.from_kwargs(model_path=DEFAULT_MODEL_PATH, language_model_only=only_text)
    preparer = RequestPreparer(args, ModelConfig.from_server_args(args), None)
    request = GenerateRequest(input_ids=[1], media=[[MediaSource("image", "data:,")]])
    with pytest.raises(RequestError, match=reason):
        asyncio.run(preparer.prepare(request))


@pytest.mark.parametrize(
    "flags",
    [
        {"limit_mm_data_per_request": '{"image": -1}'},
        {"limit_mm_data_per_request": '{"picture": 1}'},
        {"limit_mm_data_per_request": '{"image": "many"}'},
        {"allowed_local_media_path": "/no/such/directory"},
    ],
)
def test_flags_are_checked(flags: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(flags)).replace("_", "-")):
        ServerArgs.from_kwargs(model_path="x", **flags)
