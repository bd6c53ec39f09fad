"""Launch commands as people have published them for 2026 releases."""

from __future__ import annotations

import logging

import pytest

from sglang.srt import environ
from sglang.srt.compat import NO_EFFECT, RENAMED_FLAGS, UNIMPLEMENTED
from sglang.srt.errors import UserError
from sglang.srt.server_args import TABLE, ServerArgs
from sglang.version import __version__


@pytest.fixture(autouse=True)
def forget_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environ, "_already_warned", set())


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
        "--model m --tokenizer-mode slow --disable-custom-all-reduce --nccl-port=5 --port 1 --enable-p2p-check --tp 2"
    )
    with caplog.at_level(logging.WARNING):
        args = ServerArgs.from_cli(words.split())
    assert (args.port, args.tp_size) == (1, 2)
    assert len(caplog.records) == 4
    assert "--tokenizer-mode has no effect in sm120-sglang: fast tokenizers are always used." in caplog.messages


@pytest.mark.parametrize("name", sorted(RENAMED_FLAGS))
def test_every_renamed_flag_leads_somewhere(name: str) -> None:
    assert TABLE.find(f"--{name}") in TABLE.fields


@pytest.mark.parametrize("name", sorted(UNIMPLEMENTED))
def test_every_unimplemented_flag_says_so(name: str) -> None:
    with pytest.raises(UserError) as caught:
        ServerArgs.from_cli(["--model", "m", f"--{name}", "value"])
    assert str(caught.value) == f"--{name} is not implemented in sm120-sglang {__version__}: {UNIMPLEMENTED[name]}"


@pytest.mark.parametrize("name", sorted(NO_EFFECT))
def test_every_flag_without_effect_is_accepted(name: str) -> None:
    words = ["--model", "m", f"--{name}", *(["7"] if NO_EFFECT[name].takes_value else []), "--port", "1"]
    assert ServerArgs.from_cli(words).port == 1


def test_abbreviated_unimplemented_flag() -> None:
    with pytest.raises(UserError, match="--speculative-eagle-topk is not implemented"):
        ServerArgs.from_cli(["--model", "m", "--speculative-eagle", "1"])


@pytest.mark.parametrize(
    "command",
    [
        "--model-path Qwen/Qwen3-8B --host 0.0.0.0 --port 30000 --tp 8 --mem-fraction-static 0.85 --trust-remote-code "
        "--context-length 131072 --max-running-requests 64 --cuda-graph-max-bs 32 --attention-backend triton",
        "--model Qwen/Qwen3-0.6B --tp-size 2 --disable-custom-all-reduce --enable-metrics --chunked-prefill-size 4096 "
        "--kv-cache-dtype fp8_e4m3 --served-model-name qwen --page-size 64 --disable-shared-experts-fusion",
        "--model-path m --attention-backend flashinfer --sampling-backend pytorch --schedule-policy lpm --log-requests "
        "--enable-mixed-chunk --stream-interval 4 --grammar-backend xgrammar --moe-runner-backend triton "
        "--watchdog-timeout 600",
    ],
)
def test_published_commands(command: str) -> None:
    ServerArgs.from_cli(command.split())
