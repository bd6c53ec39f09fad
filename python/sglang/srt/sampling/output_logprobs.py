"""Log probabilities in the form in which they travel between processes: packed, so that no step and no message costs an
object for each of them. Loads no torch.

The values of a token are a row of int32 columns, floats as bits:

    [ token id | its log prob | log prob and token id of each of K top tokens | M log probs of named tokens ]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

TokenLogprob = tuple[float, int]
"""(log probability, token id)."""

TOKEN_COLUMNS = 2
"""Columns before those of the top tokens: the token's id and its log probability."""
VALUES_AT_ONCE = 1 << 12
"""Log probabilities of which there are objects at a time. To write them holds the interpreter for a millisecond or two,
and garbage collections find nothing of the others."""


class LogprobBlock(NamedTuple):
    """Log probabilities of some consecutive tokens. `top` and `named` are empty if none are wanted."""

    tokens: list[tuple[float | None, int]]
    top: list[list[TokenLogprob] | None]
    named: list[list[TokenLogprob] | None]


class OutputLogprobs(msgspec.Struct, omit_defaults=True):
    """New log probabilities of one sequence. Those of the prompt come before or with the first output."""

    num_top: int = 0
    """Top tokens of each row."""
    named: bytes = b""
    """Ids int32 of the named tokens of each row."""
    first_token: int | None = None
    """The first token of a prompt, which nothing predicts, if log probabilities of the whole prompt are wanted."""
    input: bytearray = bytearray()
    output: bytearray = bytearray()

    def append(self, later: OutputLogprobs) -> None:
        """Appends the next log probabilities of the sequence."""
        self.input += later.input
        self.output += later.output

    @property
    def num_values(self) -> int:
        """Returns the number of log probabilities."""
        num_named = len(self.named) // 4
        row_bytes = 4 * (TOKEN_COLUMNS + 2 * self.num_top + num_named)
        rows = (len(self.input) + len(self.output)) // row_bytes
        return rows * (1 + self.num_top + num_named) + (self.first_token is not None)

    def input_blocks(self) -> Iterator[LogprobBlock]:
        """Yields the log probabilities of the prompt, VALUES_AT_ONCE at a time."""
        if self.first_token is not None:
            yield LogprobBlock([(None, self.first_token)], [None] if self.num_top else [], [None] if self.named else [])
        yield from self._blocks(self.input)

    def output_blocks(self) -> Iterator[LogprobBlock]:
        """Yields the log probabilities of the output, VALUES_AT_ONCE at a time."""
        return self._blocks(self.output)

    def _blocks(self, packed: bytearray) -> Iterator[LogprobBlock]:
        ids = np.frombuffer(self.named, np.int32).tolist()
        end_top = TOKEN_COLUMNS + 2 * self.num_top
        rows = np.frombuffer(packed, np.int32).reshape(-1, end_top + len(ids))
        count = max(1, VALUES_AT_ONCE // (1 + self.num_top + len(ids)))
        for first in range(0, len(rows), count):
            ints = rows[first : first + count]
            floats = ints.view(np.float32)
            top_values, top_ids = floats[:, TOKEN_COLUMNS:end_top:2], ints[:, TOKEN_COLUMNS + 1 : end_top : 2]
            tops = zip(top_values.tolist(), top_ids.tolist(), strict=True)
            named = floats[:, end_top:].tolist()
            yield LogprobBlock(
                list(zip(floats[:, 1].tolist(), ints[:, 0].tolist(), strict=True)),
                [list(zip(*pair, strict=True)) for pair in tops] if self.num_top else [],
                [list(zip(row, ids, strict=True)) for row in named] if ids else [],
            )
