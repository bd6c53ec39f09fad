"""Token counts behind the repetition, frequency and presence penalties."""

from __future__ import annotations

import numpy as np
import torch

from sglang.srt.utils.device_arrays import to_device

PROMPT_FLAG = 1 << 30
"""Set in a token's state when the prompt contains it; the bits below count its occurrences in the output."""

GROW_ROWS = 8


class PenaltyState:
    """Rows of `[vocab_size]` int32 token states on the device, one per request that uses penalties.

    Row 0 belongs to all requests without penalties and is never read for a result. Memory (4 bytes x vocabulary a row)
    is taken when the first request needs it and grows in doubling steps up to `max_rows`; while it grows, the old rows
    are there too, at most half as many (the memory plan counts both). Device writes wait for `flush`, so that they run
    on the stream that samples.
    """

    def __init__(self, vocab_size: int, device: torch.device, max_rows: int) -> None:
        self.vocab_size = vocab_size
        self.max_rows = max_rows
        self.device = device
        self.state = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._num_rows = 1
        self._free: list[int] = []
        self._pending: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def acquire(self, prompt_ids: list[int], output_ids: list[int]) -> int:
        """Returns a row that holds the counts of these tokens after the next `flush`."""
        if self._free:
            row = self._free.pop()
        else:
            row = self._num_rows
            self._num_rows += 1
        tokens, counts = np.unique(np.asarray(output_ids, dtype=np.int64), return_counts=True)
        prompt = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        all_tokens = np.union1d(prompt, tokens)
        values = np.zeros(len(all_tokens), dtype=np.int64)
        values[np.searchsorted(all_tokens, tokens)] = counts
        values[np.searchsorted(all_tokens, prompt)] += PROMPT_FLAG
        # Placeholder ids (images) lie outside the vocabulary.
        known = (all_tokens >= 0) & (all_tokens < self.vocab_size)
        self._pending[row] = (all_tokens[known], values[known])
        return row

    def release(self, row: int) -> None:
        """Frees a row."""
        self._pending.pop(row, None)
        self._free.append(row)

    def flush(self) -> None:
        """Writes the rows acquired since the last call."""
        if not self._pending:
            return
        self._grow(self._num_rows)
        rows = np.fromiter(self._pending, dtype=np.int64)
        index = np.concatenate([row * self.vocab_size + tokens for row, (tokens, _) in self._pending.items()])
        values = np.concatenate([values for _, values in self._pending.values()])
        self._pending.clear()
        packed = to_device(np.concatenate([rows, index, values]), self.device)
        rows_dev, index_dev, values_dev = packed.split([len(rows), len(index), len(values)])
        self.state.index_fill_(0, rows_dev, 0)
        self.state.view(-1).scatter_(0, index_dev, values_dev.int())

    def _grow(self, num_rows: int) -> None:
        capacity = self.state.shape[0]
        if num_rows <= capacity:
            return
        grown = torch.zeros((self._rows_for(num_rows), self.vocab_size), dtype=torch.int32, device=self.device)
        grown[:capacity] = self.state
        self.state = grown

    def _rows_for(self, num_rows: int) -> int:
        """Returns the rows to allocate: capacity doubles until `num_rows` fit. A step that could not be doubled again
        within `max_rows` goes to `max_rows` at once, so that the old rows are at most half of the new ones."""
        rows = GROW_ROWS if 2 * GROW_ROWS <= self.max_rows else self.max_rows
        while rows < min(num_rows, self.max_rows):
            rows = 2 * rows if 4 * rows <= self.max_rows else self.max_rows
        return max(rows, num_rows)

    def add_tokens(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Counts one new output token for each of `rows` [B] (int64, 0 for requests without penalties)."""
        index = rows * self.vocab_size + tokens
        self.state.view(-1).scatter_add_(0, index, torch.ones_like(index, dtype=torch.int32))


def count_draft_tokens(draft_tokens: torch.Tensor) -> torch.Tensor:
    """Counts how often each draft token [D, k - 1] occurs among the first j draft tokens of its request, for each row j
    of k. Returns [D, k, k - 1] int32.

    >>> count_draft_tokens(torch.tensor([[7, 9, 7]]))[0].tolist()
    [[0, 0, 0], [1, 0, 1], [1, 1, 1], [2, 1, 2]]
    """
    equal = (draft_tokens[:, :, None] == draft_tokens[:, None, :]).int()  # [D, earlier token, token]
    none = torch.zeros_like(equal[:, :1])
    return torch.cat((none, equal.cumsum(dim=1, dtype=torch.int32)), dim=1)


def apply_penalties(
    logits: torch.Tensor,
    state: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """Applies penalties in place to logits [B, V] fp32; state [B, V] int32; one penalty of each kind a row.

    Tokens of prompt or output: positive logits are divided, negative ones multiplied by `repetition`. Tokens of the
    output: minus `frequency` x count, minus `presence`.
    """
    factor = torch.where(state != 0, repetition[:, None], 1.0)
    logits.copy_(torch.where(logits > 0, logits / factor, logits * factor))
    counts = state & (PROMPT_FLAG - 1)
    logits.sub_(counts * frequency[:, None]).sub_((counts > 0) * presence[:, None])
