#!/usr/bin/env python3
"""Accuracy on GPQA's multiple-choice questions, over OpenAI's API.

    python benchmark/evals/bench_gpqa.py --data-path gpqa_diamond.csv --parallel 32 --record answers.jsonl

Reads the files that GPQA's authors publish (CSV, or JSON lines with the same names: Question, Correct Answer, Incorrect
Answer 1 to 3). They ask that the questions be kept off the open web, so none comes with this script. Choices are
shuffled by --seed. The model thinks, then ends with "Answer: LETTER"; thoughts that the server separates do not count.
With --record an interrupted run goes on where it was; --repeats asks every question that often.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

import api  # noqa: E402
from score import Result, judge  # noqa: E402

LETTERS = "ABCD"
COLUMNS = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
INSTRUCTION = (
    'Answer the multiple-choice question. Think step by step, and end with a line "Answer: LETTER", where LETTER is one'
    " of A, B, C, D."
)
_ANSWER = re.compile(r"(?i)answer\**\s*[:=]?\s*\**\s*(?:\\boxed\{)?(?:\\text\{)?\(?\**([A-D])(?![A-Za-z])")


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    choices: tuple[str, str, str, str]
    right: str  # a letter

    @property
    def prompt(self) -> str:
        choices = "\n".join(f"{letter}) {choice}" for letter, choice in zip(LETTERS, self.choices, strict=True))
        return f"{INSTRUCTION}\n\n{self.text}\n\n{choices}"


def read(path: Path, seed: int) -> list[Question]:
    """Raises ValueError for a file of another form."""
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            rows = list(csv.DictReader(file))
        else:
            rows = [json.loads(line) for line in file if line.strip()]
    shuffle = random.Random(seed)
    questions = []
    for number, row in enumerate(rows, 1):
        missing = [name for name in COLUMNS if not isinstance(row, dict) or not row.get(name)]
        if missing:
            raise ValueError(f"{path}, question {number} has no {', '.join(missing)}; expected GPQA's columns")
        right, *wrong = (str(row[name]).strip() for name in COLUMNS[1:])
        choices = shuffle.sample([right, *wrong], 4)
        first, second, third, fourth = choices
        questions.append(
            Question(str(row["Question"]).strip(), (first, second, third, fourth), LETTERS[choices.index(right)])
        )
    return questions


def chosen(answer: api.Answer) -> str | None:
    """The letter of the last "Answer: X"; None if there is none."""
    assert answer.body is not None
    content = (answer.body["choices"][0].get("message") or {}).get("content") or ""
    found = _ANSWER.findall(content)
    return found[-1].upper() if found else None


def verdict(question: Question, answer: api.Answer) -> bool | None:
    letter = chosen(answer)
    return None if letter is None else letter == question.right


def evaluate(
    url: str,
    questions: list[Question],
    parallel: int,
    max_tokens: int | None = None,
    temperature: float | None = None,
    repeats: int = 1,
    api_key: str | None = None,
    record: Path | None = None,
) -> Result:
    """Raises ValueError if there is nothing to ask."""
    if not questions:
        raise ValueError("there are no questions to ask")
    limits = {
        name: value for name, value in (("max_tokens", max_tokens), ("temperature", temperature)) if value is not None
    }
    asked = [(question, seed) for seed in range(repeats) for question in questions]
    requests = [
        api.Request(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": question.prompt}], "seed": seed, **limits},
        )
        for question, seed in asked
    ]
    answers, seconds = api.run(url, requests, parallel, api_key, record)
    return judge(answers, seconds, [partial(verdict, question) for question, _ in asked])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-path", type=Path, required=True)
    parser.add_argument("--num-questions", type=int, default=None, help="the first so many; default: all")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=None, help="of an answer; default: the server's limit")
    parser.add_argument("--temperature", type=float, default=None, help="default: the model's")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the choices")
    parser.add_argument("--host", default="http://127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--api-key")
    parser.add_argument("--record", type=Path, help="answers are kept there, and not asked for again")
    parser.add_argument("--result-file", type=Path, help="a JSON line with the results is added to it")
    args = parser.parse_args()
    try:
        questions = read(args.data_path, args.seed)[: args.num_questions]
        url = api.base_url(args.host, args.port)
        limits = (args.max_tokens, args.temperature, args.repeats)
        result = evaluate(url, questions, args.parallel, *limits, args.api_key, args.record)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(result.rows())
    if args.result_file:
        result.append_to(args.result_file, "gpqa", repeats=args.repeats)
    return 1 if result.errors else 0


if __name__ == "__main__":
    sys.exit(main())
