"""The scheduler's view: one request (`Req`), the requests that decode (`RunningBatch`), and one launched step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sglang.srt.distributed import parallel_state
from sglang.srt.managers.scheduler.prompt_table import Prompt, Tokens
from sglang.srt.managers.wire.io_struct import DraftCounts, FinishReason, TokenizedGenerateReq
from sglang.srt.mem_cache.kv_table import Lengths
from sglang.srt.mem_cache.radix_node import Keys, Node
from sglang.srt.model_executor.step import StepInput, StepResult
from sglang.srt.sampling.hidden_states import HiddenStates, num_states
from sglang.srt.sampling.logprobs import LogprobResult
from sglang.srt.sampling.output_logprobs import OutputLogprobs
from sglang.srt.sampling.thoughts import Thoughts

if TYPE_CHECKING:
    from sglang.srt.constrained.grammar import Grammar
    from sglang.srt.managers.scheduler.prompt_media import PromptMedia
    from sglang.srt.managers.scheduler.text_stop import TextStop
    from sglang.srt.mem_cache.host_tier import Copy


class Req:
    """One sequence, from its arrival to its last message.

    Its tokens, and how far each counter reaches. Steps are launched before the ones before them are read back, so the
    host knows lengths earlier than tokens:

        tokens          prompt | output that the host has seen |
        positions       0 ........... kv_len - slack ..... kv_len .......... planned_len ...... reserved_len
        computed          certainly     |   perhaps: draft tokens  |                   |                    |
        sampled                         |                     | the token behind the last launched step
        cache slots       num_cached: of the prefix tree; up to reserved_len: its own

    kv_len          tokens whose KV is launched; where a step verifies draft tokens, as if all of them stood
    slack           of these, tokens that may fall away when the results come
    planned_len     tokens that exist once every launched step has sampled, with the same `slack`
    reserved_len    positions that have a cache slot, if more than kv_len: draft tokens fell away and the next tokens
    come
                    here, or a draft computes ahead of the target

    Whatever falls away, the first token of a step in flight is the last one that the host knows; so of the tokens that
    it knows, the first `kv_len` have KV that is right. That makes it safe to end a request at any moment.
    """

    def __init__(
        self,
        msg: TokenizedGenerateReq,
        seed: int,
        limit: int,
        stop_ids: frozenset[int],
        media: PromptMedia | None,
        prompt: Prompt,
    ) -> None:
        self.rid = msg.rid
        self.params = msg.sampling_params
        self.stream = msg.stream
        self.priority = msg.priority
        self.keep_until = msg.received + msg.keep_s if msg.keep_s else 0.0
        """Its prompt stays cached before others until then; 0: it does not."""
        self.seed = seed
        self.namespace = msg.cache_namespace
        self.stop_ids = stop_ids
        self.prompt, self.tokens = prompt, Tokens(prompt)
        self.output = self.tokens.output
        self._cache_keys = np.empty(0, np.int64)
        self.prompt_len = len(prompt.ids)
        self.media = media
        """Its images and videos; None: it has none."""
        self.limit = limit
        """Longest length this request may reach, prompt included."""
        self.max_output = limit - self.prompt_len

        self.slot = 0
        self.microbatch = 0
        """Number of the turn, among those of the running requests, that this request belongs to."""
        self.kv_len = 0
        self.planned_len = self.prompt_len
        self.slack = 0
        self.reserved_len = 0
        self.state_is_exact = True
        """True if its recurrent states are those of `kv_len` tokens."""
        self.num_speculative_tokens = 0
        """Number of draft tokens made behind its last launched step."""
        self.draft_tokens: list[int] = []
        """Token ids of the draft tokens, where the host asked for them (`StepInput.reads_draft_tokens`)."""
        self.num_cached = 0
        """Leading tokens whose KV belongs to the radix tree, locked through `node`."""
        self.node: Node | None = None
        """Node of the radix tree where the cached prefix ends: locked while the request has a slot; while it waits, as
        last matched."""
        self.hit_len = 0
        """Prompt tokens that the first admission found in the cache; reported to the client."""
        self.host_len: int | None = None
        """Of these, the ones that were loaded from main memory; None: nothing is kept there."""
        self.num_loads = self.num_loaded = 0
        """Loads of its prefix since it entered the queue, and the tokens that the last one brought."""
        self.stored_len: int | None = None
        """Of these, the ones that came from a store; None: there is no store."""
        self.looked_up, self.num_stored = False, 0
        """Whether a store was asked for its prefix, and the tokens that were read from there."""
        self.admitted = False
        self.num_retractions = 0
        self.drafts = DraftCounts()
        self.queued_time = time.monotonic()
        """Time when it last entered the queue; this rank's clock, as `started_time`."""
        self.started_time = 0.0
        """Time when its first step was chosen; 0: none was."""
        self.first_token_time = 0.0
        """Time of the first token of an output that is sent only at the end; 0 for a stream, and before that token."""

        self.return_logprob = msg.return_logprob
        wants_prompt = msg.return_logprob and msg.logprob_start_len >= 0
        self.logprob_start = msg.logprob_start_len if wants_prompt else self.prompt_len
        self.top_logprobs_num = msg.top_logprobs_num
        self.token_ids_logprob = msg.token_ids_logprob or []
        self.pending_logprobs = OutputLogprobs()
        if self.logprob_start == 0 and self.prompt_len:  # nothing predicts the first token
            self.pending_logprobs.input = [(None, self.tokens[0])]
            self.pending_logprobs.input_top = [None] if self.top_logprobs_num else None
            self.pending_logprobs.input_token_ids = [None] if self.token_ids_logprob else None
        self.hidden = None if msg.hidden_start < 0 else HiddenStates(msg.hidden_start)
        """The final hidden states that are wanted."""
        self.prompt_logprobs_done = 0
        """Prompt tokens whose log probability has been collected (a retracted request computes its prompt again)."""

        self.grammar: Grammar | None = None
        self.thoughts = None if msg.thinking is None else Thoughts(msg.thinking)
        self.text_stop: TextStop | None = None
        self.pending_finish: FinishReason | None = None
        """Its end by the leader, of which the ranks have not heard yet. Tokens that come until then do not count."""
        self.pending_finish_len = 0
        self.finish: FinishReason | None = None
        self.sent_len = self.prompt_len
        self.first_message = True

    def max_width(self, tokens_per_step: int) -> int:
        """Tokens that a step may bring of it, all but the first drafted."""
        return 1 if self.hidden is not None else tokens_per_step

    @property
    def needs_mask(self) -> bool:
        """Returns whether the tokens that a launched step samples depend on tokens that the host may not know yet."""
        if self.grammar is not None:
            return True
        unknown = self.planned_len - len(self.tokens) - 1
        return self.thoughts is not None and self.thoughts.may_end_within(unknown)

    def launched(self, width: int, reserved_len: int, num_speculative_tokens: int) -> None:
        """Count a step that brings `width` tokens, and behind which so many positions have a cache slot and so many
        draft tokens are made."""
        self.num_speculative_tokens = num_speculative_tokens
        self.kv_len += width
        self.planned_len += width
        self.slack += width - 1
        self.reserved_len = reserved_len

    def verified(self, width: int, count: int) -> None:
        """Count its result: `count` tokens stand."""
        self.kv_len -= width - count
        self.planned_len -= width - count
        self.slack -= width - 1
        self.drafts.add(width, count)

    def drop_draft_tokens(self) -> None:
        """Forgets the draft tokens before the request gives its cache slots up: then `kv_len` counts tokens that the
        host knows."""
        self.reserved_len = max(self.reserved_len, self.kv_len)
        self.state_is_exact = not self.slack and self.kv_len <= len(self.tokens)
        self.kv_len = min(self.kv_len, len(self.tokens))
        self.slack = 0

    @property
    def output_len(self) -> int:
        return len(self.output)

    @property
    def num_unsent(self) -> int:
        return self.prompt_len + len(self.output) - self.sent_len

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.logprob_start < self.prompt_len

    @property
    def max_hidden_rows(self) -> int:
        """Returns the largest number of hidden states that it may come to hold. One alone, an embedding, is sent as
        soon as it is there."""
        count = 0 if self.hidden is None else num_states(self.prompt_len, self.limit) - self.hidden.start
        return count if count > 1 else 0

    def cache_keys(self, length: int) -> Keys:
        """Returns the prefix cache's keys of the first `length` tokens. Each is converted once, those of a prompt for
        all of its samples."""
        if length <= self.prompt_len and self.media is None:
            return self.prompt.keys[:length]
        done = len(self._cache_keys)
        if done < length:
            keys = self._cache_keys if done else self.prompt.keys
            keys = np.concatenate((keys, np.array(self.tokens.output[len(keys) - self.prompt_len :], np.int64)))
            if not done and self.media is not None:
                self.media.write_keys(keys)
            self._cache_keys = keys
        return self._cache_keys[:length]

    def matchable_len(self) -> int:
        """Returns how many leading tokens may come from the cache: the last one must be computed to sample from it, and
        so must everything whose log probability or hidden state is wanted and not collected yet."""
        limit = len(self.tokens) - 1
        if self.hidden is not None:
            limit = min(limit, self.hidden.end)
        if self.wants_prompt_logprobs and self.prompt_logprobs_done < self.prompt_len:
            limit = min(limit, max(self.logprob_start - 1, 0))
        return limit

    @property
    def may_be_stale(self) -> bool:
        """Returns whether its steps may be computed again: nothing but its tokens is read back from them, and none of
        its inputs is made for a step."""
        return not self.wants_prompt_logprobs and self.hidden is None and self.media is None

    def may_reuse_prefix(self, keys: Keys) -> bool:
        """Returns whether it begins with these `cache_keys`, and they may come from the cache."""
        count = len(keys)
        return count <= self.matchable_len() and np.array_equal(self.cache_keys(count), keys)


