"""The tuner of the expert kernels as far as it goes without a GPU: shapes, dry run, resuming, the file it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tuning_fused_moe_triton as tuner
from tuning_state import TuningState

from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.spec import TileRecord
from sglang.srt.layers.moe.fused_moe_triton import config_files
from sglang.srt.layers.moe.fused_moe_triton.config_files import find
from sglang.srt.layers.moe.fused_moe_triton.config_format import TilePair, read_content
from sglang.srt.layers.moe.fused_moe_triton.tiles import tile
from sglang.tuning.search_space import BATCH_SIZES, MoeShape

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "test" / "srt" / "kernels" / "configs"
H200 = arch_by_name("h200")
SHAPE = MoeShape(128, 768, 2048, 8, None)
PAIR = TilePair(tile(16, 32, 128, 1, 4, 4), tile(16, 64, 128, 1, 4, 3))
WIDE = TilePair(tile(64, 64, 64, 8, 4, 3), tile(64, 128, 64, 8, 8, 3))


@pytest.fixture
def model(tmp_path: Path) -> Any:
    def make(name: str) -> str:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text((CONFIGS / f"{name}.json").read_text())
        return str(directory)

    return make


def parsed(*flags: str) -> Any:
    return tuner._parser().parse_args(flags)


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "flags", "shape"),
    [
        ("glm47", ("--tp-size", "8"), MoeShape(161, 192, 5120, 9, "fp8_channel")),
        ("glm47", ("--tp", "4", "--disable-shared-experts-fusion"), MoeShape(160, 384, 5120, 8, "fp8_channel")),
        ("glm47", ("--tp", "8", "--ep", "8"), MoeShape(20, 1536, 5120, 8, "fp8_channel")),
        ("glm47", ("--tp", "3", "--ep", "3"), MoeShape(54, 1536, 5120, 8, "fp8_channel")),
        ("qwen35", ("--tp", "3"), MoeShape(256, 176, 2048, 8, None)),
        ("kimi_k25", ("--tp", "8"), MoeShape(384, 256, 7168, 8, "int4_g32")),  # its shared expert is in 16 bits
        ("gpt_oss", (), MoeShape(128, 2880, 2880, 4, "mxfp4", True)),
        ("qwen35", ("--dtype", "bf16"), MoeShape(256, 512, 2048, 8, None)),
        ("qwen35", ("--dtype", "fp8_w8a8", "--per-channel-quant"), MoeShape(256, 512, 2048, 8, "fp8_channel")),
        ("qwen35", ("--dtype", "nvfp4", "--tp", "2"), MoeShape(256, 256, 2048, 8, "nvfp4")),
    ],
)
def test_shape_of_a_models_experts(model: Any, name: str, flags: tuple[str, ...], shape: MoeShape) -> None:
    assert tuner.read_shape(parsed("--model", model(name), *flags)) == shape


@pytest.mark.parametrize(
    ("name", "flags", "problem"),
    [
        ("qwen3", (), "has no experts"),
        ("qwen35", ("--tp", "4", "--ep", "3"), "--ep-size 3 does not divide --tp-size 4"),
        ("qwen35", ("--dtype", "int8_w8a16"), "no kernel for it here"),
        ("qwen35", ("--dtype", "int4_w4a16", "--per-channel-quant"), "does not go with --dtype int4_w4a16"),
        ("kimi_k25", ("--per-channel-quant", "--tp", "8"), "experts are int4_g32"),
    ],
)
def test_what_cannot_be_tuned_says_why(model: Any, name: str, flags: tuple[str, ...], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        tuner.read_shape(parsed("--model", model(name), *flags))


@pytest.mark.parametrize(
    ("dtype", "per_channel", "of_model", "scheme"),
    [
        ("auto", False, None, None),
        ("auto", False, "fp8_block", "fp8_block"),
        ("auto", True, None, "fp8_channel"),
        ("fp8_w8a8", False, None, "fp8_tensor"),
        ("fp8_w8a8", False, "fp8_block", "fp8_block"),
        ("fp8_w8a8", True, "fp8_block", "fp8_channel"),
        ("int8_w8a8", True, None, "int8_channel"),
        ("int4_w4a16", False, "int4_g128", "int4_g128"),
        ("int4_w4a16", False, None, "int4_g32"),
        ("mxfp4", False, "nvfp4", "mxfp4"),
    ],
)
def test_schemes_of_upstreams_dtypes(dtype: str, per_channel: bool, of_model: str | None, scheme: str | None) -> None:
    assert tuner.scheme_of(dtype, per_channel, of_model) == scheme


# --- dry run ----------------------------------------------------------------------------------------------------------


def test_dry_run_on_a_machine_without_a_gpu(model: Any) -> None:
    """The command as people type it; nothing is asked of a device, nothing is written."""
    script = REPOSITORY / "benchmark/kernels/fused_moe_triton/tuning_fused_moe_triton.py"
    command = [sys.executable, str(script), "--model", model("glm47"), "--tp-size", "8", "--dry-run"]
    before = sorted(config_files.PACKAGE_CONFIGS.rglob("*"))
    done = subprocess.run([*command, "--arch", "rtx-5090"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "E=161 N=192 H=5120 top-9 fp8_channel on rtx-5090 (sm_120, 170 SMs)" in done.stdout
    assert "shared memory of a block: 101,376 B" in done.stdout
    assert "too much shared memory; for example" in done.stdout
    assert "sm_120 has 101,376 B" in done.stdout
    assert sorted(config_files.PACKAGE_CONFIGS.rglob("*")) == before


def test_dry_run_counts_add_up_and_verbose_names_every_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {3: TileRecord(40_000, 90, 0, 0, ("m16n8k16 bf16",)), 4: TileRecord(40_000, 255, 12, 8, ("m16n8k16 bf16",))}
    monkeypatch.setattr(tuner, "recorded_cost", lambda product, arch: costs.get(product.tile["num_stages"]))
    lines = list(tuner.dry_run(SHAPE, arch_by_name("sm_120"), (1, 64), verbose=True))
    text = "\n".join(lines)
    assert "spills; for example" in text and "12 B, 255 registers" in text
    assert "64 tokens" in text and " us  gate_up " in text
    tiles = {word: sum(line.startswith(f"    {word}") for line in lines) for word in ("out", "in  ", "in?")}
    header = next(line for line in lines if line.startswith("gate_up: 384 tiles"))
    counts = [int(number) for number in header.replace(",", "").split() if number.isdigit()]
    assert counts[0] == 384
    assert tiles["in  "] > 0 and tiles["in?"] > 0 and tiles["out"] > 0
    assert sum(tiles.values()) == 384 + 480


def test_without_a_gpu_only_a_dry_run_goes(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert tuner.main(["--model", model("qwen35"), "--tune"]) == 2
    assert "There is no GPU here. --dry-run" in capsys.readouterr().err
    assert tuner.main(["--model", model("gpt_oss"), "--tune", "--arch", "h200"]) == 2
    assert "--arch goes with --dry-run" in capsys.readouterr().err


# --- tuning, with timing replaced -------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """An H200 whose times are made up: small batches like PAIR, large ones WIDE."""
    state: dict[str, Any] = {"timed": [], "fail_at": None}

    def measure_all(shape: MoeShape, kept: Any, todo: Any, seed: int) -> Iterator[tuple[int, TilePair, float]]:
        for tokens in todo:
            if tokens == state["fail_at"]:
                raise KeyboardInterrupt
            state["timed"].append(tokens)
            yield tokens, PAIR if tokens < 64 else WIDE, tokens * 1e-6

    monkeypatch.setattr(tuner, "device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(tuner, "compile_space", lambda shape, arch, processes: {"gate_up": [], "down": []})
    monkeypatch.setattr(tuner, "measure_all", measure_all)
    monkeypatch.setattr(tuner.importlib.metadata, "version", lambda name: "3.6.0")
    return state


def run(tmp_path: Path, *flags: str) -> Path:
    args = parsed("--model", "x", "--tune", "--output-dir", str(tmp_path / "configs"), *flags)
    tuner.tune(SHAPE, H200, args)
    return tmp_path / "configs" / "triton_3_6_0" / "E=128,N=768,device_name=NVIDIA_H200.json"


def test_the_file_is_written_where_the_server_finds_it(
    machine: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run(tmp_path)
    assert machine["timed"] == list(BATCH_SIZES)
    content = read_content(path)
    assert content.source == "measured"
    assert dict(content.by_tokens) == {tokens: PAIR if tokens < 64 else WIDE for tokens in BATCH_SIZES}
    entry = json.loads(path.read_text())["1"]
    assert entry["BLOCK_SIZE_N"] == 64 and entry["down"]["num_stages"] == 3  # w13's gate and up rows
    monkeypatch.setattr(config_files, "PACKAGE_CONFIGS", tmp_path / "configs")
    record = TileRecord(40_000, 90, 0, 0, ())
    found = find(128, 768, None, H200, hidden=2048, cost=lambda product, arch: record)
    assert found.tiles is not None and found.tiles.path == path and found.tiles.at(4096) == WIDE


def test_an_interrupted_run_is_resumed(machine: dict[str, Any], tmp_path: Path) -> None:
    machine["fail_at"] = 64
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    done = [tokens for tokens in BATCH_SIZES if tokens < 64]
    assert machine["timed"] == done
    assert not list((tmp_path / "configs").rglob("*.json"))  # nothing half done where a server would look
    machine["fail_at"] = None
    path = run(tmp_path, "--resume")
    assert machine["timed"] == list(BATCH_SIZES)  # each once
    assert set(read_content(path).by_tokens) == set(BATCH_SIZES)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_without_resume_everything_is_timed_again(machine: dict[str, Any], tmp_path: Path) -> None:
    run(tmp_path, "--batch-size", "1", "8")
    run(tmp_path, "--batch-size", "1", "8")
    assert machine["timed"] == [1, 8, 1, 8]


def test_what_the_record_rules_out_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what is known to spill; the rest is compiled, and what spills on this GPU is not timed."""
    moe_problem = pytest.importorskip("moe_problem")
    good, spilling = (TileRecord(40_000, 90, spills, 0, ("m16n8k16 bf16",)) for spills in (0, 16))
    compiled: dict[str, list[dict[str, int]]] = {}

    def compile_tiles(shape: MoeShape, tiles: Any, processes: int) -> Any:
        compiled.update(tiles)
        return {
            (kind, tuner.tile_key(t)): spilling if t["num_warps"] == 8 else good for kind in tiles for t in tiles[kind]
        }

    monkeypatch.setattr(moe_problem, "compile_tiles", compile_tiles)
    monkeypatch.setattr(tuner, "recorded_cost", lambda p, arch: spilling if p.tile["num_stages"] == 3 else None)
    kept = tuner.compile_space(SHAPE, H200, 1)
    for kind in ("gate_up", "down"):
        assert {t["num_stages"] for t in compiled[kind]} == {2, 4, 5}
        assert {t["num_warps"] for t in compiled[kind]} == {4, 8}
        assert {t["num_warps"] for t, _ in kept[kind]} == {4}
    monkeypatch.setattr(moe_problem, "compile_tiles", lambda shape, tiles, processes: {})
    monkeypatch.setattr(tuner, "recorded_cost", lambda p, arch: spilling)
    with pytest.raises(UserError, match=r"No tile of gate_up can be used .* spills \("):
        tuner.compile_space(SHAPE, H200, 1)


