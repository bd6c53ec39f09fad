"""The tiles of every chosen kernel, as bands of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.bands import ANY, Band, OpBands
from sglang.srt.kernels.spec import Choice, Tile
from sglang.srt.kernels.tiles import LEAST_TOKENS


def cut_bands(choices: Iterable[Choice], arch: ArchTraits) -> Mapping[str, OpBands]:
    """Returns the bands of tiles by the key of the need. Ops whose kernel takes no tile are left out. Tiles that are on
    no record are taken to fit; one that does not fit steps down when it is launched."""
    bands = ((choice.need.key, _bands_of(choice, arch)) for choice in choices)
    return {key: cut for key, cut in bands if cut is not None}


def _bands_of(choice: Choice, arch: ArchTraits) -> OpBands | None:
    if choice.spec.bands:
        cut: OpBands = choice.cut_bands(arch)
        return cut
    if choice.tile is None:
        return None
    tiles = (choice.tile, *choice.smaller_tiles)
    limits = sorted({tile.get(LEAST_TOKENS, 1) for tile in tiles})
    ends = [*(limit - 1 for limit in limits[1:]), ANY]
    return OpBands({None: tuple(_band(tiles, least, end) for least, end in zip(limits, ends, strict=True))})


def _band(tiles: Sequence[Tile], tokens: int, most: float) -> Band:
    """The tiles that steps of `tokens` to `most` tokens may launch."""
    rungs = tuple((tile,) for tile in tiles if tile.get(LEAST_TOKENS, 1) <= tokens)
    return Band(most, "tiles", rungs, "kernels/tiles.py")
