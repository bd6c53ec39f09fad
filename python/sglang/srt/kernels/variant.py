"""One launch variant of a kernel, described so that it can be compiled without a GPU. No Triton import here: `fn` is a
JITFunction that the describing module brings along."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    """Of the cache; empty where the op has none."""
    default: bool = True
    """False: a lower candidate of the table, for which spills are reported but not held against it."""
    native_only: bool = False
    """Needs matrix instructions that a compiler of `ledger_file.NOT_NATIVE` does not have; not launched there."""
    ones: tuple[str, ...] = ()
    """Run-time numbers that are 1 in these launches, which Triton compiles in."""
    form_only: bool = False
    """Decides about no tile: on record because it is launched. Only where the lock is `ledger_file.COMPLETE`."""


@dataclass(frozen=True, slots=True)
class FormRule:
    """Which launches of one kernel cost no more than a row: how forms of launches are reduced (kernels/coverage.py).

    A row covers a launch with the same types, constants, alignments and tile. Beyond that:
    """

    free: frozenset[str] = frozenset()
    """Constants that are numbers in the code and no more: any value."""
    at_most: frozenset[str] = frozenset()
    """Constants of which a row covers its own value and lower ones; False is less than True."""
    at_least: frozenset[str] = frozenset()
    """The opposite: EVEN_K False (with masks) covers True."""
    counts: frozenset[str] = frozenset()
    """Run-time numbers that bound loops and masks, or that place what is loaded alone: whether they are 1 or multiples
    of 16 does not matter."""
    counts_where: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """ "NAME=value" -> what else are counts where that constant has that value."""
    absent: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """ "FLAG" -> the parameters that are not read where it is false, or 1 (split); "NAME=value" as above."""
    optional: frozenset[str] = frozenset()
    """Tensors that may be None: a row with one covers launches without."""
