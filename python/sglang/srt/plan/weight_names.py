"""Names of the parameters in a family's checkpoints. No torch: planning looks up a module's quantization by its
name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class PartKey:
    """Names a part of a parameter; the fields fill the template of the checkpoint's name.

    `module` is the module of the layer whose template is used, where it is not the parameter's own (a shared expert
    that is held among the routed ones).
    """

    part: str = ""
    expert: int = 0
    module: str = ""
    piece: int = 0
    """Number of the slice, where one tensor fills several slices that lie apart in the parameter."""


DECODERS = ("language_model.model.", "model.language_model.")
"""Beginnings of the decoder's names in multimodal checkpoints: the older one, and that of newer transformers."""


CACHE_SCALE_ALIASES = (
    *((f".{module}.{scale}", f".{scale}") for module in ("k_proj", "qkv_proj") for scale in ("k_scale", "v_scale")),
    (".v_proj.v_scale", ".v_scale"),
    (".k_proj.output_scale", ".k_scale"),
    (".v_proj.output_scale", ".v_scale"),
    (".kv_scale", ".k_scale"),
)
"""(name ending of some checkpoints, usual one) of the scales of a cache: of ModelOpt, of modules that are fused, of
older llm-compressor and Quark, and of AutoFP8, whose one scale is that of keys and values."""
CACHE_SCALES = (".k_scale", ".v_scale")
"""Usual name endings of the scales of a cache."""
_FP8_ALIASES = ((".weight_scale_inv", ".weight_scale"), (".activation_scale", ".input_scale"))
"""(transformers' name, usual name) of the scales of FP8 weights with one scale; the first is used for block scales,
too."""


def usual_fp8_name(name: str) -> str:
    """Returns the name that most checkpoints have for a scale of FP8 weights with one scale; other names unchanged."""
    for ending, usual in _FP8_ALIASES:
        if name.endswith(ending):
            return name.removesuffix(ending) + usual
    return name


USUALLY_IGNORED = (
    *("rotary_emb.inv_freq", *CACHE_SCALES),
    *(".q_scale", ".q_proj.output_scale", ".prob_scale", ".prob_output_scale"),
)


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Names of modules in the checkpoint, keyed by ours. `{part}` and `{expert}` stand for the fields of a PartKey,
    `{own}` for the part's own name whatever `parts` says.

    `layer` names are relative to `layer_prefix`, in which `{layer}` is the layer's number. `ignore`: endings of
    checkpoint tensors that are not loaded (scales of a cache or of probabilities that are not quantized).
    """

    model: Mapping[str, str]
    layer: Mapping[str, str]
    layer_prefix: str = "model.layers.{layer}."
    first_layer: int = 0
    """Number that checkpoints give the first layer."""
    ignore: tuple[str, ...] = USUALLY_IGNORED
    aliases: tuple[tuple[str, str], ...] = CACHE_SCALE_ALIASES
    """Pairs of name endings: that of some checkpoints, and the usual one that replaces it."""
    beginnings: tuple[tuple[str, str], ...] = ()
    """Pairs of name beginnings, likewise; they are replaced in order."""
    renamings: tuple[tuple[str, str], ...] = ()
    """Pairs of a pattern anywhere in a name and what replaces it, applied once each, in order, before the others."""
    decoder: str = "model."
    """Prefix of the decoder's names; multimodal checkpoints have it at one of DECODERS."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Names that stand for `{part}` where it is not the part's own name (gate: w1)."""
    behind: tuple[str, ...] = ()
    """Beginnings of names of tensors behind the last layer, besides the norm and the output head."""
    unread: tuple[str, ...] = ()
    """Beginnings of names of tensors that are not loaded: layers that only drafts use, encoders of other inputs."""

    modules: tuple[tuple[str, str], ...] = ()
    """Pairs of what the names of a layer's modules begin with in transformers' class, as adapters have them, and in
    checkpoints, where these differ."""

    def checkpoint_name(self, name: str, key: PartKey) -> str:
        """Returns the name of the checkpoint tensor that is part `key` of our parameter `name`
        ("layers.0.attn.qkv.weight")."""
        module, _, leaf = name.rpartition(".")
        if module.startswith("layers."):
            _, number, module = module.split(".", 2)
            return f"{self.layer_module(int(number), key.module or module, key.part, key.expert)}.{leaf}"
        return f"{self.model[module].format(part=self._part(key.part))}.{leaf}".removeprefix(".")

    def module_of_class(self, layer: int, module: str) -> str:
        """Returns the checkpoint's name of what transformers' class calls `module` in a layer."""
        for theirs, ours in self.modules:
            if module.startswith(theirs):
                module = ours + module.removeprefix(theirs)
                break
        return self.layer_prefix.format(layer=layer) + module

    def layer_module(self, layer: int, module: str, part: str = "", expert: int = 0) -> str:
        """Returns the checkpoint's name of the module of a layer that holds this part of our module ("attn.qkv",
        "moe.w13")."""
        template = self.layer_prefix.format(layer=self.first_layer + layer) + self.layer[module]
        return template.format(part=self._part(part), own=part, expert=expert).removesuffix(".")

    def _part(self, part: str) -> str:
        return self.parts.get(part, part)

    def canonical(self, name: str) -> str:
        """Returns a checkpoint tensor's name with variant prefixes and endings replaced by the usual ones."""
        for pattern, usual in self.renamings:
            name = re.sub(pattern, usual, name, count=1)
        for place in DECODERS:
            if self.decoder in DECODERS and name.startswith(place):
                name = self.decoder + name.removeprefix(place)
        for beginning, usual in self.beginnings:
            if name.startswith(beginning):
                name = usual + name.removeprefix(beginning)
        for ending, usual in self.aliases:
            if name.endswith(ending):
                return name.removesuffix(ending) + usual
        return name

    def with_text_names(self) -> WeightMap:
        """Returns the names with those that the decoder has in a model of text alone, where it lies elsewhere: what was
        trained on the one fits the other."""
        if self.decoder == "model.":
            return self
        return replace(self, beginnings=(*self.beginnings, ("model.layers.", f"{self.decoder}layers.")))

    def below(self, prefix: str) -> WeightMap:
        """Returns the names for a checkpoint that has the decoder at `prefix`; "model." changes nothing. Names of other
        tensors stay."""
        if prefix == "model.":
            return self

        def moved(name: str) -> str:
            return prefix + name.removeprefix(self.decoder) if name.startswith(self.decoder) else name

        model = {ours: moved(name) for ours, name in self.model.items()}
        return replace(self, model=model, layer_prefix=moved(self.layer_prefix), decoder=prefix)


