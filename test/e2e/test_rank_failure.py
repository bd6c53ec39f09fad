"""A process of a server of several ranks that dies or stops takes all down: non-zero, named, without orphans; also
inside a step that runs as two halves."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from shared_files import array_directories, mapped_files

from sglang.embedded import DEFAULT_MODEL_PATH

START_LIMIT_S = 240
END_LIMIT_S = 60
RANKS = {
    "--tp-size 2": ("TP0", "TP1"),
    "--tp-size 2 --ep-size 2": ("TP0", "TP1"),
    "--tp-size 2 --attn-dp-size 2": ("TP0", "TP1"),
    "--tp-size 2 --pp-size 2 --attn-dp-size 2": ("PP0 TP0", "PP0 TP1", "PP1 TP0", "PP1 TP1"),
    "--pp-size 2": ("PP0 TP0", "PP1 TP0"),
    "--tp-size 2 --pp-size 2": ("PP0 TP0", "PP0 TP1", "PP1 TP0", "PP1 TP1"),
}
"""By layout, in the order in which the server starts them, and the detokenizer behind them."""
CASES = [
    ("--tp-size 2 --ep-size 2", "TP1", signal.SIGKILL, True),
    ("--pp-size 2", "PP1 TP0", signal.SIGKILL, False),
    ("--tp-size 2", "detokenizer", signal.SIGKILL, True),
    ("--tp-size 2", "TP0", signal.SIGSTOP, False),
    ("--tp-size 2", "TP1", signal.SIGSTOP, True),
    ("--tp-size 2", "server", signal.SIGKILL, True),
]
"""(layout, which process, what it gets, while requests are running?)."""
EACH = [(layout, name, signal.SIGKILL, True) for layout in RANKS for name in (*RANKS[layout], "detokenizer", "server")]


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    temporary: Path
    children: dict[str, int]

    def generate_forever(self) -> None:
        """A request that runs for longer than the test."""
        params = {"max_new_tokens": 3000, "ignore_eos": True, "temperature": 0.0}
        body = json.dumps({"text": "One, two,", "sampling_params": params}).encode()
        url = f"http://127.0.0.1:{self.port}/generate"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})

        def post() -> None:
            with suppress(OSError):
                urllib.request.urlopen(request, timeout=END_LIMIT_S).read()

        threading.Thread(target=post, daemon=True).start()
        wait_until(lambda: b"Decode batch" in self.log.read_bytes(), END_LIMIT_S)


def wait_until(condition: object, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    """All processes below one, oldest first."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        children += map(int, (task / "children").read_text().split())
    children.sort(key=lambda child: int(Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[19]))
    return [*children, *(below for child in children for below in descendants(child))]


def running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    return False


