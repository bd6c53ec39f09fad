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
    """The tiles as logs, `explain` and remembered failures name them."""
    return " / ".join(map(tile_key, tiles))


@dataclass(frozen=True)
class TileConfig:
    """The tiles that steps of up to `max_tokens` tokens launch.

    `variant` names the one of the kernel's ways that computes them. `candidates` begin with the tiles that are
    launched; those behind them are what a launch may step down to, in order. A way that takes no tile has none. `why`
    says where the tiles come from.
    """

    max_tokens: float
    variant: str
    candidates: tuple[Tiles, ...] = ()
    why: str = ""

    @property
    def tiles(self) -> Tiles:
        return self.candidates[0]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the candidates. Tile configs with equal ones are launched alike."""
        return tuple(map(tiles_key, self.candidates))

    def describe(self) -> str:
        """The tiles in words, as "tiles M16 N32 K256 w4 s4"."""
        return " ".join([self.variant, *self.names[:1]])


TileConfigs = tuple[TileConfig, ...]
"""The tile configs of an op by `max_tokens`, the smallest first."""


def config_for(configs: TileConfigs, tokens: int) -> TileConfig:
    """The first tile config that reaches so far, or the last one."""
    return next((config for config in configs if tokens <= config.max_tokens), configs[-1])


def max_tokens_where(holds: Callable[[int], bool]) -> float:
    """The most tokens for which `holds` is true, which it is for all fewer ones; 0: for none; ANY: for all."""
    if not holds(1):
        return 0
    if holds(MOST):
        return ANY
    low, high = 1, MOST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def joined(configs: Iterable[TileConfig]) -> TileConfigs:
    """Neighbours that are launched alike as one."""
    kept: list[TileConfig] = []
    for config in configs:
        if kept and (kept[-1].variant, kept[-1].names) == (config.variant, config.names):
            kept[-1] = replace(kept[-1], max_tokens=config.max_tokens)
        else:
            kept.append(config)
    return tuple(kept)


MOST = 1 << 40
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
    (None). `source` says where they come from, if that is worth a line; `warnings` what was passed over for them."""

    by_shape: Mapping[Shape | None, TileConfigs] = field(default_factory=dict)
    source: str = ""
    warnings: tuple[str, ...] = ()

    def describe(self) -> list[str]:
        """One line for all shapes with equal tile configs, such as "4096x4096: to 2 tokens few rows N2 ...; beyond
        tiles"."""
        shapes: dict[str, list[str]] = {}
        for shape, configs in self.by_shape.items():
            named = shapes.setdefault(_describe(configs), [])
            name = "" if shape is None else f"{shape[0]}x{shape[1]}"
            named += [name] if name and name not in named else []
        return [f"{', '.join(names)}{': ' if names else ''}{configs}" for configs, names in shapes.items()]

    def to_json(self) -> list[dict[str, Any]]:
        """`max_tokens` None: however many tokens; candidates as `tiles_key` names them."""
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
