"""The last rows of each request, which hashes of n-grams and convolutions over tokens read in the next step; in plain
torch: the CPU kernels, and the reference for tests.
"""

from __future__ import annotations

import torch

from sglang.srt.layers.compressed_step import TokenRequests


def wide(x: torch.Tensor) -> torch.Tensor:
    """Returns x in fp32, or unchanged if it is fp64."""
    return x if x.dtype == torch.float64 else x.float()


def token_before(
    new: torch.Tensor, kept: torch.Tensor, requests: TokenRequests, distance: int, first: torch.Tensor
) -> torch.Tensor:
    """Returns [T, ...]: for each token the value `distance` tokens before it, `first` before the request's first token.
    new [T, ...]: values of the step; kept [requests, R, ...]: those of each request's last R tokens, position p at p %
    R."""
    positions = requests.positions - distance
    token = (torch.arange(len(new), device=new.device) - distance).clamp(min=0)
    past = kept[requests.slots, positions % kept.shape[1]].to(new.dtype)
    trailing = (...,) + (None,) * (new.ndim - 1)
    earlier = torch.where((positions >= requests.firsts)[trailing], new[token], past)
    return torch.where((positions >= 0)[trailing], earlier, first)


def keep_last(new: torch.Tensor, kept: torch.Tensor, requests: TokenRequests) -> None:
    """Writes the rows new [T, ...] of each request's last R tokens before `requests.stops` into kept [requests, R,
    width] or [requests, R], position p at p % R; tokens from `stops` on were rejected."""
    size = kept.shape[1]
    stays = (requests.positions >= requests.stops - size) & (requests.positions < requests.stops)
    slots = torch.where(stays, requests.slots, 0)  # 0 is padding
    kept[slots, requests.positions % size] = new.reshape(len(new), *kept.shape[2:]).to(kept.dtype)
