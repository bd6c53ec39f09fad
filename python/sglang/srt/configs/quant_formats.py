"""Readers of the published forms of a quantization config, one for each method. No torch.

Each takes the config's object and its name for messages, and returns the rules. Raises UserError that names what is not
supported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sglang.srt.configs.quant_rules import (
    EVERY_MODULE,
    ModuleQuant,
    QuantConfig,
    Rule,
    component,
    exact_or_inside,
    from_regex,
    glob,
)
from sglang.srt.configs.quant_scheme import EXL3, SCHEMES
from sglang.srt.configs.trellis import read_trellises
from sglang.srt.environ import warn_once
from sglang.srt.errors import UserError

Config = Mapping[str, Any]
FP8_KV, FP4_KV = "fp8_e4m3", "fp4_e2m1"
INT_GROUPS: Mapping[int, Sequence[int]] = {4: (32, 64, 128), 8: (32, 128)}
"""Columns that may share a scale, by the bits of integers beside activations of 16 bits."""


def unsupported(source: str, what: str) -> UserError:
    """Returns the error for something that is not supported; the caller raises it."""
    return UserError(f"{source}: {what} is not supported. Supported schemes: {', '.join(SCHEMES)}.")


# --- fp8, mxfp8: the block-scaled checkpoints of DeepSeek, Qwen and MiniMax, and per-tensor ones ----------------------


def read_fp8(config: Config, source: str) -> QuantConfig:
    """Reads the fp8 form: one scale for a weight, or block scales as in the checkpoints of DeepSeek, Qwen and
    MiniMax."""
    activation = config.get("activation_scheme", "dynamic")
    if activation not in ("dynamic", "static"):
        raise unsupported(source, f"activation_scheme {activation!r}")
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise unsupported(source, f"fmt {config['fmt']!r}")
    static = activation == "static"
    block = config.get("weight_block_size")
    experts = _fp4_experts(config, source)
    if block is None:
        quant = ModuleQuant("fp8_tensor", "fp8", static)
    elif static:
        raise unsupported(source, "activation_scheme 'static' with weight_block_size")
    elif block == [128, 128]:
        quant = ModuleQuant("fp8_block", "fp8")
    elif block == [1, 32]:
        quant = ModuleQuant("mxfp8", "mxfp8")
    elif block == [32, 32]:
        quant = ModuleQuant("mxfp8", "deepseek_v41")
    else:
        raise unsupported(source, f"weight_block_size {block!r} (has [128, 128], [32, 32] and [1, 32])")
    # AutoFP8 says "static" of a cache that it has calibrated.
    cache = FP8_KV if config.get("kv_cache_scheme") == "static" else None
    return QuantConfig("fp8", source, (*kept_modules(config, source), *experts, Rule(EVERY_MODULE, quant)), cache)


_FP4_EXPERTS: Mapping[str, ModuleQuant] = {
    "store_dtype": ModuleQuant("mxfp4", "mimo"),
    "routed_experts_quant_method": ModuleQuant("mxfp4", "ling"),
}
"""Keys of the fp8 form with which MiMo-V2.6 and Ling-3.0 say that their routed experts are in MXFP4. DeepSeek-V4's is
elsewhere (`with_fp4_experts`)."""


def _fp4_experts(config: Config, source: str) -> Sequence[Rule]:
    """Returns the rule for routed experts of another number format than the other weights, if a key says so."""
    for key, quant in _FP4_EXPERTS.items():
        if config.get(key) is not None:
            if config[key] != "mxfp4" or config.get("mxfp4_block_size", 32) != 32:
                raise unsupported(source, f"{key} {config[key]!r} in blocks of {config.get('mxfp4_block_size')}")
            return (Rule((component("experts", source),), quant),)
    return ()


def read_w4afp8(config: Config, source: str) -> QuantConfig:
    """Reads W4AFP8: routed experts in int4 beside FP8 activations, other weights in blocks of FP8."""
    size, block = config.get("group_size", 128), config.get("weight_block_size", [128, 128])
    if size not in INT_GROUPS[4] or block != [128, 128]:
        raise unsupported(source, f"w4afp8 with group_size {size}, weight_block_size {block!r}")
    _say_16_bits(source)
    experts = Rule((component("experts", source),), ModuleQuant(f"int4_g{size}", "w4afp8"))
    others = Rule(EVERY_MODULE, ModuleQuant("fp8_block", "fp8"))
    return QuantConfig("w4afp8", source, (*kept_modules(config, source), experts, others))


def _say_16_bits(source: str) -> None:
    """Logs that activations are not rounded to FP8: no kernel multiplies these with four-bit integers."""
    warn_once(f"{source} asks for FP8 activations beside int4 weights: they stay in 16 bits, which is no less exact")


def read_mxfp8(config: Config, source: str) -> QuantConfig:
    """Reads the mxfp8 form: groups of 32 columns with a scale in e8m0."""
    block = config.get("weight_block_size", [1, 32])
    if block != [1, 32]:
        raise unsupported(source, f"mxfp8 with weight_block_size {block!r}")
    quant = ModuleQuant("mxfp8", "mxfp8")
    return QuantConfig("mxfp8", source, (*kept_modules(config, source), Rule(EVERY_MODULE, quant)))


def read_exl3(config: Config, source: str) -> QuantConfig:
    """Reads EXL3, whose tensors say which modules are quantized."""
    quant = ModuleQuant(EXL3.name, "exl3")
    return QuantConfig("exl3", source, (Rule(EVERY_MODULE, quant),), trellises=read_trellises(config, source))


def read_mxfp4(config: Config, source: str) -> QuantConfig:
    """Reads GPT-OSS's form: only experts are quantized, whatever its list of exceptions says."""
    experts = (component("experts", source),)
    return QuantConfig("mxfp4", source, (*kept_modules(config, source), Rule(experts, ModuleQuant("mxfp4", "mxfp4"))))


