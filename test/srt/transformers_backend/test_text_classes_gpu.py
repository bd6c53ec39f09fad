"""Embedding models and a classifier of published sizes with random weights, served on a GPU in bf16 with default flags:
against transformers in fp32, and no step waits for the device."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.models.transformers_backend import trial
from sglang.srt.plan import served_model
from sglang.srt.server_args import ServerArgs
from srt.transformers_backend.text_classes import expected, step_of
from srt.transformers_backend.tiny import fill_randomly

pytestmark = pytest.mark.gpu

_BERT = {"vocab_size": 30522, "num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 12}
_GEMMA = {
    "vocab_size": 262144, "hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 6, "head_dim": 256,
    "num_attention_heads": 3, "num_key_value_heads": 1, "sliding_window": 512, "max_position_embeddings": 2048,
    "query_pre_attn_scalar": 256, "use_bidirectional_attention": True,
}  # fmt: skip
_RERANKER = {
    "vocab_size": 250002, "num_hidden_layers": 4, "hidden_size": 1024, "num_attention_heads": 16,
    "intermediate_size": 4096, "max_position_embeddings": 8194, "type_vocab_size": 1, "num_labels": 1,
}  # fmt: skip
_QWEN = {
    "vocab_size": 151669, "num_hidden_layers": 6, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 32768,
}  # fmt: skip
FORMS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "all-MiniLM-L6-v2": ("bert", "BertModel", _BERT | {"intermediate_size": 1536}, "mean"),
    "ModernBERT-base": ("modernbert", "ModernBertModel", {}, "mean"),
    "embeddinggemma-300m": ("gemma3_text", "Gemma3TextModel", _GEMMA, "mean"),
    "Qwen3-Embedding-0.6B": ("qwen3", "Qwen3Model", _QWEN, "last"),
    "bge-reranker-v2-m3": ("xlm-roberta", "XLMRobertaForSequenceClassification", _RERANKER, ""),
}
"""Model type, class, keys beside the defaults, and pooling; "": it is a classifier."""


@pytest.mark.parametrize("name", FORMS)
def test_texts_of_many_lengths(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_model, "facts_of", trial.facts_of)
    kind, architecture, keys, method = FORMS[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **keys)
    model = getattr(transformers, architecture)(config).float().eval()
    fill_randomly(model)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    model = type(model).from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32).cuda().eval()
    (tmp_path / "config.json").write_text(json.dumps(values | {"dtype": "bfloat16"}))
    args = ServerArgs.from_kwargs(
        model_path=str(tmp_path), skip_tokenizer_init=True, is_embedding=True, model_impl="transformers"
    )
    runner = create_runner(args)
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 7, 33, 64, 65, 129, 300, 511]
    prompts = [torch.randint(5, 30000, (length,), generator=generator).tolist() for length in lengths]
    got = runner.forward(step_of(prompts)).logits
    task = "embed" if method else "classify"
    with torch.inference_mode():
        want = torch.stack([expected(model, task, ids, method).cpu() for ids in prompts]).float()
    with torch.inference_mode():
        model.to(torch.bfloat16)
        rounded = torch.stack([expected(model, task, ids, method).cpu() for ids in prompts]).float()
    error, of_class = (float((rows.cpu() - want).norm() / want.norm()) for rows in (got, rounded))
    assert error < 0.01 + 1.5 * of_class, f"{name}: off by {error:.3f}, the class in bf16 by {of_class:.3f}"
    again = runner.forward(step_of(prompts[::-1])).logits.flip(0)
    assert float((again - got).norm() / got.norm()) < 0.02, "a text depends on those beside it"
    _times(name, runner)


def _times(name: str, runner: ModelRunner) -> None:
    """Prints the tokens a second of full steps, in which nothing may wait for the device."""
    prompts = [[7 + i % 1000 for i in range(256)]] * 32
    runner.forward(step_of(prompts))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        started = time.perf_counter()
        for _ in range(10):
            runner.forward(step_of(prompts))
        launched = time.perf_counter() - started
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    taken = time.perf_counter() - started
    kernel = next(choice.name for op, choice in runner.plan.choices.items() if op.startswith("prefill_attention"))
    print(f"{name}: {10 * 32 * 256 / taken:,.0f} tokens/s ({kernel}), {launched / 10 * 1000:.2f} ms to launch a step")
