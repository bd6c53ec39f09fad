"""The gate: the shipped model, through the server, answers held-out problems; a model with a defect does not pass.

`make test` tries one small defect on the problems of three tasks, `make thorough` the others on all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmark.evals.defects import CATALOG, with_defect
from live_server import live_server

from benchmark.evals import gate


@pytest.fixture(scope="module")
def problems() -> list[dict[str, Any]]:
    return gate.problems()


def test_held_out_problems_and_the_questions_of_the_readme(problems: list[dict[str, Any]]) -> None:
    with live_server() as server:
        report = gate.measure(server, problems)
        assert not gate.complaints(report, gate.recorded()), report.table()
        assert report.scores["needle_2k"].right == gate.NEEDLES, report.table()
        for question, answer in (("What is 2+2?", "2 + 2 = 4"), ("What is 15+27?", "15 + 27 = 42")):
            body = {"model": "tiny", "messages": [{"role": "user", "content": question}], "temperature": 0}
            reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300).json()
            assert reply["choices"][0]["message"]["content"] == answer


@pytest.mark.parametrize(
    ("defect", "says", "tasks"),
    [
        pytest.param("rows for columns", "answers are right", None, marks=pytest.mark.thorough),
        ("two experts change places", "something computes other numbers", {"add", "facts", "json"}),
        pytest.param(
            "a block of the queries has twice its scale",
            "something computes other numbers",
            None,
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_defect_does_not_pass(
    defect: str, says: str, tasks: set[str] | None, problems: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Large ones cost right answers; of small ones the model only becomes more or less sure. tasks: None means all."""
    record = {task: margin for task, margin in gate.recorded().items() if tasks is None or task in tasks}
    tried = [problem for problem in problems if problem["task"] in record]
    directory = with_defect(gate.SHIPPED, tmp_path / "defect", CATALOG[defect])
    with live_server("--model-path", str(directory)) as server:
        report = gate.measure(server, tried)
    assert report.whole().errors == 0
    complaints = gate.complaints(report, record)
    print(f"{report.table()}\n{complaints}")
    assert any(says in complaint for complaint in complaints), report.table()
