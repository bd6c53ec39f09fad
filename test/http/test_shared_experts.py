"""Two replicas with experts in main memory: one copy of them, the answers of a server that keeps them resident, and a
replica that is killed leaves the other its experts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from live_server import LiveServer, live_server
from srt.models.harness import random_tokens, save_tiny

PARAMS = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
FLAGS = ("--skip-tokenizer-init", "--max-total-tokens", "1024", "--chunked-prefill-size", "16")


def answers_of(server: LiveServer) -> list[Any]:
    prompts = [random_tokens(3 + number, seed=number) for number in range(4)]
    replies = [
        httpx.post(f"{server.url}/generate", json={"input_ids": ids, "sampling_params": PARAMS}, timeout=300)
        for ids in prompts
    ]
    return [reply.json()["output_ids"] for reply in replies]


def holders_of_banks(server: LiveServer) -> dict[int, set[str]]:
    """The inodes of banks by the process that has mapped them."""
    found = {}
    for process in psutil.Process(server.process.pid).children(recursive=True):
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        except OSError:  # it has ended meanwhile
            continue
        if inodes := {line.split()[4] for line in maps if "memfd:experts" in line}:
            found[process.pid] = inodes
    return found


@pytest.mark.parametrize("killed", ["loads", pytest.param("follows", marks=pytest.mark.thorough)])
def test_replicas_share_a_bank_that_outlives_each_of_them(killed: str, tmp_path: Path) -> None:
    save_tiny("qwen3_moe", tmp_path)
    with live_server("--model-path", str(tmp_path), *FLAGS) as resident:
        want = answers_of(resident)
        assert not holders_of_banks(resident)
    more = ("--enable-paged-experts", "--paged-experts-num-resident", "3", "--dp-size", "2")
    balanced = ("--load-balance-method", "total_requests")
    with live_server("--model-path", str(tmp_path), *FLAGS, *more, *balanced) as server:
        holders = holders_of_banks(server)
        assert len(holders) == 2 and len(set().union(*holders.values())) == 1, "two processes, one bank"
        assert answers_of(server) == want
        info = httpx.get(f"{server.url}/server_info", timeout=300).json()
        assert (info["expert_slots"]["processes"], info["expert_slots"]["banks"]) == (2, 1)
        (index,) = server.log_path.parent.glob("sglang-*/bank-0-*.json")
        loads = json.loads(index.read_text())["process"]
        psutil.Process(loads if killed == "loads" else next(iter(holders.keys() - {loads}))).kill()
        while "died (killed by SIGKILL)" not in server.log():
            time.sleep(0.05)
        assert len(holders_of_banks(server)) == 1
        assert answers_of(server) == want
        assert server.health() == 200
