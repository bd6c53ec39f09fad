"""A live server whose every process has a memory cap, and what must hold of it whatever it was sent.

server = GuardedServer("--context-length", "256")
server.start()
... requests of any kind ...
server.check_health()            # it answered /health all the time
server.check_rest()              # everything that the requests had is given back
server.end()
"""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from fuzz.health_watcher import Silence
from fuzz.scale import SILENCE_LIMIT_CPU_S, SILENCE_LIMIT_S
from live_server import LiveServer

from sglang.srt.entrypoints.http_middleware import TRIM_DELAY_S

HERE = Path(__file__).parent
MIB = 1 << 20
START_CAP_BYTES = 4096 * MIB
HEADROOM_BYTES = 512 * MIB
"""What a process may allocate beyond what it had at rest; the largest body that is read has 64 MiB."""
GROWTH_LIMIT = 0.10
"""By which the private memory of a process may have grown, besides what an allocator keeps."""
ALLOCATOR_BYTES, ALLOCATOR_BYTES_OF = 8 * MIB, {"scheduler": 32 * MIB, "front": 24 * MIB}
"""Large bodies are read by several threads, each of which may keep pieces of its arena: 28 MiB were seen beside 97 on a
busy machine. Compiling large grammars leaves pieces of the C++ library's arenas in the scheduler: with no grammar
alive, up to 43 MiB were seen to come with one round of them and to go with the next."""
SETTLE_S = TRIM_DELAY_S + 1.0
"""After the first requests, before the memory to compare with is noted: that of large bodies is given back late."""
REST_LIMIT_S = 300.0
"""After the last request, for aborted ones to end."""
RELEASE_LIMIT_S = 60.0
"""After those have ended, for what they had to be given back."""
RESPONSE = re.compile(r'^\[[^]]*\] \S+ - "(.*) HTTP/1\.[01]" ([0-9]{3})$', re.MULTILINE)
"""A line of the log of requests: the request and the status of its response."""
LOGGED = ("--log-requests", "--log-requests-level", "0")


class Damage(AssertionError):
    """The server did not stay as it must."""


@dataclass(frozen=True)
class Rest:
    """A server that has nothing to do."""

    tasks: dict[str, int]
    """Of the front's event loop, by coroutine."""
    num_sockets: int
    """Of the front."""
    free_request_slots: int
    memory: dict[str, int]
    """Private bytes that were written, by the kind of process."""


@dataclass
class Figures:
    """What was seen of a server in all."""

    responses: Counter[str] = field(default_factory=Counter)
    """By status, without those of /health. Responses to clients that had left are not in the log of requests."""
    num_health: int = 0
    longest_s: float = 0.0
    """Until an answer of /health."""
    growth: dict[str, float] = field(default_factory=dict)
    """Of the private memory of each kind of process, as the server was last seen at rest: 0.1 is a tenth."""

    def __str__(self) -> str:
        growth = {name: f"{100 * share:+.1f}%" for name, share in self.growth.items()}
        return (
            f"responses {dict(sorted(self.responses.items()))}; /health {self.num_health} times, longest "
            f"{self.longest_s:.2f} s; memory {growth}"
        )


