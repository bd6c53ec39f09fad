"""Log probabilities of tokens under the raw model distribution.

All values come from log_softmax of the model's own logits: before logit bias, penalties, masks and temperature. A
request can therefore compare them with any other evaluation of the model, whatever it samples with.

On the device the results of R rows are one packed int32 tensor, so that one copy brings them to the host:

    [ token id | its log prob | K x (log prob, token id) | M log probs ]     W = 2 + 2 K + M columns, floats as bits

K is the largest `top_logprobs_num` of the batch, M the longest `token_ids_logprob`. The columns of a request, which are
the first of each part, are what is sent (`output_logprobs`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from sglang.srt.sampling.output_logprobs import TOKEN_COLUMNS
from sglang.srt.utils.device_arrays import send, to_device

MAX_CHUNK_ELEMENTS = 1 << 26
"""Largest [rows, vocab] fp32 block of prompt logits at a time (256 MiB)."""


@dataclass(slots=True)
class LogprobRequest:
    """The log probabilities that B requests want for R rows."""

    top_nums: list[int]  # [B]
    token_ids: list[list[int]]  # [B]
    row_requests: np.ndarray | None = None
    """[R] int64, the request (of B) that a row belongs to. None: row r belongs to request r."""
    rows: np.ndarray | None = None
    """[R] int64, rows of the step's [T] tokens that predict `targets` [R] int64; set for prompts, whose tokens are
    known."""
    targets: np.ndarray | None = None

    def part(self, rows: range) -> LogprobRequest:
        """Returns the request for some of the R rows, with the width of all."""
        row_requests = (
            np.arange(rows.start, rows.stop) if self.row_requests is None else self.row_requests[rows.start : rows.stop]
        )
        return LogprobRequest(self.top_nums, self.token_ids, row_requests)

    def no_rows(self, vocab_size: int, device: torch.device | str) -> torch.Tensor:
        """Returns [0, W] int32 packed rows, for a rank that has none."""
        return torch.empty((0, self.width(vocab_size)), dtype=torch.int32, device=device)

    @property
    def num_top(self) -> int:
        """Returns the most top tokens that a request wants."""
        return max(self.top_nums)

    @property
    def num_ids(self) -> int:
        """Returns the most named tokens that a request wants."""
        return max(map(len, self.token_ids))

    def width(self, vocab_size: int) -> int:
        """Returns the columns of packed results."""
        return TOKEN_COLUMNS + 2 * min(self.num_top, vocab_size) + self.num_ids

    def rows_by_top(self, num_rows: int, vocab_size: int) -> list[tuple[int, np.ndarray]]:
        """Returns pairs of a number of top tokens and the rows, of `num_rows`, for which that many are computed. Each
        row gets at least what its request asks and less than twice as much, so that one that asks for many does not
        make those of all others slow."""
        wanted = np.array(self.top_nums)[self._requests(num_rows)]
        pairs, smallest = list[tuple[int, np.ndarray]](), 0
        while smallest < self.num_top:
            count = min(2 * smallest or 1, self.num_top)
            rows = np.flatnonzero((wanted > smallest) & (wanted <= count))
            if len(rows):
                pairs.append((min(count, vocab_size), rows))
            smallest = count
        return pairs

    def named_by_row(self, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows whose requests name tokens, and these, [N, num_ids] int64, padded with 0."""
        requests = self._requests(num_rows)
        padded = np.zeros((len(self.token_ids), self.num_ids), dtype=np.int64)
        for request, ids in enumerate(self.token_ids):
            padded[request, : len(ids)] = ids
        rows = np.flatnonzero(np.array([bool(ids) for ids in self.token_ids])[requests])
        return rows, padded[requests[rows]]

    def _requests(self, num_rows: int) -> np.ndarray:
        """Returns the request of each row."""
        return np.arange(num_rows) if self.row_requests is None else self.row_requests


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, request: LogprobRequest) -> torch.Tensor:
    """Computes packed [R, W] int32 results from raw fp32 logits [R, V] and tokens [R] int64. Top and named tokens are
    those of the rows whose requests ask; elsewhere these columns are 0."""
    rows, vocab_size = len(tokens), logits.shape[1]
    packed = torch.zeros((rows, request.width(vocab_size)), dtype=torch.int32, device=logits.device)
    log_norm = torch.logsumexp(logits, dim=-1, keepdim=True)
    packed[:, 0] = tokens.int()
    packed[:, 1:TOKEN_COLUMNS] = (logits.gather(1, tokens[:, None]) - log_norm).view(torch.int32)
    for count, asking in request.rows_by_top(rows, vocab_size):
        part = slice(None) if len(asking) == rows else to_device(asking, logits.device)
        values, indices = logits[part].topk(count, dim=-1)
        pairs = torch.stack(((values - log_norm[part]).view(torch.int32), indices.int()), dim=-1)
        packed[part, TOKEN_COLUMNS : TOKEN_COLUMNS + 2 * count] = pairs.flatten(1)
    if request.num_ids:
        asking, ids = request.named_by_row(rows)
        part = to_device(asking, logits.device)
        named = logits[part[:, None], to_device(ids, logits.device)] - log_norm[part]
        packed[part, -request.num_ids :] = named.view(torch.int32)
    return packed


def prompt_logprobs(
    hidden: torch.Tensor,
    project: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    request: LogprobRequest,
    vocab_size: int,
) -> torch.Tensor:
    """Computes packed [R, W] int32 results of prompt tokens, in host memory once an event recorded after this call has
    passed. hidden: [T, H] of a step, whose rows `request` names; `project` maps hidden rows, and their numbers, to fp32
    logits and is called in chunks, which bound the device's memory: one request with many columns widens the rows of
    all."""
    assert request.rows is not None and request.targets is not None and request.row_requests is not None
    sent = send(hidden.device, rows=request.rows, targets=request.targets)
    chunk = max(1, MAX_CHUNK_ELEMENTS // vocab_size)
    size = (len(request.rows), request.width(vocab_size))
    packed = torch.empty(size, dtype=torch.int32, pin_memory=hidden.is_cuda)
    for start in range(0, len(request.rows), chunk):
        part = slice(start, min(start + chunk, len(request.rows)))
        rows = sent["rows"][part]
        logits = project(hidden[rows], rows)
        block = token_logprobs(logits, sent["targets"][part], request.part(range(part.start, part.stop)))
        packed[part].copy_(block, non_blocking=True)
    return packed


class LogprobResult:
    """Packed rows on their way to the host; do not read them before the step is over."""

    def __init__(self, packed: torch.Tensor, request: LogprobRequest, num_ids: int | None = None) -> None:
        """packed: [R, W] int32, in host memory. num_ids: M of its columns, if the rows were packed together with those
        of other requests; by default the request's own."""
        self.request = request
        self._rows = packed.numpy()
        self._first_named = packed.shape[1] - (request.num_ids if num_ids is None else num_ids)

    def add(self, packed: bytearray, request: int, rows: slice) -> None:
        """Appends the columns of `request` (of B) in these rows."""
        end_top = TOKEN_COLUMNS + 2 * self.request.top_nums[request]
        assert end_top <= self._first_named
        num_named = len(self.request.token_ids[request])
        part = self._rows[rows, :end_top]
        if num_named:
            part = np.concatenate((part, self._rows[rows, self._first_named : self._first_named + num_named]), axis=1)
        packed += part.tobytes()
