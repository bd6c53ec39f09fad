"""verl's own client of SGLang over HTTP, and its own buckets, against a server here; see `test/http/test_trainers.py`.

`make clients` unpacks verl's wheel without what it requires: of its modules only those run that speak to the server.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from live_server import LiveServer, free_port, live_server
from other_weights import write_other_weights
from safetensors.torch import load_file

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.weight_sync.utils import update_weights

VERL = Path(os.environ.get("VERL", Path(__file__).parents[2] / "build" / "verl"))
"""VERL: the folder that has the package `verl`."""
ROLLOUT = "verl.workers.rollout"
BUCKET_BYTES = 1 << 22
FLAGS = ("--enable-memory-saver", "--enable-weights-cpu-backup", "--max-total-tokens", "2048")
MESH: Any = {"infer_tp": SimpleNamespace(get_local_rank=lambda: 0)}
PARAMS = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def verl() -> Iterator[SimpleNamespace]:
    """Its client, and its buckets. Packages are empty: their `__init__` would need Ray and more."""
    if not (VERL / "verl").is_dir():
        pytest.skip("verl is not installed: make clients")
    before = set(sys.modules)
    for name in ("verl", "verl.utils", "verl.workers", ROLLOUT, f"{ROLLOUT}.sglang_rollout"):
        package = ModuleType(name)
        package.__path__ = [str(VERL / name.replace(".", "/"))]
        sys.modules[name] = package
    device, rollout = ModuleType("verl.utils.device"), ModuleType(f"{ROLLOUT}.utils")
    device.get_device_name = lambda: "cpu"  # type: ignore[attr-defined]
    rollout.ensure_async_iterator = _each  # type: ignore[attr-defined]
    sys.modules |= {device.__name__: device, rollout.__name__: rollout}
    try:
        client = importlib.import_module(f"{ROLLOUT}.sglang_rollout.http_server_engine")
        buckets = importlib.import_module(f"{ROLLOUT}.sglang_rollout.utils")
        yield SimpleNamespace(
            Client=client.HttpServerAdapter, AsyncClient=client.AsyncHttpServerAdapter,
            get_named_tensor_buckets=buckets.get_named_tensor_buckets,
        )  # fmt: skip
    finally:
        for name in {*sys.modules} - before:
            if name.partition(".")[0] == "verl":
                del sys.modules[name]


async def _each(items: Any) -> Any:
    for item in items:
        yield item


@pytest.fixture(scope="module")
def served() -> Iterator[LiveServer]:
    with live_server(*FLAGS) as running:
        yield running


def flags(served: LiveServer) -> dict[str, Any]:
    return {"model_path": DEFAULT_MODEL_PATH, "host": "127.0.0.1", "port": int(served.url.rpartition(":")[2])}


def test_a_round_of_training(verl: SimpleNamespace, served: LiveServer, tmp_path: Path) -> None:
    """What verl's `ServerAdapter` does between two rounds of generation."""
    folders = (DEFAULT_MODEL_PATH, str(write_other_weights(tmp_path / "other")))
    first, second = (load_file(Path(folder) / "model.safetensors") for folder in folders)
    engine = verl.AsyncClient(launch_server=False, **flags(served))

    async def generate() -> list[int]:
        answer = await engine.generate(input_ids=[3, 4, 5, 6], sampling_params=PARAMS)
        ids: list[int] = answer["output_ids"]
        return ids

    async def replace(tensors: dict[str, Any]) -> int:
        await engine.release_memory_occupation(tags=["kv_cache", "weights"])
        await engine.resume_memory_occupation(tags=["weights"])
        count = 0
        async for batch in verl.get_named_tensor_buckets(iter(tensors.items()), BUCKET_BYTES):
            await update_weights(engine=engine, params_batch=batch, device_mesh_key="infer_tp", device_mesh=MESH)
            count += 1
        await engine.flush_cache()
        await engine.resume_memory_occupation(tags=["kv_cache"])
        return count

    async def rounds() -> None:
        old = await generate()
        assert await replace(second) > 2
        new = await generate()
        assert new != old
        await replace(first)
        assert await generate() == old
        assert await engine.abort_request(abort_all=True) == {}

    asyncio.run(rounds())


def test_the_client_that_waits(verl: SimpleNamespace, served: LiveServer) -> None:
    engine = verl.Client(launch_server=False, **flags(served))
    old = engine.generate(input_ids=[3, 4, 5, 6], sampling_params=PARAMS)["output_ids"]
    engine.flush_cache()
    engine.release_memory_occupation()
    engine.resume_memory_occupation()
    assert engine.generate(input_ids=[3, 4, 5, 6], sampling_params=PARAMS)["output_ids"] == old


def test_the_client_that_starts_the_server(verl: SimpleNamespace) -> None:
    """In a process that is forked from the trainer's; flags have the names of SGLang's."""
    given = {"model_path": DEFAULT_MODEL_PATH, "host": "127.0.0.1", "port": free_port(), "max_total_tokens": 2048}
    engine = verl.Client(first_rank_in_node=True, gpu_id_step=1, **given)
    try:
        answer = engine.generate(input_ids=[3, 4, 5, 6], sampling_params=PARAMS)
        assert len(answer["output_ids"]) == PARAMS["max_new_tokens"]
    finally:
        engine.shutdown()
        engine.process.join(300)
    assert engine.process.exitcode is not None
