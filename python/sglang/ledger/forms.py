"""Reads and writes `*.forms.json`, the forms that the rows of a lock file were measured for.

    "norm.rmsnorm_kernel": {
     "every row": {"x": "*bf16 16", "weight": "*bf16 16", "row_stride": "i32 16", "eps": "fp32", "PDL": [false]},
     "rmsnorm/1024/w4 s3 BLOCK1024": {"BLOCK": [1024]},

A form says of each parameter of a kernel its type, and whether it is a multiple of 16 or 1; of a constant its value, in
brackets. Nobody writes forms by hand: `record.py` takes them from launches.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang.ledger.launch_form import kernel_name
from sglang.ledger.variant import Variant
from sglang.srt.kernels.ledger_file import RowKey

HERE = Path(__file__).parent
KERNELS = HERE.parent / "srt"
Fact = str | list[Any]
"""What a form says of one parameter."""
_EVERY, _FALLBACK = "every row", "fallback"
_TILE_PART = re.compile(r"([A-Za-z_]+?)(\d+)")
_LAUNCH = {"w": "num_warps", "s": "num_stages"}


def read_forms(lock: str, directory: Path = HERE) -> dict[RowKey, Variant]:
    """Returns the variants of a lock file by row key; those of kernels that no longer exist are left out."""
    table: dict[RowKey, Variant] = {}
    for name, rows in json.loads((directory / f"{lock}.forms.json").read_text()).items():
        fn = kernel(name)
        common = rows.pop(_EVERY)
        for row, facts in rows.items() if fn is not None else ():
            op, _, rest = row.partition("/")
            key, _, tile = rest.rpartition("/")
            table[op, key, tile] = _variant(fn, (op, key, tile), common | facts)
    return table


def write_forms(lock: str, table: Mapping[RowKey, Variant], directory: Path = HERE) -> None:
    """Writes one line a row, by kernel, in the order of the table. Facts that most rows of a kernel share are written
    once."""
    by_kernel: dict[str, dict[str, dict[str, Any]]] = {}
    for key, variant in table.items():
        by_kernel.setdefault(kernel_name(variant.fn), {})["/".join(key)] = facts_of(variant)
    parts = []
    for name, rows in by_kernel.items():
        common = {parameter: _most_frequent([facts[parameter] for facts in rows.values()]) for parameter in
                  next(iter(rows.values())) if parameter != _FALLBACK}  # fmt: skip
        lines = [f"  {json.dumps(_EVERY)}: {json.dumps(common)}"]
        for row, facts in rows.items():
            differing = {parameter: fact for parameter, fact in facts.items() if common.get(parameter) != fact}
            lines.append(f"  {json.dumps(row)}: {json.dumps(differing)}")
        parts.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    (directory / f"{lock}.forms.json").write_text("{\n" + ",\n".join(parts) + "\n}\n")


def kernel(name: str) -> Any:
    """Returns the kernel that forms call `name` ("norm.rmsnorm_kernel"), wherever its module is; None if there is
    none."""
    module, _, function = name.rpartition(".")
    defined = re.compile(rf"^(def {function}\(|{function} = )", re.MULTILINE)
    for path in _modules().get(module, ()):
        if defined.search(path.read_text()):
            parts = path.relative_to(HERE.parents[1]).with_suffix("").parts
            return getattr(importlib.import_module(".".join(parts)), function)
    return None


@functools.cache
def _modules() -> dict[str, list[Path]]:
    """Returns the files of the server's modules by their last name."""
    files: dict[str, list[Path]] = {}
    for path in sorted(KERNELS.rglob("*.py")):
        files.setdefault(path.stem, []).append(path)
    return files


def facts_of(variant: Variant) -> dict[str, Any]:
    """Returns what a form says of each parameter."""
    facts: dict[str, Any] = {}
    for name, kind in variant.signature.items():
        suffix = " 1" if name in variant.ones else " 16" if name in variant.divisible_by_16 else ""
        facts[name] = [variant.constexprs[name]] if kind == "constexpr" else kind + suffix
    return facts if variant.default else facts | {_FALLBACK: True}


def _variant(fn: Any, row: RowKey, facts: dict[str, Any]) -> Variant:
    default = not facts.pop(_FALLBACK, False)
    typed = {name: fact.split() for name, fact in facts.items() if isinstance(fact, str)}
    return Variant(
        row[0],
        row[1],
        fn,
        {name: typed[name][0] if name in typed else "constexpr" for name in facts},
        {name: fact[0] for name, fact in facts.items() if name not in typed},
        tuple(name for name, words in typed.items() if words[1:] == ["16"]),
        _tile(fn, row[2]),
        default,
        tuple(name for name, words in typed.items() if words[1:] == ["1"]),
    )


def _tile(fn: Any, name: str) -> dict[str, int]:
    """Returns the tile that `tile_key` calls `name`."""
    tile: dict[str, int] = {}
    for part in name.split():
        match = _TILE_PART.fullmatch(part)
        assert match is not None, name
        short, block = match[1], f"BLOCK_{match[1]}"
        is_block = block in fn.arg_names or short not in fn.arg_names
        tile[_LAUNCH.get(short, block if is_block else short)] = int(match[2])
    return tile


def _most_frequent(facts: list[Fact]) -> Fact:
    return max(facts, key=facts.count)
