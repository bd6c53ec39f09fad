"""What layers with a recurrent state keep of a step that verifies guesses, until it is known which tokens stand.

The states of all layers of a kind then go on by these tokens in one launch. The alternative is a ring of k states a
request: Qwen3-Next's layer would write 2 MiB for each token, and keeps 32 KiB.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from sglang.srt.layers.recurrent.step_kernels import VerifiedRows

if TYPE_CHECKING:
    from sglang.srt.layers.recurrent.mixer import RecurrentCore
    from sglang.srt.layers.step_rows import ExtendRows, StateRecord


@dataclass(frozen=True, slots=True)
class RecurrentRecords:
    """Implements StateRecord for layers that are alike: k tokens of each of B requests."""

    core: RecurrentCore
    """Of the first of them."""
    requests: ExtendRows
    layers: list[VerifiedRows]
    copied: bool = False

    def commit(self, counts: torch.Tensor) -> None:
        core, layers = self.core, self.layers
        width = len(layers[0].x) // len(self.requests)
        slots, counts = self.requests.req_pool_indices[: len(counts)], counts.contiguous()
        addresses = self._addresses(counts.device)
        core.conv.commit(layers, addresses, slots, counts, width)
        core.recurrence.commit(core.rule, layers, addresses, slots, counts, width)

    def _addresses(self, device: torch.device) -> torch.Tensor:
        """Returns the addresses of the layers' tensors [L, 7] int64 on the device. Those of a copy do not come again;
        the others are fixed, so that a graph finds what was sent before it was captured."""
        numbers = tuple(address for layer in self.layers for address in layer.addresses())
        if self.copied:
            return _sent(numbers, len(self.layers), device)
        if numbers not in self.core.addresses:
            self.core.addresses[numbers] = _sent(numbers, len(self.layers), device)
        return self.core.addresses[numbers]

    def copy(self) -> RecurrentRecords:
        requests = replace(self.requests, req_pool_indices=self.requests.req_pool_indices.clone())
        return replace(self, requests=requests, layers=[layer.copy() for layer in self.layers], copied=True)


def _sent(numbers: tuple[int, ...], layers: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device).view(layers, -1)


def join_records(records: list[StateRecord], core: RecurrentCore, requests: ExtendRows, rows: VerifiedRows) -> None:
    """Adds a layer to the records of a step: to those of layers like it where there are any."""
    for record in records:
        if isinstance(record, RecurrentRecords) and _alike(record, core, rows):
            record.layers.append(rows)
            return
    records.append(RecurrentRecords(core, requests, [rows]))


def _alike(record: RecurrentRecords, core: RecurrentCore, rows: VerifiedRows) -> bool:
    return (record.core.rule, record.core.heads) == (core.rule, core.heads) and all(
        (first.dtype, first.shape) == (other.dtype, other.shape)
        for first, other in zip(record.layers[0].tensors(), rows.tensors(), strict=True)
    )
