"""One frozen description of a model, read once from its config.json. Planning, `explain` and the model itself are made
from it.

Every family whose keys are known is read, served or not, so that `explain` can answer for it; `unsupported` lists what
is not computed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from sglang.srt.blocks.mlp.spec import Dense, up_parts
from sglang.srt.blocks.moe.spec import MoE, why_apart
from sglang.srt.blocks.per_layer_embedding.spec import PerLayerEmbedding
from sglang.srt.configs.hf_config import STORED_VOCABULARY, ConfigReader, select_text_config
from sglang.srt.configs.quant_rules import ModuleQuant, QuantConfig
from sglang.srt.configs.quant_scheme import holds_head
from sglang.srt.errors import UserError
from sglang.srt.plan.equal_layers import distinct, interned
from sglang.srt.plan.families import SERVED_ARCHITECTURES, family_of
from sglang.srt.plan.families.config import Config as FamilyConfig
from sglang.srt.plan.families.family import PLAIN_EMBEDDING, PLAIN_LOGITS, Embedding, Family, Logits
from sglang.srt.plan.families.unread import CHANGING, check_layers, check_unread
from sglang.srt.plan.families.usual import unknown_model
from sglang.srt.plan.layer_spec import LayerSpec
from sglang.srt.plan.media import MediaDescription
from sglang.srt.plan.pooling import Pooling
from sglang.srt.plan.ranks import ONE_RANK
from sglang.srt.plan.transformers_backend.facts import TransformersClass
from sglang.srt.plan.weight_names import WeightMap
from sglang.srt.plan.weight_spec import Matrix

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Sizes of the whole model, before it is split over ranks."""

    architecture: str
    model_type: str
    known: bool  # the family is one of FAMILIES; else the usual keys were read as usual
    unsupported: tuple[str, ...]  # messages about what is not computed here
    dtype: str
    hidden_size: int
    vocab_size: int
    tie_embeddings: bool
    norm_eps: float
    zero_centred_norms: bool
    layers: tuple[LayerSpec, ...]
    vision_head_dim: int  # 0: text only
    names: WeightMap
    quantization: QuantConfig | None
    embedding: Embedding = PLAIN_EMBEDDING
    logits: Logits = PLAIN_LOGITS
    stored_vocab_size: int = 0  # rows of the embedding in checkpoints that pad it; 0: vocab_size
    plain_final_norm: bool = False  # the final norm's weights are not zero-centred, whatever the others are
    first_stage: bool = True
    last_stage: bool = True
    """`first_stage` and `last_stage` tell whether the described stage of a pipeline begins with the embedding and ends
    with the output head."""
    media: MediaDescription | None = None
    """How the model reads images and videos; None: it reads text only, or media are not served."""
    transformers_class: TransformersClass | None = None
    """The class of transformers that computes the model; None: a family of ours does."""
    pooling: Pooling | None = None
    """What the model makes of the hidden states of a text; None: it returns them, and it can generate."""
    shared_apart: str | None = None
    """Why the shared expert is not held as one more routed expert; None if it is, or if there is none."""
    _quants: dict[tuple[int, str, tuple[str, ...], int], ModuleQuant | None] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    """Cache of `quant_of`, by layer, name, parts and experts: every pass over the layers asks."""
    _expert_quants: list[frozenset[ModuleQuant | None]] = field(
        default_factory=list, init=False, compare=False, repr=False
    )
    """Cache of `_quants_of_experts`."""

    @property
    def caches_four_bits(self) -> bool:
        """Returns whether no layer needs more than four bits for an element of its cache, or refuses them by name."""
        return all(layer.mixer.caches_four_bits for layer in self.layers)

    @property
    def title(self) -> str:
        """The architecture, for people, with what computes it if that is no family of ours."""
        return self.architecture if self.transformers_class is None else f"{self.architecture} by transformers"

    @property
    def model_impl(self) -> str:
        """What computes the model, as --model-impl calls it."""
        return "sglang" if self.transformers_class is None else "transformers"

    @property
    def has_embedding(self) -> bool:
        """Returns whether the stage has the embedding. The last stage has a copy where the output head is tied."""
        return self.first_stage or (self.last_stage and self.tie_embeddings)

    @property
    def encodes_media(self) -> bool:
        """Returns whether the stage has an image encoder: the first one does, and so do stages with a layer behind
        which image features are added."""
        return self.media is not None and not all(
            layer.on_other_stage for layer in self.layers[: max(1, self.media.deepstack_levels)]
        )

    @property
    def experts(self) -> MoE | None:
        """The routed experts of the first layer that has some; None: there are none."""
        return next((experts for layer in self.layers if (experts := layer.ffn.experts)), None)

    @property
    def kinds_of_experts(self) -> tuple[MoE, ...]:
        """The routed experts of the layers, of equal ones one: most models have one kind."""
        return tuple(dict.fromkeys(experts for layer in distinct(self.layers) if (experts := layer.ffn.experts)))

    @property
    def per_layer_inputs(self) -> PerLayerEmbedding | None:
        """The embeddings that tokens add in every layer (Gemma 4); None: there are none."""
        inputs: PerLayerEmbedding | None = self.layers[0].inputs.per_layer
        return inputs

    @property
    def expert_quant(self) -> ModuleQuant | None:
        """Quantization of the routed experts, apart from layers that keep them in 16 bits (`wide_experts`); None: all
        are in 16 bits. Raises UserError where layers differ."""
        quants = self._quants_of_experts() - {None}
        if len(quants) > 1:
            assert self.quantization is not None
            schemes = ", ".join(sorted(quant.scheme if quant else "16 bits" for quant in quants))
            raise UserError(
                f"{self.quantization.source}: experts that are quantized in several ways are not supported: {schemes}."
            )
        return next(iter(quants), None)

    @property
    def wide_experts(self) -> bool:
        """Returns whether some layers have experts in 16 bits while others have quantized ones."""
        return self.expert_quant is not None and None in self._quants_of_experts()

    def _quants_of_experts(self) -> frozenset[ModuleQuant | None]:
        """Returns the set of quantizations that layers' routed experts have. Raises UserError where the matrices of one
        layer differ."""
        if not self._expert_quants:
            quants = {
                (quant := self.quant_of(i, matrix)) and quant.alike
                for i, layer in enumerate(self.layers)
                if (experts := layer.ffn.experts)
                for matrix in experts.weights(self.hidden_size, ONE_RANK, experts.intermediate_size)
                if isinstance(matrix, Matrix) and matrix.experts
            }
            self._expert_quants.append(frozenset(quants))
        return self._expert_quants[0]

    @property
    def head_quant(self) -> ModuleQuant | None:
        """Quantization with which the output head is held; None: 16 bits."""
        if self.quantization is None or self.tie_embeddings:
            return None
        quant = self.quantization.named(self.names.model["lm_head"])
        return quant if quant is not None and holds_head(quant.scheme) else None

    def quant_of(self, layer: int, matrix: Matrix) -> ModuleQuant | None:
        """Returns the quantization with which a layer's matrix is held; None: 16 bits, also where its parts are stored
        in different ways. Raises UserError when those of experts differ."""
        if self.quantization is None or not matrix.quantized:
            return None
        asked = (layer, matrix.name, matrix.parts, matrix.experts)
        if asked not in self._quants:
            modules, rules = self._modules(layer, matrix), self.quantization
            self._quants[asked] = rules.fused_quant(modules) if matrix.experts else rules.product_quant(modules)
        return self._quants[asked]

    def _modules(self, layer: int, matrix: Matrix) -> list[str]:
        names = self.names
        if not matrix.experts:
            return [names.layer_module(layer, matrix.name, part) for part in matrix.parts]
        if matrix.name not in names.layer:  # a family that never keeps experts one by one
            return [names.layer_module(layer, "moe.experts")]
        ends = (0, matrix.experts - 1) if matrix.experts > 1 else (0,)
        return [names.layer_module(layer, matrix.name, part, expert) for part in matrix.parts for expert in ends]

    def require_served(self) -> None:
        """Raises UserError that names what is not computed here, if anything is."""
        if self.transformers_class is None and self.architecture not in SERVED_ARCHITECTURES:
            served = ", ".join(SERVED_ARCHITECTURES)
            why = self.unsupported[0] if self.unsupported else not_supported(self.architecture)
            raise UserError(f"{why} Supported: {served}.")
        if self.unsupported:
            raise UserError("\n".join(self.unsupported))


