"""What `python -m sglang.explain` prints. Golden files: `UPDATE_GOLDEN=1 pytest test/srt/kernels/test_explain.py`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import golden
import pytest

from sglang import explain
from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.plan.plan import make_plan
from sglang.srt.server_args import ServerArgs

from .published import any_checkpoint, checkpoint

HERE = Path(__file__).parent
MODELS = {
    "deepseek_v3": 8,
    "deepseek_v31_nvfp4": 8,
    "deepseek_v32": 8,
    "deepseek_v4": 4,
    "glm47": 8,
    "glm5": 16,
    "gpt_oss": 1,
    "kimi_k25": 8,
    "kimi_k25_nvfp4": 8,
    "kimi_k26_nvfp4": 8,
    "kimi_k2_thinking": 8,
    "minimax_m2": 4,
    "minimax_m3_nvfp4": 4,
    "qwen3": 1,
    "qwen3_moe": 1,
    "qwen35": 1,
    "qwen38_flash_next_nvfp4": 2,
}
"""Configs as published, and the ranks over which they are divided. GLM-4.7's has what its model card says; Kimi K2
Thinking's is K2's with the quantization of K2.5's NVFP4 checkpoint, and Qwen3.8-Flash-Next's is what descriptions of it
say."""
LATENT = ("deepseek_v3", "deepseek_v31_nvfp4", "kimi_k25", "kimi_k25_nvfp4", "kimi_k26_nvfp4", "kimi_k2_thinking")
GOLDEN = [
    *((name, arch) for name in MODELS for arch in ("sm_120", "sm_121")),
    *((name, arch) for name in ("glm47", "gpt_oss", "qwen3") for arch in ("sm_90", "sm_100")),
]


@pytest.fixture
def model_dir(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A directory with nothing but config.json (and hf_quant_config.json); relative, so that messages do not depend on
    where it is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    checkpoint(request.param, tmp_path / "model")
    return "model"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What is printed, where a server would start and where not."""
    status = explain.main(argv)
    printed = capsys.readouterr()
    assert status in (0, explain.WOULD_NOT_START) and not printed.err.startswith("error"), printed.err
    return printed.out


@pytest.mark.parametrize(("model_dir", "name", "arch"), [(n, n, a) for n, a in GOLDEN], indirect=["model_dir"])
def test_golden(model_dir: str, name: str, arch: str, capsys: pytest.CaptureFixture[str]) -> None:
    tp = str(MODELS[name])
    text = run(capsys, "--arch", arch, "--model-path", model_dir, "--tp", tp, "--with-package", "flashinfer")
    golden.check(text, HERE / "golden" / f"{name}.{arch}.txt")


def ops(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads(run(capsys, *argv, "--json"))["ops"]
    return found


@pytest.mark.parametrize("model_dir", ["kimi_k25"], indirect=True)
def test_latent_attention_runs_on_a_tile_that_fits(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = ops(capsys, "--arch", "sm_120", "--model-path", model_dir, "--tp", "8")
    assert found["prefill_attention"]["kernel"] == "torch_flash", "of the encoder of images"
    for op in ("extend_attention", "decode_attention"):
        assert found[op]["kernel"] == "triton"
        smem = found[op]["smem"]
        assert isinstance(smem, int) and 0 < smem <= 101_376
    assert found["fused_moe"]["kernel"] == "triton"
    assert found["fused_moe"]["remark"] == "weights widened to 16 bits in registers"
    assert "linear/int4_g32" not in found, "the routed experts alone are quantized"


def _as_awq(model_dir: str, keep: list[str] | None = None) -> None:
    file = Path(model_dir) / "config.json"
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    quantization["modules_to_not_convert"] = keep
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))


