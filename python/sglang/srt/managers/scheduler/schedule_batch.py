"""The scheduler's view: one request (`Req`), the requests that decode (`RunningBatch`), and one launched step.

Lengths. `tokens` holds the prompt and the output tokens that the host has seen. `kv_len` counts the tokens whose KV has
been launched, `planned_len` the tokens that exist once every launched step has sampled. Steps are launched before the
previous one is read back, so `planned_len` may be ahead of `len(tokens)`.

A step that verifies guesses brings k tokens of a request, of which 1 to k will stand: until it is read back both
lengths count all k, and `slack` those that may yet fall away. Whatever falls away, the first token of a step in flight
is the last one that the host knows; so of the tokens that it knows, the first `kv_len` have KV that is right. That
makes it safe to end a request at any moment.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sglang.srt.distributed import parallel_state
from sglang.srt.managers.wire.io_struct import FinishReason, TokenizedGenerateReq
from sglang.srt.mem_cache.radix_node import Node
from sglang.srt.model_executor.step import StepInput, StepResult
from sglang.srt.sampling.hidden_states import HiddenStates, num_states
from sglang.srt.sampling.logprobs import LogprobResult
from sglang.srt.sampling.output_logprobs import OutputLogprobs
from sglang.srt.sampling.thoughts import Thoughts

if TYPE_CHECKING:
    from sglang.srt.constrained.grammar import Grammar
    from sglang.srt.managers.scheduler.text_stop import TextStop


class Req:
    """One sequence, from its arrival to its last message."""

    def __init__(self, msg: TokenizedGenerateReq, seed: int, limit: int, stop_ids: frozenset[int]) -> None:
        self.rid = msg.rid
        self.params = msg.sampling_params
        self.stream = msg.stream
        self.priority = msg.priority
        self.seed = seed
        self.namespace = msg.cache_namespace
        self.stop_ids = stop_ids
        self.tokens = list(msg.input_ids)
        self._token_array = np.empty(0, np.int32)
        self.prompt_len = len(msg.input_ids)
        self.limit = limit
        """Longest length this request may reach, prompt included."""

        self.slot = 0
        self.turn = 0
        """Of the running requests' turns its own."""
        self.kv_len = 0
        self.planned_len = self.prompt_len
        self.slack = 0
        self.reserved_len = 0
        """Positions that have a cache slot, if more than `kv_len`: guesses fell away, and the next tokens come here."""
        self.num_cached = 0
        """Leading tokens whose KV belongs to the radix tree, locked through `node`."""
        self.node: Node | None = None
        """Where the cached prefix ends: locked while the request has a slot; while it waits, as last matched."""
        self.hit_len = 0
        """Prompt tokens that the first admission found in the cache; reported to the client."""
        self.admitted = False
        self.num_retractions = 0
        self.num_verify_steps = 0
        """Steps that brought it guessed tokens to verify."""
        self.queued_time = time.monotonic()
        """When it last entered the queue; this rank's clock, as `started_time`."""
        self.started_time = 0.0
        """When its first step was chosen; 0: none was."""
        self.first_token_time = 0.0
        """When its first token was there, which is sent only at the end; 0: of a stream, and before."""

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

    def next_width(self, most: int) -> int:
        """Tokens that its next step may bring, all but the first guessed; 0: it must wait for results. Guesses are
        only for samples that depend on nothing but the tokens before."""
        thinks = self.thoughts is not None and not self.thoughts.over
        if self.grammar is not None or thinks or self.params.has_penalties or self.hidden is not None:
            most = 1
        return min(most, self.limit - self.planned_len)

    @property
    def needs_mask(self) -> bool:
        """Whether the token that a launched step samples depends on tokens that the host may not know yet."""
        if self.grammar is not None:
            return True
        unknown = self.planned_len - len(self.tokens) - 1
        return self.thoughts is not None and self.thoughts.may_end_within(unknown)

    def launched(self, width: int) -> None:
        """Count a step that brings `width` tokens."""
        self.kv_len += width
        self.planned_len += width
        self.slack += width - 1
        self.reserved_len = max(self.reserved_len, self.kv_len)

    def verified(self, width: int, count: int) -> None:
        """Count its result: `count` tokens stand."""
        self.kv_len -= width - count
        self.planned_len -= width - count
        self.slack -= width - 1
        self.num_verify_steps += 1

    def drop_guesses(self) -> None:
        """Before it gives its cache slots up: `kv_len` counts tokens that the host knows."""
        self.reserved_len = max(self.reserved_len, self.kv_len)
        self.kv_len = min(self.kv_len, len(self.tokens))
        self.slack = 0

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.logprob_start < self.prompt_len

    @property
    def most_hidden(self) -> int:
        """How many hidden states it may come to hold. One alone, an embedding, is sent as soon as it is there."""
        count = 0 if self.hidden is None else num_states(self.prompt_len, self.limit) - self.hidden.start
        return count if count > 1 else 0

    def token_array(self, length: int) -> np.ndarray:
        """The first `length` tokens, int32. Each is converted once: lists of 100,000 numbers take milliseconds."""
        done = len(self._token_array)
        if done < length:
            self._token_array = np.concatenate((self._token_array, np.array(self.tokens[done:], np.int32)))
        return self._token_array[:length]

    def matchable_len(self) -> int:
        """How many leading tokens may come from the cache: the last one must be computed to sample from it, and so must
        everything whose log probability or hidden state is wanted and not collected yet."""
        limit = len(self.tokens) - 1
        if self.hidden is not None:
            limit = min(limit, self.hidden.end)
        if self.wants_prompt_logprobs and self.prompt_logprobs_done < self.prompt_len:
            limit = min(limit, max(self.logprob_start - 1, 0))
        return limit

    def may_go_on_from(self, tokens: np.ndarray) -> bool:
        """Whether it begins with these, and they may come from the cache."""
        count = len(tokens)
        return count <= self.matchable_len() and np.array_equal(self.token_array(count), tokens)


