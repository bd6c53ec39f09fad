"""A family of models: what its checkpoints are called, and the function that reads a model from its config.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.mtp import MTPLayerPerToken, MTPPass
from sglang.srt.plan.layer_spec import SUM, FeedForward, LayerSpec, Mixer, Residual
from sglang.srt.plan.weight_names import USUAL_NAMES, WeightMap


@dataclass(frozen=True, slots=True)
class Model:
    """What a family's function makes of a config: the layers, and what is before and behind them.

    config: the keys, completed by what the family knows
    tie_embeddings: the output head is the embedding, unless the config says otherwise
    zero_centred_norms: the weights of norms (except gated ones) are stored minus 1
    norm_eps: key of the norms' epsilon
    embedding_scale, normed_embedding, embedding_norm, plain_final_norm: as in ModelDescription
    fused_qkv: the checkpoint has q, k and v as one tensor
    """

    config: Config
    layers: Sequence[LayerSpec]
    tie_embeddings: bool = False
    zero_centred_norms: bool = False
    norm_eps: str = "rms_norm_eps"
    embedding_scale: float = 1.0
    normed_embedding: bool = False
    embedding_norm: bool = False
    plain_final_norm: bool = False
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    fused_qkv: bool = False


def layers_of(mixers: Sequence[Mixer], ffns: Sequence[FeedForward], residual: Residual = SUM) -> list[LayerSpec]:
    """Returns the layers with these mixers and feed-forward blocks."""
    return [LayerSpec(mixer, ffn, residual) for mixer, ffn in zip(mixers, ffns, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models that one function reads.

    title: names of the published models; families with the same one share a row of docs/models.md
    model_types, architectures: values of the keys in config.json; families without architectures are planned for only
    read: makes the model of a config. Raises UserError for keys that cannot be read
    names: of the tensors in checkpoints
    mtp: the layers with which a model drafts for itself
    """

    title: str = ""
    model_types: tuple[str, ...]
    architectures: tuple[str, ...] = ()
    read: Callable[[Config], Model]
    names: WeightMap = USUAL_NAMES
    mtp: MTPPass | MTPLayerPerToken | None = None
