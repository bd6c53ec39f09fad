"""Reads the layers of a model from its config.json (`read_layers`), by the usual keys and a family's facts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sglang.srt.configs.activation import FUNCTIONS, SILU_FUNCTION, Activation
from sglang.srt.configs.hf_config import ConfigReader, bounded
from sglang.srt.configs.rope import RopeSpec, by_layer_type, rope_spec, unrotated
from sglang.srt.errors import UserError
from sglang.srt.plan.compressed import CompressedSparse
from sglang.srt.plan.config_blocks import (
    BLOCK_SPARSE,
    POOLED_SPELLINGS,
    SPELLINGS,
    block_indexer,
    block_sparse_layers,
    pooled_sparse,
)
from sglang.srt.plan.config_chunks import chunked_mixers
from sglang.srt.plan.config_pooled_latent import pooled_latent_mixers
from sglang.srt.plan.config_projections import projection_tp_blocks
from sglang.srt.plan.config_recurrent import gated_delta, kimi_delta, kimi_delta_layers, mamba2
from sglang.srt.plan.config_relative import relative_mixers, short_convolution
from sglang.srt.plan.config_shared_sparse import shared_sparse_mixers
from sglang.srt.plan.config_sharing import (
    Override,
    attn_temperature_scaling,
    enumerated,
    layer_overrides,
    per_layer_embedding,
    with_double_wide_mlp,
    with_limits,
    with_shared_caches,
)
from sglang.srt.plan.config_streams import ngram_embeddings, residual_streams
from sglang.srt.plan.engram import engrams
from sglang.srt.plan.families.family import Family
from sglang.srt.plan.feed_forward import SCORES, Dense, MoE, Router, Shared
from sglang.srt.plan.layer_spec import ABSENT, LayerSpec, Mixer, Sum
from sglang.srt.plan.mixers import GQA, MLA, Indexer
from sglang.srt.plan.pooled_sparse import PooledSparse

_DENSE_KEYS = ("mlp_layer_types", "first_k_dense_replace", "mlp_only_layers", "decoder_sparse_step")
"""Keys that say which layers have no experts."""
_EXPERT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")


def read_layers(keys: ConfigReader, family: Family, unsupported: list[str], quantized: bool) -> tuple[LayerSpec, ...]:
    """Returns the layers that the keys describe. `quantized`: whether the checkpoint is. Appends messages to
    `unsupported` about what is described but not computed. Raises UserError for keys that cannot be read."""
    if family.one_block_layers:
        return _one_block_layers(keys, family, unsupported)
    num_layers = keys.positive("num_hidden_layers")
    num_experts = _num_experts(keys, family)
    if family.first_dense and not any(keys.values.get(key) for key in _DENSE_KEYS):
        keys = ConfigReader({**keys.values, "first_k_dense_replace": family.first_dense}, keys.source)
    sparse = sparse_layers(keys, num_layers, num_experts > 0)
    residual = residual_streams(keys, family.residual)
    dense = None if all(sparse) else _dense(keys, family)
    experts = _experts(keys, family, num_experts, unsupported) if any(sparse) else None
    mixers = _mixers(keys, family, num_layers, unsupported)
    hashed = keys.count("num_hash_layers")
    inputs = per_layer_embedding(keys, num_layers, _activation(keys, family))
    convolution = short_convolution(keys, keys.positive("hidden_size")) if family.relative_biases else None
    ngrams: dict[int, Any] = {**ngram_embeddings(keys, num_layers, quantized), **engrams(keys, num_layers, quantized)}
    layers = []
    ffns: list[Dense | MoE] = []
    for has_experts in sparse:
        block = experts if has_experts else dense
        assert block is not None
        ffns.append(block)
    for i, (mixer, ffn) in enumerate(zip(mixers, with_limits(ffns, keys, unsupported), strict=True)):
        if isinstance(ffn, MoE) and i < hashed:
            router = replace(ffn.router, hash_table="tid2eid", correction="")
            ffn = replace(ffn, router=router, vocab_size=keys.positive("vocab_size"))
        if isinstance(ffn, MoE) and ffn.branches and isinstance(residual, Sum):
            residual = replace(residual, ffn_norms=False)
        layer = LayerSpec(mixer, ffn, residual, inputs, ngrams.get(i, ABSENT), convolution)
        shares = isinstance(mixer, GQA) and not mixer.caches_tokens
        layers.append(
            with_double_wide_mlp(layer) if shares and keys.default("use_double_wide_mlp", bool, False) else layer
        )
    return tuple(layers)


def _num_experts(keys: ConfigReader, family: Family) -> int:
    if not keys.default("enable_moe_block", bool, True):
        return 0
    return keys.count(*_EXPERT_KEYS) or (keys.positive("num_experts") if family.has_experts else 0)


_BLOCKS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
_BLOCK_SPELLINGS = {"linear_attention": "mamba", "full_attention": "attention"}


def block_kinds(values: Mapping[str, Any], source: str) -> list[str]:
    """Returns the kind of each layer in models with one block a layer ("mamba", "attention", "moe", "mlp"), from
    `layers_block_type` or `layer_types`, or else `hybrid_override_pattern`. Raises UserError."""
    listed = values.get("layers_block_type") or values.get("layer_types")
    kinds = listed if isinstance(listed, list) else list(str(values.get("hybrid_override_pattern") or ""))
    named = [_BLOCK_SPELLINGS.get(str(kind), _BLOCKS.get(str(kind), str(kind))) for kind in kinds]
    unknown = sorted(set(named) - set(_BLOCKS.values()))
    if unknown or not 0 < len(named) <= MAX_LAYERS:
        what = f"kinds {', '.join(unknown)}" if unknown else f"{len(named)} layers"
        raise UserError(f"{source}: the layers' pattern ('hybrid_override_pattern') has {what}, which cannot be read.")
    return named


MAX_LAYERS = 4096


def _one_block_layers(keys: ConfigReader, family: Family, unsupported: list[str]) -> tuple[LayerSpec, ...]:
    """Reads layers of one block each: a mixer or a feed-forward block (Nemotron-H)."""
    rotation = _Rotation(keys, unsupported)
    kinds = block_kinds(keys.values, keys.source)
    makers: dict[str, Callable[[], LayerSpec]] = {
        "mamba": lambda: LayerSpec(mamba2(keys), ABSENT),
        "attention": lambda: LayerSpec(_grouped(keys, family, 0, rotation), ABSENT),
        "mlp": lambda: LayerSpec(ABSENT, _dense(keys, family)),
        "moe": lambda: LayerSpec(ABSENT, _experts(keys, family, keys.positive("n_routed_experts"), unsupported)),
    }
    by_kind = {kind: makers[kind]() for kind in dict.fromkeys(kinds)}
    return tuple(by_kind[kind] for kind in kinds)


# --- mixers -----------------------------------------------------------------------------------------------------------


def _mixers(keys: ConfigReader, family: Family, num_layers: int, unsupported: list[str]) -> list[Mixer]:
    rotation = _Rotation(keys, unsupported)
    if family.compressed:
        if keys.values.get("compress_ratios") is None:
            raise UserError(f"{keys.source}: the key 'compress_ratios' is missing.")
        rates = _by_layer(keys, "compress_ratios", num_layers, 0)
        if family.shared_entries:
            plain, rotated = (_compressed(keys, rate, rotation, indexed_rate=0) for rate in (0, 2))
            return [*shared_sparse_mixers(keys, rates, plain, rotated)]
        return [_compressed(keys, rate, rotation) for rate in rates]
    if family.relative_biases:
        return [*relative_mixers(keys, lambda window: _grouped(keys, family, window, rotation), num_layers)]
    if family.chunks:
        return [*chunked_mixers(keys, _grouped(keys, family, 0, rotation), num_layers)]
    if keys.count("kv_lora_rank") and family.pooled_index:
        indexed = indexed_layers(keys, num_layers)
        return pooled_latent_mixers(keys, indexed, family.decay_bound, unsupported)
    if keys.count("kv_lora_rank"):
        indexed = indexed_layers(keys, num_layers)
        latent = [_latent(keys, family, has_indexer, rotation) for has_indexer in indexed]
        if not family.kimi_delta:
            return [*latent]
        recurrent = kimi_delta_layers(keys, num_layers)
        delta = kimi_delta(keys, unsupported) if any(recurrent) else None
        return [mixer if delta is None or not flag else delta for mixer, flag in zip(latent, recurrent, strict=True)]
    if keys.values.get("use_sliding_window") and keys.values.get("layer_types") is None:
        what = "use_sliding_window = True is not supported without layer_types, which say of which layers"
        unsupported.append(f"{keys.source}: {what}.")
    names = {**SPELLINGS, **POOLED_SPELLINGS}
    kinds = [names.get(str(kind), kind) for kind in _layer_types(keys, family, num_layers)]
    makers: dict[str, Callable[[ConfigReader], Mixer]] = {
        "full_attention": lambda reader: _whole_attention(reader, family, rotation),
        "sliding_attention": lambda reader: _grouped(reader, family, reader.positive("sliding_window"), rotation),
        "linear_attention": lambda reader: gated_delta(reader, family),
        BLOCK_SPARSE: lambda reader: _block_sparse(reader, family, rotation),
    }
    unknown = sorted({str(kind) for kind in kinds} - makers.keys())
    if unknown:
        raise UserError(f"{keys.source}: layer_types {', '.join(unknown)} are not described here yet.")
    written = list(zip(kinds, layer_overrides(keys, num_layers), strict=True))
    mixers: dict[tuple[str, Override], Mixer] = {
        (kind, override): makers[kind](ConfigReader({**keys.values, **dict(override)}, keys.source))
        for kind, override in dict.fromkeys(written)
    }
    return with_shared_caches([mixers[key] for key in written], kinds, keys)


def _layer_types(keys: ConfigReader, family: Family, num_layers: int) -> list[str]:
    blocks = block_sparse_layers(keys, num_layers)
    if blocks is not None:
        return blocks
    listed = keys.values.get("hybrid_layer_pattern")
    if keys.values.get("layer_types") is None and listed is not None:
        windowed = _flags_by_layer(keys, "hybrid_layer_pattern", num_layers)
        return ["sliding_attention" if window else "full_attention" for window in windowed]
    patterns = (
        ("sliding_window_pattern", family.window_pattern, "sliding_attention"),
        ("full_attention_interval", family.recurrent_pattern, "linear_attention"),
    )
    for key, usual, others in patterns:
        pattern = keys.positive(key, usual) if usual else 0
        if pattern and keys.values.get("layer_types") is None:
            return ["full_attention" if (i + 1) % pattern == 0 else others for i in range(num_layers)]
    windows = family.windows_everywhere and keys.count("sliding_window") > 0
    return _by_layer(keys, "layer_types", num_layers, "sliding_attention" if windows else "full_attention")


def _by_layer(keys: ConfigReader, key: str, num_layers: int, default: Any) -> list[Any]:
    """Returns a value for each layer; further entries of the list belong to layers that only drafts use."""
    values = keys.default(key, list, [default] * num_layers)
    if len(values) < num_layers:
        raise UserError(f"{keys.source}: {key!r} has {len(values)} entries for {num_layers} layers.")
    return values[:num_layers]


def _flags_by_layer(keys: ConfigReader, key: str, num_layers: int) -> list[bool]:
    """Returns whether the list of 0 and 1 under `key` has a 1 for each layer. Raises UserError."""
    values = _by_layer(keys, key, num_layers, 0)
    if any(type(value) is not int or value not in (0, 1) for value in values):
        raise UserError(f"{keys.source}: {key!r} must be a list of 0 and 1; got {values!r}.")
    return [value == 1 for value in values]


class _Rotation:
    """Reads rotary embeddings from the config. Forms that are not computed are added to `unsupported` and planned as
    the default."""

    def __init__(self, keys: ConfigReader, unsupported: list[str]) -> None:
        self.keys, self.unsupported = keys, unsupported

    def of(self, head_dim: int, layer_type: str = "", **changes: Any) -> RopeSpec:
        """Returns the rotary embedding for heads of `head_dim`, for layers of `layer_type` where they differ.
        `changes`: keys with other values than the config's."""
        values: Mapping[str, Any] = {**self.keys.values, **changes}
        try:
            return rope_spec(values, head_dim, layer_type)
        except UserError as error:
            if str(error) not in self.unsupported:
                self.unsupported.append(str(error))
            return RopeSpec(head_dim, 0.0, 0)


