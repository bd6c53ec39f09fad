"""The stop tokens of all current requests, so that one look-up finds the tokens of a step that may end a request."""

from __future__ import annotations

from collections.abc import Set

import numpy as np


class StopTokens:
    """Counts, for each token id, the current requests that it stops."""

    def __init__(self, vocab_size: int) -> None:
        self._num_reqs = np.zeros(vocab_size + 1, np.int32)
        self._num_reqs[-1] = 1  # where NO_TOKEN, which is -1, looks: it ends every request

    def add(self, stop_ids: Set[int]) -> None:
        """Counts the stop ids of a request that came."""
        self._num_reqs[self._sampled(stop_ids)] += 1

    def remove(self, stop_ids: Set[int]) -> None:
        """Forgets the stop ids of a request that ended."""
        self._num_reqs[self._sampled(stop_ids)] -= 1

    def _sampled(self, stop_ids: Set[int]) -> list[int]:
        """Returns the ids that the model can sample; clients may name others."""
        return [token for token in stop_ids if 0 <= token < len(self._num_reqs) - 1]

    def rows_with_any(self, tokens: np.ndarray) -> np.ndarray:
        """Returns [R] bool: whether a row of `tokens` [R, k] has a token that ends some request. Rejected tokens, which
        may be any number, count as well."""
        return np.asarray(self._num_reqs.take(tokens, mode="wrap").any(axis=1))
