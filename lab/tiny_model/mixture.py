"""The batches that the model is trained on, step by step.

Every batch is a function of the seed and the step alone, so any number of processes may make them, in any order, and a
resumed run sees what it would have seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiny_model import arithmetic, extraction, knowledge, lists, lookup, tools
from tiny_model.problem import Problem, is_held_out, is_trainable
from tiny_model.render import segments

Make = Callable[[random.Random], Problem]


@dataclass(frozen=True, slots=True)
class Task:
    """`share` of the documents in short rows; `long_share` of the documents in long rows."""

    make: Make
    share: float
    long_share: float = 0.0


TASKS: dict[str, Task] = {
    "add": Task(arithmetic.add, 8),
    "subtract": Task(arithmetic.subtract, 9),
    "add_3_digits": Task(arithmetic.add_3_digits, 3),
    "subtract_3_digits": Task(arithmetic.subtract_3_digits, 3),
    "multiply": Task(arithmetic.multiply, 5),
    "compare": Task(arithmetic.compare, 3),
    "word_problem": Task(arithmetic.word_problem, 8),
    "few_shot": Task(arithmetic.few_shot, 0.7, 1),
    "copy": Task(lists.copy, 6),
    "reverse": Task(lists.reverse, 9),
    "sort": Task(lists.sort, 10),
    "count": Task(lists.count, 5),
    "needle_short": Task(lookup.needle_short, 6),
    "needle_long": Task(lookup.needle_long, 0, 3),
    "needle_2k": Task(lookup.needle_2k, 0, 6),
    "facts": Task(knowledge.fact, 9),
    "talk": Task(knowledge.talk, 5),
    "json": Task(extraction.extraction, 8),
    "tool_qwen": Task(tools.tool_call("tool_qwen", "qwen"), 8),
    **{f"tool_{form}": Task(tools.tool_call(f"tool_{form}", form), 1.5) for form in tools.FORMATS[1:]},
    "tool_answer": Task(tools.tool_answer, 1),
    "no_tool": Task(tools.no_tool, 2),
}
TASK_NAMES = tuple(TASKS)

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer in one short sentence.",
    "Be brief.",
    "You are Tiny.",
    "Answer the question of the user.",
)
WITH_SYSTEM = 0.15
WITHOUT_THINKING = 0.3


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows of one step: `short_rows` of `short_length` tokens and `long_rows` of `long_length`."""

    short_rows: int = 96
    short_length: int = 512
    long_rows: int = 10
    long_length: int = 2048


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed documents, int16 and float16 [rows, length].

    `weights[r, t]` is the weight of predicting token t from the tokens before it, 0 for what is not an answer.
    `documents` numbers the documents of a row, -1 where nothing is; a token sees its own document only. `tasks` are
    indexes of TASK_NAMES.
    """

    tokens: np.ndarray
    weights: np.ndarray
    documents: np.ndarray
    positions: np.ndarray
    tasks: np.ndarray


def draw(task: str, rng: random.Random, held_out: bool = False) -> Problem:
    """A problem of one side of the split."""
    wanted = is_held_out if held_out else is_trainable
    while True:
        problem = TASKS[task].make(rng)
        if wanted(problem):
            return problem


@dataclass(frozen=True, slots=True)
class Document:
    tokens: list[int]
    answer: list[bool]
    task: int


class Encoder:
    """Problems to token ids. Holds a `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def document(self, problem: Problem, thinking: bool, system: str = "", last_only: bool = False) -> Document:
        pieces = segments(problem, thinking, system, last_only)
        encodings = self._tokenizer.encode_batch_fast([text for text, _ in pieces], add_special_tokens=False)
        tokens: list[int] = []
        answer: list[bool] = []
        for encoding, (_, written) in zip(encodings, pieces, strict=True):
            tokens += encoding.ids
            answer += [written] * len(encoding.ids)
        return Document(tokens, answer, TASK_NAMES.index(problem.task))


def documents(encoder: Encoder, rng: random.Random, shares: dict[str, float]) -> Iterator[Document]:
    """Without end."""
    names, weights = list(shares), list(shares.values())
    while True:
        problem = draw(rng.choices(names, weights)[0], rng)
        thinking = rng.random() >= WITHOUT_THINKING
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < WITH_SYSTEM else ""
        yield encoder.document(problem, thinking, system)


TRIES = 12
"""Documents that may fail to fit before the rows of a step are closed."""


def pack(source: Iterator[Document], rows: int, length: int) -> Rows:
    """First fit, until a few documents in a row find no place."""
    free = [length] * rows
    held: list[list[Document]] = [[] for _ in range(rows)]
    misses = 0
    while misses < TRIES:
        document = next(source)
        size = len(document.tokens)
        row = next((r for r in range(rows) if free[r] >= size), None)
        if row is None:
            misses += 1
            continue
        held[row].append(document)
        free[row] -= size
    return _fill(held, length)


def _fill(held: list[list[Document]], length: int) -> Rows:
    shape = (len(held), length)
    out = Rows(
        tokens=np.zeros(shape, np.int16),
        weights=np.zeros(shape, np.float16),
        documents=np.full(shape, -1, np.int16),
        positions=np.zeros(shape, np.int16),
        tasks=np.zeros(shape, np.int16),
    )
    for row, placed in enumerate(held):
        start = 0
        for number, document in enumerate(placed):
            end = start + len(document.tokens)
            answer = np.array(document.answer)
            out.tokens[row, start:end] = document.tokens
            # A long answer weighs more than a short one, but not in proportion.
            out.weights[row, start:end] = answer / np.sqrt(max(answer.sum(), 1))
            out.documents[row, start:end] = number
            out.positions[row, start:end] = np.arange(end - start)
            out.tasks[row, start:end] = document.task
            start = end
    return out


def batch(encoder: Encoder, shape: Shape, seed: int, step: int, only: tuple[str, ...] = ()) -> list[Rows]:
    """The rows of one step: short ones, then long ones (either may be missing). `only` names the tasks, if not all."""
    rng = random.Random(f"{seed}/{step}")
    chosen = {name: task for name, task in TASKS.items() if not only or name in only}
    out = []
    for rows, length, shares in (
        (shape.short_rows, shape.short_length, {n: t.share for n, t in chosen.items() if t.share}),
        (shape.long_rows, shape.long_length, {n: t.long_share for n, t in chosen.items() if t.long_share}),
    ):
        if rows and shares:
            out.append(pack(documents(encoder, rng, shares), rows, length))
    return out
