"""Into how many shares the selected entries of a token are cut. No torch, no Triton: the plan of times asks it too."""

from __future__ import annotations

import functools

MOST_SHARES = 64
"""Shares of one token that the merge has registers for."""
START_TILES = 2
"""What the start and the end of a program take, in tiles of entries."""
MOST_ROUNDS = 4
"""Rounds of programs that may be made by cutting: bounds the memory of the shares."""


@functools.cache
def num_shares(programs: int, tiles: int, slots: int) -> int:
    """Into how many shares the entries of a token are cut: `programs` without a cut, each of up to `tiles` tiles of
    entries, on a GPU that runs `slots` of them at once. Counts in tiles what a program, a round of programs and the
    merge take."""

    def cost(shares: int) -> int:
        rounds = -(-programs * shares // slots)
        return rounds * (-(-tiles // shares) + START_TILES) + (shares > 1)

    most = max(1, min(tiles, MOST_SHARES, MOST_ROUNDS * slots // programs))
    return min(range(1, most + 1), key=cost)
