"""Launch commands that owners of these cards published, against `explain`: the flags, the plan, the exit status.

`published.tsv`: id, card, config (in `configs.py` or `srt/kernels`), source, flags.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from srt.kernels import published

from commands.configs import CONFIGS, checkpoint, laguna_draft
from commands.published import AS_TYPED, COMMANDS, MENDED, NOT_SERVED, OTHER_FLAWS, words_of
from sglang import explain
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.spec import Choice
from sglang.srt.server_args import ServerArgs


@pytest.mark.parametrize("name", COMMANDS)
def test_a_published_command_starts_or_says_why_not(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = COMMANDS[name]
    model = checkpoint(row["config"], tmp_path / "m")
    status = explain.main(["--arch", row["gpu"], *words_of(name, model, tmp_path / "draft")])
    printed = capsys.readouterr()
    if name in OTHER_FLAWS:
        assert status == 2 and OTHER_FLAWS[name] in printed.err + printed.out
    elif name in AS_TYPED:
        unknown = [line for line in printed.err.splitlines() if "Unknown option" in line]
        assert status == 2 and unknown and all("Here that is" in line for line in unknown), printed.err
    elif status and name in NOT_SERVED:
        reasons = ("is not described here yet", "names the Python code")
        assert "not implemented yet" in printed.out or any(reason in printed.err for reason in reasons)
    else:
        assert status == 0, printed.err + printed.out


def test_a_16_bit_checkpoint_without_room_is_told_what_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command was for a checkpoint in FP8; with the config of the one in 16 bits the message names the flag that
    the stand-in has."""
    row = COMMANDS["rk-q397-fp8"]
    argv = ["--arch", row["gpu"], "--model-path", str(published.any_checkpoint(row["config"], tmp_path / "m"))]
    assert explain.main([*argv, *shlex.split(row["flags"])]) == 2
    assert "What helps: more GPUs (--tp-size 16), or --quantization fp8, which makes FP8" in capsys.readouterr().out


def test_drafts_by_depth_start_with_the_published_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = COMMANDS["rk-mimo25"]
    argv = ["--arch", row["gpu"], "--model-path", str(checkpoint(row["config"], tmp_path / "m"))]
    assert explain.main([*argv, *shlex.split(row["flags"])]) == 0
    printed = capsys.readouterr().out
    assert "MTP (MiMoV2ForCausalLM): 3 layers" in printed and "3 (kv) for the last 130 tokens" in printed


def test_a_longer_context_than_the_config_has_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command changes the config's rotary scaling before; without that the message names the way."""
    row = COMMANDS["red-fn-yaml"]
    argv = ["--arch", row["gpu"], "--model-path", str(checkpoint(row["config"], tmp_path / "m"))]
    assert explain.main([*argv, *shlex.split(row["flags"])]) == 2
    said = capsys.readouterr().err
    assert "--context-length 786432 exceeds the 262144 tokens" in said and "--json-model-override-args" in said


def test_a_cache_of_fewer_bits_than_a_kind_has_becomes_one_of_eight(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = COMMANDS["red-fn-yaml"]
    model = str(checkpoint(row["config"], tmp_path / "m"))
    assert explain.main(["--arch", row["gpu"], "--model-path", model, "--kv-cache-dtype", "fp4_e2m1"]) == 0
    assert "--kv-cache-dtype fp4_e2m1 became fp8_e4m3" in capsys.readouterr().out


@pytest.mark.parametrize("name", MENDED)
def test_a_command_starts_with_what_its_message_says(name: str, tmp_path: Path) -> None:
    row = COMMANDS[name]
    words = words_of(name, checkpoint(row["config"], tmp_path / "m"), tmp_path / "draft")
    wrong, right = MENDED[name]
    mended = shlex.split(shlex.join(words).replace(wrong, right))
    assert mended != words and explain.main(["--arch", row["gpu"], *mended]) == 0


def test_drafts_of_laguna(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """XS.2's is in the format of the speculators library, with layers of Qwen 3; that of XS-2.1 has gates and norms of
    its own."""
    layers = {"model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 5}
    layers |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 100352}
    layers |= {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 131072, "hidden_act": "silu"}
    draft = tmp_path / "draft"
    draft.mkdir()
    plain = {"speculators_model_type": "dflash", "transformer_layer_config": layers, "block_size": 8}
    plain |= {"aux_hidden_state_layer_ids": [2, 10, 18, 37, 40], "mask_token_id": 12, "draft_vocab_size": 100352}
    (draft / "config.json").write_text(json.dumps(plain))
    argv = ["--arch", "rtx-pro-6000", "--model-path", str(checkpoint("Laguna-XS.2", tmp_path / "m"))]
    argv += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft)]
    assert explain.main(argv) == 0
    assert "DFLASH (DFlashDraftModel): 5 layers" in capsys.readouterr().out
    (draft / "config.json").write_text(json.dumps(laguna_draft()))
    assert explain.main(argv) == 0
    assert "DFLASH (DFlashLagunaForCausalLM): 5 layers" in capsys.readouterr().out


