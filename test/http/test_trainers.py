"""The calls of trainers in their order: generate, sleep, wake the weights, send other ones in buckets, wake the caches,
generate. What verl 0.9.1 and slime send is written here as they send it; `make clients` has verl's own client.

They send no key, and their tensors are files of the user that the server runs as.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server
from other_weights import write_other_weights
from safetensors.torch import load_file

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.entrypoints.EngineBase import EngineBase
from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.sent_tensors import FOLDER, PREFIX
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
from sglang.srt.weight_sync.utils import update_weights

FLAGS = ("--enable-memory-saver", "--skip-server-warmup", "--max-total-tokens", "2048")
PARAMS = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
MESH: Any = {"infer_tp": SimpleNamespace(get_local_rank=lambda: 0)}
"""The part of torch's DeviceMesh that is asked for."""


@pytest.fixture(scope="module")
def served() -> Iterator[LiveServer]:
    with live_server(*FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def http(served: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = write_other_weights(tmp_path_factory.mktemp("other") / "model")
    return load_file(folder / "model.safetensors")


def generate(http: httpx.Client) -> list[int]:
    answer = http.post("/generate", json={"input_ids": [3, 4, 5, 6], "sampling_params": PARAMS})
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["output_ids"]
    return ids


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()  # also of the calls that say nothing: slime reads it


def buckets(tensors: dict[str, Any], count: int) -> list[list[tuple[str, Any]]]:
    names = sorted(tensors)
    return [[(name, tensors[name]) for name in names[i::count]] for i in range(count)]


def left_files() -> list[Path]:
    return [path for path in FOLDER.iterdir() if path.name.startswith(f"{PREFIX}{os.getpid()}-")]


class Client(EngineBase):
    """Sends what verl's client sends."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    async def update_weights_from_tensor(self, req: UpdateWeightsFromTensorReqInput) -> Any:  # type: ignore[override]
        body = {
            "serialized_named_tensors": [base64.b64encode(each).decode() for each in req.serialized_named_tensors],
            "load_format": req.load_format,
            "flush_cache": req.flush_cache,
        }
        return post(self.http, "/update_weights_from_tensor", body)

    def generate(self) -> list[int]:  # type: ignore[override]
        return generate(self.http)

    def flush_cache(self) -> None:
        assert self.http.get("/flush_cache").status_code == 200

    def release_memory_occupation(self, tags: list[str]) -> None:  # type: ignore[override]
        assert post(self.http, "/release_memory_occupation", {"tags": tags}) is None

    def resume_memory_occupation(self, tags: list[str]) -> None:  # type: ignore[override]
        assert post(self.http, "/resume_memory_occupation", {"tags": tags}) is None

    def shutdown(self) -> None:
        pass


def test_the_calls_of_verl(http: httpx.Client, other: dict[str, Any]) -> None:
    engine = Client(http)
    engine.flush_cache()
    old = engine.generate()
    for tensors, differs in ((other, True), (load_file(Path(DEFAULT_MODEL_PATH) / "model.safetensors"), False)):
        engine.release_memory_occupation(["kv_cache", "weights"])
        engine.resume_memory_occupation(["weights"])
        for batch in buckets(tensors, 3):
            answer = asyncio.run(update_weights(engine, batch, "infer_tp", MESH))
            assert answer["success"], answer
        engine.flush_cache()
        engine.resume_memory_occupation(["kv_cache"])
        assert (engine.generate() != old) == differs
    assert not left_files()


def test_the_calls_of_slime(http: httpx.Client, other: dict[str, Any]) -> None:
    old = generate(http)
    assert http.get("/flush_cache").status_code == 200
    post(http, "/release_memory_occupation", {})
    post(http, "/resume_memory_occupation", {"tags": ["weights"]})
    assert post(http, "/pause_generation", {})["status"] == "ok"
    for number, batch in enumerate(buckets(other, 2)):
        bucket = FlattenedTensorBucket(named_tensors=batch)
        sent = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        handle = MultiprocessingSerializer.serialize(sent, output_str=True)
        body = {"serialized_named_tensors": [handle], "load_format": "flattened_bucket", "flush_cache": False}
        assert post(http, "/update_weights_from_tensor", body | {"weight_version": str(number)})["success"]
    post(http, "/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    assert post(http, "/continue_generation", {})["status"] == "ok"
    assert http.get("/get_weight_version").json() == {"weight_version": "1"}
    assert generate(http) != old
    assert not left_files()


def test_a_bucket_is_what_was_put_into_it(other: dict[str, Any]) -> None:
    batch = buckets(other, 4)[0]
    bucket = FlattenedTensorBucket(named_tensors=batch)
    again = FlattenedTensorBucket(flattened_tensor=bucket.get_flattened_tensor(), metadata=bucket.get_metadata())
    for (name, tensor), (found, copy) in zip(batch, again.reconstruct_tensors(), strict=True):
        assert name == found and tensor.dtype == copy.dtype and bool((tensor == copy).all())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("../etc/passwd", "names no file"),
        ("sglang-sent-none", "not on this machine"),
        ("sglang-sent-open", "not of the"),
    ],
)
def test_handles_of_other_files(http: httpx.Client, name: str, said: str) -> None:
    file = FOLDER / "sglang-sent-open"
    file.write_bytes(b"")
    file.chmod(0o666)  # whom it is from cannot be known
    try:
        sent = base64.b64encode(b"sglang-sent-file:" + name.encode()).decode()
        answer = http.post("/update_weights_from_tensor", json={"serialized_named_tensors": [sent]})
        assert answer.status_code == 403 and said in answer.text
        with pytest.raises(ValueError, match=said):
            MultiprocessingSerializer.deserialize(sent)
    finally:
        file.unlink()


def test_a_page_may_not_flush_by_get(http: httpx.Client) -> None:
    headers = {"Sec-Fetch-Site": "cross-site"}
    for path in ("/flush_cache", "/release_memory_occupation", "/resume_memory_occupation"):
        assert http.get(path, headers=headers).status_code == 403
        assert http.get(path).status_code == 200
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}
