"""bench_offline_throughput on the CPU with the embedded model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forked_servers import forked_children

from sglang import bench_offline_throughput
from sglang.embedded import DEFAULT_MODEL_PATH

MODEL = ["--model-path", DEFAULT_MODEL_PATH, "--device", "cpu", "--dtype", "float32", "--log-level", "error"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.jsonl"
    lengths = ["--random-input-len", "12", "--random-output-len", "6", "--random-range-ratio", "1.0"]
    data = ["--dataset-name", "random", "--num-prompts", "5", *lengths, "--result-filename", str(file)]
    with forked_children():
        assert bench_offline_throughput.main([*MODEL, *data]) == 0
    out = capsys.readouterr().out
    assert "Offline Throughput Benchmark Result" in out and "Last generation throughput (tok/s):" in out
    result = json.loads(file.read_text())
    assert (result["successful_requests"], result["total_input_tokens"], result["total_output_tokens"]) == (5, 60, 30)
    assert result["output_throughput"] == pytest.approx(30 / result["total_latency"])


def test_dataset_errors_are_messages(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_offline_throughput.main([*MODEL, "--dataset-name", "sharegpt"]) == 2
    assert "--dataset-path" in capsys.readouterr().err
