"""Reads the encoder of images and videos of MiMo-V2.5 and V2.6 from config.json."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.towers.base.spec import Cut, NamedShape, Slices, Tower, gated_shapes, linear_shapes, only
from sglang.srt.towers.qwen2_5_vl.spec import NORM_EPS, Qwen2_5VLTower

if TYPE_CHECKING:
    from typing import Self

BLOCKS_AT_ONCE = 16
"""Blocks of queries whose scores exist at a time, in layers with windows."""
_PREFIX = Qwen2_5VLTower.prefixes[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class MiMoTower(Qwen2_5VLTower):
    """MiMo-V2's encoder: Qwen2.5-VL's with fewer heads of keys and values, and windows of another kind. In layers with
    a window a patch sees those up to `window` places away in its frame, in the order of the squares of the merge.

    kv_heads, head_size: heads of keys and values, and dims of a head
    column_layers: layers for which squares come column by column
    sinks: layers with a window have a stored score of each head for one more key, which has no value
    """

    kv_heads: int
    head_size: int
    column_layers: tuple[int, ...]
    sinks: bool

    @property
    def head_dim(self) -> int:
        return self.head_size

    @property
    def _rows(self) -> tuple[int, int, int]:
        """Rows of queries, keys and values."""
        of_keys = self.kv_heads * self.head_size
        return self.num_heads * self.head_size, of_keys, of_keys

    def shapes(self) -> Iterator[NamedShape]:
        hidden, merged = self.hidden_size, self.hidden_size * self.merge**2
        yield from linear_shapes(_PREFIX + "patch_embed.proj", hidden, self.patch_values, bias=False)
        for i in range(self.num_layers):
            block = f"{_PREFIX}blocks.{i}."
            yield f"{block}norm1.weight", (hidden,)
            yield f"{block}norm2.weight", (hidden,)
            yield from linear_shapes(block + "attn.qkv", sum(self._rows), hidden)
            yield from linear_shapes(block + "attn.proj", hidden, self._rows[0])
            if self.sinks and not self.sees_whole_clips(i):
                yield f"{block}attn.sinks", (self.num_heads,)
            yield from gated_shapes(block + "mlp.", hidden, self.intermediate_size, bias=True)
        yield f"{_PREFIX}merger.ln_q.weight", (hidden,)
        yield from linear_shapes(_PREFIX + "merger.mlp.0", merged, merged, bias=False)
        yield from linear_shapes(_PREFIX + "merger.mlp.2", self.out_size, merged, bias=False)

    def shared_by(self, ranks: int) -> Self:
        return self if self.kv_heads % ranks else Tower.shared_by(self, ranks)

    def pieces(self, name: str, shape: tuple[int, ...], rank: int) -> list[tuple[Slices, Slices]]:
        if self.cut_of(name) is not Cut.HEADS:
            return Tower.pieces(self, name, shape, rank)
        pairs, first, filled = list[tuple[Slices, Slices]](), 0, 0
        for rows in self._rows:
            count = rows // self.ranks
            stored = slice(first + rank * count, first + (rank + 1) * count)
            pairs.append(((stored,), (slice(filled, filled + count),)))
            first, filled = first + rows, filled + count
        return pairs

    def activation_size(self) -> int:
        """Returns the most values of a patch as `Tower` does; keys and values are repeated for heads that share
        them."""
        return 2 * self.hidden_size + max(7 * self._rows[0], 3 * self.intermediate_size) + self.place_size

    def step_values(self, patches: int) -> int:
        """Returns the values of a step; scores of a few blocks, their weights and a mask are in float32."""
        scores = 6 * BLOCKS_AT_ONCE * self.rank_heads * 3 * self.window**2
        return patches * self.activation_size() + scores


def describe_mimo(outer: ConfigReader, vision: ConfigReader) -> MiMoTower:
    """Describes the encoder of a vision_config. Raises UserError for a missing key or a value that is not computed."""
    only(outer, "vision_model_type", "mimovl")
    only(vision, "hidden_act", "silu")
    prepared = ConfigReader(outer.default("processor_config", dict, {}), f"{outer.source} processor_config")
    layers, patch, heads = vision.positive("depth"), vision.positive("patch_size"), vision.positive("num_heads")
    kv_heads, size = vision.positive("num_key_value_heads", heads), vision.positive("qk_channels", 64)
    out = vision.positive("out_hidden_size")
    for wrong, message in (
        (heads % kv_heads, f"{kv_heads} heads of keys do not divide {heads} of queries"),
        (size % 4, f"the pairs of a head of {size} dims do not divide between rows and columns"),
        (vision.positive("kv_channels", size) != size, f"kv_channels differs from the {size} dims of keys"),
        (vision.default("rms_norm_eps", float, NORM_EPS) != NORM_EPS, f"rms_norm_eps is not {NORM_EPS}"),
        (prepared.default("temporal_compression_ratio", int, 1) != 1, "temporal_compression_ratio is not 1"),
        (prepared.default("rope_type", str, "rope") == "mrope", "rope_type mrope is not supported"),
        (not prepared.default("use_video_timestamps", bool, True), "use_video_timestamps false is not supported"),
        (prepared.values.get("num_frames") is not None, "num_frames in place of fps is not supported"),
        (out != outer.positive("hidden_size"), f"out_hidden_size {out} is not the model's hidden size"),
    ):
        if wrong:
            raise UserError(f"{vision.source}: {message}.")
    full = vision.require("fullatt_block_indexes", list)
    if not all(isinstance(layer, int) and 0 <= layer < layers for layer in full):
        raise UserError(f"{vision.source}: fullatt_block_indexes {full} must be layers of the {layers}.")
    kinds = vision.default("vit_window_attn_types", list, []) or [-1] * layers
    if len(kinds) != layers or not all(kind in (-1, 0, 1) for kind in kinds):
        raise UserError(f"{vision.source}: vit_window_attn_types must be {layers} of -1, 0 and 1.")
    return MiMoTower(
        hidden_size=vision.positive("hidden_size"),
        intermediate_size=vision.positive("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        # Published configs call the channels `in_chans`.
        patch_shape=(
            vision.count("in_channels", "in_chans") or 3,
            vision.positive("temporal_patch_size", 2),
            patch,
            patch,
        ),
        merge=vision.positive("spatial_merge_size", 2),
        out_size=out,
        window=vision.positive("visual_token_window_size"),
        full_layers=tuple(full),
        kv_heads=kv_heads,
        head_size=size,
        column_layers=tuple(i for i, kind in enumerate(kinds) if kind == 1),
        sinks=vision.default("use_sink", bool, False),
    )
