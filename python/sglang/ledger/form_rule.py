"""Rules by which a row of the ledger covers more than launches of its own form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FormRule:
    """The rule by which forms of launches of one kernel are reduced to those that cost as much as a row
    (`coverage.py`).

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
