"""The embedded model with eyes: about text it says what the model without them says, and drafts that were trained for
that one change none of its tokens, with pictures too."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from media.processing import image_processor
from PIL import Image, ImageDraw
from tokenizers import Tokenizer

from sglang.embedded import DEFAULT_MODEL_PATH, DFLASH_PATH, EAGLE3_PATH, SEEING_PATH
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.managers.wire.io_struct import TokenizedGenerateReq
from sglang.srt.server_args import ServerArgs
from sglang.srt.towers.pictures.processor_files import read_processor_files
from sglang.srt.utils import shared_array
from sglang.srt.utils.media_item import MediaItem
from srt.managers.fake_runner import Collector, assert_clean, request, run_to_end

QUESTIONS = (
    "What is 431 + 88?", "Sort these numbers: 45, 12, 78, 3, 99", "What is the capital of France?", "Hello!",
    "Reverse the word planet.", "Is 45 greater than 54?",
)  # fmt: skip
ASKED = (("red", "What color is this?"), ("blue", "What color is this?"), ("blue", "What shape is this?"))
ANSWERS = ("red", "blue", "square")
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
NEW_TOKENS = 16
DRAFTS: dict[str, dict[str, Any]] = {
    "EAGLE3": {"speculative_draft_model_path": EAGLE3_PATH, "speculative_num_steps": 3},
    "DFLASH": {"speculative_draft_model_path": DFLASH_PATH},
    "NGRAM": {},
}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(f"{SEEING_PATH}/tokenizer.json")


def turn(text: str) -> list[int]:
    form = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer().encode(form, add_special_tokens=False).ids


def texts() -> list[TokenizedGenerateReq]:
    return [
        request(f"r{i}", turn(text), NEW_TOKENS, temperature=0.0, ignore_eos=True) for i, text in enumerate(QUESTIONS)
    ]


def pictures(directory: Path) -> list[TokenizedGenerateReq]:
    """A square of a colour each, as the front sends it."""
    processor = image_processor(read_processor_files(Path(SEEING_PATH), "qwen3_vl", "{}"))
    pad = tokenizer().token_to_id("<|image_pad|>")
    made = []
    for number, (color, question) in enumerate(ASKED):
        drawn = Image.new("RGB", (128, 128), "white")
        ImageDraw.Draw(drawn).rectangle((30, 30, 98, 98), fill=color)
        patches = processor(drawn)
        ids = turn(PLACEHOLDER + question)
        begin = ids.index(pad)
        ids[begin : begin + 1] = [pad] * patches.num_tokens
        msg = request(f"r{number}", ids, NEW_TOKENS, temperature=0.0, ignore_eos=True)
        msg.media = [
            MediaItem(
                kind="image", digest=hashlib.blake2b(color.encode(), digest_size=32).digest(), grid=patches.grid,
                spans=[(begin, begin + patches.num_tokens)], pixels=shared_array.write(directory, patches.pixels),
            )
        ]  # fmt: skip
        made.append(msg)
    return made


def answers(model: str, messages: list[TokenizedGenerateReq], directory: Path, **options: Any) -> list[list[int]]:
    """The tokens of each request. Chunks cut the images."""
    args = ServerArgs.from_kwargs(
        model_path=model, device="cpu", dtype="float32", skip_tokenizer_init=True, max_total_tokens=2048,
        max_running_requests=4, chunked_prefill_size=16, **options,
    )  # fmt: skip
    runner = create_runner(args)
    if runner.media is not None:
        runner.media.directory = directory
    scheduler, collector = Scheduler(args, runner, StopChecker(None)), Collector()
    requests = [scheduler.add(message, 1, frozenset()) for message in messages]
    run_to_end(scheduler, collector)
    assert_clean(scheduler)
    if "speculative_algorithm" in options:
        assert sum(made.drafts.steps for made in requests if made is not None) > 0
    return [collector.tokens[message.rid] for message in messages]


@pytest.fixture(scope="module")
def of_text(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    return answers(SEEING_PATH, texts(), tmp_path_factory.mktemp("pixels"))


@pytest.fixture(scope="module")
def of_pictures(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    directory = tmp_path_factory.mktemp("pixels")
    return answers(SEEING_PATH, pictures(directory), directory)


def test_text_is_answered_as_without_eyes(of_text: list[list[int]], tmp_path: Path) -> None:
    assert of_text == answers(DEFAULT_MODEL_PATH, texts(), tmp_path)


def test_pictures_are_answered(of_pictures: list[list[int]]) -> None:
    end = tokenizer().token_to_id("<|im_end|>")
    said = [tokenizer().decode(tokens[: tokens.index(end)]).strip() for tokens in of_pictures]
    assert said == list(ANSWERS)


@pytest.mark.parametrize("algorithm", DRAFTS)
def test_drafts_change_no_token(
    algorithm: str, of_text: list[list[int]], of_pictures: list[list[int]], tmp_path: Path
) -> None:
    flags = {"speculative_algorithm": algorithm, **DRAFTS[algorithm]}
    if algorithm != "NGRAM":  # which is tried with pictures alone
        assert answers(SEEING_PATH, texts(), tmp_path, **flags) == of_text
    assert answers(SEEING_PATH, pictures(tmp_path), tmp_path, **flags) == of_pictures


def test_the_shipped_tokenizer_is_the_one_that_the_text_model_gives() -> None:
    """Every token of text has the same id in both."""
    plain = Tokenizer.from_file(f"{DEFAULT_MODEL_PATH}/tokenizer.json")
    for text in (*QUESTIONS, "Zażółć 你好 👩‍👩‍👧 \u0000\u200b", "<|vision_start|"):
        assert tokenizer().encode(text).ids == plain.encode(text).ids
