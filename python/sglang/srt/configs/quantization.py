"""Detects how a checkpoint is quantized, and checks --quantization against it. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang.srt.configs.gguf.quantization import read_gguf
from sglang.srt.configs.gguf.tensors import INDEX_NAME as GGUF_INDEX
from sglang.srt.configs.gguf.tensors import METHOD as GGUF
from sglang.srt.configs.hf_config import read_json_object, select_text_config
from sglang.srt.configs.quant_formats import (
    INT_GROUPS,
    as_deepseek_v4,
    modelopt_cache,
    read_compressed_tensors,
    read_exl3,
    read_fp8,
    read_modelopt,
    read_mxfp4,
    read_mxfp8,
    read_w4afp8,
    unsupported,
    with_fp4_experts,
    with_packed_experts,
)
from sglang.srt.configs.quant_int4 import read_auto_round, read_awq, read_gptq
from sglang.srt.configs.quant_rules import ModuleQuant, QuantConfig, Rule, component
from sglang.srt.configs.stored_form import as_stored
from sglang.srt.errors import UserError

Config = Mapping[str, Any]

READERS: Mapping[str, Callable[[Config, str], QuantConfig]] = {
    "fp8": read_fp8,
    "mxfp8": read_mxfp8,
    "mxfp4": read_mxfp4,
    "compressed-tensors": read_compressed_tensors,
    "modelopt": read_modelopt,
    "modelopt_fp4": read_modelopt,
    "modelopt_fp8": read_modelopt,
    "w4afp8": read_w4afp8,
    "gptq": read_gptq,
    "awq": read_awq,
    "auto-round": read_auto_round,
    "auto_round": read_auto_round,
    "intel/auto-round": read_auto_round,
    "exl3": read_exl3,
    GGUF: read_gguf,
}
"""Readers of a quantization config by `quant_method`."""

_FP8 = frozenset({"fp8_tensor", "fp8_channel", "fp8_block"})
_WEIGHT_ONLY = frozenset(f"int{bits}_g{size}" for bits, sizes in INT_GROUPS.items() for size in sizes)


@dataclass(frozen=True, slots=True)
class Spelling:
    """The checkpoints that a value of --quantization accepts: those of these `methods` whose schemes are all among
    `schemes` (None: any) and include one of `needed` (empty: no condition). `online`: 16-bit checkpoints, too, which
    are quantized while they are loaded."""

    methods: frozenset[str]
    schemes: frozenset[str] | None = None
    online: bool = False
    needed: frozenset[str] = frozenset()

    def fits(self, config: QuantConfig) -> bool:
        """Returns whether the value accepts a checkpoint with this quantization."""
        schemes = config.schemes()
        if self.needed and not self.needed & schemes:
            return False
        return config.method.split()[0] in self.methods and (self.schemes is None or schemes <= self.schemes)


def _spelling(*methods: str, schemes: frozenset[str] | None = None, online: bool = False) -> Spelling:
    return Spelling(frozenset(methods), schemes, online)


SPELLINGS: Mapping[str, Spelling] = {
    "fp8": _spelling("fp8", online=True),
    "w8a8_fp8": _spelling("compressed-tensors", schemes=_FP8, online=True),
    "w8a8_int8": _spelling("compressed-tensors", schemes=frozenset({"int8_channel"})),
    "compressed-tensors": _spelling("compressed-tensors"),
    "modelopt": _spelling("modelopt"),
    "modelopt_fp8": _spelling("modelopt", schemes=_FP8),
    "modelopt_fp4": _spelling("modelopt", schemes=frozenset({"nvfp4"})),
    "modelopt_mixed": _spelling("modelopt"),
    "nvfp4": Spelling(
        frozenset({"modelopt", "compressed-tensors", "fp8", "mxfp8"}), needed=frozenset({"nvfp4", "nvfp4_a16"})
    ),
    "mxfp8": _spelling("mxfp8", "fp8", schemes=frozenset({"mxfp8", "nvfp4_a16"})),
    "mxfp4": _spelling("mxfp4"),
    "w4afp8": _spelling("w4afp8"),
    "gptq": _spelling("gptq"),
    "gptq_marlin": _spelling("gptq", "auto-round"),
    "awq": _spelling("awq"),
    "awq_marlin": _spelling("awq"),
    "auto-round": _spelling("auto-round"),
    "exl3": _spelling("exl3"),
    GGUF: _spelling(GGUF),
    "moe_wna16": _spelling("gptq", "awq", "auto-round", "compressed-tensors", schemes=_WEIGHT_ONLY),
}
"""Values of --quantization. Each names a checkpoint's format: the kernel follows from the GPU."""

