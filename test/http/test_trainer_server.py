"""A trainer that starts the server itself, in its own process and event loop: the calls of verl 0.9.1's server class in
their order. `make clients` runs that class itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from packaging.version import parse
from PIL import Image

import sglang
import sglang.srt.entrypoints.engine as engine_names
from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.entrypoints import trainer_server
from sglang.srt.entrypoints.http_body import parse_body
from sglang.srt.entrypoints.http_native import GenerateBody
from sglang.srt.entrypoints.http_server import Engine, ServerArgs, _GlobalState, app, set_global_state
from sglang.srt.entrypoints.trainer_server import LaunchedApp, _body, _sendable
from sglang.srt.errors import UserError
from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    GenerateReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from sglang.srt.managers.tokenizer_manager import ServerStatus
from sglang.srt.utils.common import add_prometheus_middleware

ARGS: dict[str, Any] = {
    "model_path": DEFAULT_MODEL_PATH, "dtype": "bfloat16", "mem_fraction_static": 0.5, "disable_cuda_graph": True,
    "enable_memory_saver": True, "base_gpu_id": 0, "gpu_id_step": 1, "tp_size": 1, "dp_size": 1, "ep_size": 1,
    "node_rank": 0, "load_format": "auto", "nnodes": 1, "trust_remote_code": False, "max_running_requests": 16,
    "log_level": "error", "mm_attention_backend": None, "attention_backend": "torch_native",
    "skip_tokenizer_init": True, "skip_server_warmup": True, "quantization": None, "json_model_override_args": "{}",
    "custom_weight_loader": None, "max_total_tokens": 2048, "enable_metrics": True, "enable_weights_cpu_backup": True,
}  # fmt: skip
"""What verl gives for a model of one GPU, but for the kernels of a CPU and the size of the cache."""
NAMES = {
    f"{name}_func": getattr(engine_names, name)
    for name in ("init_tokenizer_manager", "run_scheduler_process", "run_detokenizer_process")
}
PARAMS = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}


async def generate(manager: Any, rid: str, **more: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "rid": rid, "input_ids": [3, 4, 5, 6], "sampling_params": PARAMS, "return_logprob": True, "image_data": None,
        "video_data": None,
    }  # fmt: skip
    call = GenerateReqInput(**(fields | more))
    call.lora_path = None
    answer: dict[str, Any] = await anext(manager.generate_request(call, None))
    return answer


async def serve() -> tuple[uvicorn.Server, asyncio.Task[None], str]:
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))  # type: ignore[arg-type]
    task = asyncio.ensure_future(server.serve())
    while not server.started and not task.done():
        await asyncio.sleep(0.01)
    return server, task, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


async def the_calls_of_verl() -> None:
    assert parse(sglang.__version__) >= parse("0.5.10")  # it asks
    assert "enable_weights_cpu_backup" in [field.name for field in dataclasses.fields(ServerArgs)]
    args = ServerArgs(**ARGS)
    manager, template, info, *_ = Engine._launch_subprocesses(server_args=args, **NAMES)
    set_global_state(_GlobalState(tokenizer_manager=manager, template_manager=template, scheduler_info=info))
    app.is_single_tokenizer_mode = True  # type: ignore[attr-defined]
    app.warmup_thread_args = (args, None, None)  # type: ignore[attr-defined]
    add_prometheus_middleware(app)
    server, task, url = await serve()
    manager.server_status = ServerStatus.Up
    async with httpx.AsyncClient(base_url=url) as http:
        for path in ("/health", "/metrics"):
            assert (await http.get(path)).status_code == 200
        first = await generate(manager, "0")
        assert len(first["output_ids"]) == len(first["meta_info"]["output_token_logprobs"]) == 8
        body = {"input_ids": [3, 4, 5, 6], "sampling_params": PARAMS}
        assert (await http.post("/generate", json=body)).json()["output_ids"] == first["output_ids"]
        tags = [GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS]
        await manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags), None)
        with pytest.raises(RequestError, match="The server sleeps"):
            await generate(manager, "1")
        await manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags), None)
        assert await manager.flush_cache()
        running = asyncio.ensure_future(generate(manager, "2", sampling_params={**PARAMS, "max_new_tokens": 1500}))
        while manager._manager.num_unfinished == 0:
            await asyncio.sleep(0.01)
        await manager.pause_generation(PauseGenerationReqInput(mode="abort"))
        assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
        await manager.continue_generation(ContinueGenerationReqInput())
        steps = manager.generate_request(GenerateReqInput(input_ids=[3, 4, 5, 6], sampling_params=PARAMS, stream=True))
        assert [each async for each in steps][-1]["output_ids"] == first["output_ids"]
        with pytest.raises(RequestError, match="output_dir is not supported"):
            await manager.start_profile(output_dir="/tmp", with_stack=False, num_steps=None)
        await manager.pause_generation(PauseGenerationReqInput(mode="in_place"))
        waiting = asyncio.ensure_future(generate(manager, "3"))
        while manager._manager.num_unfinished == 0:
            await asyncio.sleep(0.01)
    server.should_exit = True
    await task
    with pytest.raises(RequestError, match="shutting down"):
        await asyncio.wait_for(waiting, 300)
    assert not [pid for pid in manager._handle.process_ids.values() if Path(f"/proc/{pid}").exists()]


def test_the_calls_of_verl() -> None:
    asyncio.run(the_calls_of_verl())


@pytest.mark.parametrize("part", ["template", "engine", "renderers", "processes"])
def test_nothing_is_left_of_a_failed_launch(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def step(name: str) -> Callable[..., Any]:
        def call(*_: Any) -> None:
            calls.append(name)
            if name == part:
                raise UserError(name)

        return call

    manager = SimpleNamespace(end_helpers=step("end helpers"), close=step("close manager"))
    handle = SimpleNamespace(manager=manager, wait_ready=step("processes"), shutdown=step("shutdown"))
    state = SimpleNamespace(connect=step("renderers"), close=step("close state"))
    monkeypatch.setattr(trainer_server, "ServerState", lambda args: step("template")(args) or state)
    monkeypatch.setattr(trainer_server, "launch_engine", lambda args: step("engine")(args) or handle)
    with pytest.raises(UserError, match=part):
        trainer_server.launch(ServerArgs(model_path=DEFAULT_MODEL_PATH))
    begun = ["template", "engine", "renderers", "processes"]
    left = begun.index(part) + 1
    assert calls[:left] == begun[:left]
    ended = {"close state", "shutdown", "end helpers", "close manager"} if left > 2 else set()
    assert set(calls[left:]) == ended


@pytest.mark.parametrize("error", [RequestError("no adapter"), OSError("no file"), asyncio.CancelledError()])
def test_a_server_that_cannot_start_says_so(error: BaseException) -> None:
    """uvicorn serves on where an exception leaves the application."""
    calls: list[Any] = []

    async def attach() -> None:
        raise error

    async def send(message: Any) -> None:
        calls.append(message)

    async def receive() -> dict[str, str]:
        return {"type": "lifespan.startup"}

    manager: Any = SimpleNamespace(attach=attach, close=lambda: calls.append("closed"))
    live = trainer_server._live(manager, receive, send)
    if isinstance(error, Exception):
        asyncio.run(live)
        assert calls == ["closed", {"type": "lifespan.startup.failed", "message": str(error)}]
    else:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(live)
        assert calls == ["closed"]


def test_processes_of_others_are_refused() -> None:
    args = ServerArgs(model_path=DEFAULT_MODEL_PATH)
    with pytest.raises(UserError, match="run_scheduler_process_func: processes and ports are the engine's own"):
        Engine._launch_subprocesses(server_args=args, **(NAMES | {"run_scheduler_process_func": print}))
    with pytest.raises(UserError, match="port_args"):
        Engine._launch_subprocesses(args, SimpleNamespace())
    with pytest.raises(NotImplementedError, match="starts its processes itself"):
        engine_names.run_scheduler_process(args)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"custom_weight_loader": ["verl.loader"]}, "--custom-weight-loader is not implemented"),
        ({"gpu_id_step": 1, "max_running_requests": "many"}, "--max-running-requests"),
        (
            {"nnodes": 2, "tp_size": 2, "node_rank": 1, "dist_init_addr": "127.0.0.1:1", "gpu_id_step": 1},
            "--enable-memory-saver",
        ),
        ({"no_such_flag": 1}, "no-such-flag"),
    ],
)
def test_flags_that_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        ServerArgs(**(ARGS | given))


def test_an_application_that_serves_nothing() -> None:
    with pytest.raises(RuntimeError, match="call Engine._launch_subprocesses"):
        asyncio.run(LaunchedApp()({"type": "http"}, None, None))  # type: ignore[arg-type]


def test_what_a_call_may_hold() -> None:
    import torch

    picture = Image.new("RGB", (2, 2), (255, 0, 0))
    body = _body({"input_ids": torch.tensor([1, 2]), "image_data": [picture]}, GenerateBody)
    assert body.input_ids == [1, 2] and isinstance(body.image_data, list)
    with pytest.raises(RequestError, match="video_data"):
        _body({"input_ids": [1], "video_data": [{"format": "processor_output"}]}, GenerateBody)
    with pytest.raises(RequestError, match="cannot hold a set"):
        _sendable({1})
    with pytest.raises(RequestError, match="return_routed_experts is not supported"):
        _body({"input_ids": [1], "return_routed_experts": True}, GenerateBody)
    assert parse_body(b'{"input_ids": [1]}', GenerateBody).input_ids == [1]
