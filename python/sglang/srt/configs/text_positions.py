"""Models that call the position of the first token something else than 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BEHIND_PADDING = frozenset(
    {"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "data2vec-text", "xmod"}
)
"""Model types that count positions from behind the padding token's id."""


def first_position(config: Mapping[str, Any]) -> int:
    """Returns what a model calls the position of the first token of a text: it has that many positions less than its
    config.json states."""
    padding = config.get("pad_token_id")
    if str(config.get("model_type")) not in _BEHIND_PADDING:
        return 0
    return (padding if isinstance(padding, int) else 1) + 1
