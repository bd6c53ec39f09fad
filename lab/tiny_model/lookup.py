"""Finding one record in a long text."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from tiny_model.corpus import WORDS as SENTENCE_PARTS
from tiny_model.problem import Message, Problem, assistant, canonical, user
from tiny_model.words import CITIES, NAMES, PHRASES, WORDS

TOKEN = re.compile(r"[^\W\d_]+|\d|[^\w\s]+|\s(?=\d)|\n+")
"""About one match a token: what the tokenizer's own pattern cuts, less the spaces that words take along."""

ATTRIBUTES = ("code", "number", "key", "password", "badge")
LONGEST = 2000
"""Tokens in the longest prompts, about."""
TOKENS_A_QUESTION = 32
"""With its answer and the template's part of both."""


def count_tokens(text: str) -> int:
    return len(TOKEN.findall(text))


def filler(rng: random.Random) -> str:
    parts = {key: rng.choice(value) for key, value in _CHOICES.items()}
    sentence = rng.choice(PHRASES["filler"]).format(**parts)
    return sentence[0].upper() + sentence[1:]


_CHOICES = {key: value.split("|") for key, value in SENTENCE_PARTS.items()}


def value(rng: random.Random) -> str:
    kind = rng.randrange(3)
    if kind == 0:
        return rng.choice(WORDS)
    if kind == 1:
        return rng.choice(CITIES)
    return f"{rng.randrange(10**4):04}"


OWNERS = WORDS + NAMES

Record = tuple[str, str, str]
"""What, whose, value."""


def records(rng: random.Random, count: int) -> list[Record]:
    """No two with the same owner: what was said of one must not fit another."""
    attributes = rng.sample(ATTRIBUTES, rng.choice((1, 1, 2, 3)))
    return [(rng.choice(attributes), owner, value(rng)) for owner in rng.sample(OWNERS, count)]


def statement(record: Record) -> str:
    return "The {} of {} is {}.".format(*record)


def story_text(rng: random.Random, tokens: int, least: int = 1) -> tuple[str, list[Record]]:
    """Sentences about something else with at least `least` records between them."""
    found = records(rng, max(least, rng.choice((1, 2, 4, 8, 12, 16))))
    sentences = [statement(record) for record in found]
    size = sum(count_tokens(s) for s in sentences)
    while size < tokens:
        sentences.append(filler(rng))
        size += count_tokens(sentences[-1])
    rng.shuffle(sentences)
    return " ".join(sentences), found


def list_text(rng: random.Random, tokens: int, least: int = 1) -> tuple[str, list[Record]]:
    """Records and nothing else, a line each."""
    found = []
    for record in records(rng, len(OWNERS)):
        if tokens <= 0 and len(found) >= least:
            break
        found.append(record)
        tokens -= count_tokens(statement(record)) + 1
    return "\n".join(statement(record) for record in found), found


def lookup(task: str, shortest: int, longest: int) -> Callable[[random.Random], Problem]:
    """Problems with prompts of about `shortest` to `longest` tokens."""

    def make(rng: random.Random) -> Problem:
        questions = rng.choice((1, 2, 4, 6, 8) if longest > 1000 else (1, 1, 2, 4))
        tokens = rng.randint(shortest, longest) - TOKENS_A_QUESTION * questions
        text, found = (list_text if rng.random() < 0.3 else story_text)(rng, tokens, questions)
        asked = rng.sample(found, questions)
        messages: list[Message] = []
        for attribute, owner, _ in asked:
            question = rng.choice(PHRASES["lookup"]).format(a=attribute, k=owner)
            if messages:
                messages.append(assistant(statement(asked[len(messages) // 2])))
            elif rng.random() < 0.5:
                question = f"{text}\n\n{question}"
            else:
                question = f"{question}\n\n{text}"
            messages.append(user(question))
        keys = tuple(canonical("lookup", *record) for record in asked)
        return Problem(task, keys, tuple(messages), statement(asked[-1]), past_answers=True)

    return make


needle_short = lookup("needle_short", 100, 450)
needle_long = lookup("needle_long", 450, 1500)
needle_2k = lookup("needle_2k", 1700, LONGEST)
