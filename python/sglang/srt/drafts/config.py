"""Reads which draft the user asks for, and its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.configs.checkpoint_header import stored_dtypes
from sglang.srt.configs.hf_config import ConfigReader, merge_overrides, read_config, select_text_config
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.configs.quant_rules import QuantConfig
from sglang.srt.configs.quantization import agree, detect
from sglang.srt.configs.speculative import DSPARK, EAGLE, NGRAM, UNQUANTIZED, SpeculativeSettings
from sglang.srt.configs.stored_form import stored_narrow
from sglang.srt.errors import UserError
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.weight_names import WeightMap

MTP = "MTP"
"""The kind of drafts that a model's own layers make: EAGLE without a draft model of its own."""
BUNDLED_SIZE = "dspark_block_size"
"""Key for the rows of a block in the config of a model whose checkpoint contains its DSpark draft."""
_DSPARK_FOLDER = "dspark"
"""Name of the subdirectory in which other models' DSpark drafts are."""
SPECULATORS_KIND = "speculators_model_type"
"""Key that only the speculators library writes."""
_SPECULATORS_LAYERS = "transformer_layer_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """The configuration of a draft.

    kind: MTP or one of `configs.speculative.ALGORITHMS`
    values: text part of config.json; for MTP in the target's checkpoint, the target's
    in_target: the draft is in the target's checkpoint
    dummy: no weights are read
    keep_shared_apart: as in `describe_model`
    num_speculative_tokens: most draft tokens that a step verifies
    """

    kind: str
    model_path: str
    values: Mapping[str, Any]
    quantization: QuantConfig | None
    in_target: bool = False
    dummy: bool = False
    keep_shared_apart: str = ""
    num_speculative_tokens: int = 0

    @property
    def source(self) -> str:
        return str(Path(self.model_path) / "config.json")

    def reader(self) -> ConfigReader:
        """Returns a typed reader of the values."""
        return ConfigReader(self.values, self.source)

    def stored(self, names: WeightMap, at: str | tuple[str, ...] = "") -> Mapping[str, str] | None:
        """Returns the dtypes of the checkpoint's tensors whose canonical names begin with `at`, by these names; None:
        there are no weights. Raises UserError for damaged files."""
        if self.dummy:
            return None
        dtypes = stored_dtypes(Path(self.model_path), lambda name: names.canonical(name).startswith(at))
        return None if dtypes is None else {names.canonical(name): dtype for name, dtype in dtypes.items()}


def read_draft_config(
    settings: SpeculativeSettings, model: ModelConfig, download_dir: str | None = None
) -> DraftConfig | None:
    """Reads the draft's configuration; None: nothing drafts, or without weights (NGRAM). Raises UserError for a missing
    or malformed checkpoint."""
    if settings.algorithm == NGRAM:
        return None
    dummy, flag = settings.draft_load_format == "dummy", settings.draft_quantization
    path, kind, draft_flag = settings.draft_path, settings.algorithm, "--speculative-draft-model-path"
    folder = Path(model.model_path)
    if path is not None:
        folder = resolve_model_path(path, settings.draft_revision, download_dir, not dummy, draft_flag)
    if kind == DSPARK:
        keys = ConfigReader(model.hf_config, str(folder)) if path is None else config_keys(folder)
        folder = dspark_folder(folder, keys, path is not None)
    if kind in (DSPARK, EAGLE) and folder.resolve() == Path(model.model_path).resolve():
        return DraftConfig(
            kind=MTP if kind == EAGLE else kind,
            model_path=model.model_path,
            values=model.hf_config,
            quantization=_asked(flag, _without_online(model.quantization), model.model_path),
            in_target=True,
            dummy=dummy,
            num_speculative_tokens=settings.num_steps,
        )
    config = read_config(folder)
    return DraftConfig(
        kind=kind,
        model_path=str(folder),
        values=select_text_config(config),
        quantization=_asked(flag, detect(config, folder), str(folder)),
        dummy=dummy,
        num_speculative_tokens=settings.num_steps,
    )


def dspark_folder(folder: Path, keys: ConfigReader, given: bool) -> Path:
    """Returns the directory of the DSpark draft: `folder`, or one inside it. `keys`: the folder's config; `given`:
    the folder is that of --speculative-draft-model-path, which may be a draft itself. Raises UserError where there
    is none."""
    inner = folder / _DSPARK_FOLDER
    if keys.values.get(BUNDLED_SIZE) is not None:
        return folder
    if (inner / "config.json").is_file():
        return inner
    if not given:
        raise UserError(
            f"{folder} brings no DSpark draft: its config.json has no {BUNDLED_SIZE}, and there is no directory"
            f" {_DSPARK_FOLDER}. Give one with --speculative-draft-model-path, or take NEXTN or NGRAM."
        )
    return folder


def config_keys(folder: Path, overrides: Mapping[str, Any] | None = None) -> ConfigReader:
    """Returns the keys of the text part of a directory's config.json, with `overrides` (--json-model-override-args).
    Raises UserError if there is none."""
    config = merge_overrides(read_config(folder), overrides or {})
    return ConfigReader(select_text_config(config), str(folder / "config.json"))


def with_layer_keys(keys: ConfigReader) -> ConfigReader:
    """Returns the keys merged with those of the layers, whose vocabulary is the target's and whose tied embeddings are
    not the draft's."""
    inner = keys.require(_SPECULATORS_LAYERS, dict)
    outer = {key: value for key, value in keys.values.items() if key != _SPECULATORS_LAYERS}
    return ConfigReader({**inner, **outer, "tie_word_embeddings": False}, keys.source)


def check_sizes(settings: ConfigReader, model: ModelDescription, target: ModelDescription) -> None:
    """Raises UserError where the draft is not computed here, or its sizes are not the target's."""
    if model.unsupported:
        raise UserError("\n".join(model.unsupported))
    wanted = settings.count("target_hidden_size") or target.hidden_size
    if wanted != target.hidden_size:
        raise UserError(
            f"{settings.source}: target_hidden_size is {wanted}, and the model has a hidden size of"
            f" {target.hidden_size}. Give the head that was trained for this model."
        )
    if model.vocab_size != target.vocab_size:
        raise UserError(
            f"{settings.source}: vocab_size is {model.vocab_size}, and the model's {target.vocab_size}. Give the head"
            " that was trained for this model."
        )


def _asked(flag: str | None, stated: QuantConfig | None, path: str) -> QuantConfig | None:
    """Returns the draft's quantization by `flag` (--speculative-draft-model-quantization). Raises UserError that names
    the flag and the checkpoint's statement where they disagree."""
    return None if flag == UNQUANTIZED else agree(flag, stated, path)


def _without_online(quantization: QuantConfig | None) -> QuantConfig | None:
    """Returns the quantization, or None for one that is made while the target is loaded, because drafts stay as
    stored."""
    if quantization is None or any(
        rule.quant is not None and not stored_narrow(rule.quant) for rule in quantization.rules
    ):
        return None
    return quantization
