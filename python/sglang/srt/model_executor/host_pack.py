"""Send several small host arrays to the device as one copy: what a copy costs is its launch, not bandwidth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ALIGN = 16
_TORCH_DTYPE = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32, np.dtype(np.bool_): torch.bool}


def send(arrays: Sequence[np.ndarray], device: str) -> list[torch.Tensor]:
    """Copies that live on `device`, in order. On CUDA the copy is asynchronous on the current stream."""
    if device == "cpu":
        return [torch.from_numpy(a.copy()) for a in arrays]
    offsets, total = [], 0
    for a in arrays:
        offsets.append(total)
        total += -(-a.nbytes // _ALIGN) * _ALIGN
    # The pinned block returns to torch's host allocator, which reuses it only after this copy has run.
    host = torch.empty(max(total, _ALIGN), dtype=torch.uint8, pin_memory=True)
    view = host.numpy()
    for a, offset in zip(arrays, offsets, strict=True):
        view[offset : offset + a.nbytes] = np.ascontiguousarray(a).view(np.uint8).reshape(-1)
    packed = host.to(device, non_blocking=True)
    return [
        packed[offset : offset + a.nbytes].view(_TORCH_DTYPE[a.dtype]).view(a.shape)
        for a, offset in zip(arrays, offsets, strict=True)
    ]
