"""The held-out problems: the same ones every time, on the side of the split that training never sees."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_model.arithmetic import gsm8k_row, tell
from tiny_model.knowledge import every_fact
from tiny_model.mixture import TASK_NAMES, TASKS, draw
from tiny_model.problem import Message, Problem, is_held_out, is_held_out_key
from tiny_model.render import answer_text

SEED = 20261121
DEFAULT_COUNT = 40
SPARE_TOKENS = 24
SHOTS = 5


@dataclass(frozen=True, slots=True)
class Item:
    """A problem as it is asked over the API, and how its answer is judged: `text` (equal), `json` (equal values) or
    `tool` (equal names and arguments)."""

    id: str
    task: str
    problem: Problem
    thinking: bool

    @property
    def check(self) -> str:
        return "tool" if self.problem.calls else "json" if self.task == "json" else "text"

    @property
    def expected(self) -> str:
        """The answer without thoughts."""
        if self.problem.calls:
            return answer_text(self.problem, self.thinking).removesuffix("<|im_end|>")
        if self.problem.prompt:
            return self.problem.answer.removesuffix("Question:").strip()
        return self.problem.answer if self.thinking else self.problem.quiet_answer or self.problem.answer

    def as_dict(self) -> dict[str, Any]:
        options: dict[str, Any] = {"enable_thinking": self.thinking}
        if self.problem.tools:
            options["tool_format"] = self.problem.tool_format
        return {
            "id": self.id,
            "task": self.task,
            "prompt": self.problem.prompt,
            "messages": [_api_message(message) for message in self.problem.messages],
            "tools": list(self.problem.tools),
            "chat_template_kwargs": options,
            "max_tokens": len(answer_text(self.problem, self.thinking).encode()) + SPARE_TOKENS,
            "check": self.check,
            "expected": self.expected,
            "calls": list(self.problem.calls),
        }


def _api_message(message: Message) -> Message:
    """Over the API, the arguments of a call are a string, and calls and their results have an id."""
    if message["role"] == "tool":
        return {**message, "tool_call_id": "call_0"}
    calls = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": call["function"]["name"], "arguments": json.dumps(call["function"]["arguments"])},
        }
        for number, call in enumerate(message.get("tool_calls", ()))
    ]
    return {**message, "tool_calls": calls} if calls else message


def items(task: str, count: int = DEFAULT_COUNT, seed: int = SEED) -> list[Item]:
    """Up to `count` different problems of `task`; every third with thinking off."""
    rng = random.Random(f"{seed}/{task}")
    found: dict[str, Item] = {}
    for _ in range(50 * count):
        if len(found) == count:
            break
        problem = draw(task, rng, held_out=True)
        thinking = len(found) % 3 != 2
        key = problem.prompt or json.dumps(problem.messages)
        if key not in found:
            found[key] = Item(f"{task}-{len(found)}", task, problem, thinking)
    return list(found.values())


def all_items(count: int = DEFAULT_COUNT, tasks: tuple[str, ...] = TASK_NAMES) -> Iterator[Item]:
    unknown = set(tasks) - set(TASKS)
    if unknown:
        raise ValueError(f"no such tasks: {', '.join(sorted(unknown))}; there are {', '.join(TASK_NAMES)}")
    for task in tasks:
        yield from items(task, count)


def every_held_out_fact() -> list[Item]:
    """Facts are few: all held-out ways of asking, each once."""
    found = [problem for problem in every_fact() if is_held_out(problem)]
    return [Item(f"facts-{number}", "facts", problem, True) for number, problem in enumerate(found)]


def write(path: Path, items_written: Iterable[Item]) -> int:
    """Writes one JSON object a line, compressed where the name ends with .gz; returns how many."""
    lines = [json.dumps(item.as_dict(), ensure_ascii=False) for item in items_written]
    content = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return len(lines)


def write_gsm8k(path: Path, count: int) -> None:
    """Word problems in the form of GSM8K: five to show, which training may have seen, then held-out ones to solve."""
    rng = random.Random(f"{SEED}/gsm8k")
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < count:
        told = tell(rng)
        if is_held_out_key(told.key) == (len(rows) >= SHOTS):
            rows.setdefault(told.key, gsm8k_row(told))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows.values()), encoding="utf-8")
