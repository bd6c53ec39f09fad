"""Answers in a file, a JSON line each, so that an evaluation goes on where it was interrupted."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any


class Record:
    """Answers by what was asked of which model."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError for a file of another form. A last line that was cut off is removed."""
        self._answers: dict[str, dict[str, Any]] = {}
        self._last_answer: dict[str, float] = {}  # of each run, seconds after its start
        self._run, self._started = f"{time.time():.6f}", time.perf_counter()
        whole = 0
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True) if path.exists() else [], 1):
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            try:
                row = json.loads(line)
                self._keep(row["key"], row["body"], row["run"], float(row["seconds"]))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number} is no answer of an evaluation: {error}") from error
        self._file = path.open("ab")
        self._file.truncate(whole)

    @staticmethod
    def key(path: str, body: dict[str, Any]) -> str:
        return hashlib.sha256(json.dumps([path, body], sort_keys=True).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: str) -> dict[str, Any] | None:
        return self._answers.get(key)

    def add(self, key: str, body: dict[str, Any]) -> None:
        seconds = time.perf_counter() - self._started
        self._keep(key, body, self._run, seconds)
        row = {"key": key, "run": self._run, "seconds": seconds, "body": body}
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()

    def _keep(self, key: str, body: dict[str, Any], run: str, seconds: float) -> None:
        self._answers[key] = body
        self._last_answer[run] = max(seconds, self._last_answer.get(run, 0.0))

    @property
    def seconds(self) -> float:
        """That all runs spent, each up to its last answer."""
        return sum(self._last_answer.values())

    def close(self) -> None:
        self._file.close()