class RunningBatch:
    """Requests in decode, with the arrays of the next step kept up to date instead of rebuilt: where a step brings one
    token of each, all lengths grow by one. Where it brings up to `most`, they follow the results.

    With several turns a step brings tokens of those only whose turn it is (`now`): the others' last tokens are on their
    way through the stages of a pipeline. Which turn a request has changes no token, and only how long its step waits.
    """

    def __init__(self, most: int = 1, num_turns: int = 1) -> None:
        assert most == 1 or num_turns == 1, "guesses are not verified in turns"
        self.most, self.num_turns = most, num_turns
        self.turn = 0
        self._rebuild([])

    def __len__(self) -> int:
        return len(self.reqs)

    def clear(self) -> None:
        self._rebuild([])

    def add(self, reqs: list[Req]) -> None:
        """Behind a step that computed their prompts: to the shortest turn, of several to the one that comes last."""
        counts = self._counts(self.reqs)
        for req in reqs:
            req.turn = min(range(self.num_turns), key=lambda turn: (counts[turn], (turn - self.turn) % self.num_turns))
            counts[req.turn] += 1
        self._rebuild(self.reqs + reqs)

    def pass_turn(self) -> None:
        """To the next one that somebody has."""
        if self.num_turns > 1:
            self.turn = (self.turn + 1) % self.num_turns
            self._select()

    def drop_finished(self) -> None:
        """Forget requests that ended, and those whose last token is already on its way."""
        if self.most > 1:
            self._rebuild([r for r in self.reqs if r.finish is None and r.planned_len - r.slack < r.limit])
            return
        keep = [r for r in self.reqs if r.finish is None and r.planned_len < r.limit]
        if len(keep) < len(self.reqs):
            self._rebuild(keep)

    def remove(self, req: Req) -> None:
        self._rebuild([r for r in self.reqs if r is not req])

    def _rebuild(self, reqs: list[Req]) -> None:
        self.reqs = reqs
        self.wants_hidden = any(r.hidden is not None for r in reqs)
        self.slots = np.fromiter((r.slot for r in reqs), np.int64, len(reqs))
        self.limits = np.fromiter((r.limit for r in reqs), np.int32, len(reqs))
        self.seq_lens = np.fromiter((r.kv_len for r in reqs), np.int32, len(reqs))
        """Tokens whose KV is launched, at most."""
        self.reserved_lens, self.widths = self.seq_lens, np.ones(len(reqs), np.int32)
        """Positions that have a cache slot, and tokens that the next step brings."""
        if self.most > 1:
            self.reserved_lens = np.fromiter((max(r.kv_len, r.reserved_len) for r in reqs), np.int32, len(reqs))
            self.widths = np.fromiter((r.next_width(self.most) for r in reqs), np.int32, len(reqs))
        if self.num_turns > 1:
            self._level()
        self._select()

    def _counts(self, reqs: list[Req]) -> list[int]:
        """Of requests by turn."""
        turns = np.fromiter((r.turn for r in reqs), np.int64, len(reqs))
        counts: list[int] = np.bincount(turns, minlength=self.num_turns).tolist()
        return counts

    def _level(self) -> None:
        """No turn stays empty while another has several requests; else a stage would be idle. Those that change wait
        once for tokens that the turn would not wait for."""
        counts = self._counts(self.reqs)
        while not min(counts) and max(counts) > 1:
            longest, empty = counts.index(max(counts)), counts.index(0)
            moving = [r for r in self.reqs if r.turn == longest][counts[longest] // 2 :]
            for req in moving:
                req.turn = empty
            counts[longest], counts[empty] = counts[longest] - len(moving), len(moving)

    def _select(self) -> None:
        self.now: list[Req] = self.reqs
        """Whose turn it is, and where they are among all."""
        self.now_rows: slice | np.ndarray = slice(None)
        if self.num_turns == 1 or not self.reqs:
            return
        counts = self._counts(self.reqs)
        while not counts[self.turn]:
            self.turn = (self.turn + 1) % self.num_turns
        self.now_rows = np.fromiter((r.turn == self.turn for r in self.reqs), np.bool_, len(self.reqs))
        self.now = [r for r in self.reqs if r.turn == self.turn]
        if self.most == 1:
            self.widths = self.now_rows.astype(np.int32)

    @property
    def certain_lens(self) -> np.ndarray:
        """Tokens that are computed, at least."""
        if self.most == 1:
            return self.seq_lens
        return np.fromiter((r.kv_len - r.slack for r in self.reqs), np.int32, len(self.reqs))

    @property
    def next_lens(self) -> np.ndarray:
        """Positions that the next step needs a cache slot for."""
        return np.maximum(self.reserved_lens, self.seq_lens + self.widths)

    def advance(self) -> None:
        """Count one launched step of a token each."""
        self.seq_lens = self.reserved_lens = self.seq_lens + self.widths
        for r in self.now:
            r.kv_len += 1
            r.planned_len += 1


class SampledTokens(NamedTuple):
    """Tokens that stand, request after request."""

    reqs: list[Req]
    tokens: list[int]
    rows: Sequence[int]
    """Of the log probabilities, and of each token among those sampled."""


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

    def read(self) -> SampledTokens:
        """Waits for the device, files prompts' log probabilities and hidden states, and settles the lengths."""
        assert self.result is not None
        self.result.wait()
        parallel_state.groups().tp.raise_if_stalled()
        if self.result.hidden is not None:
            self._file_hidden(self.result.hidden.numpy())
        if self.result.prompt_logprobs is not None:
            self._file_prompt_logprobs(self.result.prompt_logprobs)
        tokens = self.result.next_token_ids.numpy()
        if self.result.counts is None:
            return SampledTokens(self.sampled, tokens[:, 0].tolist(), range(len(tokens)))
        assert self.step.widths is not None
        reqs: list[Req] = []
        accepted: list[int] = []
        rows: list[int] = []
        shape = zip(self.sampled, tokens.tolist(), self.step.widths.tolist(), self.result.counts.tolist(), strict=True)
        for i, (req, row, width, count) in enumerate(shape):
            if req.finish is None:
                req.verified(width, count)
            reqs += [req] * count
            accepted += row[:count]
            rows += range(i * len(row), i * len(row) + count)
        return SampledTokens(reqs, accepted, rows)

    def file_logprobs(self, req: Req, row: int, token: int) -> None:
        """Of a token that its request takes, on the ranks that sample."""
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
