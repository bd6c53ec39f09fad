"""What a trainer calls to send a bucket of its weights to the server beside it: all its ranks together."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.entrypoints.engine_weights import EngineWeights
from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
from sglang.srt.utils.sent_tensors import handle_of, write_sent

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def _preprocess_tensor_for_update_weights(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a whole tensor of what a rank of the trainer has of it. A collective where it has a part."""
    full: Any = getattr(tensor, "full_tensor", None)
    whole: torch.Tensor = tensor if full is None else full()
    return whole


async def update_weights(
    engine: Any,
    params_batch: Sequence[tuple[str, torch.Tensor]],
    device_mesh_key: str,
    device_mesh: DeviceMesh,
    load_format: str | None = None,
) -> Any:
    """Sends named tensors, in the names of the checkpoint, and returns the server's answer on the mesh's first rank;
    None on the others. engine: an `Engine`, or a client with its method `update_weights_from_tensor`. The prefix cache
    is not flushed: its keys have the version of the weights."""
    tensors = {name: _preprocess_tensor_for_update_weights(tensor.detach()) for name, tensor in params_batch}
    if device_mesh[device_mesh_key].get_local_rank() != 0:
        return None
    if isinstance(engine, EngineWeights):
        call = engine.update_weights_from_tensor
        return await asyncio.to_thread(call, list(tensors.items()), load_format, flush_cache=False)
    path = await asyncio.to_thread(write_sent, tensors)
    try:
        request = UpdateWeightsFromTensorReqInput([handle_of(path)], load_format, flush_cache=False)
        answer = engine.update_weights_from_tensor(request)
        return await answer if inspect.isawaitable(answer) else answer
    finally:
        path.unlink(missing_ok=True)
