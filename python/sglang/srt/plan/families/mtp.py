"""Names and forms of the layers with which a model drafts for itself (multi-token prediction), by family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpForm:
    """Names and form of a family's draft layers.

        at: beginning of their tensors' names in the target's checkpoint; "": that of the layer behind the last one
        names: names below it of "fc", "embedding_norm", "hidden_norm" and "norm"; {last} is the number of the last
            draft layer
        layer: name of a layer
        copies: names of tensors that repeat the target's; unread: names of tensors that are not used
        counts: keys that may hold the number of draft layers; the first one in the config counts
        patterns: keys that may hold the kinds of these layers, in families with one block a layer
        refused: keys with the values that are not computed
        hidden_first, zero_first: as in `drafts.description.Projected`
        by_stream, streamed: the form is `drafts.description.ByStream`, or `Streamed`
        one_stream: its layers have one residual stream, however many the model has
        dense: its layers attend to all tokens where the model's select them by pooled keys

    `depths` > 0: the form is `drafts.description.MTPByLayer` with that many layers, unless the config states the
    number; `names` and `copies` are then below each layer, and layers have a window.

        chained, final_features: as in `MTPByLayer`
        layer_names: names in these layers that differ from the model's
        section: key of an object with keys for these layers only; spellings: equivalent keys beside it, and those in it
        kinds: names in `layer_types` of layers with a window (`local_layer_ids` lists their depths), and of the others
    """

    at: str = ""
    layer: str = ""
    names: Mapping[str, str]
    copies: tuple[str, ...] = ()
    counts: tuple[str, ...] = ("num_nextn_predict_layers",)
    patterns: tuple[str, ...] = ()
    refused: Mapping[str, object] = field(default_factory=dict)
    hidden_first: bool = False
    zero_first: bool = False
    by_stream: bool = False
    streamed: bool = False
    one_stream: bool = False
    dense: bool = False
    unread: tuple[str, ...] = ()
    depths: int = 0
    chained: bool = False
    final_features: bool = False
    layer_names: Mapping[str, str] = field(default_factory=dict)
    section: str = ""
    spellings: Mapping[str, str] = field(default_factory=dict)
    kinds: tuple[str, str] = ("sliding_attention", "")


EH_PROJ = MtpForm(
    names={"fc": "eh_proj", "embedding_norm": "enorm", "hidden_norm": "hnorm", "norm": "shared_head.norm"},
    copies=("embed_tokens.", "shared_head.head."),
)
"""DeepSeek V3 and GLM-4.5 to 4.7: a layer behind the last one."""
GLM5_NEXT_MTP = replace(EH_PROJ, one_stream=True)
"""GLM-5.3-Flash: a layer behind the last one, of latent attention with an indexer, without hyper-connections."""
HY_MTP = replace(
    EH_PROJ,
    names={**EH_PROJ.names, "norm": "final_layernorm"},
    copies=("embed_tokens.", "shared_head."),
)
QWEN_MTP = MtpForm(
    at="mtp.",
    layer="layers.{layer}.",
    names={
        "fc": "fc",
        "embedding_norm": "pre_fc_norm_embedding",
        "hidden_norm": "pre_fc_norm_hidden",
        "norm": "norm",
    },
    counts=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
    refused={"mtp_use_dedicated_embeddings": True},
)
NEMOTRON_MTP = MtpForm(
    at="mtp.layers.",
    layer="{layer}.",
    names={"fc": "0.eh_proj", "embedding_norm": "0.enorm", "hidden_norm": "0.hnorm", "norm": "{last}.final_layernorm"},
    patterns=("mtp_layers_block_type", "mtp_hybrid_override_pattern"),
)
MIMO_MTP = MtpForm(
    at="model.mtp_layers.0.",
    names={
        "fc": "input_proj",
        "embedding_norm": "token_layernorm",
        "hidden_norm": "hidden_layernorm",
        "norm": "final_layernorm",
    },
    hidden_first=True,
    zero_first=True,
)
V4_MTP = MtpForm(
    at="mtp.0.",
    names={
        "e_proj": "e_proj",
        "h_proj": "h_proj",
        "embedding_norm": "enorm",
        "hidden_norm": "hnorm",
        "norm": "norm",
        "head_mix": "",
    },
    copies=("emb.", "embed.", "head."),
    by_stream=True,
)
"""DeepSeek-V4 before its editions of July 2026, which bring a DSpark draft instead."""
MIMO_V2_MTP = MtpForm(
    at="model.mtp.layers.",
    names={"fc": "eh_proj", "embedding_norm": "enorm", "hidden_norm": "hnorm", "norm": "final_layernorm"},
    depths=3,
    layer_names={"mlp_norm": "pre_mlp_layernorm"},
)
"""MiMo-V2. Published configs do not say how many layers there are."""
STEP_MTP = MtpForm(
    names={
        "fc": "eh_proj",
        "embedding_norm": "enorm",
        "hidden_norm": "hnorm",
        "norm": "transformer.shared_head.norm",
    },
    copies=("transformer.shared_head.output.", "embed_tokens."),
    depths=3,
    chained=True,
)
"""Step-3.5 and 3.7: layers behind the last one."""
INKLING_MTP = MtpForm(
    at="model.mtp.layers.",
    layer="{layer}.transformer_block.",
    names={"fc": "input_proj", "embedding_norm": "embed_norm", "hidden_norm": "hidden_norm"},
    refused={"chain_hidden_post_norm": True},
    hidden_first=True,
    depths=8,
    chained=True,
    final_features=True,
    section="mtp_config",
    spellings={
        "num_mtp_layers": "num_nextn_predict_layers",
        "mtp_local_layer_ids": "local_layer_ids",
        "chain_hidden_post_norm": "chain_hidden_post_norm",
    },
    kinds=("hybrid_sliding", "hybrid"),
)
"""Inkling: dense layers, with convolutions. The token's embedding is the model's, which is normed, and is normed again.
No norm stands before the output head."""
QWEN4_MTP = MtpForm(
    at="mtp.",
    layer="layers.{layer}.",
    names={
        "fc_embedding": "fc_embedding",
        "fc_hidden": "fc_hidden",
        "embedding_norm": "pre_fc_norm_embedding",
        "hidden_norm": "pre_fc_norm_hidden",
        "norm": "hyper_connection_mixer.hc_norm",
        "head_mix.gates": "hyper_connection_mixer.{{part}}",
        "head_mix.up": "hyper_connection_mixer.input_mix_weight_up",
    },
    counts=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
    refused={"mtp_use_dedicated_embeddings": True},
    streamed=True,
    dense=True,
    unread=("layers.0.self_attn.indexer.",),
)
"""Qwen3.8-Flash-Next. The draft attends to all tokens: its indexer, which would select as many tokens as the target's,
is not used. Draft tokens are verified either way."""