_V4_EXPERTS = ModuleQuant("mxfp4", "fp8")


def as_deepseek_v4(config: QuantConfig) -> QuantConfig:
    """Returns the config for DeepSeek-V4's checkpoints, which name the scales of FP8 blocks differently."""
    blocks = ModuleQuant("fp8_block", "fp8")
    rules = tuple(
        replace(rule, quant=replace(blocks, storage="deepseek_v4")) if rule.quant == blocks else rule
        for rule in config.rules
    )
    return replace(config, rules=rules)


def with_fp4_experts(config: QuantConfig, values: Config) -> QuantConfig:
    """Returns the config with FP4 experts, which DeepSeek-V4 states outside of the quantization config (expert_dtype)
    and ModelOpt's exports of it inside (`values`, moe_quant_algo)."""
    algorithm = values.get("moe_quant_algo")
    quant = _modelopt_quant({**values, "quant_algo": algorithm}, config.source) if algorithm else _V4_EXPERTS
    experts = (component("experts", config.source),)
    return QuantConfig(
        f"{config.method} with fp4 experts",
        config.source,
        (Rule(experts, quant), *config.rules),
        config.kv_cache,
    )


_PACKED_EXPERTS: Mapping[str | None, ModuleQuant] = {
    "nvfp4-pack-quantized": ModuleQuant("nvfp4_a16", "compressed-tensors"),
}
"""Forms of NVFP4 experts in checkpoints whose other weights are MXFP8. Their activations have dynamic scales, which
products of packed weights do not support: the weights are dequantized and multiplied in 16 bits."""


def with_packed_experts(config: QuantConfig, values: Config) -> QuantConfig:
    """Returns the config with the experts' own quantization, which MiniMax-M3.1's exports state beside the other
    weights' method (moe_quant_algo, moe_quant_format). Raises UserError for unknown forms."""
    algorithm, form = values.get("moe_quant_algo"), values.get("moe_quant_format")
    if not algorithm:
        return config
    quant = _PACKED_EXPERTS.get(form)
    size = values.get("moe_group_size", values.get("group_size", 16))
    if str(algorithm).upper() != "NVFP4" or quant is None or size != 16:
        raise unsupported(
            config.source, f"moe_quant_algo {algorithm!r} with moe_quant_format {form!r}, groups of {size}"
        )
    # The pattern must not match shared experts.
    experts = (r"(?:.*\.)?experts\.\d+\..*",)
    return QuantConfig(
        f"{config.method} with {form} experts",
        config.source,
        (Rule(experts, quant), *config.rules),
        modelopt_cache(values, config.source),
    )


