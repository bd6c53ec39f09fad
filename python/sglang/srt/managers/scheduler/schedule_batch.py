"""One request (`Req`) and one launched step (`ScheduleBatch`) as the scheduler sees them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sglang.srt.distributed import parallel_state
from sglang.srt.managers.scheduler.counters import APPENDED, CHECKED, STREAMED, BySlot, Counters
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
    from sglang.srt.managers.scheduler.stop_tokens import StopTokens
    from sglang.srt.managers.scheduler.text_stop import TextStop
    from sglang.srt.mem_cache.copies_under_way import Copy

MESSAGE_LOGPROBS = 1 << 14
"""Log probabilities of an output with which a message goes out, whether or not it streams: none piles up."""


class Req:
    """One sequence, from its arrival to its last message.

    Steps are launched before the preceding ones are read back, so the host knows lengths earlier than tokens:

        tokens          prompt | output that the host has seen |
        positions       0 ........... kv_len - slack ..... kv_len .......... planned_len ...... reserved_len
        computed          certainly     |   perhaps: draft tokens  |                   |                    |
        sampled                         |                     | the token after the last launched step
        cache slots       num_cached: of the prefix tree; up to reserved_len: its own

    kv_len          tokens whose KV is launched; where a step verifies draft tokens, as if all were accepted
    slack           of these, tokens that may be rejected when the results come
    planned_len     tokens that exist once every launched step has sampled, with the same `slack`
    reserved_len    positions that have a cache slot, if more than kv_len: draft tokens were rejected and the next
                    tokens come here, or a draft model computes ahead of the target

    Whatever is rejected, the first token of a step in flight is the last one that the host knows. So the first `kv_len`
    of the tokens that the host knows have valid KV, and a request may be ended at any moment.
    """

    __slots__ = (
        "_cache_keys",
        "adapter",
        "admitted",
        "counters",
        "draft_tokens",
        "drafts",
        "finish",
        "first_message",
        "first_token_time",
        "grammar",
        "hidden",
        "hit_len",
        "host_len",
        "keep_until",
        "limit",
        "logprob_start",
        "looked_up",
        "mask_ms",
        "max_output",
        "media",
        "meta_changed",
        "microbatch",
        "namespace",
        "node",
        "num_cached",
        "num_loaded",
        "num_loads",
        "num_retractions",
        "num_stored",
        "num_unsent",
        "output",
        "own_namespace",
        "parameter_bytes",
        "params",
        "pending_finish",
        "pending_logprobs",
        "pending_output_len",
        "plain",
        "priority",
        "prompt",
        "prompt_len",
        "prompt_logprobs_done",
        "queued_time",
        "return_logprob",
        "rid",
        "seed",
        "segment_start",
        "slot",
        "started_time",
        "state_is_exact",
        "stop_ids",
        "stored_len",
        "stream",
        "text_stop",
        "thoughts",
        "token_ids_logprob",
        "tokens",
        "top_logprobs_num",
        "weight_versions",
    )
    kv_len, planned_len, slack, reserved_len = BySlot(), BySlot(), BySlot(), BySlot()
    num_speculative_tokens = BySlot()
    """Draft tokens that its last launched step made."""
    handling = BySlot()
    """What steps do with its tokens (`decide_handling`)."""

    def __init__(
        self,
        msg: TokenizedGenerateReq,
        seed: int,
        limit: int,
        stop_ids: frozenset[int],
        media: PromptMedia | None,
        prompt: Prompt,
        counters: Counters,
    ) -> None:
        """counters: those of its scheduler's requests, used while it has a slot."""
        self.rid = msg.rid
        self.params = msg.sampling_params
        self.parameter_bytes = msg.parameter_bytes
        self.stream = msg.stream
        self.priority = msg.priority
        self.keep_until = msg.received + msg.keep_s if msg.keep_s else 0.0
        """Its prompt stays cached before others until then; 0: it does not."""
        self.seed = seed
        self.namespace = self.own_namespace = msg.cache_namespace
        """The prefixes that it shares; `own_namespace` is what the client asked for, without the weights' key."""
        self.weight_versions: list[tuple[str, int]] | None = None
        """Versions of the weights that computed it, each with its first output token; None: those of start-up."""
        self.adapter = msg.adapter
        """The id of its LoRA adapter; None: it has none."""
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

        self.slot, self.counters = 0, counters
        self.microbatch = 0
        """Number of the turn, among those of the running requests, that this request belongs to."""
        self.state_is_exact = True
        """True if its recurrent states are those of `kv_len` tokens."""
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
        """Counts of its draft tokens up to its last slot; with a slot, its `counters` have them."""
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
        named = np.array(self.token_ids_logprob, np.int32).tobytes()
        self.pending_logprobs = OutputLogprobs(self.top_logprobs_num, named)
        """Those that no message had so far, on the leader, which sends them."""
        if self.logprob_start == 0 and self.prompt_len:
            self.pending_logprobs.first_token = self.tokens[0]
        self.hidden = None if msg.hidden_start < 0 else HiddenStates(msg.hidden_start)
        """The final hidden states that are wanted."""
        self.segment_start = msg.segment_start
        """First token of the second text of a pair; 0: there is one text."""
        self.prompt_logprobs_done = 0
        """Prompt tokens whose log probability has been collected (a retracted request computes its prompt again)."""

        self.grammar: Grammar | None = None
        self.mask_ms = 0
        """Milliseconds that its grammar takes for a token, as all ranks know it; 0: less than matters."""
        self.thoughts = None if msg.thinking is None else Thoughts(msg.thinking)
        self.text_stop: TextStop | None = None
        self.pending_finish: FinishReason | None = None
        """Its end by the leader, of which the ranks have not heard yet. Tokens that come until then do not count."""
        self.pending_output_len = 0
        self.finish: FinishReason | None = None
        self.num_unsent = 0
        """Output tokens that no message had so far; counted for streams, and where log probabilities are wanted."""
        self.first_message = True
        self.meta_changed = False
        """Whether its next message says more than the number of its tokens."""
        self.plain = False
        """True while nothing but a stop token or its limit can end the request, and nothing but the token is taken from
        a step (`begin`)."""

    def begin(self) -> None:
        """Decides which checks its tokens need, once it has a slot and everything about it is known."""
        self.meta_changed, self.handling = True, CHECKED
        self.counters.begin(self.slot, self.drafts)
        self.counters.mask_ms[self.slot] = self.mask_ms
        watched = self.grammar is not None or self.thoughts is not None or self.hidden is not None
        searched = bool(self.params.stop or self.params.stop_regex)
        self.plain = not (watched or searched or self.return_logprob) and self.max_output > 0

    def enter_weights(self, key: str) -> None:
        """Shares prefixes only with requests of the same weights from now on."""
        if key:
            self.namespace = json.dumps([self.own_namespace, "weights", key, ""])

    def set_mask_ms(self, milliseconds: int) -> None:
        """Notes how long its grammar takes for a token."""
        self.mask_ms = milliseconds
        if self.slot:
            self.counters.mask_ms[self.slot] = milliseconds

    def decide_handling(self, stream_interval: int) -> None:
        """Decides what the next steps do with its tokens. stream_interval: tokens of each message of a stream."""
        if self.plain:
            self.handling = STREAMED if self.stream and stream_interval == 1 else APPENDED

    def max_width(self, tokens_per_step: int) -> int:
        """Returns how many tokens a step may bring of it; all but the first are draft tokens."""
        return 1 if self.hidden is not None else tokens_per_step

    @property
    def needs_mask(self) -> bool:
        """Returns whether a launched step's sampling is restricted depending on tokens that the host may not know
        yet."""
        if self.grammar is not None:
            return True
        unknown = self.planned_len - len(self.tokens) - 1
        return self.thoughts is not None and self.thoughts.may_end_within(unknown)

    @property
    def has_many_logprobs(self) -> bool:
        """Returns whether the log probabilities that wait for its next message are enough for one."""
        return self.return_logprob and self.num_unsent * self.logprob_width >= MESSAGE_LOGPROBS

    @property
    def has_many_prompt_logprobs(self) -> bool:
        """Returns whether those of its prompt are enough for a message before its first token."""
        return self.pending_logprobs.num_values >= MESSAGE_LOGPROBS

    @property
    def num_pending_bytes(self) -> int:
        """Returns the bytes of log probabilities and hidden states in its next message."""
        logprobs = self.pending_logprobs
        num_hidden = 0 if self.hidden is None or self.finish is None else self.hidden.num_bytes
        return len(logprobs.input) + len(logprobs.output) + num_hidden

    @property
    def logprob_width(self) -> int:
        """Returns the log probabilities of a token."""
        return 1 + self.top_logprobs_num + len(self.token_ids_logprob)

    def prompt_logprobs_in(self, begin: int, count: int) -> range:
        """Returns the positions of the prompt whose log probabilities are computed with the tokens begin .. begin +
        count - 1: each is predicted by the token before it, and none is collected twice."""
        first = max(begin + 1, self.logprob_start, self.prompt_logprobs_done, 1)
        return range(first, min(begin + count, self.prompt_len - 1) + 1)

    @property
    def may_continue(self) -> bool:
        """Returns whether no end of it is known, here or on its way to all ranks."""
        return self.finish is None and self.pending_finish is None

    def drop_draft_tokens(self) -> None:
        """Forgets draft tokens, but not their counts, before the request gives up its cache slots; `kv_len` then counts
        only tokens that the host knows."""
        self.reserved_len = max(self.reserved_len, self.kv_len)
        self.state_is_exact = not self.slack and self.kv_len <= len(self.tokens)
        self.kv_len = min(self.kv_len, len(self.tokens))
        self.slack = 0
        self.drafts = self.counters.drafts_of(self.slot)

    @property
    def output_len(self) -> int:
        """Returns the number of tokens generated so far."""
        return len(self.output)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Returns whether log probabilities of prompt tokens were requested."""
        return self.logprob_start < self.prompt_len

    @property
    def max_hidden_rows(self) -> int:
        """Returns the most hidden states that it may hold. A single one, an embedding, counts as none: it is sent at
        once."""
        count = 0 if self.hidden is None else num_states(self.prompt_len, self.limit) - self.hidden.start
        return count if count > 1 else 0

    def cache_keys(self, length: int) -> Keys:
        """Returns the prefix cache's keys of the first `length` tokens. Each token is converted once, and a prompt once
        for all samples."""
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
        """Returns how many leading tokens may come from the cache. The last token must be computed to sample from it,
        and so must every one whose log probability or hidden state is wanted and not collected yet."""
        limit = len(self.tokens) - 1
        if self.hidden is not None:
            limit = min(limit, self.hidden.end)
        if self.wants_prompt_logprobs and self.prompt_logprobs_done < self.prompt_len:
            limit = min(limit, max(self.logprob_start - 1, 0))
        return limit

    @property
    def may_be_stale(self) -> bool:
        """Returns whether its steps may be computed again: only tokens are read back from them, and no input is made
        for a single step."""
        return not self.wants_prompt_logprobs and self.hidden is None and self.media is None

    def may_reuse_prefix(self, keys: Keys) -> bool:
        """Returns whether its tokens begin with these `cache_keys`, and may come from the cache."""
        count = len(keys)
        return count <= self.matchable_len() and np.array_equal(self.cache_keys(count), keys)


class SampledTokens(NamedTuple):
    """What a step brought each of its requests."""

    ids: list[list[int]]
    """Accepted tokens."""
    handling: npt.NDArray[np.int8]
    """What to do with these: `CHECKED`, `APPENDED` or `STREAMED`."""
    drafts: npt.NDArray[np.int32]
    """[R, 3] counts of the draft tokens of each request so far."""
    counts: Lengths
    """[R] lengths of `ids`."""

    def handled(self, reqs: list[Req], how: int) -> tuple[list[Req], list[list[int]]]:
        """Returns the requests, of those that were sampled, whose tokens are handled as `how`, and these tokens."""
        which = self.handling == how
        if which.all():
            return reqs, self.ids
        return list(compress(reqs, which.tolist())), list(compress(self.ids, which.tolist()))


@dataclass(slots=True)
class ScheduleBatch:
    """One step: the requests whose token it samples, in the order of the sampled rows."""

    step: StepInput
    sampled: list[Req]
    prompt_logprob_spans: list[tuple[Req, int, int]] = field(default_factory=list)
    """(request, first, end) prompt positions whose log probabilities this step computes, in row order."""
    hidden_spans: list[tuple[Req, int]] = field(default_factory=list)
    """Requests whose hidden states this step computes, and the number of positions, in row order."""
    result: StepResult | None = None
    loads: Sequence[Copy] = ()
    """Loads of cached prefixes that were under way at the launch: the step's tokens count once these have succeeded."""
    stale: set[Req] = field(default_factory=set)
    """Requests that read entries which a failed load did not bring; they are computed again."""
    watched: Sequence[Req] = ()
    """The requests of `sampled` that are not plain."""
    may_reach_limit: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    """Whether the step may bring each of `sampled` to its longest length; true also for its first token."""

    @property
    def limited(self) -> list[Req]:
        """Returns the requests whose tokens a grammar or a thinking budget may restrict."""
        return [req for req in self.watched if req.grammar is not None or req.thoughts is not None]

    @property
    def needs_mask(self) -> bool:
        """Returns whether a sampled row has a grammar."""
        return any(req.needs_mask for req in self.limited)

    def read(self, counters: Counters, stops: StopTokens) -> SampledTokens:
        """Waits for the device, stores prompts' log probabilities and hidden states, and corrects the lengths. Returns
        the accepted tokens. stops: those of all current requests."""
        assert self.result is not None
        self.result.wait()
        parallel_state.groups().tp.raise_if_stalled()
        if self.result.hidden is not None:
            self._file_hidden(self.result.hidden.numpy())
        if self.result.prompt_logprobs is not None and parallel_state.is_leader():
            self._file_prompt_logprobs(self.result.prompt_logprobs)
        if self.result.draft_tokens is not None:
            for req, draft_tokens in zip(self.sampled, self.result.draft_tokens.tolist(), strict=True):
                req.draft_tokens = draft_tokens
        tokens = self.result.next_token_ids.numpy()
        handling = counters.handling[self.step.sampled_slots]
        handling[self.may_reach_limit | stops.rows_with_any(tokens)] = CHECKED
        if self.stale:
            handling[:] = CHECKED
        if self.result.counts is None:
            ids: list[list[int]] = tokens.tolist()
            counts = np.full(len(tokens), tokens.shape[1], np.int32)
        else:
            counts = self.result.counts.numpy().astype(np.int32)
            self._subtract_rejected(counters, counts)
            ids = _leading(tokens, counts)
        return SampledTokens(ids, handling, counters.drafts[self.step.sampled_slots], counts)

    def _subtract_rejected(self, counters: Counters, counts: Lengths) -> None:
        """Subtracts rejected draft tokens from the lengths of the requests that still run. counts: accepted tokens."""
        assert self.step.widths is not None
        slots, widths = self.step.slots, self.step.widths
        ended = [i for i, req in enumerate(self.sampled) if req.finish is not None]
        if self.stale:
            ended += [i for i, req in enumerate(self.sampled) if req in self.stale]
        if ended:  # mostly none, and then nothing is copied
            slots, widths, counts = (np.delete(each, ended) for each in (slots, widths, counts))
        counters.verified(slots, widths, counts)

    def file_logprobs(self, request: int, index: int) -> None:
        """Stores the log probabilities of a token that its request takes, on the leader. request: index in `sampled`;
        index: of the token among those that the step sampled for it."""
        if not parallel_state.is_leader():
            return
        assert self.result is not None and self.result.logprobs is not None
        row = request * self.result.next_token_ids.shape[1] + index
        self.result.logprobs.add(self.sampled[request].pending_logprobs.output, request, slice(row, row + 1))

    def with_many_prompt_logprobs(self) -> list[Req]:
        """Returns the requests that have no token yet, whose log probabilities of the prompt are enough for a
        message."""
        sampled = set(self.sampled)
        reqs = dict.fromkeys(req for req, _, _ in self.prompt_logprob_spans)
        return [req for req in reqs if req not in sampled and req.may_continue and req.has_many_prompt_logprobs]

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
            logprobs.add(req.pending_logprobs.input, i, slice(row, row + end - first))
            row += end - first


def _leading(tokens: npt.NDArray[Any], counts: Lengths) -> list[list[int]]:
    """Returns the first `counts[i]` of each row of `tokens` [R, k]; all rows become one list first, as a list for each
    would be made only to be cut."""
    flat, width = tokens.ravel().tolist(), tokens.shape[1]
    starts = range(0, len(flat), width)
    ends = (counts + np.arange(0, len(flat), width)).tolist()
    return [flat[start:end] for start, end in zip(starts, ends, strict=True)]
