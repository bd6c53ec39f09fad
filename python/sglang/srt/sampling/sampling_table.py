"""Sampling parameters of all running requests, one row a slot: on the host for decisions, on the device for use."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import torch

from sglang.srt.sampling.penalties import PenaltyState
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams
from sglang.srt.utils.device_arrays import to_device

GREEDY_BELOW = 1e-6
ALWAYS = np.iinfo(np.int32).max
ROW_WIDTH = 16


class Column(IntEnum):
    """Columns of a parameter row (int32; the first group holds float32 bit patterns)."""

    TEMPERATURE = 0  # 0.0: greedy
    TOP_P = 1
    MIN_P = 2
    REPETITION = 3
    FREQUENCY = 4
    PRESENCE = 5

    TOP_K = 6
    SEED_LO = 7
    SEED_HI = 8
    PENALTY_ROW = 9  # 0: no penalties
    SLOT = 10


class Flag(IntEnum):
    """Columns of the table of flags, which say what a row's sampling needs."""

    SAMPLED = 0
    TOP_K = 1
    TOP_P = 2
    MIN_P = 3
    PENALTY = 4
    SPARSE = 5


def is_greedy(params: SamplingParams) -> bool:
    """Returns whether the request takes the most probable token."""
    return params.temperature < GREEDY_BELOW or params.top_k == 1


def takes_largest(params: SamplingParams) -> bool:
    """Returns whether the request takes the largest raw logit: it is greedy, and nothing changes its logits."""
    edited = params.has_penalties or params.logit_bias or params.min_new_tokens > 0
    return is_greedy(params) and not edited


@dataclass(slots=True)
class SparseLogits:
    """Additions to single logits. The columns of `packed` are (batch row, token, float32 bits, position limit); an
    entry applies while the row's position is below its limit."""

    packed: torch.Tensor  # [4, n] int32

    def part(self, rows: slice) -> SparseLogits:
        """Returns the entries of some rows; entries of the others add nothing to the first token."""
        row, token, amount, limit = self.packed.unbind(0)
        inside = (row >= rows.start) & (row < rows.stop)
        kept = [torch.where(inside, each, 0) for each in (row - rows.start, token, amount)]
        return SparseLogits(torch.stack((*kept, limit)))


@dataclass(slots=True)
class SamplingBatch:
    """The sampling rows of one batch, B = len(slots). The flags, in host memory, say whether any row needs a sampling
    stage."""

    slots: torch.Tensor  # [B] int64
    table: torch.Tensor  # [num_slots, ROW_WIDTH] int32
    all_greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    max_top_k: int
    """Largest top_k among the rows with top_k or top_p (TOP_K_ALL for top_p alone); 1 without such rows."""
    penalties: PenaltyState | None
    sparse: SparseLogits | None

    @property
    def only_largest(self) -> bool:
        """Returns whether every row takes the largest raw logit."""
        return self.all_greedy and self.penalties is None and self.sparse is None

    @property
    def any_filter(self) -> bool:
        """Returns whether a request filters by top-k, top-p or min-p."""
        return self.any_top_k or self.any_top_p or self.any_min_p

    def count(self, tokens: torch.Tensor) -> None:
        """Counts tokens [B] int64, sampled in these rows, for later penalties. A negative token counts as 0."""
        if self.penalties is not None:
            self.penalties.add_tokens(self.rows()[:, Column.PENALTY_ROW].long(), tokens.clamp(min=0))

    def part(self, rows: slice) -> SamplingBatch:
        """Returns the batch of some of the rows, with the flags of all of them."""
        sparse = None if self.sparse is None else self.sparse.part(rows)
        return replace(self, slots=self.slots[rows], sparse=sparse)

    def rows(self) -> torch.Tensor:
        """Returns the parameter rows, [B, ROW_WIDTH] int32 on the device."""
        return self.table[self.slots]


