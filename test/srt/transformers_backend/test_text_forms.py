"""Repositories of embedding models and classifiers in the forms that are published, with random weights, through the
scheduler: against transformers, with the pooling and what is behind it written out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from rank_processes import run_ranks
from safetensors.torch import load_file, save_file

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.errors import UserError
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_plan, create_runner
from sglang.srt.models.transformers_backend import trial
from sglang.srt.plan import served_model
from sglang.srt.plan.plan import Plan
from sglang.srt.plan.transformers_backend.facts import CLASSIFY, EMBED
from sglang.srt.server_args import ServerArgs
from srt.managers.fake_runner import Collector, add, assert_clean, request, run_to_end
from srt.transformers_backend.text_classes import expected, hidden_states, save_text_model, step_of, texts

MODULE = "sentence_transformers.models."


def args_of(folder: Path, **options: Any) -> ServerArgs:
    return ServerArgs.from_kwargs(
        model_path=str(folder), device="cpu", skip_tokenizer_init=True, max_running_requests=3, max_total_tokens=1024,
        **{"is_embedding": True, **options},
    )  # fmt: skip


def scheduler(folder: Path, **options: Any) -> Scheduler:
    args = args_of(folder, **options)
    return Scheduler(args, create_runner(args), StopChecker(None))


def plan_of(folder: Path, **options: Any) -> Plan:
    return create_plan(args_of(folder, **options))


def returned(served: Scheduler, prompts: list[list[int]], segments: list[int] | None = None) -> np.ndarray:
    """What requests for embeddings of these texts get, [N, values]."""
    collector = Collector()
    for i, ids in enumerate(prompts):
        message = request(f"r{i}", ids, 0)
        message.hidden_start = len(ids) - 1
        message.segment_start = 0 if segments is None else segments[i]
        add(served, message)
    run_to_end(served, collector)
    assert_clean(served)
    return np.stack([np.frombuffer(collector.hidden[f"r{i}"], np.float32) for i in range(len(prompts))])


def write_modules(folder: Path, mode: str, dense: list[dict[str, Any]] | None = None, normalizes: bool = True) -> None:
    """Writes what sentence-transformers saves beside a model."""
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense or ()), *["Normalize"] * normalizes]
    paths = ["" if kind == "Transformer" else f"{number}_{kind}" for number, kind in enumerate(kinds)]
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": MODULE + kind}
        for i, (path, kind) in enumerate(zip(paths, kinds, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    for path, kind in zip(paths, kinds, strict=True):
        (folder / path).mkdir(exist_ok=True)
        if kind == "Pooling":
            flags = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "lasttoken")}
            (folder / path / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **flags}))
    for path, layer in zip([path for path in paths if "Dense" in path], dense or (), strict=True):
        generator = torch.Generator().manual_seed(layer["in_features"])
        shape = (layer["out_features"], layer["in_features"])
        tensors = {"linear.weight": torch.randn(shape, generator=generator) * 0.1}
        if layer["bias"]:
            tensors["linear.bias"] = torch.randn(shape[0], generator=generator)
        (folder / path / "config.json").write_text(json.dumps(layer))
        save_file(tensors, folder / path / "model.safetensors")


def dense(rows: int, cols: int, bias: bool, activation: str) -> dict[str, Any]:
    return {
        "in_features": cols,
        "out_features": rows,
        "bias": bias,
        "activation_function": f"torch.nn.modules.{activation}",
    }


@pytest.mark.parametrize(
    ("kind", "mode", "method", "keys"),
    [
        pytest.param("bert", "mean_tokens", "mean", {}, id="MiniLM"),
        pytest.param("bert", "cls_token", "first", {}, id="BGE"),
        pytest.param("modernbert", "mean_tokens", "mean", {}, id="ModernBERT"),
        pytest.param("qwen3", "lasttoken", "last", {}, id="Qwen3-Embedding"),
        pytest.param("gemma3_text", "mean_tokens", "mean", {"use_bidirectional_attention": True}, id="EmbeddingGemma"),
    ],
)
def test_published_forms(kind: str, mode: str, method: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """More texts than run at once, which share their beginnings; two of them in one step end at different lengths."""
    model = save_text_model(kind, EMBED, tmp_path, **keys)
    layers = []
    if kind == "gemma3_text":
        layers = [dense(96, 64, False, "linear.Identity"), dense(32, 96, True, "activation.Tanh")]
    write_modules(tmp_path, mode, layers)
    served = scheduler(tmp_path, model_impl="transformers")
    prompts = texts(1, (29, 5, 40, 1, 64))
    prompts.append(prompts[2][:35])
    got = returned(served, prompts)
    want = torch.stack([expected(model, EMBED, ids, method) for ids in prompts])
    for number, layer in enumerate(layers):
        tensors = load_file(tmp_path / f"{number + 2}_Dense" / "model.safetensors")
        want = torch.nn.functional.linear(want, tensors["linear.weight"], tensors.get("linear.bias"))
        want = want.tanh() if "Tanh" in layer["activation_function"] else want
    np.testing.assert_allclose(got, want.numpy(), rtol=0.0, atol=1e-4)
    np.testing.assert_array_equal(returned(served, prompts[:3]), returned(served, prompts[:3]))
    plan = served.plan
    assert plan.chunked_prefill_size == -1 and not plan.caches and not plan.caches_prefixes and not plan.cuda_graph_bs
    assert plan.description.pooling is not None and plan.describe()["pooling"].startswith(method)


def test_a_family_embeds_by_the_last_token_and_its_class_in_other_ways(tmp_path: Path) -> None:
    model = save_text_model("qwen3", EMBED, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
    prompts = texts(1)
    write_modules(tmp_path, "lasttoken")
    served = scheduler(tmp_path)
    assert served.plan.description.transformers_class is None
    want = [expected(model, EMBED, ids, "last").numpy() for ids in prompts]
    np.testing.assert_allclose(returned(served, prompts), want, rtol=0.0, atol=1e-4)
    write_modules(tmp_path, "mean_tokens")
    served = scheduler(tmp_path)
    assert served.plan.description.title == "Qwen3ForCausalLM by transformers"
    want = [expected(model, EMBED, ids, "mean").numpy() for ids in prompts]
    np.testing.assert_allclose(returned(served, prompts), want, rtol=0.0, atol=1e-4)
    with pytest.raises(UserError, match="a family of this server embeds by the last token only"):
        plan_of(tmp_path, model_impl="sglang")


def test_heads_for_other_ends_and_old_names_are_read_over(tmp_path: Path) -> None:
    """As google-bert/bert-base-uncased: a head over the vocabulary, a pooler, and what norms were once called."""
    model = save_text_model("bert", EMBED, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    old = {
        "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in tensors.items()
    }
    old |= {"cls.predictions.bias": torch.zeros(4), "bert.embeddings.position_ids": torch.arange(4)[None]}
    save_file(old, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["BertForMaskedLM"]}))
    prompts = texts(1)
    want = [expected(model, EMBED, ids, "mean").numpy() for ids in prompts]
    np.testing.assert_allclose(returned(scheduler(tmp_path), prompts), want, rtol=0.0, atol=1e-4)
    with pytest.raises(UserError, match="no class of causal language models.* serve it with --is-embedding"):
        plan_of(tmp_path, is_embedding=False)
    del old["bert.encoder.layer.1.output.dense.weight"]
    save_file(old, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"lacks weights of the model: encoder.layer.1.output.dense.weight"):
        scheduler(tmp_path)


def test_a_classifier_reads_pairs(tmp_path: Path) -> None:
    """Some texts of a step are pairs, whose segments count."""
    model = save_text_model("bert", CLASSIFY, tmp_path, num_labels=3)
    prompts, segments = texts(1), [11, 0, 17]
    served = scheduler(tmp_path)
    got = returned(served, prompts, segments)
    with torch.inference_mode():
        for scores, ids, start in zip(got, prompts, segments, strict=True):
            row, kinds = torch.tensor([ids]), (torch.arange(len(ids)) >= (start or len(ids))).long()[None]
            want = model(input_ids=row, token_type_ids=kinds).logits[0]
            np.testing.assert_allclose(scores, want.numpy(), rtol=0.0, atol=1e-4)
    assert np.abs(got - returned(served, prompts)).max() > 1e-2
    with pytest.raises(UserError, match="scores texts and generates none: serve it with --is-embedding"):
        plan_of(tmp_path, is_embedding=False)


def test_no_room_is_kept_for_logits_of_a_vocabulary(tmp_path: Path) -> None:
    """But for the states of all tokens, their labels, and which of the texts each belongs to, in fp32."""
    save_text_model("bert", CLASSIFY, tmp_path, num_labels=5)
    plan = plan_of(tmp_path)
    assert plan.memory.logits == plan.max_prefill_tokens * (64 + 5 + 3) * 4 and plan.memory.penalties == 0


def test_texts_are_as_long_as_the_model_and_its_repository_allow(tmp_path: Path) -> None:
    """RoBERTa counts positions from behind the padding token."""
    model = save_text_model("xlm-roberta", EMBED, tmp_path, max_position_embeddings=67, pad_token_id=2)
    served = scheduler(tmp_path)
    (longest,) = texts(1, (64,))
    assert served.plan.context_len == 64
    want = hidden_states(model, longest).mean(0).numpy()
    np.testing.assert_allclose(returned(served, [longest])[0], want, rtol=0.0, atol=1e-4)
    write_modules(tmp_path, "mean_tokens")
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 48}))
    assert ModelConfig.from_server_args(args_of(tmp_path)).context_len == 48
    assert ModelConfig.from_server_args(args_of(tmp_path, context_length=60)).context_len == 60
    assert ModelConfig.from_server_args(args_of(tmp_path)).dtype == "bfloat16"
    assert ModelConfig.from_server_args(args_of(tmp_path, dtype="float32")).dtype == "float32"
    with pytest.raises(UserError, match="--context-length 65 exceeds the 64 tokens"):
        ModelConfig.from_server_args(args_of(tmp_path, context_length=65))


@pytest.mark.parametrize(
    ("kind", "task", "options", "message"),
    [
        ("bert", EMBED, {"tp_size": 2}, "the plan of the model's class divides no products over ranks"),
        (
            "qwen3",
            EMBED,
            {"pp_size": 2, "model_impl": "transformers"},
            "no plan in transformers that cuts it into stages",
        ),
        ("gemma2", CLASSIFY, {}, "caps or learned logits, which are only computed over a cache"),
        ("albert", EMBED, {}, "does not attend once in each layer"),
        ("t5", EMBED, {}, "is not supported"),
    ],
)
def test_what_is_refused(kind: str, task: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(kind)
    values = {**config.to_dict(), "architectures": ["XForSequenceClassification" if task == CLASSIFY else "X"]}
    if task == CLASSIFY:
        values["architectures"] = ["Gemma2ForSequenceClassification"]
    values.setdefault("max_position_embeddings", 512)
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=message):
        plan_of(tmp_path, load_format="dummy", **options)


def _rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    served_model.facts_of = trial.facts_of  # type: ignore[assignment]
    args = args_of(folder / "model", tp_size=2)
    runner = create_runner(args, rank, f"file://{folder}/rendezvous")
    torch.save(runner.forward(step_of(texts(1))).logits, folder / f"{rank}.pt")
    parallel_state.shutdown()


def test_ranks_score_what_one_rank_scores(tmp_path: Path) -> None:
    """Heads and MLPs of a decoder are divided; the head over labels is on each rank."""
    model = save_text_model("qwen3", CLASSIFY, tmp_path / "model")
    run_ranks(_rank, (tmp_path,), 2)
    want = torch.stack([expected(model, CLASSIFY, ids, "") for ids in texts(1)])
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), want, rtol=0.0, atol=1e-4)
