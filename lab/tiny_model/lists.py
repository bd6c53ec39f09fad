"""Copying, reversing, sorting and counting."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tiny_model.arithmetic import ask
from tiny_model.problem import Problem, canonical
from tiny_model.words import NAMES, WORDS

MAX_COPIED = 20
MAX_DIGITS = 12
MAX_REVERSED = 10
MAX_SORTED = 8
MAX_COUNTED = 12


def copy(rng: random.Random) -> Problem:
    length = rng.randint(2, MAX_COPIED)
    kind = rng.randrange(5)
    if kind == 0:
        text = " ".join(str(rng.randrange(10)) for _ in range(min(length, MAX_DIGITS)))
    elif kind == 1:
        text = "".join(str(rng.randrange(10)) for _ in range(rng.randint(4, 8)))
    elif kind == 2:
        text = " ".join(rng.choices(WORDS, k=length))
    elif kind == 3:
        text = ", ".join(rng.sample(WORDS, length))
    else:
        text = ", ".join(str(rng.randrange(1000)) for _ in range(min(length, 10)))
    return Problem("copy", (canonical("copy", text),), ask(rng, "copy", x=text), text)


def reverse(rng: random.Random) -> Problem:
    kind = rng.randrange(4)
    if kind == 0:
        digits = "".join(str(rng.randrange(10)) for _ in range(rng.randint(3, 6)))
        return Problem("reverse", (canonical("reverse", digits),), ask(rng, "reverse digits", x=digits), digits[::-1])
    length = rng.randint(3, MAX_REVERSED)
    items: Sequence[object] = (
        rng.sample(WORDS, length),
        rng.sample(range(100), min(length, 8)),
        rng.sample(NAMES, length),
    )[kind - 1]
    text = joined(items)
    return Problem("reverse", (canonical("reverse", text),), ask(rng, "reverse", x=text), joined(items[::-1]))


def joined(items: Sequence[object]) -> str:
    return ", ".join(str(item) for item in items)


def sort(rng: random.Random) -> Problem:
    """The same items in another order are the same problem."""
    length = rng.randint(3, MAX_SORTED)
    kind = rng.randrange(3)
    if kind == 0:
        words = rng.sample(WORDS, length)
        messages = ask(rng, "sort words", x=joined(words))
        return Problem("sort", (canonical("sort", sorted(words)),), messages, joined(sorted(words)))
    numbers = rng.sample(range(100), length)
    down = kind == 2
    messages = ask(rng, "sort down" if down else "sort up", x=joined(numbers))
    ordered = sorted(numbers, reverse=down)
    return Problem("sort", (canonical("sort", sorted(numbers)),), messages, joined(ordered))


def count(rng: random.Random) -> Problem:
    kind = rng.randrange(3)
    if kind == 0:
        words = rng.sample(WORDS, rng.randint(1, MAX_COUNTED))
        answer = f"There {'is 1 word' if len(words) == 1 else f'are {len(words)} words'} in the list."
        return Problem("count", (canonical("count", words),), ask(rng, "count items", x=joined(words)), answer)
    if kind == 1:
        wanted, *others = rng.sample(WORDS, 5)
        times = rng.randint(1, 5)
        words = [wanted] * times + rng.choices(others, k=rng.randint(1, 7))
        rng.shuffle(words)
        answer = f'"{wanted}" appears {times} time{"s" if times > 1 else ""}.'
        messages = ask(rng, "count one", w=wanted, x=joined(words))
        return Problem("count", (canonical("count", wanted, words),), messages, answer)
    start = rng.randrange(90)
    end = start + rng.randint(2, MAX_COUNTED)
    numbers = joined(range(start, end + 1))
    return Problem("count", (canonical("count", start, end),), ask(rng, "count up", a=start, b=end), numbers)