class SamplingTable:
    """The sampling state of every request slot. `set` and `clear` touch host memory only; the device rows are
    written by the next `view`, on the stream that is current there, and nothing ever waits for the device."""

    def __init__(self, num_slots: int, vocab_size: int, device: str) -> None:
        """`num_slots` includes the padding slot 0, which stays greedy."""
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.penalties = PenaltyState(vocab_size, self.device, num_slots)
        self._host = np.zeros((num_slots, ROW_WIDTH), dtype=np.int32)
        self._host_float = self._host.view(np.float32)
        self._host[:, Column.SLOT] = np.arange(num_slots)
        self._flags = np.zeros((num_slots, len(Flag)), dtype=bool)
        self._sparse: dict[int, np.ndarray] = {}
        self._sparse_batch: tuple[bytes, SparseLogits] | None = None
        self._dirty: set[int] = set()
        for slot in range(num_slots):
            self._reset_row(slot)
        self.table = to_device(self._host, self.device)

    def set(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        prompt_ids: list[int],
        output_ids: list[int],
        stop_ids: Collection[int],
    ) -> None:
        """Sets the parameters of `slot` for a request that continues after `prompt_ids + output_ids`.

        `seed` is any 64-bit integer. `stop_ids` (end-of-text and stop tokens) cannot be sampled before
        `params.min_new_tokens` tokens are out. Raises ValueError for a logit bias outside the vocabulary.
        """
        self.clear(slot)
        greedy = is_greedy(params)
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else TOP_K_ALL
        floats, ints, flags = self._host_float[slot], self._host[slot], self._flags[slot]
        floats[Column.TEMPERATURE] = 0.0 if greedy else params.temperature
        if not greedy:
            floats[Column.TOP_P] = params.top_p
            floats[Column.MIN_P] = params.min_p
            ints[Column.TOP_K] = top_k
        seed_lo, seed_hi = np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], dtype=np.uint32).view(np.int32)
        ints[Column.SEED_LO], ints[Column.SEED_HI] = seed_lo, seed_hi
        flags[Flag.SAMPLED] = not greedy
        flags[Flag.TOP_K] = not greedy and top_k != TOP_K_ALL
        flags[Flag.TOP_P] = not greedy and params.top_p < 1.0
        flags[Flag.MIN_P] = not greedy and params.min_p > 0.0
        if params.has_penalties:
            floats[Column.REPETITION] = params.repetition_penalty
            floats[Column.FREQUENCY] = params.frequency_penalty
            floats[Column.PRESENCE] = params.presence_penalty
            ints[Column.PENALTY_ROW] = self.penalties.acquire(prompt_ids, output_ids)
            flags[Flag.PENALTY] = True
        entries = self._sparse_entries(params, len(prompt_ids), stop_ids)
        if entries.shape[1]:
            self._sparse[slot] = entries
            self._sparse_batch = None
            flags[Flag.SPARSE] = True

    def clear(self, slot: int) -> None:
        """Forgets the request of `slot`."""
        if self._flags[slot, Flag.PENALTY]:
            self.penalties.release(int(self._host[slot, Column.PENALTY_ROW]))
        if self._sparse.pop(slot, None) is not None:
            self._sparse_batch = None
        self._reset_row(slot)
        self._dirty.add(slot)

    def _reset_row(self, slot: int) -> None:
        self._host[slot, : Column.SLOT] = 0
        self._host_float[slot, [Column.TOP_P, Column.REPETITION]] = 1.0
        self._host[slot, Column.TOP_K] = TOP_K_ALL
        self._flags[slot] = False

    def _sparse_entries(self, params: SamplingParams, prompt_len: int, stop_ids: Collection[int]) -> np.ndarray:
        """Returns [3, n] int32: token, float32 bits of the addition, position limit."""
        bias = {int(token): value for token, value in params.logit_bias.items()}
        for token in bias:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"logit_bias names token {token}, but the vocabulary has {self.vocab_size} tokens.")
        stops = [token for token in stop_ids if 0 <= token < self.vocab_size] if params.min_new_tokens > 0 else []
        tokens = [*bias, *stops]
        amounts = np.array([*bias.values(), *[-np.inf] * len(stops)], dtype=np.float32)
        limits = [ALWAYS] * len(bias) + [prompt_len + params.min_new_tokens] * len(stops)
        return np.stack([np.array(tokens, dtype=np.int32), amounts.view(np.int32), np.array(limits, dtype=np.int32)])

    def view(self, slots: np.ndarray, slots_dev: torch.Tensor) -> SamplingBatch:
        """Returns the batch of `slots` ([B] integers; `slots_dev` the same on the device, int64), in that order."""
        self._flush()
        flags = self._flags[slots]
        any_flag = flags.any(axis=0) if len(slots) else np.zeros(len(Flag), dtype=bool)
        cut = flags[:, Flag.TOP_K] | flags[:, Flag.TOP_P]
        max_top_k = int(self._host[slots[cut], Column.TOP_K].max(initial=1))
        return SamplingBatch(
            slots=slots_dev,
            table=self.table,
            all_greedy=not any_flag[Flag.SAMPLED],
            any_top_k=bool(any_flag[Flag.TOP_K]),
            any_top_p=bool(any_flag[Flag.TOP_P]),
            any_min_p=bool(any_flag[Flag.MIN_P]),
            max_top_k=max_top_k,
            penalties=self.penalties if any_flag[Flag.PENALTY] else None,
            sparse=self._sparse_of(slots, flags) if any_flag[Flag.SPARSE] else None,
        )

    def has_penalties(self, slots: np.ndarray) -> bool:
        """Returns whether any of these requests has penalties that count tokens."""
        return bool(self._flags[slots, Flag.PENALTY].any())

    def _flush(self) -> None:
        self.penalties.flush()
        if not self._dirty:
            return
        rows = to_device(self._host[np.fromiter(self._dirty, dtype=np.int64)], self.device)
        self._dirty.clear()
        self.table.index_copy_(0, rows[:, Column.SLOT].long(), rows)

    def _sparse_of(self, slots: np.ndarray, flags: np.ndarray) -> SparseLogits:
        key = slots.tobytes()
        if self._sparse_batch is None or self._sparse_batch[0] != key:
            rows = np.flatnonzero(flags[:, Flag.SPARSE])
            entries = [self._sparse[int(slots[row])] for row in rows]
            counts = [block.shape[1] for block in entries]
            packed = np.concatenate([np.repeat(rows, counts).astype(np.int32)[None], np.concatenate(entries, axis=1)])
            self._sparse_batch = (key, SparseLogits(to_device(packed, self.device)))
        return self._sparse_batch[1]
