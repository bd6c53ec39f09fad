"""Launch commands that owners of these cards published, against `explain`: the flags, the plan, the exit status.

`published.tsv`: id, card, config (in `srt/kernels`; - where nobody published one), source, flags.
"""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path

import pytest
from srt.kernels import published

from sglang import explain
from sglang.srt.errors import UserError
from sglang.srt.server_args import ServerArgs

COMMANDS = {row["id"]: row for row in csv.DictReader((Path(__file__).parent / "published.tsv").open(), delimiter="\t")}
NOT_SERVED = ("k3",)
"""Of models that are not implemented."""
CODER_AWQ = {
    "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    "max_position_embeddings": 262144,
}
STAND_INS = {
    "rk-q397-fp8": ["--quantization", "fp8"],
    "coder30-awq": ["--json-model-override-args", json.dumps(CODER_AWQ)],
}
"""What makes of the config what the command was for."""
BRINGS_DSPARK = {
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
}
"""Keys that the config of DeepSeek-V4-Flash-0731 has beside those of the model."""
OTHER_FLAWS = {
    "rk-mimo25": "--quantization modelopt_mixed does not fit the checkpoint",  # the config is another checkpoint's
    "red-fn-yaml": "--context-length 786432 exceeds the 262144 tokens",  # it changes the config's rotary scaling
    "i40877-dsv41": "Unknown option --gpu-memory-utilization. Here that is --mem-fraction-static",
}
DRAFTS = {
    "google/gemma-4-31B-it-assistant": {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": 5376,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size": 1024,
            "intermediate_size": 8192,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 4,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
            "head_dim": 256,
            "global_head_dim": 512,
            "attention_k_eq_v": True,
            "sliding_window": 1024,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size_per_layer_input": 0,
            "vocab_size": 262144,
            "rope_parameters": {
                "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            },
        },
    }
}
"""Configs of the form that such drafts have; the widths of this one are not known here."""


def draft_checkpoint(name: str, folder: Path) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DRAFTS[name]))
    return str(folder)


@pytest.mark.parametrize("name", [name for name, row in COMMANDS.items() if row["config"] != "-"])
def test_a_published_command_starts_or_says_why_not(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = COMMANDS[name]
    words = shlex.split(row["flags"])
    argv = ["--arch", row["gpu"], "--model-path", str(published.any_checkpoint(row["config"], tmp_path / "m"))]
    if "DSPARK" in words and "--speculative-draft-model-path" not in words:
        argv += ["--json-model-override-args", json.dumps(BRINGS_DSPARK)]
    words = [draft_checkpoint(word, tmp_path / "draft") if word in DRAFTS else word for word in words]
    status = explain.main([*argv, *words, *STAND_INS.get(name, [])])
    printed = capsys.readouterr()
    if name in OTHER_FLAWS:
        assert status == 2 and OTHER_FLAWS[name] in printed.err
    elif status and name in NOT_SERVED:
        assert "not implemented yet" in printed.out or "is not described here yet" in printed.err
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
    """Of MiMo-V2, of whose quantized checkpoint no config is here: the model in 16 bits takes the other flags."""
    row = COMMANDS["rk-mimo25"]
    config = json.loads((Path(published.__file__).parent / "published" / row["config"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
    flags = row["flags"].replace("--quantization modelopt_mixed", "")
    assert explain.main(["--arch", row["gpu"], "--model-path", str(tmp_path), *shlex.split(flags)]) == 0
    printed = capsys.readouterr().out
    assert "MTP (MiMoV2FlashForCausalLM): 3 layers" in printed and "3 (kv) for the last 130 tokens" in printed


@pytest.mark.parametrize("name", [name for name, row in COMMANDS.items() if row["config"] == "-"])
def test_flags_of_commands_without_a_config_are_understood(name: str) -> None:
    words = shlex.split(COMMANDS[name]["flags"])
    try:
        ServerArgs.from_cli(["--model-path", "m", *words])
    except UserError as error:
        pytest.fail(str(error))


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
