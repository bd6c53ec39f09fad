"""Rows of the ledger for tests that launch each one."""

from __future__ import annotations

import json
import re

from sglang.ledger.ptx.record import RECORD

_NAMES = {"K": "BLOCK_K", "M": "BLOCK_M", "N": "BLOCK_N", "H": "BLOCK_H", "w": "num_warps", "s": "num_stages"}


def rows_of(op: str) -> list[str]:
    """Returns the names of SM120's rows that begin so, each once."""
    forms = json.loads(RECORD.with_name("sm120.forms.json").read_text())
    return sorted({row for rows in forms.values() for row in rows if row.startswith(f"{op}/")})


def parts_of(row: str) -> tuple[list[str], dict[str, int]]:
    """Returns the words of a row's name behind the op, and its tile: the opposite of `ledger_file.tile_key`."""
    _, *words, tile = row.split("/")
    numbers = (re.fullmatch(r"(.*?)(\d+)", word) for word in tile.split())
    return words, {_NAMES.get(found[1], found[1]): int(found[2]) for found in numbers if found}
