"""A round of training by verl's own classes: its server in a Ray actor, which starts the engine there, and its adapter
in the trainer's process, which sends the weights. Prints what came of it as JSON. `test_verl_server.py` runs it.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import psutil
import ray  # type: ignore[import-not-found]
import torch
from safetensors.torch import load_file
from verl.workers.config import HFModelConfig, RolloutConfig  # type: ignore[import-not-found]
from verl.workers.rollout.replica import RolloutMode  # type: ignore[import-not-found]
from verl.workers.rollout.sglang_rollout import async_sglang_server, sglang_rollout  # type: ignore[import-not-found]

from sglang.embedded import DEFAULT_MODEL_PATH

RANK = {"RANK": "0", "WORLD_SIZE": "1", "RAY_LOCAL_WORLD_SIZE": "1"}
KERNELS = {"attention_backend": "torch_native", "max_total_tokens": 2048}


def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.flip(0) if "down_proj" in name else tensor for name, tensor in tensors.items()}


async def main() -> dict[str, Any]:
    model = HFModelConfig(path=DEFAULT_MODEL_PATH, override_config={"attn_implementation": "eager"})
    config = RolloutConfig(
        name="sglang", tensor_model_parallel_size=1, load_format="auto", max_num_seqs=16, prompt_length=64,
        response_length=8, engine_kwargs={"sglang": KERNELS},
    )  # fmt: skip
    actor = ray.remote(async_sglang_server.SGLangHttpServer)
    server = actor.options(name="sglang_server_0_0", max_concurrency=100).remote(
        config=config, model_config=model, rollout_mode=RolloutMode.HYBRID, workers=[], replica_rank=0, node_rank=0,
        nnodes=1, cuda_visible_devices="", base_gpu_id=0,
    )  # fmt: skip
    await server.launch_server.remote()
    sglang_rollout.get_device_id = lambda: "cpu"
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    adapter = sglang_rollout.ServerAdapter(config, model, None, replica_rank=0)

    async def generate(rid: str, **params: Any) -> Any:
        return await server.generate.remote([3, 4, 5, 6], {"temperature": 0.0, "ignore_eos": True, **params}, rid)

    async def train(tensors: dict[str, torch.Tensor], step: int) -> None:
        await server.sleep.remote()
        await adapter.resume(["weights"])
        await adapter.update_weights(iter(tensors.items()), global_steps=step)
        await adapter.resume(["kv_cache"])

    first = load_file(Path(DEFAULT_MODEL_PATH) / "model.safetensors")
    old = await generate("old", logprobs=True)
    await train(changed(first), 1)
    new = await generate("new", prompt_logprobs=0)
    running = asyncio.ensure_future(generate("long", max_new_tokens=1500))
    await asyncio.sleep(0.2)
    await server.abort_all_requests.remote()
    aborted = await running
    await server.resume_generation.remote()
    for call in (server.clear_kv_cache, server.release_kv_cache, server.resume_kv_cache):
        await call.remote()
    await train(first, 2)
    again = await generate("again")
    await adapter._engine.close() if hasattr(adapter._engine, "close") else None
    pids = await server.__ray_call__.remote(lambda _: [each.pid for each in psutil.Process().children(recursive=True)])
    engine = [psutil.Process(pid) for pid in pids]
    ray.kill(server)
    return {
        "old": old.token_ids, "log_probs": len(old.log_probs), "new": new.token_ids, "again": again.token_ids,
        "prompt": new.extra_fields["prompt_ids"], "aborted": aborted.stop_reason, "processes": len(engine),
        "left": len(psutil.wait_procs(engine, timeout=300)[1]),
        "steps": [each.extra_fields["global_steps"] for each in (old, new, again)],
    }  # fmt: skip


if __name__ == "__main__":  # the processes of the engine import this file, too
    os.environ |= RANK
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False)
    said = asyncio.run(main())
    ray.shutdown()
    print(json.dumps(said))
