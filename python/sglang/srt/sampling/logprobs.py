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

from sglang.srt.managers.wire.io_struct import OutputLogprobs, TokenLogprob
from sglang.srt.sampling.penalties import to_device

Entry = TypeVar("Entry")

MAX_CHUNK_ELEMENTS = 1 << 26
"""Largest [rows, vocab] fp32 block of prompt logits at a time (256 MiB)."""


@dataclass(slots=True)
class LogprobRequest:
    """What the requests of a batch want; entry i belongs to batch row i."""

    wanted: list[bool]
    top_nums: list[int]
    token_ids: list[list[int] | None]
    num_top: int
    num_ids: int
    ids_dev: torch.Tensor | None
    """[B, num_ids] int64, rows padded with 0."""

    @classmethod
    def build(
        cls,
        wanted: Sequence[bool],
        top_nums: Sequence[int],
        token_ids: Sequence[list[int] | None],
        device: str | torch.device,
    ) -> LogprobRequest | None:
        """None when no row wants anything."""
        if not any(wanted):
            return None
        num_ids = max(len(ids or ()) for ids in token_ids)
        ids_dev = None
        if num_ids:
            padded = np.zeros((len(token_ids), num_ids), dtype=np.int64)
            for row, ids in enumerate(token_ids):
                padded[row, : len(ids or ())] = ids or ()
            ids_dev = to_device(padded, torch.device(device))
        return cls(list(wanted), list(top_nums), list(token_ids), max(top_nums), num_ids, ids_dev)

    @property
    def width(self) -> int:
        return 1 + 2 * self.num_top + self.num_ids


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, num_top: int, ids: torch.Tensor | None) -> torch.Tensor:
    """logits [R, V] raw fp32, tokens [R] int64, ids [R, M] int64 or None -> packed [R, W] int32."""
    log_norm = torch.logsumexp(logits, dim=-1, keepdim=True)
    parts = [(logits.gather(1, tokens[:, None]) - log_norm).view(torch.int32)]
    if num_top:
        values, indices = logits.topk(min(num_top, logits.shape[1]), dim=-1)
        parts += [(values - log_norm).view(torch.int32), indices.int()]
    if ids is not None:
        parts.append((logits.gather(1, ids) - log_norm).view(torch.int32))
    return torch.cat(parts, dim=1)


def prompt_logprobs(
    hidden: torch.Tensor,
    project: Callable[[torch.Tensor], torch.Tensor],
    targets: torch.Tensor,
    request_rows: torch.Tensor,
    request: LogprobRequest,
    vocab_size: int,
) -> torch.Tensor:
    """Log probabilities of prompt tokens, in chunks that bound the [rows, V] memory.

    hidden [R, H]: row r predicts `targets[r]` (int64) and belongs to batch row `request_rows[r]` (int64);
    `project` maps hidden rows to fp32 logits. -> packed [R, W] int32.
    """
    chunk = max(1, MAX_CHUNK_ELEMENTS // vocab_size)
    blocks = []
    for start in range(0, hidden.shape[0], chunk):
        rows = slice(start, start + chunk)
        ids = None if request.ids_dev is None else request.ids_dev[request_rows[rows]]
        blocks.append(token_logprobs(project(hidden[rows]), targets[rows], request.num_top, ids))
    return torch.cat(blocks) if blocks else hidden.new_zeros((0, request.width), dtype=torch.int32)


@dataclass(slots=True)
class HostLogprobs:
    """Packed rows after their copy to the host."""

    request: LogprobRequest
    num_top: int
    floats: np.ndarray  # [R, W] float32
    ints: np.ndarray  # the same memory as int32

    @classmethod
    def unpack(cls, packed: np.ndarray, request: LogprobRequest) -> HostLogprobs:
        """packed [R, W] int32, contiguous."""
        num_top = (packed.shape[1] - 1 - request.num_ids) // 2  # smaller than asked when the vocabulary is
        return cls(request, num_top, packed.view(np.float32), packed)

    def token(self, row: int) -> float:
        return float(self.floats[row, 0])

    def top(self, row: int, count: int) -> list[TokenLogprob]:
        count = min(count, self.num_top)
        values = self.floats[row, 1 : 1 + count].tolist()
        return list(zip(values, self.ints[row, 1 + self.num_top : 1 + self.num_top + count].tolist(), strict=True))

    def requested(self, row: int, ids: list[int]) -> list[TokenLogprob]:
        start = 1 + 2 * self.num_top
        return list(zip(self.floats[row, start : start + len(ids)].tolist(), ids, strict=True))

    def add_output(self, out: OutputLogprobs, batch_row: int, token: int) -> None:
        """Append the entries of the token sampled in `batch_row`."""
        out.output.append((self.token(batch_row), token))
        if self.request.top_nums[batch_row]:
            out.output_top.append(self.top(batch_row, self.request.top_nums[batch_row]))
        ids = self.request.token_ids[batch_row]
        if ids:
            out.output_token_ids.append(self.requested(batch_row, ids))

    def add_input(self, out: OutputLogprobs, batch_row: int, rows: range, tokens: Sequence[int]) -> None:
        """Append the entries of prompt `tokens` of `batch_row`, predicted by packed `rows`. The first token of a text
        has no prediction: put it in with `add_unpredicted_input` before."""
        top_num, ids = self.request.top_nums[batch_row], self.request.token_ids[batch_row]
        for row, token in zip(rows, tokens, strict=True):
            out.input = _appended(out.input, (self.token(row), token))
            if top_num:
                out.input_top = _appended(out.input_top, self.top(row, top_num))
            if ids:
                out.input_token_ids = _appended(out.input_token_ids, self.requested(row, ids))


def add_unpredicted_input(out: OutputLogprobs, request: LogprobRequest, batch_row: int, token: int) -> None:
    """The entry of the very first prompt token: its log probability is None."""
    out.input = _appended(out.input, (None, token))
    if request.top_nums[batch_row]:
        out.input_top = _appended(out.input_top, None)
    if request.token_ids[batch_row]:
        out.input_token_ids = _appended(out.input_token_ids, None)


def _appended(entries: list[Entry] | None, entry: Entry) -> list[Entry]:
    entries = [] if entries is None else entries
    entries.append(entry)
    return entries