def kept_modules(config: Config, source: str) -> tuple[Rule, ...]:
    """Reads modules_to_not_convert (ignored_layers in some configs) as a rule for 16 bits."""
    names: list[str] = []
    for key in ("modules_to_not_convert", "ignored_layers"):
        names += _names(config, key, source)
    return (Rule(tuple(component(name, source) for name in names), None),) if names else ()


def _names(config: Config, key: str, source: str) -> list[str]:
    value = config.get(key) or []
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(name, str) for name in value):
        raise UserError(f"{source}: {key} must be a list of module names; got {value!r}.")
    return [name for name in value if name]


# --- compressed-tensors -----------------------------------------------------------------------------------------------


def read_compressed_tensors(config: Config, source: str) -> QuantConfig:
    """Reads the compressed-tensors form: groups of modules, each with the scheme of weights and activations."""
    groups, kv_cache = config.get("config_groups"), _kv_of_compressed_tensors(config.get("kv_cache_scheme"), source)
    if not isinstance(groups, Mapping) or not (groups or kv_cache):
        raise UserError(f"{source}: compressed-tensors needs config_groups; got {groups!r}.")
    ignored = tuple(_target(name, source) for name in _names(config, "ignore", source))
    rules = [Rule(ignored, None)] if ignored else []
    general: list[Rule] = []
    for name, group in groups.items():
        where = f"{source} config_groups {name}"
        if not isinstance(group, Mapping):
            raise UserError(f"{where} must be an object; got {group!r}.")
        targets = _names(group, "targets", where)
        if not targets and kv_cache:  # the export quantizes the cache alone
            continue
        if targets and all(target.endswith("Attention") for target in targets):
            # Classes of attention, whose inputs are queries, keys and values; queries stay in 16 bits here.
            kv_cache = kv_cache or _kv_of_compressed_tensors(group.get("input_activations"), where)
            continue
        quant = _group_quant(group, group.get("format") or config.get("format"), where)
        named = tuple(_target(target, where) for target in targets if target != "Linear")
        if named:
            rules.append(Rule(named, quant))
        if "Linear" in targets:  # a class of modules; rules for names take precedence
            general.append(Rule(EVERY_MODULE, quant))
    return QuantConfig("compressed-tensors", source, (*rules, *general), kv_cache)


def _target(name: str, source: str) -> str:
    if name.startswith("re:"):
        return from_regex(name.removeprefix("re:"), source)
    return exact_or_inside(name)


def _group_quant(group: Config, layout: str | None, source: str) -> ModuleQuant:
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    for key, value in (("weights", weights), ("input_activations", inputs or {})):
        if not isinstance(value, Mapping):
            raise UserError(f"{source}: {key} must be an object; got {value!r}.")
    kind = f"{weights.get('type')}{weights.get('num_bits')} per {weights.get('strategy')}"
    size = weights.get("group_size")
    described = f"format {layout}: weights {kind}{f' of {size}' if size else ''}, activations {_describe(inputs)}"
    zero_points = weights.get("symmetric") is False
    if weights.get("actorder") in ("group", "dynamic", True):  # two names of one order
        raise unsupported(source, f"{described}: weights in activation order (actorder)")
    for match, scheme in _COMPRESSED_SCHEMES:
        if match(weights, inputs, layout):
            if scheme.startswith("int4") and inputs is not None:
                _say_16_bits(source)
            if scheme == "int8_channel" and inputs is not None and inputs.get("symmetric") is False:
                warn_once(
                    f"{source} asks for int8 activations with zero points: they are rounded without, like weights"
                )
            if zero_points and not scheme.startswith("int4"):
                raise unsupported(source, f"{described}: asymmetric weights (zero points)")
            if scheme.startswith("fp8_block") and weights.get("block_structure") != [128, 128]:
                raise unsupported(source, f"{described}, block_structure {weights.get('block_structure')!r}")
            static = scheme in ("fp8_tensor", "nvfp4") and inputs is not None and _is_static(inputs, scheme)
            storage = _PLAIN_INT8 if scheme.startswith("int8_g") and layout == _PLAIN_INT8 else "compressed-tensors"
            return ModuleQuant(scheme, storage, static, zero_points)
    raise unsupported(source, described)


