"""Reads what MiMo's DFlash drafts have besides the layers of other drafts: windows in all layers, sinks, a factor on
values. All stand in `dflash_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.plan.families.attention import WINDOWED
from sglang.srt.plan.layer_spec import Mixer
from sglang.srt.plan.model_description import ModelDescription

MIMO_KEYS = frozenset({"use_swa", "swa_window_size", "attention_value_scale", "attention_sink_bias"})
TRAINING_KEYS = frozenset({"backbone_rotary_base", "loss_decay_gamma", "num_anchors"})
"""Keys that say how the draft was trained; the base is that of the target."""


def fit_mimo(values: Mapping[str, Any], inner: ConfigReader, target: ModelDescription) -> Mapping[str, Any]:
    """Returns a draft's config.json with windows in the usual keys, and its target's vocabulary, to whose padded rows
    its own number may not extend. Other drafts' configs are returned unchanged."""
    if not MIMO_KEYS & inner.values.keys():
        return values
    values = {**values, "vocab_size": target.vocab_size}
    if not inner.default("use_swa", bool, False):
        return values
    keys = ConfigReader(values, inner.source)
    size = inner.count("swa_window_size") or keys.positive("sliding_window")
    kinds = [WINDOWED] * keys.positive("num_hidden_layers")
    return {**values, "sliding_window": size, "layer_types": kinds}


def fit_attention(inner: ConfigReader, mixer: Mixer) -> Mixer:
    """Returns a layer's attention with the sinks and the factor on values that `dflash_config` names."""
    assert isinstance(mixer, GQA)
    softmax = replace(mixer.softmax, sinks=inner.default("attention_sink_bias", bool, False))
    values = replace(mixer.values, scale=inner.default("attention_value_scale", float, 1.0))
    return replace(mixer, softmax=softmax, values=values)
