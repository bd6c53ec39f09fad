"""What a classifier's config.json says of its labels and their scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.errors import UserError

SOFTMAX, SIGMOID, RAW = "softmax", "sigmoid", ""


_CLASSIFIER = "ForSequenceClassification"


def classifies(architecture: str) -> bool:
    """Returns whether a model of this architecture scores labels of texts, by the name that all such classes have."""
    return architecture.endswith(_CLASSIFIER)


@dataclass(frozen=True, slots=True)
class Labels:
    """The names of a classifier's labels, and what makes probabilities of their scores; RAW: they stay as they are."""

    names: tuple[str, ...]
    function: str

    def probabilities(self, scores: Sequence[float]) -> list[float]:
        """Returns the probability of each label."""
        if self.function == RAW:
            return list(scores)
        if self.function == SIGMOID:
            return [_sigmoid(score) for score in scores]
        largest = max(scores)
        weights = [math.exp(score - largest) for score in scores]
        total = sum(weights)
        return [weight / total for weight in weights]


def _sigmoid(score: float) -> float:
    """Returns 1 / (1 + exp(-score)) without an overflow."""
    return 1.0 / (1.0 + math.exp(-score)) if score >= 0 else math.exp(score) / (1.0 + math.exp(score))


def read_labels(config: Mapping[str, Any]) -> Labels:
    """Returns the labels of a classifier's config.json. Scores become probabilities as `problem_type` says; where it
    says nothing, one label is by itself and several exclude each other. An activation that sentence-transformers has
    written for one label counts. Raises UserError for labels that are no names by number."""
    named = config.get("id2label")
    if named is None:
        count = config.get("num_labels", 2)
        named = {str(i): f"LABEL_{i}" for i in range(count if isinstance(count, int) else 0)}
    try:
        names = tuple(str(name) for _, name in sorted((int(number), name) for number, name in named.items()))
    except (AttributeError, ValueError, TypeError):
        raise UserError("config.json: 'id2label' must hold the names of labels by their numbers.") from None
    problem, single = config.get("problem_type"), len(names) == 1
    if problem == "regression" or (single and _written_activation(config).endswith("Identity")):
        return Labels(names, RAW)
    return Labels(names, SIGMOID if single or problem == "multi_label_classification" else SOFTMAX)


def _written_activation(config: Mapping[str, Any]) -> str:
    """Returns the name of the activation that sentence-transformers wrote; "": it wrote none."""
    written = config.get("sentence_transformers")
    newer = written.get("activation_fn") if isinstance(written, Mapping) else None
    return str(newer or config.get("sbert_ce_default_activation_function") or "")
