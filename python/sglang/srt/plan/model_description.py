"""One frozen description of a model, read from its config.json; everything that planning knows of a model is here.

Reads every family whose keys are known, whether or not its model class exists here, so that `explain` can answer for
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sglang.srt.configs.architectures import SUPPORTED, Architecture
from sglang.srt.configs.hf_config import ConfigReader, bounded, select_text_config
from sglang.srt.configs.quant_rules import ModuleQuant, QuantConfig
from sglang.srt.configs.rope import rotary_dim
from sglang.srt.errors import UserError
from sglang.srt.plan.compressed import CompressedSparse
from sglang.srt.plan.families import FAMILIES, FAMILY_OF_ARCHITECTURE, UNREAD_LAYERS, Family
from sglang.srt.plan.feed_forward import CLAMPED, GELU, SILU, Dense, MoE, Shared
from sglang.srt.plan.layer_spec import SUM, HyperConnections, LayerSpec, Matrix, Mixer
from sglang.srt.plan.mixers import GQA, MLA, Indexer
from sglang.srt.plan.recurrent import GatedDelta

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Sizes of the whole model, before it is split over ranks."""

    architecture: str
    model_type: str
    known: bool  # the family is one of FAMILIES; else the usual keys were read as usual
    dtype: str
    hidden_size: int
    vocab_size: int
    tie_embeddings: bool
    layers: tuple[LayerSpec, ...]
    vision_head_dim: int  # 0: text only
    prefix: str  # of a layer's modules in the checkpoint, before its number
    quantization: QuantConfig | None

    @property
    def experts(self) -> MoE | None:
        """The routed experts; layers that have them have the same."""
        return next((layer.ffn for layer in self.layers if isinstance(layer.ffn, MoE)), None)

    @property
    def expert_quant(self) -> ModuleQuant | None:
        """The scheme of the routed experts; None: 16 bits. Raises UserError where there are several."""
        names = ("gate_proj", "up_proj", "down_proj")
        found = {
            self.quant_of(i, [f"mlp.experts.0.{name}"])
            for i, layer in enumerate(self.layers)
            if isinstance(layer.ffn, MoE)
            for name in names
        }
        if len(found) > 1:
            assert self.quantization is not None
            schemes = ", ".join(sorted(quant.scheme if quant else "16 bits" for quant in found))
            raise UserError(
                f"{self.quantization.source}: experts that are quantized in several ways are not supported: {schemes}."
            )
        return next(iter(found), None)

    def quant_of(self, layer: int, modules: Sequence[str]) -> ModuleQuant | None:
        """How the checkpoint stores these modules of a layer, which are multiplied as one. Raises UserError when they
        differ."""
        if self.quantization is None:
            return None
        return self.quantization.of_fused([f"{self.prefix}{layer}.{module}" for module in modules])

    def matrices(self, tp_size: int, expert_rows: int) -> Iterator[tuple[Matrix, ModuleQuant | None]]:
        """Of all layers, with the scheme of each."""
        for i, layer in enumerate(self.layers):
            weights = layer.mixer.weights(self.hidden_size, tp_size)
            weights += layer.ffn.weights(self.hidden_size, tp_size, expert_rows)
            for matrix in weights:
                if isinstance(matrix, Matrix):
                    yield matrix, self.quant_of(i, matrix.modules) if matrix.quantized else None


