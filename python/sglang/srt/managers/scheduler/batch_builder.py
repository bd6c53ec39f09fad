"""Builds the host arrays of one step from chosen requests, and allocates their cache slots."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import compress

import numpy as np

from sglang.srt.constrained.grammar import Grammar
from sglang.srt.constrained.mask_filler import MaskFiller
from sglang.srt.managers.scheduler.running_batch import RunningBatch
from sglang.srt.managers.scheduler.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.kv_table import KVTable, Lengths
from sglang.srt.model_executor.step import MediaRuns, MediaTokens, PromptTokens, StepInput
from sglang.srt.sampling.logprobs import LogprobRequest
from sglang.srt.sampling.thoughts import Thoughts


def _logprobs(reqs: list[Req]) -> LogprobRequest:
    """Returns the request for log probabilities of the token that is sampled next for each request."""
    return LogprobRequest(
        top_nums=[r.top_logprobs_num if r.return_logprob else 0 for r in reqs],
        token_ids=[r.token_ids_logprob if r.return_logprob else [] for r in reqs],
    )


def vocab_mask(batch: ScheduleBatch, vocab_size: int, filler: MaskFiller) -> np.ndarray:
    """Returns [R * width, ceil(vocab / 32)] int32, the tokens that each row may sample. Row j of a request follows its
    first j draft tokens; once these break the grammar, later rows cannot be accepted, and their masks do not matter."""
    width = batch.step.width
    mask = np.full((len(batch.sampled) * width, -(-vocab_size // 32)), -1, np.int32)
    widths = [1] * len(batch.sampled) if batch.step.widths is None else batch.step.widths.tolist()
    walks = [
        _Walk(i * width, req.grammar, copy(req.thoughts), req.draft_tokens[: count - 1])
        for i, (req, count) in enumerate(zip(batch.sampled, widths, strict=True))
        if req.finish is None and (req.grammar is not None or req.thoughts is not None)
    ]
    going = walks
    while going:
        constrained = [(walk.row, walk.grammar) for walk in going if walk.grammar is not None]
        filler.fill([grammar for _, grammar in constrained], mask, [row for row, _ in constrained])
        for walk in going:
            if walk.thoughts is not None:
                walk.thoughts.restrict(mask[walk.row])
        going = [walk for walk in going if walk.advance()]
    for walk in walks:
        walk.end()
    return mask


@dataclass(slots=True)
class _Walk:
    """Follows a request's draft tokens through its grammar and thoughts."""

    row: int
    grammar: Grammar | None
    thoughts: Thoughts | None
    draft_tokens: list[int]
    num_accepted: int = 0

    def advance(self) -> bool:
        """Moves on by a draft token. Returns False if there is none that can be accepted."""
        if self.num_accepted == len(self.draft_tokens):
            return False
        draft_token = self.draft_tokens[self.num_accepted]
        if self.grammar is not None and not self.grammar.accept(draft_token):
            return False
        if self.thoughts is not None:
            self.thoughts.push(draft_token)
        self.row, self.num_accepted = self.row + 1, self.num_accepted + 1
        return True

    def end(self) -> None:
        """Rolls the grammar back."""
        if self.grammar is not None and self.num_accepted:
            self.grammar.rollback(self.num_accepted)


