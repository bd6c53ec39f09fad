"""A family of models: what its checkpoints are called, and the function that reads a model from its config.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.mtp import MTPLayerPerToken, MTPPass
from sglang.srt.plan.layer_spec import SUM, FeedForward, LayerSpec, Mixer, Residual
from sglang.srt.plan.weight_names import USUAL_NAMES, WeightMap


@dataclass(frozen=True, slots=True)
class StoredNorms:
    """How checkpoints store the weights of norms (except gated ones).

    zero_centred: minus 1
    plain_final: the final norm's are stored as they are, whatever the others are
    """

    zero_centred: bool = False
    plain_final: bool = False


@dataclass(frozen=True, slots=True)
class EmbeddingNorm:
    """A norm of embeddings, with or without weights."""

    weighted: bool = False


@dataclass(frozen=True, slots=True)
class Embedding:
    """What becomes of embeddings before the first layer: they are normed, and multiplied by `scale`. on_host: their
    table lies in pinned host memory."""

    scale: float = 1.0
    norm: EmbeddingNorm | None = None
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class Logits:
    """What becomes of logits: `scale` multiplies them, then `cap` > 0 caps them softly to within +-cap."""

    scale: float = 1.0
    cap: float = 0.0


PLAIN_NORMS, PLAIN_EMBEDDING, PLAIN_LOGITS = StoredNorms(), Embedding(), Logits()


@dataclass(frozen=True, slots=True)
class Model:
    """What a family's function makes of a config: the layers, and what is before and behind them.

    config: the keys, completed by what the family knows
    """

    config: Config
    layers: Sequence[LayerSpec]
    norms: StoredNorms = PLAIN_NORMS
    embedding: Embedding = PLAIN_EMBEDDING
    logits: Logits = PLAIN_LOGITS


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

    @property
    def unstated_drafts(self) -> int:
        """Number of draft layers behind the last layer that checkpoints have although no key states it."""
        return int(isinstance(self.mtp, MTPPass) and not self.mtp.counts)
