"""Interface of a recurrent layer's kernels: one function for prompts, one for a token of each request, and two for a
step that verifies draft tokens: `verify` leaves the states as they are, and `commit` lets those of many layers go on by
the tokens that stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from sglang.srt.layers.recurrent.rule import Rule

Extend = TypeVar("Extend", covariant=True)
Decode = TypeVar("Decode", covariant=True)
Verify = TypeVar("Verify", covariant=True)
Commit = TypeVar("Commit", covariant=True)


@dataclass(frozen=True, slots=True)
class StepKernels(Generic[Extend, Decode, Verify, Commit]):
    extend: Extend
    decode: Decode
    verify: Verify
    commit: Commit


@dataclass(frozen=True, slots=True)
class VerifiedRows:
    """What a layer keeps of a step of T tokens that its states do not have yet, and these states. k and v are parts of
    the same rows."""

    states: torch.Tensor  # [slots, H, K, V]
    conv_states: torch.Tensor  # [slots, W - 1, C]
    x: torch.Tensor  # [T, C], before the convolution
    k: torch.Tensor  # [T, Hk, K], behind it
    v: torch.Tensor  # [T, H, V]
    log_decays: torch.Tensor  # [T, H] fp32, by channel [T, H, K]
    betas: torch.Tensor  # [T, H] fp32

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Returns all of them, in the order of the fields."""
        return self.states, self.conv_states, self.x, self.k, self.v, self.log_decays, self.betas

    def addresses(self) -> tuple[int, ...]:
        """Returns where each tensor begins."""
        return tuple(tensor.data_ptr() for tensor in self.tensors())

    def copy(self) -> VerifiedRows:
        """Returns rows that later steps leave as they are, with the same states. Strides stay: a clone of k would have
        other rows than one of v."""
        x, k, v, log_decays, betas = (
            tensor.new_empty_strided(tensor.shape, tensor.stride()).copy_(tensor) for tensor in self.tensors()[2:]
        )
        return VerifiedRows(self.states, self.conv_states, x, k, v, log_decays, betas)


class ConvExtend(Protocol):
    """`triton_ops.causal_conv.causal_conv_extend` says what the arguments are."""

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
    """`triton_ops.causal_conv.causal_conv_verify` says what the arguments are."""

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
    """`triton_ops.commit.commit_conv` says what the arguments are."""

    def __call__(
        self,
        layers: Sequence[VerifiedRows],
        addresses: torch.Tensor,
        slots: torch.Tensor,
        counts: torch.Tensor,
        width: int,
    ) -> None: ...


class RecurrenceExtend(Protocol):
    """`triton_ops.recurrence.recurrence_extend` says what the arguments are."""

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
    """`triton_ops.recurrence.recurrence_verify` says what the arguments are."""

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
    """`triton_ops.commit.commit_states` says what the arguments are."""

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