_WINDOW_KEYS = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
"""Keys for which layers with a window may have their own value, under "swa_" and the name."""


_OTHER_KEYS = {"num_attention_groups": "num_key_value_heads"}
"""Names in Step's "attention_other_setting", and the usual names."""


def _window_keys(keys: ConfigReader, family: Family) -> ConfigReader:
    """Returns the keys with the values that layers with a window have."""
    stated = {key: keys.values.get(f"swa_{key}") for key in _WINDOW_KEYS}
    stated |= {
        _OTHER_KEYS.get(key, key): value
        for key, value in keys.default("attention_other_setting", dict, {}).items()
        if _OTHER_KEYS.get(key, key) in _WINDOW_KEYS
    }
    if stated["num_key_value_heads"] is None and family.window_kv_factor > 1:
        stated["num_key_value_heads"] = family.window_kv_factor * keys.positive("num_key_value_heads")
    return ConfigReader(
        {**keys.values, **{key: value for key, value in stated.items() if value is not None}}, keys.source
    )


def _grouped(keys: ConfigReader, family: Family, window: int, rotation: _Rotation) -> GQA:
    whole, keys = keys, _window_keys(keys, family) if window else keys
    heads = keys.positive("num_attention_heads")
    default_dim = family.head_dim or max(1, keys.positive("hidden_size") // heads)
    values_from_keys = not window and keys.default("attention_k_eq_v", bool, False)
    if not window and keys.count("global_head_dim"):
        head_dim = keys.positive("global_head_dim")
        kv_heads = keys.count("num_global_key_value_heads") if values_from_keys else 0
    else:
        # Nemotron-H's first releases call it attention_head_dim.
        key = "head_dim" if keys.values.get("attention_head_dim") is None else "attention_head_dim"
        head_dim, kv_heads = keys.positive(key, default_dim), 0
    kv_heads = kv_heads or keys.positive("num_key_value_heads", family.num_kv_heads or heads)
    if heads % kv_heads:
        raise UserError(
            f"{keys.source}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}."
        )
    bias = keys.default("attention_bias", bool, False)
    layer_type = ("sliding_attention" if window else "full_attention") if by_layer_type(keys.values) else ""
    changes = _unstated_window_keys(keys, window)
    growth: dict[str, Any] = {}
    if family.attn_temperature_scaling:
        growth, without = attn_temperature_scaling(keys)
        changes = {**changes, **without}
    rotates = family.positions and (window > 0 or not family.positions_in_windows or layer_type != "")
    return GQA(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=keys.positive("v_head_dim", head_dim),
        rope=rotation.of(head_dim, layer_type, **changes) if rotates else unrotated(head_dim),
        scale=_scale(keys, family, head_dim),
        window=window,
        qk_norm=_qk_norm(keys, family),
        fp32_norms=family.zero_centred_norms,
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=bias if family.o_bias is None else family.o_bias,
        output_gate=keys.default("attn_output_gate", bool, family.output_gate),
        gate_projection=family.gate_projection,
        head_gate=family.head_gate,
        softplus_gates=family.softplus_gates,
        sinks=_sinks(keys, family, window),
        value_scale=keys.default("attention_value_scale", float, 1.0),
        logit_cap=keys.default("attn_logit_softcapping", float, 0.0),
        hybrid_kind=family.hybrid_kind,
        value_norm=family.value_norm,
        **growth,
        values_from_keys=values_from_keys,
        is_neox_style=family.is_neox_style,
        tp_blocks=projection_tp_blocks(whole, family, heads, kv_heads),
    )


def _scale(keys: ConfigReader, family: Family, head_dim: int) -> float:
    """Returns the scale of the products of q and k where the config states one; 0: head_dim ** -0.5."""
    scalar, factor = (keys.default(key, float, 0.0) for key in ("query_pre_attn_scalar", "qk_scale_factor"))
    if factor:  # q's factor, which cannot be in the norms because these have no weights
        return factor * float((scalar or head_dim) ** -0.5)
    return float(scalar**-0.5) if scalar else family.attention_scale


def _whole_attention(keys: ConfigReader, family: Family, rotation: _Rotation) -> GQA | PooledSparse:
    """Reads attention without a window: over all tokens, or over blocks that an indexer selects by pooled keys."""
    heads = _grouped(keys, family, 0, rotation)
    return pooled_sparse(keys, heads) if family.pooled_index else heads


def _block_sparse(keys: ConfigReader, family: Family, rotation: _Rotation) -> GQA:
    mixer = _grouped(keys, family, 0, rotation)
    return replace(mixer, indexer=block_indexer(keys, mixer.num_kv_heads, rotation.unsupported))


def _sinks(keys: ConfigReader, family: Family, window: int) -> bool:
    key = "add_swa_attention_sink_bias" if window else "add_full_attention_sink_bias"
    return keys.default(key, bool, family.sinks or (family.window_sinks and window > 0))


_WINDOW_THETAS = ("rope_local_base_freq", "swa_rope_theta")


def _unstated_window_keys(keys: ConfigReader, window: int) -> dict[str, Any]:
    """Returns the keys that differ for layers with a window, in configs that do not say so by layer type."""
    theta = next((keys.values[key] for key in _WINDOW_THETAS if keys.values.get(key) is not None), None)
    return {"rope_theta": theta, "rope_scaling": None} if window and theta is not None else {}


def _qk_norm(keys: ConfigReader, family: Family) -> str:
    return family.qk_norm if not family.optional_qk_norm or keys.default("use_qk_norm", bool, True) else ""


_INDEXER_KINDS = {"F": "full", "S": "shared"}
SPARSE_LAYER = "deepseek_sparse_attention"
"""Name in `layer_types` of layers with an indexer."""


def indexed_layers(keys: ConfigReader, num_layers: int) -> list[bool]:
    """Returns whether each layer has an indexer of its own; the others take the selection of the last layer before that
    has one. Read from `indexer_types`, or `index_topk_pattern` ("FSSS..."), or else every `index_topk_freq`-th layer
    from layer `index_skip_topk_offset` - 1 on. Raises UserError."""
    pattern = keys.values.get("index_topk_pattern")
    if keys.values.get("indexer_types") is not None:
        kinds = _by_layer(keys, "indexer_types", num_layers, "full")
    elif pattern is not None:
        kinds = [_INDEXER_KINDS.get(str(kind), str(kind)) for kind in pattern][:num_layers]
    else:
        every, offset = keys.count("index_topk_freq") or 1, keys.default("index_skip_topk_offset", int, 2)
        kinds = ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(num_layers)]
    unknown = sorted({str(kind) for kind in kinds} - set(_INDEXER_KINDS.values()))
    if unknown or len(kinds) != num_layers or kinds[0] != "full":
        problem = f"kinds {', '.join(unknown)}" if unknown else f"{len(kinds)} kinds for {num_layers} layers"
        if not unknown and len(kinds) == num_layers:
            problem = "a first layer that takes a selection, and no layer before it makes one"
        raise UserError(f"{keys.source}: 'indexer_types' (or 'index_topk_pattern') has {problem}.")
    return [kind == "full" for kind in kinds]


