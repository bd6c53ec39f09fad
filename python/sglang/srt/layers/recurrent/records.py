"""What layers with a recurrent state keep of a step that verifies draft tokens, until it is known which tokens stand.

The states of all layers of a kind then go on by these tokens in one launch. The alternative is a ring of k states a
request: Qwen3-Next's layer would write 2 MiB for each token, and keeps 32 KiB.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from sglang.srt.layers.recurrent.rule import Rule
from sglang.srt.layers.recurrent.step_kernels import ConvKernels, RecurrenceKernels, VerifiedRows

if TYPE_CHECKING:
    from sglang.srt.layers.step_rows import ExtendRows, StateRecord


@dataclass(frozen=True, slots=True)
class RecurrentRecords:
    """Implements StateRecord for layers that are alike: k tokens of each of B requests."""

    conv: ConvKernels
    recurrence: RecurrenceKernels
    rule: Rule
    requests: ExtendRows
    layers: list[VerifiedRows]
    sent: dict[tuple[int, ...], torch.Tensor]
    """Addresses that are on the device already: of layers whose records begin with the first of these."""
    copied: bool = False

    def commit(self, counts: torch.Tensor) -> None:
        layers = self.layers
        width = len(layers[0].x) // len(self.requests)
        slots, counts = self.requests.req_pool_indices[: len(counts)], counts.contiguous()
        addresses = self._addresses(counts.device)
        self.conv.commit(layers, addresses, slots, counts, width)
        self.recurrence.commit(self.rule, layers, addresses, slots, counts, width)

    def _addresses(self, device: torch.device) -> torch.Tensor:
        """Returns the addresses of the layers' tensors [L, 7] int64 on the device. Those of a copy do not come again;
        the others are fixed, so that a graph finds what was sent before it was captured."""
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
    """Adds the layers of a record to the records of a step: to those of layers like them where there are any."""
    for record in records:
        if isinstance(record, RecurrentRecords) and record.like(added):
            record.layers.extend(added.layers)
            return
    records.append(added)
