"""The common form of all encoders of images and videos: a transformer over patches, whose outputs are merged to
tokens."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError

if TYPE_CHECKING:
    from typing import Self

LAYERS_ON_GPU = 2
"""Layers that the GPU has room for where they lie in main memory."""
_NUMBERED = re.compile(r"(.*?)\.(\d+)\.")
"""The prefix and the number of a layer in a weight's name."""
ROTARY_THETA = 10000.0
"""Base of rotary angles in published encoders whose config does not state it."""
NamedShape = tuple[str, tuple[int, ...]]
Slices = tuple[slice, ...]


class Cut(Enum):
    """How ranks divide a linear layer. HEADS: its rows are those of queries, keys and values, divided by heads. GATED:
    its rows are those of a gate and of what it multiplies. ROWS: by outputs. COLUMNS: by inputs, so that the ranks'
    outputs are partial sums."""

    HEADS = "heads"
    GATED = "gated"
    ROWS = "rows"
    COLUMNS = "columns"


_GROUPS = {Cut.HEADS: 3, Cut.GATED: 2}
"""Number of groups of rows that are divided separately; 1 for other layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower(ABC):
    """An encoder of images and videos.

    patch_shape: channels, frames, rows and columns of a patch
    merge: patches a side of the square that becomes one token, of `out_size` dims
    deepstack: layers whose outputs are features, too
    clip_frames: frames of a video that see each other; the last clip may have fewer
    pooled_frames: frames that become the tokens of one: those of a clip, or 1
    ranks: ranks that divide heads and widths
    on_host: the weights of its layers lie in main memory (`streamed_layers`)
    """

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
    on_host: bool = False

    cuts: ClassVar[Mapping[str, Cut]]
    """How ranks divide linear layers, by the end of their names."""
    prefixes: ClassVar[tuple[str, ...]]
    """Beginnings of the names of its weights in checkpoints."""
    computes_with_pixels: ClassVar[bool] = False
    """True: pixels are transformed in float32 before they are rounded to the weights' dtype."""
    can_pause: ClassVar[bool] = True
    """False: an encoder step is computed at once."""
    beginnings: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of beginnings of names: that of some checkpoints, and the usual one that replaces it."""

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def tile_side(self) -> int | None:
        """Patches a side of every image, where images are cut into tiles of one size; None: any number."""
        return None

    @property
    def features_size(self) -> int:
        """Dims of a token's features, those of deepstack included."""
        return self.out_size * (1 + len(self.deepstack))

    @property
    def longest_run(self) -> int:
        """Most tokens of an image that see one another and more tokens than a window has; 0: there are no such
        images."""
        return 0

    def sees_whole_clips(self, layer: int) -> bool:
        """Returns whether all patches of a clip see each other in this layer, and not only those of a window."""
        return 0 <= layer < self.num_layers

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Returns the number of tokens of a grid of frames x rows x columns of patches."""
        frames, rows, columns = grid
        return -(-frames // self.pooled_frames) * (rows // self.merge) * (columns // self.merge)

    @property
    def patch_values(self) -> int:
        """Number of values of a patch."""
        return math.prod(self.patch_shape)

    def pixel_dtype(self, dtype: str) -> str:
        """Returns the dtype in which patches are sent to an encoder whose weights have `dtype`."""
        return "float32" if self.computes_with_pixels else dtype

    @abstractmethod
    def shapes(self) -> Iterator[NamedShape]:
        """Yields (name in checkpoints, shape) of every weight. A convolution over patches is a matrix here, because a
        patch is a vector."""

    def streamed_layers(self) -> dict[str, int]:
        """Returns the number of its layer for each weight that lies in main memory: those of the longest series of
        layers with equal names but for a number. Empty if all lie on the GPU."""
        if not self.on_host:
            return {}
        series: dict[str, dict[str, int]] = {}
        for name, _ in self.shapes():
            if (numbered := _NUMBERED.match(name)) is not None:
                series.setdefault(numbered[1], {})[name] = int(numbered[2])
        longest = max(series.values(), key=lambda names: max(names.values()), default={})
        return longest if len({*longest.values()}) > 1 else {}

    def layer_sizes(self) -> list[int]:
        """Returns the number of weights that a rank has of each layer in main memory."""
        layer_of, sizes = self.streamed_layers(), dict[int, int]()
        for name, shape in self.shapes():
            if name in layer_of:
                sizes[layer_of[name]] = sizes.get(layer_of[name], 0) + math.prod(self.rank_shape(name, shape))
        return [sizes[layer] for layer in sorted(sizes)]

    def num_weights(self) -> int:
        """Returns the number of weights that a rank has room for on the GPU: of layers in main memory for two."""
        every = sum(math.prod(self.rank_shape(name, shape)) for name, shape in self.shapes())
        layers = self.layer_sizes()
        return every - sum(layers) + LAYERS_ON_GPU * max(layers, default=0)

    def shared_by(self, ranks: int) -> Self:
        """Returns the encoder as divided over `ranks` ranks; unchanged if they do not divide its heads and widths."""
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
        """Returns how the ranks divide a weight or a bias; None: each has all of it, as with the bias of a layer that
        is divided by inputs."""
        module, _, leaf = name.rpartition(".")
        cut = next((cut for end, cut in self.cuts.items() if module.endswith(end)), None)
        whole = self.ranks == 1 or leaf not in ("weight", "bias") or (cut is Cut.COLUMNS and leaf == "bias")
        return None if whole else cut

    def cut_dim(self, name: str) -> int:
        """Returns the dim along which a weight is divided."""
        return 1 if self.cut_of(name) is Cut.COLUMNS else 0

    def rank_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape that a rank holds of a weight with this shape."""
        if self.cut_of(name) is None:
            return shape
        dim = self.cut_dim(name)
        return (*shape[:dim], shape[dim] // self.ranks, *shape[dim + 1 :])

    def pieces(self, name: str, shape: tuple[int, ...], rank: int) -> list[tuple[Slices, Slices]]:
        """Returns pairs of slices for each part of a weight that a rank holds: in the checkpoint's tensor, and in the
        rank's own."""
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
        """16-bit values of a patch's position: cosines and sines of a head's pairs in float32, and the neighbours in
        the table of learned positions."""
        return 4 * self.head_dim

    def step_values(self, patches: int) -> int:
        """Returns the most values that a step over so many patches holds."""
        return patches * self.activation_size()

    def activation_size(self) -> int:
        """Returns the most values that a step holds for each patch: the stream, its norm, queries, keys and values
        (with pairs in float32 while they rotate) or the wide layer twice; the features made so far; and its
        position."""
        features = len(self.deepstack) * self.out_size // self.merge**2
        widest = max(8 * self.hidden_size, 2 * self.intermediate_size)
        return 2 * self.hidden_size + widest + features + self.place_size


def linear_shapes(name: str, rows: int, cols: int, bias: bool = True) -> Iterator[NamedShape]:
    """Yields the shapes of a linear layer's weight and bias."""
    yield f"{name}.weight", (rows, cols)
    if bias:
        yield f"{name}.bias", (rows,)


def gated_shapes(prefix: str, hidden: int, wide: int, bias: bool) -> Iterator[NamedShape]:
    """Yields the shapes of the three linear layers of a gated feed-forward block."""
    yield from linear_shapes(prefix + "gate_proj", wide, hidden, bias)
    yield from linear_shapes(prefix + "up_proj", wide, hidden, bias)
    yield from linear_shapes(prefix + "down_proj", hidden, wide, bias)


def norm_shapes(name: str, size: int) -> Iterator[NamedShape]:
    """Yields the shapes of a layer norm's weight and bias."""
    yield f"{name}.weight", (size,)
    yield f"{name}.bias", (size,)


def only(keys: ConfigReader, key: str, served: str) -> None:
    """Raises UserError if the config has another value than `served` at `key`."""
    value = keys.default(key, str, served)
    if value != served:
        raise UserError(f"{keys.source}: {key} = {value!r} is not supported; supported: {served!r}.")


def axial_theta(vision: ConfigReader) -> float:
    """Returns the base of the rotary angles by row and column, from `rope_theta` (published configs) or
    `rope_parameters` (transformers). Raises UserError for another kind of angles."""
    rope = ConfigReader(vision.default("rope_parameters", dict, {}), f"{vision.source} rope_parameters")
    only(rope, "rope_type", "axial")
    return rope.default("rope_theta", float, vision.default("rope_theta", float, ROTARY_THETA))


def whole_quarters(keys: ConfigReader, hidden_size: int, num_heads: int) -> None:
    """Raises UserError unless a head's pairs divide evenly between the two axes."""
    if hidden_size % (4 * num_heads):
        raise UserError(
            f"{keys.source}: hidden size {hidden_size} does not divide into {num_heads} heads of whole quarters."
        )
