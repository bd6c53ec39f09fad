"""Log probabilities of tokens under the raw model distribution.

All values come from log_softmax of the model's own logits: before logit bias, penalties, masks and temperature. A
request can therefore compare them with any other evaluation of the model, whatever it samples with.

On the device the results of R rows are one packed int32 tensor, so that one copy brings them to the host:

    [ log prob of the token | K log probs | K token ids | M log probs ]      W = 1 + 2 K + M columns, floats as bits

K is the largest `top_logprobs_num` of the batch, M the longest `token_ids_logprob`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from sglang.srt.sampling.output_logprobs import OutputLogprobs, TokenLogprob
from sglang.srt.utils.device_arrays import send, to_device

LogprobEntry = TypeVar("LogprobEntry")

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
        """Returns the columns of packed results: the token's own value, and ids and values of top and named tokens."""
        return 1 + 2 * min(self.num_top, vocab_size) + self.num_ids

    def ids_tensor(self, device: torch.device | str) -> torch.Tensor | None:
        """Returns the named tokens, [B, num_ids] int64, padded with 0; None if no request names tokens."""
        if not self.num_ids:
            return None
        padded = np.zeros((len(self.token_ids), self.num_ids), dtype=np.int64)
        for row, ids in enumerate(self.token_ids):
            padded[row, : len(ids)] = ids
        return to_device(padded, device)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, num_top: int, ids: torch.Tensor | None) -> torch.Tensor:
    """Computes packed [R, W] int32 results from raw fp32 logits [R, V], tokens [R] int64 and ids [R, M] int64 or
    None."""
    log_norm = torch.logsumexp(logits, dim=-1, keepdim=True)
    parts = [(logits.gather(1, tokens[:, None]) - log_norm).view(torch.int32)]
    if num_top:
        values, indices = logits.topk(min(num_top, logits.shape[1]), dim=-1)
        parts += [(values - log_norm).view(torch.int32), indices.int()]
    if ids is not None:
        parts.append((logits.gather(1, ids) - log_norm).view(torch.int32))
    return torch.cat(parts, dim=1)


def sampled_logprobs(logits: torch.Tensor, tokens: torch.Tensor, request: LogprobRequest) -> torch.Tensor:
    """Computes packed [R, W] int32 results from raw fp32 logits [R, V] and the tokens [R] int64 sampled from them."""
    ids = request.ids_tensor(logits.device)
    if ids is not None and request.row_requests is not None:
        ids = ids[to_device(request.row_requests, logits.device)]
    return token_logprobs(logits, tokens, request.num_top, ids)


def prompt_logprobs(
    hidden: torch.Tensor, project: Callable[[torch.Tensor], torch.Tensor], request: LogprobRequest, vocab_size: int
) -> torch.Tensor:
    """Computes packed [R, W] int32 results of prompt tokens, in host memory once an event recorded after this call has
    passed. hidden: [T, H] of a step, whose rows `request` names; `project` maps hidden rows to fp32 logits and is
    called in chunks, which bound the device's memory: one request with many columns widens the rows of all."""
    assert request.rows is not None and request.targets is not None and request.row_requests is not None
    sent = send(hidden.device, rows=request.rows, targets=request.targets, row_requests=request.row_requests)
    ids = request.ids_tensor(hidden.device)
    chunk = max(1, MAX_CHUNK_ELEMENTS // vocab_size)
    size = (len(request.rows), request.width(vocab_size))
    packed = torch.empty(size, dtype=torch.int32, pin_memory=hidden.is_cuda)
    for start in range(0, len(request.rows), chunk):
        part = slice(start, start + chunk)
        named = None if ids is None else ids[sent["row_requests"][part]]
        logits = project(hidden[sent["rows"][part]])
        block = token_logprobs(logits, sent["targets"][part], request.num_top, named)
        packed[part].copy_(block, non_blocking=True)
    return packed


class LogprobResult:
    """Packed rows on their way to the host; do not read them before the step is over."""

    def __init__(self, packed: torch.Tensor, request: LogprobRequest, num_ids: int | None = None) -> None:
        """packed: [R, W] int32, contiguous, in host memory. num_ids: M of its columns, if the rows were packed together
        with those of other requests; by default the request's own."""
        self.request = request
        self._ints = packed.numpy()
        self._floats = self._ints.view(np.float32)
        num_ids = request.num_ids if num_ids is None else num_ids
        self._num_top = (packed.shape[1] - 1 - num_ids) // 2  # fewer if the vocabulary is smaller

    def token(self, row: int) -> float:
        """Returns the log probability of the row's token."""
        return float(self._floats[row, 0])

    def top(self, row: int, count: int) -> list[TokenLogprob]:
        """Returns the `count` most probable tokens of a row."""
        count = min(count, self._num_top)
        values = self._floats[row, 1 : 1 + count].tolist()
        return list(zip(values, self._ints[row, 1 + self._num_top : 1 + self._num_top + count].tolist(), strict=True))

    def named(self, row: int, ids: list[int]) -> list[TokenLogprob]:
        """Returns the log probabilities of the tokens `ids`, which must be the ones that the row's request names."""
        start = 1 + 2 * self._num_top
        return list(zip(self._floats[row, start : start + len(ids)].tolist(), ids, strict=True))

    def add_output(self, out: OutputLogprobs, request: int, row: int, token: int) -> None:
        """Appends the entries of the token that was sampled in `row` for `request` (of B)."""
        out.output.append((self.token(row), token))
        if self.request.top_nums[request]:
            out.output_top.append(self.top(row, self.request.top_nums[request]))
        ids = self.request.token_ids[request]
        if ids:
            out.output_token_ids.append(self.named(row, ids))

    def add_input(self, out: OutputLogprobs, request: int, rows: range, tokens: Sequence[int]) -> None:
        """Appends the entries of prompt `tokens` of `request` (of B), predicted by `rows`. `Req` adds the entry of a
        text's first token, which has no prediction."""
        top_num, ids = self.request.top_nums[request], self.request.token_ids[request]
        for row, token in zip(rows, tokens, strict=True):
            out.input = _appended(out.input, (self.token(row), token))
            if top_num:
                out.input_top = _appended(out.input_top, self.top(row, top_num))
            if ids:
                out.input_token_ids = _appended(out.input_token_ids, self.named(row, ids))


def _appended(entries: list[LogprobEntry] | None, entry: LogprobEntry) -> list[LogprobEntry]:
    entries = [] if entries is None else entries
    entries.append(entry)
    return entries
