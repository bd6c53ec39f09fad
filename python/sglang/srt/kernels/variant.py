"""One launch variant of a kernel, described so that it can be compiled without a GPU. No Triton import here: `fn` is a
JITFunction that the describing module brings along."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Variant:
    """`op/key` is stable; with the tile it is unique. `signature` has every parameter of `fn` in order ("*bf16", "i32",
    "fp32", "constexpr"), `constexprs` the values of the last kind, `divisible_by_16` the parameters that the
    launcher would specialize so."""

    op: str
    key: str
    fn: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    divisible_by_16: tuple[str, ...]
    tile: Mapping[str, int]
    """Includes num_warps and num_stages."""
    head_dims: tuple[int, int] = (0, 0)
    kv_dtype: str = ""
    """As in KVSpec; empty where the op has none."""
    default: bool = True
    """False: a lower candidate of the table, for which spills are reported but not held against it."""
    native_only: bool = False
    """Needs matrix instructions that a compiler of `ledger_file.NOT_NATIVE` does not have; not launched there."""
