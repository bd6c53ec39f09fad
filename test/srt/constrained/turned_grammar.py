"""A grammar over ids, for models without a tokenizer: three classes of tokens in turn, and an end if wanted.
No library is loaded, which costs every process of a test a second."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

END = 5


class InTurn:
    """Implements Matcher: token t may stand behind n others if t % 3 is n % 3. END may stand behind `least` and must
    stand behind `most`; None: the output never ends, and END is a token as others."""

    def __init__(self, least: int = 0, most: int | None = None) -> None:
        self.least, self.most = least, most
        self.length = 0
        self.ended = False

    def _may_follow(self, token_ids: np.ndarray) -> np.ndarray:
        in_turn = token_ids % 3 == self.length % 3
        if self.most is None:
            return in_turn
        return np.where(token_ids == END, self.length >= self.least, in_turn & (self.length < self.most))

    def fill_mask(self, row: np.ndarray) -> None:
        row[:] = np.packbits(self._may_follow(np.arange(len(row) * 32)), bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> bool:
        fits = bool(self._may_follow(np.array(token_id)))
        self.length += fits
        self.ended = fits and token_id == END and self.most is not None
        return fits

    def is_terminated(self) -> bool:
        return self.ended

    def rollback(self, num_tokens: int) -> None:
        self.length -= num_tokens
        self.ended = False


def _fill_masks(matchers: list[InTurn], mask: np.ndarray, rows: list[int], threads: int) -> None:
    for matcher, row in zip(matchers, rows, strict=True):
        matcher.fill_mask(mask[row])


def compiled(vocab_size: int, least: int = 0, most: int | None = None) -> Any:
    """Implements CompiledGrammar."""
    return SimpleNamespace(matcher=lambda: InTurn(least, most), fill_masks=_fill_masks, vocab_size=vocab_size)


def fits(tokens: list[int], least: int, most: int) -> bool:
    """Whether tokens are a whole output."""
    *body, last = tokens
    return last == END and least <= len(body) <= most and all(token % 3 == n % 3 for n, token in enumerate(body))
