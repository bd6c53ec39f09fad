"""The figures of forms beside those of transformers, and a table of a small model."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import compare_forms
import pytest
import torch
from compare_forms import Measured, main, measure, windows
from forked_servers import forked_children
from srt.configs.gguf_files import add_byte_level, convert, trained
from srt.models.harness import hf_logits, random_tokens, save_tiny

import sglang
from sglang.srt.errors import UserError


def test_perplexity_and_likeliest_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    model = save_tiny("qwen3", tmp_path / "saved")
    prompts = [random_tokens(24, seed) for seed in (1, 2)]
    with forked_children():
        engine = sglang.Engine(
            model_path=str(tmp_path / "saved"), dtype="float32", device="cpu", max_total_tokens=512,
            skip_tokenizer_init=True, disable_radix_cache=True, chunked_prefill_size=16,
        )  # fmt: skip
    with engine:
        measured = measure(engine, prompts)
    logprobs = [hf_logits(model, ids)[:-1].log_softmax(-1) for ids in prompts]
    pairs = zip(logprobs, prompts, strict=True)
    of_tokens = torch.cat([each.gather(1, torch.tensor(ids[1:])[:, None]) for each, ids in pairs])
    assert measured.perplexity == pytest.approx(math.exp(-of_tokens.mean().item()), rel=1e-4)
    assert measured.likeliest == torch.cat(logprobs).argmax(-1).tolist()


def test_agreement_is_a_share_of_places() -> None:
    assert Measured([0.0] * 4, [1, 2, 3, 4]).agreement(Measured([0.0] * 4, [1, 2, 9, 9])) == 0.5


def test_windows_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    assert windows(range(10), 9, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(UserError, match="The text has 10 tokens, fewer than 11"):
        windows(range(10), 11, 4)


def test_the_text_has_the_tokens_that_are_measured_by_default() -> None:
    assert len(compare_forms.text()) > 4 * 50_000


def test_a_table_has_a_row_for_each_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    tokenizer = trained("qwen2")
    save_tiny("llama_wide", tmp_path / "saved", vocab_size=tokenizer.get_vocab_size())
    add_tokenizer = partial(add_byte_level, tokenizer=tokenizer, pre="qwen2")
    file = convert(tmp_path / "saved", tmp_path / "model.gguf", more=add_tokenizer)
    monkeypatch.setattr(compare_forms, "text", lambda: "It's a small text. " * 20)
    words = ["--tokens", "64", "--window", "32", "--dtype", "float32", "--forms", "16-bit", "int4_g32"]
    with forked_children():
        assert main(["--model-path", str(file), *words]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header == f"{file}: 62 tokens in windows of 32, float32"
    assert rows[3].split(" | ")[2:] == ["+0.00%", "100.00% |"]
    assert rows[4].startswith("| int4_g32 | ") and rows[4] != rows[3]
