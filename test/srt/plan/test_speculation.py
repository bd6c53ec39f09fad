"""The `--speculative-*` flags: what they resolve to, and what contradicts itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang.srt import environ
from sglang.srt.configs.speculative import AdaptiveSettings, SpeculativeSettings
from sglang.srt.drafts.ngram.spec import ngram_bytes
from sglang.srt.errors import UserError
from sglang.srt.plan.speculation import speculative_settings, verify_needs
from sglang.srt.server_args import ServerArgs


@pytest.fixture(autouse=True)
def forget_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environ, "_already_warned", set())


def settings(words: str, architecture: str = "Qwen3ForCausalLM") -> SpeculativeSettings:
    result = speculative_settings(ServerArgs.from_cli(["--model", "m", *words.split()]), architecture)
    assert result is not None
    return result


def test_nothing_drafts_unless_asked() -> None:
    assert speculative_settings(ServerArgs(model_path="m"), "LlamaForCausalLM") is None


@pytest.mark.parametrize("spelling", ["NEXTN", "nextn", "EAGLE", "eagle"])
def test_next_token_layers_are_eagle_without_a_draft(spelling: str) -> None:
    made = settings(f"--speculative-algo {spelling}")
    assert made.algorithm == "EAGLE" and made.draft_path is None
    assert settings(f"--speculative-algo {spelling} --speculative-draft-model d").draft_path == "d"


@pytest.mark.parametrize(
    ("words", "architecture", "num_draft_tokens", "adaptive"),
    [
        ("NEXTN", "Qwen3ForCausalLM", 4, True),
        ("NEXTN", "LlamaForCausalLM", 6, True),
        ("NEXTN", "Grok1ForCausalLM", 6, True),
        ("NGRAM", "LlamaForCausalLM", 8, True),
        ("NGRAM --speculative-num-draft-tokens 16", "LlamaForCausalLM", 16, False),
        ("NEXTN --speculative-num-steps 1", "LlamaForCausalLM", 2, False),
        ("NEXTN --speculative-num-draft-tokens 3", "LlamaForCausalLM", 3, False),
        ("NEXTN --speculative-num-steps 3 --speculative-adaptive", "LlamaForCausalLM", 4, True),
        ("NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4", "x", 4, False),
        ("NEXTN --speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6", "x", 5, False),
        ("NEXTN --speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8", "x", 6, False),
        ("NEXTN --speculative-num-steps 7 --speculative-eagle-topk 2 --speculative-num-draft-tokens 4", "x", 4, False),
        ("NEXTN --speculative-eagle-topk 4 --speculative-num-draft-tokens 16", "x", 4, False),
    ],
)
def test_depths(words: str, architecture: str, num_draft_tokens: int, adaptive: bool) -> None:
    made = settings(f"--speculative-algorithm {words}", architecture)
    assert (made.num_draft_tokens, made.adaptive is not None) == (num_draft_tokens, adaptive)
    assert made.num_steps == num_draft_tokens - 1


BLOCK_CONFIG = {"architectures": ["Qwen3DSparkModel"], "block_size": 5, "mask_token_id": 1, "target_layer_ids": [0]}


@pytest.mark.parametrize(
    ("words", "num_draft_tokens", "adaptive"),
    [
        ("dspark", 6, True),
        ("DSPARK --speculative-dspark-block-size 3", 4, False),
        ("DSPARK --speculative-dspark-block-size 5 --speculative-num-draft-tokens 6", 6, False),
        ("DSPARK --speculative-num-draft-tokens 2", 2, False),
        ("DSPARK --speculative-num-steps 1 --speculative-eagle-topk 1", 6, True),
        ("DFLASH", 5, True),
        ("DFLASH --speculative-num-steps 1 --speculative-eagle-topk 1", 5, True),
        ("DFLASH --speculative-dflash-block-size 4 --speculative-adaptive", 4, True),
    ],
)
def test_depths_of_blocks(
    words: str, num_draft_tokens: int, adaptive: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BLOCK_CONFIG))
    made = settings(f"--speculative-draft-model-path {tmp_path} --speculative-algorithm {words}")
    assert (made.num_draft_tokens, made.adaptive is not None) == (num_draft_tokens, adaptive)
    assert made.block_size == 5 and made.lookahead_slots == 5
    assert made.block_draft_tokens == (5 if made.algorithm == "DSPARK" else 4)
    ignored = [message for message in caplog.messages if "has no effect: a " in message]
    assert len(ignored) == (2 if "num-steps" in words else 0)


def test_trees_and_other_counts_are_read_as_chains_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    settings("--speculative-algorithm NEXTN --speculative-num-steps 5 --speculative-eagle-topk 4")
    settings("--speculative-algorithm NEXTN --speculative-num-steps 4 --speculative-num-draft-tokens 6")
    tree, count = caplog.messages
    assert tree.startswith("--speculative-eagle-topk 4: a chain of 5 draft tokens") and "answers are the same" in tree
    assert tree.endswith("see Depth in docs/speculative_decoding.md.")
    assert count.startswith("--speculative-num-draft-tokens 6 is read as 5")


def test_thresholds_keep_answers_exact(caplog: pytest.LogCaptureFixture) -> None:
    settings("--speculative-algorithm NEXTN --speculative-accept-threshold-single 0.5")
    assert len(caplog.messages) == 1 and "answers stay exact" in caplog.messages[0]


def test_what_else_is_resolved() -> None:
    made = settings(
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path d --speculative-draft-model-revision r "
        "--load-format dummy --speculative-draft-model-quantization unquant"
    )
    assert (made.draft_path, made.draft_revision, made.draft_load_format) == ("d", "r", "dummy")
    assert made.draft_quantization == "unquant"
    assert settings("--speculative-algorithm NGRAM --speculative-ngram-max-match 5").ngram.longest_suffix == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--speculative-num-steps 3", "--speculative-num-steps: nothing drafts without --speculative-algorithm"),
        ("--speculative-draft-model d --speculative-adaptive", "model-path, --speculative-adaptive: nothing drafts"),
        ("--speculative-algorithm STANDALONE", "STANDALONE needs --speculative-draft-model-path"),
        ("--speculative-algorithm EAGLE3", "EAGLE3 needs --speculative-draft-model-path .* NEXTN"),
        ("--speculative-algorithm NGRAM --speculative-draft-model d", "remove --speculative-draft-model-path"),
        ("--speculative-algorithm NEXTN --speculative-ngram-external-corpus-path f", "needs .* NGRAM"),
        ("--speculative-algorithm NGRAM --is-embedding", "--is-embedding generates no tokens"),
        ("--speculative-algorithm dflash", "DFLASH needs --speculative-draft-model-path"),
        ("--speculative-algorithm uno", "the kind uno are not supported yet; take NEXTN"),
        ("--speculative-algorithm NEXTN --speculative-dspark-block-size 3", "needs --speculative-algorithm DSPARK"),
        ("--speculative-algorithm DSPARK --speculative-dflash-block-size 3", "needs --speculative-algorithm DFLASH"),
        (
            "--speculative-algorithm DSPARK --speculative-dspark-block-size 5 --speculative-num-draft-tokens 5",
            "contradict each other: the second asks for 6 tokens",
        ),
        ("--speculative-dspark-block-size 5", "nothing drafts without --speculative-algorithm"),
        ("--speculative-algorithm FASTER", "must be one of NGRAM, STANDALONE"),
        ("--speculative-algorithm NGRAM --speculative-num-draft-tokens 1", "must be at least 2"),
        ("--speculative-algorithm NGRAM --speculative-num-draft-tokens 65", "must be at most 64"),
    ],
)
def test_refused(words: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ServerArgs.from_cli(["--model", "m", *words.split()])


def test_adaptive_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "adaptive.json"
    values = {"candidate_steps": {"1": [1, 3], "8": [0, 1]}, "ema_alpha": 0.5, "down_hysteresis": -0.25}
    path.write_text(json.dumps(values))
    made = settings(f"--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-adaptive-config {path}")
    assert made.adaptive == AdaptiveSettings(candidate_steps=(1, 3), ema_alpha=0.5)
    assert len(caplog.messages) == 1 and "'down_hysteresis' has no effect" in caplog.messages[0]
    path.write_text("[1]")
    with pytest.raises(UserError, match="must contain a JSON object"):
        settings(f"--speculative-algorithm NEXTN --speculative-adaptive-config {path}")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        settings(f"--speculative-algorithm NEXTN --speculative-adaptive-config {tmp_path}/none.json")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": [1]}, "unknown key 'steps'. The keys are candidate_steps"),
        ({"candidate_steps": [0]}, "above 0"),
        ({"candidate_steps": []}, "above 0"),
        ({"candidate_steps": ["3"]}, "numbers of draft tokens"),
        ({"candidate_steps": [64]}, "0 to 63"),
        ({"ema_alpha": 0}, "above 0 and at most 1"),
        ({"ema_alpha": True}, "above 0 and at most 1"),
        ({"update_interval": 0}, "whole number above 0"),
        ({"probe_interval": 1.5}, "whole number above 0"),
        ({"hysteresis": 1}, "from 0 up to"),
    ],
)
def test_adaptive_values_are_checked(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        AdaptiveSettings.from_json(values, "file")


def test_tables_of_ngram_drafts_are_planned() -> None:
    words = "--model m --speculative-algorithm NGRAM --speculative-ngram-external-corpus-max-tokens 1k"
    args = ServerArgs.from_cli(words.split())
    assert ngram_bytes(args, 7, 100) == 4 * (8 * 100 + 2 * 1000)
    verified = ["verify_inputs", "accept_drafts"]
    assert [need.op for need in verify_needs(args, "bfloat16")] == [*verified, "ngram_drafts"]
    other = ServerArgs.from_cli("--model m --speculative-algorithm NEXTN".split())
    assert ngram_bytes(other, 7, 100) == 0
    assert [need.op for need in verify_needs(other, "bfloat16")] == [*verified, "draft_inputs"]
    assert not verify_needs(ServerArgs.from_cli(["--model", "m"]), "bfloat16")
