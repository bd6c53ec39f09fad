"""A server with prefixes in files that is started again: it finds those of the first one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
from live_server import live_server

IDS = [5 + i * 7 % 200 for i in range(300)]
BODY = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}


def metrics(client: httpx.Client) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in client.get("/metrics").text.splitlines() if line.startswith("sglang:")]
    return {
        series.partition("{")[0] + series.partition("cache_source=")[2][:9]: float(value) for series, _, value in lines
    }


def ask(directory: Path) -> tuple[dict[str, Any], dict[str, float], dict[str, Any]]:
    """Returns the answer, and then the metrics and what the server says of itself, once everything is written."""
    extra = {"storage_dir": str(directory), "max_size": "100M", "prefetch_threshold": 64}
    flags = ("--enable-hierarchical-cache", "--hicache-ratio", "1", "--hicache-write-policy", "write_through")
    storage = ("--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config", json.dumps(extra))
    policy = ("--hicache-storage-prefetch-policy", "wait_complete", "--enable-metrics", "--max-total-tokens", "2048")
    with (
        live_server(*flags, *storage, *policy) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        answer = client.post("/generate", json=BODY).raise_for_status().json()
        deadline = time.monotonic() + 60
        while (seen := metrics(client)).get("sglang:prefetched_tokens_total", 0) + seen.get(
            "sglang:backuped_tokens_total", 0
        ) < 256:
            assert time.monotonic() < deadline, seen
            client.post("/generate", json={**BODY, "input_ids": [9, 8, 7]}).raise_for_status()
            time.sleep(0.3)
        return answer, seen, client.get("/server_info").json()


def test_a_server_that_starts_again_finds_the_prefixes_of_the_first(tmp_path: Path) -> None:
    first, seen, info = ask(tmp_path / "files")
    assert first["meta_info"]["cached_tokens_details"] == {"device": 0, "host": 0, "storage": 0}
    assert seen["sglang:backuped_tokens_total"] >= 256 and not seen["sglang:storage_failures_total"]
    assert info["host_cache"]["storage"] == {
        "backend": "file",
        "prefetch_policy": "wait_complete",
        "prefetch_threshold": 64,
    }
    second, seen, _ = ask(tmp_path / "files")
    assert second["text"] == first["text"]
    assert second["meta_info"]["cached_tokens"] == second["meta_info"]["cached_tokens_details"]["storage"] == 256
    assert seen["sglang:prefetched_tokens_total"] == 256 and seen['sglang:cached_tokens_total"storage"'] == 256
    assert [path.name for path in (tmp_path / "files").rglob(".tmp-*")] == []
