"""The scheduler of one rank: decides what runs next and owns every request between its arrival and its last token.

Steps overlap: step N+1 is chosen and launched before the tokens of step N are read back. That works because choosing
needs lengths, not token values (the device keeps the last token of every request), and because the device runs steps in
order, so a cache slot may be reused as soon as the step that last uses it has been launched. With a pipeline there are
as many steps in flight as stages, and the running requests are divided among them (`RunningBatch`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Set
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang.srt.constrained.mask_filler import MaskFiller
from sglang.srt.distributed import parallel_state
from sglang.srt.drafts.depth import Depth
from sglang.srt.managers.scheduler.adapter_table import AdapterTable
from sglang.srt.managers.scheduler.batch_builder import build_step, vocab_mask
from sglang.srt.managers.scheduler.counters import CHECKED, Counters
from sglang.srt.managers.scheduler.intake import Intake, RequestTotals
from sglang.srt.managers.scheduler.output import StopChecker, append_tokens, output_messages, rejected_token
from sglang.srt.managers.scheduler.prompt_choice import PromptChoice
from sglang.srt.managers.scheduler.queue_order import QueueOrder
from sglang.srt.managers.scheduler.retraction import preempt, retract_until_it_fits
from sglang.srt.managers.scheduler.running_batch import RunningBatch
from sglang.srt.managers.scheduler.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler.schedule_policy import (
    DecodeInterval,
    NewTokenRatio,
    Priorities,
    leaves_room_for_prompts,
)
from sglang.srt.managers.scheduler.scheduler_stats import Load, StatsLogger
from sglang.srt.managers.scheduler.stale_steps import redo_stale
from sglang.srt.managers.scheduler.stop_tokens import StopTokens
from sglang.srt.managers.wire.io_struct import (
    DEFAULT_VERSION,
    AbortReq,
    BatchTokenIDOut,
    FinishReason,
    TokenizedGenerateReq,
)
from sglang.srt.mem_cache.host_tier import HostTier
from sglang.srt.mem_cache.kv_table import KVTable, Lengths
from sglang.srt.sampling.sampling_params import NO_TOKEN
from sglang.srt.server_args import ServerArgs

if TYPE_CHECKING:
    from sglang.srt.configs.storage_backend import StorageConfig
    from sglang.srt.constrained.grammar_manager import PendingGrammar
    from sglang.srt.mem_cache.storage.engine import StorageEngine
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_NAN_LOGITS = FinishReason(
    "abort",
    message="The model's logits for the next token are NaN, or no token is allowed. If other prompts fail as well, the "
    "weights or the kernels are at fault: other kernels are chosen with --attention-backend and --moe-runner-backend.",
    status_code=500,
)


class Scheduler:
    """Pure scheduling over a model runner; `scheduler_process` has the process and its sockets."""

    def __init__(
        self,
        args: ServerArgs,
        runner: ModelRunner,
        stop_checker: StopChecker,
        depth: Depth | None = None,
        totals: RequestTotals | None = None,
    ) -> None:
        """depth: chooses how many draft tokens a step verifies; None: all of them. totals: shared with other
        schedulers of this process; None: there are none."""
        self.args, self.runner, self.plan, self.depth = args, runner, runner.plan, depth
        self.stop_checker = stop_checker
        caches_prefixes = self.plan.caches_prefixes and not args.disable_radix_cache
        self.kv = KVTable(self.plan.pool_sizes, caches_prefixes, runner.next_tokens_read)
        self.host_tier: HostTier | None = None
        """Cached prefixes in main memory."""
        if caches_prefixes and self.plan.host_cache is not None and runner.copies is not None:
            agree = parallel_state.all_reduce_min
            self.host_tier = HostTier(self.kv, self.plan.host_cache, runner.copies, agree, runner.storage)
        self.ratio = NewTokenRatio(args.schedule_conservativeness)
        self.priorities = Priorities.from_args(args)
        self.order = QueueOrder(args.schedule_policy, self.priorities, self.kv)
        self.steps_in_flight = args.steps_in_flight
        """Steps that are launched before the oldest one is read back: one on every stage. That hides all work of the
        host; more would only delay the news that a request has ended."""

        self.waiting = self.order.new_queue()
        self.chunked: list[Req] = []
        """Requests whose prompts are partly computed; they go first in the next prefill."""
        self.compiling: dict[str, tuple[Req, PendingGrammar]] = {}
        """Requests that wait for their grammar, by id in the order of arrival, outside the queue."""
        counters = Counters(self.plan.pool_sizes.max_requests, runner.tokens_per_step)
        turns = max(1, self.steps_in_flight)
        self.running = RunningBatch(counters, runner.tokens_per_step, runner.lookahead_slots, turns)
        self.masks = MaskFiller()
        self.adapters: AdapterTable | None = None
        """LoRA adapters; None: the server takes none."""
        if self.plan.adapters is not None:
            self.adapters = AdapterTable(
                runner, args.lora_eviction_policy, args.max_loaded_loras, args.lora_drain_wait_threshold
            )
        self.choice = PromptChoice(
            runner, self.kv, self.host_tier, self.running, self.waiting, self.order, self.ratio, args.attn_dp_size,
            self.adapters,
        )  # fmt: skip
        self.media = self.choice.media
        self.in_flight: deque[ScheduleBatch] = deque()
        """Launched and not read back, the oldest first."""
        self.launching: ScheduleBatch | None = None
        """Being launched, while steps before it may be read back."""
        self.reqs: dict[str, Req] = {}
        self.totals, self.stops = totals or RequestTotals(), StopTokens(self.plan.model.vocab_size)
        self.intake = Intake(args.max_queued_requests, runner, self.kv, self.media, self.reqs, self.totals, counters)
        self.held_tokens = 0
        """Of these, with their output so far."""
        self.outbox: list[BatchTokenIDOut] = []
        self.paused = False
        self.weights_key = ""
        """Part of the prefix cache's keys since the weights were replaced; "": they are those of start-up."""
        self.weight_version: str | None = None if args.weight_version == DEFAULT_VERSION else args.weight_version
        """Version that replies name; None: the default."""
        self.interval = DecodeInterval(self.plan.decode_interval, max(1, self.steps_in_flight))
        self._prompts_turn = False
        """True if it is the prompts' turn: where chunks are too small for both, prompts and tokens that decode take
        turns."""
        self.stats = StatsLogger(
            args.decode_log_interval, self.load, args.speculative_algorithm, self.host_tiers, runner.launches
        )

    # --- the step ----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Launches the next batch, then reads back batches until at most `steps_in_flight` are left."""
        self.end_copies()
        self.interval.begin(len(self.running))
        batch = None if self.paused else self.pick()
        if batch is not None:
            self.launch(batch)
        idles = batch is None and not self.in_flight
        self.read_back(batch, 0 if batch is None else self.steps_in_flight)
        if idles:
            self.wait_for_copies()

    def end_copies(self) -> None:
        """Finishes completed copies of cached prefixes, and requeues the requests of steps that read what a failed load
        did not bring."""
        if self.host_tier is not None:
            self.host_tier.end_copies()
            redo_stale(self)

    def wait_for_copies(self) -> None:
        """Sleeps a moment if cached prefixes are being copied."""
        if self.host_tier is not None:
            self.host_tier.wait()

    @property
    def copying(self) -> bool:
        """Returns whether cached prefixes are being copied."""
        return self.host_tier is not None and self.host_tier.busy

    def read_back(self, batch: ScheduleBatch | None, ahead: int) -> None:
        """Starts pending copies and reads back all but the last `ahead` batches, after the launch of `batch`; None:
        nothing was launched."""
        if self.host_tier is not None:
            prompts = None if batch is None else batch.step.prompts
            self.host_tier.launch(bool(self.running.reqs), 0 if prompts is None else len(prompts.input_ids))
        while len(self.in_flight) > ahead:
            self.process(self.in_flight.popleft())

    def launch(self, batch: ScheduleBatch) -> None:
        """Launches a batch. A mask (of a grammar, or of thoughts that must end) depends on every token before it: it is
        filled while the forward pass runs, and sampling waits for it."""
        self.launching = batch
        forward = self.runner.forward(batch.step)
        mask = None
        if batch.needs_mask:
            self.sync(set(batch.limited))
            mask = vocab_mask(batch, self.plan.model.vocab_size, self.masks)
        batch.result = self.runner.sample(forward, mask)
        self.launching = None
        self.in_flight.append(batch)

    def pick(self) -> ScheduleBatch | None:
        """Returns the next batch, None if there is nothing to do. Prefill goes first unless its interval says
        otherwise, and the running requests decode in the same step: prefill turns waiting requests into running ones,
        and full decode steps are the most efficient."""
        self.running.take_turns()
        batch = None if self.interval.prompts_wait else self.pick_prefill()
        if batch is None or not self._prompts_turn:
            batch = batch or self.pick_decode()
            self.running.next_microbatch()
        if batch is not None and self.host_tier is not None and self.host_tier.layered:
            batch.loads = self.host_tier.start_layers()
            batch.step.loads = [copy.handle.layers for copy in batch.loads if copy.handle and copy.handle.layers]
        if batch is None and not self.in_flight:
            self._free_chunks()
        return batch

    def sync(self, reqs: Set[Req] | None = None) -> None:
        """Reads back steps in flight, so that the host knows every token, or every token of `reqs`."""
        count = len(self.in_flight)
        if reqs is not None:
            behind = (i for i, batch in enumerate(reversed(self.in_flight)) if not reqs.isdisjoint(batch.sampled))
            count -= next(behind, count)
        for _ in range(count):
            self.process(self.in_flight.popleft())

    @property
    def idle(self) -> bool:
        """Returns whether nothing will change until a message arrives."""
        no_work = not self.waiting and not self.chunked and not self.running.reqs
        return not self.in_flight and not self.copying and (no_work or self.paused)

    @property
    def num_queued(self) -> int:
        """Returns the requests that wait, for their admission or for their grammar."""
        return len(self.waiting) + len(self.compiling)

    def load(self) -> Load:
        """Returns the present load."""
        return Load(len(self.running), self.num_queued, self.kv.used_size(), self.kv.size)

    # --- choosing ----------------------------------------------------------------------------------------------------

    def pick_prefill(self) -> ScheduleBatch | None:
        """Returns a batch with prompts and the tokens of running requests; None if no prompt can go on or enter."""
        was_prompts_turn, self._prompts_turn = self._prompts_turn, False
        if self.priorities is not None and self.waiting and not self.chunked:
            preempt(self, self.priorities)
        if not self.chunked and (not self.waiting or not self.kv.num_free_rows()):
            return None
        self.running.drop_finished()
        # Decoding in the same step reads the weights only once.
        widths = self.running.widths(1)
        num_decodes = int(widths.sum())
        if num_decodes and not leaves_room_for_prompts(self.choice.chunk, self.kv.page_size, num_decodes):
            if was_prompts_turn:
                return None
            num_decodes, self._prompts_turn = 0, True
        chosen = self.choice.admit(self.choice.budget(num_decodes), self.chunked, bool(self.in_flight))
        if not chosen:
            return None
        if not num_decodes or not self.can_grow(widths, sum(n + self.running.lookahead_slots for _, n in chosen)):
            widths = np.zeros_like(widths)
        batch = build_step(self.kv, self.running, widths, chosen)
        self.interval.launched_prompts()
        self.stats.prefill_launched(chosen)
        for req, _ in chosen:
            self.kv.commit(req)
            if self.host_tier is not None:
                self.host_tier.committed(req)
            self._keep(req)
            self.media.computed(req)
        computed = {r for r, _ in chosen if r.kv_len == len(r.tokens)}
        self.chunked = [r for r in dict.fromkeys([*(r for r, _ in chosen), *self.chunked]) if r not in computed]
        self.running.add([r for r, _ in chosen if r in computed])
        return batch

    def _keep(self, req: Req) -> None:
        """Keeps a prompt's prefix before others if the request asks for it: in the main memory tier, if there is
        one."""
        if not req.keep_until or req.node is None or not req.node.depth:
            return
        if self.host_tier is not None:
            self.host_tier.keep(req.node, req.keep_until)
        else:
            self.kv.tree.keep(req.node, req.keep_until)

    def _expire(self, now: float) -> None:
        self.kv.tree.expire(now)
        if self.host_tier is not None:
            self.host_tier.host.tree.expire(now)

    def pick_decode(self) -> ScheduleBatch | None:
        """Returns a batch of decoding requests; None if none can decode now."""
        self.running.drop_finished()
        width = self._width()
        if self.running.reqs and not self.can_grow(self.running.widths(width)):
            self.sync()
            self.running.drop_finished()
            if self.host_tier is not None:  # entries that saves are reading cannot be evicted
                self.host_tier.drain(loads=False)
            retract_until_it_fits(self, width)
        if not self.running.reqs:
            return None
        batch = build_step(self.kv, self.running, self.running.widths(width), width=width)
        if batch is not None:
            self.ratio.step()
            self.stats.decode_launched(len(batch.sampled), self.runner.decodes_in_graph(len(batch.sampled)))
        return batch

    def _width(self) -> int:
        """Returns how many tokens each request may bring to the next step."""
        if self.depth is None:
            return self.running.tokens_per_step
        return self.depth.next_width(len(self.running.microbatch_reqs))

    # --- memory ------------------------------------------------------------------------------------------------------

    def can_grow(self, widths: Lengths, also: int = 0) -> bool:
        """Returns whether there is room for a step with `widths` tokens of each running request, and for `also` tokens
        of prompts."""
        self.kv.leave_windows(self.running.slots, self.running.certain_lens)
        return self.kv.can_grow(self.running.reserved_lens, self.running.reserved_by(widths), also)

    def _free_chunks(self) -> None:
        """Resolves a deadlock of unfinished prompts that together fill the cache: if nothing else runs and the first
        one finds no room, the last one goes back to the queue."""
        if (
            len(self.chunked) < 2
            or self.running.reqs
            or self.choice.budget(0).take(self.chunked[0], self.chunked[0].kv_len)
        ):
            return
        last = self.chunked.pop()
        self.requeue(last)
        self.ratio.retracted()
        self.stats.retracted(last)

    def requeue(self, req: Req) -> None:
        """Gives up a request's slots and puts it at the head of the queue."""
        self._release(req)
        req.num_retractions += 1
        req.enter_weights(self.weights_key)
        req.queued_time = time.monotonic()
        self.waiting.appendleft(req)

    def _release(self, req: Req, keep: bool = True) -> None:
        self.runner.sampling_table.clear(req.slot)
        self.media.end(req)
        req.drop_draft_tokens()
        if self.host_tier is not None and keep:
            self.kv.commit(req)
            self.host_tier.committed(req)
        elif self.host_tier is not None:
            self.host_tier.discard(req.cache_keys(req.kv_len), req.namespace)
        self.kv.release(req, keep)

    # --- results -----------------------------------------------------------------------------------------------------

    def process(self, batch: ScheduleBatch) -> None:
        """Appends the sampled tokens, ends requests, and queues the messages."""
        if self.host_tier is not None and batch.loads:
            self.host_tier.finish(batch.loads)
            redo_stale(self, batch)
        report, interval = list[Req](), self.args.stream_interval
        sampled = batch.read(self.running.counters, self.stops)
        streamed = append_tokens(batch.sampled, sampled, interval, report)
        self.held_tokens += streamed.num_appended
        for i in np.flatnonzero(sampled.handling == CHECKED).tolist():
            req = batch.sampled[i]
            if req in batch.stale:
                continue
            reason = self._take_all(batch, i, sampled.ids[i])
            if reason is not None:
                self.end(req, reason, report, keep=reason is not _NAN_LOGITS)
                continue
            due = req.has_many_logprobs or (req.stream and req.num_unsent >= interval)
            if due and req.may_continue:
                report.append(req)
            req.decide_handling(interval)
        if batch.prompt_logprob_spans:
            report += batch.with_many_prompt_logprobs()
        self.outbox += output_messages(report, streamed)
        self.stats.processed(int(sampled.counts.sum()))
        if batch.step.widths is not None:
            self.stats.drafts.verified(batch.step.widths, sampled.counts)
            if self.depth is not None:
                self.depth.observe(batch.step.widths.tolist(), sampled.counts.tolist())
        if self.depth is not None and batch.result is not None and batch.result.confidence is not None:
            self.depth.expect(batch.result.confidence.tolist())
            self.stats.drafts.confidence_cuts = self.depth.confidence_cuts

    def _take_all(self, batch: ScheduleBatch, i: int, ids: list[int]) -> FinishReason | None:
        """Adds the tokens of `batch.sampled[i]` up to the one that ends it. Returns the reason to end it, if any."""
        for index, token in enumerate(ids):
            reason = self._take(batch, i, index, token)
            if reason is not None:
                return reason
        return None

    def _take(self, batch: ScheduleBatch, i: int, index: int, token: int) -> FinishReason | None:
        """Adds the token at `index` of those of `batch.sampled[i]` to the request and to everything that follows its
        output. Returns the reason to end it, if any."""
        req = batch.sampled[i]
        if req.finish is not None:
            return None
        if token == NO_TOKEN:
            logger.error("Request %s ended: its logits after %d tokens are NaN", req.rid, len(req.tokens))
            return _NAN_LOGITS
        if req.max_output <= 0:  # max_new_tokens is 0: only the prompt was wanted
            return FinishReason("length", length=0)
        req.output.append(token)
        req.num_unsent += 1
        self.held_tokens += 1
        if not (req.stream or req.first_token_time):
            req.first_token_time = time.monotonic()
        if req.return_logprob and req.pending_finish is None:
            batch.file_logprobs(i, index)
        if req.thoughts is not None:
            req.thoughts.push(token)
        if req.grammar is not None and not req.grammar.accept(token):
            return rejected_token(req.grammar)
        return self.stop_checker.finish_reason(req)

    def end(self, req: Req, reason: FinishReason, report: list[Req] | None = None, keep: bool = True) -> None:
        """Ends a request wherever it is and frees its slots at once. Its computed tokens stay cached if `keep`."""
        if not req.slot:
            self._dequeue({req})
        self._finish(req, reason, keep)
        if report is None:
            self.outbox += output_messages([req])
        else:
            report.append(req)

    def _finish(self, req: Req, reason: FinishReason, keep: bool = True) -> None:
        """Ends a request that is not in the queue."""
        req.finish, req.plain = req.pending_finish or reason, False
        del self.reqs[req.rid]
        self.held_tokens -= len(req.tokens)
        self.totals.prompts.give_back(req.prompt, req.media is not None)
        self.stops.remove(req.stop_ids)
        self.totals.remove(req)
        req.handling = CHECKED
        self.media.end(req)
        if req in self.chunked:
            self.chunked.remove(req)
        if req.slot:
            self._release(req, keep)

    def _dequeue(self, reqs: set[Req]) -> None:
        """Takes requests out of the queue, or from those that wait for a grammar, in one pass."""
        self.waiting.remove([r for r in reqs if self.compiling.pop(r.rid, None) is None])

    def end_named(self, rid: str, reason: FinishReason) -> None:
        """Ends a request, unless it has ended already."""
        if rid in self.reqs:
            self.end(self.reqs[rid], reason)

    def note_slow_mask(self, rid: str, milliseconds: int) -> None:
        """Notes how long a request's grammar takes for a token, unless the request has ended."""
        if rid in self.reqs:
            self.reqs[rid].set_mask_ms(milliseconds)

    # --- requests ----------------------------------------------------------------------------------------------------

    def add(self, msg: TokenizedGenerateReq, seed: int, stop_ids: frozenset[int]) -> Req | None:
        """Queues a request and returns it; or refuses it with a message to the client and returns None."""
        self._expire(msg.received)
        req, refusal = self.intake.request_of(msg, seed, stop_ids, self.num_queued)
        if msg.adapter is not None and (self.adapters is None or msg.adapter not in self.adapters):
            refusal = FinishReason("abort", message="The LoRA adapter has been unloaded.", status_code=404)
        if refusal is not None:
            self.totals.prompts.give_back(req.prompt, req.media is not None)
            self.refuse(req, refusal)
            return None
        if self.weight_version is not None:
            req.weight_versions = [(self.weight_version, 0)]
        req.enter_weights(self.weights_key)
        self.reqs[req.rid] = req
        self.held_tokens += req.prompt_len
        self.stops.add(req.stop_ids)
        self.totals.add(req)
        self.waiting.append(req)
        self.order.enqueued(req)
        if self.host_tier is not None:
            self.host_tier.queued(req)
        return req

    def refuse(self, req: Req, reason: FinishReason) -> None:
        """Answers a request that was never queued."""
        req.finish = reason
        self.outbox += output_messages([req])

    def hold(self, req: Req, pending: PendingGrammar) -> None:
        """Takes a request that was just added out of the queue until its grammar is compiled."""
        self.waiting.remove([req])
        self.compiling[req.rid] = (req, pending)

    def compiling_of(self, rid: str) -> tuple[Req, PendingGrammar] | None:
        """Returns a request that waits for its grammar, and the grammar; None if none with this id does."""
        return self.compiling.get(rid)

    def oldest_pending(self) -> PendingGrammar | None:
        """Returns the grammar that a request has waited for longest; None without any."""
        return next((pending for _, pending in self.compiling.values()), None)

    @property
    def num_compiling(self) -> int:
        """Number of requests that wait for their grammar."""
        return len(self.compiling)

    def release_hold(self, req: Req) -> None:
        """Queues a request whose grammar is ready."""
        del self.compiling[req.rid]
        self.waiting.append(req)

    def abort(self, msg: AbortReq) -> None:
        """Ends the named request or all; ignores unknown ids, as these may have ended already."""
        rids = list(self.reqs) if msg.abort_all else dict.fromkeys(msg.rids)
        targets = [self.reqs[rid] for rid in rids if rid in self.reqs]
        if not targets:
            return
        self._dequeue({req for req in targets if not req.slot})
        reason = FinishReason("abort", message=msg.message, status_code=msg.status_code)
        for req in targets:
            self._finish(req, reason)
        self.outbox += output_messages(targets)

    def uses_adapter(self, adapter: str) -> bool:
        """Returns whether a request that runs or waits has this adapter."""
        return any(req.adapter == adapter for req in self.reqs.values())

    def pause(self, mode: str) -> None:
        """Stops choosing steps. `abort` ends every request, `retract` sends running ones back to the queue, `in_place`
        leaves them."""
        self.paused = True
        if mode == "abort":
            self.abort(AbortReq(abort_all=True))
        elif mode == "retract":
            self.sync()
            self.running.drop_finished()
            retracted = [*self.running.reqs, *self.chunked]
            self.chunked = []
            self.running.clear()
            for req in reversed(retracted):
                self.requeue(req)

    def change_weights(self, key: str | None, version: str | None) -> None:
        """Keeps cached prefixes of other weights from requests that begin with new ones; those that run go on under the
        old key. key: of the new weights; None: they have not changed. version: what replies name from now on; None: the
        same as before."""
        self.sync()
        if key is not None:
            self.weights_key = key
            for req in self.reqs.values():
                if not req.slot:
                    req.enter_weights(key)
                    req.node = None
            if self.media.features is not None:
                self.media.features.clear()
        if version is None:
            return
        for req in self.reqs.values():
            before = req.weight_versions or [(self.weight_version or DEFAULT_VERSION, 0)]
            kept = [span for span in before if span[1] < len(req.output)]
            req.weight_versions = [*kept, (version, len(req.output))]
            req.meta_changed = True
        self.weight_version = version

    def flush_cache(self, keeps_host: bool = False) -> bool:
        """Empties the prefix cache. Returns False while requests run or, except during a pause, wait. keeps_host: what
        main memory has, and is to get, stays there."""
        self.sync()
        if any(req.slot for req in self.reqs.values()) or (self.reqs and not self.paused):
            return False
        if self.host_tier is not None:
            if keeps_host:
                self.host_tier.leave_device()
            else:
                self.host_tier.reset()
            redo_stale(self)
        self.kv.reset()
        if self.media.features is not None:
            self.media.features.clear()
        return True

    @property
    def host_tiers(self) -> list[HostTier]:
        """Returns the host tier in a list; an empty list if there is none."""
        return [] if self.host_tier is None else [self.host_tier]

    def attach_storage(self, config: StorageConfig, storage: StorageEngine) -> None:
        """Attaches a store to the tier in main memory."""
        for tier in self.host_tiers:
            tier.attach(config, storage)

    @property
    def num_free_rows(self) -> int:
        """Returns how many more requests may run."""
        return self.kv.num_free_rows()

    @property
    def num_slots(self) -> int:
        """Returns how many tokens the cache holds."""
        return self.kv.size

    def check_memory(self) -> dict[str, Any]:
        """Returns slot counts that add up to the pool: free + cached + held by requests. For leak checks and
        `/server_info`."""
        page = self.plan.page_size
        with_slots = (r for r in self.reqs.values() if r.slot)  # those that wait hold nothing, and may be many
        private = sum(-(-max(r.kv_len, r.reserved_len) // page) * page - r.num_cached for r in with_slots)
        usage = self.kv.usage()
        windows = [{"window": window.window, **window.usage()} for window in self.kv.windows]
        memory: dict[str, Any] = {**usage, "held": private, "windows": windows}
        if self.kv.checkpoints is not None:
            memory["checkpoints"] = self.kv.checkpoints.usage()
        if self.host_tier is not None:
            memory |= {"loading": self.host_tier.loading_size(), "host": self.host_tier.usage()}
        if self.media.features is not None:
            memory["media"] = self.media.features.usage()
        return memory
