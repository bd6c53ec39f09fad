"""Draft tokens of multi-token prediction (MTP) with a layer for each depth, as MiMo-V2, Step and Inkling have it.

    depth 0    row i   token i + 1, features i    -> draft token i + 2
    depth d    row i   token i + 1 + d            -> draft token i + 2 + d

A step that computes tokens up to position n - 1 and samples token n knows the inputs of depth d up to row n - 1 - d. So
the rows of depth d lag d positions behind the step's. The next d rows need draft tokens: they are computed with these,
and again once the real tokens are known. A row of depth d reads the output of depth d - 1 one row further back, which
for the first row of a step was computed in the step before; that row is kept for each request (`tails`).

Features of a request exist only from its first computed row f on (0, or the end of a cached prefix). Until depth d is d
rows past f, its rows begin at f; those at the end of a run whose tokens are unknown are computed with arbitrary tokens
and overwritten later, which is harmless because attention is causal. If the draft's layers have recurrent states, these
start at position 0, so tails are copied with the states and a request continues where the cached prefix ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang.srt.layers.compressed_step import CompressedStep, TokenRequests, compressed_step
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.step_rows import requests_of_tokens
from sglang.srt.models.mtp_by_layer import MTPByLayerDraft
from sglang.srt.speculative.autoregressive_draft import following_rows
from sglang.srt.speculative.drafter import DraftStep


class MultiLayerMTP:
    """Makes a chain of draft tokens, each with the layer of its depth. Implements Drafter."""

    def __init__(self, model: MTPByLayerDraft, num_tokens: int, max_requests: int, device: torch.device | str) -> None:
        self.model, self.num_tokens = model, num_tokens
        self.aux_layers, self.caches = model.aux_layers, tuple(model.caches)
        self.num_depths = self.next_tokens_read = len(model.depths)
        # No cache slots are needed after the computed tokens, but earlier pipeline stages plan as for other drafts.
        self.lookahead_slots = num_tokens - 2
        shape = (0 if model.keeps_states else self.num_depths - 1, max_requests + 1, model.hidden_size)
        self._tails = torch.zeros(shape, dtype=model.dtype, device=device)
        self.first = torch.zeros(max_requests + 1, dtype=torch.int32, device=device)
        """First position of each request slot with features; -1: nothing was computed yet."""

    @property
    def tails(self) -> list[torch.Tensor]:
        """Returns, for each depth but the last, the output [slots, H] by request slot that the next depth reads at the
        first row of the next step."""
        return [store["tail"] for store in self.model.tails] if self.model.keeps_states else [*self._tails]

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """Resets the slot's first position with features, in stream order, unless features are kept with states."""
        if not self.model.keeps_states:
            self.first[slot] = -1

    def propose(self, step: DraftStep, num_speculative_tokens: int) -> torch.Tensor:
        """Returns the draft tokens. All depths compute the step's rows even for num_speculative_tokens = 0, because
        later draft tokens read them."""
        state = self._compute_rows(step)
        if not num_speculative_tokens:
            return step.tokens.new_empty((len(step.tokens), 0))
        lens = step.lens
        draft_tokens = [self._draw(step, 0, state[step.last_rows], lens + 1)]
        known = lens - self.first[step.slots]
        features = [tails[step.slots] for tails in self.tails]
        for i in range(1, num_speculative_tokens):
            following = list(features)
            for depth in range(i, num_speculative_tokens):
                behind = depth - i
                position = torch.where(behind < known, lens - 1 - behind, step.ends)  # else padding
                batch = step.build_batch(draft_tokens[-1], step.slots, position, step.ends)
                state = self.model.compute(depth, batch, features[depth - 1])
                if not behind:
                    deepest = state
                if depth + 1 < num_speculative_tokens:
                    following[depth] = state if self.model.chained else features[depth - 1]
            features = following
            draft_tokens.append(self._draw(step, i, deepest, lens + i + 1))
        return torch.stack(draft_tokens, 1)

    def _draw(self, step: DraftStep, depth: int, state: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # What a request has no token for is no number in a row of padding: token 0 instead.
        return step.draw(self.model.logits(depth, state), step.slots, positions).clamp(min=0)

    def _compute_rows(self, step: DraftStep) -> torch.Tensor:
        """Computes the step's rows at every depth, keeps the tails, and returns the outputs [T, H] of the first
        depth."""
        runs = row_runs(step.batch)
        self.first[runs.slots] = torch.where(self.first[runs.slots] < 0, runs.before, self.first[runs.slots])
        before = self._by_slot(runs.slots, runs.before)
        last = self._by_slot(runs.slots, runs.last)
        last[step.slots] = step.last_rows.to(torch.int32)  # of draft tokens only those that stand
        known = (before - self.first).clamp(min=0)
        begins = step.batch.positions == before[runs.row_slots]
        row = torch.arange(len(begins), device=begins.device)
        features, images = self.model.features(step.hidden, step.aux_hidden_states), following_rows(step.batch)
        first_state, tails = features, []
        for depth in range(self.num_depths):
            lag = known.clamp(max=depth)
            if depth:
                earlier = torch.where(begins[:, None], self.tails[depth - 1][runs.row_slots], features.roll(1, dims=0))
                features = torch.where((known >= depth)[runs.row_slots][:, None], earlier, features)
            missing = depth - lag  # rows at the end of a run, whose tokens are unknown
            behind = (row + missing[runs.row_slots]).clamp(max=len(row) - 1)
            batch = step.build_lagging(step.next_ids[behind], runs.row_slots, lag)
            batch.embedding_rows = None if images is None else images.at(behind)
            if self.model.keeps_states:
                batch.compressed = lagging_step(step.batch, batch.positions, runs.row_slots, lag)
            state = self.model.compute(depth, batch, features)
            first_state = first_state if depth else state
            features = state if self.model.chained else features
            tails.append(features[(last - missing)[runs.slots].clamp(min=0)])
        for kept, rows in zip(self.tails, tails, strict=False):  # the last depth has none behind it
            kept[runs.slots] = rows
        return first_state

    def _by_slot(self, slots: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(self.first)
        result[slots] = values.to(torch.int32)
        return result


def lagging_step(
    batch: ForwardBatch, positions: torch.Tensor, row_slots: torch.Tensor, lag: torch.Tensor
) -> CompressedStep:
    """Returns the step of layers with states for a batch with the rows of `batch` at earlier positions [T], as in
    `BuildLagging`. Rows of request slot 0 are padding."""
    step, back = compressed_step(batch), lag[row_slots]
    firsts = torch.where(row_slots > 0, step.requests.firsts - back, positions)
    stops = torch.where(row_slots > 0, step.requests.stops - back, positions + 1)
    return CompressedStep(TokenRequests(row_slots, positions, firsts, stops), step.longest)


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of rows of a step, one for each of S requests; padding has request slot 0."""

    slots: torch.Tensor  # [S] int64
    before: torch.Tensor  # [S] int32, tokens computed before
    last: torch.Tensor  # [S] int32, of T: the last row
    row_slots: torch.Tensor  # [T] int64, the request slot of each row


def row_runs(batch: ForwardBatch) -> Runs:
    """Returns the runs of a step of any kind (decode, verify, prompts)."""
    decode, extend, count = batch.decode, batch.extend, len(batch.positions)
    single = torch.arange(0 if decode is None else len(decode), dtype=torch.int32, device=batch.positions.device)
    if extend is None:
        assert decode is not None
        return Runs(decode.req_pool_indices, decode.seq_lens - 1, single, decode.req_pool_indices)
    rows = requests_of_tokens(extend.start_loc, extend.req_pool_indices, decode, count)
    rows = torch.where(batch.token_slots[0].out_cache_loc == 0, 0, rows)
    slots, before = extend.req_pool_indices, extend.prefix_lens
    last = (extend.start_loc[1:] - 1).clamp(min=0, max=count - 1)
    if decode is not None:
        slots, before = torch.cat((decode.req_pool_indices, slots)), torch.cat((decode.seq_lens - 1, before))
        last = torch.cat((single, last))
    return Runs(slots, before, last, rows)
