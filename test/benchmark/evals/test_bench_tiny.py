"""The evaluation against a server whose answers are known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench_tiny
import pytest
from benchmark.evals.fake_server import FakeServer
from judge import judge, same, without_thought

SCRIPT = Path(__file__).parents[3] / "benchmark" / "evals" / "bench_tiny.py"


@pytest.fixture(scope="module")
def problems() -> list[dict[str, Any]]:
    return bench_tiny.load(
        None, 3, ["add", "few_shot", "json", "word_problem", "tool_qwen", "tool_kimi_k2", "needle_2k"]
    )


def right_answers(problems: list[dict[str, Any]], parsed: bool) -> Any:
    """What a model with all answers writes. `parsed`: by a server that splits off thoughts and tool calls."""
    chats = {json.dumps([i["messages"], i["chat_template_kwargs"]]): i for i in problems if not i["prompt"]}
    texts = {i["prompt"]: i for i in problems if i["prompt"]}

    def reply(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/completions":
            return {"text": " " + texts[body["prompt"]]["expected"] + "\n\n"}
        item = chats[json.dumps([body["messages"], body["chat_template_kwargs"]])]
        if item["check"] == "tool" and parsed:
            calls = [
                {"id": "call_1", "function": {"name": c["name"], "arguments": json.dumps(c["arguments"])}}
                for c in item["calls"]
            ]
            return {"message": {"content": None, "tool_calls": calls}}
        thought = "" if parsed or item["task"] != "word_problem" else "<think>\n1 + 1 = 2\n</think>\n\n"
        return {"message": {"content": thought + item["expected"], "reasoning_content": None, "tool_calls": None}}

    return reply


@pytest.mark.parametrize("parsed", [True, False])
def test_right_answers_score_full(problems: list[dict[str, Any]], parsed: bool) -> None:
    with FakeServer(right_answers(problems, parsed)) as server:
        report = bench_tiny.evaluate(f"http://127.0.0.1:{server.port}", problems, parallel=5)
    assert report.failures == []
    assert {task: (s.right, s.count) for task, s in report.scores.items()} == dict.fromkeys(report.scores, (3, 3))
    assert len(report.scores) == 7
    assert report.completion_tokens == 7 * 21
    assert 1 < server.most_open <= 5
    assert report.missed() == []


def test_requests_are_greedy_and_carry_the_template_options(problems: list[dict[str, Any]]) -> None:
    with FakeServer(right_answers(problems, True)) as server:
        bench_tiny.evaluate(f"http://127.0.0.1:{server.port}", problems, parallel=1, api_key="secret")
    assert all(headers["Authorization"] == "Bearer secret" for headers in server.headers)
    for (path, body), item in zip(server.bodies, problems, strict=True):
        assert body["temperature"] == 0 and body["model"] == "tiny" and body["max_tokens"] > 10
        if item["prompt"]:
            assert path == "/v1/completions" and body["stop"] == ["Question"]
            continue
        assert body["chat_template_kwargs"]["enable_thinking"] is item["chat_template_kwargs"]["enable_thinking"]
        assert body.get("tools", []) == item["tools"]


def test_wrong_answers_do_not_score(problems: list[dict[str, Any]]) -> None:
    wrong = {"message": {"content": "41"}, "text": "41"}
    with FakeServer(lambda path, _: {"text": "41"} if path == "/v1/completions" else wrong) as server:
        report = bench_tiny.evaluate(f"http://127.0.0.1:{server.port}", problems, parallel=8)
    assert report.whole().right == 0
    assert len(report.failures) == len(problems)
    assert report.scores["tool_qwen"].invalid == 3
    assert report.scores["json"].invalid == 0 and report.scores["add"].invalid == 0, "41 is JSON, and a text"
    assert any("needle at 2k: 0.000, at least 0.95" in line for line in report.missed())


def test_errors_are_counted_apart(problems: list[dict[str, Any]]) -> None:
    with FakeServer(lambda *_: 503) as server:
        report = bench_tiny.evaluate(f"http://127.0.0.1:{server.port}", problems[:4], parallel=8)
    assert report.whole().errors == 4 and report.whole().right == 0
    assert "HTTP 503" in report.failures[0]["got"]


def test_margins_are_those_over_the_next_best_token(problems: list[dict[str, Any]]) -> None:
    """The mean is over tokens, not over answers."""
    asked = [item for item in problems if item["task"] in ("add", "few_shot")]

    def reply(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/completions":
            assert body["logprobs"] == 2
            return {"text": "", "logprobs": {"top_logprobs": [{"a": -4.0, "b": -1.0}, {"only": 0.0}]}}
        assert body["logprobs"] is True and body["top_logprobs"] == 2
        tops = [[-0.5, -2.5], [-1.0, -7.0]] if body["messages"] == asked[0]["messages"] else [[-1.0, -2.0]]
        content = [{"top_logprobs": [{"logprob": value} for value in top]} for top in tops]
        return {"message": {"content": ""}, "logprobs": {"content": content}}

    with FakeServer(reply) as server:
        report = bench_tiny.evaluate(f"http://127.0.0.1:{server.port}", asked, parallel=2, margins=True)
    assert report.scores["add"].margin == pytest.approx((2 + 6 + 1 + 1) / 4)
    assert report.scores["few_shot"].margin == pytest.approx(3)
    assert report.whole().margin == pytest.approx((10 + 9) / 7)
    assert report.as_dict()["tasks"]["few_shot"]["margin"] == 3
    assert "margin" in report.table() and "margin" not in bench_tiny.Report().table()


CALL = {"name": "f", "arguments": {"n": 1}}


@pytest.mark.parametrize(
    ("content", "right", "valid"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>', True, True),
        ('<tool_call>{"arguments": {"n": 1}, "name": "f"}</tool_call>', True, True),
        ('<tool_call>\n{"name": "f", "arguments": {"n": "1"}}\n</tool_call>', False, True),
        ('<tool_call>\n{"name": "f", "arguments": {"n": true}}\n</tool_call>', False, True),
        ('Sure. <tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>', False, True),
        ('<tool_call>\n{"name": "f", "arguments": {"n": 1}\n</tool_call>', False, False),
        ('{"name": "f", "arguments": {"n": 1}}', False, False),
    ],
)
def test_tool_calls_in_text(content: str, right: bool, valid: bool) -> None:
    item = {"check": "tool", "expected": "", "calls": [CALL], "chat_template_kwargs": {}}
    verdict = judge(item, {"message": {"content": content, "tool_calls": None}})
    assert (verdict.right, verdict.valid) == (right, valid)


@pytest.mark.parametrize(
    ("calls", "right", "valid"),
    [
        ([{"function": {"name": "f", "arguments": '{"n": 1}'}}], True, True),
        ([{"function": {"name": "g", "arguments": '{"n": 1}'}}], False, True),
        ([{"function": {"name": "f", "arguments": '{"n": 1'}}], False, False),
        ([{"function": {"name": "f", "arguments": '{"n": 1}'}}] * 2, False, True),
    ],
)
def test_tool_calls_from_a_parser(calls: list[dict[str, Any]], right: bool, valid: bool) -> None:
    item = {"check": "tool", "expected": "", "calls": [CALL], "chat_template_kwargs": {"tool_format": "glm45"}}
    verdict = judge(item, {"message": {"content": None, "tool_calls": calls}})
    assert (verdict.right, verdict.valid) == (right, valid)


def test_json_is_compared_by_value() -> None:
    item = {"check": "json", "expected": '{"a": 1, "b": ["x"]}'}
    for content, right, valid in (
        ('{"b": ["x"], "a": 1}', True, True),
        ('{"a": 1.0, "b": ["x"]}', False, True),
        ('{"a": 1}', False, True),
        ("a: 1", False, False),
    ):
        verdict = judge(item, {"message": {"content": content}})
        assert (verdict.right, verdict.valid) == (right, valid), content
    assert same({"a": 1}, {"a": 1}) and not same(1, True)


def test_thoughts_do_not_count() -> None:
    assert without_thought("<think>\n2 + 2 = 4\n</think>\n\n4") == "4"
    assert without_thought("<think>\nno end") == "<think>\nno end"
    assert without_thought("4 <think>late</think>") == "4 <think>late</think>"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=300)


def test_command_line(problems: list[dict[str, Any]], tmp_path: Path) -> None:
    data, output = tmp_path / "problems.jsonl", tmp_path / "report.json"
    data.write_text("".join(json.dumps(item) + "\n" for item in problems))
    right = right_answers(problems, True)

    def reply(path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = right(path, body)
        if len(str(body)) > 4000:
            answer["message"]["content"] += "?"  # long prompts go wrong
        return answer

    with FakeServer(reply) as server:
        arguments = ["--port", str(server.port), "--data-path", str(data), "--output", str(output), "--limit", "2"]
        failed = run(*arguments, "--check", "--tasks", "json,needle_2k")
        unchecked = run(*arguments, "--tasks", "json,needle_2k")
        passed = run(*arguments, "--check", "--tasks", "json,add")
    assert failed.returncode == 1 and failed.stderr == "needle at 2k: 0.000, at least 0.95 is wanted\n"
    assert "target 95%: MISSED" in failed.stdout
    assert unchecked.returncode == 0
    assert passed.returncode == 0, passed.stderr
    report = json.loads(output.read_text())
    assert report["all"] == {"score": 1.0, "count": 4, "right": 4, "invalid": 0, "errors": 0}
    assert report["targets"] == {"JSON": {"least": 0.95, "score": 1.0}}
    assert "100.0%   target 95%: met" in passed.stdout


def test_bad_input_says_what_to_do(tmp_path: Path) -> None:
    nobody = run("--port", "1", "--limit", "1", "--tasks", "add")
    assert nobody.returncode == 2 and "Is the server up, and is the port right?" in nobody.stderr
    unknown = run("--tasks", "juggling")
    assert unknown.returncode == 2 and "has no tasks juggling; it has add" in unknown.stderr
    (tmp_path / "bad.jsonl").write_text('{"question": 1}\n')
    bad = run("--data-path", str(tmp_path / "bad.jsonl"))
    assert bad.returncode == 2 and "line 1 is not a problem" in bad.stderr
    for done in (nobody, unknown, bad):
        assert "Traceback" not in done.stderr
