"""What `python -m sglang.explain` prints. Golden files: `UPDATE_GOLDEN=1 pytest test/srt/kernels/test_explain.py`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sglang import explain

HERE = Path(__file__).parent
MODELS = {
    "deepseek_v32": 8,
    "deepseek_v4": 4,
    "glm47": 8,
    "glm5": 16,
    "gpt_oss": 1,
    "kimi_k25": 8,
    "kimi_k2_thinking": 8,
    "minimax_m2": 4,
    "qwen3": 1,
    "qwen3_moe": 1,
    "qwen35": 1,
}
"""Configs as published, and the ranks over which they are divided. GLM-4.7's has what its model card says; Kimi K2
Thinking's is K2's with the quantization of K2.5's NVFP4 checkpoint."""
GOLDEN = [
    *((name, arch) for name in MODELS for arch in ("sm_120", "sm_121")),
    *((name, arch) for name in ("glm47", "gpt_oss", "qwen3") for arch in ("sm_90", "sm_100")),
]


@pytest.fixture
def model_dir(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A directory with nothing but config.json; relative, so that messages do not depend on where it is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    shutil.copy(HERE / "configs" / f"{request.param}.json", tmp_path / "model" / "config.json")
    return "model"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert explain.main(argv) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("model_dir", "name", "arch"), [(n, n, a) for n, a in GOLDEN], indirect=["model_dir"])
def test_golden(model_dir: str, name: str, arch: str, capsys: pytest.CaptureFixture[str]) -> None:
    tp = str(MODELS[name])
    text = run(capsys, "--arch", arch, "--model-path", model_dir, "--tp", tp, "--with-package", "flashinfer")
    golden = HERE / "golden" / f"{name}.{arch}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


def ops(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads(run(capsys, *argv, "--json"))["ops"]
    return found


@pytest.mark.parametrize("model_dir", ["kimi_k25"], indirect=True)
def test_latent_attention_runs_on_a_tile_that_fits(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = ops(capsys, "--arch", "sm_120", "--model-path", model_dir, "--tp", "8")
    for op in ("extend_attention", "decode_attention", "prefill_attention"):
        assert found[op]["kernel"] == "triton"
        smem = found[op]["smem"]
        assert isinstance(smem, int) and 0 < smem <= 101_376
    assert found["fused_moe"]["kernel"] == "triton"
    assert found["fused_moe"]["remark"] == "weights widened to 16 bits in registers"
    assert "linear/int4_g32" not in found, "the routed experts alone are quantized"


@pytest.mark.parametrize("model_dir", ["gpt_oss"], indirect=True)
def test_gpt_oss_keeps_its_sinks(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = ops(capsys, "--arch", "sm_120", "--model-path", model_dir, "--with-package", "flashinfer")
    assert found["extend_attention"]["kernel"] == "triton"
    assert "no support for sinks" in str(found["extend_attention"]["not_chosen"])
    assert found["topk_softmax"]["kernel"] == "triton"


@pytest.mark.parametrize("model_dir", ["qwen35"], indirect=True)
def test_hybrid_models_by_architecture(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--model-path", model_dir, "--with-package", "flashinfer", "--attention-backend", "flashinfer")
    assert ops(capsys, "--arch", "sm_120", *argv)["decode_attention"]["kernel"] == "flashinfer"
    assert ops(capsys, "--arch", "sm_100", *argv)["decode_attention"]["kernel"] is None


@pytest.mark.parametrize("model_dir", ["qwen3"], indirect=True)
def test_flags_count(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--arch", "sm_120", "--model-path", model_dir)
    found = json.loads(run(capsys, *argv, "--kv-cache-dtype", "fp8_e4m3", "--json"))
    (group,) = found["kv_cache"].pop("groups")
    assert found["kv_cache"] == {"dtype": "fp8_e4m3", "bytes_per_token": 36 * 8 * 256, "bytes_per_request": 0}
    assert group["num_caches"] == 36 and group["kept_for"] == "all tokens"
    assert found["not_implemented"] is None and found["plan"]["max_total_num_tokens"] > 100_000
    refused = ops(capsys, *argv, "--attention-backend", "trtllm_mha")["extend_attention"]
    assert refused["kernel"] is None and "needs tcgen05" in str(refused["not_chosen"])


def test_mistakes_are_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main(["--arch", "sm_1", "--model-path", "/nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown architecture or product 'sm_1'")


def test_it_needs_neither_torch_nor_triton(tmp_path: Path) -> None:
    shutil.copy(HERE / "configs" / "qwen3.json", tmp_path / "config.json")
    code = (
        "import sys; from sglang.explain import main;"
        f"main(['--arch', 'sm_120', '--model-path', {str(tmp_path)!r}]);"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'triton', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0
