"""Messages between the processes, encoded with msgspec (MessagePack) and carried by zmq.

    tokenizer manager --(SchedulerInput)--> scheduler --(SchedulerOutput)--> detokenizer
    detokenizer --(DetokenizerOutput)--> tokenizer manager

Batch messages are columnar: entry i of every list belongs to `rids[i]`. Control replies pass through the detokenizer
unchanged, so that a reply never overtakes the tokens that were sent before it.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import msgspec

from sglang.srt.managers.wire.token_ids import Ids
from sglang.srt.sampling.output_logprobs import OutputLogprobs
from sglang.srt.sampling.sampling_params import ID_BYTES, SamplingParams
from sglang.srt.sampling.thinking_budget import ThinkingBudget
from sglang.srt.utils.media_item import MediaItem
from sglang.srt.utils.shared_array import SharedArray

DEFAULT_VERSION = "default"
"""Version of the weights of start-up, unless a flag names another."""


class FinishReason(msgspec.Struct, omit_defaults=True):
    """Reason for which a request ended. `type` is stop, length or abort; `matched` the stop token id or string;
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
    """First position whose final hidden state is wanted; -1: none. An embedding is the state of the last prompt
    token."""
    segment_start: int = 0
    """First token of the second text of a pair, for models that tell them apart; 0: there is one text."""
    priority: int = 0
    thinking: ThinkingBudget | None = None
    cache_namespace: str | None = None
    """Requests with different namespaces share no prefix cache (LoRA, cache salts)."""
    adapter: str | None = None
    """The id of a LoRA adapter that the schedulers have loaded; its requests have a namespace of their own."""
    received: float = 0.0
    """When the server got it, in seconds since 1970: the time base of `keep_s`, the same on every rank."""
    keep_s: float = 0.0
    """Seconds for which the prompt stays cached before others; 0: it does not."""
    media: list[MediaItem] = []
    """Images and videos, in the order of their spans; `input_ids` hold the family's placeholder token there."""
    session: bytes | None = None
    """The client's session, by which a replica or a group of ranks is chosen; None: none was named."""

    @property
    def parameter_bytes(self) -> int:
        """Returns about how many bytes a process needs for what the client sent besides the prompt."""
        return self.sampling_params.num_bytes + ID_BYTES * len(self.token_ids_logprob or ())


class AbortReq(msgspec.Struct, tag=True, omit_defaults=True):
    """Ends the named sequences, or all; unknown names are ignored. `status_code` 499 is an end on request, any other an
    error that the caller gets with `message`."""

    rids: list[str] = []
    abort_all: bool = False
    message: str = "Aborted"
    status_code: int = 499


class ControlReq(msgspec.Struct, tag=True, omit_defaults=True):
    """A call that is answered by a ControlReply with the same id. `kind`: flush_cache, internal_state, start_profile,
    stop_profile, pause (`args`: mode), resume, sleep (tags, keep_weights), wake (tags), set_corpora (`args`: path),
    storage_backend, attach_storage (`args`: backend, extra, prefetch_policy, write_policy), detach_storage (`args`:
    undo, perhaps), read_adapter (`args`: adapter, path), adapter_read (adapter), load_adapter (adapter, pinned),
    unload_adapter (adapter), ping, and those of
    `scheduler/weight_updates.CALLS`."""

    id: str
    kind: str
    args: dict[str, Any] = {}


class ArrayPart(msgspec.Struct, tag=True):
    """A part of a shared array, for machines that do not share the front's memory. Parts come in order; each is
    answered by a ControlReply with the same id once all machines have it."""

    id: str
    array: SharedArray
    offset: int
    """Position of the first byte."""
    data: bytes


class ArraysReleased(msgspec.Struct, tag=True):
    """Names of shared arrays that are no longer needed and of which parts were sent. Not answered."""

    names: list[str]


SchedulerInput = TokenizedGenerateReq | AbortReq | ControlReq | ArrayPart | ArraysReleased

# --- scheduler -> detokenizer -----------------------------------------------------------------------------------------


