"""Reads drafts in the speculators library's format: their layers' config is in `transformer_layer_config`, and target
layers are named by their inputs.

Source: the config classes of version 0.9 of the library (`eagle3`, `dflash`, `dflash2`, `dspark`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.configs.speculative import BLOCK_ALGORITHMS, DFLASH, DSPARK
from sglang.srt.drafts.block.readers.muse import assistant_values
from sglang.srt.drafts.config import SPECULATORS_KIND, with_layer_keys
from sglang.srt.errors import UserError

_BLOCKS: Mapping[str, tuple[str, str]] = {
    "dflash": (DFLASH, "DFlashDraftModel"),
    "dflash2": (DFLASH, "DFlash2DraftModel"),
    "dspark": (DSPARK, "DSparkDraftModel"),
}
"""(algorithm, architecture under which its authors publish it) by the library's model type."""
_SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
_MARKOV = {"markov_rank": 256, "enable_confidence_head": True, "confidence_head_with_markov": True}
"""The library's defaults, which it need not write."""
BOTH_WAYS = "sliding_window_non_causal"
"""Key that says whether rows of a block see those behind them, too, in layers with a window."""
_USUAL_ROWS, _USUAL_VOCABULARY = 8, 32000


def plain_values(values: Mapping[str, Any], algorithm: str, source: str) -> Mapping[str, Any]:
    """Returns a draft's config.json in the form of other drafts of its algorithm. Raises UserError for a draft of
    another algorithm, and for windows that are not computed."""
    values = assistant_values(values, algorithm, source)
    return _plain(values, algorithm, source) if algorithm in BLOCK_ALGORITHMS else values


def _plain(values: Mapping[str, Any], algorithm: str, source: str) -> Mapping[str, Any]:
    """Returns a block draft's config.json in the form of its authors; configs of other writers are returned
    unchanged."""
    kind = values.get(SPECULATORS_KIND)
    if kind is None:
        return values
    known, architecture = _BLOCKS.get(str(kind), ("", ""))
    if known != algorithm:
        supported = ", ".join(repr(name) for name, (of, _) in _BLOCKS.items() if of == algorithm)
        raise UserError(
            f"{source}: {SPECULATORS_KIND} {kind!r} is not supported for {algorithm}; supported: {supported}."
        )
    keys = with_layer_keys(ConfigReader(values, source))
    named = keys.require("aux_hidden_state_layer_ids", list)
    if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in named):
        raise UserError(f"{source}: aux_hidden_state_layer_ids must be layers; got {named!r}.")
    backbone: dict[str, Any] = {
        "mask_token_id": keys.require("mask_token_id", int),
        "target_layer_ids": [layer - 1 for layer in named],
    }
    plain: dict[str, Any] = {
        **keys.values,
        "architectures": [architecture],
        "block_size": keys.positive("block_size", _USUAL_ROWS),
        "draft_vocab_size": keys.positive("draft_vocab_size", _USUAL_VOCABULARY),
    }
    plain[BOTH_WAYS] = keys.default(BOTH_WAYS, bool, kind == "dflash2")
    if algorithm == DSPARK:
        return {**_MARKOV, **plain, **backbone}
    backbone["shift_label"] = keys.default("sample_from_anchor", bool, False)
    if kind == "dflash2":
        backbone |= {key: keys.positive(key, usual) for key, usual in _SELECTOR.items()}
    return plain | {"dflash_config": backbone}