_BLOCKS = (
    *("self_attn", "linear_attn", "mixer", "mlp", "block_sparse_moe", "feed_forward", "experts"),
    *("moe", "share_expert"),
)
"""Names of the modules that hold a layer's projections, in the checkpoints of the families."""

EXPERT_PRECISIONS: Mapping[str, str] = {"bf16": "mxfp4", "fp8": "mxfp4_mxfp8"}
"""Values of --flashinfer-mxfp4-moe-precision except "default", and the scheme of MXFP4 experts with them."""


def quantization_of(
    config: Config, directory: Path, flag: str | None, precision: str, dummy: bool = False
) -> QuantConfig | None:
    """Returns the quantization to serve, by config.json, --quantization (`flag`) and --flashinfer-mxfp4-moe-precision
    (`precision`); None: 16 bits. `dummy`: the checkpoint's tensors are not looked at. Raises UserError."""
    stated = agree(flag, detect(config, directory), str(directory))
    result = with_expert_precision(precision, stated, str(directory))
    return result if dummy else as_stored(result, directory)


def detect(config: Config, directory: Path) -> QuantConfig | None:
    """Returns the quantization that the checkpoint in `directory` with this config.json states; None: it is not
    quantized.

    Looks at quantization_config, then compression_config (outside or inside of a multimodal model's text part), then at
    ModelOpt's hf_quant_config.json. Raises UserError for what is malformed or not supported.
    """
    stated = _stated(config, directory)
    if stated is None:
        return None
    values, source = stated
    method = _method(values, source)
    if method not in READERS:
        raise unsupported(source, f"quant_method {method!r} (has {', '.join(READERS)})")
    result = READERS[method](values, source)
    if method == "modelopt" and result.kv_cache is None:
        result = replace(result, kv_cache=_modelopt_cache(directory))
    text = select_text_config(config)
    if result.method == "mxfp8":
        return with_packed_experts(result, values)
    if result.method != "fp8":
        return result
    if text.get("model_type") in DEEPSEEK_V4_TYPES:
        result = as_deepseek_v4(result)
    stated_type = text.get("expert_dtype") or values.get("expert_dtype")
    return with_fp4_experts(result, values) if stated_type == "fp4" else result


DEEPSEEK_V4_TYPES = ("deepseek_v4", "deepseek_ref")
"""Values of `model_type` whose checkpoints have names of their own for scales."""


def _stated(config: Config, directory: Path) -> tuple[Config, str] | None:
    file = directory / "config.json"
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            value = part.get(key)
            if value is not None and not isinstance(value, Mapping):
                raise UserError(f"{file}: {key!r} must be an object; got {value!r}.")
            if value:
                return value, f"{file} {key}"
    modelopt = directory / "hf_quant_config.json"
    if not modelopt.is_file():
        return None
    values = read_json_object(modelopt)
    if not isinstance(values.get("quantization"), Mapping):
        raise UserError(f"{modelopt}: 'quantization' must be an object; got {values.get('quantization')!r}.")
    inner = values["quantization"]
    states = inner.get("quant_algo") or modelopt_cache(inner, str(modelopt))
    return ({"quant_method": "modelopt", **values}, str(modelopt)) if states else None


def _modelopt_cache(directory: Path) -> str | None:
    """Reads the cache dtype from hf_quant_config.json, where some exports state it alone."""
    file = directory / "hf_quant_config.json"
    inner = read_json_object(file).get("quantization") if file.is_file() else None
    return modelopt_cache(inner, str(file)) if isinstance(inner, Mapping) else None


