"""Messages between the processes, encoded with msgspec (MessagePack) and carried by zmq.

    tokenizer manager --(SchedulerInput)--> scheduler --(SchedulerOutput)--> detokenizer
    detokenizer --(DetokenizerOutput)--> tokenizer manager

Batch messages are columnar: entry i of every list belongs to `rids[i]`. Control replies pass through the detokenizer
unchanged, so that a reply never overtakes the tokens that were sent before it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sglang.srt.managers.wire.token_ids import Ids
from sglang.srt.sampling.output_logprobs import OutputLogprobs
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.sampling.thinking_budget import ThinkingBudget
from sglang.srt.utils.media_item import MediaItem
from sglang.srt.utils.shared_array import SharedArray


class FinishReason(msgspec.Struct, omit_defaults=True):
    """The reason for which a request ended. `type` is stop, length or abort; `matched` the stop token id or string;
    `status_code` and `message` belong to abort."""

    type: str
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    status_code: int | None = None


# --- tokenizer manager -> scheduler -----------------------------------------------------------------------------------


class TokenizedGenerateReq(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True, eq=False):
    """One sequence to generate (`n` > 1 and batches are split before)."""

    rid: str
    input_ids: Ids
    sampling_params: SamplingParams
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    """First prompt position whose log probability is wanted; -1: none of the prompt."""
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    hidden_start: int = -1
    """First position whose final hidden state is wanted; -1: none. An embedding is that of the last prompt token."""
    priority: int = 0
    thinking: ThinkingBudget | None = None
    cache_namespace: str | None = None
    """Requests with different namespaces share no prefix cache (LoRA, cache salts)."""
    received: float = 0.0
    """When the server got it, in seconds since 1970: the clock of `keep_s`, the same on every rank."""
    keep_s: float = 0.0
    """Seconds for which the prompt stays cached before others; 0: it does not."""
    media: list[MediaItem] = []
    """Images and videos, in the order of their spans; `input_ids` hold the family's placeholder token there."""


class AbortReq(msgspec.Struct, tag=True, omit_defaults=True):
    """Ends the named sequences, or all; names that are unknown (any more) are ignored. `status_code` 499 is an end on
    request, anything else an error that the caller sees with `message`."""

    rids: list[str] = []
    abort_all: bool = False
    message: str = "Aborted"
    status_code: int = 499


class ControlReq(msgspec.Struct, tag=True, omit_defaults=True):
    """A call that is answered by a ControlReply with the same id. `kind`: flush_cache, internal_state, start_profile,
    stop_profile, pause (`args`: mode), resume, set_corpora (`args`: path), storage_backend, attach_storage (`args`:
    backend, extra, prefetch_policy, write_policy), detach_storage, ping."""

    id: str
    kind: str
    args: dict[str, Any] = {}


class ArrayPart(msgspec.Struct, tag=True):
    """Bytes of a shared array, for machines that do not share the front's memory. Parts come in order, and each is
    answered by a ControlReply with the same id when all machines have it."""

    id: str
    array: SharedArray
    offset: int
    """Of the first byte."""
    data: bytes


class ArraysGone(msgspec.Struct, tag=True):
    """The names of shared arrays that nothing needs any more, of which some parts were sent. There is no answer."""

    names: list[str]


SchedulerInput = TokenizedGenerateReq | AbortReq | ControlReq | ArrayPart | ArraysGone

# --- scheduler -> detokenizer -----------------------------------------------------------------------------------------


class DraftCounts(msgspec.Struct, omit_defaults=True):
    """Counts of the draft tokens of one request."""

    steps: int = 0
    """Number of steps that brought it draft tokens to verify."""
    proposed: int = 0
    correct: int = 0
    histogram: list[int] = []
    """Steps by their number of right draft tokens; sent with the end of the request."""

    def add(self, width: int, count: int) -> None:
        """A step brought `width` tokens of the request, and `count` of those that it sampled stand."""
        if width == 1:
            return
        self.steps += 1
        self.proposed += width - 1
        self.correct += count - 1
        self.histogram += [0] * (count - len(self.histogram))
        self.histogram[count - 1] += 1

    def copy(self, with_histogram: bool) -> DraftCounts:
        return DraftCounts(self.steps, self.proposed, self.correct, self.histogram.copy() if with_histogram else [])


