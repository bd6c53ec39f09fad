"""The record of which files each file of tests touches, as it is kept in the tree.

`record.json.gz`: {"paths": [path, ...], "tests": {file of tests: {"digest", "seconds", "touched"}}, "at_import"}.
Paths are below the root of the tree. digest: of the file of tests when it was recorded. seconds: of processors.
touched, at_import: the bits of a number in hexadecimal digits, one for each of "paths", the first one the lowest.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("record.json.gz")


@dataclass(frozen=True)
class Known:
    """What is known of a file of tests."""

    digest: str
    seconds: float
    touched: frozenset[str]


@dataclass(frozen=True)
class Record:
    tests: dict[str, Known] = field(default_factory=dict)
    at_import: frozenset[str] = frozenset()
    """Modules whose functions run while others are imported."""


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def write(record: Record, file: Path = FILE) -> None:
    paths = sorted(record.at_import.union(*(known.touched for known in record.tests.values())))
    bits = {path: 1 << i for i, path in enumerate(paths)}

    def digits(touched: Iterable[str]) -> str:
        return f"{sum(bits[path] for path in touched):x}"

    tests: dict[str, Any] = {
        name: {"digest": known.digest, "seconds": known.seconds, "touched": digits(known.touched)}
        for name, known in sorted(record.tests.items())
    }
    content = {"paths": paths, "tests": tests, "at_import": digits(record.at_import)}
    file.write_bytes(gzip.compress(json.dumps(content).encode(), mtime=0))  # the same record is the same file


def read(file: Path = FILE) -> Record:
    """Empty where there is no record."""
    if not file.exists():
        return Record()
    content = json.loads(gzip.decompress(file.read_bytes()))
    paths = content["paths"]

    def touched(digits: str) -> frozenset[str]:
        number = int(digits, 16)
        return frozenset(path for i, path in enumerate(paths) if number >> i & 1)

    tests = {
        name: Known(entry["digest"], entry["seconds"], touched(entry["touched"]))
        for name, entry in content["tests"].items()
    }
    return Record(tests, touched(content["at_import"]))
