#!/usr/bin/env python3
"""Held-out score of the embedded model by task, over OpenAI's API.

    python benchmark/evals/bench_tiny.py [--port 30000] [--limit 10] [--tasks add,sort] [--output report.json] [--check]
        [--margins]

Its problems, 50 of each task, lie in data/tiny_problems.jsonl.gz, as `python lab/tiny_model heldout` makes them from a
fixed seed; none was in training. --data-path reads others.
Every answer is greedy and right or wrong as a whole. With --check the exit status says whether the targets are met.
--margins also asks how sure the model was: how much likelier, in nats, each token was than the next best one. That
moves with any error of the computation, long before an answer changes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

import api  # noqa: E402
from judge import Verdict, judge  # noqa: E402

PROBLEMS = HERE / "data" / "tiny_problems.jsonl.gz"
STOPS = ["Question"]
"""Ends plain-text answers, as in few-shot evaluations."""


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    tasks: tuple[str, ...]
    least: float


TARGETS = (
    Target("arithmetic, 2 digits", ("add", "subtract"), 0.98),
    Target("copy, sort, reverse", ("copy", "sort", "reverse"), 0.95),
    Target("needle at 2k", ("needle_2k",), 0.95),
    Target("facts", ("facts",), 0.99),
    Target("JSON", ("json",), 0.95),
    Target("tool calls", ("tool_qwen",), 0.95),
)


@dataclass(slots=True)
class Score:
    count: int = 0
    right: int = 0
    invalid: int = 0
    errors: int = 0
    tokens: int = 0
    """Whose margins were measured."""
    margins: float = 0.0
    """Their sum, nats."""

    @property
    def margin(self) -> float | None:
        """Mean a token; None if it was not measured."""
        return self.margins / self.tokens if self.tokens else None

    @property
    def share(self) -> float:
        return self.right / self.count if self.count else 0.0

    def as_dict(self) -> dict[str, float]:
        found: dict[str, float] = {
            "score": round(self.share, 4),
            "count": self.count,
            "right": self.right,
            "invalid": self.invalid,
            "errors": self.errors,
        }
        return found if self.margin is None else {**found, "margin": round(self.margin, 4)}


@dataclass(slots=True)
class Report:
    scores: dict[str, Score] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    completion_tokens: int = 0

    def add(self, item: dict[str, Any], answer: api.Answer) -> None:
        score = self.scores.setdefault(item["task"], Score())
        score.count += 1
        self.completion_tokens += answer.completion_tokens
        if answer.body is None:
            score.errors += 1
            verdict = Verdict(False, False, f"error: {answer.error}")
        else:
            choice = answer.body["choices"][0]
            verdict = judge(item, choice)
            margins = token_margins(choice)
            score.tokens += len(margins)
            score.margins += sum(margins)
            score.right += verdict.right
            score.invalid += not verdict.valid
        if not verdict.right:
            self.failures.append({"id": item["id"], "expected": item["expected"], "got": verdict.got})

    def target(self, target: Target) -> Score | None:
        """Together; None if a part was not measured."""
        if not all(task in self.scores for task in target.tasks):
            return None
        parts = [self.scores[task] for task in target.tasks]
        return Score(sum(p.count for p in parts), sum(p.right for p in parts))

    def missed(self) -> list[str]:
        found = [(target, self.target(target)) for target in TARGETS]
        return [
            f"{target.name}: {score.share:.3f}, at least {target.least} is wanted"
            for target, score in found
            if score is not None and score.share < target.least
        ]

    def whole(self) -> Score:
        parts = self.scores.values()
        return Score(
            sum(p.count for p in parts),
            sum(p.right for p in parts),
            sum(p.invalid for p in parts),
            sum(p.errors for p in parts),
            sum(p.tokens for p in parts),
            sum(p.margins for p in parts),
        )

    def as_dict(self) -> dict[str, Any]:
        targets = {t.name: {"least": t.least, "score": s.share} for t in TARGETS if (s := self.target(t)) is not None}
        return {
            "seconds": round(self.seconds, 2),
            "completion_tokens": self.completion_tokens,
            "all": self.whole().as_dict(),
            "targets": targets,
            "tasks": {task: score.as_dict() for task, score in self.scores.items()},
            "failures": self.failures,
        }

    def table(self) -> str:
        heading = f"{'task':<22} {'score':>7} {'right':>6} {'of':>6} {'invalid':>8} {'errors':>7}"
        lines = [heading if self.whole().margin is None else f"{heading} {'margin':>7}"]
        for task, score in [*self.scores.items(), ("all", self.whole())]:
            lines.append(
                f"{task:<22} {100 * score.share:>6.1f}% {score.right:>6} {score.count:>6} {score.invalid:>8}"
                f" {score.errors:>7}" + ("" if score.margin is None else f" {score.margin:>7.2f}")
            )
        for target in TARGETS:
            if (part := self.target(target)) is not None:
                mark = "met" if part.share >= target.least else "MISSED"
                lines.append(f"{target.name:<22} {100 * part.share:>6.1f}%   target {100 * target.least:.0f}%: {mark}")
        lines.append(f"{self.seconds:.1f} s, {self.completion_tokens} tokens written")
        return "\n".join(lines)


def load(path: Path | None, limit: int | None, tasks: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the problems of a file of JSON lines (None: of PROBLEMS), `limit` of each task at most.

    Raises ValueError for unknown tasks and lines that are no problems.
    """
    path = path or PROBLEMS
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    lines = [line for line in content.decode("utf-8").splitlines() if line.strip()]
    found: list[dict[str, Any]] = []
    taken: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        item = json.loads(line)
        if not isinstance(item, dict) or not {"task", "messages", "expected", "check"} <= item.keys():
            raise ValueError(f"{path}, line {number} is not a problem as `lab/tiny_model heldout` writes them")
        taken[item["task"]] = taken.get(item["task"], 0) + 1
        if (not tasks or item["task"] in tasks) and (limit is None or taken[item["task"]] <= limit):
            found.append(item)
    unknown = set(tasks) - taken.keys()
    if unknown:
        raise ValueError(f"{path} has no tasks {', '.join(sorted(unknown))}; it has {', '.join(taken)}")
    return found


