"""Interface of a recurrent layer's kernels: one function for prompts, and one for a token of each request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from sglang.srt.layers.recurrent.rule import Rule

Extend = TypeVar("Extend", covariant=True)
Decode = TypeVar("Decode", covariant=True)


@dataclass(frozen=True, slots=True)
class StepKernels(Generic[Extend, Decode]):
    extend: Extend
    decode: Decode


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


ConvKernels = StepKernels[ConvExtend, ConvDecode]
RecurrenceKernels = StepKernels[RecurrenceExtend, RecurrenceDecode]