def describe_model(
    config: Config,
    quantization: QuantConfig | None,
    keep_shared_apart: str = "",
    source: str = "config.json",
    text_keys: Collection[str] | None = None,
) -> ModelDescription:
    """Describes the model of a config.json (multimodal wrappers included), whose checkpoint has the detected
    quantization.

    `keep_shared_apart`: the flag that keeps shared experts out of the routed ones, or "". `text_keys`: the keys that
    are about the language model, which must all be read or harmless; None: those of `text_config`, or all. Raises
    UserError that names a key which is missing, out of bounds, or belongs to layers that are not described here. Values
    that are described but not computed are in `unsupported`.
    """
    keys = ConfigReader(select_text_config(config), source)
    architecture, model_type = architecture_of(keys), str(keys.values.get("model_type") or "")
    known = family_of(architecture, model_type)
    family = known or Family(model_types=(model_type,), read=unknown_model)
    multimodal = isinstance(config.get("text_config"), Mapping)
    placed = replace(family, names=family.names.below(_prefix(quantization, multimodal)))
    # Keys beside `text_config` are about the encoder and its projection, which have readers of their own.
    checked = text_keys if text_keys is not None else config["text_config"] if multimodal else keys.values
    model = describe_as(placed, keys, quantization, keep_shared_apart, checked=checked)
    return replace(
        model,
        known=known is not None,
        vision_head_dim=_vision_head_dim(config.get("vision_config")),
        names=without_drafts(model.names, keys, len(model.layers), family.unstated_drafts),
    )


