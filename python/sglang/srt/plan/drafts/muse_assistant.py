"""Reads Muse-Glimmer's assistant: a DFlash draft with its own config keys, and its own names for the projection of aux
hidden states.

Source: the format in which Meta publishes it (`MuseGlimmerAssistantModel`), as transformers 5.17 reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.configs.speculative import DFLASH
from sglang.srt.errors import UserError

if TYPE_CHECKING:
    from sglang.srt.plan.model_description import ModelDescription

ASSISTANT_ARCHITECTURE = "MuseGlimmerAssistantModel"
ASSISTANT_NAMES: Mapping[str, str] = {"fc": "encoder.fc", "hidden_norm": "encoder.output_norm_enc"}
_ASSISTANT_TYPE = "muse_glimmer_assistant"
_LEFT_OUT: Mapping[str, Any] = {
    "architectures": [ASSISTANT_ARCHITECTURE],
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "max_position_embeddings": 131072,
    "sliding_window": 2048,
    "block_size": 16,
    "mask_token_id": 201818,
    "target_layer_ids": [1, 13, 25, 37, 49],
}
"""The published assistant's values, which its config may leave out."""
_OF_BACKBONE = ("mask_token_id", "target_layer_ids")


def assistant_values(values: Mapping[str, Any], algorithm: str, source: str) -> Mapping[str, Any]:
    """Returns an assistant's config.json in the form of other DFlash drafts, with the values that it leaves out; all
    its layers have a window unless it says which. Other configs are returned unchanged. Raises UserError for an
    assistant that is asked for with another algorithm."""
    if values.get("model_type") != _ASSISTANT_TYPE:
        return values
    if algorithm != DFLASH:
        raise UserError(f"{source}: an assistant of Muse-Glimmer drafts with --speculative-algorithm {DFLASH}.")
    stated = {key: value for key, value in values.items() if value is not None}
    keys = ConfigReader({**_LEFT_OUT, **stated}, source)
    windows = {"layer_types": ["sliding_attention"] * keys.positive("num_hidden_layers")}
    others = {key: value for key, value in keys.values.items() if key not in _OF_BACKBONE}
    return {**windows, **others, "dflash_config": {key: keys.values[key] for key in _OF_BACKBONE}}


def fit_assistant(values: Mapping[str, Any], target: ModelDescription, source: str) -> Mapping[str, Any]:
    """Returns the assistant's config with its target's vocabulary, whose embedding and head it uses; its own config
    states none. Raises UserError for another target than Muse-Glimmer, whose embedding has a norm that the assistant
    leaves out."""
    if target.embedding.norm is None or target.embedding.norm.weighted:
        raise UserError(
            f"{source}: {ASSISTANT_ARCHITECTURE} drafts for Muse-Glimmer, and the model is"
            f" {target.architecture}. Give a draft that was trained for this model, or take NGRAM."
        )
    return {**values, "vocab_size": target.vocab_size}
