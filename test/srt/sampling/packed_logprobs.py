"""Log probabilities in a readable form, as lists of pairs, beside the packed one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sglang.srt.sampling.output_logprobs import LogprobBlock, OutputLogprobs

Pairs = list[tuple[float, int]]


def packed(output: Sequence[tuple[float, int]] = (), top: Sequence[Pairs] = (), named: Sequence[Pairs] = (),
           input: Sequence[tuple[float | None, int]] = (), input_top: Sequence[Pairs | None] = (),
           input_named: Sequence[Pairs | None] = ()) -> OutputLogprobs:  # fmt: skip
    """Rows have equally many top and named tokens; a first entry of `input` without a value, and its `None` in the
    other lists, stand for the first token."""
    first, input = (input[0][1], input[1:]) if input and input[0][0] is None else (None, input)
    tops = [row for row in (*top, *input_top) if row is not None]
    names = [row for row in (*named, *input_named) if row is not None]
    ids = [token for _, token in names[0]] if names else []
    result = OutputLogprobs(len(tops[0]) if tops else 0, np.array(ids, np.int32).tobytes(), first)
    for own, rest, into in ((output, (top, named), result.output), (input, (input_top, input_named), result.input)):
        best, asked = ([row for row in rows if row is not None] or [[]] * len(own) for rows in rest)
        for (value, token), row, extra in zip(own, best, asked, strict=True):
            assert len(row) == result.num_top and [t for _, t in extra] == ids
            floats = [0.0, value, *(x for pair in row for x in (pair[0], 0.0)), *(v for v, _ in extra)]
            columns = np.array(floats, np.float32).view(np.int32)
            columns[0], columns[3 : 2 + 2 * len(row) : 2] = token, [t for _, t in row]
            into += columns.tobytes()
    return result


class Unpacked(NamedTuple):
    """All values, an entry a token; empty lists where none are wanted."""

    output: list[tuple[float, int]]
    top: list[Pairs]
    named: list[Pairs]
    input: list[tuple[float | None, int]]
    input_top: list[Pairs | None]
    input_named: list[Pairs | None]


def unpacked(logprobs: OutputLogprobs | None) -> Unpacked:
    assert logprobs is not None
    parts: list[list[LogprobBlock]] = [list(logprobs.output_blocks()), list(logprobs.input_blocks())]
    return Unpacked(*([entry for block in blocks for entry in block[i]] for blocks in parts for i in range(3)))
