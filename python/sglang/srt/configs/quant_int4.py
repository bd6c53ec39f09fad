"""Readers of the published forms of int4, and of int8 beside 16-bit activations: GPTQ, AWQ, and AutoRound, which packs
like either of them. No torch.

They raise UserError as those of `quant_formats` do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from sglang.srt.configs.quant_formats import INT_GROUPS, Config, kept_modules, unsupported
from sglang.srt.configs.quant_rules import EVERY_MODULE, ModuleQuant, QuantConfig, Rule, component, from_regex
from sglang.srt.errors import UserError

_WIDE_BITS = 16


def read_gptq(config: Config, source: str) -> QuantConfig:
    """Reads GPTQ's form: symmetric groups with 4 or 8 bits in natural order, the same numbers as ours in another
    packing. Raises UserError for other forms."""
    form = str(config.get("checkpoint_format") or config.get("format") or "gptq")
    quant = _gptq_quant(config, source, "" if form == "gptq" else f", checkpoint_format {form}")
    head = (Rule((component("lm_head", source),), quant),) if config.get("lm_head") else ()
    rules = (*kept_modules(config, source), *_dynamic(config, source), *head, Rule(EVERY_MODULE, quant))
    return QuantConfig("gptq", source, rules)


def _gptq_quant(config: Config, source: str, more: str = "") -> ModuleQuant:
    bits, size = config.get("bits"), config.get("group_size")
    # A checkpoint without `sym` is symmetric; one that leaves `desc_act` out is in natural order.
    plain = config.get("sym", True) is True and not config.get("desc_act")
    if size not in _groups(bits) or not plain or more:
        described = f"gptq with bits {bits}, group_size {size}, sym {config.get('sym')}, desc_act"
        raise unsupported(source, f"{described} {config.get('desc_act')}{more}")
    return ModuleQuant(f"int{bits}_g{size}", "gptq")


def _groups(bits: object) -> Sequence[int]:
    """Returns the sizes of groups that are read with so many bits, whatever the config says these are."""
    return next((sizes for known, sizes in INT_GROUPS.items() if known == bits), ())


def _dynamic(config: Config, source: str) -> list[Rule]:
    """Reads GPTQModel's exceptions, regular expressions for the beginning of a name. After "-:" the modules are not
    quantized; otherwise the exception's values replace the checkpoint's for them. One without values changes
    nothing."""
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise UserError(f"{source}: dynamic must be an object of patterns; got {dynamic!r}.")
    rules: list[Rule] = []
    for name, values in dynamic.items():
        where = f"{source} dynamic {name}"
        if name.startswith("-:"):
            rules.append(Rule((from_regex(name.removeprefix("-:"), where),), None))
        elif isinstance(values, Mapping) and values:
            quant = _gptq_quant({**config, **values}, where)
            rules.append(Rule((from_regex(name.removeprefix("+:"), where),), quant))
    return rules


def read_awq(config: Config, source: str) -> QuantConfig:
    """Reads AWQ's form: 4-bit groups of 32, 64 or 128, each with a zero point, in the order of its "gemm" kernels."""
    bits, size = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size"))
    zero, form = config.get("zero_point", True), str(config.get("version") or "gemm").lower()
    if bits != 4 or size not in INT_GROUPS[4] or zero is not True or form != "gemm":
        raise unsupported(source, f"awq with bits {bits}, group_size {size}, zero_point {zero}, version {form}")
    quant = ModuleQuant(f"int4_g{size}", "awq", zero_points=True)
    return QuantConfig("awq", source, (*kept_modules(config, source), Rule(EVERY_MODULE, quant)))


_PACKINGS: Mapping[str, tuple[str, bool]] = {
    "auto_round:auto_gptq": ("gptq", False),
    "auto_round:gptq": ("gptq", False),
    "auto_round:auto_awq": ("awq", True),
    "auto_round:awq": ("awq", True),
    "auto_round:llm_compressor": ("compressed-tensors", False),
}
"""(storage, whether groups have zero points of their own) by AutoRound's name of the packing."""


def read_auto_round(config: Config, source: str) -> QuantConfig:
    """Reads AutoRound's form: int4 packed as GPTQ or AWQ does, or as compressed-tensors, with exceptions by name in
    `extra_config`, also of 8 bits."""
    modules: dict[ModuleQuant | None, set[str]] = {}
    by_pattern: list[Rule] = []
    extra = config.get("extra_config") or {}
    if not isinstance(extra, Mapping) or not all(isinstance(values, Mapping) for values in extra.values()):
        raise UserError(f"{source}: extra_config must be an object of modules and their values; got {extra!r}.")
    for name, values in extra.items():
        wide = values.get("bits", config.get("bits")) == _WIDE_BITS
        quant = None if wide else _auto_round_quant({**config, **values}, f"{source} extra_config {name}")
        if re.search(r"[*+?^$()\[\]{}|\\]", name):  # a pattern for a part of a name
            by_pattern.append(Rule((f".*?{from_regex(name, source)}",), quant))
        else:
            modules.setdefault(quant, set()).add(name.strip("."))
    by_name = [Rule((), quant, frozenset(names)) for quant, names in modules.items()]  # there may be hundreds of names
    quant = _auto_round_quant(config, source)
    return QuantConfig("auto-round", source, (*by_name, *by_pattern, Rule(EVERY_MODULE, quant)))


def _auto_round_quant(config: Config, source: str) -> ModuleQuant:
    bits, size, packing = config.get("bits"), config.get("group_size"), str(config.get("packing_format"))
    kind, symmetric = config.get("data_type", "int"), config.get("sym", True)
    storage, zero_points = _PACKINGS.get(packing, ("", False))
    wrong = size not in _groups(bits) or (bits == 8 and zero_points)
    if wrong or kind != "int" or not storage or not (symmetric or zero_points):
        described = f"auto-round with bits {bits}, group_size {size}, sym {symmetric}, data_type {kind}"
        raise unsupported(source, f"{described}, packing_format {packing}")
    return ModuleQuant(f"int{bits}_g{size}", storage, zero_points=zero_points)
