"""The few-shot client against a server whose answers are known."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench_gsm8k
import pytest
from benchmark.evals.fake_server import FakeServer

SCRIPT = Path(__file__).parents[3] / "benchmark" / "evals" / "bench_gsm8k.py"


def solver(answers: dict[str, str]) -> Any:
    """Knows the answers by the last question of the prompt."""

    def reply(_: str, body: dict[str, Any]) -> dict[str, Any]:
        question = re.findall(r"Question: (.*)\nAnswer:", body["prompt"])[-1]
        return {"text": answers[question]}

    return reply


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so it is 12.\n#### 1,234", 1234),
        ("#### -5", -5),
        ("The answer is 3.50 dollars", 3.5),
        ("4, then 5, and 6", 6),
        ("ends with 7.", 7),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number_counts(text: str, number: float | None) -> None:
    assert bench_gsm8k.last_number(text) == number


def test_shares() -> None:
    examples = bench_gsm8k.read(bench_gsm8k.SYNTHETIC)[:15]
    answers = {e.question: f" {e.answer}\n\n" for e in examples}
    wrong, silent = examples[6], examples[7]
    answers[wrong.question], answers[silent.question] = " 1\n#### 100000", " I do not know."
    with FakeServer(solver(answers), completion_tokens=20) as server:
        result = bench_gsm8k.evaluate(f"http://127.0.0.1:{server.port}", examples, 5, 200, parallel=4)
    assert result.accuracy == pytest.approx(0.8) and result.invalid == pytest.approx(0.1)
    assert result.throughput == pytest.approx(200 / result.latency)
    assert len(server.bodies) == 10 and server.most_open <= 4
    for path, body in server.bodies:
        assert path == "/v1/completions"
        assert body["temperature"] == 0 and body["max_tokens"] == 512
        assert body["stop"][0] == "Question"
    prompt = next(body["prompt"] for _, body in server.bodies if examples[5].question in body["prompt"])
    shown = "".join(f"Question: {e.question}\nAnswer: {e.answer}\n\n" for e in examples[:5])
    assert prompt == f"{shown}Question: {examples[5].question}\nAnswer:"


def test_command_line(tmp_path: Path) -> None:
    examples = bench_gsm8k.read(bench_gsm8k.SYNTHETIC)
    answers = {e.question: e.answer for e in examples}
    results = tmp_path / "results.jsonl"
    with FakeServer(solver(answers)) as server:
        command = [sys.executable, str(SCRIPT), "--num-shots", "2", "--num-questions", "20", "--parallel", "8"]
        where = ["--host", "http://127.0.0.1", "--port", str(server.port), "--result-file", str(results)]
        done = subprocess.run([*command, *where], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"Accuracy: 1\.000\nInvalid: 0\.000\nLatency: \d+\.\d{3} s\nOutput throughput: \d+\.\d{3} token/s\n"
        r"95% interval: 0\.839 to 1\.000 \(20 questions\)\n",
        done.stdout,
    )
    assert json.loads(results.read_text())["accuracy"] == 1.0
    assert len(server.bodies) == 20


def test_any_file_of_the_form(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    rows = [{"question": f"{i} and 1,000?", "answer": f"sum\n#### {1000 + i:,}", "more": None} for i in range(4)]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    examples = bench_gsm8k.read(file)
    with FakeServer(solver({e.question: f"#### {1000 + i}" for i, e in enumerate(examples)})) as server:
        result = bench_gsm8k.evaluate(f"http://127.0.0.1:{server.port}", examples, 1, 200, parallel=8)
    assert result.accuracy == 1.0


def test_bad_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"question": "1?", "answer": "#### 1"}\n{"q": 1}\n')
    with pytest.raises(ValueError, match="line 2: expected"):
        bench_gsm8k.read(file)
    file.write_text('{"question": "1?", "answer": "one"}\n')
    with pytest.raises(ValueError, match="line 1: the answer has no number"):
        bench_gsm8k.read(file)
    with pytest.raises(ValueError, match="leave nothing to ask after 5 shots"):
        bench_gsm8k.evaluate("http://127.0.0.1:1", bench_gsm8k.read(bench_gsm8k.SYNTHETIC)[:5], 5, 10, 1)
