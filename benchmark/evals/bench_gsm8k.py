#!/usr/bin/env python3
"""Few-shot accuracy on grade-school word problems, over OpenAI's API.

    python benchmark/evals/bench_gsm8k.py --num-questions 200 --parallel 128 --num-shots 5 [--data-path test.jsonl]

Reads any JSON-lines file in the form of GSM8K ({"question", "answer": "... #### 42"}); without --data-path, the
synthetic problems beside this script. The first --num-shots lines are shown solved, the lines after them are asked. An
answer counts by its last number. With --record an interrupted run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
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

SYNTHETIC = HERE / "data" / "gsm8k_synthetic.jsonl"
STOPS = ["Question", "Assistant:", "<|separator|>"]
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Example:
    question: str
    answer: str

    @property
    def asked(self) -> str:
        return f"Question: {self.question}\nAnswer:"

    @property
    def solved(self) -> str:
        return f"{self.asked} {self.answer}\n\n"


def last_number(text: str) -> float | None:
    """Thousands may be set off by commas."""
    found = _NUMBER.findall(re.sub(r"(?<=\d),(?=\d)", "", text))
    return float(found[-1]) if found else None


def read(path: Path) -> list[Example]:
    """Raises ValueError for a file of another form."""
    examples = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            example = Example(str(row["question"]), str(row["answer"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: expected {{'question': .., 'answer': ..}}: {error}") from error
        if last_number(example.answer) is None:
            raise ValueError(f"{path}, line {number}: the answer has no number")
        examples.append(example)
    return examples


def evaluate(
    url: str,
    examples: list[Example],
    num_shots: int,
    num_questions: int,
    parallel: int,
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    api_key: str | None = None,
    record: Path | None = None,
) -> Result:
    """Raises ValueError if there are too few lines."""
    shots, asked = examples[:num_shots], examples[num_shots : num_shots + num_questions]
    if not asked:
        raise ValueError(f"{len(examples)} lines leave nothing to ask after {num_shots} shots")
    shown = "".join(example.solved for example in shots)
    limits = {"max_tokens": max_new_tokens, "temperature": temperature, "stop": STOPS}
    requests = [api.Request("/v1/completions", {"prompt": shown + e.asked, **limits}) for e in asked]
    answers, seconds = api.run(url, requests, parallel, api_key, record)
    return judge(answers, seconds, [partial(verdict, example) for example in asked])


def verdict(example: Example, answer: api.Answer) -> bool | None:
    assert answer.body is not None
    got = last_number(str(answer.body["choices"][0].get("text") or ""))
    return None if got is None else got == last_number(example.answer)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-shots", type=int, default=5)
    parser.add_argument("--num-questions", type=int, default=200)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--parallel", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--data-path", type=Path, default=SYNTHETIC)
    parser.add_argument("--host", default="http://127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--api-key")
    parser.add_argument("--record", type=Path, help="answers are kept there, and not asked for again")
    parser.add_argument("--result-file", type=Path, help="a JSON line with the results is added to it")
    args = parser.parse_args()
    try:
        result = evaluate(
            api.base_url(args.host, args.port),
            read(args.data_path),
            args.num_shots,
            args.num_questions,
            args.parallel,
            args.max_new_tokens,
            args.temperature,
            args.api_key,
            args.record,
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(result.rows())
    if args.result_file:
        result.append_to(args.result_file, "gsm8k", num_shots=args.num_shots)
    return 1 if result.errors else 0


if __name__ == "__main__":
    sys.exit(main())
