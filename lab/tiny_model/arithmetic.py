"""Sums, differences, products, comparisons, and word problems of two steps."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tiny_model.problem import Message, Problem, canonical, is_held_out_key, user
from tiny_model.words import ITEMS, NAMES, PHRASES


def ask(rng: random.Random, phrases: str, **values: object) -> tuple[Message, ...]:
    """A user's turn. `phrases` is a title in phrases.txt."""
    return (user(rng.choice(PHRASES[phrases]).format(**values)),)


def up_to_two_digits(rng: random.Random) -> int:
    return rng.randrange(100) if rng.random() < 0.85 else rng.randrange(10)


def pair_key(operation: str, a: int, b: int) -> str:
    """The same for a + b and b + a, a - b and b - a: one tells the other."""
    return canonical(operation, min(a, b), max(a, b))


def add(rng: random.Random) -> Problem:
    return sum_of(rng, "add", up_to_two_digits(rng), up_to_two_digits(rng))


def add_3_digits(rng: random.Random) -> Problem:
    return sum_of(rng, "add_3_digits", rng.randrange(100, 1000), rng.randrange(10, 1000))


def sum_of(rng: random.Random, task: str, a: int, b: int) -> Problem:
    answer = f"{a} + {b} = {a + b}"
    return Problem(task, (pair_key("+", a, b),), ask(rng, "add", a=a, b=b), answer, sealed=max(a, b) < 10)


def subtract(rng: random.Random) -> Problem:
    a, b = up_to_two_digits(rng), up_to_two_digits(rng)
    if a < b and rng.random() < 0.5:
        a, b = b, a
    return difference_of(rng, "subtract", a, b)


def subtract_3_digits(rng: random.Random) -> Problem:
    a, b = rng.randrange(100, 1000), rng.randrange(10, 1000)
    return difference_of(rng, "subtract_3_digits", max(a, b), min(a, b))


def difference_of(rng: random.Random, task: str, a: int, b: int) -> Problem:
    answer = f"{a} - {b} = {a - b}"
    return Problem(task, (pair_key("-", a, b),), ask(rng, "subtract", a=a, b=b), answer, sealed=max(a, b) < 10)


def multiply(rng: random.Random) -> Problem:
    """Up to 99 * 9, and the teens by the teens."""
    kind = rng.random()
    if kind < 0.25:
        a, b = rng.randrange(10), rng.randrange(10)
    elif kind < 0.85:
        a, b = rng.randrange(10, 100), rng.randrange(2, 10)
        if rng.random() < 0.4:
            a, b = b, a
    else:
        a, b = rng.randrange(10, 20), rng.randrange(10, 20)
    answer = product_steps(a, b)
    return Problem("multiply", (pair_key("*", a, b),), ask(rng, "multiply", a=a, b=b), answer, sealed=max(a, b) < 10)


def product_steps(a: int, b: int) -> str:
    """With the larger factor split into tens and ones, as on paper."""
    split, kept = max(a, b), min(a, b)
    tens, ones = split // 10 * 10, split % 10
    if not tens or not ones:
        return f"{a} * {b} = {a * b}"
    return f"{a} * {b} = {tens} * {kept} + {ones} * {kept} = {tens * kept} + {ones * kept} = {a * b}"


def compare(rng: random.Random) -> Problem:
    limit = rng.choice((10, 100, 1000))
    a, b = rng.sample(range(limit), 2)
    low, high = min(a, b), max(a, b)
    messages, answer = rng.choice(
        (
            (ask(rng, "larger", a=a, b=b), f"{high} is larger than {low}."),
            (ask(rng, "smaller", a=a, b=b), f"{low} is smaller than {high}."),
            (
                ask(rng, "is larger", a=a, b=b),
                f"Yes, {a} is larger than {b}." if a > b else f"No, {a} is smaller than {b}.",
            ),
            (
                ask(rng, "is smaller", a=a, b=b),
                f"Yes, {a} is smaller than {b}." if a < b else f"No, {a} is larger than {b}.",
            ),
        )
    )
    return Problem("compare", (pair_key("<", a, b),), messages, answer)


@dataclass(frozen=True, slots=True)
class Story:
    """A word problem of two steps. `first` and `second` are operations on (a, b) and (step one, c)."""

    text: str
    first: str
    second: str

    def steps(self, a: int, b: int, c: int) -> tuple[str, str, int]:
        middle = OPERATIONS[self.first](a, b)
        end = OPERATIONS[self.second](middle, c)
        return f"{a} {self.first} {b} = {middle}", f"{middle} {self.second} {c} = {end}", end


