"""Makes the tile configs of every chosen kernel, by numbers of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.measured.choices import NOT_MEASURED, MeasuredChoices
from sglang.srt.kernels.spec import Choice, Tile
from sglang.srt.kernels.tile_configs import ANY, OpTileConfigs, TileConfig
from sglang.srt.kernels.tiles import MIN_TOKENS
from sglang.srt.plan.measured_choices import measured_tile_configs


def make_tile_configs(
    choices: Iterable[Choice], arch: ArchTraits, measured: MeasuredChoices = NOT_MEASURED
) -> Mapping[str, OpTileConfigs]:
    """Returns the tile configs by the key of the need, without ops whose kernel takes no tile. Tiles without a ledger
    record are assumed to fit; if one does not, the launch falls back to a smaller one."""
    tile_configs = ((choice.need.key, tile_configs_of(choice, arch, measured)) for choice in choices)
    return {key: cut for key, cut in tile_configs if cut is not None}


def tile_configs_of(choice: Choice, arch: ArchTraits, measured: MeasuredChoices = NOT_MEASURED) -> OpTileConfigs | None:
    """Returns the tile configs of one chosen kernel; None: it takes no tile."""
    if choice.spec.configs:
        return measured_tile_configs(choice, choice.make_tile_configs(arch), arch, measured)
    if choice.tile is None:
        return None
    tiles = (choice.tile, *choice.smaller_tiles)
    limits = sorted({tile.get(MIN_TOKENS, 1) for tile in tiles})
    ends = [*(limit - 1 for limit in limits[1:]), ANY]
    return OpTileConfigs(
        {None: tuple(_tile_config(tiles, least, end) for least, end in zip(limits, ends, strict=True))}
    )


def _tile_config(tiles: Sequence[Tile], tokens: int, max_tokens: float) -> TileConfig:
    """Returns the tile config of steps of `tokens` to `max_tokens` tokens."""
    candidates = tuple((tile,) for tile in tiles if tile.get(MIN_TOKENS, 1) <= tokens)
    return TileConfig(max_tokens, "tiles", candidates, "kernels/tiles.py")
