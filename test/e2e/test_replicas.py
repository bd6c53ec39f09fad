"""A server of two replicas: answers as of one, what goes to both, and replicas that die."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from dying_rank import COLLECTIVES, PROMPT, TWO_BATCH_THRESHOLDS, dies_inside
from forked_servers import forked_children
from live_server import LiveServer, live_server

import sglang
from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.managers.front.job_process import JOB_NAME
from sglang.srt.plan.ranks import RankLayout

FLAGS = ("--dp-size", "2", "--max-total-tokens", "4096", "--enable-metrics", "--max-queued-requests", "40")
SHARED = ["Once upon a time " * 12, "The quick brown fox jumps over " * 8, "def main(arguments): return " * 6]
LIMIT_S = 300.0
LONG = {"max_new_tokens": 3000, "ignore_eos": True, "temperature": 0.0}


def prompts() -> list[str]:
    return [f"{SHARED[i % 3]}{i}" for i in range(30)]


def greedy(tokens: int = 12) -> dict[str, Any]:
    return {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(*FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=LIMIT_S) as client:
        yield client


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json() if reply.content else None


def states(http: httpx.Client) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = http.get("/server_info").json()["internal_states"]
    return result


def wait_until(condition: Callable[[], object], limit_s: float = LIMIT_S, seen: object = "") -> None:
    """seen: told where it fails."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"it did not come to that: {seen}"
        time.sleep(0.05)


def wait_for_counts(http: httpx.Client, counter: str, expected: Callable[[list[int]], bool]) -> None:
    """Until a counter of each replica is as expected; fails with all that it was."""
    seen: list[list[int]] = []

    def as_expected() -> bool:
        counts = [state[counter] for state in states(http)]
        if counts not in seen[-1:]:
            seen.append(counts)
        return expected(counts)

    wait_until(as_expected, seen=seen)


LAYOUTS = {
    "": RankLayout(),
    "--tp-size 2": RankLayout(2),
    "--pp-size 2": RankLayout(pp_size=2),
    "--tp-size 2 --ep-size 2": RankLayout(2, 2),
    "--tp-size 2 --attn-dp-size 2": RankLayout(2, attn_dp_size=2),
}
"""Of a replica, of which there are two."""


def processes(ranks: RankLayout) -> tuple[str, ...]:
    """Names of the processes of two replicas, in the order of their start."""
    each = [f" {ranks.name(rank)}" if ranks.world_size > 1 else "" for rank in range(ranks.world_size)]
    return tuple(name for i in range(2) for name in (*(f"DP{i}{rank}" for rank in each), f"detokenizer DP{i}"))


ENDS = [
    *((layout, name, signal.SIGKILL) for layout in LAYOUTS for name in processes(LAYOUTS[layout])),
    *(("--tp-size 2", name, signal.SIGSTOP) for name in processes(LAYOUTS["--tp-size 2"])),
]
"""(layout, which process, what it gets)."""


