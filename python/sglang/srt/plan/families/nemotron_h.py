"""Nemotron-H and Nemotron 3: layers of one block each, Mamba-2, attention without positions, MLPs or experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.blocks.mamba2.spec import Mamba2
from sglang.srt.blocks.moe.spec import MoE, Router, Shared
from sglang.srt.configs.activation import RELU2
from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.plan.families.attention import grouped_attention
from sglang.srt.plan.families.blocks import activation, experts, mlp, shared_experts
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Family, Model
from sglang.srt.plan.families.mtp import OTHER_DRAFTS, MTPPass, MTPTensors
from sglang.srt.plan.families.recurrent import state_dtype
from sglang.srt.plan.layer_spec import ABSENT, LayerSpec
from sglang.srt.plan.weight_names import WeightMap

_BLOCKS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
_OTHER_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}
_MAX_LAYERS = 4096


def nemotron_h(c: Config) -> Model:
    """A layer is a mixer or a feed-forward block."""
    c = with_usual_keys(c)
    kinds = block_kinds(c)
    by_kind = {kind: block_of(c, kind) for kind in dict.fromkeys(kinds)}
    return Model(c, [by_kind[kind] for kind in kinds])


def with_usual_keys(c: Config) -> Config:
    """Returns the config with the usual key of the norms' epsilon. Notes a problem for functions that are not
    computed."""
    c.only("mlp_hidden_act", "relu2")
    c.only("mamba_hidden_act", "silu")
    c.only("residual_in_fp32", False)
    return c.with_values({"rms_norm_eps": c.values.get("layer_norm_epsilon")})


def block_of(c: Config, kind: str) -> LayerSpec:
    """Returns a layer of a kind ("mamba", "attention", "mlp", "moe") with the sizes that the keys state."""
    makers: dict[str, Callable[[], LayerSpec]] = {
        "mamba": lambda: LayerSpec(_mamba2(c), ABSENT),
        "attention": lambda: LayerSpec(_attention(c), ABSENT),
        "mlp": lambda: LayerSpec(ABSENT, mlp(c, activation(c, RELU2))),
        "moe": lambda: LayerSpec(ABSENT, _experts(c)),
    }
    return makers[kind]()


def block_kinds(c: ConfigReader) -> list[str]:
    """Returns the kind of each layer ("mamba", "attention", "moe", "mlp"), from `layers_block_type` or `layer_types`,
    or else `hybrid_override_pattern`. Raises UserError."""
    listed = c.values.get("layers_block_type") or c.values.get("layer_types")
    return known_kinds(listed if isinstance(listed, list) else c.values.get("hybrid_override_pattern") or "", c.source)


def known_kinds(kinds: Iterable[object], source: str) -> list[str]:
    """Returns the kinds of layers by our names. Raises UserError."""
    named = [_OTHER_NAMES.get(str(kind), _BLOCKS.get(str(kind), str(kind))) for kind in kinds]
    unknown = sorted(set(named) - set(_BLOCKS.values()))
    if unknown or not 0 < len(named) <= _MAX_LAYERS:
        what = f"kinds {', '.join(unknown)}" if unknown else f"{len(named)} layers"
        raise UserError(f"{source}: the layers' pattern ('hybrid_override_pattern') has {what}, which cannot be read.")
    return named


def _attention(c: Config) -> GQA:
    # The first releases call it attention_head_dim.
    head_dim = c.count("attention_head_dim")
    c = c.with_values({"head_dim": head_dim}) if head_dim else c
    return grouped_attention(c, head_dim=128, rotates=False, hybrid_kind="hybrid_mamba2")


def _experts(c: Config) -> MoE:
    router = Router(0, "sigmoid", correction="e_score_correction_bias", float32=True)
    size = c.count("moe_shared_expert_intermediate_size")
    shared = Shared(size) if size and c.count("n_shared_experts") else shared_experts(c)
    return experts(c, router, activation(c, RELU2), shared=shared, latent_size=c.count("moe_latent_size"))


def _mamba2(c: Config) -> Mamba2:
    low, high = _time_step_limit(c)
    return Mamba2(
        num_heads=c.positive("mamba_num_heads"),
        head_dim=c.positive("mamba_head_dim"),
        num_groups=c.positive("n_groups"),
        state_dim=c.positive("ssm_state_size"),
        conv_kernel=c.positive("conv_kernel"),
        conv_bias=c.default("use_conv_bias", bool, True),
        proj_bias=c.default("use_bias", bool, False),
        dt_min=low,
        dt_max=high,
        state_dtype=state_dtype(c, "mamba_ssm_cache_dtype"),
    )


def _time_step_limit(c: Config) -> tuple[float, float]:
    """Returns the limits of time steps. JSON has no number for infinity, which is written as a string in an object."""
    limits = c.default("time_step_limit", list, [0.0, float("inf")])
    plain: list[Any] = [limit.get("__float__") if isinstance(limit, Mapping) else limit for limit in limits]
    try:
        low, high = (float(str(limit)) for limit in plain)
    except (TypeError, ValueError):
        raise UserError(f"{c.source}: 'time_step_limit' must be two numbers; got {limits!r}.") from None
    return low, high


_DRAFT_PATTERNS = ("mtp_layers_block_type", "mtp_hybrid_override_pattern")


def _draft_keys(keys: ConfigReader) -> dict[str, Any]:
    """Returns the config's keys as they apply to the draft layers, which are blocks as the model's are. Raises
    UserError."""
    key = next((key for key in _DRAFT_PATTERNS if keys.values.get(key)), None)
    if key is None:
        raise UserError(
            f"{keys.source}: none of {', '.join(_DRAFT_PATTERNS)} says what the draft's layers are. {OTHER_DRAFTS}"
        )
    value = keys.values[key]
    listed = isinstance(value, list)
    pattern = {
        "layers_block_type": value if listed else None,
        "layer_types": None,
        "hybrid_override_pattern": None if listed else value,
    }
    kinds = block_kinds(ConfigReader({**keys.values, **pattern}, keys.source))
    return pattern | {"num_hidden_layers": len(kinds)}


NEMOTRON_MTP = MTPPass(
    tensors=MTPTensors(
        at="mtp.layers.",
        layer="{layer}.",
        names={
            "fc": "0.eh_proj",
            "embedding_norm": "0.enorm",
            "hidden_norm": "0.hnorm",
            "norm": "{last}.final_layernorm",
        },
    ),
    keys=_draft_keys,
)


NEMOTRON_H = Family(
    title="Nemotron-H and Nemotron 3",
    model_types=("nemotron_h",),
    architectures=("NemotronHForCausalLM",),
    read=nemotron_h,
    names=WeightMap(
        {"embed": "backbone.embeddings", "norm": "backbone.norm_f", "lm_head": "lm_head"},
        {
            "input_norm": "norm",
            "mlp_norm": "norm",
            "attn": "mixer",
            "attn.qkv": "mixer.{part}_proj",
            "attn.o": "mixer.o_proj",
            "ssm": "mixer",
            "ssm.in": "mixer.in_proj",
            "ssm.conv": "mixer.conv1d",
            "ssm.norm": "mixer.norm",
            "ssm.out": "mixer.out_proj",
            "mlp.gate_up": "mixer.{part}_proj",
            "mlp.down": "mixer.down_proj",
            "moe.router": "mixer.gate",
            "moe.correction": "mixer.gate",
            "moe.w13": "mixer.experts.{expert}.{part}_proj",
            "moe.w2": "mixer.experts.{expert}.{part}_proj",
            "moe.latent_in": "mixer.fc1_latent_proj",
            "moe.latent_out": "mixer.fc2_latent_proj",
            "moe.shared.gate_up": "mixer.shared_experts.{part}_proj",
            "moe.shared.down": "mixer.shared_experts.down_proj",
        },
        layer_prefix="backbone.layers.{layer}.",
        unread=("mtp.",),
    ),
    mtp=NEMOTRON_MTP,
)
