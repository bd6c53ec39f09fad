"""DFlash block drafts: descriptions made from their config.json.

Source: the format in which z-lab publishes drafts (`DFlashDraftModel`), layers as those of Qwen3.
"""

from __future__ import annotations

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.configs.speculative import DFLASH, USUAL_BLOCK_SIZE
from sglang.srt.errors import UserError
from sglang.srt.plan.drafts.block_draft import (
    BlockSettings,
    check_architecture,
    check_captures,
    describe_block_draft,
    names_of,
)
from sglang.srt.plan.drafts.config import DraftConfig
from sglang.srt.plan.drafts.description import DraftDescription
from sglang.srt.plan.model_description import ModelDescription

DFLASH_ARCHITECTURES = ("DFlashDraftModel",)
_READ = frozenset({"mask_token_id", "target_layer_ids"})
"""Keys of `dflash_config` that are read; others make another draft of it."""


def describe_dflash(config: DraftConfig, target: ModelDescription) -> DraftDescription:
    """Describes a DFlash draft. Raises UserError naming keys that are missing, of unknown meaning, or do not go with
    the target."""
    keys = config.reader()
    check_architecture(keys, DFLASH, DFLASH_ARCHITECTURES)
    inner = _settings(keys)
    settings = BlockSettings(
        trained=keys.positive("block_size", USUAL_BLOCK_SIZE),
        mask_token=inner.require("mask_token_id", int),
        captures=_captures(inner, keys.positive("num_hidden_layers"), len(target.layers)),
    )
    return describe_block_draft(config, target, settings, names_of({}))


def _settings(keys: ConfigReader) -> ConfigReader:
    """Returns the keys of `dflash_config`. Raises UserError for drafts that are computed otherwise."""
    settings = keys.default("dflash_config", dict, {})
    unknown = sorted(settings.keys() - _READ)
    if unknown:
        raise UserError(
            f"{keys.source}: dflash_config has {', '.join(unknown)}: only plain DFlash drafts are computed here, none"
            " with a selector or another head. Take EAGLE3 or NGRAM."
        )
    if keys.default("is_causal", bool, False):
        raise UserError(f"{keys.source}: is_causal = True is not supported: the rows of a block see each other.")
    return ConfigReader(settings, f"{keys.source} dflash_config")


def _captures(settings: ConfigReader, num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """Returns the target layers whose outputs are read: those named, or as many as the draft has layers, evenly from
    the second one to the third from the end."""
    named = settings.default("target_layer_ids", list, [])
    if not named:
        last = num_target_layers - 3
        if num_layers == 1:
            return (num_target_layers // 2,)
        named = [round(1 + i * (last - 1) / (num_layers - 1)) for i in range(num_layers)]
    return check_captures(named, num_target_layers, settings.source)
