"""The multiple-choice client, records that go on, and intervals."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import api
import bench_gpqa
import bench_gsm8k
import pytest
from benchmark.evals.fake_server import FakeServer
from record import Record
from score import Result, wilson

SCRIPT = Path(__file__).parents[3] / "benchmark" / "evals" / "bench_gpqa.py"


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "gpqa.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*bench_gpqa.COLUMNS, "Subdomain"])
        writer.writeheader()
        for i in range(12):
            row = {name: f"{name}, {i}" for name in bench_gpqa.COLUMNS[1:]}
            writer.writerow(row | {"Question": f"What is {i}?\nSay.", "Subdomain": "x"})
    return path


def right_letter(prompt: str) -> str:
    (line,) = [line for line in prompt.splitlines() if ") Correct Answer" in line]
    return line[0]


def knows_all_but(number: int, silent: int) -> Any:
    def reply(_: str, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body["messages"][0]["content"]
        letter = right_letter(prompt)
        if f"What is {number}?" in prompt:
            letter = "A" if letter != "A" else "B"
        text = "I do not know." if f"What is {silent}?" in prompt else f"Answer: A is wrong, so\n**Answer: {letter}**"
        return {"message": {"role": "assistant", "content": text}}

    return reply


def test_shares(questions: Path) -> None:
    with FakeServer(knows_all_but(3, 4), completion_tokens=10) as server:
        url, asked = f"http://127.0.0.1:{server.port}", bench_gpqa.read(questions, 1)
        result = bench_gpqa.evaluate(url, asked, parallel=4, max_tokens=99, repeats=2)
    assert (result.asked, result.accuracy, result.invalid) == (24, pytest.approx(20 / 24), pytest.approx(2 / 24))
    assert {body["seed"] for _, body in server.bodies} == {0, 1}
    assert all(body["max_tokens"] == 99 and "temperature" not in body for _, body in server.bodies)
    assert len({question.right for question in asked}) > 1, "choices are shuffled"


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: B", "B"),
        ("answer: (c)", "C"),
        ("**Answer:** D", "D"),
        (r"Answer: \boxed{A}", "A"),
        (r"Answer: $A$", None),
        ("Answer: A\n... no. Answer: D.", "D"),
        ("Answer: Because", None),
        ("B", None),
        (None, None),
    ],
)
def test_the_last_letter_counts(text: str | None, letter: str | None) -> None:
    assert bench_gpqa.chosen(api.Answer({"choices": [{"message": {"content": text}}]})) == letter


def test_a_file_of_another_form_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"Question": "?", "Correct Answer": "a", "Incorrect Answer 1": "b"}) + "\n")
    with pytest.raises(ValueError, match="question 1 has no Incorrect Answer 2, Incorrect Answer 3"):
        bench_gpqa.read(path, 0)


def test_an_interrupted_run_goes_on(questions: Path, tmp_path: Path) -> None:
    record, results = tmp_path / "answers.jsonl", tmp_path / "results.jsonl"
    with FakeServer(knows_all_but(3, 4), completion_tokens=10) as server:
        words = [sys.executable, str(SCRIPT), "--data-path", str(questions), "--port", str(server.port)]
        words += ["--record", str(record), "--result-file", str(results)]
        first = subprocess.run([*words, "--num-questions", "5"], capture_output=True, text=True)
        assert first.returncode == 0, first.stderr
        with record.open("ab") as file:
            file.write(b'{"key": "cut o')
        second = subprocess.run(words, capture_output=True, text=True)
        assert second.returncode == 0, second.stderr
    assert len(server.bodies) == 12, "five and the seven that were missing"
    assert second.stdout.startswith("Accuracy: 0.833\nInvalid: 0.083\nLatency: ")
    whole = json.loads(results.read_text().splitlines()[-1])
    assert whole["num_requests"] == 12 and whole["interval"] == [0.552, 0.953]
    assert len(Record(record)) == 12


def test_an_answer_counts_for_its_model_and_question_only() -> None:
    keys = {Record.key(path, {"model": m, "prompt": p}) for path in "ab" for m in "cd" for p in "ef"}
    assert len(keys) == 8


def test_another_file_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    with pytest.raises(ValueError, match="line 1 is no answer of an evaluation"):
        Record(path)
    assert path.read_text() == "hello\n"


def test_gsm8k_goes_on_too(tmp_path: Path) -> None:
    examples = bench_gsm8k.read(bench_gsm8k.SYNTHETIC)[:8]
    with FakeServer(lambda *_: {"text": "#### 1"}) as server:
        url = f"http://127.0.0.1:{server.port}"
        for count in (3, 6):
            bench_gsm8k.evaluate(url, examples, 2, count, 4, record=tmp_path / "r.jsonl")
    assert len(server.bodies) == 6


@pytest.mark.parametrize(
    ("share", "count", "low", "high"), [(0.5, 100, 0.404, 0.596), (1.0, 10, 0.722, 1.0), (0.0, 10, 0.0, 0.278)]
)
def test_intervals(share: float, count: int, low: float, high: float) -> None:
    assert wilson(share, count) == (pytest.approx(low, abs=5e-4), pytest.approx(high, abs=5e-4))
    assert f"95% interval: {low:.3f} to {high:.3f}" in Result(count, share, 0, 0, 1.0, 1.0).rows()
