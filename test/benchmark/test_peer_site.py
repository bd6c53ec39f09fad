"""What stands for packages that a peer was packed without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SITE = Path(__file__).resolve().parents[2] / "benchmark/peers/site"
LOADER = """
import cutlass.cute as cute
from cutlass import Float32, jit
@jit
def kernel(x: Float32[3] | None = cute.arch.WARPS * 2): return "kept"
class Tile(Float32): pass
class Weight:
    def __init__(self, value, ndim=1, dtype="torch.bfloat16"):
        self.value, self.ndim, self.data, self.dtype = value, ndim, self, dtype
    def fill_(self, value): self.value = value
    def zero_(self): self.value = 0
    def random_(self, end): self.value = f"below {end}"
class Model:
    weights = {"a.norm.weight": Weight(0.001), "gate.e_score_correction_bias": Weight(0.001)}
    weights["up.weight"] = Weight(0.001, 2)
    weights["w13_weight"] = Weight(7, 3, "torch.uint8")
    weights["w13_weight_scale"] = Weight(7, 3, "torch.uint8")
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


def run(peer: Path, stubs: str) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": os.pathsep.join((str(SITE), str(peer))), "PEER_STUBS": stubs}
    command = [sys.executable, "-m", "sglang.srt.bench"]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_norms_are_one_biases_of_routers_zero_and_bytes_random(peer: Path) -> None:
    done = run(peer, "cutlass")
    weights = "{'a.norm.weight': 1, 'gate.e_score_correction_bias': 0, 'up.weight': 0.001, "
    weights += "'w13_weight': 'below 256', 'w13_weight_scale': 120}"
    assert done.stdout.strip() == f"kept Tile {weights}", done.stderr


def test_nothing_is_stubbed_that_was_not_named(peer: Path) -> None:
    assert "No module named 'cutlass'" in run(peer, "").stderr
