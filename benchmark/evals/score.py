"""What an evaluation says in the end: shares with their intervals, time, rate."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import api

Z = 1.959964
"""Of the normal distribution, for 95%."""


@dataclass(frozen=True, slots=True)
class Result:
    """Shares of `asked` questions, seconds, and tokens a second. `errors`: questions that got no answer; they count as
    wrong."""

    asked: int
    accuracy: float
    invalid: float
    errors: int
    latency: float
    throughput: float

    def rows(self) -> str:
        low, high = wilson(self.accuracy, self.asked)
        lines = [
            f"Accuracy: {self.accuracy:.3f}",
            f"Invalid: {self.invalid:.3f}",
            f"Latency: {self.latency:.3f} s",
            f"Output throughput: {self.throughput:.3f} token/s",
            f"95% interval: {low:.3f} to {high:.3f} ({self.asked} questions)",
        ]
        return "\n".join(lines)

    def append_to(self, path: Path, task: str, **more: object) -> None:
        """A JSON line with the fields of upstream's result files, and the interval."""
        low, high = wilson(self.accuracy, self.asked)
        row = {
            "task": task,
            "backend": "openai",
            "accuracy": round(self.accuracy, 3),
            "interval": [round(low, 3), round(high, 3)],
            "invalid": round(self.invalid, 3),
            "latency": round(self.latency, 3),
            "throughput": round(self.throughput, 3),
            "num_requests": self.asked,
            **more,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        }
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95% interval of a share of `count` independent questions (Wilson 1927): also right near 0 and 1."""
    if not count:
        return 0.0, 1.0
    middle = share + Z * Z / (2 * count)
    width = Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    scale = 1 + Z * Z / count
    return max(0.0, (middle - width) / scale), min(1.0, (middle + width) / scale)


def judge(
    answers: Sequence[api.Answer], seconds: float, verdicts: Sequence[Callable[[api.Answer], bool | None]]
) -> Result:
    """`verdicts`, one an answer: right, wrong, or None for an answer that says nothing."""
    right = invalid = errors = 0
    for answer, verdict in zip(answers, verdicts, strict=True):
        if answer.body is None:
            errors += 1
            print(f"error: {answer.error}", file=sys.stderr)
            continue
        outcome = verdict(answer)
        invalid += outcome is None
        right += bool(outcome)
    tokens = sum(answer.completion_tokens for answer in answers)
    count = len(answers)
    return Result(count, right / count, invalid / count, errors, seconds, tokens / seconds if seconds else 0.0)
