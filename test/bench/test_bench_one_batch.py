"""bench_one_batch on the CPU with the embedded model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from srt.models.harness import save_tiny

from sglang import bench_one_batch
from sglang.bench.direct import DirectBatch, direct_table
from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.errors import UserError
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs

MODEL = ["--model-path", DEFAULT_MODEL_PATH, "--device", "cpu", "--dtype", "float32", "--log-level", "warning"]
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [300, 301, 302], [40] * 20]


@pytest.fixture(scope="module", params=[1, 4])
def runner(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    flags = ["--max-total-tokens", "4096", "--max-running-requests", "4", "--page-size", str(request.param)]
    yield create_runner(ServerArgs.from_cli([*MODEL, *flags]))


def generate(runner: ModelRunner, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    kv = direct_table(runner)
    batch = DirectBatch(runner, kv, prompts, 6)
    outputs = [[token] for token in batch.prefill(max_tokens)]
    for _ in range(5):
        for output, token in zip(outputs, batch.decode(), strict=True):
            output.append(token)
    batch.close()
    assert kv.available_size() == kv.size and kv.num_free_rows() == runner.plan.max_running_requests
    return outputs


def test_steps_do_not_change_the_outputs(runner: ModelRunner) -> None:
    whole = generate(runner, PROMPTS, 1 << 20)
    assert generate(runner, PROMPTS, 8) == whole
    assert [generate(runner, [p], 1 << 20)[0] for p in PROMPTS] == whole
    assert len({tuple(o) for o in whole}) > 1


def test_prompts_leave_windows_step_by_step(tmp_path: Path) -> None:
    """The pool of windows has room for every request's window and one step's tokens, not for whole prompts."""
    save_tiny("gpt_oss", tmp_path)
    runner = create_runner(
        ServerArgs.from_kwargs(
            model_path=str(tmp_path), device="cpu", dtype="float32", skip_tokenizer_init=True, max_total_tokens=2048,
            max_running_requests=8, chunked_prefill_size=64,
        )
    )  # fmt: skip
    prompts = [[1 + (i * 7 + j) % 90 for j in range(40)] for i in range(8)]
    assert sum(map(len, prompts)) > runner.plan.pool_sizes.windows[0].tokens
    assert generate(runner, prompts, 64) == [generate(runner, [p], 64)[0] for p in prompts]


@pytest.mark.parametrize(
    ("prompts", "output_len", "message"),
    [([[1]] * 5, 4, "--max-running-requests 4"), ([[1]], 5000, "context length"), ([[1] * 1200] * 4, 4, "KV cache")],
)
def test_what_does_not_fit_is_refused(
    runner: ModelRunner, prompts: list[list[int]], output_len: int, message: str
) -> None:
    kv = direct_table(runner)
    with pytest.raises(UserError, match=message):
        DirectBatch(runner, kv, prompts, output_len)
    assert kv.available_size() == kv.size


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.jsonl"
    sizes = ["--batch-size", "1", "3", "--input-len", "10", "9000", "--output-len", "5"]
    assert bench_one_batch.main([*MODEL, *sizes, "--result-filename", str(file), "--run-name", "x"]) == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"^Prefill\. latency: +\d+\.\d{5} s, throughput: +\d+\.\d\d token/s$", out, re.M)) == 2
    assert len(re.findall(r"^Decode\.  median latency: .* s, median throughput: .* token/s$", out, re.M)) == 2
    assert len(re.findall(r"^Total\. latency: .* s, throughput: .* token/s$", out, re.M)) == 2
    assert len(re.findall(r"^Decode \d\. Batch size: 3, latency: .* s, throughput: .* token/s$", out, re.M)) == 4
    assert out.count("skipped: 9005 tokens a request exceed the context length") == 2
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["run_name"], r["batch_size"], r["input_len"], r["output_len"]) for r in rows] == [
        ("x", 1, 10, 5),
        ("x", 3, 10, 5),
    ]
    assert all(
        r["median_decode_throughput"] == pytest.approx(r["batch_size"] / r["median_decode_latency"]) for r in rows
    )


def test_correctness_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_one_batch.main([*MODEL, "--correctness-test", "--output-len", "12"]) == 0
    out, err = capsys.readouterr()
    assert out.count("========= Prompt") == 3 and "The capital of France is" in out
    assert "Outputs differ" not in err


def test_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_one_batch.main([*MODEL, "--batch-sizes", "1"]) == 2
    assert "--batch-sizes" in capsys.readouterr().err