class GuardedServer:
    def __init__(self, *flags: str) -> None:
        self.flags = (*flags, *LOGGED)
        self._socket_path = ""
        self.live: LiveServer
        self.rest: Rest
        self.silences: list[str] = []
        """All that were seen, also those within the limits."""
        self.figures = Figures()
        self._watcher: subprocess.Popen[str]
        self._log_start = 0

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self, warm_up: Callable[[str], None] = lambda url: None) -> None:
        """Start, send what `warm_up` sends, which may load modules and fill caches, and take note of the rest then."""
        launch = [str(HERE / "observed_launch.py")]
        self.live = LiveServer(*self.flags, launch=[*launch, self._new_socket_path()], fresh=True)
        resource.prlimit(self.live.process.pid, resource.RLIMIT_DATA, (START_CAP_BYTES, START_CAP_BYTES))
        try:
            self.live.wait_up()
            warm_up(self.url)
            self._wait_rest(None)
            time.sleep(SETTLE_S)
            self.rest = self._wait_rest(None)
        except BaseException:
            self.live.end()
            raise
        for process in self.processes():
            cap = private_data(process.pid) + HEADROOM_BYTES
            resource.prlimit(process.pid, resource.RLIMIT_DATA, (cap, START_CAP_BYTES))
        self._log_start = self.live.log_path.stat().st_size
        watcher = [sys.executable, str(HERE / "health_watcher.py"), str(self.live.port), str(self.live.process.pid)]
        self._watcher = subprocess.Popen(watcher, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _new_socket_path(self) -> str:
        # The name of a Unix socket may have 107 bytes, so it is not in pytest's long directories.
        self._socket_path = f"/tmp/sglang-fuzz-{os.getpid()}-{time.monotonic_ns()}"
        return self._socket_path

    def end(self) -> None:
        for process in (self._watcher, self.live.process):
            process.kill()  # nothing more is expected of it; its children end with it
            process.wait()
        Path(self._socket_path).unlink(missing_ok=True)

    @property
    def url(self) -> str:
        return self.live.url

    # --- what it is doing ---------------------------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        front = psutil.Process(self.live.process.pid)
        return [front, *front.children(recursive=True)]

    def new_log(self) -> str:
        """The lines that were written since the last check of health."""
        return self._new_lines().decode(errors="replace")

    def _new_lines(self) -> bytes:
        with self.live.log_path.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read()
        return lines[: lines.rfind(b"\n") + 1]

    def tasks(self) -> dict[str, int]:
        with socket.socket(socket.AF_UNIX) as window:
            window.settimeout(REST_LIMIT_S)
            window.connect(self._socket_path)
            counts: dict[str, int] = json.loads(window.makefile("rb").read())
            return counts

    def internal_state(self) -> Any:
        headers = {"connection": "close"}
        answer = httpx.get(f"{self.url}/server_info", timeout=REST_LIMIT_S, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()["internal_states"][0]

    def observe_rest(self) -> Rest:
        state = self.internal_state()
        front = psutil.Process(self.live.process.pid)
        memory: Counter[str] = Counter()
        for process in self.processes():
            with suppress(psutil.NoSuchProcess, OSError):  # one that compiled a grammar ends meanwhile
                memory[kind(process)] += written_bytes(process.pid)
        return Rest(self.tasks(), len(front.net_connections("all")), state["free_request_slots"], dict(memory))

    # --- what must hold -----------------------------------------------------------------------------------------------

    def check_health(self) -> None:
        """Raises Damage if a process ended, /health was silent or refused, a response was the server's error, or a bug
        left its trace in the log."""
        if self.live.process.poll() is not None:
            raise Damage(f"the server ended with status {self.live.process.returncode}:\n{self.new_log()[-3000:]}")
        assert self._watcher.stdin is not None and self._watcher.stdout is not None
        print("since?", file=self._watcher.stdin, flush=True)
        watch = json.loads(self._watcher.stdout.readline())
        self.figures.num_health += watch["num_requests"]
        self.figures.longest_s = max(self.figures.longest_s, watch["longest_s"])
        if watch["refusals"]:
            raise Damage(f"/health: {watch['refusals'][:5]}\n{self.new_log()[-3000:]}")
        for silence in (Silence(**fields) for fields in watch["silences"]):
            self.silences.append(str(silence))
            if silence.seconds_with_a_processor > SILENCE_LIMIT_S or silence.cpu_seconds > SILENCE_LIMIT_CPU_S:
                raise Damage(f"{silence}. What its threads did is in its log:\n{self.new_log()[-6000:]}")
        lines = self._new_lines()
        self._log_start += len(lines)
        log = lines.decode(errors="replace")
        if "Traceback" in log:
            raise Damage("a traceback in the log:\n" + log[max(0, log.index("Traceback") - 500) :][:5000])
        responses = [(request, status) for request, status in RESPONSE.findall(log) if request != "GET /health"]
        self.figures.responses.update(status for _, status in responses)
        errors = [f"{request[:200]}: {status}" for request, status in responses if status >= "500"]
        if errors:
            raise Damage(f"{len(errors)} responses are errors of the server, such as {errors[:5]}")

    def check_rest(self) -> None:
        """Raises Damage unless the pool, slots, tasks, sockets and memory are as they were, soon."""
        self._wait_rest(self.rest)
        self.figures.growth = self._growth()
        if max(self.figures.growth.values()) > GROWTH_LIMIT:  # a front gives memory back when it has been at rest
            time.sleep(SETTLE_S)
            self.figures.growth = self._growth()

    def _growth(self) -> dict[str, float]:
        return {name: size / self.rest.memory[name] - 1 for name, size in self.observe_rest().memory.items()}

    def _wait_rest(self, before: Rest | None) -> Rest:
        deadline = time.monotonic() + REST_LIMIT_S
        while problem := self._pool_problem():
            wait_before(deadline, problem)
        deadline = time.monotonic() + RELEASE_LIMIT_S
        while problem := difference(before, now := self.observe_rest()):
            wait_before(deadline, problem)
        return now

    def _pool_problem(self) -> str:
        """Why the scheduler is not at rest with every slot free; flushes the cache, which holds what is not used."""
        state = self.internal_state()
        counts = {key: state[key] for key in ("num_unfinished_reqs", "num_running_reqs", "num_queue_reqs")}
        if any(counts.values()):
            return f"the scheduler still has requests: {counts}"
        flushed = httpx.post(f"{self.url}/flush_cache", timeout=REST_LIMIT_S, headers={"connection": "close"})
        if flushed.status_code != 200:
            return f"/flush_cache: {flushed.status_code} {flushed.text}"
        memory = self.internal_state()["memory_usage"]
        return "" if memory["free"] == memory["total"] else f"the pool is not free: {memory}"


def wait_before(deadline: float, problem: str) -> None:
    """A moment. Raises Damage after the deadline."""
    if time.monotonic() > deadline:
        raise Damage(f"long after the last request: {problem}")
    time.sleep(0.05)


def difference(before: Rest | None, now: Rest) -> str:
    """What a server at rest has more than before; empty if nothing."""
    if before is None:
        return ""
    problems = []
    more = {name: n - before.tasks.get(name, 0) for name, n in now.tasks.items() if n > before.tasks.get(name, 0)}
    if more:
        problems.append(f"tasks left in the front: {more}")
    if now.num_sockets > before.num_sockets:
        problems.append(f"open sockets of the front: {before.num_sockets} -> {now.num_sockets}")
    if now.free_request_slots != before.free_request_slots:
        problems.append(f"free request slots: {before.free_request_slots} -> {now.free_request_slots}")
    for name, size in now.memory.items():
        size_before = before.memory.get(name, 0)
        if size > size_before * (1 + GROWTH_LIMIT) + ALLOCATOR_BYTES_OF.get(name, ALLOCATOR_BYTES):
            problems.append(f"memory of {name}: {size_before / MIB:.0f} -> {size / MIB:.0f} MiB")
    return "; ".join(problems)


def kind(process: psutil.Process) -> str:
    """Which of the server's processes it is. Those of multiprocessing all look alike but for what they load."""
    words = " ".join(process.cmdline())
    if "observed_launch" in words:
        return "front"
    if "compile_process" in words:
        return "compiler"
    if "spawn_main" not in words:
        return "helper of multiprocessing"
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    return "scheduler" if "libtorch_cpu" in maps else "detokenizer"


def written_bytes(pid: int) -> int:
    """Private memory without what a library's file gives: pages of torch are private, too, while no other process
    maps them, so that the end of a test beside this one would count as growth."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "Private_Dirty":
            return int(value.split()[0]) * 1024
    raise KeyError("Private_Dirty")


def status_bytes(pid: int, key: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise KeyError(key)


def private_data(pid: int) -> int:
    """What RLIMIT_DATA counts."""
    return status_bytes(pid, "VmData")