def processes_below(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def children(server: LiveServer, names: Sequence[str] = processes(RankLayout()), fresh: bool = False) -> dict[str, int]:
    """Returns their process ids by name. fresh: they were spawned."""
    spawned = processes_below(server.process.pid)
    if fresh:
        spawned = [pid for pid in spawned if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    else:
        (fork_server,) = spawned
        spawned = processes_below(fork_server)
    spawned = [pid for pid in spawned if Path(f"/proc/{pid}/comm").read_text().strip() != JOB_NAME]
    spawned.sort(key=lambda child: int(Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[19]))
    return dict(zip(names, spawned, strict=True))


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


def test_answers_are_those_of_one(http: httpx.Client) -> None:
    """Greedy tokens of 30 requests at once, with prefixes in common, half of them streamed."""
    with (
        forked_children(),
        sglang.Engine(
            model_path=DEFAULT_MODEL_PATH, device="cpu", dtype="float32", max_total_tokens=4096, random_seed=0
        ) as engine,
    ):
        expected = [result["output_ids"] for result in engine.generate(prompts(), greedy())]

    def ask(i: int) -> list[int]:
        body = {"text": prompts()[i], "sampling_params": greedy(), "stream": bool(i % 2)}
        if not i % 2:
            result: list[int] = post(http, "/generate", **body)["output_ids"]
            return result
        with http.stream("POST", "/generate", json=body) as reply:
            events = [line[6:] for line in reply.iter_lines() if line.startswith("data: {")]
        result = json.loads(events[-1])["output_ids"]
        return result

    before = [state["num_generated_tokens"] for state in states(http)]
    with ThreadPoolExecutor(10) as threads:
        assert list(threads.map(ask, range(30))) == expected
    after = [state["num_generated_tokens"] for state in states(http)]
    assert all(late > early for early, late in zip(before, after, strict=True)), "both replicas have answered"
    batch = post(http, "/generate", text=prompts(), sampling_params=greedy())
    assert [result["output_ids"] for result in batch] == expected


def test_prefixes_draw_requests_to_their_replica(http: httpx.Client) -> None:
    assert http.post("/flush_cache").status_code == 200
    text = "A prefix that only this test has, of some length, told again. " * 6
    first = post(http, "/generate", text=text, sampling_params=greedy(2))
    again = [post(http, "/generate", text=text + str(i), sampling_params=greedy(2)) for i in range(6)]
    assert first["meta_info"]["cached_tokens"] == 0
    assert all(result["meta_info"]["cached_tokens"] > 32 for result in again)


def test_a_session_stays_with_its_replica(http: httpx.Client) -> None:
    session, cached, rid = post(http, "/open_session", capacity_of_str_len=1000), [], None
    for turn in range(4):
        post(http, "/generate", text=f"something else {turn}", sampling_params=greedy(2))  # the other one's turn
        params = {"id": session, "rid": rid}
        reply = post(http, "/generate", text=f"Turn {turn}.", sampling_params=greedy(4), session_params=params)
        rid = reply["meta_info"]["id"]
        cached.append(reply["meta_info"]["cached_tokens"])
    assert cached[0] < cached[1] < cached[2] < cached[3]
    assert http.post("/close_session", json={"session_id": session}).status_code == 200


def agents_turns(http: httpx.Client, name: str, turns: int) -> list[int]:
    """Returns the cached tokens of an agent's turns, each of which repeats the one before."""
    cached = []
    for turn in range(1, turns + 1):
        body = {"text": SHARED[0] + f"{name} tells it again. " * (4 * turn), "sampling_params": greedy(2)}
        reply = http.post("/generate", json=body, headers={"x-session-id": name})
        assert reply.status_code == 200, reply.text
        cached.append(reply.json()["meta_info"]["cached_tokens"])
    return cached


@pytest.mark.parametrize("layout", ["--dp-size 2", "--tp-size 2 --attn-dp-size 2"])
def test_agents_stay_where_their_prefix_is(layout: str) -> None:
    """Two agents with the same instructions: the second one begins at the other replica, which has not seen them. When
    a replica has ended, its agent goes on at the other one, and stays there."""
    affinity = ("--load-balance-method", "prefix_affinity", "--prefix-affinity-fallback", "round_robin")
    flags = (*layout.split(), *affinity, "--max-total-tokens", "4096")
    with live_server(*flags) as server, httpx.Client(base_url=server.url, timeout=LIMIT_S) as http:
        for name in ("Ada", "Bob"):
            first, *later = agents_turns(http, name, 4)
            assert first == 0 and later == sorted(later) and later[0] > 60
        if layout == "--dp-size 2":
            pids = children(server)
            os.kill(pids["DP0"], signal.SIGKILL)
            wait_until(lambda: gone(pids["detokenizer DP0"]))
            first, *later = agents_turns(http, "Ada", 4)
            assert 0 < first < later[0] < later[1] < later[2], "Bob's instructions, then its own turns"
            assert min(agents_turns(http, "Bob", 4)) > 60


def test_grammars_hold_on_both(http: httpx.Client) -> None:
    params = {**greedy(8), "regex": "(yes|no), [0-9]{3}", "ignore_eos": False}
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(post, http, "/generate", text=f"{i}?", sampling_params=params) for i in range(4)]
    for call in calls:
        text = call.result()["text"]
        assert text.split(", ")[0] in ("yes", "no"), text


def test_aborts_reach_the_replica(http: httpx.Client) -> None:
    rids = [f"long-{i}" for i in range(4)]
    with ThreadPoolExecutor(4) as threads:
        calls = [
            threads.submit(http.post, "/generate", json={"text": rid, "rid": rid, "sampling_params": LONG})
            for rid in rids
        ]
        wait_for_counts(http, "num_unfinished_reqs", lambda counts: sum(counts) == 4 and min(counts) > 0)
        for rid in rids[:3]:
            post(http, "/abort_request", rid=rid)
        wait_until(lambda: sum(call.done() for call in calls) == 3)
        assert not calls[3].done()
        post(http, "/abort_request", abort_all=True)
        assert {call.result().json()["meta_info"]["finish_reason"]["type"] for call in calls} == {"abort"}
    assert [state["num_unfinished_reqs"] for state in states(http)] == [0, 0]


def test_a_pause_holds_on_both(http: httpx.Client) -> None:
    wait_for_counts(http, "num_unfinished_reqs", lambda counts: counts == [0, 0])
    post(http, "/pause_generation", mode="in_place")
    with ThreadPoolExecutor(2) as threads:
        try:
            calls = [threads.submit(post, http, "/generate", text=f"p{i}", sampling_params=greedy(2)) for i in range(2)]
            wait_for_counts(http, "num_unfinished_reqs", lambda counts: counts == [1, 1])
            assert not any(call.done() for call in calls)
        finally:
            post(http, "/continue_generation")
        assert all(call.result()["output_ids"] for call in calls)


def test_one_that_is_busy_refuses_a_flush_for_all(http: httpx.Client) -> None:
    with ThreadPoolExecutor(1) as threads:
        threads.submit(http.post, "/generate", json={"text": "busy", "sampling_params": LONG})
        wait_for_counts(http, "num_running_reqs", any)
        refused = http.post("/flush_cache")
        post(http, "/abort_request", abort_all=True)
    assert refused.status_code == 400 and re.search("Replica [01]: The cache was not flushed", refused.text)
    assert http.post("/flush_cache").status_code == 200


def test_loads_and_metrics_have_a_row_for_each(http: httpx.Client) -> None:
    assert [load["dp_rank"] for load in http.get("/get_load").json()] == [0, 1]
    loads = http.get("/v1/loads").json()
    assert loads["dp_rank_count"] == 2 and [load["dp_rank"] for load in loads["loads"]] == [0, 1]
    assert [state["dp_rank"] for state in states(http)] == [0, 1]
    page = http.get("/metrics").text
    for line in ('num_running_reqs{dp_rank="0"', 'num_running_reqs{dp_rank="1"', 'replica_up{dp_rank="1"'):
        assert f"sglang:{line}" in page


def test_one_dies_and_then_the_other() -> None:
    """What ran on the first ends with 503, everything else goes on; with the second the server ends."""
    with live_server(*FLAGS) as server, httpx.Client(base_url=server.url, timeout=LIMIT_S) as http:
        pids = children(server)
        replies: dict[str, httpx.Response | Exception] = {}

        def ask(name: str, tokens: int) -> None:
            params = {**LONG, "max_new_tokens": tokens}
            try:
                replies[name] = httpx.post(
                    f"{server.url}/generate", json={"text": name, "sampling_params": params}, timeout=LIMIT_S
                )
            except httpx.HTTPError as error:
                replies[name] = error

        threads = [threading.Thread(target=ask, args=(name, 300)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        wait_for_counts(http, "num_running_reqs", lambda counts: counts == [1, 1])
        os.kill(pids["DP0"], signal.SIGKILL)
        for thread in threads:
            thread.join(LIMIT_S)
        texts = {reply.status_code: reply.text for reply in replies.values() if isinstance(reply, httpx.Response)}
        assert sorted(texts) == [200, 503] and "Replica 0 of the server has failed" in texts[503]
        assert "killed by SIGKILL" in texts[503]
        wait_until(lambda: gone(pids["detokenizer DP0"]))
        assert http.get("/health").status_code == 200
        assert "failure" in states(http)[0] and "failure" not in states(http)[1]
        assert [load["dp_rank"] for load in http.get("/get_load").json()] == [1]
        up = [line for line in http.get("/metrics").text.splitlines() if line.startswith("sglang:replica_up")]
        assert [line[-3:] for line in up] == ["0.0", "1.0"]
        for i in range(4):
            assert post(http, "/generate", text=f"later {i}", sampling_params=greedy(2))["output_ids"]
        assert http.post("/flush_cache").status_code == 200
        assert "Replica 0 is taken out, 1 of 2 serve on." in server.log()
        os.kill(pids["detokenizer DP1"], signal.SIGKILL)
        assert server.wait_exit() == 1
        assert all(gone(pid) for pid in pids.values())
        left = [path.name for path in server.log_path.parent.glob("sglang-*")]
        assert not left, "sockets and shared arrays are removed"


@pytest.mark.failures
@pytest.mark.parametrize(("layout", "name", "number"), ENDS)
def test_a_process_takes_its_replica_down_and_no_other(layout: str, name: str, number: signal.Signals) -> None:
    with live_server(*layout.split(), "--watchdog-timeout", "4", *FLAGS) as server:
        pids = children(server, processes(LAYOUTS[layout]))
        lost = name.removeprefix("detokenizer ")[:3]
        os.kill(pids[name], number)
        wait_until(lambda: all(gone(pid) for other, pid in pids.items() if lost in other))
        assert not any(gone(pid) for other, pid in pids.items() if lost not in other)
        with httpx.Client(base_url=server.url, timeout=LIMIT_S) as http:
            assert http.get("/health").status_code == 200
            batch = post(http, "/generate", text=prompts()[:10], sampling_params=greedy(2))
        assert all(len(result["output_ids"]) == 2 for result in batch)
        who = name if name.startswith("detokenizer") else f"scheduler {name}"
        how = "died (killed by SIGKILL)" if number == signal.SIGKILL else "does not answer (--watchdog-timeout 4)"
        assert f"the {who} process {how}" in server.log()


@pytest.mark.failures
@pytest.mark.parametrize("layout", ["--tp-size 2", "--tp-size 2 --attn-dp-size 2"])
@pytest.mark.parametrize(("half", "rank"), list(zip(COLLECTIVES, (1, 0), strict=True)))
def test_a_rank_that_dies_inside_a_half_takes_its_replica_down(
    layout: str, half: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other replica computes the next prompt, also in halves."""
    armed = dies_inside(half, rank, tmp_path, monkeypatch)
    flags = (*layout.split(), *TWO_BATCH_THRESHOLDS, "--watchdog-timeout", "4", *FLAGS)
    with live_server(*flags, fresh=True) as server:  # Python runs what arms a rank when a process starts
        pids = children(server, processes(LAYOUTS[layout]), fresh=True)
        with httpx.Client(base_url=server.url, timeout=LIMIT_S) as http:
            armed.touch()
            body = {"input_ids": PROMPT, "sampling_params": greedy(2)}
            failed = http.post("/generate", json=body)
            armed.unlink()
            name = next(name for name in ("DP0", "DP1") if any(gone(pid) for of, pid in pids.items() if name in of))
            who = f"the scheduler {name} {LAYOUTS[layout].name(rank)} process died (killed by SIGKILL)"
            assert failed.status_code == 503 and who in failed.text, failed.text
            wait_until(lambda: all(gone(pid) for of, pid in pids.items() if name in of))
            assert not any(gone(pid) for of, pid in pids.items() if name not in of)
            assert len(post(http, "/generate", **body)["output_ids"]) == 2
            assert max(state.get("halved_steps", 0) for state in states(http)) > 0
        assert who in server.log()
