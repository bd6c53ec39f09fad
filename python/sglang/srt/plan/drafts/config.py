"""Reads which draft the user asks for, and its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang.srt.configs.checkpoint_header import stored_dtypes
from sglang.srt.configs.hf_config import ConfigReader, read_config, select_text_config
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.configs.quant_rules import ModuleQuant, QuantConfig, Rule
from sglang.srt.configs.quantization import agree, detect
from sglang.srt.configs.speculative import EAGLE, NGRAM, UNQUANTIZED, SpeculativeSettings
from sglang.srt.plan.weight_names import WeightMap

MTP = "MTP"
"""The kind of drafts that a model's own layers make: EAGLE without a draft model of its own."""
_WIDE = frozenset({"F64", "F32", "F16", "BF16"})
_EXPERTS = ".experts."
_STACKED = ("gate_up_proj", "down_proj")
"""Names of tensors that hold all experts and are stored without `.weight`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """The configuration of a draft. `kind`: MTP or one of `configs.speculative.ALGORITHMS`. `values`: the text part of
    config.json, which for MTP in the target's checkpoint is the target's. `dummy`: no weights are read.
    `keep_shared_apart`: as in `describe_model`."""

    kind: str
    model_path: str
    values: Mapping[str, Any]
    quantization: QuantConfig | None
    in_target: bool = False
    dummy: bool = False
    keep_shared_apart: str = ""

    @property
    def source(self) -> str:
        return str(Path(self.model_path) / "config.json")

    def reader(self) -> ConfigReader:
        return ConfigReader(self.values, self.source)

    def stored(self, names: WeightMap, at: str = "") -> Mapping[str, str] | None:
        """Returns the types of the checkpoint's tensors below `at`, by their canonical names; None: there are no
        weights to look at. Raises UserError for damaged files."""
        if self.dummy:
            return None
        dtypes = stored_dtypes(Path(self.model_path), lambda name: names.canonical(name).startswith(at))
        return None if dtypes is None else {names.canonical(name): dtype for name, dtype in dtypes.items()}


def read_draft_config(
    settings: SpeculativeSettings, model: ModelConfig, download_dir: str | None = None, weights: bool = True
) -> DraftConfig | None:
    """Reads the configuration of the draft; None: nothing drafts that has weights. Raises UserError for a checkpoint
    that is missing or malformed."""
    if settings.algorithm == NGRAM:
        return None
    dummy, flag = settings.draft_load_format == "dummy", settings.draft_quantization
    path = settings.draft_path
    if path is None or (settings.algorithm == EAGLE and _same(path, model.model_path)):
        return DraftConfig(
            kind=MTP,
            model_path=model.model_path,
            values=model.hf_config,
            quantization=_asked(flag, _as_stored(model.quantization), model.model_path),
            in_target=True,
            dummy=dummy,
        )
    draft_flag, with_weights = "--speculative-draft-model-path", weights and not dummy
    folder = resolve_model_path(path, settings.draft_revision, download_dir, with_weights, draft_flag)
    config = read_config(folder)
    return DraftConfig(
        kind=settings.algorithm,
        model_path=str(folder),
        values=select_text_config(config),
        quantization=_asked(flag, detect(config, folder), str(folder)),
        dummy=dummy,
    )


def _same(path: str, other: str) -> bool:
    return Path(path).expanduser().resolve() == Path(other).resolve()


def _asked(flag: str | None, stated: QuantConfig | None, path: str) -> QuantConfig | None:
    """Returns the draft's quantization by --speculative-draft-model-quantization. Raises UserError naming the flag and
    the checkpoint's statement where they disagree."""
    return None if flag == UNQUANTIZED else agree(flag, stated, path)


def _as_stored(quantization: QuantConfig | None) -> QuantConfig | None:
    """Returns None for quantization that is made while the target is loaded: drafts stay as the checkpoint has them."""
    if quantization is None or any(rule.quant and not _stored_narrow(rule.quant) for rule in quantization.rules):
        return None
    return quantization


def stored_wide(quantization: QuantConfig | None, stored: Mapping[str, str] | None) -> QuantConfig | None:
    """Returns the rules without modules that the checkpoint has in 16 bits whatever the rules say: exports that
    quantize a model leave its draft layers as they were, and do not always list them."""
    if quantization is None or stored is None:
        return quantization
    modules = {_module(name): dtype in _WIDE for name, dtype in stored.items()}
    kept = {name for name, wide in modules.items() if name and wide and _stored_narrow(quantization.of(name))}
    # Experts are asked for as one, with shared ones that may be held among them.
    experts = {name[: name.index(_EXPERTS) + len(_EXPERTS) - 1] for name in kept if _EXPERTS in name}
    narrow = {name for name, wide in modules.items() if not wide}
    kept |= {group for group in experts if not any(name.startswith(f"{group}.") for name in narrow)}
    return replace(quantization, rules=(Rule((), None, frozenset(kept)), *quantization.rules)) if kept else quantization


def _stored_narrow(quant: ModuleQuant | None) -> bool:
    return quant is not None and quant.storage != "online"


def _module(name: str) -> str:
    """Returns the module whose weight the tensor is; "" for tensors that no product takes."""
    module, _, leaf = name.rpartition(".")
    return module if leaf == "weight" or leaf in _STACKED else ""
