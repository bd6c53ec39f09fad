"""Questions about pictures and their answers, as rows of tokens from which batches are put together on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tiny_model.pictures import COLOR_NAMES, KINDS, SHAPES, Pictures
from tiny_model.render import END_OF_TURN, template

ANSWERS = (*COLOR_NAMES, *(str(number) for number in range(10)), *SHAPES)
_FIRST_NUMBER, _FIRST_SHAPE = len(COLOR_NAMES), len(COLOR_NAMES) + 10
_COUNTED = ("How many {x}?", "How many {x} are there?", "How many {x} do you see?", "Count the {x}.",
    "How many {x} are in the picture?", "How many {x} are in this image?")  # fmt: skip
QUESTIONS: dict[str, tuple[str, ...]] = {
    "color": ("What colour is this?", "What color is this?", "Which color is this?", "Which colour is it?",
        "What is the color?", "What color do you see?", "Name the color."),
    "digit": ("Which digit is this?", "What digit is this?", "What number is this?", "Which number do you see?",
        "What digit do you see?", "Read the digit.", "Which digit is in the picture?"),
    "shape": ("What shape is this?", "Which shape is this?", "What shape do you see?", "Name the shape.",
        "Which shape is in the picture?"),
    **{f"{shape}s": tuple(text.format(x=f"{shape}s") for text in _COUNTED) for shape in SHAPES},
    "shapes": tuple(text.format(x="shapes") for text in _COUNTED),
}  # fmt: skip
"""Topic -> ways to ask for it."""
TOPICS = tuple(QUESTIONS)
_ASKED: dict[str, dict[str, float]] = {
    "digit": {"color": 0.3, "digit": 0.7},
    "shape": {"color": 0.35, "shape": 0.4, "circles": 0.06, "squares": 0.06, "triangles": 0.06, "shapes": 0.07},
    "shapes": {"circles": 0.28, "squares": 0.28, "triangles": 0.28, "shapes": 0.16},
    "plain": {"color": 1.0},
}
"""Kind of a picture -> shares of the topics."""
SYSTEMS = ("", "", "", "You are a helpful assistant.", "Answer briefly.")
WITHOUT_THINKING = 0.2
IMAGE = {"type": "image"}


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of tokens [N, longest] int64, and their lengths [N]."""

    tokens: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], device: torch.device) -> Table:
        longest = max(map(len, rows))
        padded = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
        return cls(padded, torch.tensor([len(row) for row in rows], device=device))

    def at(self, index: Tensor) -> Table:
        return Table(self.tokens[index], self.lengths[index])


@dataclass(frozen=True, slots=True)
class Asked:
    """`tokens` [B, L]; `answers` [B, L] bool: what the model writes; `first_topic`, [B]. `image` [B]: the place of the
    image's first placeholder."""

    tokens: Tensor
    answers: Tensor
    image: Tensor
    first_topic: Tensor