def _method(values: Config, source: str) -> str:
    method = values.get("quant_method")
    if method is None and (values.get("quant_algo") or isinstance(values.get("quantization"), Mapping)):
        return "modelopt"  # must be asked first, because modelopt writes config_groups, too
    if method is None and "config_groups" in values:
        return "compressed-tensors"
    if not isinstance(method, str):
        raise UserError(f"{source}: quant_method must name a method; got {method!r}. Known: {', '.join(READERS)}.")
    return method.lower()


def agree(flag: str | None, config: QuantConfig | None, model_path: str) -> QuantConfig | None:
    """Returns the quantization to serve. `flag` (--quantization) may name the checkpoint's but not change it; for a
    16-bit checkpoint, or one in GGUF, it may ask for quantization while loading. Raises UserError that names both when
    they disagree."""
    if flag is None:
        return config
    if flag not in SPELLINGS:
        raise UserError(f"--quantization {flag} is not supported; supported: {', '.join(SPELLINGS)}.")
    spelling = SPELLINGS[flag]
    in_gguf = (Path(model_path) / GGUF_INDEX).is_file()
    if config is None and flag == GGUF and in_gguf:
        return None  # all its weights are dequantized while they are loaded
    if config is not None and in_gguf and spelling.online:
        return online_fp8(flag)
    if config is not None and not config.rules and spelling.online:
        return replace(online_fp8(flag), kv_cache=config.kv_cache)
    if config is None:
        if not spelling.online:
            can = ", ".join(name for name, other in SPELLINGS.items() if other.online)
            raise UserError(
                f"--quantization {flag}, but the checkpoint {model_path} is not quantized. Remove the flag, give a"
                " checkpoint of that format (python -m sglang.quantize makes some), or quantize while loading with:"
                f" {can}."
            )
        return online_fp8(flag)
    if spelling.fits(config):
        return config
    schemes = ", ".join(sorted(config.schemes()))
    raise UserError(
        f"--quantization {flag} does not fit the checkpoint, which is {config.method} ({schemes}) according to"
        f" {config.source}. Remove the flag: the format is detected."
    )


def with_expert_precision(precision: str, config: QuantConfig | None, model_path: str) -> QuantConfig | None:
    """Returns the quantization with the activations of MXFP4 experts in `precision` (--flashinfer-mxfp4-moe-precision):
    one of EXPERT_PRECISIONS, or "default" for the checkpoint's. Raises UserError for "fp8" where the checkpoint has no
    MXFP4 experts."""
    wanted = EXPERT_PRECISIONS.get(precision)
    if wanted is None:
        return config
    other = next(scheme for scheme in EXPERT_PRECISIONS.values() if scheme != wanted)
    if config is None or not {wanted, other} & config.schemes():
        if precision == "bf16":  # their activations are in 16 bits anyway
            return config
        raise UserError(
            f"--flashinfer-mxfp4-moe-precision {precision}, but the checkpoint {model_path} has no MXFP4 experts."
            " Remove the flag."
        )
    source = f"{config.source}, experts by --flashinfer-mxfp4-moe-precision {precision}"
    experts = component("experts", source)
    rules: list[Rule] = []
    for rule in config.rules:
        if rule.quant is not None and rule.quant.scheme == other:
            changed = replace(rule.quant, scheme=wanted)
            if rule.patterns == (experts,):
                rules.append(Rule(rule.patterns, changed))
                continue
            rules.append(Rule(tuple(f"(?={experts}$)(?:{pattern})" for pattern in rule.patterns), changed))
        rules.append(rule)
    return replace(config, source=source, rules=tuple(rules))


def online_fp8(flag: str) -> QuantConfig:
    """Returns the quantization that makes e4m3 with one scale a row from 16-bit weights while they are loaded."""
    source = f"--quantization {flag}"
    quant = ModuleQuant("fp8_channel", "online")
    gates = (component("shared_expert_gate", source),)  # a matrix of one row, kept in 16 bits
    blocks = tuple(component(name, source) for name in _BLOCKS)
    return QuantConfig("fp8 (while loading)", source, (Rule(gates, None), Rule(blocks, quant)))