class TokenMeta(msgspec.Struct, omit_defaults=True, gc=False):
    """Counts of one request when the message was sent."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    num_retractions: int = 0
    """Number of times that the request went back to the queue to free memory, or by a pause."""
    started_time: float = 0.0
    """time.monotonic() when its first step was chosen; 0: none was."""
    first_token_time: float = 0.0
    """The same when the first token of an answer was there that is sent as a whole; 0: of others."""
    reasoning_tokens: int = 0
    """Output tokens that a reasoning parser counted as such."""
    drafts: DraftCounts | None = None
    """None: no draft tokens were verified."""
    host_tokens: int | None = None
    """Of the cached tokens, those that were loaded from main memory; None: nothing is kept there."""
    stored_tokens: int | None = None
    """Of these, those that were read from a store; None: there is no store."""


class DecodeOptions(msgspec.Struct, omit_defaults=True):
    """Settings that the detokenizer needs, sent with the first message of a request only."""

    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stop: list[str] = []
    """Text that might begin one of these is held back until it does not."""
    stop_regex: list[str] = []


class BatchTokenIDOut(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    rids: list[str]
    new_ids: list[list[int]]
    """Tokens since the previous message of this rid."""
    finish: list[FinishReason | None]
    meta: list[TokenMeta]
    options: list[DecodeOptions | None]
    logprobs: list[OutputLogprobs | None]
    hidden: dict[str, bytes] = {}
    """Final hidden states [N, H] float32 of requests that wanted them and have ended, by rid."""


class ControlReply(msgspec.Struct, tag=True, omit_defaults=True):
    id: str
    ok: bool = True
    message: str = ""
    data: dict[str, Any] = {}


class StorageStats(msgspec.Struct, omit_defaults=True):
    """Totals of the store of cached prefixes beyond main memory, since the start."""

    prefetched_tokens: int = 0
    prefetched_bytes: int = 0
    prefetch_seconds: float = 0.0
    storage_prefetch_unfulfilled_tokens: int = 0
    backuped_tokens: int = 0
    backuped_bytes: int = 0
    backup_seconds: float = 0.0
    storage_dropped_tokens: int = 0
    storage_failures: int = 0
    storage_corrupt_entries: int = 0


class HostCacheStats(msgspec.Struct, omit_defaults=True):
    """Gauges of the prefix cache in main memory, and its totals since the start."""

    hicache_host_used_tokens: int = 0
    hicache_host_total_tokens: int = 0
    hicache_host_mamba_used_states: int = 0
    hicache_host_mamba_total_states: int = 0
    load_back_tokens: int = 0
    load_back_bytes: int = 0
    load_back_seconds: float = 0.0
    load_back_overlapped_bytes: int = 0
    load_back_overlapped_seconds: float = 0.0
    hicache_backup_tokens: int = 0
    hicache_backup_bytes: int = 0
    hicache_backup_seconds: float = 0.0
    hicache_dropped_tokens: int = 0
    hicache_failed_copies: int = 0
    storage: StorageStats | None = None
    """None: prefixes are kept nowhere else."""


class SchedulerStats(msgspec.Struct, tag=True, omit_defaults=True):
    """Gauges and counters for the metrics page, sent about once a second while there is work."""

    num_running_reqs: int = 0
    num_queue_reqs: int = 0
    num_used_tokens: int = 0
    token_usage: float = 0.0
    gen_throughput: float = 0.0
    cache_hit_rate: float = 0.0
    num_retracted_reqs: int = 0
    spec_accept_length: float = 0.0
    spec_accept_rate: float = 0.0
    spec_num_steps: int = 0
    spec_num_draft_tokens: int = 0
    spec_verify_calls: int = 0
    """Number of verifications since the start."""
    spec_confidence_cuts: int = 0
    """Number of steps since the start that brought fewer draft tokens because a confidence head said so."""
    prompt_steps: int = 0
    """Number of steps with prompts since the start, and the seconds that the first rank's host took to launch them."""
    prompt_launch_seconds: float = 0.0
    halved_steps: int = 0
    """Number of these that ran as two microbatches, and their tokens."""
    halved_tokens: int = 0
    host_cache: HostCacheStats | None = None
    """None: no prefixes are kept in main memory."""


class SchedulerReady(msgspec.Struct, tag=True, omit_defaults=True):
    """First message of a scheduler: start-up is done. `info` is what `/server_info` shows of the plan."""

    info: dict[str, Any] = {}


SchedulerOutput = BatchTokenIDOut | ControlReply | SchedulerStats | SchedulerReady

# --- detokenizer -> tokenizer manager ---------------------------------------------------------------------------------


class BatchStrOut(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """Output as in BatchTokenIDOut, with the text that became printable since the previous message of each rid."""

    rids: list[str]
    new_text: list[str]
    new_ids: list[list[int]]
    finish: list[FinishReason | None]
    meta: list[TokenMeta]
    logprobs: list[OutputLogprobs | None]
    hidden: dict[str, bytes] = {}


DetokenizerOutput = BatchStrOut | ControlReply | SchedulerStats | SchedulerReady