def request(item: dict[str, Any], margins: bool = False) -> api.Request:
    limits = {"temperature": 0, "max_tokens": item["max_tokens"]}
    if item.get("prompt"):
        asked = {"logprobs": 2} if margins else {}
        return api.Request("/v1/completions", {"prompt": item["prompt"], "stop": STOPS, **limits, **asked})
    asked = {"logprobs": True, "top_logprobs": 2} if margins else {}
    body = {"messages": item["messages"], "chat_template_kwargs": item["chat_template_kwargs"], **limits, **asked}
    if item.get("tools"):
        body["tools"] = item["tools"]
    return api.Request("/v1/chat/completions", body)


def token_margins(choice: dict[str, Any]) -> list[float]:
    """Of each token of an answer, its log probability less that of the next best; none if they were not asked for."""
    found = choice.get("logprobs") or {}
    if "content" in found:
        tops = [[top["logprob"] for top in token["top_logprobs"]] for token in found["content"] or ()]
    else:
        tops = [list(top.values()) for top in found.get("top_logprobs") or ()]
    ordered = (sorted(top, reverse=True) for top in tops)
    return [top[0] - top[1] for top in ordered if len(top) > 1]


def evaluate(
    url: str, items: list[dict[str, Any]], parallel: int, api_key: str | None = None, margins: bool = False
) -> Report:
    report = Report()
    answers, report.seconds = api.run(url, [request(item, margins) for item in items], parallel, api_key)
    for item, answer in zip(items, answers, strict=True):
        report.add(item, answer)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--base-url", help="instead of --host and --port")
    parser.add_argument("--api-key")
    parser.add_argument("--parallel", type=int, default=32)
    parser.add_argument("--limit", type=int, help="problems a task")
    parser.add_argument("--tasks", default="", help="separated by commas (default: all)")
    parser.add_argument("--data-path", type=Path, help="problems, one JSON object a line; *.gz is decompressed")
    parser.add_argument("--output", type=Path, help="JSON report")
    parser.add_argument("--margins", action="store_true", help="measure how sure the model was of its tokens, too")
    parser.add_argument("--check", action="store_true", help="fail if a target is missed")
    args = parser.parse_args()
    try:
        items = load(args.data_path, args.limit, [name for name in args.tasks.split(",") if name])
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    url = args.base_url or api.base_url(args.host, args.port)
    report = evaluate(url, items, args.parallel, args.api_key, args.margins)
    print(report.table())
    if args.output:
        args.output.write_text(json.dumps(report.as_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if args.check and (missed := report.missed()):
        print("\n".join(missed), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
