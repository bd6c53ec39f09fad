"""Turn chosen requests into the host arrays of one step, with cache slots allocated."""

from __future__ import annotations

import numpy as np

from sglang.srt.constrained.mask_filler import MaskFiller
from sglang.srt.managers.scheduler.schedule_batch import Req, RunningBatch, ScheduleBatch
from sglang.srt.mem_cache.kv_table import KVTable
from sglang.srt.model_executor.step import PromptTokens, StepInput
from sglang.srt.sampling.logprobs import LogprobRequest


def _logprobs(reqs: list[Req]) -> LogprobRequest | None:
    """Of the token that is sampled next for each request."""
    if not any(r.return_logprob for r in reqs):
        return None
    return LogprobRequest(
        top_nums=[r.top_logprobs_num if r.return_logprob else 0 for r in reqs],
        token_ids=[r.token_ids_logprob if r.return_logprob else [] for r in reqs],
    )


def vocab_mask(batch: ScheduleBatch, width: int, vocab_size: int, filler: MaskFiller) -> np.ndarray:
    """[R * width, ceil(vocab / 32)] int32, the tokens that each row may sample. Only the first row of a request follows
    on tokens that are known: requests with a grammar bring no guesses."""
    mask = np.full((len(batch.sampled) * width, -(-vocab_size // 32)), -1, np.int32)
    rows = [(i * width, req) for i, req in enumerate(batch.sampled) if req.finish is None]
    constrained = [(row, req.grammar) for row, req in rows if req.grammar is not None]
    filler.fill([grammar for _, grammar in constrained], mask, [row for row, _ in constrained])
    for row, req in rows:
        if req.thoughts is not None:
            req.thoughts.restrict(mask[row])
    return mask


def build_decode(kv: KVTable, running: RunningBatch) -> ScheduleBatch:
    """Every running request whose turn it is brings its last token."""
    rows, reqs = running.now_rows, list(running.now)
    slots, new_lens = running.slots[rows], running.next_lens[rows]
    locs = kv.grow(slots, running.seq_lens[rows], new_lens, len(reqs))
    step = StepInput(
        slots=slots,
        seq_lens=new_lens,
        out_cache_loc=locs,
        table_update=kv.take_update(),
        logprobs=_logprobs(reqs),
    )
    batch = ScheduleBatch(step, reqs)
    if running.wants_hidden:
        _ask_hidden(batch, reqs, running.seq_lens[rows], np.ones(len(reqs), np.int32), np.arange(len(reqs)))
    running.advance()
    return batch


def build_verify(kv: KVTable, running: RunningBatch) -> ScheduleBatch | None:
    """Every running request brings its last token and guesses. None if all must wait for results."""
    reqs = [req for req, width in zip(running.reqs, running.widths.tolist(), strict=True) if width]
    if not reqs:
        return None
    brings = running.widths > 0
    slots, widths, new_lens = running.slots[brings], running.widths[brings], running.next_lens[brings]
    kv.grow(slots, running.reserved_lens[brings], new_lens, 0)
    step = StepInput(
        slots=slots,
        seq_lens=new_lens,
        out_cache_loc=np.empty(0, np.int32),
        table_update=kv.take_update(),
        widths=widths,
        logprobs=_logprobs(reqs),
    )
    if step.logprobs is not None:
        step.logprobs.of_request = np.repeat(np.arange(len(reqs)), running.most)
    batch = ScheduleBatch(step, reqs)
    if running.wants_hidden:  # of requests that bring no guesses
        _ask_hidden(batch, reqs, running.seq_lens[brings], widths, np.arange(len(reqs)) * running.most)
    for req, width in zip(reqs, widths.tolist(), strict=True):
        req.launched(width)
    return batch


def build_extend(kv: KVTable, chosen: list[tuple[Req, int]], mixed: list[Req], most: int = 1) -> ScheduleBatch:
    """`chosen` requests compute that many further tokens each; `mixed` ones decode in the same
    step. most: tokens of a request that other steps decode."""
    reqs, count = mixed + [r for r, _ in chosen], len(mixed)
    prefix = np.fromiter((r.kv_len for r in reqs), np.int32, len(reqs))
    lens = np.array([1] * count + [n for _, n in chosen], np.int32)
    slots = np.fromiter((r.slot for r in reqs), np.int64, len(reqs))
    if most == 1:
        locs = kv.grow(slots, prefix, prefix + lens, count)
    else:
        locs = _grow_reserved(kv, reqs, slots, prefix + lens, count)
    ids: list[int] = []
    for (req, n), start in zip(chosen, prefix[count:].tolist(), strict=True):
        ids += req.tokens[start : start + n]
        req.kv_len = start + n
    done = [i for i, r in enumerate(reqs) if i < count or r.kv_len == len(r.tokens)]
    sampled = [reqs[i] for i in done]
    for req in sampled[count:]:
        req.planned_len = len(req.tokens) + 1
    prompts = PromptTokens(np.array(ids, np.int64), prefix[count:], lens[count:], np.array(done, np.int64))
    step = StepInput(
        slots=slots,
        seq_lens=prefix + lens,
        out_cache_loc=locs,
        prompts=prompts,
        table_update=kv.take_update(),
        logprobs=_logprobs(sampled),
    )
    batch = ScheduleBatch(step, sampled)
    if any(r.hidden is not None for r in reqs):
        _ask_hidden(batch, reqs, prefix, lens, np.cumsum(lens) - lens)
    prompts.prompt_logprobs = _ask_prompt_logprobs(batch, chosen, prompts)
    return batch


def _grow_reserved(kv: KVTable, reqs: list[Req], slots: np.ndarray, new_lens: np.ndarray, count: int) -> np.ndarray:
    """Cache slots [T] where the device alone knows the lengths of the first `count` requests, which decode: it finds
    theirs in the table."""
    reserved = np.fromiter((max(r.kv_len, r.reserved_len) for r in reqs), np.int32, len(reqs))
    locs = kv.grow(slots, reserved, np.maximum(reserved, new_lens), 0)
    num_prompt_tokens = int((new_lens - reserved)[count:].sum())
    return np.concatenate((np.zeros(count, np.int32), locs[len(locs) - num_prompt_tokens :]))


def _ask_hidden(
    batch: ScheduleBatch, reqs: list[Req], starts: np.ndarray, counts: np.ndarray, first_rows: np.ndarray
) -> None:
    """Of those of each request's new tokens, which begin at position `starts`, whose states are wanted and not on their
    way yet. first_rows: where the request begins among the tokens of the step."""
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
    batch: ScheduleBatch, chosen: list[tuple[Req, int]], prompts: PromptTokens
) -> LogprobRequest | None:
    """Row p of a prompt predicts token p + 1: the rows of this step whose target is wanted and not collected yet."""
    starts = batch.step.num_decodes + np.cumsum(prompts.extend_lens) - prompts.extend_lens
    rows, targets = [], []
    for (req, n), begin, row0 in zip(chosen, prompts.prefix_lens.tolist(), starts.tolist(), strict=True):
        if not req.wants_prompt_logprobs:
            continue
        first = max(begin + 1, req.logprob_start, req.prompt_logprobs_done, 1)
        last = min(begin + n, req.prompt_len - 1)
        if first > last:
            continue
        rows.append(np.arange(first - 1 - begin, last - begin) + row0)
        targets += req.tokens[first : last + 1]
        batch.prompt_logprob_spans.append((req, first, last + 1))
        req.prompt_logprobs_done = last + 1
    if not rows:
        return None
    request = _logprobs([req for req, _, _ in batch.prompt_logprob_spans])
    assert request is not None
    counts = [end - first for _, first, end in batch.prompt_logprob_spans]
    request.of_request = np.repeat(np.arange(len(counts)), counts)
    request.rows, request.targets = np.concatenate(rows).astype(np.int64), np.array(targets, np.int64)
    return request