def _is_static(inputs: Config, scheme: str) -> bool:
    """Returns whether the scheme's activations have a static factor. NVFP4 has one for the whole activation even where
    the blocks' scales are dynamic ("local")."""
    return scheme == "nvfp4" or inputs.get("dynamic") is False


def _describe(inputs: Config | None) -> str:
    if inputs is None:
        return "in 16 bits"
    dynamic = "dynamic" if inputs.get("dynamic") else "static"
    return f"{inputs.get('type')}{inputs.get('num_bits')} per {inputs.get('strategy')}, {dynamic}"


Match = Callable[[Config, "Config | None", "str | None"], bool]


def _is(
    number: str, bits: int, strategy: str, inputs: tuple[str, int, str] | None, size: int = 0, layout: str = ""
) -> Match:
    """Returns a function that matches a scheme by weights (type, bits, strategy, group size), activations (type, bits,
    strategy; None: 16 bits), and the end of the format's name."""

    def match(weights: Config, given: Config | None, form: str | None) -> bool:
        if (weights.get("type"), weights.get("num_bits"), weights.get("strategy")) != (number, bits, strategy):
            return False
        if (size and weights.get("group_size") != size) or not str(form or "").endswith(layout):
            return False
        if inputs is None or given is None:
            return inputs is None and given is None
        return (given.get("type"), given.get("num_bits"), given.get("strategy")) == inputs

    return match


_TOKEN_FP8 = ("float", 8, "token")
_PLAIN_INT8 = "int-quantized"
"""The format in which a code of 8 bits is an int8, and not a byte of a word."""
_COMPRESSED_SCHEMES: tuple[tuple[Match, str], ...] = (
    (_is("float", 8, "channel", _TOKEN_FP8), "fp8_channel"),
    (_is("float", 8, "tensor", _TOKEN_FP8), "fp8_tensor"),
    (_is("float", 8, "tensor", ("float", 8, "tensor")), "fp8_tensor"),
    (_is("float", 8, "block", ("float", 8, "group")), "fp8_block"),
    (_is("float", 8, "group", ("float", 8, "group"), 32), "mxfp8"),
    (_is("float", 8, "channel", None), "fp8_channel_a16"),
    (_is("float", 8, "tensor", None), "fp8_tensor_a16"),
    (_is("float", 8, "block", None), "fp8_block_a16"),
    (_is("int", 8, "channel", ("int", 8, "token")), "int8_channel"),
    *((_is("int", 8, "group", None, size), f"int8_g{size}") for size in INT_GROUPS[8]),
    *(
        (_is("int", 4, "group", inputs, size, "pack-quantized"), f"int4_g{size}")
        for size in INT_GROUPS[4]
        for inputs in (None, _TOKEN_FP8, ("float", 8, "tensor"))
    ),
    (_is("float", 4, "tensor_group", ("float", 4, "tensor_group"), 16), "nvfp4"),
    (_is("float", 4, "tensor_group", None, 16), "nvfp4_a16"),
    (_is("float", 4, "group", None, 32), "mxfp4"),
    (_is("float", 4, "group", ("float", 8, "group"), 32), "mxfp4_mxfp8"),
)


def _kv_of_compressed_tensors(scheme: Config | None, source: str) -> str | None:
    """Returns `QuantConfig.kv_cache`. A scale by head ("attn_head") becomes the layer's largest when it is loaded."""
    if not scheme:
        return None
    if not isinstance(scheme, dict):
        raise unsupported(source, f"kv_cache_scheme {scheme!r}")
    number, bits, strategy = scheme.get("type", "float"), scheme.get("num_bits"), scheme.get("strategy", "tensor")
    if (number, bits) == ("float", 8) and strategy in ("tensor", "attn_head"):
        return FP8_KV
    return f"kv_cache_scheme {number}{bits} per {strategy}"


# --- ModelOpt ---------------------------------------------------------------------------------------------------------

