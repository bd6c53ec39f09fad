"""The tiles of a launch, by the tokens of its step: one schema for attention, linear layers and experts.

`plan.make_plan` makes the tile configs of every op once; layers ask the plan for theirs when they are built, and look
up the config of a step when they launch.

    configs = plan.tiles("linear/fp8_block", (4096, 7168, False))
    config = config_for(configs, num_tokens)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from sglang.srt.kernels.ledger_file import tile_key
from sglang.srt.kernels.spec import Tile

Tiles = tuple[Tile, ...]
"""The tiles of products that are launched together: one, or gate_up's and down's of experts."""

ANY = float("inf")


def tiles_key(tiles: Tiles) -> str:
    """Returns the name of the tiles in logs, `explain` and remembered failures."""
    return " / ".join(map(tile_key, tiles))


@dataclass(frozen=True)
class TileConfig:
    """The tiles that steps of up to `max_tokens` tokens launch.

    variant: the kernel's code path that computes such steps
    candidates: the tiles to launch, then smaller ones that a launch may fall back to, in order; empty for a variant
        without tiles
    why: where the tiles come from
    """

    max_tokens: float
    variant: str
    candidates: tuple[Tiles, ...] = ()
    why: str = ""

    @property
    def tiles(self) -> Tiles:
        """Returns the tiles that are launched unless they fail: the first candidate."""
        return self.candidates[0]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the candidates; tile configs with equal names launch the same."""
        return tuple(map(tiles_key, self.candidates))

    def describe(self) -> str:
        """Describes the variant and its tiles for people: "tiles M16 N32 K256 w4 s4"."""
        return " ".join([self.variant, *self.names[:1]])


TileConfigs = tuple[TileConfig, ...]
"""The tile configs of an op by `max_tokens`, the smallest first."""


def config_for(configs: TileConfigs, tokens: int) -> TileConfig:
    """Returns the first tile config whose `max_tokens` is at least `tokens`, or the last one."""
    return next((config for config in configs if tokens <= config.max_tokens), configs[-1])


def max_tokens_where(holds: Callable[[int], bool]) -> float:
    """Returns the largest number of tokens for which `holds` is true; 0: for none; ANY: for all. `holds` must be true
    up to some number and false above it."""
    if not holds(1):
        return 0
    if holds(BEYOND_ANY_STEP):
        return ANY
    low, high = 1, BEYOND_ANY_STEP
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def joined(configs: Iterable[TileConfig]) -> TileConfigs:
    """Returns the tile configs with neighbours that launch the same merged into one."""
    kept: list[TileConfig] = []
    for config in configs:
        if kept and (kept[-1].variant, kept[-1].names) == (config.variant, config.names):
            kept[-1] = replace(kept[-1], max_tokens=config.max_tokens)
        else:
            kept.append(config)
    return tuple(kept)


BEYOND_ANY_STEP = 1 << 40
"""More tokens than any step has."""


def _describe(configs: TileConfigs) -> str:
    configs = joined(configs)
    parts = [
        f"to {int(config.max_tokens):,} tokens {config.describe()}" for config in configs if config.max_tokens < ANY
    ]
    return "; ".join([*parts, f"{'beyond ' if parts else ''}{configs[-1].describe()}"])


Shape = tuple[int, int, bool]
"""The shape of a weight, as in Need.shapes: rows, columns, whether there is a bias."""


@dataclass(frozen=True, slots=True)
class OpTileConfigs:
    """The tile configs of one op. Linear layers have some for each shape of a weight, other ops the same ones for all
    (None). `source` says where they come from, if that is worth a line; `warnings` what was skipped to find them;
    `measured` what was measured for them on this GPU, a line for each size."""

    by_shape: Mapping[Shape | None, TileConfigs] = field(default_factory=dict)
    source: str = ""
    warnings: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()

    def describe(self) -> list[str]:
        """Returns a line for each group of shapes with equal tile configs, such as "4096x4096: to 2 tokens few rows N2
        ...; beyond tiles"."""
        shapes: dict[str, list[str]] = {}
        for shape, configs in self.by_shape.items():
            named = shapes.setdefault(_describe(configs), [])
            name = "" if shape is None else f"{shape[0]}x{shape[1]}"
            named += [name] if name and name not in named else []
        return [f"{', '.join(names)}{': ' if names else ''}{configs}" for configs, names in shapes.items()]

    def to_json(self) -> list[dict[str, Any]]:
        """Returns the tile configs for JSON. `max_tokens` None: any number of tokens; candidates as `tiles_key` names
        them."""
        return [
            {
                "shape": shape and list(shape[:2]),
                "max_tokens": None if config.max_tokens == ANY else int(config.max_tokens),
                "variant": config.variant,
                "candidates": list(config.names),
                "why": config.why,
            }
            for shape, configs in self.by_shape.items()
            for config in configs
        ]
