"""The text that models read, and the questions that they answer."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pydoc_data.topics
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang.srt.errors import UserError
from sglang.srt.utils.hf_tokenizer import Tokenizer

MODULES = (
    "argparse asyncio collections configparser csv datetime decimal difflib email.message fractions functools heapq"
    " html http.client inspect itertools json logging optparse os pathlib pickle random re shutil socket statistics"
    " string subprocess tarfile tempfile textwrap threading turtle typing unittest unittest.mock urllib.parse"
    " urllib.request uuid zipfile"
).split()
"""Modules whose docstrings calibrate."""
QUESTION = "{} is a city in the country of"
QUESTIONS_A_PROMPT = 25
EXAMPLES = (("Lyon", "France"), ("Osaka", "Japan"))
"""Stand before the questions of each prompt."""


@dataclass(frozen=True, slots=True)
class Questions:
    """A prompt of questions with their right answers, and of each answer its first and last token."""

    ids: list[int]
    answers: list[tuple[int, int]]


def measured_text(folder: Path) -> str:
    """Returns the text that models read: `text.txt` of the folder, or the reference of the Python language, which is
    written there: that of another Python is another text."""
    path = folder / "text.txt"
    if not path.exists():
        _write(path, python_reference())
    return path.read_text()


def calibration_file(folder: Path) -> Path:
    """Returns `calibration.jsonl` of the folder, whose texts calibrate; where it is missing it is written with
    docstrings of this Python's library."""
    path = folder / "calibration.jsonl"
    if not path.exists():
        _write(path, "".join(json.dumps({"text": text}) + "\n" for text in library_docs()))
    return path


def _write(path: Path, text: str) -> None:
    """As a whole, whatever other processes write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(text)
    partial.rename(path)


def python_reference() -> str:
    """Returns the reference of the Python language, which comes with it (`pydoc_data.topics`)."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def library_docs(length: int = 2000) -> list[str]:
    """Returns docstrings of the Python library, another text than the one that is measured, in pieces of some
    characters in an order that tells nothing."""
    pieces = []
    for name in MODULES:
        module = importlib.import_module(name)
        found = [inspect.getdoc(value) or "" for value in vars(module).values() if inspect.isclass(value)]
        found += [inspect.getdoc(value) or "" for value in vars(module).values() if inspect.isfunction(value)]
        text = "\n\n".join([module.__doc__ or "", *(doc for doc in found if len(doc) > 200)])
        pieces += [text[start : start + length] for start in range(0, len(text) - length + 1, length)]
    random.Random(0).shuffle(pieces)
    return pieces


def windows(tokenizer: Tokenizer, text: str, tokens: int, length: int) -> list[list[int]]:
    """Returns the first ids of the text in windows of `length`, `tokens` in all, rounded up. Each begins with what the
    tokenizer puts before a text. Raises UserError if the text is too short."""
    first = tokenizer.encode("", add_special_tokens=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    own = length - len(first)
    count = -(-tokens // length)
    if len(ids) < count * own:
        raise UserError(f"The text has {len(ids):,} tokens, fewer than {count * own:,}.")
    return [first + ids[i * own : (i + 1) * own] for i in range(count)]


def question_prompts(tokenizer: Tokenizer, facts: Sequence[tuple[str, str]]) -> list[Questions]:
    """Returns the questions in prompts of some, each behind those before it and their right answers: so one pass
    answers all of them. An answer ends with its full stop."""
    prompts = []
    for start in range(0, len(facts), QUESTIONS_A_PROMPT):
        ids = tokenizer.encode("", add_special_tokens=True)
        answers = []
        for subject, answer in (*EXAMPLES, *facts[start : start + QUESTIONS_A_PROMPT]):
            ids = ids + tokenizer.encode(QUESTION.format(subject), add_special_tokens=False)
            first = len(ids)
            ids = ids + tokenizer.encode(f" {answer}.", add_special_tokens=False)
            answers.append((first, len(ids)))
            ids = ids + tokenizer.encode("\n", add_special_tokens=False)
        prompts.append(Questions(ids, answers[len(EXAMPLES) :]))
    return prompts


def read_facts(lines: Sequence[str], count: int) -> list[tuple[str, str]]:
    """Returns `count` pairs (city, country) of lines "country: city, city", in an order that tells nothing."""
    pairs = []
    for line in lines:
        country, _, names = line.partition(":")
        pairs += [(name.strip(), country.strip()) for name in names.split(",") if name.strip()]
    random.Random(1).shuffle(pairs)
    return pairs[:count]
