"""What is known of a family of models that its config.json files do not state."""

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
    """Facts about all models of some `model_types` that hold unless their config says otherwise. Data only:
    `read_layers` makes layers of them and the usual keys.

        architectures: those that are served; a family without any is only planned for
        allowed: for keys that change the result, the values that are computed (absent and null always are); all values
            are computed of keys in `computed`
        published: values that published configs leave out, by the number of routed experts
        head_dim: 0: hidden_size / heads; num_kv_heads: 0: as many as heads
        qkv_bias, o_bias: None: as the key `attention_bias` says
        router, activation: templates that the config's keys complete
        title: names of the published models; families with the same one share a row of docs/models.md
    """

    title: str = ""
    model_types: tuple[str, ...]
    architectures: tuple[str, ...] = ()
    names: WeightMap = USUAL_NAMES
    allowed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    computed: tuple[str, ...] = ()
    published: Mapping[int, Mapping[str, object]] = field(default_factory=dict)
    tie_embeddings: bool = False
    zero_centred_norms: bool = False  # weights of norms (except gated ones) are stored minus 1
    norm_eps: str = "rms_norm_eps"  # key of the norms' epsilon
    spellings: Mapping[str, str] = field(default_factory=dict)  # keys of published configs, and the usual ones
    one_block_layers: bool = False  # a layer is a mixer or a feed-forward block
    normed_embedding: bool = False  # as ModelDescription.normed_embedding
    embedding_norm: bool = False  # as ModelDescription.embedding_norm
    plain_final_norm: bool = False  # as ModelDescription.plain_final_norm
    scaled_embeddings: bool = False  # embeddings are multiplied by the square root of the hidden size
    residual: Residual = SUM
    # attention
    head_dim: int = 0
    num_kv_heads: int = 0
    attention_scale: float = 0.0  # of the products of q and k; 0: head_dim ** -0.5
    value_norm: bool = False  # as GQA.value_norm
    attn_temperature_scaling: bool = False  # `llama_4_scaling_beta` of the rotary parameters is `attn_temperature`
    qk_norm: str = ""  # as GQA.qk_norm
    optional_qk_norm: bool = False  # `use_qk_norm` says whether there is one
    window_pattern: int = 0  # > 0: one layer in every window_pattern has no window, unless `layer_types` say which
    recurrent_pattern: int = 0  # > 0: one layer in as many is attention, the others gated delta nets; likewise
    relative_biases: bool = False  # attention has biases by distance, and convolutions: `config_relative`
    chunks: bool = False  # layers see chunks of tokens, or do not rotate heads: `config_chunks`
    windows_everywhere: bool = False  # all layers have `sliding_window`; otherwise `layer_types` say which
    pooled_index: bool = False  # attention without a window is PooledSparse or PooledLatent
    compressed: bool = False  # `compress_ratios` lists for each layer how many tokens an entry stands for
    shared_entries: bool = False  # layers behind those in `kv_source_layer_ids` read their entries, too
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    output_gate: bool = False
    gate_projection: bool = False  # as GQA.gate_projection
    head_gate: bool = False  # as GQA.head_gate
    softplus_gates: bool = False  # as GQA.softplus_gates
    sinks: bool = False
    window_sinks: bool = False  # layers with a window have sinks; others if `add_full_attention_sink_bias` is set
    window_kv_factor: int = 1  # ratio of KV heads in layers with a window to those of others, without `swa_*` keys
    is_neox_style: bool = True  # as GQA.is_neox_style
    positions: bool = True  # False: attention does not rotate heads
    positions_in_windows: bool = False  # only layers with a window rotate heads, unless the config says it by layer
    hybrid_kind: str = ""  # as GQA.hybrid_kind
    sigmoid_output_gates: bool = False  # `output_gate_type` of recurrent layers may be a sigmoid
    projected_by_key_head: bool = False  # as GatedDelta.by_key_head
    kimi_delta: bool = False  # some layers have Kimi delta attention instead of latent attention
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