def not_supported(architecture: str) -> str:
    """Returns the message for an architecture of which there is no family."""
    return f"the architecture {architecture} is not supported."


def architecture_of(keys: ConfigReader) -> str:
    """Returns the first entry of "architectures", or "unknown"."""
    architectures = keys.default("architectures", list, [])
    return str(architectures[0]) if architectures else "unknown"


def describe_as(
    family: Family,
    keys: ConfigReader,
    quantization: QuantConfig | None,
    keep_shared_apart: str = "",
    adapt: Callable[[LayerSpec], LayerSpec] | None = None,
    *,
    checked: Collection[str] = CHANGING,
) -> ModelDescription:
    """Describes a model whose keys and checkpoint names are those of the family. `adapt`: makes each layer of the one
    that the family's function reads. `checked`: keys that are refused if nothing reads them (`check_unread`). Raises
    UserError as `describe_model` does."""
    c = FamilyConfig(keys.values, keys.source, quantized=quantization is not None)
    hidden_size, vocab_size = c.positive("hidden_size"), c.positive("vocab_size")
    if c.architecture not in family.architectures:
        c.problem(not_supported(c.architecture))
    try:
        read = family.read(c)
    finally:
        check_layers(c)
    c = read.config
    if c.values.get("rms_norm_eps") is None:
        c.problem("the key 'rms_norm_eps' is missing.")
    tied = c.default("tie_word_embeddings", bool, False)
    eps, stored_vocab_size = c.default("rms_norm_eps", float, 1e-6), c.count(STORED_VOCABULARY)
    check_unread(c, checked)
    layers = read.layers if adapt is None else [adapt(layer) for layer in read.layers]
    model = ModelDescription(
        architecture=c.architecture,
        model_type=str(c.values.get("model_type") or ""),
        known=True,
        unsupported=tuple(c.problems),
        dtype=dtype_of(c.values),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        tie_embeddings=tied,
        norm_eps=eps,
        embedding=read.embedding,
        logits=read.logits,
        stored_vocab_size=stored_vocab_size,
        plain_final_norm=read.norms.plain_final,
        zero_centred_norms=read.norms.zero_centred,
        layers=tuple(layers),
        vision_head_dim=0,
        names=family.names,
        quantization=quantization,
    )
    return with_fused_shared(with_scale_groups(model), keep_shared_apart)


def dtype_of(values: Config) -> str:
    """Returns the dtype that a config.json states."""
    return str(values.get("dtype") or values.get("torch_dtype") or "bfloat16").removeprefix("torch.")


