"""The interface of a recurrent layer's kernels: `extend` for prompts, `decode` for one token per request, `verify` for
draft tokens, which leaves the states unchanged, and `commit`, which advances the states of many layers by accepted
tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from sglang.srt.blocks.recurrent_state.rule import Rule

Extend = TypeVar("Extend", covariant=True)
Decode = TypeVar("Decode", covariant=True)
Verify = TypeVar("Verify", covariant=True)
Commit = TypeVar("Commit", covariant=True)


@dataclass(frozen=True, slots=True)
class StepKernels(Generic[Extend, Decode, Verify, Commit]):
    """The four kernels of a convolution or recurrence."""

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


class ConvExtend(Protocol):
    """Signature of `kernels.causal_conv.causal_conv_extend`."""

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        states: torch.Tensor,
        initial_slots: torch.Tensor,
        slots: torch.Tensor,
        prefix_lens: torch.Tensor,
        start_loc: torch.Tensor,
        out: torch.Tensor,
        norm_heads: int = 0,
        head_dim: int = 0,
    ) -> None: ...


class ConvDecode(Protocol):
    """Signature of `kernels.causal_conv.causal_conv_decode`."""

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        states: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
        norm_heads: int = 0,
        head_dim: int = 0,
    ) -> None: ...


class ConvVerify(Protocol):
    """Signature of `kernels.causal_conv.causal_conv_verify`."""

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        states: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
        kept: torch.Tensor,
        norm_heads: int = 0,
        head_dim: int = 0,
    ) -> None: ...


class ConvCommit(Protocol):
    """Signature of `kernels.commit.commit_conv`."""

    def __call__(
        self,
        layers: Sequence[VerifiedRows],
        addresses: torch.Tensor,
        slots: torch.Tensor,
        counts: torch.Tensor,
        width: int,
    ) -> None: ...


class RecurrenceExtend(Protocol):
    """Signature of `kernels.recurrence.recurrence_extend`."""

    def __call__(
        self,
        rule: Rule,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor | None,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        skip: torch.Tensor | None,
        states: torch.Tensor,
        initial_slots: torch.Tensor,
        slots: torch.Tensor,
        prefix_lens: torch.Tensor,
        start_loc: torch.Tensor,
        out: torch.Tensor,
        num_sms: int = 1,
    ) -> None: ...


class RecurrenceDecode(Protocol):
    """Signature of `kernels.recurrence.recurrence_decode`."""

    def __call__(
        self,
        rule: Rule,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor | None,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        skip: torch.Tensor | None,
        states: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
        num_sms: int = 1,
    ) -> None: ...


class RecurrenceVerify(Protocol):
    """Signature of `kernels.recurrence.recurrence_verify`."""

    def __call__(
        self,
        rule: Rule,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor | None,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        skip: torch.Tensor | None,
        states: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
        log_decays: torch.Tensor,
        betas: torch.Tensor,
    ) -> None: ...


class RecurrenceCommit(Protocol):
    """Signature of `kernels.commit.commit_states`."""

    def __call__(
        self,
        rule: Rule,
        layers: Sequence[VerifiedRows],
        addresses: torch.Tensor,
        slots: torch.Tensor,
        counts: torch.Tensor,
        width: int,
    ) -> None: ...


ConvKernels = StepKernels[ConvExtend, ConvDecode, ConvVerify, ConvCommit]
RecurrenceKernels = StepKernels[RecurrenceExtend, RecurrenceDecode, RecurrenceVerify, RecurrenceCommit]
