"""Reads Llama 4's encoder of images from config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.towers.base.spec import (
    ROTARY_THETA,
    Cut,
    NamedShape,
    Tower,
    linear_shapes,
    norm_shapes,
    only,
    whole_quarters,
)

NORM_EPS = 1e-5
"""Epsilon of all norms, whatever the config's `norm_eps` says."""
_TOWER, _PROJECTOR = "vision_model.", "multi_modal_projector."


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4Tower(Tower):
    """Llama 4's encoder. `side`: patches a side of a tile; all tiles have one size. A class token for each tile is seen
    by its patches, and dropped behind the layers. `adapter_size`: width of the two layers behind the merge."""

    side: int
    adapter_size: int
    theta: float
    cuts: ClassVar[Mapping[str, Cut]] = {
        ".q_proj": Cut.ROWS,
        ".k_proj": Cut.ROWS,
        ".v_proj": Cut.ROWS,
        ".o_proj": Cut.COLUMNS,
        ".mlp.fc1": Cut.ROWS,
        ".mlp.fc2": Cut.COLUMNS,
    }
    prefixes: ClassVar[tuple[str, ...]] = (_TOWER, _PROJECTOR)

    @property
    def tile_side(self) -> int:
        return self.side

    def shapes(self) -> Iterator[NamedShape]:
        hidden, wide, adapted = self.hidden_size, self.intermediate_size, self.adapter_size
        yield f"{_TOWER}patch_embedding.linear.weight", (hidden, self.patch_values)
        yield f"{_TOWER}class_embedding", (hidden,)
        yield f"{_TOWER}positional_embedding_vlm", (self.side**2 + 1, hidden)
        yield from norm_shapes(_TOWER + "layernorm_pre", hidden)
        for i in range(self.num_layers):
            block = f"{_TOWER}model.layers.{i}."
            yield from norm_shapes(block + "input_layernorm", hidden)
            yield from norm_shapes(block + "post_attention_layernorm", hidden)
            for part in ("q", "k", "v", "o"):
                yield from linear_shapes(f"{block}self_attn.{part}_proj", hidden, hidden)
            yield from linear_shapes(block + "mlp.fc1", wide, hidden)
            yield from linear_shapes(block + "mlp.fc2", hidden, wide)
        yield from norm_shapes(_TOWER + "layernorm_post", hidden)
        yield from linear_shapes(_TOWER + "vision_adapter.mlp.fc1", adapted, hidden * self.merge**2, bias=False)
        yield from linear_shapes(_TOWER + "vision_adapter.mlp.fc2", adapted, adapted, bias=False)
        yield from linear_shapes(_PROJECTOR + "linear_1", self.out_size, adapted, bias=False)


def describe_llama4(outer: ConfigReader, vision: ConfigReader) -> Llama4Tower:
    """Describes the encoder of a config. Raises UserError for a missing key or a value that is not computed."""
    only(vision, "hidden_act", "gelu")
    hidden, heads = vision.positive("hidden_size"), vision.positive("num_attention_heads")
    whole_quarters(vision, hidden, heads)
    patch, wide, adapted = vision.positive("patch_size"), vision.positive("intermediate_size"), _adapter_size(vision)
    shrunk = vision.default("pixel_shuffle_ratio", float, 0.5)
    merge = round(1 / shrunk) if shrunk > 0 else 0
    side = vision.positive("image_size") // patch
    if merge < 1 or merge * shrunk != 1 or side % merge:
        raise UserError(f"{vision.source}: pixel_shuffle_ratio {shrunk} makes no squares of {side} x {side} patches.")
    if wide != hidden * merge**2:
        raise UserError(f"{vision.source}: intermediate_size is not {merge**2} times the {hidden} of a patch.")
    text = ConfigReader(outer.default("text_config", dict, {}), "config.json text_config")
    return Llama4Tower(
        hidden_size=hidden,
        intermediate_size=wide,
        num_layers=vision.positive("num_hidden_layers"),
        num_heads=heads,
        patch_shape=(vision.positive("num_channels", 3), 1, patch, patch),
        merge=merge,
        out_size=text.positive("hidden_size"),
        side=side,
        adapter_size=adapted,
        theta=_theta(vision),
    )


def _adapter_size(vision: ConfigReader) -> int:
    keys = ("projector_input_dim", "projector_output_dim", "vision_output_dim")
    sizes = [vision.positive(key) for key in keys]
    if len(set(sizes)) > 1:
        raise UserError(f"{vision.source}: {', '.join(keys)} are {sizes}; only equal ones are supported.")
    return sizes[0]


def _theta(vision: ConfigReader) -> float:
    """Returns the base of the rotary angles. Published configs have it beside the other keys, those of transformers in
    `rope_parameters`."""
    rope = ConfigReader(vision.default("rope_parameters", dict, {}), f"{vision.source} rope_parameters")
    only(rope, "rope_type", "default")
    return rope.default("rope_theta", float, vision.default("rope_theta", float, ROTARY_THETA))
