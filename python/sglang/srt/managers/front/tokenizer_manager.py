"""The front of the engine: takes calls, sends their sequences to a scheduler, and returns the outputs to the callers.

Runs in one event loop, that of the HTTP server or of the in-process engine:

    manager.attach()
    async with await manager.submit(GenerateRequest(text="Hello", stream=True)) as stream:
        async for output in stream: ...

With --dp-size there are several engines behind it, the replicas; `replica_router` chooses one for each sequence.

Every sequence that is sent gets exactly one message with a finish reason from the scheduler, also after an abort; its
request id stays taken until then.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.speculative import NGRAM
from sglang.srt.managers.front.adapters import ServedAdapters
from sglang.srt.managers.front.control_calls import Undo, ask_each, late_error, undo_where_done
from sglang.srt.managers.front.corpora import ExternalCorpora, read_documents
from sglang.srt.managers.front.draft_details import draft_counts
from sglang.srt.managers.front.generate_request import GenerateOutput, GenerateRequest, RequestError
from sglang.srt.managers.front.generation_stream import CLIENT_CLOSED_REQUEST, GenerationStream
from sglang.srt.managers.front.logprob_budget import LogprobBudget
from sglang.srt.managers.front.media.array_transfers import ArrayTransfers
from sglang.srt.managers.front.media.media_loader import MediaLoader
from sglang.srt.managers.front.media.media_source import MediaSource
from sglang.srt.managers.front.media.served_media import ServedMedia
from sglang.srt.managers.front.metrics import Metrics
from sglang.srt.managers.front.replica import Replica
from sglang.srt.managers.front.replica_router import ReplicaRouter
from sglang.srt.managers.front.request_log import RequestLog
from sglang.srt.managers.front.request_preparation import PreparedCall, RequestPreparer
from sglang.srt.managers.front.request_record import EndedRequest
from sglang.srt.managers.front.request_trace import RequestTracer
from sglang.srt.managers.front.sequence_table import ActiveSequence, SequenceTable
from sglang.srt.managers.front.sleeper import RETRY_AFTER_S, Sleeper
from sglang.srt.managers.front.text_encoder import TextEncoder
from sglang.srt.managers.front.weight_updates import WeightUpdates
from sglang.srt.managers.reap import close_together
from sglang.srt.managers.wire import ipc
from sglang.srt.managers.wire.io_struct import (
    BatchStrOut,
    ControlReply,
    DetokenizerOutput,
    FinishReason,
    SchedulerReady,
    SchedulerStats,
    TokenizedGenerateReq,
    TokenMeta,
)
from sglang.srt.managers.wire.token_ids import Ids
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.engine_state import EngineState
from sglang.srt.utils.hf_tokenizer import Tokenizer
from sglang.srt.utils.media_item import MediaItem

logger = logging.getLogger(__name__)

SEND_BATCH_TOKENS = 1 << 18
"""Prompt tokens that are encoded and sent before the event loop gets to run other callbacks."""
ENDINGS_RETRY_S = 0.05
"""Seconds after which aborts and names of gone arrays are sent again when a channel was full."""
SEQUENCE_TOKENS, BYTES_A_TOKEN = 4096, 8
"""Prompt tokens that count for a sequence by itself, and bytes of its parameters that count as one token."""
DRAIN_POLL_S = 0.02
FLUSH_CACHE = "flush_cache"
PAUSES = {"pause": True, "resume": False}
"""Control calls that pause generation, and that end a pause."""


class ServerStatus(enum.Enum):
    """State of the server as its health endpoints report it."""

    STARTING = "starting"
    UP = "up"
    Up = "up"  # noqa: PIE796  (its name in SGLang)
    UNHEALTHY = "unhealthy"
    SHUTTING_DOWN = "shutting down"


class TokenizerManager:
    """One engine's front. All methods belong to the event loop that `attach` was called in."""

    def __init__(
        self,
        args: ServerArgs,
        model_config: ModelConfig,
        ports: Sequence[ipc.Ports],
        tokenizer: Tokenizer | None,
        served_media: ServedMedia | None = None,
    ) -> None:
        """ports: of each replica. served_media: None if the model reads text only."""
        self.args = args
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.status = ServerStatus.STARTING
        self.status_message = ""
        self.state = EngineState()
        """Whether the engine's memory and weights can serve requests, as its schedulers have said."""
        self.sleeper: Sleeper | None = None
        """Puts the engine to sleep and wakes it; None: its memory cannot be given back."""
        if args.enable_memory_saver:
            self.sleeper = Sleeper(
                self.state, self.control, self.abort_all, lambda: self.weights.paused, self.fail_running,
                args.wake_on_request,
            )  # fmt: skip
        self.last_receive_time = time.monotonic()
        """time.monotonic() of the last message from an engine."""
        self.replicas = [Replica(index, each) for index, each in enumerate(ports)]
        self._router = ReplicaRouter(
            args.load_balance_method, len(ports), not args.disable_radix_cache, args.prefix_affinity_fallback
        )
        self.metrics = Metrics(args.served_model_name or args.model_path, len(ports)) if args.enable_metrics else None
        if self.metrics is not None:
            self.metrics.sleeper = self.sleeper
        self._log = RequestLog(args) if args.log_requests else None
        self._tracer = RequestTracer.from_args(args)
        self._has_helpers = True
        """Whether `end_helpers` has something to end."""
        self.text = TextEncoder(tokenizer, args.dp_size)
        self.media: MediaLoader | None = None
        """The reader of images and videos; None if the model takes none."""
        if served_media is not None:
            self.media = MediaLoader(args, served_media, ports[0].shared_arrays, self.text.encode_each)
        self._transfers: ArrayTransfers | None = None
        """Where ranks do not share this machine's memory."""
        if self.media is not None and (args.nnodes > 1 or args.use_ray):
            self._transfers = ArrayTransfers(self.media.files, self.replicas, self._send_endings)
        encode = None if tokenizer is None else self.text.encode
        self.adapters: ServedAdapters | None = None
        """LoRA adapters; None: the server takes none."""
        if args.enable_lora:
            self.adapters = ServedAdapters(args, self.control, self._uses_adapter, Path(ports[0].root))
        self.weight_version = args.weight_version
        """Name of the weights that are served."""
        self.weights = WeightUpdates(self)
        self.preparer = RequestPreparer(args, model_config, encode, self.media, self.text.encode_pair, self.adapters)
        self._sequences = SequenceTable(None if self.media is None else self.media.files)
        self._logprobs = LogprobBudget()
        self._endings_retry: asyncio.TimerHandle | None = None
        self.corpora: ExternalCorpora | None = None
        """External corpora; only for n-gram drafts."""
        if args.speculative_algorithm == NGRAM:
            longest, maximum = args.speculative_ngram_max_trie_depth, args.speculative_ngram_external_corpus_max_tokens
            self.corpora = ExternalCorpora(self.text.encode, self.control, Path(ports[0].root), longest, maximum)

    # --- life ---------------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Starts to listen; call it once, inside the running event loop."""
        for replica in self.replicas:
            replica.inbox.attach(partial(self._receive, replica))

    def detach(self) -> None:
        """Stops listening; messages wait."""
        for replica in self.replicas:
            replica.inbox.detach()

    async def load_corpus_file(self) -> None:
        """Loads the file of --speculative-ngram-external-corpus-path, if there is one. Raises UserError,
        RequestError."""
        path = self.args.speculative_ngram_external_corpus_path
        if path is not None and self.corpora is not None:
            await self.corpora.add(Path(path).name, await asyncio.to_thread(read_documents, path))

    async def load_adapters(self) -> None:
        """Loads the adapters of --lora-paths. Raises RequestError."""
        if self.adapters is not None:
            await self.adapters.load_from_flags()

    def _uses_adapter(self, adapter: str) -> bool:
        """Returns whether a sequence that has not ended has this adapter."""
        return any(self._request_of(rid).adapter == adapter for rid in self._sequences.rids())

    def _request_of(self, rid: str) -> TokenizedGenerateReq:
        sequence = self._sequences[rid]
        return sequence.stream.requests[sequence.index]

    def mark_up(self) -> None:
        """Marks the server as ready, unless it was found unhealthy meanwhile."""
        if self.status is ServerStatus.STARTING:
            self.status = ServerStatus.UP

    def lose_replica(self, index: int, message: str) -> bool:
        """Fails the calls of a replica that has ended; others get later ones. Returns whether there are others: without
        them the engine is gone."""
        lost = self.replicas[index]
        lost.failure = message
        if self.metrics is not None:
            self.metrics.lost.add(index)
        if not self.serving_replicas:
            self.mark_unhealthy(message)
            return False
        logger.error(
            "Replica %d is taken out, %d of %d serve on.", index, len(self.serving_replicas), len(self.replicas)
        )
        error = RequestError(f"Replica {index} of the server has failed ({message}); send the request again.", 503)
        for rid, sequence in self._sequences.on_replica(lost):
            self._sequences.remove(rid, sequence)
            sequence.stream.fail(error)
        lost.fail_replies(error)
        return True

    def mark_unhealthy(self, message: str) -> None:
        """Fails everything that runs and refuses new calls, because the engine is gone."""
        if self.status is not ServerStatus.SHUTTING_DOWN:
            self.status = ServerStatus.UNHEALTHY
        self.status_message = message
        self.fail_all(RequestError(message, 500))

    def fail_all(self, error: RequestError) -> None:
        """Ends every call with `error`, now, without telling the scheduler."""
        for sequence in self._sequences.take_all():
            sequence.stream.fail(error)
        for replica in self.replicas:
            replica.aborts.clear()
            replica.arrays_released.clear()
            replica.fail_replies(error)

    def fail_running(self, error: RequestError) -> None:
        """Ends every call with `error`; the schedulers hear of it when its reader has."""
        for rid in self._sequences.rids():
            self._sequences[rid].stream.fail(error)

    def begin_shutdown(self) -> None:
        """Refuses new calls; running ones go on."""
        self.status = ServerStatus.SHUTTING_DOWN

    async def drain(self, limit_s: float) -> bool:
        """Waits until nothing runs and returns True; after `limit_s` seconds, aborts what still runs and returns
        False."""
        end = time.monotonic() + limit_s
        while self._sequences and time.monotonic() < end:
            await asyncio.sleep(DRAIN_POLL_S)
        if not self._sequences:
            return True
        self.abort_all()
        return False

    def end_helpers(self) -> None:
        """Ends the processes that decode images, and sends the last spans. Waits for both; may be repeated, and called
        from any thread."""
        helpers, self._has_helpers = (self.media, self._tracer) if self._has_helpers else (), False
        close_together(helper.close for helper in helpers if helper is not None)

    def close(self) -> None:
        """Ends everything. Call it in the thread of the event loop."""
        if self._endings_retry is not None:
            self._endings_retry.cancel()
        for replica in self.replicas:
            replica.close()
        self.text.close()
        if self._transfers is not None:
            self._transfers.close()
        self.end_helpers()

    @property
    def num_unfinished(self) -> int:
        """Returns the number of sequences that have not ended, including aborted ones whose end is on its way."""
        return len(self._sequences)

    @property
    def serving_replicas(self) -> list[Replica]:
        """Returns the replicas that have not ended; there is at least one while the engine is healthy."""
        return [replica for replica in self.replicas if replica.failure is None]

    @property
    def scheduler_info(self) -> dict[str, Any]:
        """Returns the plan's decisions, which are the same for every replica."""
        return next((replica.info for replica in self.replicas if replica.info), {})

    # --- calls --------------------------------------------------------------------------------------------------------

    async def submit(self, req: GenerateRequest) -> GenerationStream:
        """Checks, tokenizes and sends a call. Raises RequestError; then nothing was sent."""
        created = time.monotonic()
        self._refuse_when_down()
        await self._admit()
        adapters = self.adapters if req.lora_path else None
        adapter_ids = () if adapters is None else await adapters.hold(req.lora_path)
        try:
            stream = await self._prepare_and_submit(req, created)
        finally:
            if adapters is not None:
                adapters.release(adapter_ids)
        if req.on_submitted is not None:
            req.release_inputs()
            req.on_submitted(req.kept_bytes + stream.kept_bytes)
        return stream

    async def _prepare_and_submit(self, req: GenerateRequest, created: float) -> GenerationStream:
        call = await self.preparer.prepare(req)
        try:
            await self._admit()
            return await self._submit(req, call, created)
        finally:
            self.preparer.release(call)  # the sequences hold them by now

    async def _submit(self, req: GenerateRequest, call: PreparedCall, created: float) -> GenerationStream:
        self._refuse_when_down()
        batch_rid = req.rid if isinstance(req.rid, str) else None
        self._sequences.refuse_taken_ids(call, batch_rid)
        texts: list[str | None] = call.prompt_texts if req.keeps_texts else [None] * len(call.prompt_texts)
        stream = GenerationStream(call.requests, texts, call.num_samples, self._on_close)
        self._logprobs.reserve(stream, call.num_logprobs)
        stream.is_batch = req.is_batch
        stream.created_time = created
        self._sequences.add(call, stream, batch_rid, None if self._tracer is None else self._tracer.parent())
        if self._log is not None:
            for index, request in enumerate(call.requests):
                self._log.received(request, call.prompt_texts[index // call.num_samples])
        try:
            await self._send_sequences(stream, req.replica)
        except BaseException as error:  # after any error, also a cancelled caller, nothing may stay registered
            await stream.aclose()
            if isinstance(error, ipc.ChannelFull):
                raise RequestError("The server is overloaded; try again later.", 503) from None
            if isinstance(error, ipc.IntegerTooWide):
                raise RequestError(f"{error} must be a 64-bit integer.") from None
            raise
        return stream

    def abort(self, rid: str) -> bool:
        """Ends a request and all its samples; also takes the id of one sample's output, or that of a batch. Returns
        False if there is no such request."""
        rids = self._sequences.rids_behind(rid)
        self._abort_sequences(rids)
        return bool(rids)

    def abort_all(self) -> None:
        """Ends every request."""
        self._abort_sequences(self._sequences.rids())

    async def control(
        self, kind: str, args: dict[str, Any] | None = None, timeout: float = 60.0, undo: Undo | None = None
    ) -> ControlReply:
        """Asks the schedulers of all replicas; `kind` is one of ControlReq's. Returns the first refusal, or else an
        approval. undo: is sent to those that approved where others refuse or are late. Raises RequestError if there is
        no answer in time."""
        replies = await ask_each(self._asked(), kind, args or {}, timeout)
        if kind == FLUSH_CACHE and any(reply.ok for reply in replies.by_replica.values()):
            self._router.forget_prefixes()
            self.text.forget_prefixes()
        if kind in PAUSES and not replies.refused and not replies.late:
            self.weights.paused = PAUSES[kind]
        if undo is not None:
            await undo_where_done(undo, replies, timeout)
        if replies.late:
            raise late_error(kind, timeout)
        if not replies.refused:
            return next(iter(replies.by_replica.values()))
        replica = replies.refused[0]
        reply = replies.by_replica[replica]
        if len(self.replicas) == 1:
            return reply
        return ControlReply(reply.id, False, f"Replica {replica.index}: {reply.message}", reply.data)

    async def control_each(
        self, kind: str, timeout: float = 60.0, args: dict[str, Any] | None = None
    ) -> dict[int, ControlReply]:
        """Asks like `control`. Returns the replies by replica, without those of replicas that end meanwhile."""
        replies = await ask_each(self._asked(), kind, args or {}, timeout)
        if replies.late:
            raise late_error(kind, timeout)
        return {replica.index: reply for replica, reply in replies.by_replica.items()}

    def _asked(self) -> list[Replica]:
        """Returns the replicas that control calls go to. Raises RequestError without any."""
        asked = self.serving_replicas
        if self.status is ServerStatus.UNHEALTHY or not asked:
            raise RequestError(self.status_message, 503)
        return asked

    async def internal_states(self) -> list[dict[str, Any]]:
        """Returns the state of each replica's scheduler, or why it has failed. Raises RequestError."""
        replies = await self.control_each("internal_state")
        return [
            {"dp_rank": replica.index}
            | (replies[replica.index].data if replica.index in replies else {"failure": replica.failure})
            for replica in self.replicas
        ]

    async def ids_with_media(self, text: str, media: Sequence[MediaSource]) -> Ids:
        """Returns the token ids of a rendered prompt with these images and videos. Raises RequestError."""
        ids, items = await self.preparer.placed(text, media)
        if self.media is not None:
            self.media.files.release(items)
        return ids

    # --- sending ------------------------------------------------------------------------------------------------------

    def _refuse_when_down(self) -> None:
        if self.status is ServerStatus.SHUTTING_DOWN:
            raise RequestError("The server is shutting down.", 503)
        if self.status is ServerStatus.UNHEALTHY:
            raise RequestError(f"The server is not healthy: {self.status_message}", 503)

    async def _admit(self) -> None:
        """Returns once no update holds requests back and the engine's memory and weights can serve them, perhaps after
        waking it. Raises RequestError 503."""
        while True:
            if self.weights.under_way is not None:
                await self.weights.wait()
            if self.sleeper is not None:
                await self.sleeper.admit()
            elif not self.state.serves:
                raise RequestError(self.state.problem, 503, retry_after=RETRY_AFTER_S)
            if self.weights.under_way is None:  # none has begun during a wake
                return

    def replica_for(self, ids: Sequence[int] | Ids, wanted: int | None) -> int:
        """Returns the index of the replica for a sequence: `wanted`, as long as that one serves."""
        if wanted is not None and self.replicas[wanted].failure is None:
            return wanted
        return self._choose(ids, None, (), None).index

    def _choose(
        self, ids: Sequence[int] | Ids, namespace: str | None, media: Sequence[MediaItem], session: bytes | None
    ) -> Replica:
        serving = self.serving_replicas
        if not serving:
            raise RequestError(f"The server is not healthy: {self.status_message}", 503)
        loads = [replica.load for replica in serving]
        return self.replicas[self._router.choose(loads, ids, namespace, media, session)]

    async def _send_sequences(self, stream: GenerationStream, wanted: int | None) -> None:
        """Sends the sequences of a call. wanted: the replica; None: the router chooses. Raises RequestError if no
        replica serves any more, ipc.ChannelFull, or the error for a value that cannot be encoded."""
        num_tokens = 0
        for request in stream.requests:
            if self._sequences.find(request, stream) is None:  # it was aborted meanwhile
                continue
            replica = self._replica_of(request, wanted)
            if request.media and self._transfers is not None:
                await self._transfers.send_to_machines(replica, request.media)
            sequence = self._sequences.find(request, stream)
            if sequence is None:
                continue
            self._send(request, sequence, replica)
            num_tokens += len(request.input_ids) + SEQUENCE_TOKENS + request.parameter_bytes // BYTES_A_TOKEN
            if num_tokens >= SEND_BATCH_TOKENS:
                num_tokens = 0
                await asyncio.sleep(0)

    def _replica_of(self, request: TokenizedGenerateReq, wanted: int | None) -> Replica:
        if wanted is not None:
            return self.replicas[wanted]
        return self._choose(request.input_ids, request.cache_namespace, request.media, request.session)

    def _send(self, request: TokenizedGenerateReq, sequence: ActiveSequence, replica: Replica) -> None:
        ids = request.input_ids
        replica.refuse_when_lost()
        replica.outbox.try_send(request)
        sequence.sent_time = time.monotonic()
        sequence.replica = replica
        sequence.num_tokens = len(ids)
        replica.load.num_requests += 1
        replica.load.num_tokens += len(ids)

    def _abort_sequences(self, rids: Iterable[str]) -> None:
        """Aborts sequences. Those that no scheduler knows yet end at once."""
        for rid in rids:
            sequence = self._sequences[rid]
            if sequence.replica is not None:
                sequence.replica.aborts[rid] = None
                continue
            self._sequences.remove(rid, sequence)
            request = sequence.stream.requests[sequence.index]
            finish = FinishReason("abort", message="Aborted", status_code=CLIENT_CLOSED_REQUEST)
            meta = TokenMeta(len(request.input_ids), 0)
            sequence.stream.push(GenerateOutput(sequence.index, "", [], finish, meta, None))
        self._send_endings()

    def _send_endings(self) -> None:
        """Tells each replica what has ended, and retries later if its channel is full."""
        full = [replica for replica in self.replicas if not replica.send_endings()]
        if full and self._endings_retry is None:
            self._endings_retry = asyncio.get_running_loop().call_later(ENDINGS_RETRY_S, self._retry_endings)

    def _retry_endings(self) -> None:
        self._endings_retry = None
        self._send_endings()

    def _on_close(self, stream: GenerationStream) -> None:
        """Aborts what still runs, because the reader is done or gone."""
        self._logprobs.release(stream)
        for request in stream.requests:
            sequence = self._sequences.find(request, stream)
            if sequence is None:
                continue
            if sequence.replica is not None:
                sequence.replica.aborts[request.rid] = None
            else:
                self._sequences.remove(request.rid, sequence)
        self._send_endings()

    # --- receiving ----------------------------------------------------------------------------------------------------

    def _receive(self, replica: Replica, message: DetokenizerOutput) -> None:
        self.last_receive_time = time.monotonic()
        if isinstance(message, BatchStrOut):
            self._deliver(replica, message)
        elif isinstance(message, ControlReply):
            reply = replica.replies.get(message.id)
            if reply is not None and not reply.done():
                reply.set_result(message)
        elif isinstance(message, SchedulerStats):
            replica.stats = message
            if self.metrics is not None:
                self.metrics.stats[replica.index] = message
        elif isinstance(message, SchedulerReady):
            replica.info = message.info
            if (size := message.info.get("max_total_num_tokens")) is not None:
                self._router.set_cache_size(replica.index, size)

    def _deliver(self, replica: Replica, batch: BatchStrOut) -> None:
        now = time.monotonic()
        sequences, log_probabilities = self._sequences, batch.logprobs
        drafts = draft_counts(batch)
        for i, rid in enumerate(batch.rids):
            sequence = sequences.get(rid)
            if sequence is None or sequence.replica is not replica:  # its replica was lost
                continue
            finish, ids, stream = batch.finish[i], batch.new_ids[i], sequence.stream
            meta = sequence.meta = batch.meta[i] or sequence.meta.after(len(ids))
            if drafts and drafts[i].steps:
                meta.drafts = drafts[i]
            if ids:
                sequence.num_tokens += len(ids)
                replica.load.num_tokens += len(ids)
                self._observe(sequence, len(ids), meta.first_token_time, now)
            if self._log is not None and sequence.num_kept < self._log.kept_chars:
                sequence.kept_text.append(batch.new_text[i])
                sequence.num_kept += len(batch.new_text[i])
            if finish is not None:
                self._finish(rid, sequence, finish, meta, now)
            hidden = batch.hidden.get(rid, b"")
            text, logprobs = batch.new_text[i], log_probabilities[i]
            if logprobs is not None and (error := self._logprobs.receive(stream, logprobs.num_values)) is not None:
                stream.fail(error)
            if sequence.prompt_logprobs is not None and logprobs is not None:
                sequence.prompt_logprobs.append(logprobs)
                logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
            if logprobs is not None and not (ids or finish):  # the rest of the prompt's comes
                sequence.prompt_logprobs = logprobs
                continue
            stream.push(GenerateOutput(sequence.index, text, ids, finish, meta, logprobs, hidden))

    def _finish(self, rid: str, sequence: ActiveSequence, finish: FinishReason, meta: TokenMeta, now: float) -> None:
        self._sequences.remove(rid, sequence)
        ended = EndedRequest(
            request=sequence.stream.requests[sequence.index],
            meta=meta,
            finish=finish,
            text="".join(sequence.kept_text),
            trace_parent=sequence.trace,
            created_time=sequence.stream.created_time,
            sent_time=sequence.sent_time,
            first_token_time=sequence.first_time,
            end_time=now,
        )
        for observer in (self.metrics, self._log, self._tracer):
            if observer is not None:
                observer.finished(ended)

    def _observe(self, sequence: ActiveSequence, num_tokens: int, first_token_time: float, now: float) -> None:
        """Counts tokens that came. `first_token_time`: when a whole answer, which these tokens are, began; 0 for
        streamed tokens."""
        num_later = num_tokens  # tokens after the first, at known times
        if is_first := not sequence.first_time:
            sequence.first_time = sequence.last_time = first_token_time or now
            num_later = num_tokens - 1 if first_token_time else 0
        metrics = self.metrics
        if metrics is not None:
            metrics.generation_tokens += num_tokens
            if is_first:
                metrics.first_token.observe(sequence.first_time - sequence.stream.created_time)
            if num_later:
                metrics.inter_token.observe((now - sequence.last_time) / num_later, num_later)
        sequence.last_time = now
