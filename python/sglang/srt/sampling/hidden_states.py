"""Final hidden states that a request wants: of which positions, and how many bytes they may be.

A token's state is what the model makes of it and of all before it, so the last token of an output has none: a prompt of
P tokens with n > 0 tokens of output has P + n - 1 states.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

VALUE_BYTES = 4
"""float32."""
MAX_CALL_BYTES = 32 << 20
"""The limit of one call, all its prompts and samples together; as JSON about five times as many."""
MAX_HELD_BYTES = 512 << 20
"""The limit of all requests that wait or run, at the length that each may reach."""


def num_states(prompt_len: int, length: int) -> int:
    """The number of states of a sequence of `length` tokens, the prompt included."""
    return max(prompt_len, length - 1)


class HiddenStates:
    """The hidden states of one request as steps bring them, one position after the other."""

    def __init__(self, start: int) -> None:
        """start: the first position that is wanted."""
        self.start = self.end = start
        """`end` is behind the last position that a launched step computes."""
        self._bytes = bytearray()
        self._row_bytes = 0

    def add(self, rows: npt.NDArray[np.float32]) -> None:
        """[N, H], of the next N positions."""
        self._row_bytes = rows[0].nbytes
        self._bytes += rows.data

    def up_to(self, end: int) -> bytes:
        """[N, H] float32: the positions that are there, and below `end`."""
        return bytes(self._bytes[: (end - self.start) * self._row_bytes])
