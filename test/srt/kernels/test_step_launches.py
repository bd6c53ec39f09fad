"""How many launches a layer of a decode step makes, model by model: one more is seen here first. The page that
benchmark/results has of them is what the recorder prints today."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from srt.kernels import step_launches
from srt.kernels.step_launches import Launch, Recorder, launches, row

PAGE = Path(__file__).parents[3] / "benchmark" / "results" / "serving.md"
COUNTS = {
    ("Qwen3-30B-A3B FP8", 1, 1): (11, 5),
    ("Qwen3-30B-A3B FP8", 2, 1): (11, 6),
    ("GLM-4.7-FP8", 8, 1): (13, 7),
    ("GLM-4.7-FP8", 8, 16): (17, 7),
    ("GPT-OSS-20B", 1, 1): (11, 5),
    ("DeepSeek-V3", 8, 1): (17, 7),
    ("DeepSeek-V4-Flash, rate 4", 4, 1): (39, 7),
}
"""(model, ranks, batch) -> (launches of a layer, launches around the layers)."""


@pytest.mark.parametrize(("name", "tp_size", "batch"), COUNTS)
def test_launches_of_a_decode_step(name: str, tp_size: int, batch: int) -> None:
    parts = launches(name, tp_size, batch)
    counts = len(parts["layer"]), len(parts["before"]) + len(parts["after"])
    assert counts == COUNTS[name, tp_size, batch], "\n".join(f"{part}: {parts[part]}" for part in parts)
    assert row(name, tp_size, batch, parts) in PAGE.read_text().splitlines(), f"python {step_launches.__file__}"


def test_what_computes_is_counted_and_what_only_looks_is_not() -> None:
    recorder = Recorder()
    x = torch.zeros(4, 6)
    with recorder:
        recorder.part = "views"
        x.view(6, 4).to(torch.float32).reshape(24)[2:].unsqueeze(0).t()
        x.new_empty(3)
        recorder.part = "copies"
        x.to(torch.float64)
        x.t().contiguous()
        x.t().reshape(24)
        torch.zeros(3)
    assert recorder.parts.keys() == {"copies"} and len(recorder.parts["copies"]) == 4


@pytest.mark.parametrize(("name", "tp_size"), [("Qwen3-30B-A3B FP8", 2), ("GPT-OSS-20B", 1)])
def test_nothing_is_launched_between_both_products_of_few_pairs(name: str, tp_size: int) -> None:
    """The second one reads the choices before it waits: whoever wrote them must not be the kernel directly ahead."""
    layer = [launch.name for launch in launches(name, tp_size, 1)["layer"]]
    second = layer.index("down_sum_kernel")
    assert layer[second - 1] == "gate_up_pairs_kernel" and layer.count("down_sum_kernel") == 1


def test_a_launch_says_when_it_begins() -> None:
    assert [str(Launch("a", *early)) for early in ((), (True,), (True, True))] == ["a", "a'", "a^"]
    parts = launches("Qwen3-30B-A3B FP8", 1, 1)
    step = {launch.name: launch for launch in parts["before"] + parts["layer"]}
    assert step["gemv_kernel"].loads_first and step["gate_up_pairs_kernel"].early and step["plan_kernel"].early
    assert not step["gate_up_pairs_kernel"].loads_first
