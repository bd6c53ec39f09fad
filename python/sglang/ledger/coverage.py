"""Matches launches with the ledger's rows: every form that Triton would compile must have a row with the same
resources.

A row covers a launch of the same kernel with the same tile, if everything that its compilation assumed holds in the
launch: types (float16 counts as bfloat16), constants, numbers that are 1, and multiples of 16 among pointers and
strides. Only the kernel's FormRule allows more:

- `free` constants may have any value, those `at_most` and `at_least` any that is not above or below the row's;
- the divisibility of `counts` does not matter;
- parameters that a launch does not read (`absent`, `optional`) are not compared.

Programmatic dependent launch (PDL) adds a few instructions, which wait and prefetch weights. A tile that is only a
fallback is recorded for its shared memory: flags, which do not change it, are not compared.
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang.ledger.form_rules import FORM_RULES, FormRule
from sglang.ledger.launch_form import Form, form_of, kernel_name
from sglang.ledger.measure import variant_table
from sglang.ledger.targets import COMPLETE
from sglang.ledger.variant import Variant
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.ledger_file import LOCKS, RowKey, judged_as

logger = logging.getLogger(__name__)
SAME_COST = {"*fp16": "*bf16"}
_FLOAT8 = {"*fp8e4nv", "*fp8e5"}
_FREE_EVERYWHERE = frozenset({"PDL"})


class UncoveredLaunch(RuntimeError):
    """Raised for a launch without a row in the ledger."""


@dataclass(frozen=True, slots=True)
class RecordedRow:
    key: RowKey
    variant: Variant
    constants: Mapping[str, Any]
    multiples: frozenset[str]
    ones: frozenset[str]

    @classmethod
    def of(cls, key: RowKey, variant: Variant) -> RecordedRow:
        """Returns a row with what launches are compared with."""
        return cls(key, variant, variant.constexprs, frozenset(variant.divisible_by_16), frozenset(variant.ones))


class Coverage:
    """The rows of a lock file, indexed by what must be equal in a launch."""

    def __init__(self, table: Mapping[RowKey, Variant]) -> None:
        self._rows: dict[tuple[Any, ...], list[RecordedRow]] = defaultdict(list)
        for key, variant in table.items():
            row = RecordedRow.of(key, variant)
            stages = variant.tile["num_stages"]
            self._rows[kernel_name(variant.fn), variant.tile["num_warps"], stages].append(row)

    def row_of(self, form: Form) -> RowKey | None:
        """Returns the first row that covers the form."""
        return next(self.rows_of(form), None)

    def rows_of(self, form: Form) -> Iterator[RowKey]:
        """Yields the rows that cover the form."""
        launch = Launch(form)
        for row in self._candidates(form):
            if next(launch.differences(row), None) is None:
                yield row.key

    def problem(self, form: Form) -> str:
        """Returns why no row covers the form: the differences from the most similar row."""
        rows = self._candidates(form)
        if not rows:
            return f"{form}: the ledger has no row of this kernel with {form.num_warps} warps, {form.num_stages} stages"
        launch = Launch(form)
        differences, row = min(((list(launch.differences(row)), row) for row in rows), key=lambda one: len(one[0]))
        return f"{form}: no row covers it; {'/'.join(row.key)} differs: {', '.join(differences)}"

    def uncovered(self, forms: Iterable[Form]) -> list[str]:
        """Returns the problems of all forms without a row."""
        return [self.problem(form) for form in forms if self.row_of(form) is None]

    def _candidates(self, form: Form) -> list[RecordedRow]:
        return self._rows.get((form.kernel, form.num_warps, form.num_stages), [])


@functools.cache
def coverage(lock: str) -> Coverage:
    """Returns the launches that a lock file covers."""
    return Coverage(variant_table(lock))


def check_launches(arch: ArchTraits) -> None:
    """Checks from now on that every form that Triton compiles in this process has a row; a launch without one raises
    UncoveredLaunch. On a GPU whose lock file is incomplete it is only logged."""
    import triton

    lock = next(name for name, archs in LOCKS.items() if judged_as(arch) in archs)
    rows, complete = coverage(lock), lock in COMPLETE
    logger.info("Launches are compared with %s.lock.json; without a row they %s", lock, "fail" if complete else "warn")

    def compare(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        form = form_of(fn.jit_function, compile)
        is_ours = fn.jit_function.fn.__module__.startswith("sglang.")
        if is_ours and rows.row_of(form) is None:
            if complete:
                raise UncoveredLaunch(rows.problem(form))
            logger.warning(rows.problem(form))
        return False  # compile it

    triton.knobs.runtime.jit_cache_hook = compare  # type: ignore[assignment]


class Launch:
    """A form with the parts of its kernel's rule that apply."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.rule = FORM_RULES.get(form.kernel, FormRule())
        self.constants = dict(form.constants)
        self.unread = {name for name in self.rule.optional if self.constants.get(name, "") is None}
        self.unread |= self._where(self.rule.absent)
        self.counts = self.rule.counts | self._where(self.rule.counts_where)

    def _where(self, rules: Mapping[str, tuple[str, ...]]) -> set[str]:
        """Returns the parameters whose conditions hold."""
        names: set[str] = set()
        for condition, parameters in rules.items():
            name, _, value = condition.partition("=")
            constant = self.constants.get(name)
            switched_off = constant is False or (constant == 1 and constant is not True) or constant == 0
            if constant == value if value else switched_off:
                names.update(parameters)
        return names

    def differences(self, row: RecordedRow) -> Iterator[str]:
        """Yields the differences that keep the row from covering the launch."""
        lower = not row.variant.default
        for name, kind in self.form.types:
            if name in self.unread:
                continue
            row_kind = row.variant.signature.get(name, "new parameter")
            if kind == "constexpr":
                yield from self._constant_differences(name, row, lower)
            elif SAME_COST.get(kind, kind) != row_kind and not (lower and {kind, row_kind} == _FLOAT8):
                yield f"{name} is {kind} and not {row_kind}"
            elif name not in self.counts:
                yield from self._fact_differences(name, row)

    def _constant_differences(self, name: str, row: RecordedRow, lower: bool) -> Iterator[str]:
        rule, value = self.rule, self.constants[name]
        if name in rule.free or name in _FREE_EVERYWHERE or (lower and (name.startswith("HAS_") or name == "CAUSAL")):
            return
        if name not in row.constants:
            yield f"{name} is the constant {value!r} and not a {row.variant.signature.get(name, 'known parameter')}"
            return
        recorded = row.constants[name]
        if name in rule.at_most:
            covered = value <= recorded
        elif name in rule.at_least:
            covered = value >= recorded
        else:
            covered = value == recorded
        if not covered:
            yield f"{name} is {value!r} and not {recorded!r}"

    def _fact_differences(self, name: str, row: RecordedRow) -> Iterator[str]:
        one = name in self.form.ones
        if one != (name in row.ones):
            yield f"{name} is {'' if one else 'not '}1"
        elif not one and (name in self.form.multiples) != (name in row.multiples):
            yield f"{name} is {'' if name in self.form.multiples else 'not '}a multiple of 16"
