# SPDX-License-Identifier: Apache-2.0
"""Fused MoE tuning: one file for all editions of a card, and no tile that the GPU's shared memory cannot hold."""

import functools
import logging
import os
import re
from typing import Any

from sglang.srt.sm120.hardware import shared_memory_limit

logger = logging.getLogger(__name__)

EDITIONS = (
    (
        "NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition",
        "NVIDIA_RTX_PRO_6000_Blackwell_Workstation_Edition",
        "NVIDIA_RTX_PRO_6000_Blackwell_Max-Q_Workstation_Edition",
    ),
    ("NVIDIA_GeForce_RTX_5090", "NVIDIA_GeForce_RTX_5090_D"),
)
"""Device names that differ in power limit or branding; the same chip with as many SMs serves behind each."""


def find_edition(file_name: str, module_file: str) -> str:
    """`file_name`, or the name that a tuning file of another edition of this card has, if only that one exists.

    Looks where the caller does: in `SGLANG_MOE_CONFIG_DIR` or beside `module_file`, below configs/triton_*/.
    """
    directory = os.environ.get("SGLANG_MOE_CONFIG_DIR", os.path.dirname(os.path.realpath(module_file)))
    return _find_edition(file_name, os.path.join(directory, "configs"))


@functools.cache
def _find_edition(file_name: str, configs: str) -> str:
    versions = sorted(os.listdir(configs)) if os.path.isdir(configs) else []

    def exists(name: str) -> bool:
        return any(os.path.exists(os.path.join(configs, version, name)) for version in versions)

    device = re.search(r"device_name=(.+?)(?=,|_down\.json$|\.json$)", file_name)
    if device is None or exists(file_name):
        return file_name
    for other in next((names for names in EDITIONS if device[1] in names), ()):
        renamed = file_name[: device.start(1)] + other + file_name[device.end(1) :]
        if exists(renamed):
            logger.info("No MoE tuning file %s; using that of %s.", file_name, other)
            return renamed
    return file_name


_ELEMENT_BYTES = {
    "fp8_w8a8": (1, 1),
    "int8_w8a8": (1, 1),
    "int8_w8a16": (2, 1),
    "int4_w4a16": (2, 1),
    "float32": (4, 4),
}
"""Of an activation and of a weight, as the tile holds them; 16-bit where the name is not here."""


def needed_shared_memory(config: dict[str, Any], dtype: str | None) -> int:
    """Bytes for the tiles in flight, and for a float32 scale of each row where activations are quantized.

    With cp.async there is a buffer less than stages, with TMA (`USE_TMA`) one for each.
    """
    activation, weight = _ELEMENT_BYTES.get(dtype or "", (2, 2))
    rows = config["BLOCK_SIZE_M"] * activation + config["BLOCK_SIZE_N"] * weight
    scales = 4 * config["BLOCK_SIZE_M"] if activation == 1 else 0
    buffers = config.get("num_stages", 3) - (0 if config.get("USE_TMA") else 1)
    return (rows * config["BLOCK_SIZE_K"] + scales) * max(1, buffers)


def fit(config: dict[str, Any], dtype: str | None, limit: int | None = None) -> dict[str, Any]:
    """`config` with as many stages, and then as wide a tile, as fit into the GPU's shared memory.

    The depth is never touched: block-scaled weights tie it to their scales.
    """
    limit = shared_memory_limit() if limit is None else limit
    if not limit or needed_shared_memory(config, dtype) <= limit:
        return config
    fitted = dict(config)
    while needed_shared_memory(fitted, dtype) > limit:
        if fitted.get("num_stages", 3) > 2:
            fitted["num_stages"] = fitted.get("num_stages", 3) - 1
        elif fitted["BLOCK_SIZE_N"] > 64:
            fitted["BLOCK_SIZE_N"] //= 2
        else:
            break
    _warn_once(tuple(sorted(config.items())), tuple(sorted(fitted.items())), limit)
    return fitted


def fit_all(chosen: Any, dtype: str | None) -> Any:
    """`fit` for what try_get_optimal_moe_config returns: a config, or (config, (down config or None, max block M))."""
    if isinstance(chosen, dict):
        return fit(chosen, dtype)
    config, (down, max_block_m) = chosen
    return fit(config, dtype), (down and fit(down, dtype), max_block_m)


@functools.cache
def _warn_once(before: tuple, after: tuple, limit: int) -> None:
    logger.warning("MoE tile %s needs more than %d bytes of shared memory; using %s.", dict(before), limit, dict(after))


def low_shared_memory_default(
    config: dict[str, Any], num_tokens: int, num_experts: int, dtype: str | None, block_shape: Any
) -> dict[str, Any]:
    """The default tile of FP8 weights with a scale a tensor or a channel, where 128 KiB are missing; else `config`."""
    limit = shared_memory_limit()
    if dtype != "fp8_w8a8" or block_shape is not None or not 0 < limit < 128 * 1024 or "num_stages" not in config:
        return config
    if num_tokens <= num_experts:
        tile = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 256, "GROUP_SIZE_M": 1}
        return {**tile, "num_warps": 4, "num_stages": 4}
    tile = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 32}
    return {**tile, "num_warps": 4, "num_stages": 3}
