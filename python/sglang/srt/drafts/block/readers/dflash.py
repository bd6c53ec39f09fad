"""DFlash block drafts: makes their descriptions from config.json.

Sources: the formats in which z-lab publishes drafts (`DFlashDraftModel`, `DFlash2DraftModel`), with layers like
Qwen3's, and that of Domino drafts (arXiv 2605.29707). `dflash_config` describes what a draft has besides its layers:
nothing, a GRU whose state corrects the draft tokens (`projector_type` "domino"), or convolutions over the rows of a
block and a selector among the likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.configs.speculative import DFLASH, USUAL_BLOCK_SIZE
from sglang.srt.drafts.block.readers.backbone import (
    check_architecture,
    check_aux_layers,
    check_computed,
    describe_block_draft,
    names_of,
    reduced_head,
)
from sglang.srt.drafts.block.readers.laguna import (
    ANCHOR,
    LAGUNA_ARCHITECTURE,
    as_stored,
    with_laguna_names,
)
from sglang.srt.drafts.block.readers.mimo import MIMO_KEYS, TRAINING_KEYS, fit_attention, fit_mimo
from sglang.srt.drafts.block.readers.muse import ASSISTANT_ARCHITECTURE, ASSISTANT_NAMES, fit_assistant
from sglang.srt.drafts.block.readers.speculators import BOTH_WAYS
from sglang.srt.drafts.block.spec import (
    EVERYWHERE,
    IN_WINDOWS,
    NOWHERE,
    Block,
    Convolution,
    Domino,
    Head,
    Selector,
)
from sglang.srt.drafts.config import DraftConfig
from sglang.srt.drafts.spec import DraftDescription
from sglang.srt.errors import UserError
from sglang.srt.plan.model_description import ModelDescription, architecture_of

DFLASH_ARCHITECTURES = (
    "DFlashDraftModel",
    "DFlash2DraftModel",
    "DominoDraftModel",
    ASSISTANT_ARCHITECTURE,
    LAGUNA_ARCHITECTURE,
)
_DOMINO = "domino"
_BACKBONE = frozenset({"mask_token_id", "target_layer_ids", "block_size", "num_target_layers", ANCHOR})
_HEADS: Mapping[str, tuple[str, ...]] = {
    _DOMINO: ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "shift_label"),
    "selector": ("selector_rank", "selector_top_k"),
    "convolution": ("conv_kernel_size", "conv_group_size"),
}
"""Keys of `dflash_config` besides the backbone's, by what they describe."""
_COMPUTED: Mapping[str, tuple[object, ...]] = {
    "projector_type": (_DOMINO, "dflash", "dflash2"),
    "is_causal": (False, True),
    "causal": (False, True),
    "input_embedding_scale": (1, 1.0),
    "output_multiplier": (1, 1.0),
    "final_logit_softcapping": (),
    "video_adapter": (),
}
"""Keys that change what a draft computes, with the values that are computed."""
_HEAD_NAMES: dict[str, str] = {
    "prefix_gru": "prefix_gru",
    "embed_proj.0": "embed_proj.0",
    "embed_proj.2": "embed_proj.2",
    "selector": "candidate_selector",
    "hidden_projection": "candidate_selector.hidden_projection",
}
_CONVOLUTION_NAMES: Mapping[str, str] = {
    f"{ours}{module}": f"{theirs}{module}"
    for ours, theirs in (("attn_conv", "attention_conv"), ("mlp_conv", "mlp_conv"))
    for module in ("", ".kernel_projection")
}


def describe_dflash(config: DraftConfig, target: ModelDescription) -> DraftDescription:
    """Describes a DFlash draft. Raises UserError that names keys which are missing, unknown, or do not match the
    target."""
    keys = config.reader()
    architecture = check_architecture(keys, DFLASH, DFLASH_ARCHITECTURES)
    assistant, laguna = architecture == ASSISTANT_ARCHITECTURE, architecture == LAGUNA_ARCHITECTURE
    if assistant:
        config = replace(config, values=fit_assistant(config.values, target, config.source))
    inner = _settings(keys)
    config = replace(config, values=fit_mimo(config.values, inner, target))
    head, size = _head(inner, target.vocab_size), reduced_head(keys, target)
    if head is not None and size:
        raise UserError(
            f"{keys.source}: draft_vocab_size {size} with a head that corrects draft tokens is not supported."
        )
    rows, mask_token = dflash_rows(keys), inner.require("mask_token_id", int)
    aux_layers = _aux_layers(inner, keys.positive("num_hidden_layers"), len(target.layers))
    form = Block(
        num_aux_layers=len(aux_layers),
        aux_size=target.hidden_size,
        size=rows,
        mask_token=mask_token,
        vocab_size=target.vocab_size,
        first_row=dflash_first_row(keys),
        head=head,
        convolution=_convolution(inner, keys.positive("hidden_size")),
        causal=causal_layers(keys, inner),
        aux_norms=laguna,
        input_norms=laguna,
    )
    names = names_of(_HEAD_NAMES | (ASSISTANT_NAMES if assistant else {}), _CONVOLUTION_NAMES)
    if laguna:
        names = with_laguna_names(names, len(aux_layers))
        config = replace(config, values=as_stored(config, names))
    return describe_block_draft(
        config, target, form, names, aux_layers, size, plain_ends=assistant, fit_attention=partial(fit_attention, inner)
    )


