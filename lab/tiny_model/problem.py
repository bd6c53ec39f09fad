"""One problem with its only right answer, and which side of the split it is on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

HELD_OUT_ONE_IN = 12


@dataclass(frozen=True, slots=True)
class Problem:
    """A conversation that waits for the assistant, and what it must answer.

    `keys` are the canonical forms of what is asked: phrasing, names and order that do not matter are left out, so that
    problems with the same keys are the same problem. They alone decide the split. `sealed` problems are in training
    always: there is nothing to infer them from.
    """

    task: str
    keys: tuple[str, ...]
    messages: tuple[Message, ...]
    answer: str = ""
    thought: str = ""
    """The text that the model writes between <think> tags; dropped when the request turns thinking off."""
    quiet_answer: str = ""
    """The answer without a thought, where that is another one."""
    calls: tuple[dict[str, Any], ...] = ()
    """Tool calls, {"name", "arguments"}, that the model must make."""
    tools: tuple[dict[str, Any], ...] = ()
    tool_format: str = "qwen"
    prompt: str = ""
    """Plain text to continue, instead of a conversation; `messages` is empty then."""
    sealed: bool = False
    past_answers: bool = False
    """Earlier assistant turns in `messages` are answers of the same kind, worth learning too."""


def is_held_out_key(key: str) -> bool:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def is_trainable(problem: Problem) -> bool:
    """Nothing that it asks is held out."""
    return problem.sealed or not any(is_held_out_key(key) for key in problem.keys)


def is_held_out(problem: Problem) -> bool:
    """The last thing that it asks is held out: the split's other side, never seen in training."""
    return not problem.sealed and is_held_out_key(problem.keys[-1])


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def tool_call_message(calls: tuple[dict[str, Any], ...]) -> Message:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call} for call in calls],
    }


def canonical(*parts: Any) -> str:
    return json.dumps(parts, ensure_ascii=False, separators=(",", ":"))
