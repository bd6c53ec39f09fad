"""A JSON list that is written a part at a time, as pieces that are never joined: a list of millions of values, or its
JSON in one piece, would hold the interpreter, and with it the event loop, for seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

encode = msgspec.json.encode
PIECE_BYTES = 1 << 16
ARRAY_VALUES = 1 << 12
"""Numbers of an array that are encoded at a time, about a millisecond."""

Pieces = list[bytes | bytearray]


class JSONList:
    """The inside of a list; the brackets are the caller's."""

    __slots__ = ("pieces",)

    def __init__(self) -> None:
        self.pieces: Pieces = []

    def extend(self, values: Sequence[Any]) -> None:
        """Appends values, which should be few."""
        if not values:
            return
        if not self.pieces:
            self.pieces.append(bytearray())
        else:
            self.pieces[-1] += b","
        if len(self.pieces[-1]) > PIECE_BYTES:
            self.pieces.append(bytearray())
        self.pieces[-1] += encode(values)[1:-1]

    def extend_rows(self, rows: np.ndarray) -> None:
        """Appends rows [N, H] as N lists."""
        count = max(1, ARRAY_VALUES // rows.shape[1])
        for first in range(0, len(rows), count):
            self.extend(rows[first : first + count].tolist())
