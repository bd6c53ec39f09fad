"""Naive-N0.5-Flash: layers of MiMo-V2-Flash, of which those without a window attend to tokens that an indexer selects
for all heads."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.blocks.mla.spec import Indexer
from sglang.srt.blocks.token_selection.spec import TokenIndexer
from sglang.srt.errors import UserError
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Family, Model
from sglang.srt.plan.families.mimo_v2 import MIMO_V2, mimo_v2
from sglang.srt.plan.layer_spec import LayerSpec
from sglang.srt.plan.masks import SelectedTokens


def naive_n05(c: Config) -> Model:
    indexer = TokenIndexer(
        Indexer(c.positive("index_n_heads", 16), c.positive("index_head_dim", 128), c.positive("index_topk", 2048))
    )
    c.only("indexer_rope_interleave", False)
    model = mimo_v2(c)
    return replace(model, layers=[_with_indexer(c, layer, indexer) for layer in model.layers])


def _with_indexer(c: Config, layer: LayerSpec, indexer: TokenIndexer) -> LayerSpec:
    """Returns the layer with the indexer, unless it has a window. Raises UserError for a head of the indexer that is
    too narrow to rotate as attention's do."""
    mixer = layer.mixer
    assert isinstance(mixer, GQA), "the family's layers are of one kind"
    if mixer.window:
        return layer
    if mixer.softmax.sinks:
        c.problem("sinks in layers that attend to selected tokens are not supported.")
    if mixer.rotary_dim > indexer.scores.head_dim:
        raise UserError(
            f"{c.source}: 'index_head_dim' {indexer.scores.head_dim} is less than the {mixer.rotary_dim} rotary dims."
        )
    return replace(layer, mixer=replace(mixer, mask=SelectedTokens(indexer)))


NAIVE_N05 = Family(
    title="Naive-N0.5-Flash",
    model_types=("naive_n05_flash",),
    architectures=("NaiveN05FlashForCausalLM",),
    read=naive_n05,
    names=replace(
        MIMO_V2.names,
        layer={
            **MIMO_V2.names.layer,
            "attn.index_q": "self_attn.indexer.wq",
            "attn.index_k": "self_attn.indexer.wk",
            "attn.index_norm": "self_attn.indexer.k_norm",
            "attn.index_weights": "self_attn.indexer.weights_proj",
        },
        unread=(),
    ),
)
