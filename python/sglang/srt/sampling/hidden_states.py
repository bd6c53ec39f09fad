"""Final hidden states that a request asks for: their positions, and limits of their bytes.

A token's state depends on it and all tokens before it. The last token of an output is never fed to the model and has
none, so a prompt of P tokens with n > 0 tokens of output has P + n - 1 states.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

VALUE_BYTES = 4
"""Size of a float32."""
MAX_CALL_BYTES = 32 << 20
"""Limit for one call, all its prompts and samples together; as JSON it takes about five times as many bytes."""
MAX_HELD_BYTES = 512 << 20
"""Limit for all waiting and running requests together, at the length that each may reach."""


def num_states(prompt_len: int, length: int) -> int:
    """Returns the number of states of a sequence of `length` tokens, the prompt included."""
    return max(prompt_len, length - 1)


class HiddenStates:
    """The hidden states of one request, collected step by step in the order of positions."""

    def __init__(self, start: int) -> None:
        """start: the first position that is wanted."""
        self.start = self.end = start
        """`end` is behind the last position that a launched step computes."""
        self._bytes = bytearray()
        self._row_bytes = 0

    def add(self, rows: npt.NDArray[np.float32]) -> None:
        """Appends the states [N, H] of the next N positions."""
        self._row_bytes = rows[0].nbytes
        self._bytes += rows.data

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the collected states."""
        return len(self._bytes)

    def states_before(self, end: int) -> bytes:
        """Returns the collected states of positions below `end`, [N, H] float32."""
        return bytes(memoryview(self._bytes)[: (end - self.start) * self._row_bytes])