def _latent(keys: ConfigReader, family: Family, has_indexer: bool, rotation: _Rotation) -> MLA:
    is_neox_style = not keys.default("indexer_rope_interleave", bool, not family.indexer_is_neox_style)
    indexer = _indexer(keys, is_neox_style) if keys.count("index_topk") else None
    others = {str(kind) for kind in keys.default("layer_types", list, [])} - {SPARSE_LAYER}
    if indexer is not None and others:
        raise UserError(f"{keys.source}: layer_types {', '.join(sorted(others))} are not described here yet.")
    rope_dim = keys.positive("qk_rope_head_dim")
    growth, changes = attn_temperature_scaling(keys) if family.attn_temperature_scaling else ({}, {})
    # This factor is the rotary key's share of a head, and all of the rotary key rotates.
    changes.get("rope_parameters", {}).pop("partial_rotary_factor", None)
    return MLA(
        num_heads=keys.positive("num_attention_heads"),
        q_lora_rank=keys.count("q_lora_rank"),
        kv_lora_rank=keys.positive("kv_lora_rank"),
        nope_dim=keys.positive("qk_nope_head_dim"),
        rope_dim=rope_dim,
        v_dim=keys.positive("v_head_dim"),
        rope=rotation.of(rope_dim, **changes) if family.positions else unrotated(rope_dim),
        is_neox_style=not keys.default("rope_interleave", bool, True),
        top_k=indexer.top_k if indexer is not None else 0,
        indexer=indexer if has_indexer else None,
        **growth,
    )


