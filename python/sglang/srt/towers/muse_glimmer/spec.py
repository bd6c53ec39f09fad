"""Reads the encoder of images and videos of Muse-Glimmer and Muse-Spark from config.json."""

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

BLOCK_EPS = 1e-5
"""Epsilon of the norms in a layer, which no config states."""
_TOWER, _ADAPTER, _PROJECTION = "model.vision_tower.", "model.vision_adapter.", "model.vision_projection."
_COLOURS = 3
_LAYER_TYPES = ("full_attention", "window_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class MuseGlimmerTower(Tower):
    """Muse-Glimmer's encoder.

    side: learned positions a side, which are interpolated to an image's size, and patches a side of the windows in
        which patches see each other
    full_layers: layers in which all patches of a frame see each other
    adapter_size: width of the two layers behind the merge
    norm_eps: epsilon of the norms around the layers; text_eps: of the features' norm
    """

    side: int
    full_layers: tuple[int, ...]
    adapter_size: int
    norm_eps: float
    text_eps: float
    theta: float
    cuts: ClassVar[Mapping[str, Cut]] = {
        ".q_proj": Cut.ROWS,
        ".k_proj": Cut.ROWS,
        ".v_proj": Cut.ROWS,
        ".attn.proj": Cut.COLUMNS,
        ".fc1": Cut.ROWS,
        ".fc2": Cut.COLUMNS,
    }
    prefixes: ClassVar[tuple[str, ...]] = (_TOWER, _ADAPTER, _PROJECTION)

    def shapes(self) -> Iterator[NamedShape]:
        hidden, wide, adapted = self.hidden_size, self.intermediate_size, self.adapter_size
        embedder = _TOWER + "patch_embedder."
        yield f"{embedder}patch_embedding.weight", (hidden, self.patch_values)
        yield f"{embedder}position_embedding_table.weight", (self.side**2, hidden)
        yield from norm_shapes(_TOWER + "ln_pre", hidden)
        for i in range(self.num_layers):
            block = f"{_TOWER}layers.{i}."
            yield from norm_shapes(block + "norm1", hidden)
            yield from norm_shapes(block + "norm2", hidden)
            for part in ("q_proj", "k_proj", "v_proj", "proj"):
                yield from linear_shapes(f"{block}attn.{part}", hidden, hidden)
            yield from linear_shapes(block + "mlp.fc1", wide, hidden)
            yield from linear_shapes(block + "mlp.fc2", hidden, wide)
        yield from norm_shapes(_TOWER + "ln_post", hidden)
        yield from linear_shapes(_ADAPTER + "fc1", adapted, hidden * self.merge**2, bias=False)
        yield from linear_shapes(_ADAPTER + "fc2", adapted, adapted, bias=False)
        yield from linear_shapes(_PROJECTION.removesuffix("."), self.out_size, adapted, bias=False)

    def sees_whole_clips(self, layer: int) -> bool:
        return layer in self.full_layers


def describe_muse_glimmer(outer: ConfigReader, vision: ConfigReader) -> MuseGlimmerTower:
    """Describes the encoder of a config. Raises UserError for a missing key or a value that is not computed."""
    only(vision, "hidden_act", "gelu")
    only(outer, "projector_hidden_act", "gelu")
    hidden, heads = vision.positive("hidden_size", 1536), vision.positive("num_attention_heads", 16)
    whole_quarters(vision, hidden, heads)
    layers, merge = vision.positive("num_hidden_layers", 50), vision.positive("merge_size", 2)
    side = vision.positive("pos_emb_height", 32)
    if vision.positive("pos_emb_width", 32) != side:
        raise UserError(f"{vision.source}: the learned positions are not a square.")
    if outer.positive("out_hidden_size", 4 * 1536) != hidden * merge**2:
        raise UserError(f"{outer.source}: out_hidden_size is not {merge**2} times the {hidden} of a patch.")
    text = ConfigReader(outer.default("text_config", dict, {}), "config.json text_config")
    patch = vision.positive("patch_size", 14)
    return MuseGlimmerTower(
        hidden_size=hidden,
        intermediate_size=vision.positive("intermediate_size", 8960),
        num_layers=layers,
        num_heads=heads,
        patch_shape=(_COLOURS, vision.positive("patch_temporal", 2), patch, patch),
        merge=merge,
        out_size=text.positive("hidden_size"),
        side=side,
        full_layers=_full_layers(vision, layers),
        adapter_size=outer.positive("projector_hidden_size", 4096),
        norm_eps=vision.default("layer_norm_eps", float, 1e-5),
        text_eps=text.default("rms_norm_eps", float, 1e-5),
        theta=axial_theta(vision),
    )


def _full_layers(vision: ConfigReader, layers: int) -> tuple[int, ...]:
    """Returns the layers without windows: those listed, or else every fourth and the last. Raises UserError."""
    kinds = vision.default("layer_types", list, [])
    if not kinds:
        return tuple(i for i in range(layers) if i % 4 == 3 or i == layers - 1)
    if len(kinds) != layers or not all(kind in _LAYER_TYPES for kind in kinds):
        raise UserError(f"{vision.source}: layer_types must be {layers} of {', '.join(_LAYER_TYPES)}.")
    return tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
