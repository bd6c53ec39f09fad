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


def ask(directory: Path, attached: bool) -> tuple[dict[str, Any], dict[str, float], dict[str, Any]]:
    """Returns the answer, and then the metrics and what the server says of itself, once everything is written.
    attached: the server starts without the store, which is attached for the answer and then detached."""
    extra = json.dumps({"storage_dir": str(directory), "max_size": "100M", "prefetch_threshold": 64})
    flags = ["--enable-hierarchical-cache", "--hicache-ratio", "1", "--enable-metrics", "--max-total-tokens", "2048"]
    if attached:
        flags += ["--api-key", "secret"]
    else:
        flags += ["--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config", extra]
        flags += ["--hicache-storage-prefetch-policy", "wait_complete", "--hicache-write-policy", "write_through"]
    headers = {"Authorization": "Bearer secret"} if attached else {}
    with live_server(*flags) as server, httpx.Client(base_url=server.url, timeout=300, headers=headers) as client:
        if attached:
            attach(client, extra)
        answer = client.post("/generate", json=BODY).raise_for_status().json()
        deadline = time.monotonic() + 300
        while (seen := metrics(client)).get("sglang:prefetched_tokens_total", 0) + seen.get(
            "sglang:backuped_tokens_total", 0
        ) < 256:
            assert not seen.get("sglang:storage_failures_total"), server.log()[-2000:]
            assert time.monotonic() < deadline, seen
            client.post("/generate", json={**BODY, "input_ids": [9, 8, 7]}).raise_for_status()
            time.sleep(0.3)
        info = client.get("/server_info").json()
        if attached:
            assert client.delete(PATH).json()["success"]
            assert client.get(PATH).json()["hicache_storage_backend"] is None
            client.post("/generate", json=BODY).raise_for_status()
        else:
            refused = client.put(PATH, json={"hicache_storage_backend": "file"})
            assert refused.status_code == 403 and "--api-key" in refused.text
            assert client.get(PATH).json() == {**NOW, "hicache_storage_prefetch_policy": "wait_complete"}
        return answer, seen, info


PATH = "/hicache/storage-backend"
NOW = {
    "hicache_storage_backend": "file",
    "hicache_storage_prefetch_policy": "timeout",
    "hicache_write_policy": "write_through",
}


def attach(client: httpx.Client, extra: str) -> None:
    wanted = {"hicache_storage_backend": "file", "hicache_storage_backend_extra_config_json": extra}
    assert client.get(PATH).json()["hicache_storage_backend"] is None
    for wrong, said in (
        ({"hicache_storage_backend": "hf3fs"}, "hf3fs"),
        ({"hicache_storage_backend": "mooncake"}, "MOONCAKE_MASTER"),
        ({**wanted, "hicache_storage_backend_extra_config_json": "@/etc/passwd"}, "files of the server"),
        ({**wanted, "hicache_storage_backend_extra_config_json": '{"bucket": 1}'}, "bucket"),
    ):
        refused = client.put(PATH, json=wrong)
        assert refused.status_code == 400 and said in refused.text
    dynamic = {"module_path": "os", "class_name": "abort"}
    refused = client.put(
        PATH,
        json={"hicache_storage_backend": "dynamic", "hicache_storage_backend_extra_config_json": json.dumps(dynamic)},
    )
    assert refused.status_code == 403 and "--admin-api-key" in refused.text
    assert client.put(PATH, json={**wanted, "hicache_write_policy": "write_through"}).json()["success"]
    assert client.get(PATH).json() == NOW
    assert "detach it first" in client.put(PATH, json=wanted).text


def test_a_server_that_starts_again_finds_the_prefixes_of_the_first(tmp_path: Path) -> None:
    first, seen, _ = ask(tmp_path / "files", attached=True)
    assert first["meta_info"]["cached_tokens_details"] == {"device": 0, "host": 0, "storage": 0}
    assert seen["sglang:backuped_tokens_total"] >= 256 and not seen["sglang:storage_failures_total"]
    second, seen, info = ask(tmp_path / "files", attached=False)
    assert info["host_cache"]["storage"] == {
        "backend": "file",
        "prefetch_policy": "wait_complete",
        "prefetch_threshold": 64,
    }
    assert second["text"] == first["text"]
    assert second["meta_info"]["cached_tokens"] == second["meta_info"]["cached_tokens_details"]["storage"] == 256
    assert seen["sglang:prefetched_tokens_total"] == 256 and seen['sglang:cached_tokens_total"storage"'] == 256
    assert [path.name for path in (tmp_path / "files").rglob(".tmp-*")] == []
