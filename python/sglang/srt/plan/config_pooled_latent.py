"""Reads the layers of GLM-5.3-Flash from its config.json: Kimi delta attention, and latent attention over runs of
tokens that an indexer selects by pooled keys."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.plan.config_recurrent import KDA_CONFIG, kimi_delta
from sglang.srt.plan.layer_spec import Mixer
from sglang.srt.plan.mixers import MLA, Indexer
from sglang.srt.plan.pooled_latent import PooledLatent

POOLED_KINDS = frozenset({"indexed_attention", "deepseek_sparse_attention", "full_attention"})
"""Names in `layer_types` of layers that are not Kimi delta attention."""
EVERY = 4
"""Every EVERY-th layer is not Kimi delta attention, where the config does not name the layers."""
_COMPUTED = ("index_kpool_compress", "index_kpool_always_select_tail")
"""Keys whose default is true, the only value that is computed."""


def pooled_latent_mixers(
    keys: ConfigReader, indexed: Sequence[bool], decay_bound: float, unsupported: list[str]
) -> list[Mixer]:
    """Returns a mixer for each entry of `indexed`. `indexed`: whether the layer, if it is latent attention, has an
    indexer of its own. `decay_bound`: Kimi delta attention's lower bound where the config states none. Adds to
    `unsupported` what is described but not computed. Raises UserError."""
    recurrent = delta_layers_from_zero(keys, len(indexed))
    if not all(has or delta for has, delta in zip(indexed, recurrent, strict=True)):
        unsupported.append(f"{keys.source}: 'indexer_types' with layers that take a selection is not supported.")
    rope_dim = keys.count("qk_rope_head_dim")
    if rope_dim:
        unsupported.append(f"{keys.source}: qk_rope_head_dim = {rope_dim} is not supported; supported: 0.")
    mixer = _pooled_latent(keys, unsupported)
    delta = kimi_delta(keys, unsupported, decay_bound) if any(recurrent) else mixer
    return [delta if flag else mixer for flag in recurrent]


def delta_layers_from_zero(keys: ConfigReader, num_layers: int) -> list[bool]:
    """Returns whether each layer is Kimi delta attention, by `layer_types` or by `kda_layers`, which counts layers from
    0 here. Raises UserError where the two differ."""
    kinds = keys.default("layer_types", list, [])[:num_layers]
    unknown = sorted({str(kind) for kind in kinds} - POOLED_KINDS - {"linear_attention"})
    if unknown:
        raise UserError(f"{keys.source}: layer_types {', '.join(unknown)} are not described here yet.")
    listed = ConfigReader(keys.default(KDA_CONFIG, dict, {}), f"{keys.source} {KDA_CONFIG}").default(
        "kda_layers", list, []
    )
    named = [i in listed for i in range(num_layers)] if listed else None
    if not kinds:
        return named or [(i + 1) % EVERY != 0 for i in range(num_layers)]
    recurrent = [kind == "linear_attention" for kind in kinds]
    if len(kinds) < num_layers:
        raise UserError(f"{keys.source}: 'layer_types' has {len(kinds)} entries for {num_layers} layers.")
    if named not in (None, recurrent):
        raise UserError(f"{keys.source}: 'layer_types' and kda_layers of {KDA_CONFIG!r} name different layers.")
    return recurrent


def _pooled_latent(keys: ConfigReader, unsupported: list[str]) -> PooledLatent:
    block, budget = keys.positive("index_kpool"), keys.positive("index_topk")
    if budget % block:
        raise UserError(f"{keys.source}: 'index_topk' {budget} is not a multiple of 'index_kpool' {block}.")
    for key in _COMPUTED:
        if not keys.default(key, bool, True):
            unsupported.append(f"{keys.source}: {key} = False is not supported; supported: True.")
    indexer = Indexer(keys.positive("index_n_heads"), keys.positive("index_head_dim"), budget // block)
    if indexer.head_dim % 4:
        raise UserError(f"{keys.source}: 'index_head_dim' {indexer.head_dim} is not a multiple of 4.")
    latent = MLA(
        num_heads=keys.positive("num_attention_heads"),
        q_lora_rank=keys.positive("q_lora_rank"),
        kv_lora_rank=keys.positive("kv_lora_rank"),
        nope_dim=keys.positive("qk_nope_head_dim"),
        rope_dim=0,
        v_dim=keys.positive("v_head_dim"),
    )
    return PooledLatent(latent, indexer, block)