class DraftCounts(msgspec.Struct, omit_defaults=True):
    """Counts of the draft tokens of one request."""

    steps: int = 0
    """Steps that verified draft tokens of it."""
    proposed: int = 0
    correct: int = 0
    histogram: list[int] = []
    """Steps by their number of accepted draft tokens; sent at the end of the request."""


class TokenMeta(msgspec.Struct, omit_defaults=True, gc=False):
    """Counts of one request when the message was sent."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    num_retractions: int = 0
    """Times that the request went back to the queue, to free memory or for a pause."""
    started_time: float = 0.0
    """time.monotonic() when its first step was chosen; 0: none was."""
    first_token_time: float = 0.0
    """time.monotonic() of the first token, for answers that are sent as a whole; 0 for others."""
    reasoning_tokens: int = 0
    """Output tokens that a reasoning parser counted as thoughts."""
    drafts: DraftCounts | None = None
    """None if no draft tokens were verified."""
    host_tokens: int | None = None
    """Cached tokens that were loaded from main memory; None: no prefixes are kept there."""
    stored_tokens: int | None = None
    """Part of `host_tokens` that was read from a store; None: there is no store."""
    weight_versions: list[tuple[str, int]] | None = None
    """Versions of the weights that computed it, each with its first output token; None: the default alone."""

    def after(self, num_new: int) -> TokenMeta:
        """Returns the counts after `num_new` more output tokens."""
        later = copy(self)
        later.completion_tokens += num_new
        return later


class DecodeOptions(msgspec.Struct, omit_defaults=True):
    """Settings for the detokenizer, sent with the first message of a request only."""

    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stop: list[str] = []
    """Text that might begin one of these is held back until it does not."""
    stop_regex: list[str] = []


class BatchTokenIDOut(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """New tokens of several requests."""

    rids: list[str]
    new_ids: list[list[int]]
    """Tokens since the previous message of this rid."""
    finish: list[FinishReason | None]
    meta: list[TokenMeta | None]
    """None: that of the previous message of this rid, with the new tokens added to `completion_tokens`."""
    options: list[DecodeOptions | None]
    logprobs: list[OutputLogprobs | None]
    drafts: bytes = b""
    """[N, 3] int32: steps, proposed and correct of `DraftCounts` of each request; zeros if its `meta` has them, or if
    there is nothing to count. Empty if all are zeros."""
    hidden: dict[str, bytes] = {}
    """Final hidden states [N, H] float32 by rid, of ended requests that asked for them."""


class ControlReply(msgspec.Struct, tag=True, omit_defaults=True):
    """Answer to a ControlReq or ArrayPart."""

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
    """None if prefixes are not kept in a store."""


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
    """Verify steps since the start."""
    spec_confidence_cuts: int = 0
    """Steps since the start with fewer draft tokens because of a confidence head."""
    prompt_steps: int = 0
    """Steps with prompts since the start, and the seconds that the first rank's host took to launch them."""
    prompt_launch_seconds: float = 0.0
    halved_steps: int = 0
    """Those of these steps that ran as two microbatches, and their tokens."""
    halved_tokens: int = 0
    host_cache: HostCacheStats | None = None
    """None: no prefixes are kept in main memory."""


class SchedulerReady(msgspec.Struct, tag=True, omit_defaults=True):
    """First message of a scheduler: start-up is done. `info` is the part of the plan that `/server_info` shows."""

    info: dict[str, Any] = {}


SchedulerOutput = BatchTokenIDOut | ControlReply | SchedulerStats | SchedulerReady

# --- detokenizer -> tokenizer manager ---------------------------------------------------------------------------------


class BatchStrOut(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """Output like BatchTokenIDOut, with the text that became printable since the previous message of each rid."""

    rids: list[str]
    new_text: list[str]
    new_ids: list[list[int]]
    finish: list[FinishReason | None]
    meta: list[TokenMeta | None]
    logprobs: list[OutputLogprobs | None]
    drafts: bytes = b""
    hidden: dict[str, bytes] = {}


DetokenizerOutput = BatchStrOut | ControlReply | SchedulerStats | SchedulerReady
