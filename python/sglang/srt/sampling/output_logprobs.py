"""Log probabilities in the form in which they travel between processes. Loads no torch."""

from __future__ import annotations

import msgspec

TokenLogprob = tuple[float, int]
"""(log probability, token id)."""


class OutputLogprobs(msgspec.Struct, omit_defaults=True):
    """New log probabilities of a message, one entry a token. Input fields are filled before or with the first
    output."""

    output: list[TokenLogprob] = []
    output_top: list[list[TokenLogprob]] = []
    output_token_ids: list[list[TokenLogprob]] = []
    input: list[tuple[float | None, int]] | None = None
    input_top: list[list[TokenLogprob] | None] | None = None
    input_token_ids: list[list[TokenLogprob] | None] | None = None

    def followed_by(self, later: OutputLogprobs) -> OutputLogprobs:
        """Returns `later` with the input entries of both, those of `self`, which has no others, first."""
        for name in ("input", "input_top", "input_token_ids"):
            first, rest = getattr(self, name), getattr(later, name)
            if first is not None:
                first.extend(rest or ())
                setattr(later, name, first)
        return later

    @property
    def num_values(self) -> int:
        """Returns the number of log probabilities."""
        rows = (self.output_top, self.output_token_ids, self.input_top or (), self.input_token_ids or ())
        return len(self.output) + len(self.input or ()) + sum(len(row) for part in rows for row in part if row)