def with_fused_shared(model: ModelDescription, keep_apart: str) -> ModelDescription:
    """Returns the model with each shared expert held as one more routed expert where that is possible, unless
    `keep_apart` says why not."""
    with_shared = {
        i: experts
        for i, layer in enumerate(model.layers)
        if (experts := layer.ffn.experts) and experts.shared is not None
    }
    reasons = (keep_apart or _why_apart(model, i, experts) for i, experts in with_shared.items())
    apart = next((why for why in reasons if why), None)
    layers = list(model.layers)
    for i, experts in with_shared.items():
        layers[i] = replace(layers[i], ffn=replace(experts, fused_shared=apart is None))
    return replace(model, layers=interned(layers), shared_apart=apart)


def with_scale_groups(model: ModelDescription) -> ModelDescription:
    """Returns the model with the checkpoint's scale groups noted in MLPs and shared experts (intermediate dims that
    must stay on one rank) and in q, k and v."""
    if model.quantization is None:
        return model
    layers = []
    for i, layer in enumerate(model.layers):
        rows_of, group_of = partial(_scale_rows, model, i), partial(_scale_group, model, i)
        mixer = layer.mixer.with_scale_rows(rows_of)
        ffn = layer.ffn.with_scale_groups(group_of).with_scale_rows(rows_of)
        layers.append(replace(layer, mixer=mixer, ffn=ffn))
    return replace(model, layers=tuple(layers))


def _scale_rows(model: ModelDescription, layer: int, matrix: Matrix) -> int:
    """Returns the number of contiguous rows of a matrix that share scales."""
    quant = model.quant_of(layer, matrix)
    return max(1, quant.format.group[0]) if quant else 1


def _scale_group(model: ModelDescription, layer: int, prefix: str, mlp: Dense) -> int:
    """Returns the number of contiguous intermediate dims that share scales, as rows of the first product or columns of
    the second."""
    up = model.quant_of(layer, Matrix(f"{prefix}.gate_up", up_parts(mlp.activation), 0, 0))
    down = model.quant_of(layer, Matrix(f"{prefix}.down", ("down",), 0, 0))
    rows, columns = (up.format.group[0] if up else 1), (down.format.group[1] if down else 1)
    return math.lcm(max(rows, 1), max(columns, 1))


def _why_apart(model: ModelDescription, layer: int, experts: MoE) -> str | None:
    if experts.form or experts.bias or experts.branches:
        return why_apart(experts, None, ())
    matrices = [part for part in experts.weights(model.hidden_size, ONE_RANK, 1) if isinstance(part, Matrix)]
    routed = next(model.quant_of(layer, matrix) for matrix in matrices if matrix.experts)
    shared = [model.quant_of(layer, matrix) for matrix in matrices if matrix.name.startswith("moe.shared.")]
    return why_apart(experts, routed, shared)


# --- other parts than the layers --------------------------------------------------------------------------------------


def _vision_head_dim(vision: Any) -> int:
    if not isinstance(vision, Mapping):
        return 0
    keys = ConfigReader(vision, "config.json vision_config")
    hidden, heads = (
        keys.count("vt_hidden_size", "hidden_size"),
        keys.count("vt_num_attention_heads", "num_heads", "num_attention_heads"),
    )
    return hidden // heads if hidden and heads else 0


# Prefixes of the language model's names in checkpoints; the quantization's patterns tell which one a checkpoint has.
_PREFIXES = ("model.", "language_model.model.", "model.language_model.")


def without_drafts(names: WeightMap, keys: ConfigReader, first: int, unstated: int = 0) -> WeightMap:
    """Returns the names with the layers behind the last one marked as unread: only drafts use them (multi-token
    prediction). `unstated`: their number where no key says it."""
    drafts = range(first, first + (keys.count("num_nextn_predict_layers", "num_mtp_modules") or unstated))
    return replace(names, unread=(*names.unread, *(names.layer_prefix.format(layer=i) for i in drafts)))


def _prefix(quant: QuantConfig | None, multimodal: bool) -> str:
    if quant is None or not multimodal:
        return _PREFIXES[0]
    said = " ".join(
        name.replace("\\", "") for rule in quant.rules for name in (*rule.patterns, *sorted(rule.modules)[:1])
    )
    return next((prefix for prefix in _PREFIXES[1:] if prefix.removesuffix(".") in said), _PREFIXES[0])
