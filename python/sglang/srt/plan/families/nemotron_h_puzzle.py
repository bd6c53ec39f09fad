"""Nemotron-Labs-3-Puzzle: Nemotron-H whose layers have sizes of their own, in particular their experts, which
`block_configs` lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Model
from sglang.srt.plan.families.mtp import OTHER_DRAFTS
from sglang.srt.plan.families.nemotron_h import NEMOTRON_H, NEMOTRON_MTP, block_of, known_kinds, with_usual_keys

_KIND = "block_type"
_SIZES = (
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_latent_size",
    "moe_shared_expert_intermediate_size",
)
"""Keys of a block that replace the config's."""
_PATTERNS = ("hybrid_override_pattern", "layers_block_type", "layer_types")
"""Keys that repeat the kinds of the blocks."""


def nemotron_h_puzzle(c: Config) -> Model:
    c = with_usual_keys(c.usual({"layer_norm_epsilon": c.values.get("norm_eps")}))
    blocks = _blocks(c, "block_configs")
    c.ignore(*_PATTERNS)
    kinds = known_kinds([block.get(_KIND) for block in blocks], c.source)
    return Model(c, [block_of(_with_sizes(c, block), kind) for block, kind in zip(blocks, kinds, strict=True)])


def _blocks(c: ConfigReader, key: str) -> Sequence[Mapping[str, Any]]:
    blocks = c.default(key, list, [])
    if not blocks or not all(isinstance(block, Mapping) for block in blocks):
        raise UserError(f"{c.source}: {key!r} must list an object for each layer.")
    return blocks


def _with_sizes(c: Config, block: Mapping[str, Any]) -> Config:
    """Returns the config with a block's own sizes. A key that is none of them is noted as a problem."""
    stated = {key: value for key, value in block.items() if key != _KIND and value is not None}
    for key in sorted(stated.keys() - set(_SIZES)):
        if stated[key] != c.values.get(key):
            c.problem(f"'block_configs' has {key} = {stated[key]!r}, which is not read for single layers.")
    return c.with_values({key: value for key, value in stated.items() if key in _SIZES})


def _draft_keys(keys: ConfigReader) -> dict[str, Any]:
    """Returns the config's keys as they apply to the draft layers. Raises UserError."""
    if not keys.values.get("mtp_block_configs"):
        raise UserError(f"{keys.source}: no mtp_block_configs say what the draft's layers are. {OTHER_DRAFTS}")
    blocks = _blocks(keys, "mtp_block_configs")
    return {"block_configs": blocks, "num_hidden_layers": len(blocks)}


NEMOTRON_H_PUZZLE = replace(
    NEMOTRON_H,
    title="Nemotron-Labs-3-Puzzle",
    model_types=("nemotron_h_puzzle",),
    architectures=("NemotronHPuzzleForCausalLM",),
    read=nemotron_h_puzzle,
    names=replace(
        NEMOTRON_H.names,
        model={ours: name.replace("backbone.", "model.") for ours, name in NEMOTRON_H.names.model.items()},
        layer_prefix="model.layers.{layer}.",
        beginnings=(("backbone.", "model."),),
    ),
    mtp=replace(NEMOTRON_MTP, keys=_draft_keys),
)
