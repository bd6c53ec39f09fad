"""The tiles of every chosen kernel, as bands of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.bands import ANY, Band, OpBands
from sglang.srt.kernels.spec import Choice


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
    rungs = tuple((tile,) for tile in (choice.tile, *choice.smaller_tiles))
    return OpBands({None: (Band(ANY, "tiles", rungs, "kernels/tiles.py"),)})
