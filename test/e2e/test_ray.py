"""A server whose ranks a Ray cluster places: here two nodes of this machine, each with two CPUs for ranks. Tokens are
those of one process; what goes wrong is said within a minute, and nothing is left behind. `make ray` runs it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer, free_port, fresh_server, live_server
from seen_pictures import RIGHT, seeing_server, seen
from shared_files import arrays_of

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray")

LIMIT_S, LEAVING_S = 300.0, 60.0
PROMPTS = ("What is 431 + 88?", "The capital of France is", "a b c d e f g h i j k l")
NODE = {"num_gpus": 0, "object_store_memory": 80 << 20}
SMALL = ("--max-total-tokens", "4096")


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with live_server(*SMALL) as server:
        return answers(server.url)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Where the processes of nodes have their temporary files."""
    path = Path(tempfile.mkdtemp(prefix="ray-test-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(folder: Path, expected: list[str]) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    before = {name: os.environ.get(name) for name in ("TMPDIR", "PYTHONPATH", "RAY_ADDRESS", "OMP_NUM_THREADS")}
    os.environ |= {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    paths = [str(Path(__file__).parents[2] / "python"), *filter(None, [before["PYTHONPATH"]])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    started = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 2, "include_dashboard": False})
    try:
        started.add_node(num_cpus=2, **NODE)
        os.environ["RAY_ADDRESS"] = started.address
        ray.init(address=started.address, logging_level="error", log_to_driver=False)
        yield started
    finally:
        ray.shutdown()
        started.shutdown()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def placed(folder: Path, *flags: str, start: Callable[..., LiveServer] = fresh_server) -> Iterator[LiveServer]:
    """A server on the cluster; of whatever it started nothing is left."""
    server = start("--use-ray", *SMALL, *flags)
    try:
        yield server
    finally:
        server.end()
        assert not list(server.log_path.parent.glob("sglang-*")), "sockets of the front are left"
        eventually(lambda: not _processes(folder), f"processes are left: {_processes(folder)}")
        eventually(lambda: not list(folder.glob("sglang-*")), "sockets of a node are left")
        eventually(_all_free, "Ray's resources are not given back")


def eventually(condition: Callable[[], bool], why: str, limit_s: float = LEAVING_S) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, why
        time.sleep(0.2)


def _commands(folder: Path) -> Iterator[tuple[int, str]]:
    """Processes of the nodes with their commands."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            environment = (process / "environ").read_bytes()
            state = (process / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if f"TMPDIR={folder}".encode() in environment and state not in "ZX":
            yield int(process.name), command


def _processes(folder: Path) -> list[str]:
    """Commands of our processes on the nodes: actors, and what these spawned."""
    return [text for _, text in _commands(folder) if text.startswith("ray::Machine") or "spawn_main" in text]


def _all_free() -> bool:
    total, free = ray.cluster_resources(), ray.available_resources()
    return bool(total.get("CPU") == free.get("CPU"))


def _said(server: LiveServer) -> str:
    return " ".join(server.log().split())


def answers(url: str) -> list[str]:
    body = {"sampling_params": {"max_new_tokens": 24, "temperature": 0.0}}
    return [httpx.post(f"{url}/generate", json={"text": text, **body}, timeout=300).json()["text"] for text in PROMPTS]


HOST, DRAFTS = "--enable-hierarchical-cache --hicache-ratio 2", "--speculative-algorithm NGRAM"
RANKS = (
    "--tp 2",
    "--tp 2 --nnodes 2",
    "--pp 2 --nnodes 2",
    "--dp 2",
    "--dp 2 --tp 2",
    "--tp 2 --dp 2 --nnodes 2",
    "--tp 2 --nnodes 2 --attn-dp-size 2",
    "--tp 2 --pp 2 --nnodes 2 --attn-dp-size 2",
)
LAYOUTS = [*RANKS, *(f"{ranks} {DRAFTS} {HOST}" for ranks in RANKS)]
"""Ranks on one node and on both, alone; with draft tokens, and prefixes in main memory."""


@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUTS)
def test_placed_ranks_answer_as_one_process(layout: str, expected: list[str], cluster: Any, folder: Path) -> None:
    """Twice; the second time with prompts from the cache, on each of several replicas."""
    with placed(folder, *layout.split()) as server:
        server.wait_up()
        assert answers(server.url) == expected
        assert answers(server.url) == expected
        info = httpx.get(f"{server.url}/server_info", timeout=10).json()
        states = info["internal_states"]
        assert len(states) == (2 if "--dp " in layout else 1)
        assert sum(state.get("spec_totals", {}).get("requests", 0) for state in states) > 0 or DRAFTS not in layout
        nodes = {line.rpartition("runs on ")[2] for line in server.log().splitlines() if "runs on " in line}
        assert nodes, "the log says where"
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit(LIMIT_S) == 0


SEEING = ("--tp 2", "--tp 2 --nnodes 2", "--pp 2 --nnodes 2", "--dp 2", "--tp 2 --nnodes 2 --attn-dp-size 2")


@pytest.mark.parametrize("layout", [*SEEING, "--tp 2 --nnodes 2 --mm-enable-dp-encoder"])
def test_pictures_travel_to_placed_ranks(layout: str, cluster: Any, folder: Path) -> None:
    """To every machine of every replica that is asked about them, and they go when the answers are there."""
    with placed(folder, *layout.split(), start=seeing_server) as server:
        server.wait_up()
        for _ in range(2):
            assert seen(server.url) == RIGHT
        assert _arrays(folder) == [] == arrays_of(server.log_path.parent)


def _arrays(folder: Path) -> list[str]:
    """What the nodes have of pixels when all was said that was to be said."""
    end = time.monotonic() + LEAVING_S
    while arrays_of(folder) and time.monotonic() < end:
        time.sleep(0.1)
    return arrays_of(folder)


def test_an_engine_may_be_placed_by_a_program_of_the_cluster(expected: list[str], cluster: Any, folder: Path) -> None:
    """Which stays connected when the engine ends."""
    from sglang import Engine
    from sglang.embedded import DEFAULT_MODEL_PATH

    with Engine(
        model_path=str(DEFAULT_MODEL_PATH),
        device="cpu",
        dtype="float32",
        use_ray=True,
        tp_size=2,
        max_total_tokens=4096,
    ) as engine:
        results = engine.generate(list(PROMPTS), {"max_new_tokens": 24, "temperature": 0.0})
        assert [result["text"] for result in results] == expected
    assert ray.is_initialized()
    eventually(_all_free, "Ray's resources are not given back")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--tp 4", "takes 4 CPUs of one node for the ranks of the server. The Ray cluster has 2 nodes with 2, 2 CPUs."),
        ("--tp 4", "--nnodes 2 spreads them over nodes."),
        ("--dp 5", "--dp-size 5 --tp-size 1 takes 5 CPUs, and there is room for 4 replicas."),
        ("--tp 3 --nnodes 3", "--nnodes 3 takes 3 nodes with 1 CPUs each, and 2 nodes have as many."),
        ("--tp 2 --nnodes 2 --dist-init-addr 10.9.8.7:5000", "--dist-init-addr names 10.9.8.7, and no node"),
    ],
)
def test_a_cluster_that_is_too_small_is_said(flags: str, said: str, cluster: Any, folder: Path) -> None:
    with placed(folder, *flags.split()) as server:
        assert server.wait_exit(LIMIT_S) == 2
        assert said in _said(server)


def test_gpus_are_asked_for_where_no_device_is_named(cluster: Any, folder: Path) -> None:
    with placed(folder, "--device", "cuda") as server:
        assert server.wait_exit(LIMIT_S) == 2
        assert "no node has GPUs" in _said(server) and "With --device cpu ranks take CPUs." in _said(server)


def test_what_others_use_is_said(cluster: Any, folder: Path) -> None:
    from ray.util.placement_group import placement_group, remove_placement_group

    others = placement_group([{"CPU": 2}, {"CPU": 1}], strategy="STRICT_SPREAD")
    try:
        assert others.wait(300)
        server = LiveServer("--use-ray", *SMALL, "--tp", "2", fresh=True)
        assert server.wait_exit(LIMIT_S) == 2
        assert "did not get its nodes within 20 s" in _said(server)
    finally:
        remove_placement_group(others)
    eventually(_all_free, "Ray's resources are not given back")


def test_no_cluster_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    server = LiveServer("--use-ray", *SMALL, fresh=True)
    assert server.wait_exit(LIMIT_S) == 2
    assert "nobody answers at RAY_ADDRESS" in _said(server)


def test_another_program_at_the_address_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{other.getsockname()[1]}")
        server = LiveServer("--use-ray", *SMALL, fresh=True)
        assert server.wait_exit(LIMIT_S) == 2
        assert "no Ray cluster is reachable" in _said(server)


def test_another_release_on_a_node_is_said(
    cluster: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sglang.version\nsglang.version.__version__ = '0.0.1'\n")
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
        node = cluster.add_node(num_cpus=4, **NODE)
    try:
        with placed(folder, "--tp", "4") as server:  # only that node has room
            assert server.wait_exit(LIMIT_S) == 2
            assert "has 0.0.1. Install the same release everywhere." in _said(server)
    finally:
        cluster.remove_node(node)


def test_ports_that_are_taken_are_said(cluster: Any, folder: Path) -> None:
    host = ray.util.get_node_ip_address()
    with socket.create_server((host, 0)) as taken:
        address = f"{host}:{taken.getsockname()[1]}"
        with placed(folder, "--tp", "2", "--nnodes", "2", "--dist-init-addr", address) as server:
            assert server.wait_exit(LIMIT_S) == 2
            assert "with a port that nothing uses" in _said(server)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = LiveServer("--use-ray", *SMALL, port=taken.getsockname()[1], fresh=True)
        assert server.wait_exit(LIMIT_S) == 2
        assert "cannot listen on 127.0.0.1" in _said(server)


def _node_that_dies(cluster: Any, num_cpus: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A node with temporary files of its own, as another machine has, of which nobody is left to remove them."""
    with monkeypatch.context() as patch:
        (folder / "dies").mkdir(exist_ok=True)
        patch.setenv("TMPDIR", str(folder / "dies"))
        return cluster.add_node(num_cpus=num_cpus, **NODE)


@pytest.mark.parametrize("layout", ["--tp 4", "--tp 3 --nnodes 3"])
def test_a_node_that_dies_ends_the_server(
    layout: str, cluster: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = _node_that_dies(cluster, 4, folder, monkeypatch)
    removed = False
    try:
        with placed(folder, *layout.split()) as server:
            server.wait_up()
            cluster.remove_node(node, allow_graceful=False)
            removed = True
            assert server.wait_exit(LIMIT_S) == 1
            assert "of the server, on node" in _said(server) and "is gone" in _said(server)
    finally:
        if not removed:
            cluster.remove_node(node)


def test_a_replica_whose_node_dies_is_taken_out(
    expected: list[str], cluster: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one serves on."""
    node = _node_that_dies(cluster, 2, folder, monkeypatch)
    removed = False
    try:
        with placed(folder, "--tp", "2", "--dp", "3") as server:
            server.wait_up()
            cluster.remove_node(node, allow_graceful=False)
            removed = True
            eventually(lambda: "is gone" in server.log(), "it is said")
            assert server.health() == 200 and answers(server.url) == expected
    finally:
        if not removed:
            cluster.remove_node(node)


@pytest.mark.parametrize("which", ["actor", "rank", "stopped rank", "server"])
def test_a_process_that_ends_ends_all(which: str, cluster: Any, folder: Path) -> None:
    with placed(folder, "--tp", "2", "--nnodes", "2", "--watchdog-timeout", "15") as server:
        server.wait_up()
        if which == "server":
            os.killpg(server.process.pid, signal.SIGKILL)
            assert server.wait_exit(LIMIT_S) == -signal.SIGKILL
            shutil.rmtree(server.log_path.parent, ignore_errors=True)  # nobody was left to do so
            return
        os.kill(_pid_of(folder, actor=which == "actor"), signal.SIGSTOP if "stopped" in which else signal.SIGKILL)
        assert server.wait_exit(LIMIT_S) == 1
        assert any(text in server.log() for text in ("is gone", "process died", "does not answer"))


def _pid_of(folder: Path, actor: bool) -> int:
    """The first process of that kind."""
    return next(
        pid for pid, text in _commands(folder) if (text.startswith("ray::Machine") if actor else "spawn_main" in text)
    )


def test_ray_serve_runs_several_servers(expected: list[str], cluster: Any, folder: Path) -> None:
    """On both nodes, with answers that stream; a server that dies is started again."""
    from ray import serve

    from sglang.embedded import DEFAULT_MODEL_PATH
    from sglang.ray_serve import application

    flags = {"model_path": str(DEFAULT_MODEL_PATH), "device": "cpu", "dtype": "float32", "max_total_tokens": "4096"}
    port = free_port()
    try:
        serve.start(http_options={"port": port, "host": "127.0.0.1"})
        serve.run(application({**flags, "num_servers": "2", "tp_size": "2", "enable_metrics": "true"}))
        url = f"http://127.0.0.1:{port}"
        assert answers(url) == expected and answers(url) == expected
        assert "sglang:num_running_reqs" in httpx.get(f"{url}/metrics", timeout=10).text
        assert httpx.get(f"{url}/v1/models/none", timeout=10).status_code == 404
        body = {"model": "m", "prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as reply:
            lines = [line for line in reply.iter_lines() if line.startswith("data: ")]
        assert len(lines) > 5 and lines[-1] == "data: [DONE]"
        (first, second) = _servers(folder)
        os.kill(first, signal.SIGKILL)
        eventually(lambda: len(set(_servers(folder)) - {first, second}) == 1, "a new server starts", 60.0)
        eventually(lambda: answers(url) == expected, "it serves", 60.0)
    finally:
        serve.shutdown()
    eventually(lambda: not _servers(folder), "servers are left")
    eventually(lambda: not list(folder.glob("sglang-*")), "sockets are left")


def test_flags_of_ray_serve() -> None:
    from sglang.ray_serve import flags_of

    assert flags_of({"tp_size": "2", "enable_metrics": "true", "log_requests": "false"}) == [
        "--tp-size",
        "2",
        "--enable-metrics",
    ]


def _servers(folder: Path) -> list[int]:
    return [pid for pid, command in _commands(folder) if "-m sglang.ray_serve" in command]
