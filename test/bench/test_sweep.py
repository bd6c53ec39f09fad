"""Sweeps that go on where they were, and what their report shows."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from forked_servers import forked_command
from live_server import LiveServer

from sglang.bench import report, sweep
from sglang.bench.datasets import DatasetArgs, DatasetError, make_prompts
from sglang.bench.tokenizer import load_prompt_tokenizer
from sglang.bench_serving import build_parser
from sglang.cli import main
from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.errors import UserError

NUMBERS = ("output_throughput", "median_tpot_ms", *(name for name, _ in report.TABLE))
WORDS = ["--server", "a=http://h:1", "--server", "b=http://h:2", "--concurrency", "1,8", "--lengths", "10:2,20:3"]


def fake_numbers(args: argparse.Namespace) -> dict[str, Any]:
    record = dict.fromkeys(NUMBERS, 10.0 * args.max_concurrency + args.seed)
    return record | {"failed": 0, "errors": [], "itls": [[1.0]], "completed": args.num_prompts}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """What was measured, in order; nothing is asked of a server."""
    calls: list[argparse.Namespace] = []

    def run(args: argparse.Namespace) -> dict[str, Any]:
        calls.append(args)
        return fake_numbers(args)

    monkeypatch.setattr(sweep, "run_benchmark", run)
    monkeypatch.setattr(sweep, "server_facts", lambda url: {"version": "<1>"})
    return calls


def test_every_point_is_measured_once(measured: list[argparse.Namespace], tmp_path: Path) -> None:
    results = tmp_path / "r.jsonl"
    assert main(["bench", "sweep", *WORDS, "--results", str(results), "--repeats", "1"]) == 0
    assert len(measured) == 8
    first = measured[0]
    assert (first.base_url, first.random_input_len, first.random_output_len) == ("http://h:1", 10, 2)
    assert (first.max_concurrency, first.num_prompts, first.random_range_ratio, first.flush_cache) == (1, 16, 1.0, True)
    assert measured[1].num_prompts == 32
    assert [call.warmup_requests for call in measured[:2]] == [1, 8], "as many as the point keeps in flight"
    with results.open("a") as file:
        file.write('{"format": 1, "point"')
    assert main(["bench", "sweep", *WORDS, "--results", str(results), "--repeats", "2"]) == 0
    assert len(measured) == 16, "the second repetition of each"
    assert {call.seed for call in measured[8:]} == {2}
    rows = sweep.read_results(results)
    assert len({sweep.point_of(row).key for row in rows}) == len(rows) == 16
    assert "itls" not in rows[0]["numbers"]
    words = rows[0]["command"].split()
    assert words[:3] == ["sglang", "bench", "serving"] and build_parser().parse_args(words[3:]).base_url == "http://h:1"


def test_a_failed_request_stops_the_sweep(
    measured: list[argparse.Namespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    failed = {"failed": 1, "errors": ["", "HTTP 500"], "completed": 15}
    monkeypatch.setattr(sweep, "run_benchmark", lambda args: fake_numbers(args) | failed)
    assert main(["bench", "sweep", *WORDS, "--results", str(tmp_path / "r.jsonl")]) == 2
    assert "1 requests failed: HTTP 500" in capsys.readouterr().err
    assert (tmp_path / "r.jsonl").read_text() == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--server", "h:1"], "expected NAME=URL"),
        (["--concurrency", "0,1"], "expected positive numbers"),
        (["--lengths", "10"], "expected INPUT:OUTPUT"),
    ],
)
def test_bad_words_are_errors(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sweep.main([*WORDS, *words, "--results", "x"])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["hello\n", '{"format": 2}\n', '{"format": 1, "point": {}}\n'])
def test_another_file_is_left_alone(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "notes"
    path.write_text(text)
    assert main(["bench", "sweep", *WORDS, "--results", str(path)]) == 2
    assert "line 1 is no result of `sglang bench sweep`" in capsys.readouterr().err
    assert path.read_text() == text


def two_files(tmp_path: Path) -> list[Path]:
    files = [tmp_path / "ours.jsonl", tmp_path / "other.jsonl"]
    for path in files:
        assert main(["bench", "sweep", *WORDS, "--results", str(path), "--repeats", "2"]) == 0
    return files


def test_curves_have_medians_and_spread(measured: list[argparse.Namespace], tmp_path: Path) -> None:
    files = two_files(tmp_path)
    found = report.curves(files)
    assert len(found) == 8 and {c.name for c in found} == {"ours: a", "ours: b", "other: a", "other: b"}
    curve = found[0]
    assert curve.lengths == (10, 2) and curve.concurrency == (1, 8)
    assert curve.values("output_throughput") == [report.Value(11.5, 11, 12), report.Value(81.5, 81, 82)]
    assert curve.interactivity()[0].middle == pytest.approx((1000 / 11 + 1000 / 12) / 2)
    assert report.curves(files[:1])[0].name == "a"
    assert str(report.Value(1234.5, 1200, 1300)) == "1,234 (1,200 to 1,300)" and str(report.Value(2, 2, 2)) == "2.00"


def test_the_page_holds_everything_it_needs(measured: list[argparse.Namespace], tmp_path: Path) -> None:
    files, page = two_files(tmp_path), tmp_path / "report.html"
    assert main(["bench", "report", *map(str, files), "--html", str(page), "--title", "A <b> & c"]) == 0
    text = page.read_text()
    assert "A &lt;b&gt; &amp; c" in text and "&lt;1&gt;" in text
    loaded = re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=", text)
    assert loaded == [] and text.count("Plotly.newPlot(") >= 2 * len(report.CHARTS)
    for title, *_ in report.CHARTS:
        assert text.count(f'"text":"{title}"') == 2, "a chart for each pair of lengths"
    assert "10 tokens in, 2 out" in text and "11.5 <span>(11.0 to 12.0)</span>" in text
    assert text.count("sglang bench serving") == 16


def test_the_pdf_is_printed(measured: list[argparse.Namespace], tmp_path: Path) -> None:
    if not any(map(shutil.which, report.CHROMIUM)):
        pytest.skip("no Chromium here")
    files, pdf = two_files(tmp_path), tmp_path / "report.pdf"
    assert main(["bench", "report", str(files[0]), "--pdf", str(pdf)]) == 0
    assert pdf.read_bytes().startswith(b"%PDF-") and pdf.stat().st_size > 20_000


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CHROMIUM", raising=False)
    with pytest.raises(UserError, match="needs Chromium"):
        report.print_pdf(tmp_path / "a.html", tmp_path / "a.pdf")
    (tmp_path / "empty").write_text("")
    with pytest.raises(UserError, match="no results in"):
        report.curves([tmp_path / "empty"])


def test_a_server_is_swept(tmp_path: Path) -> None:
    server = LiveServer()
    try:
        server.wait_up()
        words = ["--server", f"tiny={server.url}", "--concurrency", "2", "--lengths", "8:4", "--repeats", "1"]
        words += ["--requests", "4", "--requests-per-slot", "1", "--results", str(tmp_path / "r.jsonl")]
        launch = ("-m", "sglang.cli")
        done = forked_command(launch, ["bench", "sweep", *words], tmp_path / "log", os.environ, 100)
        assert done.returncode == 0, done.stdout
        (row,) = sweep.read_results(tmp_path / "r.jsonl")
    finally:
        server.end()
    assert row["numbers"]["total_output_tokens"] == 16 and row["facts"]["tp_size"] == 1
    assert row["facts"]["max_total_num_tokens"] > 0 and row["facts"]["gpus"] and row["facts"]["cpu"]


def test_the_machine_is_that_of_a_server_here_only() -> None:
    assert sweep.is_here("http://127.0.0.1:1") and sweep.is_here("http://[::1]:1/v1")
    assert not sweep.is_here("http://10.0.0.1:1") and not sweep.is_here("https://localhost.example.org")


def test_json_lines_are_prompts(tmp_path: Path) -> None:
    tokenizer, path = load_prompt_tokenizer(DEFAULT_MODEL_PATH), tmp_path / "lines.jsonl"
    rows = [
        {"question": "What is two and two?", "answer": "It is four, I think."},
        {"conversations": [{"value": "How are you today?"}, {"value": "Very well, thank you."}]},
        {"conversations": [{"value": "alone"}]},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    prompts = make_prompts(DatasetArgs(name="sharegpt", path=str(path), num_prompts=9, as_ids=False), tokenizer)
    assert {prompt.text for prompt in prompts} == {"What is two and two?", "How are you today?"}
    assert all(prompt.output_len > 2 for prompt in prompts)
    path.write_text('{"question": "no answer"}\n')
    with pytest.raises(DatasetError, match="nor JSON lines of questions"):
        make_prompts(DatasetArgs(name="sharegpt", path=str(path)), tokenizer)
