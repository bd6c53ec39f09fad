"""The format of a tuning file: the tiles of both products for some numbers of tokens. Imports no torch, no Triton.

    {"source": "model", "arch": "sm_120", "num_sms": 188, "scheme": "fp8_channel", "hidden": 5120, "top_k": 8, ...
     "64": {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1, "num_warps": 4,
            "num_stages": 3, "down": {"BLOCK_SIZE_N": 128, ...}},
     "128": ...}

Upstream's files have only the entries by number, with the same meaning, and may have the down projection's tiles in a
separate file (`..._down.json`). BLOCK_SIZE_N counts the weight rows that a program reads. In w13 half of these are gate
and half are up, so our kernel's BLOCK_N, which counts result columns, is half of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.errors import UserError
from sglang.srt.layers.moe.fused_moe_triton.tiles import GroupedTile

KEYS = {
    "BLOCK_SIZE_M": "BLOCK_M",
    "BLOCK_SIZE_N": "BLOCK_N",
    "BLOCK_SIZE_K": "BLOCK_K",
    "GROUP_SIZE_M": "GROUP_M",
    "num_warps": "num_warps",
    "num_stages": "num_stages",
}
_POWERS_OF_TWO = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps")
_LEAST = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 16}
_MOST = {"BLOCK_SIZE_M": 256, "BLOCK_SIZE_N": 512, "BLOCK_SIZE_K": 1024, "num_warps": 32, "num_stages": 16}
_WITHOUT_EFFECT = frozenset({"USE_TMA", "SPLIT_K"})
"""Upstream keys that select a kernel variant; ours has one only, so they are ignored."""

SOURCES = ("model", "measured", "upstream")


class ConfigFileError(UserError):
    """Raised for an unusable tuning file. The message names the file and what to do."""


@dataclass(frozen=True, slots=True)
class TilePair:
    """The tiles of both products; BLOCK_M is the same, because they share the grouping of tokens by expert."""

    gate_up: GroupedTile
    down: GroupedTile


@dataclass(frozen=True, slots=True)
class Content:
    """A parsed tuning file. `about`: its keys that are not numbers of tokens; upstream's files have none."""

    about: Mapping[str, Any]
    by_tokens: Mapping[int, TilePair]

    @property
    def source(self) -> str:
        """Returns "model" (computed), "measured" (timed by our tuner) or "upstream" (timed by upstream's)."""
        return str(self.about.get("source", "upstream"))


def read_content(path: Path, down_path: Path | None = None) -> Content:
    """Reads a tuning file. `down_path`: upstream's companion file. Raises ConfigFileError."""
    raw = _read_object(path)
    about = {key: value for key, value in raw.items() if not key.isdecimal()}
    numbers = {int(key): value for key, value in raw.items() if key.isdecimal()}
    if not numbers:
        raise _error(path, "it has no entry for any number of tokens")
    if about and "source" not in about:
        raise _error(path, f"unknown key {next(iter(about))!r}; keys are numbers of tokens")
    if about and about["source"] not in SOURCES:
        raise _error(path, f"its source is {about['source']!r}, not one of {', '.join(SOURCES)}")
    downs = _read_down(down_path) if down_path is not None else {}
    pairs = {tokens: _pair(path, tokens, entry, downs) for tokens, entry in sorted(numbers.items())}
    return Content(about, pairs)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _error(path, f"it cannot be read as JSON ({error})") from None
    if not isinstance(raw, dict):
        raise _error(path, f"it holds a JSON {type(raw).__name__}, not an object")
    return raw


def _read_down(path: Path) -> dict[int, Any]:
    raw = _read_object(path)
    stray = next((key for key in raw if not key.isdecimal()), None)
    if stray is not None or not raw:
        raise _error(path, f"unknown key {stray!r}; keys are numbers of tokens" if stray else "it is empty")
    return {int(key): value for key, value in raw.items()}


def _pair(path: Path, tokens: int, entry: Any, downs: Mapping[int, Any]) -> TilePair:
    where = f"entry {tokens}"
    if not isinstance(entry, dict):
        raise _error(path, f"{where} is not an object")
    own_down = entry.get("down")
    up = {key: value for key, value in entry.items() if key != "down"}
    down = {**up, **(own_down if isinstance(own_down, dict) else {})}
    if own_down is None and downs:
        down = {**downs[nearest(downs, tokens)], "BLOCK_SIZE_M": entry.get("BLOCK_SIZE_M")}
    elif own_down is not None and not isinstance(own_down, dict):
        raise _error(path, f"{where}: down is not an object")
    return TilePair(_tile(path, where, up, 2), _tile(path, f"{where}, down", down, 1))


def _tile(path: Path, where: str, entry: Mapping[str, Any], width: int) -> GroupedTile:
    """Parses one tile. `width`: weight rows per result column."""
    unknown = sorted(entry.keys() - KEYS.keys() - _WITHOUT_EFFECT)
    missing = [key for key in KEYS if key not in entry]
    if unknown:
        raise _error(path, f"{where} has the unknown key {unknown[0]!r}; is it for another kind of GPU?")
    if missing:
        raise _error(path, f"{where} has no {missing[0]}")
    for key in KEYS:
        value, least = entry[key], _LEAST.get(key, 1)
        if type(value) is not int or not least <= value <= _MOST.get(key, value):
            raise _error(path, f"{where}: {key} is {value!r}, not a number from {least} to {_MOST.get(key, 'any')}")
        if key in _POWERS_OF_TWO and value & (value - 1):
            raise _error(path, f"{where}: {key} is {value}, not a power of two")
    if entry.get("SPLIT_K", 1) != 1:
        raise _error(path, f"{where}: SPLIT_K is {entry['SPLIT_K']!r}; this kernel does not split K")
    tile = {ours: int(entry[key]) for key, ours in KEYS.items()}
    tile["BLOCK_N"] = max(16, tile["BLOCK_N"] // width)
    return tile


def nearest(table: Mapping[int, Any], tokens: int) -> int:
    """Returns the key of `table` closest to `tokens`; of two equally close ones the smaller."""
    return min(table, key=lambda key: (abs(key - tokens), key))


def _error(path: Path, problem: str) -> ConfigFileError:
    remedy = "Delete the file or write it anew with benchmark/kernels/fused_moe_triton/tuning_fused_moe_triton.py"
    return ConfigFileError(f"{path} is not a usable MoE tuning file: {problem}. {remedy}.")