def build_step(
    kv: KVTable,
    running: RunningBatch,
    widths: Lengths,
    chosen: Sequence[tuple[Req, int]] = (),
    width: int = 1,
) -> ScheduleBatch | None:
    """Builds a step. Running requests bring `widths` tokens each (at most `width`): the last sampled one and draft
    tokens. Each pair of `chosen` is a request and the number of its next prompt tokens. Returns None if nobody brings
    any, because all wait for results."""
    brings = widths > 0
    decodes = list(compress(running.reqs, brings.tolist()))
    reqs, draft_tokens = decodes + [req for req, _ in chosen], running.tokens_per_step > 1
    if not reqs:
        return None
    prompt_starts = [req.kv_len for req, _ in chosen]
    prompt_ends = [req.kv_len + n for req, n in chosen]
    prompt_reserved = [_reserved(req, req.kv_len + n, running.lookahead_slots) for req, n in chosen]
    starts = _joined(running.seq_lens[brings], prompt_starts)
    counts = _joined(widths[brings], [n for _, n in chosen])
    had = _joined(running.reserved_lens[brings], [max(req.kv_len, req.reserved_len) for req, _ in chosen])
    reserved = _joined(running.reserved_by(widths)[brings], prompt_reserved)
    slots = np.append(running.slots[brings], np.array([req.slot for req, _ in chosen], np.int64))
    locs = kv.grow(slots, had, reserved, 0 if draft_tokens else len(decodes))
    step = StepInput(slots, starts + counts, locs, table_update=kv.take_update())
    if draft_tokens:
        prompt_locs = [kv.rows[req.slot, req.kv_len : req.kv_len + n] for req, n in chosen]
        step.out_cache_loc = np.concatenate((np.zeros(len(decodes) if chosen else 0, np.int32), *prompt_locs))
        step.reserved_lens = reserved
        if not chosen:
            step.widths, step.width = widths[brings], width
    sampled = decodes + [req for (req, _), end in zip(chosen, prompt_ends, strict=True) if end == len(req.tokens)]
    batch = ScheduleBatch(step, sampled)
    batch.watched = [req for req in sampled if not req.plain]
    num_speculative_tokens = running.tokens_per_step - 1 if chosen else width - 1
    running.launched(widths, num_speculative_tokens)
    batch.may_reach_limit = np.ones(len(sampled), np.bool_)
    batch.may_reach_limit[: len(decodes)] = (running.planned_lens >= running.limits)[brings]
    if chosen:
        step.prompts = _prompt_tokens(chosen, len(decodes), draft_tokens)
        for (req, _), end, positions in zip(chosen, prompt_ends, prompt_reserved, strict=True):
            req.kv_len, req.reserved_len = end, positions
        for req in sampled[len(decodes) :]:
            req.planned_len, req.num_speculative_tokens = len(req.tokens) + 1, num_speculative_tokens
        step.prompts.prompt_logprobs = _ask_prompt_logprobs(batch, chosen, step.prompts)
    if any(req.return_logprob for req in batch.watched):
        step.logprobs = _logprobs(sampled)
        if step.width > 1:
            step.logprobs.row_requests = np.repeat(np.arange(len(sampled)), step.width)
    if any(req.hidden is not None for req in (*batch.watched, *(req for req, _ in chosen))):
        rows = np.arange(len(reqs)) * step.width if step.prompts is None else np.cumsum(counts) - counts
        _ask_hidden(batch, reqs, starts, counts, rows)
    step.reads_draft_tokens = draft_tokens and bool(batch.limited)
    return batch


def _joined(decodes: Lengths, prompts: list[int]) -> Lengths:
    return np.concatenate((decodes, np.array(prompts, np.int32)))


def _reserved(req: Req, end: int, ahead: int) -> int:
    """Returns the positions that have a cache slot once a prompt is computed up to `end`; after the whole prompt,
    drafting needs more."""
    return min(end + ahead, req.limit) if end == len(req.tokens) else end


def _prompt_tokens(chosen: Sequence[tuple[Req, int]], num_decodes: int, draft_tokens: bool) -> PromptTokens:
    """Builds the prompt part of a step for requests whose first `kv_len` tokens are computed before the step."""
    ids: list[int] = []
    done = list(range(num_decodes))
    next_ids = np.zeros(len(chosen), np.int64)
    for i, (req, n) in enumerate(chosen):
        end = req.kv_len + n
        ids += req.tokens[req.kv_len : end]
        if end == len(req.tokens):
            done.append(num_decodes + i)
        else:
            next_ids[i] = req.tokens[end]
    prefix_lens = np.array([req.kv_len for req, _ in chosen], np.int32)
    lens = np.array([n for _, n in chosen], np.int32)
    prompts = PromptTokens(np.array(ids, np.int64), prefix_lens, lens, np.array(done, np.int64))
    prompts.media = _media_tokens(chosen)
    if any(req.segment_start for req, _ in chosen):
        prompts.segments = np.concatenate([_segments(req.segment_start, req.kv_len, n) for req, n in chosen])
    if draft_tokens:
        prompts.next_ids = next_ids
    return prompts


