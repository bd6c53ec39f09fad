"""What the eyes of the embedded model are trained on: pictures, questions and right answers, and the files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_model.install import EMBEDDED, install_eyes
from tiny_model.pictures import (
    COLOR_NAMES,
    KINDS,
    MAX_PER_SHAPE,
    PLAIN_PICTURE,
    SHAPE_PICTURE,
    SHAPES_PICTURE,
    SLOTS,
    Painter,
    Pictures,
    patches,
)
from tiny_model.questions import ANSWERS, QUESTIONS, TOPICS, Asker
from tiny_model.render import END_OF_TURN
from tiny_model.seeing import read_seeing_tokenizer, seeing_weights

from sglang.embedded import SEEING_PATH

SHAPE_NAMES = ("circle", "square", "triangle", "")
"""The last one stands for pictures of a digit."""


@pytest.fixture(scope="module")
def drawn() -> Pictures:
    return Painter("cpu", seed=3).paint(96, 64, 64)


def test_pictures_are_the_same_for_a_seed(drawn: Pictures) -> None:
    again, other = Painter("cpu", seed=3).paint(96, 64, 64), Painter("cpu", seed=4).paint(96, 64, 64)
    assert torch.equal(again.pixels, drawn.pixels) and torch.equal(again.counts, drawn.counts)
    assert not torch.equal(other.pixels, drawn.pixels)


def test_pictures_have_what_is_said_of_them(drawn: Pictures) -> None:
    assert drawn.pixels.abs().max() <= 1 and set(drawn.kind.tolist()) == set(range(len(KINDS)))
    plain = drawn.pixels[drawn.kind == PLAIN_PICTURE]
    assert plain.std((2, 3)).max() < 0.1  # the noise alone
    assert (drawn.pixels[drawn.kind != PLAIN_PICTURE].std((2, 3)).amax(1) > 0.1).all()
    several, one = drawn.counts[drawn.kind == SHAPES_PICTURE], drawn.counts[drawn.kind == SHAPE_PICTURE]
    assert several.max() <= MAX_PER_SHAPE and several.sum(1).max() <= SLOTS and several.sum(1).min() >= 1
    shapes = drawn.shape[drawn.kind == SHAPE_PICTURE]
    assert torch.equal(one, torch.nn.functional.one_hot(shapes, 3)) and drawn.color.max() < len(COLOR_NAMES)


def test_patches_are_those_of_the_processor() -> None:
    from media.processing import image_processor
    from PIL import Image

    from sglang.srt.towers.pictures.processor_files import read_processor_files

    levels = torch.randint(0, 256, (64, 64, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    made = image_processor(read_processor_files(Path(SEEING_PATH), "qwen3_vl", "{}"))(Image.fromarray(levels.numpy()))
    pixels = (levels.permute(2, 0, 1)[None] / 127.5) - 1
    assert tuple(made.grid) == (1, 8, 8)
    assert torch.allclose(torch.from_numpy(made.pixels), patches(pixels, 8, 2, 2)[0], atol=1e-5)


@pytest.mark.parametrize("again", [False, True])
def test_questions_have_the_right_answer(drawn: Pictures, again: bool) -> None:
    tokenizer = read_seeing_tokenizer(EMBEDDED / "tokenizer.json")
    image = tokenizer.token_to_id("<|image_pad|>")
    asked = Asker(tokenizer, image, 4, 4, torch.device("cpu"), seed=1).ask(drawn, again)
    plural = {"circles": 0, "squares": 1, "triangles": 2}
    for row in range(len(drawn.kind)):
        topic = TOPICS[int(asked.first_topic[row])]
        begin = int(asked.answers[row].int().argmax())
        question = tokenizer.decode(asked.tokens[row, :begin].tolist(), skip_special_tokens=True).lower()
        assert any(text.lower().rstrip("?.") in question for text in QUESTIONS[topic]), (topic, question)
        counts = drawn.counts[row]
        right = {
            "color": COLOR_NAMES[drawn.color[row]], "digit": str(int(drawn.digit[row])),
            "shape": SHAPE_NAMES[drawn.shape[row]], "shapes": str(int(counts.sum())),
            **{name: str(int(counts[number])) for name, number in plural.items()},
        }[topic]  # fmt: skip
        written = tokenizer.encode(right + END_OF_TURN, add_special_tokens=False).ids
        assert right in ANSWERS and asked.tokens[row, begin : begin + len(written)].tolist() == written
        spans = asked.answers[row].int().diff(prepend=torch.zeros(1, dtype=torch.int32)).clamp(min=0).sum()
        assert int(spans) == 1 + again and int((asked.tokens[row] == image).sum()) == 16
        assert int(asked.tokens[row, asked.image[row]]) == image


def test_the_text_model_is_in_the_shipped_files_bit_for_bit() -> None:
    text, shipped = load_file(str(EMBEDDED / "model.safetensors")), load_file(f"{SEEING_PATH}/model.safetensors")
    named = seeing_weights(text)
    assert sum(tensor.numel() for tensor in named.values()) == sum(tensor.numel() for tensor in text.values())
    for name, tensor in named.items():
        assert torch.equal(shipped[name], tensor), name
    assert all(name.startswith("model.visual.") for name in shipped.keys() - named.keys())
    assert sum(path.stat().st_size for path in Path(SEEING_PATH).iterdir()) < 16e6


def test_what_is_no_output_of_eyes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lacks vision\.safetensors"):
        install_eyes(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