def _indexer(keys: ConfigReader, is_neox_style: bool = True) -> Indexer:
    heads, dim = keys.positive("index_n_heads"), keys.positive("index_head_dim")
    return Indexer(heads, dim, keys.positive("index_topk"), is_neox_style)


INDEXED_RATE = 4
"""DeepSeek-V4's layers of this compression rate have an indexer; those of a higher one attend to every entry."""


def _compressed(
    keys: ConfigReader, rate: Any, rotation: _Rotation, indexed_rate: int = INDEXED_RATE
) -> CompressedSparse:
    if isinstance(rate, bool) or not isinstance(rate, int) or rate == 1:
        raise UserError(f"{keys.source}: 'compress_ratios' must be 0 or whole numbers above 1; got {rate!r}.")
    rope_dim, groups = keys.positive("qk_rope_head_dim"), keys.positive("o_groups")
    heads = keys.positive("num_attention_heads")
    if heads % groups:
        raise UserError(f"{keys.source}: 'o_groups' {groups} does not divide the {heads} attention heads.")
    return CompressedSparse(
        num_heads=heads,
        head_dim=keys.positive("head_dim"),
        rope_dim=rope_dim,
        q_lora_rank=keys.positive("q_lora_rank"),
        o_lora_rank=keys.positive("o_lora_rank"),
        o_groups=groups,
        window=keys.positive("sliding_window"),
        rope=rotation.of(rope_dim, **_compression_keys(keys, rate)),
        rate=bounded("compress_ratios", rate, keys.source),
        indexer=_indexer(keys) if rate == indexed_rate != 0 else None,
        head_norm=keys.default("q_head_norm", bool, indexed_rate != 0),
    )


