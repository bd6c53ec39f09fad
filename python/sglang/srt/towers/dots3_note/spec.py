"""Reads dots3-note's encoder of images and videos from config.json, as published and as transformers writes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.towers.base.spec import (
    Cut,
    NamedShape,
    Tower,
    axial_theta,
    linear_shapes,
    norm_shapes,
    only,
    whole_quarters,
)

PREFIX = "vision_encoder."
ROUTERS = (".mlp.gate_weight", ".mlp.router_bias")
"""Ends of the names of weights that are held in float32."""
_SERVED = {
    "attention_bias": False,
    "is_causal": False,
    "mlp_bias": False,
    "post_norm": True,
    "pre_pixel_shuffle": True,
    "use_bias": False,
    "use_qk_norm": True,
}
"""Switches, and the only value that is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dots3Tower(Tower):
    """dots3-note's encoder.

    experts: number of experts of each layer; 0: it has a gated MLP
    expert_size: intermediate size of an expert
    top_k: most experts that a patch goes to
    router_scale: multiplies the experts' weights
    """

    experts: tuple[int, ...]
    expert_size: int
    top_k: int
    router_scale: float
    norm_eps: float
    theta: float
    cuts: ClassVar[Mapping[str, Cut]] = {
        ".attn.qkv": Cut.HEADS,
        ".attn.proj": Cut.COLUMNS,
        ".fc1": Cut.ROWS,
        ".fc3": Cut.ROWS,
        ".fc2": Cut.COLUMNS,
        ".adapter.mlp.0": Cut.ROWS,
        ".adapter.mlp.2": Cut.COLUMNS,
    }
    prefixes: ClassVar[tuple[str, ...]] = (PREFIX,)

    def shapes(self) -> Iterator[NamedShape]:
        hidden, merged = self.hidden_size, self.hidden_size * self.merge**2
        yield from linear_shapes(PREFIX + "patch_embed.proj", hidden, self.patch_values)
        yield f"{PREFIX}patch_embed.norm.weight", (hidden,)
        for i, experts in enumerate(self.experts):
            block = f"{PREFIX}blocks.{i}."
            yield f"{block}norm_1.weight", (hidden,)
            yield f"{block}norm_2.weight", (hidden,)
            yield from linear_shapes(block + "attn.qkv", 3 * hidden, hidden, bias=False)
            yield from linear_shapes(block + "attn.proj", hidden, hidden, bias=False)
            yield f"{block}attn.q_norm.weight", (self.head_dim,)
            yield f"{block}attn.k_norm.weight", (self.head_dim,)
            if not experts:
                yield from _gated(f"{block}mlp.", hidden, self.intermediate_size)
                continue
            yield f"{block}mlp.gate_weight", (experts, hidden)
            yield f"{block}mlp.router_bias", (experts,)
            for number in range(experts):
                yield from _gated(f"{block}mlp.experts.{number}.", hidden, self.expert_size)
        yield f"{PREFIX}post_trunk_norm.weight", (hidden,)
        yield from norm_shapes(PREFIX + "adapter.ln_q", hidden)
        yield from linear_shapes(PREFIX + "adapter.mlp.0", merged, merged)
        yield from linear_shapes(PREFIX + "adapter.mlp.2", self.out_size, merged)

    def streamed_layers(self) -> dict[str, int]:
        """Returns the layers as `Tower` does, without routers, which are not in the type of other weights."""
        layers = Tower.streamed_layers(self)
        return {name: layer for name, layer in layers.items() if not name.endswith(ROUTERS)}

    def num_weights(self) -> int:
        """Returns the number of 16-bit weights: those of routers count twice."""
        return Tower.num_weights(self) + sum(self.experts) * (self.hidden_size + 1)

    def activation_size(self) -> int:
        of_experts = self.top_k * (3 * self.expert_size + 2 * self.hidden_size) * any(self.experts)
        widest = max(8 * self.hidden_size, 3 * self.intermediate_size, of_experts)
        return 2 * self.hidden_size + widest + self.place_size


def _gated(prefix: str, hidden: int, wide: int) -> Iterator[NamedShape]:
    yield from linear_shapes(prefix + "fc1", wide, hidden, bias=False)
    yield from linear_shapes(prefix + "fc3", wide, hidden, bias=False)
    yield from linear_shapes(prefix + "fc2", hidden, wide, bias=False)


def describe_dots3(outer: ConfigReader, vision: ConfigReader) -> Dots3Tower:
    """Describes the encoder of a vision_config. Raises UserError for a value that is not computed."""
    for key, name in (("hidden_act", "silu"), ("router_scoring_func", "sigmoid"), ("adapter_type", "patch_merger")):
        only(vision, key, name)
    for key, served in _SERVED.items():
        if vision.default(key, bool, served) != served:
            raise UserError(f"{vision.source}: {key} = {not served} is not supported.")
    hidden = vision.count("embed_dim", "hidden_size") or 1536
    heads, patch = vision.count("num_heads", "num_attention_heads") or 24, vision.positive("patch_size", 14)
    whole_quarters(vision, hidden, heads)
    text = ConfigReader(outer.default("text_config", dict, {}) or outer.values, "config.json")
    layers, merge, out = (
        vision.positive("num_hidden_layers", 42),
        vision.positive("spatial_merge_size", 2),
        vision.positive("adapter_out_dim", 5120),
    )
    for key, size, other in (
        ("temporal_patch_size", vision.positive("temporal_patch_size", 1), 1),
        ("adapter_in_dim", vision.positive("adapter_in_dim", hidden), hidden),
        ("adapter_merge_size", vision.positive("adapter_merge_size", merge), merge),
        ("adapter_out_dim", out, text.positive("hidden_size")),
    ):
        if size != other:
            raise UserError(f"{vision.source}: {key} = {size} is not supported; it must be {other}.")
    return Dots3Tower(
        hidden_size=hidden,
        intermediate_size=vision.positive("intermediate_size", 4224),
        num_layers=layers,
        num_heads=heads,
        patch_shape=(vision.positive("num_channels", 3), 1, patch, patch),
        merge=merge,
        out_size=out,
        experts=_experts(vision, layers),
        expert_size=vision.positive("moe_intermediate_size", 2112),
        top_k=vision.count("capacity_factor", "num_experts_per_tok") or 2,
        router_scale=vision.default("router_scale", float, vision.default("router_scaling_factor", float, 1.0)),
        norm_eps=vision.default("rms_norm_eps", float, 1e-5),
        theta=axial_theta(vision),
    )


def _experts(vision: ConfigReader, layers: int) -> tuple[int, ...]:
    """Returns the number of experts of each layer, 0 for those without."""
    routed = vision.default("pyramid_num_routed", list, [])
    if not routed:
        kinds, by_layer = vision.default("mlp_layer_types", list, []), vision.default("per_layer_config", dict, {})
        usual = vision.positive("num_local_experts", 64)
        stated = {int(layer): keys.get("num_local_experts", usual) for layer, keys in by_layer.items()}
        routed = [stated.get(i, usual) if kind == "sparse" else -1 for i, kind in enumerate(kinds)]
    if len(routed) != layers or not all(isinstance(count, int) for count in routed):
        raise UserError(f"{vision.source}: pyramid_num_routed must be {layers} numbers of experts.")
    return tuple(max(0, count) for count in routed)