@contextmanager
def server(folder: Path, layout: str = "--tp-size 2", options: Sequence[str] = ()) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = folder / "log"
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", DEFAULT_MODEL_PATH, "--device", "cpu"]
    command += [*layout.split(), *options, "--max-total-tokens", "4096", "--port", str(port), "--watchdog-timeout", "4"]
    temporary = Path(tempfile.mkdtemp(prefix="sglang-test-"))  # shorter than `folder`: a socket's path has a limit
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_until(lambda: b"ready to roll" in log.read_bytes() or process.poll() is not None, START_LIMIT_S)
        assert process.poll() is None, log.read_text()
        spawned = [
            pid for pid in descendants(process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        yield Server(process, port, log, temporary, dict(zip((*RANKS[layout], "detokenizer"), spawned, strict=False)))
    finally:
        process.kill()
        process.wait()


def case_id(value: object) -> str:
    return {signal.SIGKILL: "killed", signal.SIGSTOP: "stopped"}.get(value, str(value))  # type: ignore[call-overload]


@pytest.mark.parametrize(("layout", "name", "sent", "busy"), CASES, ids=case_id)
def test_all_end_with_one(layout: str, name: str, sent: signal.Signals, busy: bool, tmp_path: Path) -> None:
    check(layout, name, sent, busy, tmp_path)


@pytest.mark.failures
@pytest.mark.parametrize(("layout", "name", "sent", "busy"), [c for c in EACH if c not in CASES], ids=case_id)
def test_each_process_in_turn(layout: str, name: str, sent: signal.Signals, busy: bool, tmp_path: Path) -> None:
    check(layout, name, sent, busy, tmp_path)


def check(layout: str, name: str, sent: signal.Signals, busy: bool, folder: Path) -> None:
    who = "the detokenizer process" if name == "detokenizer" else f"the scheduler {name} process"
    how = "died (killed by SIGKILL)" if sent == signal.SIGKILL else "does not answer (--watchdog-timeout 4)"
    with server(folder, layout) as run:
        if busy:
            run.generate_forever()
        everyone = [run.process.pid, *descendants(run.process.pid)]
        files = mapped_files(everyone) | set(array_directories(run.temporary))
        assert files, "a server has a directory of shared arrays"
        os.kill(run.children.get(name, run.process.pid), sent)
        status = run.process.wait(END_LIMIT_S)
        assert status == (-signal.SIGKILL if name == "server" else 1)
        wait_until(lambda: not any(map(running, everyone)), END_LIMIT_S)
        text = run.log.read_text()
        first = [line for line in text.splitlines() if "process died" in line or "does not answer" in line]
        assert name == "server" or f"{who} {how}" in first[-1], text
        if name == "TP1" and sent == signal.SIGSTOP:
            assert "scheduler_process.py" in text, "where the other rank waits"
        wait_until(lambda: not any(path.exists() for path in files), END_LIMIT_S)


# --- inside a step that runs as two halves ----------------------------------------------------------------------------

HALVES = ("--enable-two-batch-overlap", "--two-batch-overlap-min-tokens", "2", "--disable-radix-cache")
EIGHT_BITS = ("--enable-quantized-all-reduce", "all")
LAYOUTS_IN_HALVES = ("--tp-size 2", "--tp-size 2 --attn-dp-size 2", "--tp-size 2 --pp-size 2")
IN_HALVES = [
    (layout, name, options)
    for layout in LAYOUTS_IN_HALVES
    for name in RANKS[layout]
    for options in ((), EIGHT_BITS)[: 1 + (layout == "--tp-size 2")]
]
INSIDE = "distributed/turns.py"
"""In the traceback of a rank whose collective breaks off inside a half."""
TRIES = 4
"""A kill may come between two steps."""


def read_prompts_forever(run: Server) -> None:
    """Prompts of several thousand tokens, one behind the other, so that nearly every moment is inside a step."""
    body = {"input_ids": [5 + i % 90 for i in range(2500)], "sampling_params": {"max_new_tokens": 1}}
    url, data = f"http://127.0.0.1:{run.port}/generate", json.dumps(body).encode()

    def post() -> None:
        with suppress(OSError):
            while True:
                request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
                urllib.request.urlopen(request, timeout=END_LIMIT_S).read()

    for _ in range(3):
        threading.Thread(target=post, daemon=True).start()
    wait_until(lambda: run.log.read_bytes().count(b"Prefill batch") > 2, END_LIMIT_S)


def killed(layout: str, name: str, options: tuple[str, ...], folder: Path, delay_s: float) -> str:
    """The log of a server one of whose ranks is killed, after everything was checked but where the others were."""
    folder.mkdir()
    with server(folder, layout, (*HALVES, *options)) as run:
        read_prompts_forever(run)
        everyone = [run.process.pid, *descendants(run.process.pid)]
        time.sleep(delay_s)
        os.kill(run.children[name], signal.SIGKILL)
        assert run.process.wait(END_LIMIT_S) == 1
        wait_until(lambda: not any(map(running, everyone)), END_LIMIT_S)
        text = run.log.read_text()
        first = [line for line in text.splitlines() if "process died" in line or "does not answer" in line]
        assert f"the scheduler {name} process died (killed by SIGKILL)" in first[-1], text
        return text


@pytest.mark.failures
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("layout", "name", "options"), IN_HALVES, ids=str)
def test_a_rank_dies_inside_a_step_of_halves(layout: str, name: str, options: tuple[str, ...], tmp_path: Path) -> None:
    """The others end within the watchdog's time, with its name, whichever half was on its way."""
    texts: list[str] = []
    while not texts or INSIDE not in texts[-1]:
        assert len(texts) < TRIES, texts[-1]
        texts.append(killed(layout, name, options, tmp_path / str(len(texts)), 0.3 + 0.17 * len(texts)))
