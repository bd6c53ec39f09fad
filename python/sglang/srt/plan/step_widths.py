"""Bounds the rows of steps that verify draft tokens: many requests bring fewer draft tokens each.

Draft tokens gain where a step takes no longer for a few more rows, because it mostly reads weights. A step with
hundreds of rows computes for longer than it reads, so further draft tokens cost time, and each row costs memory: logits
of the whole vocabulary several times, and those of graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

VERIFY_ROWS = 512
"""Rows up to which requests may bring draft tokens, where no more requests than that may run; else their number. By
FLOPs and bandwidth (not measured), SM120 cards compute for longer than they read weights from about 250 rows in 16 bits
and 500 in 8 bits. With this limit 48 requests may bring ten tokens each."""


@dataclass(frozen=True, slots=True)
class StepWidths:
    """The numbers of tokens that a decoding request may bring to a step, for each number of requests."""

    widths: tuple[int, ...] = (1,)
    """All that there are, ascending."""
    chooses: bool = True
    """A step may have any width that is allowed; False: it has the widest."""
    max_rows: int | None = None
    """Most rows of a step; None: no limit."""
    graph_batch_sizes: tuple[int, ...] = ()
    """Numbers of requests to which a step is padded, ascending; steps of more are not padded."""

    def limited(self, max_requests: int, graph_batch_sizes: tuple[int, ...]) -> StepWidths:
        """Returns these widths for a server that runs up to `max_requests` requests, whose number is also the least
        limit of rows."""
        rows = max(max_requests, VERIFY_ROWS)
        return replace(self, max_rows=rows, graph_batch_sizes=graph_batch_sizes)

    def of(self, num_requests: int) -> tuple[int, ...]:
        """Returns the widths of steps with `num_requests` requests, ascending; empty if all have too many rows."""
        index = bisect_left(self.graph_batch_sizes, num_requests)
        rows = self.graph_batch_sizes[index] if index < len(self.graph_batch_sizes) else num_requests
        allowed = tuple(w for w in self.widths if self.max_rows is None or rows * w <= self.max_rows)
        return allowed if self.chooses else allowed[-1:]

    def widest(self, num_requests: int) -> int:
        """Returns the most tokens that each of `num_requests` requests may bring to a step; at least 1."""
        return max(self.of(num_requests), default=1)

    def max_batch(self, width: int, max_requests: int) -> int:
        """Returns a bound of the requests of a step with `width` tokens each, of up to `max_requests` requests."""
        return max_requests if self.max_rows is None else min(max_requests, max(1, self.max_rows // width))

    def step_rows(self, max_requests: int) -> int:
        """Returns a bound of the rows of all steps with up to `max_requests` requests."""
        rows = max_requests * self.widths[-1]
        return rows if self.max_rows is None else min(rows, self.max_rows)


ONE_TOKEN = StepWidths()
"""Widths without drafts."""
