"""A scheduler's process without a model, for measurements of what is in front of it: each request gets a token a step,
of its own prompt over and over, until it has as many as it wants. Steps take `STEP_MS` milliseconds."""

from __future__ import annotations

import os
import time
from pathlib import Path

from sglang.srt.managers.child import READY, ChildPipe
from sglang.srt.managers.wire import ipc
from sglang.srt.managers.wire.io_struct import (
    AbortReq,
    BatchTokenIDOut,
    ControlReply,
    ControlReq,
    DecodeOptions,
    FinishReason,
    SchedulerReady,
    TokenizedGenerateReq,
    TokenMeta,
)
from sglang.srt.server_args import ServerArgs

STEP_MS = "PACED_STEP_MS"
"""Variable of the environment."""
NAME = "paced-scheduler"
"""By which the process can be told from others."""
IDLE_POLL_S = 60.0


class Running:
    """One request, and how many tokens it has."""

    __slots__ = ("num_sent", "num_tokens", "req", "started_time")

    def __init__(self, req: TokenizedGenerateReq) -> None:
        self.req, self.num_tokens, self.num_sent, self.started_time = req, 0, 0, time.monotonic()


def step(running: dict[str, Running], interval: int) -> BatchTokenIDOut:
    """One more token for each, sent as `scheduler.output` does; requests that have all leave. interval: tokens between
    two messages of a request."""
    out = BatchTokenIDOut(rids=[], new_ids=[], finish=[], meta=[], options=[], logprobs=[])
    for rid, each in list(running.items()):
        each.num_tokens += 1
        done = each.num_tokens == each.req.sampling_params.max_new_tokens
        if not done and each.num_tokens - each.num_sent < interval:
            continue
        ids = each.req.input_ids
        out.rids.append(rid)
        out.new_ids.append([ids[at % len(ids)] for at in range(each.num_sent, each.num_tokens)])
        out.finish.append(FinishReason("length", length=each.num_tokens) if done else None)
        tells = done or not each.num_sent
        out.meta.append(TokenMeta(len(ids), each.num_tokens, started_time=each.started_time) if tells else None)
        out.options.append(DecodeOptions() if each.num_sent == 0 else None)
        out.logprobs.append(None)
        each.num_sent = each.num_tokens
        if done:
            del running[rid]
    return out


def run_scheduler(args: ServerArgs, ports: ipc.Ports, rank: int, start_pipe: ChildPipe) -> None:
    """Main of the process."""
    Path("/proc/self/comm").write_text(NAME)
    inbox, outbox = ipc.scheduler_inbox(ports), ipc.scheduler_outbox(ports)
    outbox.send(SchedulerReady())
    start_pipe.send_bytes(READY)
    step_s, running, end = float(os.environ[STEP_MS]) * 1e-3, dict[str, Running](), 0.0
    while True:
        if not running:
            inbox.poll(IDLE_POLL_S)
        for message in inbox.drain():
            if isinstance(message, TokenizedGenerateReq):
                running[message.rid] = Running(message)
            elif isinstance(message, ControlReq):
                outbox.send(ControlReply(message.id))
            elif isinstance(message, AbortReq):
                raise RuntimeError("this stand-in ends no request early")
        end = max(end + step_s, time.monotonic())
        time.sleep(max(0.0, end - time.monotonic()))
        if running and (out := step(running, args.stream_interval)).rids:
            outbox.send(out)
