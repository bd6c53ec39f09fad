"""The number of splits of a token's selected entries. Imports neither torch nor Triton, since the cost model uses it
too."""

from __future__ import annotations

import functools

MAX_SHARES = 64
"""Maximum number of splits per token, for which the merge kernel has registers."""
START_TILES = 2
"""Cost of a program's start and end, in tiles of entries."""
MAX_ROUNDS = 4
"""Maximum number of waves of programs that splitting may create, which bounds the memory of partial results."""


@functools.cache
def num_shares(programs: int, tiles: int, slots: int) -> int:
    """Returns into how many splits a token's entries are cut. `programs`: their number without splits, each with up to
    `tiles` tiles of entries; `slots`: programs that the GPU runs at once. Minimizes the cost of programs, waves and the
    merge, counted in tiles."""

    def cost(shares: int) -> int:
        rounds = -(-programs * shares // slots)
        return rounds * (-(-tiles // shares) + START_TILES) + (shares > 1)

    most = max(1, min(tiles, MAX_SHARES, MAX_ROUNDS * slots // programs))
    return min(range(1, most + 1), key=cost)
