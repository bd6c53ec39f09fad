"""What stands for packages that a peer was packed without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmark/peers/peer_process.py"
LOADER = """
import cutlass.cute as cute
from cutlass import Float32, jit
@jit
def kernel(x: Float32[3] | None = cute.arch.WARPS * 2): return "kept"
class Tile(Float32): pass
class Weight:
    def __init__(self, value, ndim=1):
        self.value, self.ndim, self.data = value, ndim, self
    def fill_(self, value): self.value = value
    def zero_(self): self.value = 0
class Model:
    weights = {"a.norm.weight": Weight(0.001), "gate.e_score_correction_bias": Weight(0.001)}
    weights["up.weight"] = Weight(0.001, 2)
    def named_parameters(self): return self.weights.items()
def initialize_dummy_weights(model): pass
"""
BENCHMARK = """
from sglang.srt.model_loader import loader
model = loader.Model()
loader.initialize_dummy_weights(model)
print(loader.kernel(), loader.Tile.__name__, {name: weight.value for name, weight in model.named_parameters()})
"""


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    for name, text in (("model_loader/loader", LOADER), ("bench", BENCHMARK)):
        file = tmp_path / "sglang/srt" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for folder in ("sglang", "sglang/srt", "sglang/srt/model_loader"):
        (tmp_path / folder / "__init__.py").touch()
    return tmp_path


def run(peer: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *options, "sglang.srt.bench"]
    return subprocess.run(command, env={"PYTHONPATH": str(peer)}, capture_output=True, text=True, check=False)


def test_norms_are_one_and_biases_of_routers_zero(peer: Path) -> None:
    done = run(peer, "--stub", "cutlass")
    weights = "{'a.norm.weight': 1, 'gate.e_score_correction_bias': 0, 'up.weight': 0.001}"
    assert done.stdout.strip() == f"kept Tile {weights}", done.stderr


def test_nothing_is_stubbed_that_was_not_named(peer: Path) -> None:
    assert "No module named 'cutlass'" in run(peer).stderr