PRODUCTS = ("rtx-pro-6000-server", "rtx-5090", "gb10")
FITS: dict[str, tuple[int | None, ...]] = {
    "Laguna-XS.2": (1, 4, 1),
    "MiMo-V2.5": (4, 0, 0),
    "MiMo-V2.5-Pro-NVFP4-MXFP8": (8, 0, 0),
    "GLM-5.3-NVFP4": (8, 0, 0),
    "Gemma-4-31B": (1, 4, 1),
    "Qwen3.8-Flash-Next-FP8": (2, None, 0),
    "MiMo-V2.6-Flash-RL": (2, 8, 0),
    "MiMo-V2.6-Pro-RL": (8, 0, 0),
    "Naive-N0.5-Flash-FP8": (4, 0, 0),
    "Step-5-Preview": (0, 0, 0),
    "Ling-3.0-flash-FP8": (2, None, 0),
    "Ling-3.0-flash-MXFP4": (1, 4, 1),
    "Ling-3.0-flash-int4": (1, 4, 1),
    "Nemotron-Labs-3-Puzzle-75B-A9B-NVFP4": (1, 2, 1),
    "Kimi-Linear-48B-A3B-FP8": (1, 2, 1),
    "Kimi-Linear-48B-A3B-NVFP4": (1, 2, 1),
    "Llama-4-Scout-NVFP4": (1, 4, 1),
    "Llama-4-Maverick-FP8": (8, 0, 0),
    "Qwen3-Coder-30B-A3B-AWQ": (1, 1, 1),
    "Qwen3-Coder-30B-A3B-AWQ-g64": (1, 1, 1),
}
"""GPUs of each of PRODUCTS on which there is room; 0: not on 8, or on the one that there is; None: experts are too
narrow for so many ranks without --ep-size."""


def test_every_config_of_here_has_its_numbers() -> None:
    assert FITS.keys() >= CONFIGS.keys()


@pytest.mark.parametrize("name", FITS)
def test_these_configs_have_every_kernel(name: str, tmp_path: Path) -> None:
    model = str(checkpoint(name, tmp_path / "m"))
    for product, size in zip(PRODUCTS, FITS[name], strict=True):
        if size is None:
            continue
        most = 1 if product == "gb10" else 8
        args = ServerArgs.from_cli(["--model-path", model, "--tp", str(size or most)])
        explained = explain.explain(args, arch_by_name(product), frozenset({"triton"}), advises=False)
        assert explained.missing == () and explained.refused is None
        assert (explained.unfit is None) == (size > 0), f"{product}: {explained.unfit}"
        chosen = {outcome.need.key: outcome for outcome in explained.outcomes if isinstance(outcome, Choice)}
        quantized = [choice.name for key, choice in chosen.items() if key.startswith(("linear/", "fused_moe"))]
        assert all(kernel.startswith("triton") for kernel in quantized), quantized


@pytest.mark.parametrize("named", ["--attention-backend", "--decode-attention-backend", "--prefill-attention-backend"])
def test_a_backend_that_is_not_installed_falls_back(
    named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(published.any_checkpoint("Qwen3.6-27B-NVFP4", tmp_path / "m"))
    argv = ["--arch", "rtx-5090", "--model-path", model, named, "flashinfer"]
    assert explain.main(argv) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{named} flashinfer")]
    assert len(said) == 1, said
    assert "flashinfer is not installed: pip install 'flashinfer-python>=" in said[0] and "triton serves " in said[0]
    assert explain.main([*argv, "--with-package", "flashinfer"]) == 0
    assert f"{named} flashinfer cannot" not in capsys.readouterr().out
    assert explain.main([*argv, "--strict-backends"]) == 2
    assert "flashinfer: flashinfer is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--attention-backend b12x", "it is not part of sm120-sglang"),
        ("--moe-runner-backend flashinfer_cutlass", "it is not part of sm120-sglang"),
        ("--attention-backend fa3", "needs wgmma"),
        ("--sampling-backend flashinfer", "one implementation"),
    ],
)
def test_a_kernel_of_others_falls_back(
    flags: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--arch", "sm_120", "--model-path", str(published.any_checkpoint("Qwen3-30B-A3B", tmp_path / "m"))]
    assert explain.main([*argv, *flags.split()]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(flags)]
    assert len(said) == 1 and why in said[0] and "--strict-backends" in said[0]
    assert explain.main([*argv, *flags.split(), "--strict-backends"]) == 2
    printed = capsys.readouterr()
    assert why.replace("it is ", "") in printed.out + printed.err or "no such kernel" in printed.out


def test_flashinfer_is_not_advised_for_what_it_cannot_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(published.any_checkpoint("gpt_oss", tmp_path / "m"))
    assert explain.main(["--arch", "sm_120", "--model-path", model, "--attention-backend", "flashinfer"]) == 0
    printed = capsys.readouterr().out
    assert "(no support for sinks): triton serves" in printed and "pip install" not in printed


@pytest.mark.parametrize(("gpus", "status"), [("1", 2), ("2", 0)])
def test_offloaded_weights_are_not_needed_where_all_fit(
    gpus: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(published.any_checkpoint("MiniMax-M2.7-NVFP4", tmp_path / "m"))
    argv = ["--arch", "rtx-pro-6000", "--model-path", model, "--cpu-offload-gb", "35", "--tp", gpus]
    assert explain.main(argv) == status
    said = [line for line in capsys.readouterr().out.splitlines() if "--cpu-offload-gb" in line]
    assert len(said) == 1
    assert ("more GPUs (--tp-size 2)" in said[0]) if status else ("has no effect: all 6" in said[0]), said
