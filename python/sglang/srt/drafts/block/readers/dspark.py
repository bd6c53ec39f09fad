"""DSpark block drafts with their own checkpoint: makes their descriptions from config.json.

Sources: arXiv 2607.05147, the formats in which DeepSeek's DeepSpec writes drafts (keys beside those of the layers:
`Qwen3DSparkModel`, `LingDSparkModel` with the same tensors, and `Gemma4DSparkModel`), and SpecForge's
(`DSparkDraftModel`: keys in `dflash_config`). A draft is DFlash's backbone with a head that biases each draft token by
the token before it. Its embedding and output head are copies of the target's.
"""

from __future__ import annotations

from collections.abc import Mapping

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.configs.speculative import DSPARK, USUAL_DSPARK_SIZE
from sglang.srt.drafts.block.readers.backbone import (
    GEMMA4_DSPARK,
    check_architecture,
    check_aux_layers,
    check_computed,
    describe_block_draft,
    names_of,
    reduced_head,
)
from sglang.srt.drafts.block.readers.dspark_bundled import CONFIDENCE, describe_bundled
from sglang.srt.drafts.block.readers.speculators import BOTH_WAYS
from sglang.srt.drafts.block.spec import IN_WINDOWS, NOWHERE, Block, Confidence, Markov
from sglang.srt.drafts.config import BUNDLED_SIZE, DraftConfig
from sglang.srt.drafts.spec import DraftDescription
from sglang.srt.errors import UserError
from sglang.srt.plan.model_description import ModelDescription

DSPARK_ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel", "LingDSparkModel", GEMMA4_DSPARK)
MARKOV_KINDS = ("vanilla", "gated", "rnn")
_NAMES: Mapping[str, str] = {
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "confidence": CONFIDENCE,
}
_GATES = {"gated": "markov_head.gate_proj", "rnn": "markov_head.joint_proj"}
_TABLES = ("dspark_config", "dflash_config")
_READ = frozenset(
    {
        "block_size", "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type", "sample_from_anchor",
        "enable_confidence_head", "confidence_head_with_markov", "confidence_head_alpha", "num_target_layers",
    }
)  # fmt: skip
"""Keys of these tables that are read, or that say only how the draft was trained."""
_COMPUTED: Mapping[str, tuple[object, ...]] = {
    "projector_type": ("dspark",),
    "attention_mode": ("gqa", "mha"),
    "dspark_backbone_conv_enabled": (False,),
    "is_causal": (False,),
    "causal": (False,),
    "causal_head": (False,),
}
"""Keys that change what a draft computes, with the values that are computed."""


def describe_dspark(config: DraftConfig, target: ModelDescription) -> DraftDescription:
    """Describes a DSpark draft. Raises UserError that names keys which are missing, unknown, or do not match the
    target."""
    keys = config.reader()
    if keys.values.get(BUNDLED_SIZE) is not None:
        return describe_bundled(config, target)
    check_architecture(keys, DSPARK, DSPARK_ARCHITECTURES)
    keys = dspark_keys(keys)
    rank = keys.count("markov_rank")
    kind = keys.default("markov_head_type", str, MARKOV_KINDS[0])
    if kind not in MARKOV_KINDS:
        known = ", ".join(MARKOV_KINDS)
        raise UserError(f"{keys.source}: markov_head_type {kind!r} is not supported; supported: {known}.")
    size = reduced_head(keys, target)
    head = Markov(rank, kind, size) if rank else None
    names = names_of({**_NAMES, "markov_gate": _GATES.get(kind, "")})
    rows, mask_token = block_rows(keys), keys.require("mask_token_id", int)
    aux_layers = check_aux_layers(keys.require("target_layer_ids", list), len(target.layers), keys.source)
    form = Block(
        num_aux_layers=len(aux_layers),
        aux_size=target.hidden_size,
        size=rows,
        mask_token=mask_token,
        vocab_size=target.vocab_size,
        first_row=first_row(keys),
        head=head,
        confidence=_confidence(keys, rank),
        causal=IN_WINDOWS if keys.values.get(BOTH_WAYS) is False else NOWHERE,
    )
    return describe_block_draft(config, target, form, names, aux_layers, size)


def _confidence(keys: ConfigReader, rank: int) -> Confidence | None:
    if not keys.default("enable_confidence_head", bool, False):
        return None
    return Confidence(rank if keys.default("confidence_head_with_markov", bool, True) else 0)


def block_rows(keys: ConfigReader) -> int:
    """Returns the rows of a block."""
    return keys.positive("block_size", USUAL_DSPARK_SIZE)


def first_row(keys: ConfigReader) -> int:
    """Returns the row that makes the first draft token: that of the last sampled token (0), unless the draft was
    trained otherwise (1)."""
    return 0 if keys.default("sample_from_anchor", bool, True) else 1


def dspark_keys(keys: ConfigReader) -> ConfigReader:
    """Returns the keys merged with those of the tables in which some writers put them. Raises UserError for unknown
    keys there, and for drafts that are not computed here."""
    values = dict(keys.values)
    for table in _TABLES:
        inner = keys.default(table, dict, {})
        unknown = sorted(inner.keys() - _READ - _COMPUTED.keys())
        if unknown:
            raise UserError(f"{keys.source}: {table} has unknown keys: {', '.join(unknown)}.")
        values |= inner
    merged = ConfigReader(values, keys.source)
    check_computed(merged, _COMPUTED)
    return merged
