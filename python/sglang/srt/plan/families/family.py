"""The facts about a family of models that its config.json files do not state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sglang.srt.configs.activation import SILU, Activation
from sglang.srt.plan.families.mtp import MtpForm
from sglang.srt.plan.feed_forward import Router
from sglang.srt.plan.layer_spec import SUM, Residual
from sglang.srt.plan.weight_names import USUAL_NAMES, WeightMap


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Facts of all models of some `model_types`, where their config does not say otherwise. Data only: `read_layers`
    turns them and the usual keys into layers.

    `architectures` are those that are served; a family without one is known to planning only. `allowed`: for keys that
    change the result, the values that are computed (absent and null always are); of keys in `computed` any is.
    `published`: by the number of routed experts, what configs of published models leave out.
    `head_dim` 0: hidden_size / heads; `num_kv_heads` 0: as many as heads. `qkv_bias` and `o_bias` None: as
    `attention_bias` says. `router` and `activation` are templates for what the config's keys fill in.
    """

    model_types: tuple[str, ...]
    architectures: tuple[str, ...] = ()
    names: WeightMap = USUAL_NAMES
    allowed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    computed: tuple[str, ...] = ()
    published: Mapping[int, Mapping[str, object]] = field(default_factory=dict)
    tie_embeddings: bool = False
    zero_centred_norms: bool = False  # weights of norms (but for gated ones) are stored minus 1
    norm_eps: str = "rms_norm_eps"  # the key that has it
    spellings: Mapping[str, str] = field(default_factory=dict)  # keys of published configs, and the usual ones
    one_block_layers: bool = False  # a layer is a mixer or a feed-forward block
    normed_embedding: bool = False  # as ModelDescription.normed_embedding
    embedding_norm: bool = False  # as ModelDescription.embedding_norm
    plain_final_norm: bool = False  # as ModelDescription.plain_final_norm
    scaled_embeddings: bool = False  # times the root of the hidden size
    residual: Residual = SUM
    # attention
    head_dim: int = 0
    num_kv_heads: int = 0
    attention_scale: float = 0.0  # of the products of q and k; 0: head_dim ** -0.5
    value_norm: bool = False  # as GQA.value_norm
    growing_queries: bool = False  # `llama_4_scaling_beta` of the rotary parameters is `attn_temperature`
    qk_norm: str = ""  # as GQA.qk_norm
    optional_qk_norm: bool = False  # `use_qk_norm` says whether there is one
    window_pattern: int = 0  # every so many layers one has no window, unless `layer_types` say of which
    recurrent_pattern: int = 0  # every so many layers one is attention and no gated delta net, likewise
    relative_biases: bool = False  # attention has biases by distance, and convolutions: `config_relative`
    chunks: bool = False  # layers see chunks of tokens, or do not rotate heads: `config_chunks`
    windows_everywhere: bool = False  # `sliding_window` is of every layer; otherwise `layer_types` say of which
    pooled_index: bool = False  # attention without a window is as PooledSparse, or as PooledLatent
    compressed: bool = False  # `compress_ratios` says of each layer how many tokens an entry stands for
    shared_entries: bool = False  # entries of few layers, `kv_source_layer_ids`, are read by those behind them too
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    output_gate: bool = False
    gate_projection: bool = False  # as GQA.gate_projection
    head_gate: bool = False  # as GQA.head_gate
    softplus_gates: bool = False  # as GQA.softplus_gates
    sinks: bool = False
    window_sinks: bool = False  # sinks in layers with a window; `add_full_attention_sink_bias` says of the others
    window_kv_factor: int = 1  # KV heads of layers with a window, for each of the others; `swa_*` keys say it too
    is_neox_style: bool = True  # as GQA.is_neox_style
    positions: bool = True  # False: attention does not rotate heads
    positions_in_windows: bool = False  # only layers with a window do, unless the config says it by layer
    hybrid_kind: str = ""  # as GQA.hybrid_kind
    sigmoid_output_gates: bool = False  # `output_gate_type` of recurrent layers may be a sigmoid
    projected_by_key_head: bool = False  # as GatedDelta.by_key_head
    kimi_delta: bool = False  # of layers with latent attention some are Kimi delta attention instead
    decay_bound: float = 0.0  # KimiDelta.lower_bound, unless the config says it
    indexer_is_neox_style: bool = True  # as Indexer.is_neox_style, unless `indexer_rope_interleave` says it
    # feed-forward
    joined_gate_up: bool = False  # as Dense.joined
    alternating_gate_up: bool = False  # as Dense.alternating
    scaled_mlp: bool = False  # as Dense.scaled
    shared_sinks: bool = False  # the router weights the shared experts, as Router.sinks
    has_experts: bool = False
    first_dense: int = 0  # layers without experts before the others, unless the config says which
    router: Router = Router(0)  # noqa: RUF009 - frozen
    activation: Activation = SILU
    expert_bias: bool = False
    expert_form: str = ""  # as MoE.form
    expert_branches: bool = False  # a dense MLP beside the experts, as MoE.branches
    # drafts
    mtp: MtpForm | None = None  # layers with which a model drafts for itself
