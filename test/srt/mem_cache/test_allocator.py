"""TokenAllocator against a set of owned slots."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang.srt.mem_cache.allocator import TokenAllocator


class AllocatorMachine(RuleBasedStateMachine):
    """Sequences grow and end; the model is the list of slots that each one was given."""

    def __init__(self) -> None:
        super().__init__()
        self.page_size = 1
        self.seqs: list[list[int]] = []

    @initialize(page_size=st.sampled_from([1, 4, 16]), pages=st.integers(1, 24), extra=st.integers(0, 15))
    def start(self, page_size: int, pages: int, extra: int) -> None:
        self.page_size = page_size
        size = page_size * pages + min(extra, page_size - 1)
        self.allocator = TokenAllocator(size, page_size)
        assert self.allocator.size == page_size * pages

    @rule(new=st.lists(st.integers(1, 40), max_size=3), growth=st.lists(st.integers(0, 9), max_size=20))
    def grow(self, new: list[int], growth: list[int]) -> None:
        self.seqs += [[] for _ in new]
        amounts = ([0] * len(self.seqs) + growth)[-len(self.seqs) :] if self.seqs else []
        for i, n in enumerate(new):
            amounts[len(self.seqs) - len(new) + i] = n
        old = [len(s) for s in self.seqs]
        goal = [o + a for o, a in zip(old, amounts, strict=True)]
        before = self.allocator.available_size()
        slots = self.allocator.alloc(old, goal, [s[-1] if s else -1 for s in self.seqs])
        needed = sum(-(-g // self.page_size) + (-o // self.page_size) for o, g in zip(old, goal, strict=True))
        if needed * self.page_size > before:
            assert slots is None and self.allocator.available_size() == before
        else:
            assert slots is not None and slots.dtype == np.int32
            assert self.allocator.available_size() == before - needed * self.page_size
            at = 0
            for seq, amount in zip(self.seqs, amounts, strict=True):
                seq += slots[at : at + amount].tolist()
                at += amount
            assert at == len(slots)
        self.seqs = [s for s in self.seqs if s]

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        seq = self.seqs.pop(data.draw(st.integers(0, len(self.seqs) - 1)))
        self.allocator.free(np.array(seq, np.int32))

    @precondition(lambda self: self.seqs)
    @rule()
    def end_all(self) -> None:
        self.allocator.free(np.concatenate([np.array(s, np.int32) for s in self.seqs]))
        self.seqs = []
        assert self.allocator.available_size() == self.allocator.size

    @rule()
    def clear(self) -> None:
        self.allocator.clear()
        self.seqs = []

    @invariant()
    def nothing_shared_nothing_lost(self) -> None:
        if not hasattr(self, "allocator"):
            return
        owned = [slot for seq in self.seqs for slot in seq]
        assert len(set(owned)) == len(owned)
        assert all(self.page_size <= s < self.page_size + self.allocator.size for s in owned)
        pages = {s // self.page_size for s in owned}
        assert self.allocator.available_size() + len(pages) * self.page_size == self.allocator.size
        for seq in self.seqs:
            assert all(slot % self.page_size == i % self.page_size for i, slot in enumerate(seq))
            starts = seq[:: self.page_size]
            assert all(slot == starts[i // self.page_size] + i % self.page_size for i, slot in enumerate(seq))


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)


def test_last_page_is_filled_before_a_new_one_is_taken() -> None:
    allocator = TokenAllocator(64, 4)
    first = allocator.alloc([0, 0], [3, 4], [-1, -1])
    assert first is not None and first.tolist() == [4, 5, 6, 8, 9, 10, 11]
    more = allocator.alloc([3, 4], [5, 5], [6, 11])
    assert more is not None and more.tolist() == [7, 12, 16]


@pytest.mark.parametrize("page_size", [1, 4])
def test_double_free_is_caught(page_size: int) -> None:
    allocator = TokenAllocator(64, page_size)
    slots = allocator.alloc([0], [8], [-1])
    assert slots is not None
    allocator.free(slots)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(slots[:1])
    with pytest.raises(AssertionError):
        allocator.free(np.zeros(1, np.int32))
    assert allocator.available_size() == 64


def test_double_free_within_one_call_is_caught() -> None:
    allocator = TokenAllocator(8, 1)
    slots = allocator.alloc([0], [2], None)
    assert slots is not None
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(np.concatenate((slots, slots[:1])))


@pytest.mark.parametrize(("size", "page_size"), [(3, 4), (0, 1), (8, 0)])
def test_impossible_sizes_are_refused(size: int, page_size: int) -> None:
    with pytest.raises(ValueError):
        TokenAllocator(size, page_size)
