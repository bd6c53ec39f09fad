"""Filling in JSON for a given schema from a sentence."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tiny_model.arithmetic import ask
from tiny_model.problem import Problem, canonical
from tiny_model.words import CITIES, COLORS, DAYS, EVENTS, GOODS, ITEMS, JOBS, MONTHS, NAMES, SKIES, some_time

Make = Callable[[random.Random], Any]


@dataclass(frozen=True, slots=True)
class Field:
    """A property: the names that a schema may give it, its JSON type, and how to make a value."""

    names: tuple[str, ...]
    type: str
    make: Make


@dataclass(frozen=True, slots=True)
class Form:
    """A kind of text. Each of `texts` names every field."""

    fields: dict[str, Field]
    texts: tuple[str, ...]


def one_of(values: list[str]) -> Make:
    return lambda rng: rng.choice(values)


def number(low: int, high: int) -> Make:
    return lambda rng: rng.randrange(low, high)


def string(names: str, make: Make) -> Field:
    return Field(tuple(names.split()), "string", make)


def integer(names: str, low: int, high: int) -> Field:
    return Field(tuple(names.split()), "integer", number(low, high))


FORMS = {
    "person": Form(
        {
            "n": string("name first_name person", one_of(NAMES)),
            "a": integer("age years", 18, 90),
            "c": string("city home town", one_of(CITIES)),
            "j": string("job profession work", one_of(JOBS)),
        },
        (
            "{n} is {a} years old, lives in {c} and works as a {j}.",
            "My friend {n} from {c} is a {j} and turned {a} last week.",
            "{n}, a {j} from {c}, is {a} years old.",
        ),
    ),
    "product": Form(
        {
            "g": string("product item article", one_of(GOODS)),
            "c": string("color colour", one_of(COLORS)),
            "p": integer("price cost", 2, 500),
            "w": integer("weight grams", 100, 1000),
        },
        (
            "The {c} {g} costs {p} dollars and weighs {w} grams.",
            "We sell a {g} in {c} for {p} dollars; it weighs {w} grams.",
            "For {p} dollars you get a {c} {g} of {w} grams.",
        ),
    ),
    "event": Form(
        {
            "e": string("event title kind", one_of(EVENTS)),
            "d": string("day weekday", one_of(DAYS)),
            "t": string("time start", some_time),
            "c": string("city place location", one_of(CITIES)),
        },
        (
            "The {e} in {c} starts on {d} at {t}.",
            "On {d} at {t} there is a {e} in {c}.",
            "Do not forget the {e} on {d}: it begins at {t} in {c}.",
        ),
    ),
    "order": Form(
        {
            "o": integer("order order_id number", 1000, 10000),
            "n": string("customer buyer name", one_of(NAMES)),
            "q": integer("quantity amount count", 2, 100),
            "i": string("item product goods", one_of(ITEMS)),
        },
        (
            "Order {o}: {n} wants {q} {i}.",
            "{n} ordered {q} {i}; the order has the number {o}.",
            "Please send {q} {i} to {n}, this is order {o}.",
        ),
    ),
    "trip": Form(
        {
            "a": string("from origin start", one_of(CITIES[:15])),
            "b": string("to destination end", one_of(CITIES[15:])),
            "t": string("time departure leaves", some_time),
            "h": integer("hours duration", 1, 20),
        },
        (
            "The train from {a} to {b} leaves at {t} and takes {h} hours.",
            "At {t} a train leaves {a}; it reaches {b} after {h} hours.",
            "It takes {h} hours from {a} to {b} if you leave at {t}.",
        ),
    ),
    "weather": Form(
        {
            "c": string("city place town", one_of(CITIES)),
            "t": integer("temperature degrees", 1, 40),
            "s": string("sky weather condition", one_of(SKIES)),
            "m": string("month", one_of(MONTHS)),
        },
        (
            "In {m} it is {s} in {c}, with {t} degrees.",
            "{c} in {m}: {s}, {t} degrees.",
            "It was {t} degrees and {s} when we were in {c} in {m}.",
        ),
    ),
    "lamp": Form(
        {
            "g": string("device thing object", one_of(GOODS)),
            "r": string("room place", one_of(["kitchen", "garden", "office", "hall", "cellar"])),
            "o": Field(("on", "enabled", "active"), "boolean", lambda rng: rng.random() < 0.5),
            "l": integer("level power", 1, 100),
        },
        (
            "The {g} in the {r} is {o}, at level {l}.",
            "At level {l}, the {g} in the {r} is {o}.",
            "{r}: the {g} is {o} and its level is {l}.",
        ),
    ),
    "team": Form(
        {
            "n": Field(("members", "names", "people"), "array", lambda rng: rng.sample(NAMES, rng.randint(2, 4))),
            "t": string("team group", one_of(COLORS)),
            "s": integer("score points", 0, 100),
        },
        (
            "Team {t} with {n} has {s} points.",
            "{n} play for team {t} and scored {s} points.",
            "With {s} points, team {t} is ahead; its members are {n}.",
        ),
    ),
}


def extraction(rng: random.Random) -> Problem:
    kind = rng.choice(list(FORMS))
    form = FORMS[kind]
    values = {letter: field.make(rng) for letter, field in form.fields.items()}
    wanted = rng.sample(list(form.fields), rng.randint(2, len(form.fields)))
    properties, result = {}, {}
    for letter in wanted:
        name = rng.choice(form.fields[letter].names)
        properties[name] = json_type(form.fields[letter].type)
        result[name] = values[letter]
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    text = rng.choice(form.texts).format(**{letter: spoken(v) for letter, v in values.items()})
    text = text[0].upper() + text[1:]
    key = canonical("json", kind, list(values.values()))
    return Problem("json", (key,), ask(rng, "extract", s=json.dumps(schema), t=text), json.dumps(result))


def json_type(name: str) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "string"}} if name == "array" else {"type": name}


def spoken(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ", ".join(value[:-1]) + " and " + value[-1]
    return str(value)
