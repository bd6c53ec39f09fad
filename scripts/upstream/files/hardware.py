# SPDX-License-Identifier: Apache-2.0
"""Which GPU this is. SM12x: no tcgen05, no wgmma, 101,376 bytes of shared memory for a block."""

import functools
import os

import torch

SM12X_SHARED_MEMORY = 101_376


@functools.cache
def is_sm12x() -> bool:
    """True on compute capability 12.x (RTX PRO 6000 Blackwell, RTX 50, GB10)."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] == 12


@functools.cache
def use_sm120_tiles() -> bool:
    """Whether attention kernels take SM12x tiles. `SGLANG_FORCE_SM120_TILES=1` tries those on another GPU."""
    return is_sm12x() or os.environ.get("SGLANG_FORCE_SM120_TILES", "0").lower() in ("1", "true")


@functools.cache
def shared_memory_limit() -> int:
    """Bytes of shared memory that one block may ask for; 0 where that is not known."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return 0
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    known = getattr(properties, "shared_memory_per_block_optin", 0)
    return known or (SM12X_SHARED_MEMORY if is_sm12x() else 0)