def _compression_keys(keys: ConfigReader, rate: int) -> dict[str, Any]:
    """Returns the rotation settings of a layer with this compression rate. Layers that do not compress use the plain
    frequencies; those that compress do not scale cosines and sines, whatever YaRN says."""
    if not rate:
        return {"rope_scaling": None}
    scaling = keys.default("rope_scaling", dict, {})
    unscaled = {"rope_scaling": {**scaling, "attention_factor": 1.0}} if scaling else {}
    return {"rope_theta": keys.values.get("compress_rope_theta") or 160000.0, **unscaled}


# --- feed-forward -----------------------------------------------------------------------------------------------------


def sparse_layers(keys: ConfigReader, num_layers: int, has_experts: bool) -> tuple[bool, ...]:
    """Returns whether each layer has experts: every `decoder_sparse_step`-th from `first_k_dense_replace` on, without
    those of `mlp_only_layers`; or as `mlp_layer_types` or a list in `moe_layer_freq` says."""
    listed_experts = keys.values.get("moe_layers_enum")
    step = keys.positive("decoder_sparse_step", 1)
    if listed_experts is None:
        step *= keys.positive("interleave_moe_layer_step", 1)
    first, dense = keys.count("first_k_dense_replace"), keys.default("mlp_only_layers", list, [])
    kinds = _by_layer(keys, "mlp_layer_types", num_layers, "sparse")
    if listed_experts is not None and keys.values.get("mlp_layer_types") is None:
        kinds = enumerated(listed_experts, num_layers, keys.source)
    if isinstance(keys.values.get("moe_layer_freq"), list):
        listed = _flags_by_layer(keys, "moe_layer_freq", num_layers)
        kinds = ["sparse" if has_experts else "dense" for has_experts in listed]
    return tuple(
        has_experts and kinds[i] != "dense" and i >= first and i not in dense and (i + 1) % step == 0
        for i in range(num_layers)
    )


