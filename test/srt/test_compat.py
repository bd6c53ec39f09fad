"""Flags of SGLang's releases: every name is known, and published launch commands are understood."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from sglang.srt import environ
from sglang.srt.compat import (
    FOREIGN_KERNELS,
    NO_EFFECT,
    RENAMED_FLAGS,
    TUNING_VALUES,
    UNIMPLEMENTED,
    VALUE_HINTS,
    WORDS_OF_OTHERS,
)
from sglang.srt.errors import UserError
from sglang.srt.server_args import TABLE, ServerArgs
from sglang.srt.upstream_interface import ACCEPTED, REFUSED
from sglang.version import __version__

UPSTREAM_NAMES = [
    line
    for line in (Path(__file__).parent / "upstream_flag_names.txt").read_text().splitlines()
    if not line.startswith("#")
]


@pytest.fixture(autouse=True)
def forget_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environ, "_already_warned", set())


def test_every_name_of_upstream_is_known() -> None:
    assert len(UPSTREAM_NAMES) > 600
    unknown = [name for name in UPSTREAM_NAMES if f"--{name}" not in {*TABLE.meanings, "--config", "--help"}]
    assert not unknown


def test_old_names_work_and_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            args = ServerArgs.from_cli(
                ["--model", "m", "--schedule-heuristic", "lpm", "--cuda-graph-max-bs-decode", "16"]
            )
    assert (args.schedule_policy, args.cuda_graph_max_bs) == ("lpm", 16)
    assert [record.message for record in caplog.records] == [
        "--schedule-heuristic is another spelling of --schedule-policy; please use the latter.",
        "--cuda-graph-max-bs-decode is another spelling of --cuda-graph-max-bs; please use the latter.",
    ]


def test_flags_without_effect_take_their_values_along(caplog: pytest.LogCaptureFixture) -> None:
    words = (
        "--model m --tokenizer-mode slow --disable-custom-all-reduce --nccl-port=5 --port 1 --enable-p2p-check --tp 2 "
        "--gc-threshold 1 2 3"
    )
    with caplog.at_level(logging.WARNING):
        args = ServerArgs.from_cli(words.split())
    assert (args.port, args.tp_size) == (1, 2)
    assert len(caplog.records) == 4
    assert "--tokenizer-mode has no effect in sm120-sglang: its files decide how it is read." in caplog.messages


@pytest.mark.parametrize("words", ["--sleep-on-idle true", "--nccl-port 1 2", "--nccl-port=1 2"])
def test_a_flag_without_effect_takes_no_more_values_than_it_has(words: str) -> None:
    with pytest.raises(UserError, match=r"^Unrecognized arguments: (true|2)\."):
        ServerArgs.from_cli(["--model", "m", *words.split()])


@pytest.mark.parametrize("name", sorted(RENAMED_FLAGS))
def test_every_renamed_flag_leads_somewhere(name: str) -> None:
    assert TABLE.find(f"--{name}")[1] in TABLE.fields


def test_every_unimplemented_flag_says_so() -> None:
    for name, flag in UNIMPLEMENTED.items():
        with pytest.raises(UserError) as caught:
            ServerArgs.from_cli(["--model", "m", f"--{name}", "some value"])
        assert str(caught.value) == f"--{name} is not implemented in sm120-sglang {__version__}: {flag.reason}."


def test_every_flag_without_effect_is_accepted(caplog: pytest.LogCaptureFixture) -> None:
    for name, flag in NO_EFFECT.items():
        caplog.clear()
        words = ["--model", "m", f"--{name}", *["7"] * min(flag.max_values, 3), "--port", "1"]
        assert ServerArgs.from_cli(words).port == 1
        assert caplog.messages == [f"--{name} has no effect in sm120-sglang: {flag.reason}."]


def test_a_refused_flag_passes_with_a_value_that_asks_for_nothing() -> None:
    for name, flag in UNIMPLEMENTED.items():
        for value in flag.harmless:
            ServerArgs.from_cli(["--model", "m", f"--{name}={value}"])
    ServerArgs.from_kwargs(model_path="m", decoupled_spec_role=None, enable_lora=False, gpu_id_step=1)
    with pytest.raises(UserError, match="--gpu-id-step is not implemented"):
        ServerArgs.from_kwargs(model_path="m", gpu_id_step=2)


def test_values_that_only_tune(caplog: pytest.LogCaptureFixture) -> None:
    for field, tuning in TUNING_VALUES.items():
        for value in tuning.values:
            assert getattr(ServerArgs.from_kwargs(model_path="m", **{field: value}), field) == tuning.instead
        assert tuning.instead in TABLE.spec(field).choices
        assert not tuning.values & set(TABLE.spec(field).choices)
    ServerArgs.from_cli("--model m --load-format runai_streamer".split())
    said = [text for text in caplog.messages if text.startswith("--load-format runai_streamer")]
    assert len(said) == 1 and "safetensors are read in one way" in said[0]


def test_kernels_of_others_are_the_plans_to_judge(caplog: pytest.LogCaptureFixture) -> None:
    for field, names in FOREIGN_KERNELS.items():
        assert not names & set(TABLE.spec(field).choices)
        for name in names:
            assert getattr(ServerArgs.from_kwargs(model_path="m", **{field: name}), field) == name
    assert not caplog.messages
    with pytest.raises(UserError, match="--sampling-backend flashinfer is not part of sm120-sglang"):
        ServerArgs.from_kwargs(model_path="m", sampling_backend="flashinfer", strict_backends=True)


@pytest.mark.parametrize("name", WORDS_OF_OTHERS)
def test_words_of_other_servers_get_the_word_that_is_meant(name: str) -> None:
    with pytest.raises(UserError, match=f"^Unknown option --{name}. Here that is "):
        ServerArgs.from_cli(["--model", "m", f"--{name}"])
    for word in re.findall(r"--[a-z-]+", WORDS_OF_OTHERS[name]):
        assert word in TABLE.names, word


def test_every_flag_that_a_reason_names_exists() -> None:
    reasons = [*VALUE_HINTS.values(), *(group.reason for group in (*ACCEPTED, *REFUSED))]
    named = {flag for reason in reasons for flag in re.findall(r"--[a-z][a-z0-9-]+", reason)}
    assert named and named <= set(TABLE.names), named - set(TABLE.names)


@pytest.mark.parametrize(("field", "value"), VALUE_HINTS)
def test_values_that_are_not_read_say_what_to_write(field: str, value: str) -> None:
    with pytest.raises(UserError) as caught:
        ServerArgs.from_kwargs(model_path="m", **{field: value})
    assert str(caught.value).endswith(f"got {value!r}. {VALUE_HINTS[field, value]}")


@pytest.mark.parametrize("spelling", ["--uno-lora-p", "--enable-flexk"])
def test_abbreviated_unimplemented_flag(spelling: str) -> None:
    with pytest.raises(UserError, match=f"{spelling}[a-z-]+ is not implemented"):
        ServerArgs.from_cli(["--model", "m", spelling, "1"])


def test_an_abbreviation_of_several_refused_flags() -> None:
    with pytest.raises(UserError, match="^--decoupled-spec is not implemented in sm120-sglang .*: drafts are computed"):
        ServerArgs.from_cli(["--model", "m", "--decoupled-spec", "1"])
    with pytest.raises(
        UserError, match=r"^--no-en is ambiguous: it could be --no-enable-decoder-swa-bounded-replay, .*\. Write"
    ):
        ServerArgs.from_cli(["--model", "m", "--no-en"])


def test_an_abbreviation_that_fits_upstream_flags_too_is_said(caplog: pytest.LogCaptureFixture) -> None:
    args = ServerArgs.from_cli(["--model", "m", "--cuda-graph-max", "8"])
    assert args.cuda_graph_max_bs == 8
    assert caplog.messages == [
        "--cuda-graph-max is read as --cuda-graph-max-bs, though it could be --cuda-graph-max-bs-prefill;"
        " please write it out."
    ]


PUBLISHED = [
    "--model-path Qwen/Qwen3-8B --host 0.0.0.0 --port 30000 --tp 8 --mem-fraction-static 0.85 --trust-remote-code "
    "--context-length 131072 --max-running-requests 64 --cuda-graph-max-bs 32 --attention-backend triton",
    "--model Qwen/Qwen3-0.6B --tp-size 2 --disable-custom-all-reduce --enable-metrics --chunked-prefill-size 4096 "
    "--kv-cache-dtype fp8_e4m3 --served-model-name qwen --page-size 64 --disable-shared-experts-fusion",
    "--model-path m --attention-backend flashinfer --sampling-backend pytorch --schedule-policy lpm --log-requests "
    "--enable-mixed-chunk --stream-interval 4 --grammar-backend xgrammar --moe-runner-backend triton "
    "--watchdog-timeout 600",
    "--model-path nvidia/Qwen3.5-397B-A17B-NVFP4 --tp-size 4 --host 0.0.0.0 --port 8000 --trust-remote-code "
    "--mem-fraction-static 0.85 --quantization modelopt_fp4 --attention-backend triton --moe-runner-backend "
    "flashinfer_cutlass --fp4-gemm-backend flashinfer_cudnn --context-length 262144 --reasoning-parser qwen3 "
    "--tool-call-parser qwen3_coder --sleep-on-idle",
    "--model-path nvidia/Qwen3.5-397B-A17B-NVFP4 --tp 4 --trust-remote-code --attention-backend flashinfer "
    "--moe-runner-backend flashinfer_cutlass --kv-cache-dtype fp8_e4m3 --tool-call-parser qwen3 --reasoning-parser "
    "qwen3 --quantization modelopt_fp4 --disable-custom-all-reduce --enable-flashinfer-allreduce-fusion "
    "--mem-fraction-static 0.9 --cuda-graph-max-bs 8 --host 0.0.0.0 --port 5000 --served-model-name qwen3.5 "
    "--max-running-requests 8 --fp8-gemm-backend triton --model-loader-extra-config {} --sleep-on-idle",
    "--model nvidia/Qwen3.5-397B-A17B-NVFP4 --served-model-name Qwen3.5 --reasoning-parser qwen3 --tool-call-parser "
    "qwen3_coder --tensor-parallel-size 8 --quantization modelopt_fp4 --kv-cache-dtype fp8_e4m3 --trust-remote-code "
    "--attention-backend triton --moe-runner-backend flashinfer_cutlass --fp4-gemm-backend flashinfer_cudnn "
    "--cuda-graph-max-bs 4 --max-running-requests 4 --context-length 262144 --chunked-prefill-size 32768 "
    "--speculative-algo NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 "
    "--mamba-scheduler-strategy extra_buffer --page-size 64 --mem-fraction-static 0.85 --sleep-on-idle",
    "--model-path Qwen3.5-397B-A17B-FP8 --tp-size 8 --mem-fraction-static 0.8 --context-length 262144 "
    "--reasoning-parser qwen3 --tool-call-parser qwen3_coder --served-model-name llm_model --speculative-algo NEXTN "
    "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --attention-backend triton "
    "--fp8-gemm-backend triton --moe-runner-backend triton --sleep-on-idle",
    "--model moonshotai/Kimi-K2.5 --tp 8 --mem-fraction-static 0.94 --enable-metrics --sleep-on-idle "
    "--attention-backend flashinfer --tool-call-parser kimi_k2 --reasoning-parser kimi_k2 --served-model-name "
    "kimi-k2.5 --chunked-prefill-size 8092 --cuda-graph-max-bs 16 --trust-remote-code --enable-mixed-chunk "
    '--model-loader-extra-config {"enable_multithread_load":true,"num_threads":16}',
    "--model-path nvidia/Kimi-K2.5-NVFP4 --tensor-parallel-size 8 --trust-remote-code --reasoning-parser kimi_k2 "
    "--tool-call-parser kimi_k2 --moe-runner-backend triton --quantization modelopt_fp4 --mem-fraction-static 0.93 "
    "--cuda-graph-max-bs 8 --sleep-on-idle",
    "--model-path GLM-5-NVFP4-MTP --tp 8 --trust-remote-code --attention-backend flashinfer --moe-runner-backend "
    "cutlass --kv-cache-dtype bf16 --tool-call-parser glm47 --reasoning-parser glm45 --quantization modelopt_fp4 "
    "--disable-custom-all-reduce --enable-flashinfer-allreduce-fusion --mem-fraction-static 0.85 --cuda-graph-max-bs "
    "32 --served-model-name glm-5 --max-running-requests 64 --speculative-algorithm NEXTN --speculative-num-steps 3 "
    "--speculative-num-draft-tokens 4 --speculative-eagle-topk 1 --enable-metrics --sleep-on-idle",
    "--model-path DeepSeek-V3.1-NVFP4 --enable-metrics --trust-remote-code --mem-fraction-static 0.8 --tp 8 "
    "--reasoning-parser deepseek-v3 --tool-call-parser deepseekv31 --watchdog-timeout 1000000 --context-length 131072 "
    "--page-size 64 --disable-cuda-graph --quantization modelopt_fp4 --moe-runner-backend flashinfer_trtllm "
    "--attention-backend trtllm_mla --fp4-gemm-backend flashinfer_cutlass --disable-flashinfer-autotune",
    "--model lukealonso/MiniMax-M2.5-NVFP4 --served-model-name MiniMax-M2.5 --reasoning-parser minimax "
    "--enable-torch-compile --trust-remote-code --tp 2 --mem-fraction-static 0.93 --max-running-requests 16 "
    "--quantization modelopt_fp4 --attention-backend flashinfer --moe-runner-backend flashinfer_cutlass "
    "--disable-custom-all-reduce --enable-flashinfer-allreduce-fusion --sleep-on-idle",
    "--model-path MiniMax-M2.5 --tp-size 4 --tool-call-parser minimax-m2 --reasoning-parser minimax-append-think "
    "--trust-remote-code --mem-fraction-static 0.85 --cuda-graph-max-bs 32 --max-running-requests 32 "
    "--enable-torch-compile --torch-compile-max-bs 4 --sleep-on-idle",
    "--model-path zai-org/GLM-4.7-FP8 --tp 8 --tool-call-parser glm47 --reasoning-parser glm45 --mem-fraction-static "
    "0.848 --kv-cache-dtype auto --served-model-name glm-4.7 --cuda-graph-bs 1 2 4 8 16 --enable-cache-report",
    "--model-path deepseek-ai/DeepSeek-V3.2 --tp 8 --nsa-prefill-backend flashmla_kv --nsa-decode-backend flashmla_kv "
    "--kv-cache-dtype bfloat16 --dist-init-addr 127.0.0.1:5000 --nnodes 1 --node-rank 0 --cuda-graph-max-bs 64",
    "--model-path openai/gpt-oss-120b --tp 1 --dp 1 --pp 1 --ep 1 --tool-call-parser gpt-oss "
    "--reasoning-parser gpt-oss --max-total-tokens 256k "
    "--json-model-override-args {} --load-format auto --dtype auto --stream-interval 1",
]
"""As people run these cards; files of their own are left out."""


@pytest.mark.parametrize("command", PUBLISHED)
def test_published_commands(command: str) -> None:
    ServerArgs.from_cli(command.split())
