"""What repositories say of pooling and labels, and what of it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.configs.labels import RAW, SIGMOID, SOFTMAX, read_labels
from sglang.srt.configs.sentence_modules import NO_MODULES, DenseModule, read_sentence_modules
from sglang.srt.errors import UserError


def write(folder: Path, modules: list[tuple[str, str]], **files: Any) -> None:
    entries = [{"idx": i, "path": path, "type": kind} for i, (path, kind) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(entries))
    for path, values in files.items():
        (folder / path).mkdir(exist_ok=True)
        (folder / path / "config.json").write_text(json.dumps(values))


IDENTITY = "torch.nn.modules.linear.Identity"
OLD, NEW = "sentence_transformers.models.{}", "sentence_transformers.sentence_transformer.modules.{}"


@pytest.mark.parametrize("form", [OLD, NEW])
@pytest.mark.parametrize(
    ("pooling", "method"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "include_prompt": True}, "first"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "cls"}, "first"),
    ],
)
def test_modules(form: str, pooling: dict[str, Any], method: str, tmp_path: Path) -> None:
    kinds = [("", "Transformer"), ("p", "Pooling"), ("d", "Dense"), ("n", "Normalize")]
    dense = {
        "in_features": 4,
        "out_features": 8,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    write(tmp_path, [(path, form.format(kind)) for path, kind in kinds], p=pooling, d=dense)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    modules = read_sentence_modules(tmp_path)
    assert modules.method == method and modules.normalizes and modules.max_tokens == 256
    assert modules.dense == (DenseModule("d", 8, 4, False),)


def test_without_modules_nothing_is_said(tmp_path: Path) -> None:
    assert read_sentence_modules(tmp_path) == NO_MODULES and NO_MODULES.normalizes


@pytest.mark.parametrize(
    ("path", "kind", "values", "message"),
    [
        ("p", "Pooling", {"pooling_mode_max_tokens": True}, "pooling by max_tokens is not computed here"),
        ("p", "Pooling", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "cls_token, mean_tokens"),
        ("p", "Pooling", {}, "pooling by no mode"),
        ("p", "Dense", {"in_features": 4, "out_features": 4, "activation_function": "x.Swish"}, "activation Swish"),
        ("p", "LayerNorm", {}, "modules of the type LayerNorm"),
        ("../p", "Pooling", {}, "leads out of the repository"),
    ],
)
def test_what_is_not_computed_is_named(
    path: str, kind: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, [(path, OLD.format(kind))], p=values)
    with pytest.raises(UserError, match=message):
        read_sentence_modules(tmp_path)


@pytest.mark.parametrize(
    ("config", "function"),
    [
        ({"id2label": {"0": "bad", "1": "good"}}, SOFTMAX),
        ({"id2label": {"0": "a", "1": "b"}, "problem_type": "multi_label_classification"}, SIGMOID),
        ({"id2label": {"0": "LABEL_0"}}, SIGMOID),
        ({"id2label": {"0": "LABEL_0"}, "problem_type": "regression"}, RAW),
        ({"id2label": {"0": "LABEL_0"}, "sbert_ce_default_activation_function": IDENTITY}, RAW),
        ({"id2label": {"0": "LABEL_0"}, "sentence_transformers": {"activation_fn": IDENTITY}}, RAW),
        ({}, SOFTMAX),
    ],
)
def test_scores_become_probabilities_as_the_config_says(config: dict[str, Any], function: str) -> None:
    labels = read_labels(config)
    assert labels.function == function
    made = labels.probabilities([-800.0, 800.0][: len(labels.names)])
    assert made == {SOFTMAX: [0.0, 1.0], SIGMOID: [0.0, 1.0][: len(made)], RAW: [-800.0]}[function]


def test_labels_are_ordered_by_number() -> None:
    assert read_labels({"id2label": {"10": "k", "2": "c"}}).names == ("c", "k")
    with pytest.raises(UserError, match="'id2label' must hold the names of labels by their numbers"):
        read_labels({"id2label": {"a": "b"}})
