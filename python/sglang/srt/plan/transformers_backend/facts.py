"""Facts about a model class of transformers, found by a run without weights. No torch.

`models.transformers_backend.trial` finds them in a process of its own, and sends them as JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GENERATE, EMBED, CLASSIFY = "generate", "embed", "classify"
"""What a class is asked to do: a causal language model, a class without a head, or one that classifies texts."""


@dataclass(frozen=True, slots=True)
class LinearFact:
    """A linear layer [rows, cols]. name: of the module, in its layer. style: how the class's plan divides it over
    ranks ("colwise", "rowwise", ...); "": the plan does not name it."""

    name: str
    rows: int
    cols: int
    bias: bool
    style: str = ""


@dataclass(frozen=True, slots=True)
class NormFact:
    """An RMS norm over the last dim. plus_one: checkpoints store its weight minus 1."""

    eps: float
    plus_one: bool


@dataclass(frozen=True, slots=True)
class TensorFact:
    """A parameter, or a stored buffer, that no product reads as a matrix. name: as in LinearFact. fp32: it keeps 32
    bits. norm: it is the weight of an RMS norm."""

    name: str
    shape: tuple[int, ...]
    fp32: bool = False
    style: str = ""
    norm: NormFact | None = None


@dataclass(frozen=True, slots=True)
class AttentionFact:
    """The attention of a layer, as the class calls it.

    module: that calls it, in its layer; the others as in `blocks.gqa.spec.GQA`
    window: without causality, a token sees the tokens that are fewer than this away, on both sides
    sinks: the tensor of learned logits, in its layer; "": there are none
    causal: a token sees itself and the tokens before it; else also those behind it
    rotary_dim: dims of queries and keys that the class rotates just before, and that our kernels can rotate instead
    """

    module: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    window: int = 0
    logit_cap: float = 0.0
    sinks: str = ""
    causal: bool = True
    rotary_dim: int = 0


@dataclass(frozen=True, slots=True)
class ExpertsFact:
    """The routed experts of a layer, which the class calls with the chosen experts and their weights.

    module: that is called, in its layer
    function: `configs.activation.FUNCTIONS` has its name
    form: how the class stores them, one of `layers.quantization.experts_fused.FUSED`
    apart: checkpoints store each expert by itself, with these names in its layer; {expert} and {part} stand for parts
    parts: names of gate, up and down in `apart`
    """

    module: str
    num_experts: int
    intermediate_size: int
    top_k: int
    function: str
    form: str
    bias: bool = False
    apart: str = ""
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerFact:
    """A decoder layer: its attention, its products, its other tensors and its experts."""

    attention: AttentionFact
    linears: tuple[LinearFact, ...]
    tensors: tuple[TensorFact, ...]
    experts: ExpertsFact | None = None


@dataclass(frozen=True, slots=True)
class HeadFact:
    """The output head over the vocabulary. name: of the module in the model. tied: its weight is the embedding's."""

    name: str
    rows: int
    bias: bool
    tied: bool


@dataclass(frozen=True, slots=True)
class StagesFact:
    """How stages of a pipeline divide a class's layers. norm: name of the module behind the last one. values: how many
    a layer returns, of which the first is the residual stream; 0: it returns the stream itself."""

    norm: str
    values: int = 0


@dataclass(frozen=True, slots=True)
class TextFacts:
    """How a class that generates no text takes one, and what it makes of it.

    first_position: what it calls the position of the first token
    has_segments: it is told which tokens belong to the second text of a pair
    method: which states the head of a classifier takes (`configs.sentence_modules`); "": there is none
    num_labels: scores of a classifier
    """

    first_position: int = 0
    has_segments: bool = False
    method: str = ""
    num_labels: int = 0


@dataclass(frozen=True, slots=True)
class ClassFacts:
    """A model class with one config.

    layers_at: what module names of layers begin with, with {layer} for the number
    embedding: name of the input embedding
    tensors: parameters outside of layers, besides the embedding and the head
    images: parameters of what encodes images, beside the decoder
    renamings: (pattern, replacement) of names in checkpoints, applied one after the other
    ignored: patterns of names in checkpoints that the class does not read
    base: what names lack in checkpoints without a head
    beginning: what names begin with in checkpoints with a head, of a class without one
    parts: the first components of names; a class without an output head reads no others. Empty: it reads all
    text: of a class that generates no text; None: of a causal language model
    stages: how its layers are divided into the stages of a pipeline; None: they cannot be
    problems: why the class cannot be served; the other facts are then incomplete
    """

    architecture: str
    hidden_size: int = 0
    vocab_size: int = 0
    layers_at: str = ""
    layers: tuple[LayerFact, ...] = ()
    embedding: str = ""
    head: HeadFact | None = None
    tensors: tuple[TensorFact, ...] = ()
    images: tuple[TensorFact, ...] = ()
    renamings: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    base: str = ""
    beginning: str = ""
    parts: tuple[str, ...] = ()
    text: TextFacts | None = None
    stages: StagesFact | None = None
    problems: tuple[str, ...] = ()

    @property
    def encoder_at(self) -> tuple[str, ...]:
        """Beginnings of the names of the modules that encode images."""
        return tuple(dict.fromkeys(".".join(tensor.name.split(".")[:2]) for tensor in self.images))


@dataclass(frozen=True, slots=True)
class ClassRequest:
    """What is asked of the trial: the config's values, where the model is, whether its own code may run, and what the
    class is to do."""

    values: dict[str, Any]
    directory: str
    trust_remote_code: bool = False
    task: str = GENERATE

    @property
    def architecture(self) -> str:
        """The first entry of "architectures"."""
        names = self.values.get("architectures") or ["unknown"]
        return str(names[0])

    @property
    def own_code(self) -> dict[str, str]:
        """The classes that the model's directory brings."""
        classes = self.values.get("auto_map")
        return classes if isinstance(classes, dict) else {}


@dataclass(frozen=True, slots=True)
class TransformersClass:
    """The class that computes a model: what was asked about it, and its facts."""

    request: ClassRequest
    facts: ClassFacts
