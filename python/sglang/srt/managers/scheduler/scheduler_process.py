"""The scheduler's process: receives messages, runs steps, and sends results.

All ranks run this loop over the same messages: the leader reads the socket and broadcasts the raw bytes, so all ranks
take the same decisions. Decisions that depend on a clock are the leader's, which broadcasts them before the messages
(`leader`). Only the leader answers: the first rank, and with a pipeline the first one of its last stage.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import msgspec

from sglang.srt.constrained.compile_client import CompileClient
from sglang.srt.constrained.compile_process import setup_for
from sglang.srt.constrained.grammar_backends import make_backend
from sglang.srt.constrained.grammar_manager import GrammarManager
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.nodes import rendezvous
from sglang.srt.drafts.ngram.drafter import NgramDrafter
from sglang.srt.environ import envs
from sglang.srt.kernels import late_compiles
from sglang.srt.kernels.launch import step_downs
from sglang.srt.layers.moe.shared_bank import join_bank
from sglang.srt.managers.child import READY, ChildPipe
from sglang.srt.managers.compile_ahead.start import compiling_beside
from sglang.srt.managers.scheduler import storage_control
from sglang.srt.managers.scheduler.adapter_table import AdapterTable
from sglang.srt.managers.scheduler.attention_groups import AttentionGroups
from sglang.srt.managers.scheduler.grammar_queue import GrammarQueue
from sglang.srt.managers.scheduler.leader import (
    DrainSlots,
    EndReq,
    GrammarVerified,
    Heartbeat,
    LeaderDecision,
    SlowMask,
)
from sglang.srt.managers.scheduler.memory_control import BUSY, MemoryControl
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.profiler import ProfileError, Profiler
from sglang.srt.managers.scheduler.received_arrays import ReceivedArrays
from sglang.srt.managers.scheduler.replicas import Replicas
from sglang.srt.managers.scheduler.request_timeouts import CHECK_INTERVAL_S, RequestTimeouts
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_depth, create_plan, load_runner
from sglang.srt.managers.scheduler.scheduler_stats import Load
from sglang.srt.managers.scheduler.weight_updates import CALLS, WeightUpdates
from sglang.srt.managers.watchdog import Watchdog, heartbeat_seconds
from sglang.srt.managers.wire import ipc, token_ids
from sglang.srt.managers.wire.io_struct import (
    AbortReq,
    ArrayPart,
    ArraysReleased,
    ControlReply,
    ControlReq,
    FinishReason,
    SchedulerInput,
    SchedulerOutput,
    SchedulerReady,
    TokenizedGenerateReq,
)
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plan.plan import Plan
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.engine_state import WEIGHTS
from sglang.srt.utils.free_memory import release_free_memory
from sglang.srt.utils.hf_tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

IDLE_POLL_S = 60.0
GRAMMAR_POLL_S = 0.002
PAGE_LOCK_LIMIT_S = 30.0
"""Seconds that start-up waits until main memory for prefixes is page-locked; if that takes longer, it goes on in the
background."""
COLLECTIONS = (20_000, 10, 1000)
"""Thresholds of Python's garbage collection. Steps leave no cycles, and a collection of everything scans the prefix
tree: 0.3 s with 100,000 nodes, in the middle of a step. With Python's thresholds it comes each time that a quarter of
the tree is new."""
RECV_LIMIT = 1024
"""Messages taken in one step; the rest waits in the socket."""
RECV_BYTES = 1 << 21
"""Bytes of messages behind which a step takes no further one: half a million prompt tokens, which cost about 5 ms here
and as much on their way to the other ranks."""


class SchedulerProcess:
    """Connects a Scheduler with the other processes."""

    def __init__(
        self,
        args: ServerArgs,
        runner: ModelRunner,
        tokenizer: Tokenizer | None,
        ports: ipc.Ports,
        grammars: GrammarManager,
    ) -> None:
        self.args, self.runner = args, runner
        self.model = runner.plan.model
        self.leader = parallel_state.is_leader()
        self.decisions: list[LeaderDecision] = []
        """Decisions of the leader, taken since the last messages."""
        decoder = tokenizer.text_decoder() if tokenizer is not None and self.leader else None
        alone = parallel_state.num_ranks() == 1
        stop_checker = StopChecker(decoder, None if alone else self.decisions.append)
        create = AttentionGroups if runner.groups.dp.size > 1 else Scheduler
        self.scheduler: Scheduler | AttentionGroups = create(args, runner, stop_checker, create_depth(args, runner))
        self.memory = MemoryControl(self.scheduler, runner)
        self.state = self.memory.state
        """Awake, asleep, or with weights that must not be used."""
        self.grammars = grammars
        self.grammar_queue = GrammarQueue(self.scheduler, self.grammars)
        self.inbox = ipc.scheduler_inbox(ports) if self.leader else None
        self.outbox = ipc.scheduler_outbox(ports) if self.leader else None
        self.arrays = ReceivedArrays(args, Path(ports.shared_arrays))
        self._encoder = token_ids.encoder()
        self._decoder = token_ids.decoder(list[SchedulerInput | LeaderDecision])
        self.weights = WeightUpdates(args, runner, self.scheduler, self.memory)
        self.watchdog: Watchdog | None = None
        self.profiler = Profiler(envs.SGLANG_TORCH_PROFILER_DIR, parallel_state.rank())
        self.timeouts = RequestTimeouts.from_environment()
        self._idle_load: Load | None = None
        """The load that was told last, while the scheduler is idle."""
        self.heartbeat_s = heartbeat_seconds(args.watchdog_timeout) if args.nnodes > 1 else None
        """Seconds of silence behind which the ranks of several machines tell one another that they are there."""

    def run_forever(self) -> None:
        """Runs one step after the other; sleeps in `receive` while there is nothing to do."""
        with Watchdog(self.args.watchdog_timeout) as self.watchdog:
            watchdog = self.watchdog
            while True:
                if self.heartbeat_s is None or self.leader:  # shows other machines that the leader lives
                    watchdog.idle()
                messages = self.receive()
                watchdog.busy()
                for message in messages:
                    self.dispatch(message)
                self.grammar_queue.admit()
                self.scheduler.step()
                self.profiler.count_step()
                self.send()

    # --- in ----------------------------------------------------------------------------------------------------------

    def receive(self) -> list[SchedulerInput | LeaderDecision]:
        """Returns the leader's decisions and new messages, the same on every rank. Sleeps while the scheduler is
        idle."""
        messages: list[SchedulerInput | LeaderDecision] = []
        if self.inbox is not None:
            if not self.decisions and not self._sleep_while_idle(self.inbox):
                messages.append(Heartbeat())
            messages += [*self.decisions, *self.grammar_queue.decisions()]
            self.decisions.clear()
            if isinstance(self.scheduler, Scheduler) and self.scheduler.adapters is not None:
                messages += self.scheduler.adapters.decisions()
            inbox, end = self.inbox, self.inbox.num_bytes + RECV_BYTES
            while len(messages) < RECV_LIMIT and inbox.num_bytes < end and (message := inbox.recv_nowait()) is not None:
                messages.append(message)
            messages += self.timeouts.overdue(self.scheduler)
        if parallel_state.num_ranks() > 1:
            payload = parallel_state.broadcast_bytes(self._encoder.encode(messages) if self.leader else None)
            if not self.leader:
                messages = self._decoder.decode(payload)
        return messages

    def _sleep_while_idle(self, inbox: ipc.Receiver[SchedulerInput]) -> bool:
        """Returns False when it is time for a beat and nothing has come."""
        idle = self.scheduler.idle
        load = self.scheduler.load() if idle else None
        if load is not None and load != self._idle_load:  # requests come and go during a pause too
            if self._idle_load is None:
                self.scheduler.stats.restart_interval()
            self.send_output(self.scheduler.stats.snapshot())
        self._idle_load = load
        if idle and self.scheduler.num_compiling:
            inbox.poll(GRAMMAR_POLL_S)
        elif idle and self.scheduler.reqs and self.timeouts.enabled:  # a pause, in which requests may become overdue
            inbox.poll(CHECK_INTERVAL_S)
        elif idle and self.heartbeat_s is not None:
            return inbox.poll(self.heartbeat_s)
        elif idle:
            while not inbox.poll(IDLE_POLL_S):
                pass
        return True

    def dispatch(self, message: SchedulerInput | LeaderDecision) -> None:
        """Handles a message or decision."""
        if isinstance(message, TokenizedGenerateReq):
            self.add(message)
        elif isinstance(message, EndReq):
            self.scheduler.end_named(message.rid, message.reason)
        elif isinstance(message, GrammarVerified):
            self.grammar_queue.build(message)
        elif isinstance(message, SlowMask):
            self.scheduler.note_slow_mask(message.rid, message.milliseconds)
        elif isinstance(message, DrainSlots):
            self._adapters().drain(message.rid)
        elif isinstance(message, Heartbeat):
            parallel_state.answer_heartbeat()
        elif isinstance(message, ArrayPart):
            self.send_output(self.arrays.add(message))
        elif isinstance(message, ArraysReleased):
            self.arrays.remove(message)
        elif isinstance(message, AbortReq):
            self.scheduler.abort(message)
        else:
            reply = self.control(message)
            self.send()
            self.send_output(reply)

    def add(self, msg: TokenizedGenerateReq) -> None:
        """Queues a request, with the server's seed and stop tokens if it has none."""
        p = msg.sampling_params
        seed = p.sampling_seed
        if seed is None:  # every rank must use the same seed
            digest = hashlib.blake2b(f"{self.args.random_seed}:{msg.rid}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "little") >> 1
        stop_ids = frozenset(p.stop_token_ids) | (frozenset() if p.ignore_eos else self.model.eos_token_ids)
        req = self.scheduler.add(msg, seed, stop_ids)
        if req is not None and not self.state.serves:  # the front refuses requests by its own copy of the state
            self.scheduler.end_named(req.rid, FinishReason("abort", message=self.state.problem, status_code=503))
        elif req is not None:
            self.grammar_queue.add(req)

    # --- out ---------------------------------------------------------------------------------------------------------

    def send_output(self, message: SchedulerOutput) -> None:
        """Sends a message, on the leader."""
        if self.outbox is not None:
            self.outbox.send(message)

    def send(self) -> None:
        """Sends the queued messages and, when they are due, statistics."""
        messages, self.scheduler.outbox = self.scheduler.outbox, []
        for message in messages:
            self.send_output(message)
        if not self.scheduler.idle and (stats := self.scheduler.stats.due()) is not None:
            self.send_output(stats)

    # --- control -----------------------------------------------------------------------------------------------------

    def control(self, msg: ControlReq) -> ControlReply:
        """Returns the answer to a control call."""
        if msg.kind in CALLS:
            if self.watchdog is not None:  # files and trainers take their time
                self.watchdog.idle()
            return self.weights.control(msg)
        handler = self._CONTROLS.get(msg.kind)
        if handler is None:
            return ControlReply(msg.id, ok=False, message=f"unknown control call {msg.kind!r}")
        return handler(self, msg)

    def _flush_cache(self, msg: ControlReq) -> ControlReply:
        ok = self.scheduler.flush_cache()
        if ok:
            self.grammars.flush()
            release_free_memory()
        return ControlReply(msg.id, ok, "" if ok else "The cache was not flushed: requests are running or waiting.")

    def _internal_state(self, msg: ControlReq) -> ControlReply:
        stats = msgspec.structs.asdict(self.scheduler.stats.snapshot())
        memory = self.scheduler.check_memory()
        state = {
            "last_gen_throughput": stats["gen_throughput"],
            "kernel_step_downs": step_downs(),
            "memory_usage": {**memory, "kv_cache_bytes": self.runner.pools.size_bytes()},
            "num_running_reqs": stats["num_running_reqs"],
            "num_queue_reqs": stats["num_queue_reqs"],
            "num_used_tokens": stats["num_used_tokens"],
            "max_total_num_tokens": self.scheduler.num_slots,
            "num_generated_tokens": self.scheduler.stats.num_generated,
            "num_unfinished_reqs": len(self.scheduler.reqs),
            "free_request_slots": self.scheduler.num_free_rows,
            "num_retracted_reqs": stats["num_retracted_reqs"],
            **dataclasses.asdict(self.scheduler.stats.launches),
        }
        if self.runner.memory_saver is not None:
            saver = self.runner.memory_saver
            state["memory_saver"] = {**self.state.to_wire(), "bytes": saver.sizes(), "host_bytes": saver.host_bytes}
            state["memory_saver"]["seconds"] = saver.seconds
        if self.state.asleep:  # what follows reads the GPU's memory
            return ControlReply(msg.id, data=state)
        buffers = self.runner.model.expert_buffers
        if buffers is not None and (copies := buffers.totals()) is not None:
            state["expert_slots"] = dict(zip(("chosen", "copied"), copies, strict=True))
        cpus = self.runner.model.cpu_experts
        if cpus is not None and (done := cpus.totals()) is not None:
            state["cpu_experts"] = dataclasses.asdict(done) | {"gpu_share": cpus.gpu_share}
        drafts = self.scheduler.stats.drafts
        if drafts.algorithm is not None:
            totals = drafts.since_start
            state["avg_spec_accept_length"] = totals.accept_length
            state["spec_totals"] = {"requests": totals.requests, "proposed": totals.proposed, "correct": totals.correct}
        return ControlReply(msg.id, data=state)

    def _pause(self, msg: ControlReq) -> ControlReply:
        self.scheduler.pause(msg.args["mode"])
        return ControlReply(msg.id)

    def _resume(self, msg: ControlReq) -> ControlReply:
        if not self.state.serves:
            return ControlReply(msg.id, False, self.state.problem)
        self.scheduler.paused = False
        return ControlReply(msg.id)

    def _sleep(self, msg: ControlReq) -> ControlReply:
        problem = self.memory.sleep(msg.args["tags"], msg.args["keep_weights"])
        return ControlReply(msg.id, not problem, problem, {"state": self.state.to_wire(), "busy": problem == BUSY})

    def _wake(self, msg: ControlReq) -> ControlReply:
        problem = self.memory.wake(msg.args["tags"], msg.args["key"])
        return ControlReply(msg.id, not problem, problem, {"state": self.state.to_wire()})

    def _start_profile(self, msg: ControlReq) -> ControlReply:
        try:
            self.profiler.start()
        except ProfileError as error:
            logger.warning("%s", error)
            return ControlReply(msg.id, ok=False, message=str(error))
        return ControlReply(msg.id)

    def _stop_profile(self, msg: ControlReq) -> ControlReply:
        self.scheduler.sync()
        try:
            path = self.profiler.stop()
        except ProfileError as error:
            logger.warning("%s", error)
            return ControlReply(msg.id, ok=False, message=str(error))
        logger.info("Wrote the trace %s", path)
        return ControlReply(msg.id, data={"path": str(path)})

    def _set_corpora(self, msg: ControlReq) -> ControlReply:
        if self.args.nnodes > 1 or self.args.use_ray:
            flag = "--use-ray" if self.args.use_ray else "--nnodes"
            return ControlReply(msg.id, ok=False, message=f"added texts go with one machine, without {flag}")
        texts, problem, drafter = None, "", self.runner.drafter
        if isinstance(drafter, NgramDrafter):  # only the last pipeline stage has a drafter
            try:
                texts = drafter.read_texts(Path(msg.args["path"]))
            except Exception as error:  # a damaged file may raise anything
                logger.exception("Added texts cannot be read")
                problem = f"The texts cannot be read again: {error!r}."
        if not parallel_state.all_reduce_min([int(not problem)])[0]:
            return ControlReply(msg.id, False, problem or "Another rank cannot read the texts; its log says why.")
        if texts is not None and isinstance(drafter, NgramDrafter):
            drafter.use_texts(texts)
        return ControlReply(msg.id)

    def _storage_backend(self, msg: ControlReq) -> ControlReply:
        return ControlReply(msg.id, data=storage_control.describe(self.scheduler))

    def _attach_storage(self, msg: ControlReq) -> ControlReply:
        problem = storage_control.attach(self.scheduler, msg.args)
        return ControlReply(msg.id, not problem, problem)

    def _detach_storage(self, msg: ControlReq) -> ControlReply:
        problem = storage_control.detach(self.scheduler, bool(msg.args.get("undo")))
        return ControlReply(msg.id, not problem, problem)

    def _adapters(self) -> AdapterTable:
        assert isinstance(self.scheduler, Scheduler)
        assert self.scheduler.adapters is not None
        return self.scheduler.adapters

    def _read_adapter(self, msg: ControlReq) -> ControlReply:
        self._adapters().begin(msg.args["adapter"], msg.args["path"])
        return ControlReply(msg.id)

    def _adapter_read(self, msg: ControlReq) -> ControlReply:
        return ControlReply(msg.id, self._adapters().is_read(msg.args["adapter"]))

    def _load_adapter(self, msg: ControlReq) -> ControlReply:
        layers = self.runner.adapters
        assert layers is not None
        # An adapter is read into main memory; what DoRA scales is read from the weights.
        if WEIGHTS in self.state.asleep or (self.state.weights_lost and layers.plan.dora):
            self._adapters().forget_reading(msg.args["adapter"])
            return ControlReply(msg.id, False, self.state.problem, {"status": 503})
        problem = self._adapters().end(msg.args["adapter"], msg.args["pinned"])
        return ControlReply(msg.id, not problem, problem)

    def _unload_adapter(self, msg: ControlReq) -> ControlReply:
        adapter = msg.args["adapter"]
        if isinstance(self.scheduler, Scheduler) and self.scheduler.uses_adapter(adapter):
            return ControlReply(msg.id, False, "requests of the adapter run or wait")
        self._adapters().unload(adapter)
        return ControlReply(msg.id)

    def _ping(self, msg: ControlReq) -> ControlReply:
        return ControlReply(msg.id)

    _CONTROLS: ClassVar[dict[str, Callable[[SchedulerProcess, ControlReq], ControlReply]]] = {
        "flush_cache": _flush_cache,
        "internal_state": _internal_state,
        "pause": _pause,
        "resume": _resume,
        "sleep": _sleep,
        "wake": _wake,
        "start_profile": _start_profile,
        "stop_profile": _stop_profile,
        "set_corpora": _set_corpora,
        "storage_backend": _storage_backend,
        "attach_storage": _attach_storage,
        "detach_storage": _detach_storage,
        "read_adapter": _read_adapter,
        "adapter_read": _adapter_read,
        "load_adapter": _load_adapter,
        "unload_adapter": _unload_adapter,
        "ping": _ping,
    }


def create_grammars(args: ServerArgs, plan: Plan, ports: ipc.Ports) -> GrammarManager:
    """Creates the grammar manager. On the leader, the compile process begins to load what it needs."""
    vocabulary = Path(ports.directory) / "grammar_vocabulary"
    setup = setup_for(args, plan.model, vocabulary)
    if setup is None:
        return GrammarManager(None)
    verifier = CompileClient(setup) if parallel_state.is_leader() else None
    if verifier is not None and _warms_up_grammars(args):
        verifier.start_ahead()
    return GrammarManager(make_backend(setup.backend, vocabulary, setup.compile_threads), verifier)


def _warms_up_grammars(args: ServerArgs) -> bool:
    return envs.SGLANG_GRAMMAR_WARM_UP and not (args.skip_server_warmup or args.is_embedding)


def run_scheduler(args: ServerArgs, ports: ipc.Ports, rank: int, start_pipe: ChildPipe) -> None:
    """Runs a scheduler process. `start_pipe` belongs to the launcher, which watches the process and reports
    failures."""
    plan = create_plan(args, rank, rendezvous(args, ports.directory), Replicas.of(ports))
    if plan.expert_slots is not None and ports.num_replicas > 1:
        join_bank(ports.root, rank, plan)
    grammars = create_grammars(args, plan, ports)
    runner = load_runner(args, plan, rank, before_launches=compiling_beside(args, plan, rank, ports.num_replicas))
    if runner.media is not None:
        runner.media.directory = Path(ports.shared_arrays)
    process = SchedulerProcess(args, runner, load_tokenizer(args), ports, grammars)
    if runner.copies is not None:  # otherwise the first requests would wait for it
        runner.copies.wait_prepared(PAGE_LOCK_LIMIT_S)
    process.send_output(SchedulerReady(info=runner.plan.describe()))
    gc.freeze()  # keeps collections in the middle of steps from scanning all objects of start-up
    gc.set_threshold(*COLLECTIONS)
    start_pipe.send_bytes(READY)
    if _warms_up_grammars(args):
        process.grammars.warm_up()
    late_compiles.watch()
    process.run_forever()