def dflash_rows(keys: ConfigReader) -> int:
    """Returns the rows of a block: `block_size` of `dflash_config`, or else of the config."""
    return _inner(keys).positive("block_size", keys.positive("block_size", USUAL_BLOCK_SIZE))


def dflash_first_row(keys: ConfigReader) -> int:
    """Returns the row that makes the first draft token: 1, the row behind the last sampled token's, or 0 if rows
    propose the token behind their own place."""
    inner = _inner(keys)
    of_anchor = inner.default(ANCHOR, bool, keys.default(ANCHOR, bool, False))
    return 0 if of_anchor or inner.default("shift_label", bool, False) else 1


def causal_layers(keys: ConfigReader, inner: ConfigReader) -> str:
    """Returns in which layers a block's rows see those before them alone (`Block.causal`). Where nothing is stated, in
    those with a window, as other servers compute drafts that were published before the key was. Drafts of MiMo and
    Muse-Glimmer were trained otherwise."""
    for reader in (inner, keys):
        for key in ("causal", "is_causal"):
            if reader.values.get(key) is not None:
                return EVERYWHERE if reader.default(key, bool, False) else NOWHERE
    both_ways = MIMO_KEYS & inner.values.keys() or architecture_of(keys) == ASSISTANT_ARCHITECTURE
    return NOWHERE if both_ways or keys.default(BOTH_WAYS, bool, False) else IN_WINDOWS


def _inner(keys: ConfigReader) -> ConfigReader:
    return ConfigReader(keys.default("dflash_config", dict, {}), f"{keys.source} dflash_config")


def _settings(keys: ConfigReader) -> ConfigReader:
    """Returns the keys of `dflash_config`. Raises UserError for drafts that are not computed here."""
    inner = _inner(keys)
    known = _BACKBONE.union(_COMPUTED, MIMO_KEYS, TRAINING_KEYS, *_HEADS.values())
    unknown = sorted(inner.values.keys() - known)
    if unknown:
        raise UserError(f"{inner.source} has unknown keys: {', '.join(unknown)}. Take EAGLE3 or NGRAM.")
    for reader in (keys, inner):
        check_computed(reader, _COMPUTED)
    domino = inner.values.get("projector_type") == _DOMINO
    if not domino:
        _refuse_without(inner, _HEADS[_DOMINO], f"projector_type {_DOMINO!r}")
    elif inner.values.get("selector_rank") is not None:
        raise UserError(f"{inner.source}: a draft has a selector or the head of {_DOMINO!r}, not both.")
    return inner


def _refuse_without(inner: ConfigReader, names: tuple[str, ...], other: str) -> None:
    given = [name for name in names if inner.values.get(name)]
    if given:
        raise UserError(f"{inner.source} has {', '.join(given)} without {other}, so what they mean is not known.")


def _head(inner: ConfigReader, vocab_size: int) -> Head | None:
    if inner.values.get("projector_type") == _DOMINO:
        state, size = inner.positive("gru_hidden_dim"), inner.positive("emb_dim")
        return Domino(state, size, inner.count("pure_draft_prefix_len"))
    if not _given(inner, _HEADS["selector"]):
        return None
    selector = Selector(inner.positive("selector_rank"), inner.positive("selector_top_k"))
    if selector.top_k > vocab_size:
        raise UserError(f"{inner.source}: selector_top_k {selector.top_k} is more than the {vocab_size:,} tokens.")
    return selector


def _convolution(inner: ConfigReader, hidden_size: int) -> Convolution | None:
    if not _given(inner, _HEADS["convolution"]):
        return None
    convolution = Convolution(inner.positive("conv_kernel_size"), inner.positive("conv_group_size"))
    if hidden_size % convolution.group:
        raise UserError(
            f"{inner.source}: conv_group_size {convolution.group} does not divide hidden_size {hidden_size}."
        )
    return convolution


def _given(inner: ConfigReader, names: tuple[str, ...]) -> bool:
    values: list[Any] = [inner.values.get(name) for name in names]
    return any(value not in (None, 0) for value in values)


def _aux_layers(settings: ConfigReader, num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """Returns the target layers whose outputs are read: those named, or as many as the draft has layers, evenly spaced
    from the second to the third from the end."""
    named = settings.default("target_layer_ids", list, [])
    if not named:
        last = num_target_layers - 3
        if num_layers == 1:
            return (num_target_layers // 2,)
        named = [round(1 + i * (last - 1) / (num_layers - 1)) for i in range(num_layers)]
    return check_aux_layers(named, num_target_layers, settings.source)
