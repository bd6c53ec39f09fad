"""Records of verify steps for layers with a recurrent state, kept until it is known which tokens are accepted.

Then the states of all layers of a kind are advanced by the accepted tokens in one launch. The alternative, a ring of k
states per request, would write 2 MiB per token in a layer of Qwen3-Next, where a record takes 32 KiB.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.recurrent_state.rule import Rule
from sglang.srt.blocks.recurrent_state.step_kernels import VerifiedRows

if TYPE_CHECKING:
    from sglang.srt.layers.step_rows import ExtendRows, StateRecord


@dataclass(frozen=True, slots=True)
class RecurrentRecords:
    """Implements StateRecord for layers of the same shape: k tokens of each of B requests."""

    commit_conv: Callable[..., None]
    commit_states: Callable[..., None]
    """Kernels as `reference.commit_conv` and `reference.commit_states`, which serve all layers."""
    rule: Rule
    requests: ExtendRows
    layers: list[VerifiedRows]
    sent: dict[tuple[int, ...], torch.Tensor]
    """Tensor addresses that are on the device already, shared by records that begin with the same layer."""
    copied: bool = False

    def commit(self, counts: torch.Tensor) -> None:
        layers = self.layers
        width = len(layers[0].x) // len(self.requests)
        slots, counts = self.requests.req_pool_indices[: len(counts)], counts.contiguous()
        addresses = self._addresses(counts.device)
        self.commit_conv(layers, addresses, slots, counts, width)
        self.commit_states(self.rule, layers, addresses, slots, counts, width)

    def _addresses(self, device: torch.device) -> torch.Tensor:
        """Returns the addresses of the layers' tensors [L, 7] int64 on the device. Those of a copy are used once; the
        others are fixed and cached, so that a graph reads what was sent before its capture."""
        numbers = tuple(address for layer in self.layers for address in layer.addresses())
        if self.copied:
            return _sent(numbers, len(self.layers), device)
        if numbers not in self.sent:
            self.sent[numbers] = _sent(numbers, len(self.layers), device)
        return self.sent[numbers]

    def copy(self) -> RecurrentRecords:
        requests = replace(self.requests, req_pool_indices=self.requests.req_pool_indices.clone())
        return replace(self, requests=requests, layers=[layer.copy() for layer in self.layers], copied=True)

    def like(self, other: RecurrentRecords) -> bool:
        """Returns whether one launch can serve the layers of both."""
        tensors = zip(self.layers[0].tensors(), other.layers[0].tensors(), strict=True)
        alike = all((mine.dtype, mine.shape) == (theirs.dtype, theirs.shape) for mine, theirs in tensors)
        return self.rule == other.rule and alike


def _sent(numbers: tuple[int, ...], layers: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device).view(layers, -1)


def join_records(records: list[StateRecord], added: RecurrentRecords) -> None:
    """Adds a record's layers to a record of the same shape in `records`, or adds the record itself."""
    for record in records:
        if isinstance(record, RecurrentRecords) and record.like(added):
            record.layers.extend(added.layers)
            return
    records.append(added)
