"""A scheduler process without a model: it answers each request with its own prompt, over and over, a token a step.

`extra_key` of a request selects a misbehaviour: "refuse" (503), "crash" (an exception), "die" (killed), "silent"
(no output until aborted). Stop strings are not looked for.
"""

from __future__ import annotations

import json
import os
import signal
import time
from multiprocessing.connection import Connection

from sglang.srt.errors import UserError
from sglang.srt.managers.wire import ipc
from sglang.srt.managers.wire.io_struct import (
    AbortReq,
    BatchTokenIDOut,
    ControlReply,
    DecodeOptions,
    FinishReason,
    SchedulerReady,
    SchedulerStats,
    TokenizedGenerateReq,
    TokenMeta,
)
from sglang.srt.server_args import ServerArgs
from srt.sampling.packed_logprobs import packed

STEP_S = 0.001


def misbehaviour(req: TokenizedGenerateReq) -> str | None:
    return None if req.cache_namespace is None else json.loads(req.cache_namespace)[1]


class FakeScheduler:
    def __init__(self) -> None:
        self.running: dict[str, tuple[TokenizedGenerateReq, int]] = {}
        self.order: list[str] = []

    def add(self, req: TokenizedGenerateReq) -> FinishReason | None:
        self.order.append(req.rid)
        if misbehaviour(req) == "refuse":
            return FinishReason("abort", message="The queue is full.", status_code=503)
        if misbehaviour(req) == "crash":
            raise RuntimeError("the fake scheduler crashed")
        if misbehaviour(req) == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        self.running[req.rid] = (req, 0)
        return None

    def step(self) -> BatchTokenIDOut:
        out = _empty()
        for rid, (req, done) in list(self.running.items()):
            if misbehaviour(req) == "silent":
                continue
            token = int(req.input_ids[done % len(req.input_ids)])
            finish = None
            if done + 1 >= (req.sampling_params.max_new_tokens or 1):
                finish = FinishReason("length", length=done + 1)
                del self.running[rid]
            else:
                self.running[rid] = (req, done + 1)
            _append(out, req, [token], finish, done)
        return out

    def end(self, rid: str, reason: FinishReason) -> BatchTokenIDOut:
        out = _empty()
        if rid in self.running:
            req, done = self.running.pop(rid)
            _append(out, req, [], reason, done)
        return out


def _empty() -> BatchTokenIDOut:
    return BatchTokenIDOut(rids=[], new_ids=[], finish=[], meta=[], options=[], logprobs=[])


def _append(
    out: BatchTokenIDOut, req: TokenizedGenerateReq, ids: list[int], finish: FinishReason | None, done: int
) -> None:
    p = req.sampling_params
    first = done == 0
    out.rids.append(req.rid)
    out.new_ids.append(ids)
    out.finish.append(finish)
    out.meta.append(TokenMeta(len(req.input_ids), done + len(ids)))
    out.options.append(DecodeOptions(skip_special_tokens=p.skip_special_tokens, stop=p.stop) if first else None)
    logprobs = None
    if req.return_logprob:
        prompt = req.input_ids.tolist() if first and req.logprob_start_len >= 0 else []
        values = [(None if i == 0 else -1.0, t) for i, t in enumerate(prompt)]
        logprobs = packed([(-0.5, i) for i in ids], input=values)
    out.logprobs.append(logprobs)


def run_scheduler(args: ServerArgs, ports: ipc.Ports, tp_rank: int, start_pipe: Connection) -> None:
    if args.max_total_tokens == 13:
        raise UserError("13 tokens are too few")
    if args.max_total_tokens == 14:
        raise RuntimeError("no luck at start-up")
    if args.max_total_tokens == 15:
        os.kill(os.getpid(), signal.SIGSTOP)
    inbox, outbox = ipc.scheduler_inbox(ports), ipc.scheduler_outbox(ports)
    outbox.send(SchedulerReady(info={"fake": True}))
    start_pipe.send_bytes(b"ready")
    fake = FakeScheduler()
    while True:
        while inbox.poll(0.0 if fake.running else 60.0):
            message = inbox.recv()
            if isinstance(message, TokenizedGenerateReq):
                refusal = fake.add(message)
                if refusal is not None:
                    out = _empty()
                    _append(out, message, [], refusal, 0)
                    outbox.send(out)
            elif isinstance(message, AbortReq):
                rids = list(fake.running) if message.abort_all else message.rids
                for rid in rids:
                    out = fake.end(rid, FinishReason("abort", message="Aborted", status_code=499))
                    if out.rids:
                        outbox.send(out)
            elif message.kind == "internal_state":
                outbox.send(ControlReply(message.id, data={"running": len(fake.running), "order": fake.order}))
            elif message.kind != "lost":
                outbox.send(ControlReply(message.id, ok=message.kind == "flush_cache"))
        out = fake.step()
        if out.rids:
            outbox.send(out)
            outbox.send(SchedulerStats(num_running_reqs=len(fake.running)))
        time.sleep(STEP_S)