class RunningBatch:
    """Requests in decode, with the arrays of the next step kept up to date instead of rebuilt.

    A step brings tokens of those whose turn it is (`now`). There are as many turns as steps on their way through the
    stages of a pipeline: the others' last tokens are among these. Which turn a request has changes no token, and only
    how long its step waits. A step brings up to `tokens_per_step` tokens of a request: where that is more than one, all
    lengths are upper bounds, and `apply_accepted` takes back what fell away.
    """

    def __init__(self, tokens_per_step: int, lookahead_slots: int, num_microbatches: int) -> None:
        """lookahead_slots: positions behind a request's tokens that need a cache slot (`Drafter.lookahead_slots`)."""
        self.tokens_per_step, self.lookahead_slots, self.num_microbatches = (
            tokens_per_step,
            lookahead_slots,
            num_microbatches,
        )
        self.microbatch = 0
        self._rebuild([])

    def __len__(self) -> int:
        return len(self.reqs)

    def clear(self) -> None:
        self._rebuild([])

    def add(self, reqs: list[Req]) -> None:
        """Adds requests behind a step that computed their prompts. Each joins the shortest turn; of several equally
        short ones, that which comes last."""
        counts = self._counts(self.reqs)
        for req in reqs:
            req.microbatch = min(
                range(self.num_microbatches),
                key=lambda microbatch: (counts[microbatch], (microbatch - self.microbatch) % self.num_microbatches),
            )
            counts[req.microbatch] += 1
        self._rebuild(self.reqs + reqs)

    def next_microbatch(self) -> None:
        """Passes to the next turn that has requests."""
        if self.num_microbatches > 1:
            self.microbatch = (self.microbatch + 1) % self.num_microbatches
            self._select()

    def drop_finished(self) -> None:
        """Forget requests that ended, and those whose last token is certainly on its way."""
        keep = [r for r in self.reqs if r.finish is None and r.planned_len - r.slack < r.limit]
        if len(keep) < len(self.reqs):
            self._rebuild(keep)

    def remove(self, req: Req) -> None:
        self._rebuild([r for r in self.reqs if r is not req])

    def _rebuild(self, reqs: list[Req]) -> None:
        self.reqs = reqs
        self._row_of = {req: i for i, req in enumerate(reqs)}
        self.slots = np.fromiter((r.slot for r in reqs), np.int64, len(reqs))
        self.limits = _int32([r.limit for r in reqs])
        self.max_widths = _int32([r.max_width(self.tokens_per_step) for r in reqs])
        self.seq_lens = _int32([r.kv_len for r in reqs])
        """Tokens whose KV is launched, and of these the ones that may fall away."""
        self.slack = _int32([r.slack for r in reqs])
        self.planned_lens = _int32([r.planned_len for r in reqs])
        self.num_speculative_tokens = _int32([r.num_speculative_tokens for r in reqs])
        self.reserved_lens = _int32([max(r.kv_len, r.reserved_len) for r in reqs])
        """Positions that have a cache slot."""
        if self.num_microbatches > 1:
            self._level()
        self._select()

    def _counts(self, reqs: list[Req]) -> list[int]:
        """Returns the number of requests in each turn."""
        microbatches = np.fromiter((r.microbatch for r in reqs), np.int64, len(reqs))
        counts: list[int] = np.bincount(microbatches, minlength=self.num_microbatches).tolist()
        return counts

    def _level(self) -> None:
        """No turn stays empty while another has several requests; else a stage would be idle. Those that change wait
        once for tokens that the turn would not wait for."""
        counts = self._counts(self.reqs)
        while not min(counts) and max(counts) > 1:
            longest, empty = counts.index(max(counts)), counts.index(0)
            moving = [r for r in self.reqs if r.microbatch == longest][counts[longest] // 2 :]
            for req in moving:
                req.microbatch = empty
            counts[longest], counts[empty] = counts[longest] - len(moving), len(moving)

    def _select(self) -> None:
        self.now: list[Req] = self.reqs
        """Requests whose turn it is; `in_microbatch` says which of all requests they are."""
        self.in_microbatch = np.ones(len(self.reqs), np.bool_)
        if self.num_microbatches == 1 or not self.reqs:
            return
        counts = self._counts(self.reqs)
        while not counts[self.microbatch]:
            self.microbatch = (self.microbatch + 1) % self.num_microbatches
        self.in_microbatch = np.fromiter((r.microbatch == self.microbatch for r in self.reqs), np.bool_, len(self.reqs))
        self.now = [r for r in self.reqs if r.microbatch == self.microbatch]

    def widths(self, at_most: int) -> Lengths:
        """[R] tokens that each request brings to the next step; 0: it waits, for its turn or for results that say
        whether it may have a further token."""
        there = np.minimum(self.num_speculative_tokens + 1, self.limits - self.planned_lens)
        widths: Lengths = np.minimum(np.minimum(there, self.max_widths), at_most)
        return widths * self.in_microbatch

    @property
    def certain_lens(self) -> Lengths:
        """Tokens that are computed, at least."""
        certain: Lengths = self.seq_lens - self.slack
        return certain

    def reserved_by(self, widths: Lengths) -> Lengths:
        """Positions that have a cache slot behind a step that brings so many tokens of each request."""
        needed = np.minimum(self.seq_lens + widths + np.int32(self.lookahead_slots) * (widths > 0), self.limits)
        reserved: Lengths = np.maximum(self.reserved_lens, needed)
        return reserved

    def launched(self, widths: Lengths, num_speculative_tokens: int) -> None:
        """Count a step that brings so many tokens of each request, and makes so many draft tokens for those behind
        it."""
        self.reserved_lens = self.reserved_by(widths)
        self.seq_lens = self.seq_lens + widths
        self.planned_lens = self.planned_lens + widths
        self.slack = self.slack + np.maximum(widths - 1, 0)
        self.num_speculative_tokens = np.where(
            widths > 0, np.int32(num_speculative_tokens), self.num_speculative_tokens
        )
        for req, width, reserved_len in zip(self.reqs, widths.tolist(), self.reserved_lens.tolist(), strict=True):
            if width:
                req.launched(width, reserved_len, num_speculative_tokens)

    def apply_accepted(self, req: Req, width: int, count: int) -> None:
        """Records that `count` of the `width` tokens that a step brought of the request stand."""
        req.verified(width, count)
        if width == 1 or req not in self._row_of:
            return
        row = self._row_of[req]
        self.seq_lens[row] -= width - count
        self.planned_lens[row] -= width - count
        self.slack[row] -= width - 1


def _int32(values: list[int]) -> Lengths:
    return np.array(values, np.int32)


class SampledTokens(NamedTuple):
    """Tokens that stand, request after request."""

    reqs: list[Req]
    tokens: list[int]
    rows: Sequence[int]
    """Rows of the log probabilities, and of each token among those sampled."""


@dataclass(slots=True)
class ScheduleBatch:
    """One step: the requests whose token it samples, in the order of the sampled rows."""

    step: StepInput
    sampled: list[Req]
    prompt_logprob_spans: list[tuple[Req, int, int]] = field(default_factory=list)
    """(request, first, end) prompt positions whose log probabilities this step computes, in row order."""
    hidden_spans: list[tuple[Req, int]] = field(default_factory=list)
    """Requests whose hidden states this step computes, and of how many positions, in row order."""
    result: StepResult | None = None
    loads: Sequence[Copy] = ()
    """Loads of cached prefixes that were under way when it was launched: its tokens count once these have ended
    well."""
    stale: set[Req] = field(default_factory=set)
    """Requests that read what a load did not bring: they are computed again."""

    @property
    def limited(self) -> list[Req]:
        """Requests of which a grammar, or a limit of thoughts, may forbid tokens."""
        return [req for req in self.sampled if req.grammar is not None or req.thoughts is not None]

    @property
    def needs_mask(self) -> bool:
        return any(req.needs_mask for req in self.limited)

    def read(self, running: RunningBatch) -> SampledTokens:
        """Waits for the device, files prompts' log probabilities and hidden states, and settles the lengths."""
        assert self.result is not None
        self.result.wait()
        parallel_state.groups().tp.raise_if_stalled()
        if self.result.hidden is not None:
            self._file_hidden(self.result.hidden.numpy())
        if self.result.prompt_logprobs is not None:
            self._file_prompt_logprobs(self.result.prompt_logprobs)
        if self.result.draft_tokens is not None:
            for req, draft_tokens in zip(self.sampled, self.result.draft_tokens.tolist(), strict=True):
                req.draft_tokens = draft_tokens
        tokens = self.result.next_token_ids.numpy()
        if self.result.counts is None:
            return SampledTokens(self.sampled, tokens[:, 0].tolist(), range(len(tokens)))
        assert self.step.widths is not None
        reqs: list[Req] = []
        accepted: list[int] = []
        rows: list[int] = []
        shape = zip(self.sampled, tokens.tolist(), self.step.widths.tolist(), self.result.counts.tolist(), strict=True)
        for i, (req, row, width, count) in enumerate(shape):
            if req.finish is None and req not in self.stale:
                running.apply_accepted(req, width, count)
            reqs += [req] * count
            accepted += row[:count]
            rows += range(i * len(row), i * len(row) + count)
        return SampledTokens(reqs, accepted, rows)

    def file_logprobs(self, req: Req, row: int, token: int) -> None:
        """Files the log probabilities of a token that its request takes, on the ranks that sample."""
        pp = parallel_state.groups().pp
        if pp.rank < pp.size - 1:
            return
        assert self.result is not None and self.result.logprobs is not None
        request = row // self.result.next_token_ids.shape[1]
        self.result.logprobs.add_output(req.pending_logprobs, request, row, token)

    def _file_hidden(self, hidden: np.ndarray) -> None:
        row = 0
        for req, count in self.hidden_spans:
            if req.finish is None:
                assert req.hidden is not None
                req.hidden.add(hidden[row : row + count])
            row += count

    def _file_prompt_logprobs(self, logprobs: LogprobResult) -> None:
        row = 0
        for i, (req, first, end) in enumerate(self.prompt_logprob_spans):
            logprobs.add_input(req.pending_logprobs, i, range(row, row + end - first), req.tokens[first:end])
            row += end - first
