"""Small facts from the table, and small talk."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tiny_model.corpus import ENDINGS, SENTENCES, TOPICS
from tiny_model.lookup import filler
from tiny_model.problem import Problem, canonical, user
from tiny_model.words import NAMES, PHRASES, TALK, WORDS, facts


def fact(rng: random.Random) -> Problem:
    """A fact cannot be inferred, so what is held out is a way of asking for it."""
    tables = facts()
    name = rng.choices(list(tables), weights=[len(t["pairs"]) for t in tables.values()])[0]
    table = tables[name]
    x = rng.choice(list(table["pairs"]))
    phrasing = rng.randrange(len(table["ask"]))
    question = table["ask"][phrasing].format(x=x)
    return _fact(name, x, phrasing, varied(rng, question, change_case=False))


def every_fact() -> Iterator[Problem]:
    """All of them in all ways of asking, without openings and the like."""
    for name, table in facts().items():
        for x in table["pairs"]:
            for phrasing, ask in enumerate(table["ask"]):
                yield _fact(name, x, phrasing, ask.format(x=x))


def _fact(name: str, x: str, phrasing: int, question: str) -> Problem:
    table = facts()[name]
    answer = table["answer"].format(x=x, y=table["pairs"][x])
    return Problem("facts", (canonical("fact", name, x, phrasing),), (user(question),), answer)


UNKNOWN = "I am too small to answer that."
FIRST_WORDS = set("What What's Which How Tell Name Give Do Please On In Where Write Put Count".split())
"""These lose their capital after an opening; names do not."""
OPENINGS = ("Hey, ", "Hi, ", "Please ", "Well, ", "So, ")


def talk(rng: random.Random) -> Problem:
    if rng.random() < 0.25:
        asked, answer = beyond(rng), UNKNOWN
    else:
        answer = rng.choice(list(TALK))
        asked = rng.choice(TALK[answer])
    text = varied(rng, asked, change_case=True)
    return Problem("talk", (canonical("talk", text),), (user(text),), answer)


def beyond(rng: random.Random) -> str:
    """Questions about what the model cannot know, and text that asks nothing: so that it has read every word once."""
    kind = rng.randrange(4)
    if kind == 0:
        return " ".join(rng.choice(TOPICS) + rng.choice(ENDINGS) for _ in range(rng.randint(3, 8)))
    if kind == 1:
        return rng.choice((filler(rng), rng.choice(SENTENCES.splitlines())))
    return rng.choice(PHRASES["beyond"]).format(w=rng.choice(WORDS), n=rng.choice(NAMES))


def varied(rng: random.Random, text: str, change_case: bool) -> str:
    """The same with other capitals, another end or an opening, as people type."""
    if change_case:
        text = rng.choice((text, text.capitalize(), text[0].upper() + text[1:], text.lower()))
        text += rng.choice(("", "", ".", "!", "?")) if text[-1].isalnum() else ""
        return text
    if rng.random() < 0.1 and text.endswith(("?", ".")):
        text = text[:-1]
    if rng.random() < 0.08:
        word = text.split(" ", 1)[0]
        text = rng.choice(OPENINGS) + (text[0].lower() + text[1:] if word in FIRST_WORDS else text)
    return text
