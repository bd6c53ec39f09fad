"""Reads Step-3.7's encoder of images from config.json.

Published configs write `width`, `layers`, `heads` and `mlp_ratio`; those that transformers writes have the usual keys.
"""

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

_TOWER, _PROJECTOR = "vision_model.", "vit_large_projector."
_COLOURS = 3
_SAMPLERS = ("vit_downsampler1", "vit_downsampler2")
_SERVED = {"use_cls_token": False, "use_ln_pre": True, "use_ln_post": False, "use_abs_posemb": True, "use_rope2d": True}
"""Switches of published configs, and the only value that is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step3Tower(Tower):
    """Step-3.7's encoder. `side`: learned positions a side, which are interpolated to another size. Two convolutions
    with a stride of 2 make a token of a square of 4 x 4 patches."""

    side: int
    norm_eps: float
    theta: float
    projector_bias: bool
    cuts: ClassVar[Mapping[str, Cut]] = {
        ".attn.out_proj": Cut.COLUMNS,
        ".mlp.c_fc": Cut.ROWS,
        ".mlp.c_proj": Cut.COLUMNS,
        _SAMPLERS[0]: Cut.ROWS,
        _SAMPLERS[1]: Cut.COLUMNS,
    }
    prefixes: ClassVar[tuple[str, ...]] = (_TOWER, _PROJECTOR)

    def cut_of(self, name: str) -> Cut | None:
        """Returns the cut as Tower does; the name of the matrix of queries, keys and values does not end in
        `weight`."""
        if self.ranks > 1 and ".attn.in_proj_" in name:
            return Cut.HEADS
        return Tower.cut_of(self, name)

    def shapes(self) -> Iterator[NamedShape]:
        hidden, wide = self.hidden_size, self.intermediate_size
        yield f"{_TOWER}conv1.weight", (hidden, self.patch_values)
        yield f"{_TOWER}positional_embedding", (self.side**2, hidden)
        yield from norm_shapes(_TOWER + "ln_pre", hidden)
        for i in range(self.num_layers):
            block = f"{_TOWER}transformer.resblocks.{i}."
            yield from norm_shapes(block + "ln_1", hidden)
            yield from norm_shapes(block + "ln_2", hidden)
            yield f"{block}ls_1.gamma", (hidden,)
            yield f"{block}ls_2.gamma", (hidden,)
            yield f"{block}attn.in_proj_weight", (3 * hidden, hidden)
            yield f"{block}attn.in_proj_bias", (3 * hidden,)
            yield from linear_shapes(block + "attn.out_proj", hidden, hidden)
            yield from linear_shapes(block + "mlp.c_fc", wide, hidden)
            yield from linear_shapes(block + "mlp.c_proj", hidden, wide)
        for number, name in enumerate(_SAMPLERS):
            channels = hidden << number
            yield f"{_TOWER}{name}.weight", (2 * channels, channels, 3, 3)
            yield f"{_TOWER}{name}.bias", (2 * channels,)
        projector = _PROJECTOR.removesuffix(".")
        yield from linear_shapes(projector, self.out_size, 4 * hidden, bias=self.projector_bias)


def describe_step3(outer: ConfigReader, vision: ConfigReader) -> Step3Tower:
    """Describes the encoder of a config. Raises UserError for a missing key or a value that is not computed."""
    only(vision, "hidden_act", "quick_gelu")
    for key, served in _SERVED.items():
        if vision.default(key, bool, served) != served:
            raise UserError(f"{vision.source}: {key} = {not served} is not supported.")
    hidden, heads = (_size(vision, *keys) for keys in (("width", "hidden_size"), ("heads", "num_attention_heads")))
    whole_quarters(vision, hidden, heads)
    ratio = vision.default("mlp_ratio", float, 8960 / 1536)
    text = outer.default("text_config", dict, {})
    patch, size = vision.positive("patch_size", 14), vision.positive("image_size", 728)
    return Step3Tower(
        hidden_size=hidden,
        intermediate_size=round(hidden * ratio),
        num_layers=_size(vision, "layers", "num_hidden_layers"),
        num_heads=heads,
        patch_shape=(_COLOURS, 1, patch, patch),
        merge=4,
        out_size=ConfigReader(text or outer.values, "config.json text_config").positive("hidden_size"),
        side=size // patch,
        norm_eps=vision.default("layer_norm_eps", float, 1e-5),
        theta=axial_theta(vision),
        projector_bias=outer.default("projector_bias", bool, False),
    )


def _size(vision: ConfigReader, *keys: str) -> int:
    size = vision.count(*keys)
    if size < 1:
        raise UserError(f"{vision.source}: the key {keys[0]!r} is missing.")
    return size
