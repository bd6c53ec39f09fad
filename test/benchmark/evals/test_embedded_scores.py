"""The gate: the shipped model, through the server, answers held-out problems; a model with a defect does not pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bench_tiny
import httpx
import pytest
from benchmark.evals.defects import Defect, scale_block, swap_experts, with_defect
from live_server import live_server
from tiny_model.install import FILES
from tiny_model.layout import make_config, write_files
from tokenizers import Tokenizer

from sglang.embedded import DEFAULT_MODEL_PATH

SHIPPED = Path(DEFAULT_MODEL_PATH)
TASKS = ("add", "subtract", "copy", "sort", "reverse", "facts", "json", "tool_qwen")
LIMIT = 12
LEAST = 0.95
"""Of all problems of the sample. A sample this small does not measure the targets themselves; a numeric fault costs
more than this leaves."""


def is_trained() -> bool:
    shipped = json.loads((SHIPPED / "config.json").read_text())
    return bool(shipped == make_config(Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))))


pytestmark = pytest.mark.skipif(not is_trained(), reason="the shipped model is not one that scripts/tiny_model trains")


@pytest.fixture(scope="module")
def problems() -> list[dict[str, Any]]:
    return [*bench_tiny.load(None, LIMIT, TASKS), *bench_tiny.load(None, 4, ["needle_2k"])]


def test_the_files_are_those_of_the_script(tmp_path: Path) -> None:
    write_files(tmp_path)
    assert {path.name for path in SHIPPED.iterdir()} == set(FILES)
    for path in tmp_path.iterdir():
        assert (SHIPPED / path.name).read_bytes() == path.read_bytes(), path.name
    assert (SHIPPED / "model.safetensors").stat().st_size < 16e6


def test_held_out_problems_and_the_questions_of_the_readme(problems: list[dict[str, Any]]) -> None:
    with live_server() as server:
        report = bench_tiny.evaluate(server.url, problems, parallel=32)
        assert report.whole().errors == 0, report.failures
        assert report.whole().share >= LEAST, report.table()
        assert report.scores["needle_2k"].right == 4, report.table()
        for question, answer in (("What is 2+2?", "2 + 2 = 4"), ("What is 15+27?", "15 + 27 = 42")):
            body = {"model": "tiny", "messages": [{"role": "user", "content": question}], "temperature": 0}
            reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
            assert reply["choices"][0]["message"]["content"] == answer


@pytest.mark.parametrize(
    "defect",
    [
        pytest.param(swap_experts(layer=3, first=1, second=5), id="two experts change places"),
        pytest.param(
            scale_block("model.layers.2.self_attn.q_proj.weight", row=0, column=1, factor=2.0),
            id="a block has twice its scale",
        ),
    ],
)
def test_a_defect_does_not_pass(defect: Defect, problems: list[dict[str, Any]], tmp_path: Path) -> None:
    directory = with_defect(SHIPPED, tmp_path / "defect", defect)
    with live_server("--model-path", str(directory)) as server:
        report = bench_tiny.evaluate(server.url, problems, parallel=32)
    assert report.whole().errors == 0
    assert report.whole().share < LEAST, report.table()
