"""The configs of the benchmarks of images, and what they count."""

from __future__ import annotations

import subprocess
import sys
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import bench_all as everything
import bench_encoders as encoders
import bench_served as served
import bench_text as texts
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tower_configs import TOWERS

from sglang.srt.plan.media import describe_media
from sglang.srt.towers.qwen3_vl.spec import Qwen3VLTower


@pytest.mark.parametrize("name", list(TOWERS))
def test_towers_have_their_published_sizes(name: str) -> None:
    media = describe_media(TOWERS[name])
    assert media is not None
    assert media.tower.out_size == TOWERS[name]["text_config"]["hidden_size"]
    assert 0.4e9 < media.tower.num_weights() < 1.1e9


def test_products_are_those_of_the_layers(tmp_path: Path) -> None:
    """An image of 4 x 4 patches through a layer: each weight meets each patch, or each token, once."""
    config = TOWERS["Qwen3-VL-8B"]
    vision = config["vision_config"] | {"depth": 1, "deepstack_visual_indexes": []}
    encoder = encoders.encoder_of(config | {"vision_config": vision}, tmp_path, "cpu")
    tower = encoder.tower
    assert isinstance(tower, Qwen3VLTower)
    got = encoders.flops_of(encoder, torch.rand(16, tower.patch_values), (1, 4, 4))
    hidden, merged = tower.hidden_size, tower.hidden_size * 4
    of_patch = hidden * (tower.patch_values + 4 * hidden + 2 * tower.intermediate_size + 2 * 16)
    of_token = merged * (merged + tower.out_size)
    assert got == 2 * (16 * of_patch + 4 * of_token)


def test_gaps_are_between_events() -> None:
    assert served.Answer(times=[0.5, 0.75, 1.5]).gaps() == [0.25, 0.75]
    later = served.Answer(began=10.0, times=[0.5, 0.75, 1.5, 4.0])
    assert later.gaps(10.6, 12.0) == [0.75], "of those that came in this time"


def test_percentiles_are_in_milliseconds() -> None:
    assert served.percentiles([0.001] * 98 + [0.004, 0.25]) == pytest.approx((1.0, 250.0, 250.0))
    assert all(np.isnan(served.percentiles([])))


def test_a_server_stands_still_meanwhile(tmp_path: Path) -> None:
    """Its seconds, too, and it ends in either state."""
    counter = tmp_path / "count"
    program = f"import time\nwhile True:\n    open({str(counter)!r}, 'a').write('x'); time.sleep(0.005)"
    server = object.__new__(served.Server)
    server.began, server._stopped_s = time.monotonic(), 0.0
    server.process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    while not counter.exists():
        time.sleep(0.01)
    with server.stopped():
        state = Path(f"/proc/{server.process.pid}/stat")
        while state.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        size = counter.stat().st_size
        time.sleep(0.05)
        assert counter.stat().st_size == size
    assert server._stopped_s >= 0.05
    while counter.stat().st_size == size:
        time.sleep(0.01)
    with server.stopped():
        server.end()
    assert server.process.returncode == -9


def test_parts_are_chosen_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = everything.parsed(["--logs", str(tmp_path), "--parts", "encoders,peer"])
    assert args.parts == ["encoders", "peer"] and args.limit_seconds == everything.LIMIT_S < 390
    with pytest.raises(SystemExit):
        everything.parsed(["--parts", "encoder"])
    assert "encoder is none of served, encoders, peer" in capsys.readouterr().err
    args.peer_site = str(tmp_path)
    assert [side.name for side in served.sides_of(args)] == [served.OURS]
    assert "has no sglang" in capsys.readouterr().out


def test_another_tree_has_the_libraries_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its packages come first, so that it is not this tree that is measured twice."""
    monkeypatch.setenv("PYTHONPATH", "/here/python:/libraries")
    args = everything.parsed(["--logs", str(tmp_path)])
    args.base = tmp_path / "base"
    ours, other = (side.env["PYTHONPATH"].split(":") for side in texts.sides_of(args))
    assert ours == [str(served.ROOT / "python"), "/here/python", "/libraries"]
    assert other == [str(tmp_path / "base" / "python"), "/here/python", "/libraries"]


def test_upstream_has_the_time_to_compile_its_kernels(tmp_path: Path) -> None:
    assert everything.parsed(["--logs", str(tmp_path)]).start_seconds >= 240


def test_images_are_new_ones() -> None:
    bodies = [str(served.image_body(32, seed)) for seed in (0, 1, 0)]
    assert bodies[0] == bodies[2] != bodies[1]


_AT_ONCE = ("Kimi K2.5", "Qwen3-VL-8B")


class LiveBytes(TorchDispatchMode):
    """The most bytes that are held at the same time beside those of `known` tensors."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self._seen:
            return
        self._seen.add(address)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, address, size)

    def _free(self, address: int, size: int) -> None:
        self._seen.discard(address)
        self.now -= size


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name not in _AT_ONCE)) for name in TOWERS]
)
def test_the_memory_plan_counts_what_an_encoder_step_holds(name: str, tmp_path: Path) -> None:
    """Two layers of the published sizes."""
    config = encoders.with_layers(TOWERS[name], 3)
    encoder = encoders.encoder_of(config, tmp_path, "cpu", dtype="bfloat16")
    tower, rows = encoder.tower, 8 * encoder.tower.merge
    pixels = torch.rand(rows**2, tower.patch_values)
    encoder._attend = lambda *args: None
    with LiveBytes([pixels, *(param.tensor for param in encoder.params.values())]) as live:
        encoder.encode(pixels, [(1, rows, rows)])
    features = tower.num_tokens((1, rows, rows)) * tower.features_size  # counted apart
    counted = (rows**2 * tower.activation_size() + features) * 2
    assert live.most <= counted, f"{live.most / counted:.2f} of what is counted"
    assert live.most > counted / 2
