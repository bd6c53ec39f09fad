"""Makes the rows of a lock file from recorded launches.

A row that no launch meets is dropped, and so is one of a kernel whose parameters changed. Launches without a row get
one: its form is the widest of theirs that costs the same (`FormRule`), and it is called after the most similar row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sglang.ledger.coverage import SAME_COST, Coverage, Launch, RecordedRow
from sglang.ledger.forms import facts_of
from sglang.ledger.launch_form import UNNAMED, Form, Launches, RowName, kernel_name
from sglang.ledger.targets import COMPLETE, LEFT_OUT
from sglang.ledger.variant import Variant
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.kernels.ledger_file import DEQUANTIZED_TAIL, RowKey, tile_key

_BY_SCHEME = ("linear", "fused_moe")
_HEAD_DIMS = re.compile(r"\d+x\d+")


def recorded(lock: str, table: Mapping[RowKey, Variant], launches: Launches) -> dict[RowKey, Variant]:
    """Returns the table of a lock file that the launches need. Where not every launch has to have a row (COMPLETE), one
    whose row would have a name that is taken gets none."""
    current = {key: variant for key, variant in table.items() if list(variant.signature) == variant.fn.arg_names}
    coverage, met = Coverage(current), set[RowKey]()
    missing: dict[tuple[RowKey, str], list[tuple[Form, bool]]] = {}
    for form, names in launches.items():
        rows = list(coverage.rows_of(form))
        for name in names:
            fitting = [key for key in rows if _is_called(key, name)]
            met.update(fitting)
            if not fitting and (lock in COMPLETE or not form.kernel.startswith(LEFT_OUT)):
                key = _key_for(form, name, table)
                missing.setdefault((key, form.kernel), []).append((form, name.default))
    result = {key: variant for key, variant in current.items() if key in met}
    for (key, _), unmet in missing.items():
        forms = [form for form, _ in unmet] if lock in COMPLETE or key not in result else []
        default = table[key].default if key in table else any(default for _, default in unmet)
        while forms:
            widest, forms = _widest_of_some(forms, default)
            _add(result, key, widest.variant(key[0], key[1], default))
    return result


def _slot(op: str, key: str) -> slice | None:
    """Returns which pieces of a row's key the server looks for: head dims and types, or the format of weights."""
    pieces = key.split("/")
    if _HEAD_DIMS.fullmatch(pieces[0]):
        return slice(0, 3)
    for i, piece in enumerate(pieces) if op in _BY_SCHEME else ():
        if piece in SCHEMES or piece == "bf16":
            return slice(i, i + 1 + (pieces[i + 1 : i + 2] == [DEQUANTIZED_TAIL.strip("/")]))
    return None


def _is_called(row: RowKey, name: RowName) -> bool:
    """Returns whether the server finds the row by the name."""
    part = _slot(row[0], row[1])
    if part is None or name == UNNAMED:
        return True
    pieces = tuple(row[1].split("/")[part])
    return row[0] == name.op and pieces in (name.pieces, _pieces(name)) and name.tile in ("", row[2])


def _pieces(name: RowName) -> tuple[str, ...]:
    """Returns the pieces of its key that a new row gets. What is only stepped down to is on record for one of
    the float8 types (`Ledger.record`)."""
    return name.pieces if name.default else tuple(piece.replace("fp8_e5m2", "fp8_e4m3") for piece in name.pieces)


def _key_for(form: Form, name: RowName, table: Mapping[RowKey, Variant]) -> RowKey:
    """Returns the key that a row for the launch gets: that of the most similar row, with the launch's name and tile."""
    rows = [(key, variant) for key, variant in table.items() if kernel_name(variant.fn) == form.kernel]
    rows = [row for row in rows if row[0][0] == name.op] or rows
    constants = dict(form.constants)
    launch = {"num_warps": form.num_warps, "num_stages": form.num_stages}
    if not rows:
        function = form.fn.fn.__name__.removesuffix("_kernel")
        blocks = {parameter: value for parameter, value in constants.items() if "BLOCK" in parameter}
        words = [*name.pieces, "plain"] if name.tile else [function, *name.pieces] if name.pieces else ["all"]
        return name.op or function, "/".join(words), name.tile or tile_key(blocks | launch)
    of_form = Launch(form)

    def distance(row: tuple[RowKey, Variant]) -> int:
        tile = row[1].tile
        others = sum(tile[parameter] != value for parameter, value in launch.items())
        return others + len(list(of_form.differences(RecordedRow.of(*row))))

    (op, key, _), nearest = min(rows, key=distance)
    tile = tile_key({parameter: constants.get(parameter, value) for parameter, value in nearest.tile.items()} | launch)
    part = _slot(op, key)
    if part is not None and name != UNNAMED:
        pieces = key.split("/")
        pieces[part] = _pieces(name)
        key, tile = "/".join(pieces), name.tile or tile
    return op, key, tile


def _add(table: dict[RowKey, Variant], key: RowKey, variant: Variant) -> None:
    """Adds a row. Where its name is taken, it says how it differs from the row that has it."""
    if key in table:
        taken = facts_of(table[key])
        words = [f"{name} {fact}" for name, fact in facts_of(variant).items() if taken.get(name) != fact]
        key = key[0], "/".join([key[1], *words]), key[2]
    table[key] = replace(variant, key=key[1])


def _widest_of_some(forms: Sequence[Form], default: bool) -> tuple[Form, list[Form]]:
    """Returns a form that covers the first of them and as many others as it can, and those that it does not cover."""
    members, rest = [forms[0]], []
    widest = _widest(members)
    for form in forms[1:]:
        if not _covers(widest, [form], default):
            wider = _widest([*members, form])
            if not _covers(wider, [*members, form], default):
                rest.append(form)
                continue
            widest = wider
        members.append(form)
    return widest, rest


def _covers(form: Form, others: Sequence[Form], default: bool) -> bool:
    row = RecordedRow.of(("", "", ""), form.variant("", "", default))
    return all(next(Launch(other).differences(row), None) is None for other in others)


def _widest(forms: Sequence[Form]) -> Form:
    """Returns the form with everything that one of them has and that a row may have more of than a launch."""
    launches = [Launch(form) for form in forms]
    rule, types, constants = launches[0].rule, [], dict[str, Any]()
    multiples, ones = set[str](), set[str]()
    for name in forms[0].fn.arg_names:
        reading = [launch for launch in launches if name not in launch.unread] or launches[:1]
        first = reading[0].form
        kind = dict(first.types)[name]
        types.append((name, SAME_COST.get(kind, kind)))
        if kind == "constexpr":
            values = [launch.constants[name] for launch in reading]
            choose = max if name in rule.at_most else min if name in rule.at_least else next
            constants[name] = False if name == "PDL" else choose(iter(values))
        elif name not in reading[0].counts:
            multiples |= {name} & first.multiples
            ones |= {name} & first.ones
    form = forms[0]
    return Form(
        form.fn,
        tuple(types),
        tuple(sorted(constants.items())),
        frozenset(multiples),
        frozenset(ones),
        form.num_warps,
        form.num_stages,
    )
