"""Refuses weights that are NaN or infinite, because a server with them would answer with noise.

The check reads each parameter once on its device, and waits for the device once; only parameters that fail are then
checked part by part, to name the checkpoint's tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sglang.srt.errors import UserError
from sglang.srt.layers.parameter import Param
from sglang.srt.model_loader.checkpoint import format_names
from sglang.srt.plan.weight_names import PartKey

CHUNK = 1 << 26
"""Number of codes compared at a time (64 MiB)."""
E8M0_NAN = 0xFF
_SPECIAL_BITS = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}
"""Bits that are all set in NaN (e4m3 has no infinity), and in e5m2's infinities."""


def refuse_not_finite(
    params: Mapping[str, Param], wanted: Mapping[str, list[tuple[Param, PartKey]]], path: str
) -> None:
    """Raises UserError with the names of tensors that hold NaN or infinity. `wanted`: checkpoint name -> the parts that
    it fills."""
    failed = _not_finite([(name, param, param.tensor) for name, param in params.items()])
    if not failed:
        return
    # Elements that no part fills are never read. Without parts, the parameter was computed from others.
    suspects = [(name, params[name], params[name].tensor) for name in failed if not params[name].parts]
    failed = {params[name].name for name in failed}  # of a product in pieces several have one name
    for name, filled in wanted.items():
        parts = ((param, param.tensor[param.parts[key].dest]) for param, key in filled if param.name in failed)
        suspects += [(name, param, part) for param, part in parts]
    broken = _not_finite(suspects)
    if broken:
        raise UserError(
            f"{path} has weights that are NaN or infinite: {format_names(broken)}. Is the file damaged, or --dtype too "
            "narrow?"
        )


def _not_finite(tensors: list[tuple[str, Param, torch.Tensor]]) -> set[str]:
    """Returns the names of those (name, parameter, all or a part of its tensor) that hold NaN or infinity. Waits for
    each device once."""
    probes = [(name, _probe(param.name, tensor)) for name, param, tensor in tensors]
    by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, probe in probes:
        if probe is not None:  # of weights in main memory on the CPU
            by_device.setdefault(probe.device, []).append((name, probe))
    failed = set()
    for probed in by_device.values():
        finite = torch.stack([probe for _, probe in probed]).isfinite().tolist()
        failed |= {name for (name, _), good in zip(probed, finite, strict=True) if not good}
    return failed


def _probe(param_name: str, tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns a number that is finite if all elements are, [] fp32; None for a tensor that need not be finite."""
    leaf = param_name.rpartition(".")[2]
    if not tensor.numel() or "input" in leaf:  # scales of activations, where calibration may have left holes
        return None
    if tensor.dtype.is_floating_point and tensor.element_size() > 1:
        low, high = torch.aminmax(tensor)  # both NaN if anything is
        return low.float() * 0 + high.float() * 0
    bits = _SPECIAL_BITS.get(tensor.dtype)
    if tensor.dtype == torch.uint8 and "scale" in leaf:
        bits = E8M0_NAN
    if bits is None:
        return None
    chunks = tensor.view(torch.uint8).reshape(-1).split(CHUNK)
    special = torch.stack([((chunk & bits) == bits).any() for chunk in chunks]).any()
    return torch.where(special, torch.nan, 0.0)
