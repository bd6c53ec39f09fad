"""Reads which modules of a model in GGUF stay in four bits. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.configs.gguf.tensors import METHOD
from sglang.srt.configs.quant_rules import ModuleQuant, QuantConfig, Rule, exact_or_inside
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.errors import UserError


def read_gguf(config: Mapping[str, Any], source: str) -> QuantConfig:
    """Reads the quantization config that `unpack` writes: the modules by scheme. Raises UserError for another one."""
    storage, modules = config.get("storage"), config.get("modules")
    if not isinstance(storage, str) or not isinstance(modules, Mapping) or not modules.keys() <= SCHEMES.keys():
        raise UserError(f"{source}: must have a storage and modules by scheme; got {str(config)[:200]}.")
    rules = tuple(
        Rule(tuple(map(exact_or_inside, map(str, names))), ModuleQuant(scheme, storage))
        for scheme, names in modules.items()
    )
    return QuantConfig(METHOD, source, rules)
