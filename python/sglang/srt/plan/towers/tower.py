"""The form that every encoder of images and videos has: a transformer over patches, whose outputs are merged to
tokens."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar, Self

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError

ROTARY_THETA = 10000.0
"""The base of rotary angles in every published encoder whose config does not name it."""
NamedShape = tuple[str, tuple[int, ...]]
Slices = tuple[slice, ...]


class Cut(Enum):
    """How ranks share out a linear layer. HEADS: rows of queries, keys and values below one another, by heads. GATED:
    rows of a gate and of what it multiplies below one another. ROWS: outputs. COLUMNS: inputs, so that the ranks'
    outputs add up."""

    HEADS = "heads"
    GATED = "gated"
    ROWS = "rows"
    COLUMNS = "columns"


_GROUPS = {Cut.HEADS: 3, Cut.GATED: 2}
"""So many groups of rows are cut apart; of other layers all rows or columns are one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower(ABC):
    """`patch_shape`: channels, frames, rows and columns of a patch. `merge`: of so many patches a side one token is
    made, of `out_size` dims. `deepstack`: layers whose outputs are features, too. `clip_frames`: so many frames
    of a video, or what is left of it, see one another. `pooled_frames`: so many become the tokens of one, those of a
    clip or 1. `ranks`: so many share out heads and
    widths."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_shape: tuple[int, int, int, int]
    merge: int
    out_size: int
    deepstack: tuple[int, ...] = ()
    clip_frames: int = 1
    pooled_frames: int = 1
    ranks: int = 1

    cuts: ClassVar[Mapping[str, Cut]]
    """Of linear layers that ranks share out, by how their names end."""
    prefixes: ClassVar[tuple[str, ...]]
    """Beginnings of the names of its weights in checkpoints."""
    computes_with_pixels: ClassVar[bool] = False
    """Whether pixels are changed in float32 before they are rounded to the type of the weights."""
    beginnings: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of beginnings: those of some checkpoints, and those that the others have in their place."""

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def tile_side(self) -> int | None:
        """Patches a side of every image, where all are cut to tiles of one size; None: any number."""
        return None

    @property
    def features_size(self) -> int:
        """Dims of a token's features, with those of deepstack."""
        return self.out_size * (1 + len(self.deepstack))

    def sees_whole_clips(self, layer: int) -> bool:
        """Returns whether all patches of a clip see one another in this layer, not those of a window alone."""
        return 0 <= layer < self.num_layers

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Returns the tokens of frames x rows x columns of patches."""
        frames, rows, columns = grid
        return -(-frames // self.pooled_frames) * (rows // self.merge) * (columns // self.merge)

    @property
    def patch_values(self) -> int:
        return math.prod(self.patch_shape)

    def pixel_dtype(self, dtype: str) -> str:
        """Returns the type in which patches are sent to an encoder whose weights have `dtype`."""
        return "float32" if self.computes_with_pixels else dtype

    @abstractmethod
    def shapes(self) -> Iterator[NamedShape]:
        """Yields the name in checkpoints and the shape of every weight. That of a convolution over patches is a matrix
        here: a patch is a vector."""

    def num_weights(self) -> int:
        """Returns those of a rank."""
        return sum(math.prod(self.rank_shape(name, shape)) for name, shape in self.shapes())

    def shared_by(self, ranks: int) -> Self:
        """Returns the encoder as so many ranks share it out; as it is, if they do not divide its heads and widths."""
        shared = replace(self, ranks=ranks)
        sizes = (
            shape[shared.cut_dim(name)] // _GROUPS.get(cut, 1)
            for name, shape in self.shapes()
            if (cut := shared.cut_of(name)) is not None
        )
        return self if self.num_heads % ranks or any(size % ranks for size in sizes) else shared

    @property
    def rank_heads(self) -> int:
        return self.num_heads // self.ranks

    def cut_of(self, name: str) -> Cut | None:
        """Returns how the ranks share out a weight or a bias; None: each has all of it. So it is with the bias of a
        layer whose inputs they share out."""
        module, _, leaf = name.rpartition(".")
        cut = next((cut for end, cut in self.cuts.items() if module.endswith(end)), None)
        whole = self.ranks == 1 or leaf not in ("weight", "bias") or (cut is Cut.COLUMNS and leaf == "bias")
        return None if whole else cut

    def cut_dim(self, name: str) -> int:
        return 1 if self.cut_of(name) is Cut.COLUMNS else 0

    def rank_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns what a rank holds of a weight with this shape."""
        if self.cut_of(name) is None:
            return shape
        dim = self.cut_dim(name)
        return (*shape[:dim], shape[dim] // self.ranks, *shape[dim + 1 :])

    def pieces(self, name: str, shape: tuple[int, ...], rank: int) -> list[tuple[Slices, Slices]]:
        """Returns the slices of a checkpoint's tensor that a rank holds, each with where it is in its own."""
        cut = self.cut_of(name)
        if cut is None:
            return [((), ())]
        dim, groups = self.cut_dim(name), _GROUPS.get(cut, 1)
        whole, count = shape[dim] // groups, shape[dim] // groups // self.ranks
        before = (slice(None),) * dim
        return [
            (
                (*before, slice(group * whole + rank * count, group * whole + (rank + 1) * count)),
                (*before, slice(group * count, (group + 1) * count)),
            )
            for group in range(groups)
        ]

    @property
    def place_size(self) -> int:
        """Returns the values of 16 bits of a patch's place: cosines and sines of a head's pairs in float32, and its
        neighbours in the table of positions."""
        return 4 * self.head_dim

    def activation_size(self) -> int:
        """Returns the values that a step holds for each patch at most: the stream, its norm, queries, keys and values
        with pairs in float32 while they are turned, or the wide layer twice; the features that are there; and its
        place."""
        features = len(self.deepstack) * self.out_size // self.merge**2
        widest = max(8 * self.hidden_size, 2 * self.intermediate_size)
        return 2 * self.hidden_size + widest + features + self.place_size


def linear_shapes(name: str, rows: int, cols: int, bias: bool = True) -> Iterator[NamedShape]:
    """Yields the weight and the bias of a linear layer."""
    yield f"{name}.weight", (rows, cols)
    if bias:
        yield f"{name}.bias", (rows,)


def gated_shapes(prefix: str, hidden: int, wide: int, bias: bool) -> Iterator[NamedShape]:
    """Yields the weights of the three linear layers of a gated feed-forward block."""
    yield from linear_shapes(prefix + "gate_proj", wide, hidden, bias)
    yield from linear_shapes(prefix + "up_proj", wide, hidden, bias)
    yield from linear_shapes(prefix + "down_proj", hidden, wide, bias)


def norm_shapes(name: str, size: int) -> Iterator[NamedShape]:
    """Yields the weight and the bias of a layer norm."""
    yield f"{name}.weight", (size,)
    yield f"{name}.bias", (size,)


def only(keys: ConfigReader, key: str, served: str) -> None:
    """Raises UserError if the config has another value at `key` than the one that is served."""
    value = keys.default(key, str, served)
    if value != served:
        raise UserError(f"{keys.source}: {key} = {value!r} is not supported; supported: {served!r}.")


def axial_theta(vision: ConfigReader) -> float:
    """Returns the base of the rotary angles by row and column. Published configs may have it as `rope_theta`, and those
    that transformers writes in `rope_parameters`. Raises UserError for another kind of angles."""
    rope = ConfigReader(vision.default("rope_parameters", dict, {}), f"{vision.source} rope_parameters")
    only(rope, "rope_type", "axial")
    return rope.default("rope_theta", float, vision.default("rope_theta", float, ROTARY_THETA))


def whole_quarters(keys: ConfigReader, hidden_size: int, num_heads: int) -> None:
    """Raises UserError unless the two axes turn a quarter of a head's pairs or more each."""
    if hidden_size % (4 * num_heads):
        raise UserError(
            f"{keys.source}: hidden size {hidden_size} does not divide into {num_heads} heads of whole quarters."
        )
