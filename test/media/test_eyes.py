"""The embedded model sees: right and wrong answers about pictures that were drawn for no training, over HTTP by the
openai client."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from live_server import LiveServer
from PIL import Image, ImageDraw, ImageFont

from media.pictures import data_url, encoded
from sglang.embedded import SEEING_PATH

MODEL = os.environ.get("SGLANG_TEST_SEEING_MODEL", SEEING_PATH)
"""Another directory than the shipped one, to judge weights before they are installed."""
COLORS = {
    "red": (225, 20, 25), "green": (20, 140, 45), "blue": (25, 60, 220), "yellow": (250, 225, 30),
    "orange": (255, 145, 15), "purple": (130, 30, 160), "black": (8, 8, 8), "white": (248, 248, 248),
    "gray": (128, 128, 128), "brown": (125, 70, 30),
}  # fmt: skip
SIZES = ((64, 64), (128, 128), (224, 224), (300, 300), (320, 240), (240, 320), (512, 512))
MIN_RIGHT = {"color": 0.95, "digit": 0.9, "count": 0.75, "shape": 0.9}
"""Share of right answers by topic."""
ITEMS_A_TOPIC = 30


@dataclass(frozen=True, slots=True)
class Item:
    topic: str
    picture: Image.Image
    question: str
    answer: str


def _paper(rng: random.Random, color: str) -> tuple[Image.Image, tuple[int, int]]:
    size = rng.choice(SIZES)
    ground = "black" if color in ("white", "yellow") else "white"
    return Image.new("RGB", size, COLORS[ground]), size


def _polygon(shape: str, x: float, y: float, r: float) -> list[tuple[float, float]]:
    if shape == "square":
        return [(x - r, y - r), (x + r, y - r), (x + r, y + r), (x - r, y + r)]
    return [(x, y - r), (x + 0.87 * r, y + 0.5 * r), (x - 0.87 * r, y + 0.5 * r)]


def _draw(draw: ImageDraw.ImageDraw, shape: str, x: float, y: float, r: float, color: str) -> None:
    if shape == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=COLORS[color])
    else:
        draw.polygon(_polygon(shape, x, y, 0.85 * r if shape == "square" else r), fill=COLORS[color])


def _digit(rng: random.Random) -> Item:
    color = rng.choice(list(COLORS))
    picture, (width, height) = _paper(rng, color)
    digit = rng.randrange(10)
    size = min(width, height) * rng.uniform(0.5, 0.9)
    at = (width * rng.uniform(0.4, 0.6), height * rng.uniform(0.45, 0.55))
    ImageDraw.Draw(picture).text(at, str(digit), fill=COLORS[color], font=ImageFont.load_default(size), anchor="mm")
    asked = rng.choice(("Which digit is this?", "What digit is this?", "What number is this?"))
    return Item("digit", picture, asked, str(digit))


def _one_shape(rng: random.Random, topic: str) -> Item:
    color, shape = rng.choice(list(COLORS)), rng.choice(("circle", "square", "triangle"))
    picture, (width, height) = _paper(rng, color)
    radius = min(width, height) * rng.uniform(0.2, 0.4)
    at = (width * rng.uniform(0.42, 0.58), height * rng.uniform(0.42, 0.58))
    _draw(ImageDraw.Draw(picture), shape, *at, radius, color)
    if topic == "shape":
        return Item(topic, picture, rng.choice(("What shape is this?", "Which shape is this?")), shape)
    return Item(topic, picture, rng.choice(("What colour is this?", "What color is this?")), color)


def _shapes(rng: random.Random) -> Item:
    """Up to five of the kind that is asked for, and up to two others, in cells of a grid."""
    kinds = rng.sample(("circle", "square", "triangle"), 2)
    color = rng.choice(("red", "green", "blue", "black", "purple"))
    picture, (width, height) = _paper(rng, color)
    count, others = rng.randint(1, 5), rng.randint(0, 2)
    cells = rng.sample([(column, row) for column in range(3) for row in range(3)], count + others)
    draw = ImageDraw.Draw(picture)
    for number, (column, row) in enumerate(cells):
        cell_x, cell_y = width / 3, height / 3
        radius = min(cell_x, cell_y) * rng.uniform(0.3, 0.4)
        at = (cell_x * (column + rng.uniform(0.45, 0.55)), cell_y * (row + rng.uniform(0.45, 0.55)))
        _draw(draw, kinds[number >= count], *at, radius, color)
    asked = rng.choice(("How many {}s?", "How many {}s are there?", "How many {}s do you see?"))
    return Item("count", picture, asked.format(kinds[0]), str(count))


def held_out() -> list[Item]:
    """The same ones every time."""
    rng = random.Random(34)
    made = (_digit, lambda r: _one_shape(r, "color"), lambda r: _one_shape(r, "shape"), _shapes)
    return [make(rng) for make in made for _ in range(ITEMS_A_TOPIC)]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    running = LiveServer("--model-path", MODEL, "--served-model-name", "tiny")
    try:
        yield running.wait_up()
    finally:
        running.end()


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)


def ask(client: openai.OpenAI, *messages: dict[str, Any], **options: Any) -> str:
    given: Any = list(messages)
    answer = client.chat.completions.create(model="tiny", messages=given, temperature=0, max_tokens=12, **options)
    return (answer.choices[0].message.content or "").strip()


def with_picture(item: Item, text_first: bool = False) -> dict[str, Any]:
    picture = {"type": "image_url", "image_url": {"url": data_url(encoded(item.picture))}}
    parts = [picture, {"type": "text", "text": item.question}]
    return {"role": "user", "content": parts[::-1] if text_first else parts}


def test_answers_about_held_out_pictures(client: openai.OpenAI) -> None:
    items = held_out()
    with ThreadPoolExecutor(8) as executor:
        answers = list(
            executor.map(lambda pair: ask(client, with_picture(pair[1], bool(pair[0] % 2))), enumerate(items))
        )
    for topic, least in MIN_RIGHT.items():
        rows = [(item, answer) for item, answer in zip(items, answers, strict=True) if item.topic == topic]
        wrong = [(item.answer, answer) for item, answer in rows if answer != item.answer]
        print(f"{topic}: {len(rows) - len(wrong)} of {len(rows)}, wrong (right answer, given): {wrong}")
        assert len(rows) == ITEMS_A_TOPIC and len(wrong) <= (1 - least) * len(rows), (topic, wrong)


def test_the_picture_decides_the_answer(client: openai.OpenAI) -> None:
    """The same question about other pictures, and other questions about one picture, in one conversation."""
    rng = random.Random(2)
    red = next(item for item in iter(lambda: _one_shape(rng, "color"), None) if item.answer == "red")
    blue = next(item for item in iter(lambda: _one_shape(rng, "color"), None) if item.answer == "blue")
    assert [ask(client, with_picture(item)) for item in (red, blue, red)] == ["red", "blue", "red"]
    again = [
        with_picture(red),
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "What shape is this?"},
    ]
    assert ask(client, *again) in ("circle", "square", "triangle")


def test_text_is_answered_as_ever(client: openai.OpenAI) -> None:
    assert (
        ask(client, {"role": "user", "content": "What is the capital of France?"}) == "The capital of France is Paris."
    )
    assert ask(client, {"role": "user", "content": "What is 7 + 5?"}).endswith("12")
