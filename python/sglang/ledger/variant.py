"""One launch variant of a kernel, with everything that its compilation needs, so that no GPU is. Triton is not imported
here: the JITFunction `fn` comes from the kernel's module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Variant:
    """One launch variant. `op/key` is stable; with the tile it is unique. `signature` has every parameter of `fn` in
    order ("*bf16", "i32", "fp32", "constexpr"), `constexprs` the values of the last kind, `divisible_by_16` the
    parameters that the launcher would specialize that way."""

    op: str
    key: str
    fn: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    divisible_by_16: tuple[str, ...]
    tile: Mapping[str, int]
    """Includes num_warps and num_stages."""
    default: bool = True
    """False: a tile that is only stepped down to, for which spills are reported but not held against it."""
    ones: tuple[str, ...] = ()
    """Run-time numbers that are 1 in these launches, which Triton compiles in."""

    def with_tile(self, tile: Mapping[str, int]) -> Variant:
        """Returns the same launch with another tile, in the table or not (negative tests, searches for new tiles)."""
        blocks = {name: value for name, value in tile.items() if name in self.constexprs}
        return replace(self, tile=tile, constexprs={**self.constexprs, **blocks})

    @property
    def native_only(self) -> bool:
        """Returns whether it needs matrix instructions that a compiler of `ledger.targets.NOT_NATIVE` does not have; it
        is not launched there."""
        return self.constexprs.get("KIND") == "mx" and self.constexprs.get("ELEMENT") == "e2m1"
