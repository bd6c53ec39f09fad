"""Selections of all entries: the slots, and the memory that making them takes."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang.srt.layers.attention.selection import EntryRows
from sglang.srt.plan.memory import selection_bytes
from srt.kernels.published import described


class Peak(TorchDispatchMode):
    """Adds up the storages that operations make, and keeps the most bytes that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.most, self._known = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            if storage._cdata not in self._known and storage.data_ptr() not in self._given(args):
                self._known.add(storage._cdata)
                self.live += storage.nbytes()
                self.most = max(self.most, self.live)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return result

    @staticmethod
    def _given(args: Any) -> set[int]:
        return {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}

    def _gone(self, known: int, size: int) -> None:
        self._known.discard(known)
        self.live -= size


def rows_of(counts: list[int], max_count: int, rate: int) -> EntryRows:
    table = torch.arange(3 * max_count * rate, dtype=torch.int32).view(3, -1) * rate
    requests = torch.arange(len(counts)) % 3
    return EntryRows(table, requests, torch.tensor(counts, dtype=torch.int32), max_count, rate)


@pytest.mark.parametrize("rate", [1, 4])
@pytest.mark.parametrize("max_count", [0, 1, 7])
def test_all_entries_have_the_slots_of_a_selection_from_the_first_on(max_count: int, rate: int) -> None:
    rows = rows_of([min(count, max_count) for count in (0, 1, 3, 7, 5)], max_count, rate)
    every, since = rows.all(), rows.since(torch.zeros_like(rows.counts), max_count)
    assert torch.equal(every.slots, since.slots) and torch.equal(every.counts, since.counts)
    assert every.slots.dtype == torch.int32


def test_all_entries_take_the_memory_that_is_planned() -> None:
    model = next(model for _, model in described(["deepseek_v4"]))
    num_tokens, context_len = 256, 128 * 512
    rates = {
        layer.mixer.rate
        for layer in model.layers
        if getattr(layer.mixer, "rate", 0) and layer.mixer.indexer is None  # type: ignore[union-attr]
    }
    assert rates == {128}
    rows = rows_of([512] * num_tokens, 512, 128)
    with Peak() as peak:
        selection = rows.all()
    planned = selection_bytes(model, num_tokens, context_len)
    assert selection.slots.nbytes < peak.most <= planned + 4 * 512 + 8 * num_tokens
    assert planned == num_tokens * 512 * 5
