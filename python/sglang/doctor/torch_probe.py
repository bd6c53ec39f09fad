"""Prints as JSON lines what torch sees, and with `--copies` whether copies between each pair of GPUs arrive intact, and
how fast main memory and copies from there are.

It runs in a process of its own, because a copy may hang or crash; the line before it says which one.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

CHECKED_BYTES = 4 << 20
TIMED_BYTES = 128 << 20


def say(row: dict[str, Any]) -> None:
    """Prints a row for the parent process."""
    print(json.dumps(row), flush=True)


def describe_torch() -> int:
    """Prints what torch sees. Returns the number of GPUs."""
    import torch

    problem = ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        problem = str(error).splitlines()[0]
    devices = 0 if problem else torch.cuda.device_count()
    archs = torch.cuda.get_arch_list() if devices else []
    row = {"version": torch.__version__, "cuda": torch.version.cuda, "archs": archs, "devices": devices}
    say({"torch": row | {"problem": problem}})
    return devices


def copy(source: int, target: int) -> dict[str, Any]:
    """Copies from one GPU to another. Returns whether random bytes arrive intact, and the bytes a second of a larger
    copy."""
    import torch

    row: dict[str, Any] = {"source": source, "target": target}
    row["access"] = bool(torch.cuda.can_device_access_peer(target, source))
    try:
        sent = torch.randint(0, 256, (CHECKED_BYTES,), dtype=torch.uint8, device=f"cuda:{source}")
        arrived = torch.zeros_like(sent, device=f"cuda:{target}").copy_(sent)
        row["equal"] = bool(torch.equal(sent.cpu(), arrived.cpu()))
        big = torch.empty(TIMED_BYTES, dtype=torch.uint8, device=f"cuda:{source}")
        there = torch.empty_like(big, device=f"cuda:{target}")
        seconds = []
        for _ in range(4):
            torch.cuda.synchronize(source)
            torch.cuda.synchronize(target)
            began = time.perf_counter()
            there.copy_(big)
            torch.cuda.synchronize(source)
            torch.cuda.synchronize(target)
            seconds.append(time.perf_counter() - began)
        row["rate"] = TIMED_BYTES / min(seconds)
    except RuntimeError as error:
        row["problem"] = str(error).splitlines()[0]
    return row


def memory_rate() -> dict[str, Any]:
    """Returns the bytes a second that this machine's cores read together, and the number of those that could compute
    experts; where there are no kernels for that, what a copy reads, and none."""
    import torch

    from sglang.srt.errors import UserError
    from sglang.srt.layers.moe.cpu_experts.measured import read_rate

    try:
        rate, cores = read_rate()
        return {"memory_rate": rate, "cores": cores}
    except (UserError, OSError):
        pass
    source = torch.ones(TIMED_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return {"memory_rate": TIMED_BYTES / min(seconds), "cores": 0}


def host_copy(gpu: int) -> dict[str, Any]:
    """Copies page-locked main memory to a GPU. Returns the bytes a second."""
    import torch

    row: dict[str, Any] = {"gpu": gpu}
    try:
        source = torch.ones(TIMED_BYTES, dtype=torch.uint8, pin_memory=True)
        target = torch.empty_like(source, device=f"cuda:{gpu}")
        seconds = []
        for _ in range(4):
            torch.cuda.synchronize(gpu)
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(gpu)
            seconds.append(time.perf_counter() - began)
        row["rate"] = TIMED_BYTES / min(seconds)
    except RuntimeError as error:
        row["problem"] = str(error).splitlines()[0]
    return row


def main() -> None:
    """Describes torch and its GPUs; with --copies also copies from main memory and between all pairs of GPUs."""
    devices = describe_torch()
    if "--copies" not in sys.argv:
        return
    say(memory_rate())
    for gpu in range(devices):
        say({"copying": ["main memory", gpu]})
        say({"host_copy": host_copy(gpu)})
    pairs = [(i, j) for i in range(devices) for j in range(devices) if i != j]
    for source, target in pairs:
        say({"copying": [source, target]})
        say({"copy": copy(source, target)})


if __name__ == "__main__":
    main()
