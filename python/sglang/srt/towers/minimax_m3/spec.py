"""Reads MiniMax-M3's encoder of images and videos from config.json.

Published configs have the sizes of a token in `img_token_compression_config`; those that transformers writes have them
beside the other keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.towers.base.spec import Cut, NamedShape, Tower, axial_theta, linear_shapes, norm_shapes, only

_TOWER, _PROJECTOR, _MERGER = "vision_tower.vision_model.", "multi_modal_projector.", "patch_merge_mlp."


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniMaxM3Tower(Tower):
    """MiniMax-M3's encoder. `projector_size`: width of both projectors: that of patches, and that of a token's
    patches."""

    projector_size: int
    norm_eps: float
    theta: float
    cuts: ClassVar[Mapping[str, Cut]] = {
        ".q_proj": Cut.ROWS,
        ".k_proj": Cut.ROWS,
        ".v_proj": Cut.ROWS,
        ".out_proj": Cut.COLUMNS,
        ".mlp.fc1": Cut.ROWS,
        ".mlp.fc2": Cut.COLUMNS,
        ".linear_1": Cut.ROWS,
        ".linear_2": Cut.COLUMNS,
    }
    prefixes: ClassVar[tuple[str, ...]] = (_TOWER, _PROJECTOR, _MERGER)

    @property
    def axis_pairs(self) -> int:
        """Pairs of a head that rotate by each of time, row and column; the last dims do not rotate."""
        return self.head_dim // 6

    def shapes(self) -> Iterator[NamedShape]:
        hidden, wide = self.hidden_size, self.intermediate_size
        yield f"{_TOWER}embeddings.patch_embedding.weight", (hidden, self.patch_values)
        yield from norm_shapes(_TOWER + "pre_layrnorm", hidden)
        for i in range(self.num_layers):
            block = f"{_TOWER}encoder.layers.{i}."
            yield from norm_shapes(block + "layer_norm1", hidden)
            yield from norm_shapes(block + "layer_norm2", hidden)
            for part in ("q", "k", "v", "out"):
                yield from linear_shapes(f"{block}self_attn.{part}_proj", hidden, hidden)
            yield from linear_shapes(block + "mlp.fc1", wide, hidden)
            yield from linear_shapes(block + "mlp.fc2", hidden, wide)
        for prefix, size in ((_PROJECTOR, hidden), (_MERGER, self.out_size * self.merge**2)):
            yield from linear_shapes(prefix + "linear_1", self.projector_size, size)
            yield from linear_shapes(prefix + "linear_2", self.out_size, self.projector_size)

    def activation_size(self) -> int:
        """Returns the values as Tower does; the projector of patches may be wider than any layer."""
        hidden = self.hidden_size
        widest = max(8 * hidden, 2 * self.intermediate_size, self.projector_size + self.out_size)
        return 2 * hidden + widest + self.place_size


def describe_minimax_m3(outer: ConfigReader, vision: ConfigReader) -> MiniMaxM3Tower:
    """Describes the encoder of a config. Raises UserError for a missing key or a value that is not computed."""
    only(vision, "hidden_act", "gelu")
    only(vision, "position_embedding_type", "rope")
    only(vision, "rope_mode", "3d")
    only(outer, "projector_hidden_act", "gelu")
    only(outer, "vision_feature_select_strategy", "full")
    if outer.default("vision_feature_layer", int, -1) != -1 or not outer.default(
        "multimodal_projector_bias", bool, True
    ):
        raise UserError(f"{outer.source}: another vision_feature_layer than -1, or a projector without bias.")
    hidden, heads = vision.positive("hidden_size"), vision.positive("num_attention_heads")
    if hidden % (2 * heads) or hidden // heads < 6:
        raise UserError(f"{vision.source}: hidden size {hidden} does not divide into {heads} heads of pairs.")
    compression = vision.default("img_token_compression_config", dict, {})
    tokens = ConfigReader({**vision.values, **compression}, vision.source)
    only(tokens, "image_token_compression_method", "patch_merge")
    text = ConfigReader(outer.default("text_config", dict, {}), "config.json text_config")
    patch = vision.positive("patch_size", 14)
    return MiniMaxM3Tower(
        hidden_size=hidden,
        intermediate_size=vision.positive("intermediate_size"),
        num_layers=vision.positive("num_hidden_layers"),
        num_heads=heads,
        patch_shape=(vision.positive("num_channels", 3), tokens.positive("temporal_patch_size", 2), patch, patch),
        merge=tokens.positive("spatial_merge_size", 2),
        out_size=text.positive("hidden_size"),
        clip_frames=vision.positive("vision_segment_max_frames", 4),
        projector_size=outer.positive("projector_hidden_size", 6144),
        norm_eps=vision.default("layer_norm_eps", float, 1e-5),
        theta=axial_theta(vision),
    )
