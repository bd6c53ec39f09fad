"""New weights over HTTP: keys, bodies, what is refused, and the answers of SGLang's routes."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from live_server import LiveServer, live_server
from other_weights import write_other_weights
from safetensors.torch import load_file, save

from sglang.embedded import DEFAULT_MODEL_PATH

KEY = {"Authorization": "Bearer admin"}
PARAMS = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
ROUTES = (
    "/update_weights_from_disk", "/update_weights_from_tensor", "/update_weights_from_distributed",
    "/init_weights_update_group", "/destroy_weights_update_group", "/begin_weight_update", "/end_weight_update",
    "/update_weight_version", "/get_weights_by_name", "/weights_checker",
)  # fmt: skip


@pytest.fixture(scope="module")
def served() -> Iterator[LiveServer]:
    with live_server("--admin-api-key", "admin", "--weight-version", "v0") as running:
        yield running


@pytest.fixture(scope="module")
def http(served: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=300, headers=KEY) as client:
        yield client


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_other_weights(tmp_path_factory.mktemp("other") / "model")


def generate(http: httpx.Client) -> dict[str, Any]:
    answer = http.post("/generate", json={"text": "The capital of France is", "sampling_params": PARAMS}, headers={})
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


def test_routes_are_the_administrators(served: LiveServer) -> None:
    with httpx.Client(base_url=served.url) as client:
        assert {client.post(route, json={}).status_code for route in ROUTES} == {401}


def test_servers_without_a_key_refuse() -> None:
    with live_server() as running, httpx.Client(base_url=running.url) as client:
        answer = client.post("/update_weights_from_disk", json={"model_path": DEFAULT_MODEL_PATH})
        assert answer.status_code == 403 and "--admin-api-key" in answer.text
    with live_server("--weight-updates-without-key") as running, httpx.Client(base_url=running.url) as client:
        assert client.post("/update_weight_version", json={"new_version": "v1"}).status_code == 200
        assert client.get("/weight_version").json() == {"weight_version": "v1"}


def test_a_round_of_updates(http: httpx.Client, other: Path) -> None:
    first = generate(http)
    assert first["meta_info"]["weight_version"] == "v0"
    body = {"model_path": str(other), "weight_version": "v1", "abort_all_requests": True}
    answer = http.post("/update_weights_from_disk", json=body)
    assert (answer.status_code, answer.json()["success"], answer.json()["num_paused_requests"]) == (200, True, 0)
    second = generate(http)
    assert second["output_ids"] != first["output_ids"] and second["meta_info"]["weight_version"] == "v1"
    chat = http.post("/v1/completions", json={"prompt": "a", "model": "m", "max_tokens": 1}).json()
    assert chat["metadata"] == {"weight_version": "v1"}
    assert http.get("/model_info").json()["model_path"] == str(other)

    assert http.post("/pause_generation", json={"mode": "retract"}).json()["status"] == "ok"
    tensors = load_file(Path(DEFAULT_MODEL_PATH) / "model.safetensors")
    sent = {"serialized_named_tensors": [base64.b64encode(save(tensors)).decode()], "weight_version": "v2"}
    answer = http.post("/update_weights_from_tensor", json=sent)
    assert answer.json()["success"], answer.text
    assert http.post("/continue_generation").json()["status"] == "ok"
    assert generate(http)["output_ids"] == first["output_ids"]

    name = "model.layers.0.self_attn.q_proj.weight"
    values = http.post("/get_weights_by_name", json={"name": name, "truncate_size": 3}).json()
    assert values == tensors[name].flatten()[:3].float().tolist()
    assert http.post("/get_weights_by_name", json={"name": "nothing"}).status_code == 400
    answer = http.post("/update_weight_version", json={"new_version": "v3"}).json()
    assert answer["success"] and answer["new_version"] == "v3"
    assert generate(http)["meta_info"]["weight_version"] == "v3"


def test_a_flattened_bucket(http: httpx.Client, other: Path) -> None:
    http.post("/update_weights_from_disk", json={"model_path": DEFAULT_MODEL_PATH})
    old = generate(http)["output_ids"]
    tensors, entries, parts, begin = load_file(other / "model.safetensors"), [], [], 0
    for name, tensor in tensors.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        entries.append({"name": name, "dtype": kind, "shape": list(tensor.shape), "begin": begin})
        parts.append(tensor.contiguous().view(-1).view(torch.uint8))
        begin += tensor.nbytes
    flat = {"flattened_tensor": torch.cat(parts)}
    data = base64.b64encode(save(flat, {"bucket": json.dumps(entries)})).decode()
    body = {"serialized_named_tensors": [data], "load_format": "flattened_bucket"}
    assert http.post("/update_weights_from_tensor", json=body).json()["success"]
    assert generate(http)["output_ids"] != old
    entries[-1]["begin"] += 1000
    data = base64.b64encode(save(flat, {"bucket": json.dumps(entries)})).decode()
    answer = http.post("/update_weights_from_tensor", json=body | {"serialized_named_tensors": [data]})
    assert answer.status_code == 400 and "does not lie in the bucket" in answer.text
    http.post("/update_weights_from_disk", json={"model_path": DEFAULT_MODEL_PATH})


class _Code:
    def __reduce__(self) -> Any:
        return (open, ("/tmp/pickled-code-ran", "w"))


@pytest.mark.parametrize(
    ("route", "body", "said"),
    [
        (0, {"model_path": "/nothing"}, "not replaced"),
        (0, {"model_path": DEFAULT_MODEL_PATH, "manifest": {}}, "manifest"),
        (1, {"serialized_named_tensors": ["?"]}, "base64"),
        (1, {"serialized_named_tensors": [base64.b64encode(pickle.dumps(_Code())).decode()]}, "pickle"),
        (1, {"serialized_named_tensors": [base64.b64encode(b"nonsense" * 9).decode()]}, ""),
        (1, {"serialized_named_tensors": ["AAAA"], "load_format": "my.loader"}, "load_format"),
        (1, {"serialized_named_tensors": ["AAAA"], "load_format": "flattened_bucket"}, "bucket"),
        (2, {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[1]]}, "no group"),
        (2, {"names": ["a"], "dtypes": [], "shapes": [[1]]}, "one length"),
        (2, {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[1 << 40]]}, "shape"),
        (4, {}, "no group"),
        (6, {}, "no update has begun"),
        (9, {"action": "compare"}, "no snapshot"),
    ],
)
def test_wrong_calls_are_refused(http: httpx.Client, route: int, body: dict[str, Any], said: str) -> None:
    answer = http.post(ROUTES[route], json=body)
    assert answer.status_code == 400 and said in answer.text, answer.text
    assert not Path("/tmp/pickled-code-ran").exists()
    generate(http)


def test_the_checker(http: httpx.Client) -> None:
    def check(action: str) -> Any:
        return http.post("/weights_checker", json={"action": action}).json()

    assert check("snapshot")["success"]
    assert check("compare")["success"]
    assert len(check("checksum")["ranks"]) == 1
    assert check("reset_tensors")["success"]
    assert not check("compare")["success"]
    answer = http.post("/generate", json={"text": "a", "sampling_params": PARAMS})
    assert answer.status_code == 503 and "cannot be used" in answer.text
    assert http.post("/update_weights_from_disk", json={"model_path": DEFAULT_MODEL_PATH}).json()["success"]
    assert check("compare")["success"]
    generate(http)
