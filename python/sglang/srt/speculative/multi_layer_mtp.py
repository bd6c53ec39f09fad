"""Draft tokens of a draft with a layer for each depth: MiMo-V2's, Step's and Inkling's layers for multi-token
prediction.

    depth 0    row i   token i + 1, features i    -> draft token i + 2
    depth d    row i   token i + 1 + d            -> draft token i + 2 + d

A step that computes the tokens up to position n - 1 and samples token n lets depth d compute its rows up to n - 1 - d.
So the rows of depth d lag d positions behind the step's. The d rows behind them need tokens that are drafted: they are
computed with the draft tokens, and again when the tokens are known. What depth d reads of the depth before it lies one
row further back in each step; the last such row of the step before is kept for each request (`tails`).

A request whose first computed row is f (behind a cached prefix, or 0) has features from there on only. Until it has as
many as a depth lags, the rows of this depth begin at f, and those at the end of a run, whose tokens are unknown, are
computed of any and written over later: rows see only what lies before them. Where requests have states, which are kept
from position 0 on, features are copied with them, and a request goes on where another one stood.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang.srt.layers.compressed.step import CompressedStep, TokenRequests, compressed_step
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.step_rows import requests_of_tokens
from sglang.srt.models.mtp_by_layer import DepthDraft
from sglang.srt.speculative.autoregressive_draft import following_rows
from sglang.srt.speculative.drafter import DraftStep


class MultiLayerMTP:
    """Draft tokens a chain of tokens, each with the layer of its depth. Implements Drafter."""

    def __init__(self, model: DepthDraft, num_tokens: int, max_requests: int, device: torch.device | str) -> None:
        self.model, self.num_tokens = model, num_tokens
        self.aux_layers, self.caches = model.aux_layers, tuple(model.caches)
        self.num_depths = self.next_tokens_read = len(model.depths)
        # Nothing is kept behind the computed tokens; the stages before the last one plan as for other chains.
        self.lookahead_slots = num_tokens - 2
        shape = (0 if model.keeps_states else self.num_depths - 1, max_requests + 1, model.hidden_size)
        self._tails = torch.zeros(shape, dtype=model.dtype, device=device)
        self.first = torch.zeros(max_requests + 1, dtype=torch.int32, device=device)
        """First position of each request slot with features; -1: nothing was computed yet."""

    @property
    def tails(self) -> list[torch.Tensor]:
        """Of each depth but the last, what the next one reads at the first row of the next step, [slots, H] by request
        slot."""
        return [store["tail"] for store in self.model.tails] if self.model.keeps_states else [*self._tails]

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """Forgets the features of the slot's last request, in the order of the stream."""
        if not self.model.keeps_states:
            self.first[slot] = -1

    def propose(self, step: DraftStep, num_speculative_tokens: int) -> torch.Tensor:
        """Computes the draft tokens. All depths compute the rows of the step, whatever num_speculative_tokens is: later
        draft tokens read them."""
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
        """Computes the rows of the step at every depth, and keeps the tails. Returns the states [T, H] of the first
        depth."""
        runs = runs_of(step.batch)
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
    """Returns what layers with states read of a batch whose rows are those of `batch` at earlier positions [T], as
    `BuildLagging` says. Rows of request slot 0 belong to nobody."""
    step, back = compressed_step(batch), lag[row_slots]
    firsts = torch.where(row_slots > 0, step.requests.firsts - back, positions)
    stops = torch.where(row_slots > 0, step.requests.stops - back, positions + 1)
    return CompressedStep(TokenRequests(row_slots, positions, firsts, stops), step.longest)


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of rows of a step, one of each of S requests; padding is of request slot 0."""

    slots: torch.Tensor  # [S] int64
    before: torch.Tensor  # [S] int32, tokens computed before
    last: torch.Tensor  # [S] int32, of T: the last row
    row_slots: torch.Tensor  # [T] int64, the request slot of each row


def runs_of(batch: ForwardBatch) -> Runs:
    """Returns the runs of a step of any kind."""
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
