"""Reads Gemma 4's encoder of images and videos from config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.configs.rope import rope_parameters
from sglang.srt.errors import UserError
from sglang.srt.towers.base.spec import Cut, NamedShape, Tower, only, whole_quarters

_THETA = 100.0
_TOWER, _PROJECTOR = "model.vision_tower.", "model.embed_vision."
_COLOURS = 3
BOUNDS = ("input_min", "input_max", "output_min", "output_max")
"""Names of the bounds to which a linear layer's inputs and outputs are clamped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Tower(Tower):
    """Gemma 4's encoder.

    merge: patches a side whose mean becomes a token
    places: rows (and columns) with a learned position
    bounded: linear layers have BOUNDS
    standardized: the means are shifted and scaled
    """

    places: int
    theta: float
    norm_eps: float
    bounded: bool
    standardized: bool
    cuts: ClassVar[Mapping[str, Cut]] = {
        ".q_proj.linear": Cut.ROWS,
        ".k_proj.linear": Cut.ROWS,
        ".v_proj.linear": Cut.ROWS,
        ".o_proj.linear": Cut.COLUMNS,
        ".gate_proj.linear": Cut.ROWS,
        ".up_proj.linear": Cut.ROWS,
        ".down_proj.linear": Cut.COLUMNS,
    }
    prefixes: ClassVar[tuple[str, ...]] = (_TOWER, _PROJECTOR)
    computes_with_pixels: ClassVar[bool] = True

    def shapes(self) -> Iterator[NamedShape]:
        hidden, wide = self.hidden_size, self.intermediate_size
        yield f"{_TOWER}patch_embedder.input_proj.weight", (hidden, self.patch_values)
        yield f"{_TOWER}patch_embedder.position_embedding_table", (2, self.places, hidden)
        for i in range(self.num_layers):
            block = f"{_TOWER}encoder.layers.{i}."
            for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
                yield f"{block}{norm}_layernorm.weight", (hidden,)
            for part in ("q", "k", "v", "o"):
                yield from self._linear(f"{block}self_attn.{part}_proj", hidden, hidden)
            yield f"{block}self_attn.q_norm.weight", (self.head_dim,)
            yield f"{block}self_attn.k_norm.weight", (self.head_dim,)
            yield from self._linear(block + "mlp.gate_proj", wide, hidden)
            yield from self._linear(block + "mlp.up_proj", wide, hidden)
            yield from self._linear(block + "mlp.down_proj", hidden, wide)
        if self.standardized:
            yield f"{_TOWER}std_bias", (hidden,)
            yield f"{_TOWER}std_scale", (hidden,)
        yield f"{_PROJECTOR}embedding_projection.weight", (self.out_size, hidden)

    def _linear(self, name: str, rows: int, cols: int) -> Iterator[NamedShape]:
        yield f"{name}.linear.weight", (rows, cols)
        if self.bounded:
            yield from ((f"{name}.{bound}", ()) for bound in BOUNDS)

    def activation_size(self) -> int:
        """Returns the values as Tower does; norms are computed in float32."""
        return 2 * self.hidden_size + max(9 * self.hidden_size, 3 * self.intermediate_size)


def describe_gemma4(outer: ConfigReader, vision: ConfigReader) -> Gemma4Tower:
    """Describes the encoder of a config. Raises UserError for a missing key or a value that is not computed."""
    only(vision, "hidden_activation", "gelu_pytorch_tanh")
    hidden, heads = vision.positive("hidden_size"), vision.positive("num_attention_heads")
    whole_quarters(vision, hidden, heads)
    if vision.positive("head_dim", hidden // heads) * heads != hidden:
        raise UserError(f"{vision.source}: head_dim times num_attention_heads is not the hidden size {hidden}.")
    if vision.positive("num_key_value_heads", heads) != heads or vision.default("attention_bias", bool, False):
        raise UserError(f"{vision.source}: shared key heads and attention_bias are not supported.")
    text = ConfigReader(outer.default("text_config", dict, {}), "config.json text_config")
    patch = vision.positive("patch_size", 16)
    return Gemma4Tower(
        hidden_size=hidden,
        intermediate_size=vision.positive("intermediate_size"),
        num_layers=vision.positive("num_hidden_layers"),
        num_heads=heads,
        patch_shape=(_COLOURS, 1, patch, patch),
        merge=vision.positive("pooling_kernel_size", 3),
        out_size=text.positive("hidden_size"),
        places=vision.positive("position_embedding_size", 10240),
        theta=rope_parameters({"rope_theta": _THETA, **vision.values})["rope_theta"],
        norm_eps=vision.default("rms_norm_eps", float, 1e-6),
        bounded=vision.default("use_clipped_linears", bool, False),
        standardized=vision.default("standardize", bool, False),
    )