MODEL_NAMES: Mapping[str, str] = {"embed": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head"}
ATTENTION_NAMES: Mapping[str, str] = {
    "input_norm": "input_layernorm",
    "attn": "self_attn",
    "attn.qkv": "self_attn.{part}_proj",
    "attn.o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
}
QK_NORM_NAMES: Mapping[str, str] = {"attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm"}
MLP_NAMES: Mapping[str, str] = {"mlp.gate_up": "mlp.{part}_proj", "mlp.down": "mlp.down_proj"}
EXPERT_NAMES: Mapping[str, str] = {
    "moe.router": "mlp.gate",
    "moe.correction": "mlp.gate",
    "moe.w13": "mlp.experts.{expert}.{part}_proj",
    "moe.w2": "mlp.experts.{expert}.{part}_proj",
}
W123_NAMES: Mapping[str, str] = {
    "moe.router": "block_sparse_moe.gate",
    "moe.correction": "block_sparse_moe",
    "moe.w13": "block_sparse_moe.experts.{expert}.{part}",
    "moe.w2": "block_sparse_moe.experts.{expert}.{part}",
}
W123_PARTS: Mapping[str, str] = {"gate": "w1", "up": "w3", "down": "w2"}
SHARED_NAMES: Mapping[str, str] = {
    "moe.shared.gate_up": "mlp.shared_experts.{part}_proj",
    "moe.shared.down": "mlp.shared_experts.down_proj",
}
GATED_SHARED_NAMES: Mapping[str, str] = {
    "moe.shared.gate_up": "mlp.shared_expert.{part}_proj",
    "moe.shared.down": "mlp.shared_expert.down_proj",
    "moe.shared_gate": "mlp.shared_expert_gate",
}
BLOCK_INDEX_NAMES: Mapping[str, str] = {
    "attn.index": "self_attn.{part}",
    "attn.index_q_norm": "self_attn.index_q_norm",
    "attn.index_k_norm": "self_attn.index_k_norm",
}
LATENT_NAMES: Mapping[str, str] = {
    "attn.qkv_a": "self_attn.{part}",
    "attn.q_a_norm": "self_attn.q_a_layernorm",
    "attn.q_b": "self_attn.q_b_proj",
    "attn.kv_a_norm": "self_attn.kv_a_layernorm",
    "attn.kv_b": "self_attn.kv_b_proj",
    "attn.index_q": "self_attn.indexer.wq_b",
    "attn.index_k": "self_attn.indexer.wk",
    "attn.index_norm": "self_attn.indexer.k_norm",
    "attn.index_weights": "self_attn.indexer.weights_proj",
}
RECURRENT_NAMES: Mapping[str, str] = {
    "gdn": "linear_attn",
    "gdn.in": "linear_attn.in_proj_{part}",
    "gdn.in_gates": "linear_attn.in_proj_{part}",
    "gdn.conv": "linear_attn.conv1d",
    "gdn.norm": "linear_attn.norm",
    "gdn.out": "linear_attn.out_proj",
}
KIMI_DELTA_NAMES: Mapping[str, str] = {
    "kda": "self_attn",
    **{f"kda.{name}": "self_attn.{part}_proj" for name in ("in", "low", "beta", "decay", "gate", "decay_gate")},
    "kda.conv": "self_attn.{part}_conv1d",
    "kda.norm": "self_attn.o_norm",
    "kda.out": "self_attn.o_proj",
}
USUAL_NAMES = WeightMap(
    MODEL_NAMES,
    {
        **ATTENTION_NAMES,
        **QK_NORM_NAMES,
        **LATENT_NAMES,
        **RECURRENT_NAMES,
        **MLP_NAMES,
        **EXPERT_NAMES,
        **SHARED_NAMES,
    },
)
"""Names in the checkpoints of most families, also used for families that are not served."""
