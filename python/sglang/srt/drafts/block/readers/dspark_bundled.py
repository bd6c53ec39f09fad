"""DSpark block drafts in the checkpoint of a DeepSeek-V4 model (`mtp.0`, `mtp.1`, ...): makes their descriptions from
its config.

Sources: DeepSeek's inference code beside the checkpoints of V4-Flash-DSpark and -0731 (as others describe it) and arXiv
2607.05147. A draft stage is a layer of the model with window attention only. The mean of the target's residual streams
behind each of `dspark_target_layer_ids` (V4.1: before each) is an aux hidden state; side by side, projected and normed,
these give the stages the keys of the tokens before a block. Every row of the block sees the last `sliding_window` of
these and the whole block. The last stage ends with its own connection that makes one stream of all (V4.1: with the last
block's weights), a norm, and the model's output head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.configs.stored_form import stored_wide
from sglang.srt.drafts.block.readers.backbone import check_aux_layers, in_blocks
from sglang.srt.drafts.block.spec import Block, Confidence, Markov
from sglang.srt.drafts.config import BUNDLED_SIZE, DraftConfig
from sglang.srt.drafts.spec import DraftDescription, without_ends
from sglang.srt.errors import UserError
from sglang.srt.plan.families import family_of
from sglang.srt.plan.families.deepseek_v4 import DEEPSEEK_V4
from sglang.srt.plan.families.deepseek_v41 import DEEPSEEK_V41
from sglang.srt.plan.model_description import ModelDescription, architecture_of, describe_as
from sglang.srt.plan.weight_names import WeightMap

CONFIDENCE = "confidence_head.proj"
"""Module of the head that predicts whether a draft token is accepted."""
BUNDLING_ARCHITECTURES = (*DEEPSEEK_V4.architectures, *DEEPSEEK_V41.architectures)
"""Of models whose checkpoints may bring such a draft."""
_EXPERTS = ("n_routed_experts", "num_experts_per_tok")
"""Keys for which the stages may have their own values, under "dspark_" and the name."""
_OF_STAGES: Mapping[str, Any] = {
    "kv_source_layer_ids": [],
    "index_source_layer_ids": [],
    "candidate_source_layer_id": None,
    "engram_layer_ids": [],
    "engram_num_embeddings": [],
}
_AT = "mtp."
_STAGE = re.compile(r"mtp\.(\d+)\.")
_KEYS = frozenset(
    {BUNDLED_SIZE, "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank", "dspark_markov_head_type"}
)


def describe_bundled(config: DraftConfig, target: ModelDescription) -> DraftDescription:
    """Describes the DSpark draft in a model's checkpoint. Raises UserError for keys that are missing or unknown, and
    for checkpoints without the draft."""
    keys = config.reader()
    family = family_of(architecture_of(keys), str(keys.values.get("model_type") or ""))
    architecture = architecture_of(keys)
    if family is None or architecture not in BUNDLING_ARCHITECTURES or architecture != target.architecture:
        raise UserError(
            f"{keys.source}: a draft that {architecture_of(keys)} brings (its {BUNDLED_SIZE}) is not served for"
            f" {target.architecture}. Give another with --speculative-draft-model-path."
        )
    shares_entries = any(layer.mixer.shares_entries for layer in target.layers)  # V4.1
    _check(keys, shares_entries)
    aux_layers = _aux_layers(keys, len(target.layers), shares_entries)
    stages = _stages(config, len(aux_layers))
    names = _names(family.names, stages)
    of_stages = {"num_hidden_layers": stages, "compress_ratios": [0] * stages, "num_hash_layers": 0, **_OF_STAGES}
    experts = {key: keys.values.get(f"dspark_{key}") for key in _EXPERTS}
    of_stages |= {key: count for key, count in experts.items() if count is not None}
    quantization = stored_wide(config.quantization, config.stored(names, _AT))
    reader = ConfigReader({**keys.values, **of_stages}, keys.source)
    model = describe_as(replace(family, names=names), reader, quantization, config.keep_shared_apart)
    if model.unsupported:
        raise UserError("\n".join(model.unsupported))
    for what, stated, wanted in (
        ("hidden_size", model.hidden_size, target.hidden_size),
        ("vocab_size", model.vocab_size, target.vocab_size),
    ):
        if stated != wanted:
            raise UserError(f"{keys.source}: {what} is {stated}, not {wanted}: give the draft of this model.")
    size, mask = keys.positive(BUNDLED_SIZE), keys.require("dspark_noise_token_id", int)
    if not 0 <= mask < target.vocab_size:
        raise UserError(f"{keys.source}: dspark_noise_token_id {mask} is no token of the {target.vocab_size:,}.")
    rank = keys.count("dspark_markov_rank")
    form = Block(
        num_aux_layers=len(aux_layers),
        aux_size=target.hidden_size,
        size=size,
        mask_token=mask,
        vocab_size=target.vocab_size,
        first_row=0,
        head=Markov(rank) if rank else None,
        confidence=Confidence(rank) if _has_confidence(config, stages) else None,
    )
    return DraftDescription(
        kind=config.kind,
        model=without_ends(in_blocks(model, size), target.vocab_size),
        form=form,
        first_layer=len(target.layers),
        vocab_size=target.vocab_size,
        aux_layers=aux_layers,
        at=_AT,
    )


def _aux_layers(keys: ConfigReader, num_layers: int, before: bool) -> tuple[int, ...]:
    """Returns the layers behind which the draft reads the streams. `before`: the config names the layers before which
    it reads them, as V4.1's does. Raises UserError."""
    named = check_aux_layers(keys.require("dspark_target_layer_ids", list), num_layers, keys.source)
    if before and 0 in named:
        raise UserError(f"{keys.source}: dspark_target_layer_ids {list(named)} name the layer 0, before which is none.")
    return tuple(layer - 1 for layer in named) if before else named