def _activation(keys: ConfigReader, family: Family) -> Activation:
    name = keys.values.get("hidden_act") or keys.values.get("hidden_activation")
    function = FUNCTIONS.get(str(name), SILU_FUNCTION) if name else family.activation.function
    limit = keys.default("swiglu_limit", float, family.activation.limit or 0.0)
    alpha = keys.default("swiglu_alpha", float, family.activation.alpha)
    return replace(family.activation, function=function, alpha=alpha, limit=limit or None)


def _dense(keys: ConfigReader, family: Family) -> Dense:
    size = keys.count("dense_intermediate_size", "intermediate_size_mlp") or keys.positive("intermediate_size")
    return Dense(
        size,
        keys.default("mlp_bias", bool, False),
        _activation(keys, family),
        joined=family.joined_gate_up,
        alternating=family.alternating_gate_up,
        scaled=family.scaled_mlp,
    )


def _score(keys: ConfigReader, template: Router) -> str:
    score = keys.values.get("scoring_func") or template.score
    if score not in SCORES:
        raise UserError(f"{keys.source}: 'scoring_func' must be one of {', '.join(SCORES)}; got {score!r}.")
    return str(score)


def _experts(keys: ConfigReader, family: Family, num_experts: int, unsupported: list[str]) -> MoE:
    size = keys.count("moe_intermediate_size") or keys.positive("intermediate_size")
    template = family.router
    ungrouped = keys.values.get("topk_method") == "greedy"
    router = replace(
        template,
        top_k=keys.count("num_experts_per_tok", "experts_per_token", "top_k_experts"),
        score=_score(keys, template),
        renormalize=keys.default("norm_topk_prob", bool, template.renormalize),
        scale=keys.default("routed_scaling_factor", float, template.scale),
        num_groups=1 if ungrouped else keys.count("n_group") or 1,
        top_groups=1 if ungrouped else keys.count("topk_group") or 1,
    )
    shared = Shared(keys.positive("intermediate_size")) if family.expert_branches else _shared(keys, size)
    if family.shared_sinks and shared is not None:
        sinks = keys.positive("n_shared_experts")
        router, shared = replace(router, sinks=sinks), replace(shared, members=sinks)
    unsupported += [f"{keys.source}: impossible routing: {what}" for what in router.problems(num_experts)]
    return MoE(
        num_experts=num_experts,
        intermediate_size=size,
        router=router,
        activation=_activation(keys, family),
        bias=family.expert_bias,
        shared=shared,
        form=family.expert_form,
        latent_size=keys.count("moe_latent_size"),
        branches=family.expert_branches,
    )


def _shared(keys: ConfigReader, expert_size: int) -> Shared | None:
    if keys.count("n_shared_experts") and keys.count("moe_shared_expert_intermediate_size"):
        return Shared(keys.count("moe_shared_expert_intermediate_size"))
    if keys.count("share_expert_dim"):
        return Shared(keys.count("share_expert_dim"))
    if keys.count("shared_intermediate_size"):
        return Shared((keys.count("n_shared_experts") or 1) * keys.count("shared_intermediate_size"))
    gated = keys.count("shared_expert_intermediate_size")
    if gated:
        return Shared(gated, gated=True)
    number = keys.count("n_shared_experts", "num_shared_experts")
    return Shared(number * expert_size) if number else None
