"""Corrects a quantization by the tensors of the checkpoint, where its config leaves something open or is wrong. No
torch.

Exporters spell the modules that stay in 16 bits in many ways: by names of fused modules, of modules that the checkpoint
splits, with or without the decoder's prefix, or not at all. A 16-bit weight without scales is not quantized, whatever
they say.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from sglang.srt.configs.checkpoint_header import expanded_name, stored_dtypes, stored_names
from sglang.srt.configs.quant_rules import ModuleQuant, QuantConfig, Rule, component, without_decoder
from sglang.srt.configs.stored_trellises import with_stored_trellises

logger = logging.getLogger(__name__)

_WIDE = frozenset({"F64", "F32", "F16", "BF16"})
_EXPERTS = ".experts."
_STACKED = ("gate_up_proj", "down_proj")
"""Names of tensors that hold all experts and are stored without `.weight`."""
_HEAD = "lm_head"
_STACKED_SCALES = f"{_EXPERTS}gate_up_proj_scale_inv"
_BLOCK_SCALES = ".weight_scale_inv"
"""How names of the scales of FP8 blocks end in DeepSeek's checkpoints, and in some of ModelOpt's."""
STACKED_FP8 = "fp8_stacked"
"""Storage of FP8 experts in one tensor for all of them, as transformers writes them."""
_SCALES = frozenset(
    {"weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "scale", "scales"}
    | {"input_scale", "input_global_scale", "activation_scale", "trellis"}
)


def as_stored(quantization: QuantConfig | None, folder: Path) -> QuantConfig | None:
    """Returns the quantization corrected by the tensors of the checkpoint in `folder`; unchanged where there are none.
    Raises UserError for damaged files."""
    if quantization is None or not any(stored_narrow(rule.quant) for rule in quantization.rules):
        return quantization
    if quantization.trellises is not None:
        quantization = with_stored_trellises(quantization, folder)
    stored = stored_names(folder)
    if stored is not None:
        stored = {expanded_name(name): dtype for name, dtype in stored.items()}
    unclear = _unclear(quantization, stored or {})
    if stored is not None and unclear:
        stored = {**stored, **(stored_dtypes(folder, unclear.__contains__) or {})}
    if stored and not _scaled(stored):
        logger.warning("%s states quantized weights, but none has scales: they are loaded as they are", folder)
    quantization = with_stored_heads(stored_wide(quantization, stored), stored)
    return with_stacked_experts(with_block_scales(quantization, stored), stored)


def _unclear(quantization: QuantConfig, stored: Mapping[str, str]) -> frozenset[str]:
    """Returns the tensors of unknown dtype ("") that the rules call quantized although they have no scales. There are
    few if the rules are right."""
    scaled = _scaled(stored)
    return frozenset(
        name
        for name, dtype in stored.items()
        if not dtype and (module := _module(name)) and module not in scaled and _is_product(module)
        if stored_narrow(quantization.of(module))
    )


def stored_wide(quantization: QuantConfig | None, stored: Mapping[str, str] | None) -> QuantConfig | None:
    """Returns the rules with the modules that the checkpoint has in 16 bits noted as such: exports that quantize a
    model leave its draft layers as they were, and do not always list them."""
    if quantization is None or stored is None:
        return quantization
    scaled = _scaled(stored)
    modules = {_module(name): dtype in _WIDE for name, dtype in stored.items()}
    kept = {
        name
        for name, wide in modules.items()
        if name and wide and name not in scaled and stored_narrow(quantization.of(name))
    }
    # Experts are looked up as one module, including shared ones that may be held among them.
    experts = {name[: name.index(_EXPERTS) + len(_EXPERTS) - 1] for name in kept if _EXPERTS in name}
    narrow = scaled | {name for name, wide in modules.items() if not wide}
    layers = {name.partition(_EXPERTS)[0] for name in narrow if _EXPERTS in name}
    kept |= {group for group in experts if group.removesuffix(_EXPERTS[:-1]) not in layers}
    return replace(quantization, wide=quantization.wide | set(map(without_decoder, kept))) if kept else quantization


def with_stored_heads(quantization: QuantConfig | None, stored: Mapping[str, str] | None) -> QuantConfig | None:
    """Returns the rules with the output heads named that have scales: a rule for all modules does not say whether it
    means them."""
    if quantization is None:
        return quantization
    heads = {module for module in _scaled(stored or ()) if module.rpartition(".")[2] == _HEAD}
    quants = {head: quantization.of(head) for head in sorted(heads) if quantization.named(head) is None}
    rules = tuple(Rule((), quant, frozenset({head})) for head, quant in quants.items() if quant is not None)
    return replace(quantization, rules=(*rules, *quantization.rules))


def with_block_scales(quantization: QuantConfig | None, stored: Mapping[str, str] | None) -> QuantConfig | None:
    """Returns the rules with the storage "fp8" for ModelOpt's FP8 blocks whose scales are called as DeepSeek's."""
    if quantization is None or not any(name.endswith(_BLOCK_SCALES) for name in stored or ()):
        return quantization
    blocks = ModuleQuant("fp8_block", "modelopt")
    rules = (
        replace(rule, quant=replace(blocks, storage="fp8")) if rule.quant == blocks else rule
        for rule in quantization.rules
    )
    return replace(quantization, rules=tuple(rules))


def with_stacked_experts(quantization: QuantConfig | None, stored: Mapping[str, str] | None) -> QuantConfig | None:
    """Returns the rules with the storage STACKED_FP8 for FP8 experts whose scales are one tensor."""
    if quantization is None or not any(name.endswith(_STACKED_SCALES) for name in stored or ()):
        return quantization
    experts = component("experts", quantization.source)
    rules: list[Rule] = []
    for rule in quantization.rules:
        if rule.quant is not None and rule.quant.storage == "fp8":
            patterns = tuple(f"(?={experts}$)(?:{pattern})" for pattern in rule.patterns)
            rules.append(replace(rule, patterns=patterns, quant=replace(rule.quant, storage=STACKED_FP8)))
        rules.append(rule)
    return replace(quantization, rules=tuple(rules))


def _scaled(stored: Iterable[str]) -> set[str]:
    """Returns the modules that have scales among the names."""
    leaves = (name.rpartition(".") for name in stored)
    return {module for module, _, leaf in leaves if leaf in _SCALES or (leaf.startswith(_STACKED) and "scale" in leaf)}


def _is_product(module: str) -> bool:
    """Returns whether rules for all modules may mean the module: norms and embeddings are never quantized."""
    name = module.rpartition(".")[2]
    return "norm" not in name and "embed" not in name


def stored_narrow(quant: ModuleQuant | None) -> bool:
    """Returns whether the checkpoint's tensors are quantized, and not only while they are loaded."""
    return quant is not None and quant.storage != "online"


def _module(name: str) -> str:
    """Returns the module whose weight the tensor is; "" for tensors that are not multiplied."""
    module, _, leaf = name.rpartition(".")
    return module if leaf == "weight" or leaf in _STACKED else ""