def _segments(second: int, start: int, count: int) -> np.ndarray:
    """Returns the number of the text of a pair, 0 or 1, that each of `count` tokens from `start` on belongs to, where
    the second begins at token `second`; 0: there is one text."""
    return (np.arange(start, start + count) >= (second or start + count)).astype(np.int64)


def _media_tokens(chosen: Sequence[tuple[Req, int]]) -> MediaTokens | None:
    """Returns features and positions of the prompts' next tokens; None if no prompt has placeholders at or after its
    next token: positions then differ from the index by a constant, as in decode."""
    if not any(req.media is not None and req.kv_len < req.media.end for req, _ in chosen):
        return None
    positions: list[np.ndarray] = []
    tokens: list[np.ndarray] = []
    runs: list[tuple[int, int, int]] = []
    joined: list[np.ndarray] = []
    sources = []
    row, sectioned = 0, False
    for number, (req, n) in enumerate(chosen):
        begin, end = req.kv_len, req.kv_len + n
        if req.media is None or req.media.positions is None:
            positions.append(np.tile(np.arange(begin, end), (3, 1)))
        else:
            positions.append(req.media.positions_of(begin, end))
            sectioned = True
        for part in () if req.media is None else req.media.needed(begin, end):
            tokens.append(row + part.tokens)
            sources.append((part.item, part.features))
            if req.media is not None and req.media.both_ways:
                runs += [(number, begin + first, count) for first, count in part.runs()]
                joined.append(row + part.joined)
        row += n
    every = np.concatenate(tokens) if tokens else np.empty(0, np.int64)
    both_ways = _media_runs(runs, joined) if runs else None
    return MediaTokens(np.concatenate(positions, axis=1) if sectioned else None, every, sources, both_ways)


def _media_runs(runs: list[tuple[int, int, int]], tokens: list[np.ndarray]) -> MediaRuns:
    prompts, starts, lens = np.array(runs).T
    return MediaRuns(prompts.astype(np.int64), starts.astype(np.int32), lens.astype(np.int32), np.concatenate(tokens))


def _ask_hidden(
    batch: ScheduleBatch, reqs: list[Req], starts: np.ndarray, counts: np.ndarray, first_rows: np.ndarray
) -> None:
    """Requests the hidden states that are wanted and not requested yet among each request's new tokens, which begin at
    position `starts`. first_rows: index of a request's first token in the step."""
    rows = []
    for req, start, count, row in zip(reqs, starts.tolist(), counts.tolist(), first_rows.tolist(), strict=True):
        if req.hidden is None or req.hidden.end >= start + count:
            continue
        skipped = max(0, req.hidden.end - start)
        rows.append(np.arange(row + skipped, row + count))
        batch.hidden_spans.append((req, count - skipped))
        req.hidden.end = start + count
    batch.step.hidden_rows = np.concatenate(rows).astype(np.int64) if rows else None


def _ask_prompt_logprobs(
    batch: ScheduleBatch, chosen: Sequence[tuple[Req, int]], prompts: PromptTokens
) -> LogprobRequest | None:
    """Requests log probabilities for the rows of this step whose targets are wanted and not collected yet: row p of a
    prompt predicts token p + 1."""
    starts = batch.step.num_decodes + np.cumsum(prompts.extend_lens) - prompts.extend_lens
    rows, targets = [], []
    for (req, n), begin, row0 in zip(chosen, prompts.prefix_lens.tolist(), starts.tolist(), strict=True):
        if not req.wants_prompt_logprobs:
            continue
        wanted = req.prompt_logprobs_in(begin, n)
        if not wanted:
            continue
        first, last = wanted.start, wanted[-1]
        rows.append(np.arange(first - 1 - begin, last - begin) + row0)
        targets += req.tokens[first : last + 1]
        batch.prompt_logprob_spans.append((req, first, last + 1))
        req.prompt_logprobs_done = last + 1
    if not rows:
        return None
    request = _logprobs([req for req, _, _ in batch.prompt_logprob_spans])
    counts = [end - first for _, first, end in batch.prompt_logprob_spans]
    request.row_requests = np.repeat(np.arange(len(counts)), counts)
    request.rows, request.targets = np.concatenate(rows).astype(np.int64), np.array(targets, np.int64)
    return request