def describe_model(
    config: Config, quantization: QuantConfig | None, fuse_shared_experts: bool = True
) -> ModelDescription:
    """Of a config.json (multimodal wrappers included) and the quantization that was detected for it.

    Raises UserError naming a key that is missing, out of bounds, or of layers that are not described here.
    """
    keys = ConfigReader(select_text_config(config), "config.json")
    architecture = str((keys.values.get("architectures") or ["unknown"])[0])
    model_type = FAMILY_OF_ARCHITECTURE.get(architecture) or str(keys.values.get("model_type") or "")
    family = FAMILIES.get(model_type.removesuffix("_text"))
    for key, what in UNREAD_LAYERS.items():
        if keys.values.get(key) is not None:
            raise UserError(f"{keys.source}: {key!r} ({what}, model_type {model_type!r}) is not described here yet.")
    known = SUPPORTED.get(architecture, Architecture())
    model = ModelDescription(
        architecture=architecture,
        model_type=model_type,
        known=family is not None,
        dtype=_dtype(keys.values),
        hidden_size=keys.positive("hidden_size"),
        vocab_size=keys.positive("vocab_size"),
        tie_embeddings=keys.default("tie_word_embeddings", bool, known.tie_word_embeddings),
        layers=_layers(keys, family or Family(), known),
        vision_head_dim=_vision_head_dim(config.get("vision_config")),
        prefix=_prefix(quantization, isinstance(config.get("text_config"), Mapping)),
        quantization=quantization,
    )
    return _with_fused_shared(model) if fuse_shared_experts else model


def _dtype(values: Config) -> str:
    return str(values.get("dtype") or values.get("torch_dtype") or "bfloat16").removeprefix("torch.")


def _layers(keys: ConfigReader, family: Family, known: Architecture) -> tuple[LayerSpec, ...]:
    num_layers = keys.positive("num_hidden_layers")
    sparse = sparse_layers(keys, num_layers, keys.count("n_routed_experts", "num_experts", "num_local_experts") > 0)
    streams = keys.count("hc_mult")
    residual = HyperConnections(streams) if streams > 1 else SUM
    dense, experts = None if all(sparse) else _dense(keys), _experts(keys, family) if any(sparse) else None
    mixers = _mixers(keys, family, known, num_layers)
    hashed = keys.count("num_hash_layers")
    layers = []
    for i, (mixer, has_experts) in enumerate(zip(mixers, sparse, strict=True)):
        ffn: Dense | MoE | None = experts if has_experts else dense
        assert ffn is not None
        if isinstance(ffn, MoE) and i < hashed:
            ffn = replace(ffn, hashed=keys.positive("vocab_size") * ffn.top_k, correction=False)
        layers.append(LayerSpec(mixer, ffn, residual))
    return tuple(layers)


# --- mixers -----------------------------------------------------------------------------------------------------------


def _mixers(keys: ConfigReader, family: Family, known: Architecture, num_layers: int) -> list[Mixer]:
    if keys.values.get("compress_ratios") is not None:
        return [_compressed(keys, rate) for rate in _by_layer(keys, "compress_ratios", num_layers, 0)]
    if keys.count("kv_lora_rank"):
        kinds = _by_layer(keys, "indexer_types", num_layers, "full")
        return [_latent(keys, kind == "full") for kind in kinds]
    kinds = _by_layer(keys, "layer_types", num_layers, "full_attention")
    makers: dict[str, Callable[[], Mixer]] = {
        "full_attention": lambda: _grouped(keys, family, known, 0),
        "sliding_attention": lambda: _grouped(keys, family, known, keys.positive("sliding_window")),
        "linear_attention": lambda: _gated_delta(keys),
    }
    unknown = sorted({str(kind) for kind in kinds} - makers.keys())
    if unknown:
        raise UserError(f"{keys.source}: layer_types {', '.join(unknown)} are not described here yet.")
    made: dict[str, Mixer] = {kind: makers[kind]() for kind in dict.fromkeys(kinds)}
    return [made[kind] for kind in kinds]


def _by_layer(keys: ConfigReader, key: str, num_layers: int, default: Any) -> list[Any]:
    """A value for each layer; entries behind them belong to layers that only drafts use."""
    values = keys.default(key, list, [default] * num_layers)
    if len(values) < num_layers:
        raise UserError(f"{keys.source}: {key!r} has {len(values)} entries for {num_layers} layers.")
    return values[:num_layers]


