"""Writes the lock files, with a digest of every row's figures."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from sglang.ledger.targets import NOT_NATIVE, TRITON_VERSIONS
from sglang.srt.kernels.ledger_file import LOCK_DIR, LOCKS, LedgerRows, Measurement, Row, RowKey


def digest_of(key: RowKey, row: Row) -> str:
    """Returns the digest that `write_lock` stores with a row's figures, so that edits are noticed without compiling."""
    text = json.dumps([key, row.code, sorted(row.by_target.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def write_lock(name: str, rows: LedgerRows, directory: Path = LOCK_DIR) -> None:
    """Writes one line a row, sorted; targets with equal numbers share an entry."""
    tree: dict[str, dict[str, list[str]]] = {}
    for (op, key, tile), row in sorted(rows.items()):
        entry: dict[str, Any] = {"code": row.code, "digest": digest_of((op, key, tile), row)}
        by_value: dict[Measurement, list[str]] = {}
        for target, value in sorted(row.by_target.items()):
            by_value.setdefault(value, []).append(target)
        entry |= {" ".join(targets): [*value[:4], "; ".join(value[4])] for value, targets in by_value.items()}
        tree.setdefault(op, {}).setdefault(key, []).append(f"{json.dumps(tile)}: {json.dumps(entry)}")
    header = {"archs": LOCKS[name], "triton": TRITON_VERSIONS, "compiles only, not native": sorted(NOT_NATIVE)}
    ops = [
        f"  {json.dumps(op)}: {{\n"
        + ",\n".join(_variant_lines(key, tiles) for key, tiles in variants.items())
        + "\n  }"
        for op, variants in tree.items()
    ]
    head = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in header.items())
    text = "{\n" + head + ',\n "rows": {\n' + ",\n".join(ops) + "\n }\n}\n"
    (directory / f"{name}.lock.json").write_text(text)


def _variant_lines(key: str, tiles: list[str]) -> str:
    return f"   {json.dumps(key)}: {{\n" + ",\n".join(f"    {tile}" for tile in tiles) + "\n   }"
