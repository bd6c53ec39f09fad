"""A scheduler process that plays written answers, and counts what a prefix cache would have of each prompt.

The script is a JSON list of `[mark, answer]`. The answer to a prompt is that of the mark which stands last in it, so
that a conversation finds its place by what was said, and no state is kept between requests.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from sglang.srt.managers.wire import ipc
from sglang.srt.managers.wire.io_struct import (
    BatchTokenIDOut,
    ControlReply,
    DecodeOptions,
    FinishReason,
    SchedulerOutput,
    SchedulerReady,
    SchedulerStats,
    TokenizedGenerateReq,
    TokenMeta,
)
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import load_tokenizer

ENTRY = f"{__name__}:run_scheduler"
SCRIPT, PROMPTS = "SCRIPTED_ANSWERS", "SCRIPTED_PROMPTS"
"""Environment variables: the script's path, and that of a file that gets a JSON line for each prompt."""
DEFAULT = "Done."
PIECE = 16
"""Tokens of one message, so that streams have several."""


def answer_to(prompt: str, script: Sequence[tuple[str, str]]) -> str:
    places = [(prompt.rfind(mark), answer) for mark, answer in script]
    place, answer = max(places, key=lambda each: each[0], default=(-1, DEFAULT))
    return answer if place >= 0 else DEFAULT


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """The number of tokens with which both begin."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def run_scheduler(args: ServerArgs, ports: ipc.Ports, tp_rank: int, start_pipe: Connection) -> None:
    tokenizer = load_tokenizer(args)
    script = json.loads(Path(os.environ[SCRIPT]).read_text())
    inbox, outbox = ipc.scheduler_inbox(ports), ipc.scheduler_outbox(ports)
    outbox.send(SchedulerReady(info={"scripted": True}))
    start_pipe.send_bytes(b"ready")
    seen: list[list[int]] = []
    while True:
        message = inbox.recv() if inbox.poll(60.0) else None
        if isinstance(message, TokenizedGenerateReq):
            prompt = tokenizer.decode(message.input_ids.tolist(), skip_special_tokens=False)
            ids = tokenizer.encode(answer_to(prompt, script), add_special_tokens=False)
            cached = max((common_prefix(message.input_ids.tolist(), other) for other in seen), default=0)
            seen.append(message.input_ids.tolist() + ids)
            _record(prompt, len(message.input_ids), cached)
            _play(outbox, message, ids, cached)
        elif message is not None and hasattr(message, "kind") and message.kind != "lost":
            outbox.send(ControlReply(message.id))


def _record(prompt: str, num_tokens: int, cached: int) -> None:
    if path := os.environ.get(PROMPTS):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"prompt": prompt, "tokens": num_tokens, "cached": cached}) + "\n")


def _play(outbox: ipc.Sender[SchedulerOutput], request: TokenizedGenerateReq, ids: list[int], cached: int) -> None:
    params = request.sampling_params
    most = params.max_new_tokens or len(ids)
    played = ids[:most]
    for start in range(0, max(1, len(played)), PIECE):
        done = min(start + PIECE, len(played))
        finish = None
        if done == len(played):
            cut = len(played) < len(ids)
            finish = FinishReason("length", length=done) if cut else FinishReason("stop", matched=None)
        options = DecodeOptions(skip_special_tokens=params.skip_special_tokens, stop=params.stop) if not start else None
        outbox.send(
            BatchTokenIDOut(
                rids=[request.rid],
                new_ids=[played[start:done]],
                finish=[finish],
                meta=[TokenMeta(len(request.input_ids), done, cached, started_time=time.monotonic())],
                options=[options],
                logprobs=[None],
            )
        )
    outbox.send(SchedulerStats())