class FakeRay(ModuleType):
    """Actors that answer at once; of the calls in flight the one started last is done first."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.started: list[int] = []
        self.actors = 0
        self.busy = 0

    def init(self, **options: Any) -> None:
        assert str(REPOSITORY / "benchmark") in options["runtime_env"]["env_vars"]["PYTHONPATH"]

    def remote(self, **options: Any) -> Any:
        assert options == {"num_gpus": 1}
        return lambda cls: SimpleNamespace(remote=self._actor)

    def _actor(self, shape: MoeShape, seed: int) -> Any:
        self.actors += 1

        def fastest(kept: Any, tokens: int) -> Any:
            self.started.append(tokens)
            self.busy += 1
            assert self.busy <= self.actors
            return f"result of {tokens}"

        return SimpleNamespace(fastest=SimpleNamespace(remote=fastest))

    def wait(self, running: list[Any]) -> tuple[list[Any], list[Any]]:
        self.busy -= 1
        return [running[-1]], running[:-1]

    def get(self, result: str) -> Any:
        tokens = int(result.split()[-1])
        return tokens, PAIR, 1e-6 * tokens

    def shutdown(self) -> None:
        assert self.busy == 0


def test_ray_spreads_the_batch_sizes_over_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, the largest first, and no GPU with two at a time."""
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(tuner.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(tuner, "device_count", lambda: 3)
    results = list(tuner.measure_all(SHAPE, {}, [1, 8, 64, 512], 0))
    assert sorted(tokens for tokens, _, _ in results) == [1, 8, 64, 512]
    assert ray.started == [512, 64, 8, 1] and ray.actors == 3
    few = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", few)
    assert len(list(tuner.measure_all(SHAPE, {}, [1], 0))) == 1 and few.actors == 1


def test_another_run_is_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    first = TuningState(path, tuner.about_run(SHAPE, H200, "3.6.0"))
    first.add(1, PAIR, 1e-6)
    same = TuningState(path, tuner.about_run(SHAPE, H200, "3.6.0"))
    same.resume()
    assert same.done == {1: (PAIR, 1e-6)}
    with pytest.raises(UserError, match="triton '3.6.0' then, '3.9.0' now"):
        TuningState(path, tuner.about_run(SHAPE, H200, "3.9.0")).resume()
    first.partial.write_text('{"about"')
    with pytest.raises(UserError, match=r"cannot be resumed .* run without --resume"):
        same.resume()


def test_the_users_directory_gets_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(tmp_path))
    path = tuner.output_path(SHAPE, None, "3.6.0+git1", "NVIDIA H200")
    assert path == tmp_path / "configs" / "triton_3_6_0" / "E=128,N=768,device_name=NVIDIA_H200.json"
