"""An engine of a GGUF file: texts become the tokens of its tokenizer, and answers are those of transformers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from forked_servers import forked_children
from srt.configs.gguf_files import add_byte_level, convert, trained
from srt.models.harness import save_tiny

import sglang


def test_a_file_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    tokenizer = trained("qwen2")
    model = save_tiny("llama", tmp_path / "saved", vocab_size=tokenizer.get_vocab_size())
    add_tokenizer = partial(add_byte_level, tokenizer=tokenizer, pre="qwen2")
    file = convert(tmp_path / "saved", tmp_path / "model.gguf", more=add_tokenizer)
    with forked_children():
        engine = sglang.Engine(
            model_path=str(file), dtype="float32", device="cpu", max_total_tokens=1024, enable_memory_saver=True
        )
    with engine:
        for prompt in ("Hello world", "naïve café 日本語"):
            ids = tokenizer.encode(prompt).ids
            got = engine.generate(prompt, {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True})
            assert isinstance(got, dict)
            want = model.generate(torch.tensor([ids]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
            assert got["output_ids"] == want[0, len(ids) :].tolist()
            assert got["meta_info"]["prompt_tokens"] == len(ids)
            engine.sleep(2)
            engine.wake_up()  # reads the file again