def _grouped(keys: ConfigReader, family: Family, known: Architecture, window: int) -> GQA:
    heads = keys.positive("num_attention_heads")
    default_dim = known.head_dim or max(1, keys.positive("hidden_size") // heads)
    if not window and keys.count("global_head_dim"):
        head_dim, kv_heads = keys.positive("global_head_dim"), keys.count("num_global_key_value_heads")
    else:
        head_dim, kv_heads = keys.positive("head_dim", default_dim), 0
    bias = keys.default("attention_bias", bool, False)
    return GQA(
        num_heads=heads,
        num_kv_heads=kv_heads or keys.positive("num_key_value_heads", known.num_key_value_heads or heads),
        head_dim=head_dim,
        v_head_dim=keys.positive("v_head_dim", head_dim),
        rotary_dim=rotary_dim(keys.values, head_dim),
        window=window,
        qk_norm=family.qk_norm if keys.default("use_qk_norm", bool, True) else "",
        qkv_bias=bias,
        o_bias=bias and family.o_bias,
        output_gate=keys.default("attn_output_gate", bool, False),
        sinks=family.sinks,
        logit_cap=bool(keys.values.get("attn_logit_softcapping")),
        among_recurrent=family.among_recurrent,
    )


def _latent(keys: ConfigReader, owns_indexer: bool) -> MLA:
    indexer = _indexer(keys) if keys.count("index_topk") else None
    return MLA(
        num_heads=keys.positive("num_attention_heads"),
        q_lora_rank=keys.count("q_lora_rank"),
        kv_lora_rank=keys.positive("kv_lora_rank"),
        nope_dim=keys.positive("qk_nope_head_dim"),
        rope_dim=keys.positive("qk_rope_head_dim"),
        v_dim=keys.positive("v_head_dim"),
        sparse=indexer is not None,
        indexer=indexer if owns_indexer else None,
    )


def _indexer(keys: ConfigReader) -> Indexer:
    return Indexer(keys.positive("index_n_heads"), keys.positive("index_head_dim"), keys.positive("index_topk"))


INDEXED_RATE = 4
"""DeepSeek-V4's layers of this compression rate have an indexer; those of a higher one attend to every entry."""


def _compressed(keys: ConfigReader, rate: Any) -> CompressedSparse:
    if isinstance(rate, bool) or not isinstance(rate, int):
        raise UserError(f"{keys.source}: 'compress_ratios' must be whole numbers; got {rate!r}.")
    return CompressedSparse(
        num_heads=keys.positive("num_attention_heads"),
        head_dim=keys.positive("head_dim"),
        rope_dim=keys.positive("qk_rope_head_dim"),
        q_lora_rank=keys.positive("q_lora_rank"),
        o_lora_rank=keys.positive("o_lora_rank"),
        o_groups=keys.positive("o_groups"),
        window=keys.positive("sliding_window"),
        rate=bounded("compress_ratios", rate, keys.source),
        indexer=_indexer(keys) if rate == INDEXED_RATE else None,
    )


def _gated_delta(keys: ConfigReader) -> GatedDelta:
    return GatedDelta(
        key_heads=keys.positive("linear_num_key_heads"),
        value_heads=keys.positive("linear_num_value_heads"),
        key_dim=keys.positive("linear_key_head_dim"),
        value_dim=keys.positive("linear_value_head_dim"),
        conv_kernel=keys.positive("linear_conv_kernel_dim"),
        state_dtype=str(keys.values.get("mamba_ssm_dtype") or "float32"),
    )


# --- feed-forward -----------------------------------------------------------------------------------------------------


def sparse_layers(keys: ConfigReader, num_layers: int, has_experts: bool) -> tuple[bool, ...]:
    """Whether each layer has experts: every `decoder_sparse_step`-th from `first_k_dense_replace` on, but for those of
    `mlp_only_layers`; or as `mlp_layer_types` says."""
    step = keys.positive("decoder_sparse_step", 1) * keys.positive("interleave_moe_layer_step", 1)
    first, dense = keys.count("first_k_dense_replace"), keys.default("mlp_only_layers", list, [])
    kinds = _by_layer(keys, "mlp_layer_types", num_layers, "sparse")
    return tuple(
        has_experts and kinds[i] != "dense" and i >= first and i not in dense and (i + 1) % step == 0
        for i in range(num_layers)
    )


def _gate(keys: ConfigReader) -> str:
    if keys.values.get("swiglu_limit"):
        return CLAMPED
    return GELU if "gelu" in str(keys.values.get("hidden_act") or keys.values.get("hidden_activation")) else SILU


def _dense(keys: ConfigReader) -> Dense:
    size = keys.count("dense_intermediate_size", "intermediate_size_mlp") or keys.positive("intermediate_size")
    return Dense(size, keys.default("mlp_bias", bool, False), _gate(keys))


def _experts(keys: ConfigReader, family: Family) -> MoE:
    size = keys.count("moe_intermediate_size") or keys.positive("intermediate_size")
    return MoE(
        num_experts=keys.count("n_routed_experts", "num_experts", "num_local_experts"),
        top_k=keys.count("num_experts_per_tok", "experts_per_token", "top_k_experts"),
        intermediate_size=size,
        score=str(keys.values.get("scoring_func") or family.router),
        correction=family.correction,
        router_bias=family.router_bias,
        shared=_shared(keys, size),
        bias=family.expert_bias,
        gate=_gate(keys),
    )


def _shared(keys: ConfigReader, expert_size: int) -> Shared | None:
    gated = keys.count("shared_expert_intermediate_size")
    if gated:
        return Shared(gated, "shared_expert", gated=True)
    number = keys.count("n_shared_experts", "num_shared_experts")
    return Shared(number * expert_size) if number else None


def _with_fused_shared(model: ModelDescription) -> ModelDescription:
    """With a shared expert that can be one more of the routed ones held as such (`layers.moe.layer.why_apart`): it has
    no gate, their size, and is stored as they are."""
    layers = tuple(
        replace(layer, ffn=replace(layer.ffn, fused_shared=_can_fuse(model, i, layer.ffn)))
        if isinstance(layer.ffn, MoE)
        else layer
        for i, layer in enumerate(model.layers)
    )
    return replace(model, layers=layers)


def _can_fuse(model: ModelDescription, layer: int, experts: MoE) -> bool:
    shared = experts.shared
    if shared is None or shared.gated or experts.bias or shared.intermediate_size != experts.intermediate_size:
        return False
    parts = ("gate_proj", "up_proj", "down_proj")
    theirs = {model.quant_of(layer, [f"mlp.experts.0.{part}"]) for part in parts}
    return theirs == {model.quant_of(layer, [f"mlp.{shared.module}.{part}"]) for part in parts}


# --- what is beside the layers ----------------------------------------------------------------------------------------


def _vision_head_dim(vision: Any) -> int:
    if not isinstance(vision, Mapping):
        return 0
    keys = ConfigReader(vision, "config.json vision_config")
    hidden, heads = (
        keys.count("vt_hidden_size", "hidden_size"),
        keys.count("vt_num_attention_heads", "num_heads", "num_attention_heads"),
    )
    return hidden // heads if hidden and heads else 0


# The language model's layers in a checkpoint; which of these a multimodal one has, its patterns tell.
_PREFIXES = ("model.layers.", "language_model.model.layers.", "model.language_model.layers.")


def _prefix(quant: QuantConfig | None, multimodal: bool) -> str:
    if quant is None or not multimodal:
        return _PREFIXES[0]
    said = " ".join(pattern.replace("\\", "") for rule in quant.rules for pattern in rule.patterns)
    return next((prefix for prefix in _PREFIXES[1:] if prefix.split(".layers")[0] in said), _PREFIXES[0])
