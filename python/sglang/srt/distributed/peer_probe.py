"""The start-up probe of a group's links: in a process of its own for each rank, which may hang without harm.

    problem = probe(group, device)      # None, or why the GPUs cannot write into one another's memory

A GPU that hangs in a write takes its process with it. So every rank starts a child process, which runs `peer_checks`
and prints what it is about to do (lines of JSON). A child that makes no progress is killed, and its last line says
where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sglang.srt.distributed.custom_all_reduce import exchange
from sglang.srt.distributed.peer_checks import LIBRARY, OTHERS, Finding, check
from sglang.srt.errors import UserError

LINKS = "sglang.srt.distributed.peer_links:GpuLinks"
_PR_SET_PDEATHSIG = 1
_SPARE_S = 10.0
"""Seconds by which a child that waits for others gives up before it is killed, to tell it from one that hangs."""

_START = "its start"


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits in seconds. `total`: of a child, and of its start, the library's first all-reduce and waits for
    others; `step`: of a write or one of our all-reduces, which take milliseconds and have a shorter deadline of their
    own."""

    total: float = 120.0
    step: float = 30.0

    def of_step(self, doing: str) -> float:
        """Returns the time limit of an action."""
        return self.total if doing in (OTHERS, _START, f"the all-reduce by {LIBRARY}") else self.step


CAUSES = (
    "usual causes: an IOMMU that remaps the GPUs' writes (intel_iommu=off or iommu=pt), PCIe access control "
    "(disable ACS on the bridges between the GPUs), a driver without peer-to-peer writes for this card, "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True with other software's CUDA IPC"
)


def probe(group: dist.ProcessGroup, device: int, links: str = LINKS, limits: Limits | None = None) -> str | None:
    """Returns why peers' memory must not be used, as a message for a person; None if every check passed. Collective,
    with the same result on every rank. Raises UserError if the library's own all-reduce is wrong or hangs."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    folder = tempfile.mkdtemp(prefix="sglang-probe-") if rank == 0 else ""
    store = Path(exchange(group, folder.encode())[0].decode()) / "store"
    findings = _probe_in_child(rank, ranks, device, store, links, limits or Limits())
    answers = exchange(group, json.dumps([[f.kind, f.pair, f.detail] for f in findings]).encode())
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    return verdict(
        [Finding(kind, tuple(pair), detail) for answer in answers for kind, pair, detail in json.loads(answer)]
    )


def verdict(findings: Sequence[Finding]) -> str | None:
    """Returns one message for all findings; None if there are none. Raises UserError for a fault of the library's
    all-reduce."""
    library = [finding for finding in findings if finding.kind == "library"]
    if library:
        raise UserError(
            f"NCCL does not add up over these GPUs: {library[0].detail}; {CAUSES}. With NCCL_P2P_DISABLE=1 the GPUs "
            "exchange data through the host's memory"
        )
    told: dict[tuple[str, tuple[int, ...]], Finding] = {}
    for finding in [each for each in findings if each.kind != "waited"] or findings:
        told.setdefault((finding.kind, tuple(sorted(finding.pair))), finding)
    if not told:
        return None
    texts = [f"{_between(finding.pair)}: {finding.detail}" for finding in told.values()]
    return f"{'; '.join(texts[:4])}{f'; {len(texts) - 4} more' if len(texts) > 4 else ''} ({CAUSES})"


def _between(pair: tuple[int, ...]) -> str:
    return f"ranks {pair[0]} and {pair[1]}" if len(set(pair)) > 1 else f"rank {pair[0]}"


def _probe_in_child(rank: int, ranks: int, device: int, store: Path, links: str, limits: Limits) -> list[Finding]:
    command = [sys.executable, "-m", __name__, str(rank), str(ranks), str(device), str(store), links, str(limits.total)]
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        messages, returned = _messages(child, limits)
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    return _read(messages, lines[-1] if returned and lines else "", rank)


def _messages(child: subprocess.Popen[str], limits: Limits) -> tuple[list[dict[str, Any]], bool]:
    """Returns the child's messages, and whether it ended by itself; it is killed otherwise."""
    arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            arrived.put(line)
        arrived.put(None)

    threading.Thread(target=read, daemon=True).start()
    messages: list[dict[str, Any]] = []
    end, doing, returned = time.monotonic() + limits.total, _START, True
    try:
        while (line := arrived.get(timeout=max(0.0, min(limits.of_step(doing), end - time.monotonic())))) is not None:
            with contextlib.suppress(ValueError):  # a library's
                messages.append(json.loads(line))
                doing = messages[-1].get("doing", doing)
        child.wait(_SPARE_S)
    except (queue.Empty, subprocess.TimeoutExpired):
        returned = False
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # in the driver no signal reaches it
            child.wait(_SPARE_S)
    return messages, returned


def _read(messages: Sequence[dict[str, Any]], error: str, rank: int) -> list[Finding]:
    """Returns a child's findings. `error`: last line of its stderr if it died by itself."""
    findings: list[Finding] = []
    doing, peer = _START, None
    for message in messages:
        if "doing" in message:
            doing, peer = message["doing"], message["peer"]
        elif "kind" in message:
            findings.append(Finding(message["kind"], tuple(message["pair"]), message["detail"]))
        elif "end" in message:
            return findings
    where = f"{doing} rank {peer}" if peer is not None else doing
    what = f"{where} fails on rank {rank}: {error[:300]}" if error else f"{where} does not return on rank {rank}"
    if findings and findings[-1].kind == "hang":
        return findings  # that was its end
    if doing == OTHERS:
        kind = "waited"
    elif doing == f"the all-reduce by {LIBRARY}" and not error:
        kind = "library"
    else:
        kind = "failed" if error else "hang"
    return [*findings, Finding(kind, (rank,) if peer is None else (rank, peer), what)]


def main(arguments: Sequence[str]) -> None:
    """Runs the checks in the child process."""
    parser = argparse.ArgumentParser()
    kinds = {"rank": int, "ranks": int, "device": int, "store": str, "links": str, "timeout": float}
    for argument, kind in kinds.items():
        parser.add_argument(argument, type=kind)
    args = parser.parse_args(arguments)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no longer than its parent, and
    signal.alarm(int(args.timeout + _SPARE_S))  # no longer than it may take
    wait = timedelta(seconds=max(1.0, args.timeout - _SPARE_S))

    def report(**message: object) -> None:
        print(json.dumps(message), flush=True)

    report(doing=OTHERS, peer=None)
    dist.init_process_group(
        "gloo", init_method=f"file://{args.store}", rank=args.rank, world_size=args.ranks, timeout=wait
    )
    report(doing=_START, peer=None)
    module, _, name = args.links.partition(":")
    links = getattr(importlib.import_module(module), name)(args.rank, args.ranks, args.device)
    for finding in check(links, args.rank, args.ranks, lambda doing, peer: report(doing=doing, peer=peer)):
        report(kind=finding.kind, pair=finding.pair, detail=finding.detail)
    report(end=True)
    sys.stdout.flush()
    os._exit(0)  # a destructor may wait for a GPU


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
