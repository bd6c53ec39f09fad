"""Layers with which a model drafts for itself (multi-token prediction): names of their tensors, and how its config
describes them. Each family's own stand in its file; those that several families share stand here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.drafts.eagle.spec import Projected
from sglang.srt.drafts.form import Form
from sglang.srt.drafts.mtp_by_layer.spec import MTPByLayer
from sglang.srt.plan.families.latent import SPARSE_LAYER
from sglang.srt.plan.layer_spec import LayerSpec, Residual

COUNT = "num_nextn_predict_layers"
"""Key of the number of draft layers in most configs."""
OTHER_DRAFTS = "Give an EAGLE3 head with --speculative-draft-model-path, or draft with NGRAM."
"""What messages advise where a model has no such layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPTensors:
    """Names of draft layers' tensors in the target's checkpoint.

    at: where they begin; "": behind the last layer, with the prefix of the model's layers
    layer: prefix of a layer below `at`
    names: names of "fc", "embedding_norm", "hidden_norm" and "norm", or of what else the form has; {last} is the number
        of the last draft layer. They are below `at`, or with `MTPLayerPerToken` below each layer
    layer_names: names in these layers that differ from the model's
    embedding: name of the layers' own embedding, which a checkpoint may lack: they then use the model's
    unread: beginnings of names of tensors that repeat the target's, or that are not used
    """

    at: str = ""
    layer: str = ""
    names: Mapping[str, str]
    layer_names: Mapping[str, str] = field(default_factory=dict)
    embedding: str = ""
    unread: tuple[str, ...] = ()


def one_layer(keys: ConfigReader) -> dict[str, Any]:
    """Returns the keys that turn a config into that of a single draft layer: it attends to all tokens, or selects them
    with an indexer if the model does, and has experts if the model has."""
    indexed = keys.count("index_topk") > 0
    return {
        "num_hidden_layers": 1,
        "layer_types": [SPARSE_LAYER if indexed else "full_attention"],
        "first_k_dense_replace": 0,
        "mlp_layer_types": None,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    } | ({"indexer_types": None} if indexed else {})


def windowed_layers(keys: ConfigReader, first: int, used: int) -> dict[str, Any]:
    """Returns the keys that turn a config into that of `used` draft layers with windows and without experts. `first`:
    their number in lists that go on behind the model's layers."""
    return {
        "num_hidden_layers": used,
        "layer_types": ["sliding_attention"] * used,
        "mlp_layer_types": ["dense"] * used,
    }


def _projected(residual: Residual) -> Form:
    return Projected()


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPPass:
    """Draft layers that are all computed for every draft token; in most models it is one layer.

    form: makes the draft's form from the model's residual streams
    keys: the config's keys as they apply to the draft layers
    layer: makes the draft layer of the layer that the family reads from these keys
    counts: keys that may hold the number of draft layers; the first one in the config counts
    refused: keys with the values that are not computed
    """

    tensors: MTPTensors
    form: Callable[[Residual], Form] = _projected
    keys: Callable[[ConfigReader], Mapping[str, Any]] = one_layer
    layer: Callable[[LayerSpec], LayerSpec] = lambda layer: layer
    counts: tuple[str, ...] = (COUNT,)
    refused: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPLayerPerToken:
    """Draft layers of which each makes the draft token of one depth.

    form: with the number of layers in published checkpoints, unless config or weights tell
    section: reads the config's keys for the draft layers
    keys: these keys as they apply to the layers that are used: called with the number of the first one behind the
        model's layers, and how many they are
    refused: as in MTPPass
    """

    tensors: MTPTensors
    form: MTPByLayer
    section: Callable[[ConfigReader], ConfigReader] = lambda keys: keys
    keys: Callable[[ConfigReader, int, int], Mapping[str, Any]] = windowed_layers
    refused: Mapping[str, object] = field(default_factory=dict)


EH_PROJ = MTPPass(
    tensors=MTPTensors(
        names={"fc": "eh_proj", "embedding_norm": "enorm", "hidden_norm": "hnorm", "norm": "shared_head.norm"},
        unread=("embed_tokens.", "shared_head.head."),
    )
)
"""DeepSeek V3 and models with its names: a layer behind the last one."""
QWEN_MTP = MTPPass(
    tensors=MTPTensors(
        at="mtp.",
        layer="layers.{layer}.",
        names={
            "fc": "fc",
            "embedding_norm": "pre_fc_norm_embedding",
            "hidden_norm": "pre_fc_norm_hidden",
            "norm": "norm",
        },
    ),
    counts=("mtp_num_hidden_layers", COUNT),
    refused={"mtp_use_dedicated_embeddings": True},
)
"""Qwen3 to Qwen3.6: a layer beside the model."""