OPERATIONS = {"+": lambda x, y: x + y, "-": lambda x, y: x - y, "*": lambda x, y: x * y}

STORIES = (
    Story("{n} has {a} {i}. {n} buys {b} more and gives {c} to {m}. How many {i} does {n} have now?", "+", "-"),
    Story("{n} finds {a} {i} in the morning and {b} in the evening, then loses {c}. How many {i} are left?", "+", "-"),
    Story("There are {a} {i} in a box. {n} takes {b} out and {m} puts {c} in. How many {i} are in the box?", "-", "+"),
    Story("A shop has {a} {i}. It sells {b} and then gets {c} new ones. How many {i} does it have?", "-", "+"),
    Story("{n} buys {a} bags with {b} {i} each and loses {c}. How many {i} does {n} have left?", "*", "-"),
    Story("{n} fills {a} boxes with {b} {i} each and gives {c} away. How many {i} remain?", "*", "-"),
    Story("{n} buys {a} tickets for {b} dollars each and a drink for {c} dollars. How much does {n} pay?", "*", "+"),
    Story("There are {a} rows of {b} chairs, and {c} more in the corner. How many chairs are there?", "*", "+"),
    Story("{n} reads {a} pages on Monday, {b} on Tuesday and {c} on Wednesday. How many pages are that?", "+", "+"),
    Story("{n} has {a} {i}, {m} has {b} and Sam has {c}. How many {i} do they have together?", "+", "+"),
    Story("{n} had {a} {i}, gave {b} to {m} and {c} to a friend. How many {i} does {n} still have?", "-", "-"),
    Story("A train has {a} passengers. {b} leave at the first stop and {c} at the second. How many stay?", "-", "-"),
    Story("{n} saves {a} dollars a week for {b} weeks and then spends {c} dollars. How much is left?", "*", "-"),
    Story("{n} walks {a} miles every day for {b} days, and then {c} miles more. How many miles is that?", "*", "+"),
)
"""Names and things differ from telling to telling; what makes a problem is the story and its numbers."""


@dataclass(frozen=True, slots=True)
class ToldStory:
    key: str
    question: str
    first_step: str
    second_step: str
    result: int


def tell(rng: random.Random) -> ToldStory:
    number = rng.randrange(len(STORIES))
    story = STORIES[number]
    a, b, c = numbers(rng, story)
    n, m = rng.sample(NAMES, 2)
    first, second, result = story.steps(a, b, c)
    text = story.text.format(n=n, m=m, i=rng.choice(ITEMS), a=a, b=b, c=c)
    return ToldStory(canonical("story", number, a, b, c), text, first, second, result)


def numbers(rng: random.Random, story: Story) -> tuple[int, int, int]:
    """Such that no step goes below zero or above 200."""
    if story.first == "*":
        a, b = rng.randrange(2, 10), rng.randrange(2, 10)
    elif story.first == "+":
        a, b = rng.randrange(2, 100), rng.randrange(2, 60)
    else:
        a = rng.randrange(20, 100)
        b = rng.randrange(2, a - 5)
    return a, b, rng.randrange(2, OPERATIONS[story.first](a, b) if story.second == "-" else 40)


def word_problem(rng: random.Random) -> Problem:
    told = tell(rng)
    answer = f"The answer is {told.result}."
    return Problem(
        "word_problem",
        (told.key,),
        (user(told.question),),
        answer,
        thought=f"{told.first_step}\n{told.second_step}",
        quiet_answer=f"{told.first_step}, {told.second_step}. {answer}",
    )


def gsm8k_row(told: ToldStory) -> dict[str, str]:
    """A line of a file in the form of GSM8K."""
    return {
        "question": told.question,
        "answer": f"{told.first_step}\n{told.second_step}\n#### {told.result}",
    }


def few_shot(rng: random.Random) -> Problem:
    """Solved word problems as plain text, then one more to solve. What is shown may be anything that is trained on."""
    parts, keys = [], []
    for _ in range(rng.choice((0, 1, 2, 3, 4, 5, 5, 5))):
        told = tell(rng)
        while is_held_out_key(told.key):
            told = tell(rng)
        parts.append(few_shot_text(gsm8k_row(told)))
        keys.append(told.key)
    told = tell(rng)
    row = gsm8k_row(told)
    return Problem(
        "few_shot",
        (*keys, told.key),
        (),
        answer=" " + row["answer"] + "\n\nQuestion:",
        prompt="".join(parts) + f"Question: {row['question']}\nAnswer:",
    )


def few_shot_text(row: dict[str, str]) -> str:
    return f"Question: {row['question']}\nAnswer: {row['answer']}\n\n"
