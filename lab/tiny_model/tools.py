"""Calling functions: which one, with which arguments, in the text form of the model family that a template names."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tiny_model.arithmetic import add
from tiny_model.functions import FUNCTIONS, Function
from tiny_model.knowledge import fact
from tiny_model.problem import Problem, canonical, tool_call_message, user
from tiny_model.words import some_time

FORMATS = ("qwen", "glm45", "glm47", "kimi_k2", "deepseekv3", "deepseekv31", "deepseekv32")
"""Values of the template's `tool_format`, called like the server's --tool-call-parser."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A function as one conversation sees it: its name and its parameters' names are picked."""

    function: Function
    name: str
    parameter_names: dict[str, str]

    def definition(self) -> dict[str, Any]:
        properties: dict[str, Any] = {}
        for letter, name in self.parameter_names.items():
            parameter = self.function.parameters[letter]
            properties[name] = {"type": parameter.type}
            if parameter.choices:
                properties[name]["enum"] = list(parameter.choices)
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.function.description, "parameters": schema},
        }

    def call(self, rng: random.Random, request: int) -> tuple[str, dict[str, Any]]:
        values = {letter: p.make(rng) for letter, p in self.function.parameters.items()}
        arguments = {name: values[letter] for letter, name in self.parameter_names.items()}
        return self.function.requests[request].format(**values), {"name": self.name, "arguments": arguments}


def offer(rng: random.Random, chosen: Function) -> Offer:
    names: dict[str, str] = {}
    for letter, parameter in chosen.parameters.items():
        names[letter] = rng.choice([name for name in parameter.names if name not in names.values()])
    return Offer(chosen, rng.choice(chosen.names), names)


def offers(rng: random.Random) -> tuple[list[Offer], Offer]:
    """One to four functions, and the one that is needed."""
    picked = [offer(rng, chosen) for chosen in rng.sample(FUNCTIONS, rng.choice((1, 2, 2, 3, 3, 4)))]
    return picked, rng.choice(picked)


def call_key(needed: Offer, call: dict[str, Any]) -> str:
    """The function and the values, whatever they are called."""
    return canonical("tool", needed.function.names[0], sorted(map(str, call["arguments"].values())))


def tool_call(task: str, tool_format: str) -> Callable[[random.Random], Problem]:
    def make(rng: random.Random) -> Problem:
        picked, needed = offers(rng)
        request = rng.randrange(len(needed.function.requests))
        question, call = needed.call(rng, request)
        calls: tuple[dict[str, Any], ...] = (call,)
        if rng.random() < 0.12:
            other, second = needed.call(rng, request)
            if second != call:
                question, calls = f"{question} {other}", (call, second)
        return Problem(
            task,
            tuple(call_key(needed, c) for c in calls),
            (user(question),),
            calls=calls,
            tools=tuple(one.definition() for one in picked),
            tool_format=tool_format,
        )

    return make


RESULTS: tuple[tuple[str, Callable[[random.Random], tuple[str, str]]], ...] = (
    ("get_weather", lambda rng: _weather(rng.randrange(1, 40), rng.choice(("sunny", "cloudy", "rainy", "windy")))),
    ("get_time", lambda rng: _time(some_time(rng))),
    ("add_numbers", lambda rng: _sum(rng.randrange(2000))),
    ("convert_money", lambda rng: _sum(rng.randrange(2000))),
)


def _weather(degrees: int, sky: str) -> tuple[str, str]:
    return f'{{"temperature": {degrees}, "sky": "{sky}"}}', f"It is {sky}, with {degrees} degrees."


def _time(time: str) -> tuple[str, str]:
    return f'{{"time": "{time}"}}', f"It is {time}."


def _sum(result: int) -> tuple[str, str]:
    return f'{{"result": {result}}}', f"The result is {result}."


def tool_answer(rng: random.Random) -> Problem:
    """The function has answered; the user wants to know."""
    name, make = rng.choice(RESULTS)
    needed = offer(rng, next(f for f in FUNCTIONS if f.names[0] == name))
    question, call = needed.call(rng, rng.randrange(len(needed.function.requests)))
    result, answer = make(rng)
    messages = (user(question), tool_call_message((call,)), {"role": "tool", "content": result})
    return Problem(
        "tool_answer",
        (call_key(needed, call), canonical("tool_answer", call_key(needed, call), result)),
        messages,
        answer,
        tools=(needed.definition(),),
        tool_format=rng.choice(FORMATS),
    )


def no_tool(rng: random.Random) -> Problem:
    """Functions are offered, but the question needs none of them."""
    picked, _ = offers(rng)
    asked = fact(rng) if rng.random() < 0.7 else add(rng)
    tools = tuple(one.definition() for one in picked if one.function.names[0] != "add_numbers")
    return replace(asked, task="no_tool", tools=tools, tool_format=rng.choice(FORMATS))