def _check(keys: ConfigReader, own_experts: bool) -> None:
    known = {*_KEYS, *(f"dspark_{key}" for key in _EXPERTS if own_experts)}
    unknown = sorted(key for key in keys.values if key.startswith("dspark_") and key not in known)
    if unknown:
        raise UserError(f"{keys.source}: the keys {', '.join(unknown)} of its DSpark draft are not known here.")
    kind = keys.default("dspark_markov_head_type", str, "vanilla")
    if kind != "vanilla":
        raise UserError(f"{keys.source}: dspark_markov_head_type {kind!r} is not supported; supported: 'vanilla'.")


def _stages(config: DraftConfig, usual: int) -> int:
    """Returns the number of draft stages in the checkpoint; without weights that of its config, or one for each layer
    that is read. Raises UserError for a checkpoint without any."""
    stored = config.stored(WeightMap({}, {}), _AT)
    if stored is None:
        listed = config.reader().count("num_nextn_predict_layers")
        return listed if listed > 1 else usual
    numbers = {int(stage[1]) for name in stored if (stage := _STAGE.match(name))}
    if not numbers:
        raise UserError(
            f"{config.model_path} has no tensors at {_AT}: it has no DSpark draft, which some exports leave out. Draft"
            " with NGRAM, which needs no weights."
        )
    return max(numbers) + 1


def _has_confidence(config: DraftConfig, stages: int) -> bool:
    """Returns whether the checkpoint has the confidence head, which its config does not mention; True without
    weights."""
    stored = config.stored(WeightMap({}, {}), f"{_AT}{stages - 1}.{CONFIDENCE}")
    return stored is None or bool(stored)


def _names(of_model: WeightMap, stages: int) -> WeightMap:
    """Returns the names of the stages' tensors: the first stage has the projection of aux hidden states, the last one
    the heads. The Markov head's tables have two spellings."""
    last = f"{_AT}{stages - 1}"
    model: Mapping[str, str] = {
        "embed": of_model.model["embed"],
        "lm_head": of_model.model["lm_head"],
        "fc": f"{_AT}0.main_proj",
        "hidden_norm": f"{_AT}0.main_norm",
        "norm": f"{last}.norm",
        "head_mix": last,
        "markov_w1": f"{last}.markov_head.markov_w1",
        "markov_w2": f"{last}.markov_head.markov_w2",
        "confidence": f"{last}.{CONFIDENCE}",
    }
    copies = tuple(f"{_AT}{stage}.{name}." for stage in range(stages) for name in ("emb", "embed", "head"))
    heads = (("embed", "markov_w1"), ("head", "markov_w2"))
    return replace(
        of_model,
        model=model,
        layer_prefix=f"{_AT}{{layer}}.",
        beginnings=tuple((f"{last}.markov_head.{old}.", f"{last}.markov_head.{new}.") for old, new in heads),
        behind=(),
        unread=copies,
    )
