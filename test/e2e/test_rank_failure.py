"""A process of a server of several ranks that dies or stops takes all down: non-zero, named, without orphans; also
inside a step that runs as two halves.

`make test` has a rank killed and one stopped, the detokenizer and the server; `make thorough` two more, and `make
failures` each process of each layout.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from dying_rank import COLLECTIVES, PROMPT, TWO_BATCH_THRESHOLDS, dies_inside
from live_server import free_port
from shared_files import array_directories, mapped_files

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.plan.ranks import RankLayout

START_LIMIT_S = 600
END_LIMIT_S = 300
MAX_RANKS = 4
SHARED_KEYS = '--load-format dummy --json-model-override-args {"num_key_value_heads":1}'
"""A model whose ranks would all hold the same keys and values."""
STAGE = {
    "": RankLayout(),
    "--tp-size 2": RankLayout(2),
    "--tp-size 2 --ep-size 2": RankLayout(2, 2),
    "--tp-size 2 --attn-dp-size 2": RankLayout(2, attn_dp_size=2),
    f"--tp-size 2 --dcp-size 2 {SHARED_KEYS}": RankLayout(2, dcp_size=2),
    "--tp-size 4 --dcp-size 2": RankLayout(4, dcp_size=2),
}
"""How the ranks of a stage share the model."""
LAYOUTS = {
    " ".join(filter(None, (flags, f"--pp-size {stages}" * (stages > 1)))): replace(ranks, pp_size=stages)
    for stages in (1, 2)
    for flags, ranks in STAGE.items()
    if 1 < stages * ranks.world_size <= MAX_RANKS
}
RANKS = {flags: tuple(map(ranks.name, range(ranks.world_size))) for flags, ranks in LAYOUTS.items()}
"""By layout, in the order in which the server starts them, and the detokenizer behind them."""
CASES = [
    ("--tp-size 2 --ep-size 2", "TP1", signal.SIGKILL, True),
    ("--tp-size 2", "detokenizer", signal.SIGKILL, True),
    ("--tp-size 2", "TP1", signal.SIGSTOP, True),
    ("--tp-size 2", "server", signal.SIGKILL, True),
]
"""(layout, which process, what it gets, while requests are running?)."""
WITHOUT_REQUESTS = [("--pp-size 2", "PP1 TP0", signal.SIGKILL, False), ("--tp-size 2", "TP0", signal.SIGSTOP, False)]
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
    port, log = free_port(), folder / "log"
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


def test_every_way_to_share_a_stage_is_tried_alone_and_in_two_stages() -> None:
    layouts = {(r.tp_size, r.ep_size, r.attn_dp_size, r.dcp_size, r.pp_size) for r in LAYOUTS.values()}
    stages = {(2, 1, 1, 1), (2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2)}
    assert layouts == {(1, 1, 1, 1, 2), (4, 1, 1, 2, 1), *((*stage, pp) for stage in stages for pp in (1, 2))}
    assert {layout for layout, *_ in CASES} <= RANKS.keys()


@pytest.mark.parametrize(("layout", "name", "sent", "busy"), CASES, ids=case_id)
def test_all_end_with_one(layout: str, name: str, sent: signal.Signals, busy: bool, tmp_path: Path) -> None:
    check(layout, name, sent, busy, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize(("layout", "name", "sent", "busy"), WITHOUT_REQUESTS, ids=case_id)
def test_all_end_with_one_that_is_idle(
    layout: str, name: str, sent: signal.Signals, busy: bool, tmp_path: Path
) -> None:
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
        assert name == "server" or f"{who} {how}" in first[0], text
        if name == "TP1" and sent == signal.SIGSTOP:
            assert "scheduler_process.py" in text, "where the other rank waits"
        wait_until(lambda: not any(path.exists() for path in files), END_LIMIT_S)


# --- inside a step that runs as two halves ----------------------------------------------------------------------------

EIGHT_BITS = ("--enable-quantized-all-reduce", "all")
IN_HALVES = [
    (layout, rank, half, options)
    for layout in ("--tp-size 2", "--tp-size 2 --attn-dp-size 2", "--tp-size 2 --pp-size 2")
    for rank in range(len(RANKS[layout]))
    for half in COLLECTIVES
    for options in ((), EIGHT_BITS)
    if not options or layout == "--tp-size 2"
] + [
    ("--tp-size 2 --attn-dp-size 2 --pp-size 2", rank, half, ()) for rank, half in zip((0, 3), COLLECTIVES, strict=True)
]
"""(layout, which rank, in which half, options). Where `plan.halves` refuses a layout no rank can die inside one."""


@pytest.mark.failures
@pytest.mark.parametrize(("layout", "rank", "half", "options"), IN_HALVES, ids=str)
def test_a_rank_dies_inside_a_half(
    layout: str, rank: int, half: str, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others end with its name, whatever they have sent and wait for."""
    armed = dies_inside(half, rank, tmp_path, monkeypatch)
    with server(tmp_path, layout, (*TWO_BATCH_THRESHOLDS, *options)) as run:
        everyone = [run.process.pid, *descendants(run.process.pid)]
        armed.touch()
        body = json.dumps({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{run.port}/generate", body, {"Content-Type": "application/json"}
        )
        with pytest.raises(OSError):
            urllib.request.urlopen(request, timeout=END_LIMIT_S)
        assert run.process.wait(END_LIMIT_S) == 1
        wait_until(lambda: not any(map(running, everyone)), END_LIMIT_S)
        first = [line for line in run.log.read_text().splitlines() if "process died" in line or "not answer" in line]
        assert f"the scheduler {RANKS[layout][rank]} process died (killed by SIGKILL)" in first[0], first