class Asker:
    """Asks for what is in pictures. An image takes `rows` x `columns` placeholders."""

    def __init__(
        self, tokenizer: Tokenizer, image_token: int, rows: int, columns: int, device: torch.device, seed: int
    ) -> None:
        self.image_token, self.device = image_token, device
        self.random = torch.Generator(device).manual_seed(seed)

        def ids(text: str) -> list[int]:
            given = tokenizer.encode(text, add_special_tokens=False).ids
            place = given.index(image_token) if image_token in given else len(given)
            return (
                given[:place] + [image_token] * (rows * columns) + given[place + 1 :] if place < len(given) else given
            )

        self.answers = Table.of([ids(answer + END_OF_TURN) for answer in ANSWERS], device)
        self.first, self.first_of = self._grouped([[ids(t) for t in _first_turns(topic)] for topic in TOPICS])
        self.next, self.next_of = self._grouped([[ids(t) for t in _next_turns(topic)] for topic in TOPICS])
        shares = [[_ASKED[kind].get(topic, 0.0) for topic in TOPICS] for kind in KINDS]
        self.shares = torch.tensor(shares, device=device)

    def _grouped(self, groups: list[list[list[int]]]) -> tuple[Table, Tensor]:
        """One table of all, and of each group its first row and its number of rows, [groups, 2]."""
        rows, places = [], []
        for group in groups:
            places.append((len(rows), len(group)))
            rows += group
        return Table.of(rows, self.device), torch.tensor(places, device=self.device)

    def ask(self, pictures: Pictures, again: bool) -> Asked:
        """With `again` a second question about the same picture follows the first answer."""
        parts: list[tuple[Table, bool]] = []
        topics = []
        for table, groups in ((self.first, self.first_of), (self.next, self.next_of))[: 1 + again]:
            topic = torch.multinomial(self.shares[pictures.kind], 1, generator=self.random)[:, 0]
            begin, count = groups[topic].unbind(1)
            chosen = torch.rand(len(topic), generator=self.random, device=self.device)
            parts.append((table.at(begin + (chosen * count).long()), False))
            parts.append((self.answers.at(_right_answers(pictures, topic)), True))
            topics.append(topic)
        tokens, written = _joined(parts)
        return Asked(tokens, written, (tokens == self.image_token).int().argmax(1), topics[0])


def _right_answers(pictures: Pictures, topic: Tensor) -> Tensor:
    """[B]: rows of ANSWERS."""
    of_topic = torch.cat(
        (
            pictures.color[:, None],
            _FIRST_NUMBER + pictures.digit[:, None],
            _FIRST_SHAPE + pictures.shape[:, None].clamp(max=len(SHAPES) - 1),
            _FIRST_NUMBER + pictures.counts,
            _FIRST_NUMBER + pictures.counts.sum(1, keepdim=True),
        ),
        dim=1,
    )
    return of_topic.gather(1, topic[:, None])[:, 0]


def _joined(parts: Sequence[tuple[Table, bool]]) -> tuple[Tensor, Tensor]:
    """Rows one after the other: tokens [B, L], and which are of a part that is marked."""
    length = -(-sum(table.tokens.shape[1] for table, _ in parts) // 8) * 8  # as kernels of attention want masks
    first = parts[0][0]
    tokens = first.tokens.new_zeros((len(first.lengths), length + 1))
    marks, begin = tokens.bool(), torch.zeros_like(first.lengths)
    for table, marked in parts:
        column = torch.arange(table.tokens.shape[1], device=begin.device)
        place = torch.where(column < table.lengths[:, None], begin[:, None] + column, length)
        tokens.scatter_(1, place, table.tokens)
        marks.scatter_(1, place, torch.full_like(place, marked, dtype=torch.bool))
        begin = begin + table.lengths
    return tokens[:, :length], marks[:, :length]


def _asked_otherwise(text: str) -> tuple[str, ...]:
    return text, text, text.lower(), text.rstrip("?.")


@cache
def _first_turns(topic: str) -> tuple[str, ...]:
    """Prompts: the picture before the question or behind it, with a system prompt or none, thinking or not."""
    turns = []
    for text in QUESTIONS[topic]:
        for asked in _asked_otherwise(text):
            part = {"type": "text", "text": asked}
            for content in ([IMAGE, part], [part, IMAGE]):
                for number, system in enumerate(SYSTEMS):
                    messages = [{"role": "system", "content": system}] if system else []
                    thinking = number >= WITHOUT_THINKING * len(SYSTEMS)
                    turns.append(_rendered([*messages, {"role": "user", "content": content}], thinking))
    return tuple(turns)


@cache
def _next_turns(topic: str) -> tuple[str, ...]:
    """What follows the end of an answer."""
    turns = [text for question in QUESTIONS[topic] for text in _asked_otherwise(question)]
    return tuple("\n" + _rendered([{"role": "user", "content": text}], True) for text in turns)


def _rendered(messages: list[dict[str, object]], thinking: bool) -> str:
    options = {} if thinking else {"enable_thinking": False}
    return template().render(messages=messages, add_generation_prompt=True, **options)