@pytest.mark.parametrize("model_dir", ["qwen3"], indirect=True)
def test_a_dense_model_with_zero_points(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    _as_awq(model_dir)
    for spelling in ("awq", "awq_marlin", "moe_wna16"):
        found = ops(capsys, "--arch", "sm_120", "--model-path", model_dir, "--quantization", spelling)
        assert found["linear/int4_g128"]["kernel"] == "triton_quantized"


@pytest.mark.parametrize(("name", "tp"), [("Qwen3-30B-A3B", "1"), ("Qwen3.5-397B-A17B-NVFP4", "4")])
def test_experts_with_zero_points(name: str, tp: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The modules that stay in 16 bits are those that published exports of Qwen3.5 name."""
    shutil.copytree(any_checkpoint(name, tmp_path / "published"), tmp_path / "model")
    (tmp_path / "model" / "hf_quant_config.json").unlink(missing_ok=True)
    _as_awq(str(tmp_path / "model"), ["linear_attn", "self_attn", "shared_expert", "mlp.gate", "visual", "mtp"])
    for spelling in ("awq", "awq_marlin", "moe_wna16"):
        argv = ["--arch", "rtx-pro-6000-server", "--model-path", str(tmp_path / "model"), "--tp", tp]
        result = json.loads(run(capsys, *argv, "--quantization", spelling, "--json"))
        assert result["not_implemented"] is None and not result["missing"] and result["refused"] is None
        experts = result["ops"]["fused_moe"]
        assert experts["kernel"] == "triton" and experts["spills"] == 0
        assert experts["remark"] == "weights widened to 16 bits in registers"


@pytest.mark.parametrize(("model_dir", "name"), [(name, name) for name in LATENT], indirect=["model_dir"])
def test_models_of_latent_attention_are_served_without_spills(
    model_dir: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for cache in ("bfloat16", "fp8_e4m3", "fp8_e5m2"):
        argv = ("--arch", "rtx-pro-6000-server", "--model-path", model_dir, "--tp", "8", "--kv-cache-dtype", cache)
        found = json.loads(run(capsys, *argv, "--json"))
        assert found["not_implemented"] is None and not found["missing"] and found["refused"] is None
        for op in ("extend_attention", "decode_attention", "latent_prompt_attention"):
            assert found["ops"][op]["kernel"] == "triton" and found["ops"][op]["spills"] == 0, (op, cache)
    # Upstream's default left Kimi K2's cache 4,578 tokens on eight of these cards.
    assert found["plan"]["max_total_num_tokens"] > 10 * 4_578


@pytest.mark.parametrize("model_dir", ["gpt_oss"], indirect=True)
def test_gpt_oss_keeps_its_sinks(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = ops(capsys, "--arch", "sm_120", "--model-path", model_dir, "--with-package", "flashinfer")
    assert found["extend_attention"]["kernel"] == "triton"
    assert "no support for sinks" in str(found["extend_attention"]["not_chosen"])
    assert found["topk_softmax"]["kernel"] == "triton"


@pytest.mark.parametrize(("name", "windows"), [("Gemma-3-12B", {}), ("Mistral-7B", {"sliding_window": 4096})])
def test_flashinfer_serves_windows(
    name: str, windows: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((HERE / "published" / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | windows))
    argv = ("--arch", "sm_120", "--model-path", str(tmp_path), "--with-package", "flashinfer")
    found = ops(capsys, *argv, "--attention-backend", "flashinfer")
    assert found["extend_attention"]["kernel"] == found["decode_attention"]["kernel"] == "flashinfer"
    assert "sliding_window" in str(found["decode_attention"])


@pytest.mark.parametrize("model_dir", ["gpt_oss"], indirect=True)
def test_flashinfer_is_refused_for_sinks_and_not_for_windows(
    model_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("--arch", "sm_120", "--model-path", model_dir, "--with-package", "flashinfer")
    asked = ("--attention-backend", "flashinfer", "--strict-backends")
    found = ops(capsys, *argv, *asked)["decode_attention"]
    assert found["kernel"] is None and "no support for sinks" in str(found) and "sliding window" not in str(found)


@pytest.mark.parametrize("model_dir", ["qwen35"], indirect=True)
def test_hybrid_models_by_architecture(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--model-path", model_dir, "--with-package", "flashinfer", "--attention-backend", "flashinfer")
    argv += ("--strict-backends",)
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
    refused = ops(capsys, *argv, "--attention-backend", "trtllm_mha", "--strict-backends")["extend_attention"]
    assert refused["kernel"] is None and "needs tcgen05" in str(refused["not_chosen"])


@pytest.mark.parametrize(("model_dir", "tp"), [("gpt_oss", "1"), ("deepseek_v4", "4")], indirect=["model_dir"])
def test_precision_of_mxfp4_experts(model_dir: str, tp: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--arch", "sm_120", "--model-path", model_dir, "--tp", tp, "--with-package", "sm120_sgl_kernel")
    asked = ops(capsys, *argv, "--flashinfer-mxfp4-moe-precision", "fp8")["fused_moe"]
    assert asked["kernel"] == "sgl_kernel" and str(asked["remark"]).startswith("e2m1 times e4m3 as they are")
    assert "mxfp4_mxfp8" in str(asked["need"])
    for precision in ((), ("--flashinfer-mxfp4-moe-precision", "bf16")):
        assert ops(capsys, *argv, *precision)["fused_moe"]["remark"] == "weights widened to 16 bits in registers"


@pytest.mark.parametrize(("model_dir", "name"), [(n, n) for n in MODELS], indirect=["model_dir"])
def test_every_model_has_a_memory_plan(model_dir: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--arch", "rtx-pro-6000-server", "--model-path", model_dir, "--tp", str(MODELS[name]))
    found = json.loads(run(capsys, *argv, "--json"))
    assert found["plan"]["max_total_num_tokens"] > 10_000 and found["refused"] is None
    assert found["plan"].get("estimate", False) is (found["not_implemented"] is not None)
    assert found["family_known"]


MISSING = {
    "kimi_k25": set(),
    "deepseek_v4": set(),
    "deepseek_v32": set(),
    "qwen35": set(),
    "qwen38_flash_next_nvfp4": set(),
    "minimax_m2": set(),
    "minimax_m3_nvfp4": set(),
    "glm47": set(),
    "gpt_oss": set(),
    "qwen3": set(),
}


@pytest.mark.parametrize(("model_dir", "name"), [(n, n) for n in MISSING], indirect=["model_dir"])
def test_missing_ops_are_named(model_dir: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "--arch", "sm_120", "--model-path", model_dir, "--json"))
    assert set(found["missing"]) == MISSING[name]


def advised(refusal: str) -> list[list[str]]:
    """The flags of the layouts that a refusal says work; of a run of sizes the ends."""
    *ways, sizes = refusal.partition("what works: ")[2].split(" or ")
    ends = sizes.removeprefix("--tp-size ").replace(" to ", ", ").split(", ")
    return [*(variant.split() for variant in ways), *(["--tp-size", size] for size in ends)]


@pytest.mark.parametrize("model_dir", ["qwen3"], indirect=True)
def test_replicas_are_planned_as_one(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--arch", "sm_120", "--model-path", model_dir, "--tp", "2")
    one, three = (json.loads(run(capsys, *argv, *flags, "--json")) for flags in ((), ("--dp", "3")))
    assert (one["replicas"], one["gpus"], three["replicas"], three["gpus"]) == (1, 2, 3, 6)
    memory, of_one = three["main_memory"], one["main_memory"]
    for name in ("bytes_of_machine", "bytes_of_numa_node"):  # three replicas are on it
        assert memory[name] == 3 * of_one[name]
        memory[name] = of_one[name]
    assert {**three, "replicas": 1, "gpus": 2} == one
    assert "3 replicas of 2 GPUs each: 6 GPUs." in run(capsys, *argv, "--dp", "3")


@pytest.mark.parametrize(("model_dir", "tp"), [("qwen3", 40), ("qwen3_moe", 8)], indirect=["model_dir"])
def test_a_refused_layout_is_refused_with_the_servers_words(
    model_dir: str, tp: int, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("--arch", "sm_120", "--model-path", model_dir)
    found = json.loads(run(capsys, *argv, "--tp", str(tp), "--json"))
    args = ServerArgs.from_kwargs(model_path=model_dir, load_format="dummy", tp_size=tp)
    with pytest.raises(UserError) as error:
        make_plan(args, ModelConfig.from_server_args(args), arch_by_name("sm_120"), 90 << 30, frozenset({"triton"}))
    assert found["refused"] == str(error.value) and found["plan"] is None and not found["ops"]
    assert f"No server starts in this layout: {error.value}" in run(capsys, *argv, "--tp", str(tp))
    for flags in advised(found["refused"]):
        assert json.loads(run(capsys, *argv, *flags, "--json"))["refused"] is None


@pytest.mark.parametrize(("model_dir", "tp"), [("qwen35", 32), ("minimax_m2", 8)], indirect=["model_dir"])
def test_advice_is_not_refused_itself(model_dir: str, tp: int, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--arch", "sm_120", "--model-path", model_dir, "--json")
    refused = json.loads(run(capsys, *argv, "--tp", str(tp)))["refused"]
    for flags in advised(refused):
        assert json.loads(run(capsys, *argv, *flags))["refused"] is None


@pytest.mark.parametrize("model_dir", ["glm47"], indirect=True)
def test_the_users_tuning_file_is_the_servers(
    model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1}
    name = "E=161,N=192,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition,dtype=fp8_w8a8,per_channel_quant=True"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / f"{name}.json").write_text(json.dumps({"1": entry | {"num_warps": 4, "num_stages": 2}}))
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(tmp_path))
    found = json.loads(run(capsys, "--arch", "sm_120", "--model-path", model_dir, "--tp", "8", "--json"))
    assert found["moe_tiles"].startswith(f"{name}.json (")


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


def test_ranks_on_other_cards_are_explained_as_the_least_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model-path", str(DEFAULT_MODEL_PATH), "--tp", "2", "--json"]
    assert explain.main([*flags, "--arch", "rtx-pro-6000-server, rtx-5090"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert explain.main([*flags, "--arch", "rtx-5090"]) == 0
    least = json.loads(capsys.readouterr().out)
    assert both["plan"]["max_total_num_tokens"] == least["plan"]["max_total_num_tokens"]
    assert both["product"] == "rtx-5090"
    assert explain.main([*flags, "--arch", "rtx-5090,gb10"]) == 2
    assert "ranks of a server need GPUs of one architecture" in capsys.readouterr().err


@pytest.mark.parametrize("model_dir", ["qwen3_moe"], indirect=True)
def test_times_count_the_experts_that_come_over_the_bus(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--arch", "rtx-pro-6000", "--model-path", model_dir, "--time")
    assert "expert_copies" not in json.loads(run(capsys, *argv, "--json"))
    argv = (*argv, "--paged-experts-num-resident", "32")
    found = json.loads(run(capsys, *argv, "--json"))
    slots, copies = found["plan"]["expert_slots"], found["expert_copies"]["prefill of 8192 tokens"]
    assert copies["bytes"] == pytest.approx(slots["host_bytes"] * (1 - 32 / slots["experts"]), rel=1e-6)
    assert copies["seconds"] == pytest.approx(copies["bytes"] / slots["rate"])
    text = run(capsys, *argv)
    assert "over the bus, of experts in main memory" in text and f"32 of {slots['experts']} experts" in text