_MODELOPT: Mapping[str, ModuleQuant] = {
    "FP8": ModuleQuant("fp8_tensor", "modelopt", True),
    "FP8_PER_CHANNEL_PER_TOKEN": ModuleQuant("fp8_channel", "modelopt"),
    "NVFP4": ModuleQuant("nvfp4", "modelopt", True),
    "NVFP4_AWQ": ModuleQuant("nvfp4", "modelopt", True),
    "W4A16_NVFP4": ModuleQuant("nvfp4_a16", "modelopt"),
    "MXFP8": ModuleQuant("mxfp8", "modelopt"),
    "FP8_BLOCK_SCALES": ModuleQuant("fp8_block", "modelopt"),
}
_MODELOPT_GROUPS: Mapping[str, int] = {"nvfp4": 16, "nvfp4_a16": 16, "fp8_block": 128}
"""Columns that share a scale, which an export may state, by scheme."""


def read_modelopt(config: Config, source: str) -> QuantConfig:
    """Reads ModelOpt's form: hf_quant_config.json (`quantization` inside), or what newer exports write to
    config.json."""
    inner = config.get("quantization")
    config = inner if isinstance(inner, Mapping) else config
    algorithm, cache = str(config.get("quant_algo") or "").upper(), modelopt_cache(config, source)
    if cache is not None and not algorithm:  # an export that calibrates the cache alone
        return QuantConfig("modelopt", source, (), cache)
    excluded = [*_names(config, "exclude_modules", source), *_names(config, "ignore", source)]
    rules = [Rule(tuple(_excluded(name, source) for name in excluded), None)] if excluded else []
    if algorithm == "MIXED_PRECISION":
        layers = config.get("quantized_layers")
        if not isinstance(layers, Mapping) or not layers:
            raise UserError(f"{source}: MIXED_PRECISION needs quantized_layers; got {layers!r}.")
        # Names of modules come before patterns: an export may exclude "mtp*" and quantize the experts in there.
        rules = [*_by_layer(layers, f"{source} quantized_layers"), *rules]
    else:
        rules.append(Rule(EVERY_MODULE, _modelopt_quant(config, source)))
    return QuantConfig(f"modelopt {algorithm}", source, tuple(rules), cache)


def _by_layer(layers: Mapping[str, Any], source: str) -> list[Rule]:
    """Returns one rule for each quantization that occurs: where experts are listed one by one there are thousands of
    names."""
    names: dict[ModuleQuant, list[str]] = {}
    for name, layer in layers.items():
        if not isinstance(layer, Mapping):
            raise UserError(f"{source} {name} must be an object with a quant_algo; got {layer!r}.")
        names.setdefault(_modelopt_quant(layer, f"{source} {name}"), []).append(name.strip("."))
    return [Rule((), quant, frozenset(modules)) for quant, modules in names.items()]


def _excluded(name: str, source: str) -> str:
    return from_regex(name.removeprefix("re:"), source) if name.startswith("re:") else glob(name)


def _modelopt_quant(config: Config, source: str) -> ModuleQuant:
    algorithm = str(config.get("quant_algo") or "").upper()
    if algorithm not in _MODELOPT:
        raise unsupported(source, f"quant_algo {config.get('quant_algo')!r} (has {', '.join(_MODELOPT)})")
    encoding = config.get("weight_scale_encoding")
    if encoding not in (None, "csf"):
        raise unsupported(source, f"weight_scale_encoding {encoding!r}")
    quant = _MODELOPT[algorithm]
    group, stated = _MODELOPT_GROUPS.get(quant.scheme), config.get("group_size")
    if None not in (group, stated) and group != stated:
        raise unsupported(source, f"{algorithm} with group_size {stated}")
    return quant


def modelopt_cache(config: Config, source: str) -> str | None:
    """Returns `QuantConfig.kv_cache` of ModelOpt's form. Raises UserError for a malformed one."""
    algorithm, scheme = config.get("kv_cache_quant_algo"), config.get("kv_cache_scheme")
    if isinstance(scheme, str):  # some exports name the algorithm here
        algorithm = algorithm or scheme
    if not algorithm:
        return _kv_of_compressed_tensors(scheme, source)
    return {"FP8": FP8_KV, "NVFP4": FP4_KV}.get(str(algorithm).upper(), f"kv_cache_quant_algo {algorithm!r}")
