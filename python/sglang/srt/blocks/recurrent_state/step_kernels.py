"""The kernels of a recurrent layer: `extend` for prompts, `decode` for one token per request, `verify` for
draft tokens, which leaves the states unchanged, and `commit`, which advances the states of many layers by accepted
tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

Extend = TypeVar("Extend", covariant=True)
Decode = TypeVar("Decode", covariant=True)
Verify = TypeVar("Verify", covariant=True)
Commit = TypeVar("Commit", covariant=True)


@dataclass(frozen=True, slots=True)
class StepKernels(Generic[Extend, Decode, Verify, Commit]):
    """The four kernels of a convolution or recurrence, with the types of those in `reference`."""

    extend: Extend
    decode: Decode
    verify: Verify
    commit: Commit


@dataclass(frozen=True, slots=True)
class VerifiedRows:
    """A layer's record of a verify step of T tokens, with the states to be advanced. k and v are views of the same
    rows."""

    states: torch.Tensor  # [slots, H, K, V]
    conv_states: torch.Tensor  # [slots, W - 1, C]
    x: torch.Tensor  # [T, C], before the convolution
    k: torch.Tensor  # [T, Hk, K], behind it
    v: torch.Tensor  # [T, H, V]
    log_decays: torch.Tensor  # [T, H] fp32, by channel [T, H, K]
    betas: torch.Tensor  # [T, H] fp32

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Returns all tensors in field order."""
        return self.states, self.conv_states, self.x, self.k, self.v, self.log_decays, self.betas

    def addresses(self) -> tuple[int, ...]:
        """Returns the data pointer of each tensor."""
        return tuple(tensor.data_ptr() for tensor in self.tensors())

    def copy(self) -> VerifiedRows:
        """Returns a copy that later steps do not change, over the same states. It keeps strides, because clones of the
        views k and v would have different ones."""
        x, k, v, log_decays, betas = (
            tensor.new_empty_strided(tensor.shape, tensor.stride()).copy_(tensor) for tensor in self.tensors()[2:]
        )
        return VerifiedRows(self.states, self.conv_states, x, k, v, log_decays, betas)
