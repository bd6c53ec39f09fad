"""Allocator of free cache slots. Host side only: numpy, no device, no scheduling policy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int32]


class TokenAllocator:
    """Hands out token slots in pages of `page_size`; slot = page * page_size + offset.

    Page 0 is never handed out: its slots belong to the padding rows of a batch. The order of pages depends on the calls
    alone, so that the ranks of one tensor-parallel group stay in step.
    """

    def __init__(self, size: int, page_size: int) -> None:
        """Makes an allocator of `size` tokens, rounded down to whole pages."""
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        if size < page_size:
            raise ValueError(f"a cache of {size} tokens does not hold one page of {page_size} tokens")
        self.page_size = page_size
        self.num_pages = size // page_size
        self.size = self.num_pages * page_size
        self._stack = np.empty(self.num_pages, np.int32)  # free pages, the next one at the end
        self._is_free = np.empty(self.num_pages + 1, np.bool_)
        self._mark = np.empty(self.num_pages + 1, np.int32)  # scratch of _distinct
        self._num_free = 0
        self.clear()

    def clear(self) -> None:
        """Frees everything; slots come in ascending order again."""
        self._stack[:] = np.arange(self.num_pages, 0, -1, dtype=np.int32)
        self._is_free[:] = True
        self._is_free[0] = False
        self._num_free = self.num_pages

    def available_size(self) -> int:
        """Returns the number of tokens in free pages."""
        return self._num_free * self.page_size

    def alloc(self, old_lens: npt.ArrayLike, new_lens: npt.ArrayLike, last_locs: npt.ArrayLike | None) -> Slots | None:
        """Allocates slots for the tokens old_lens[i] .. new_lens[i]-1 of each sequence, one sequence after the other.

        A partly filled last page is filled first: `last_locs[i]` is the slot of token old_lens[i]-1 (any value where
        that token ends its page or does not exist; not read for page size 1). Returns None, and changes nothing, if
        there are too few free pages for all of them.
        """
        old = np.asarray(old_lens, np.int64)
        new = np.asarray(new_lens, np.int64)
        counts = new - old
        if self.page_size == 1:
            return self._take(int(counts.sum()))
        assert last_locs is not None, "pages larger than one token need the slot of each sequence's last token"
        return self._alloc_paged(old, counts, np.asarray(last_locs, np.int64))

    def _alloc_paged(
        self, old: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], last_locs: npt.NDArray[np.int64]
    ) -> Slots | None:
        page_size = self.page_size
        old_pages = -(-old // page_size)
        need = -(-(old + counts) // page_size) - old_pages
        pages = self._take(int(need.sum()))
        if pages is None:
            return None
        # Number the new pages of sequence i from first_page[i]; a token in the page that exists already gets index -1.
        first_page = np.cumsum(need) - need
        first_token = np.cumsum(counts) - counts
        total = int(counts.sum())
        seq = np.repeat(np.arange(len(counts)), counts)
        position = np.arange(total) + (old - first_token)[seq]
        page_index = position // page_size - old_pages[seq]
        in_old_page = page_index < 0
        page_of_token = (last_locs // page_size)[seq]
        fresh = ~in_old_page
        page_of_token[fresh] = pages[(first_page[seq] + page_index)[fresh]]
        return (page_of_token * page_size + position % page_size).astype(np.int32)

    def _take(self, num_pages: int) -> Slots | None:
        if num_pages > self._num_free:
            return None
        start = self._num_free - num_pages
        pages = self._stack[start : self._num_free][::-1].copy()
        self._num_free = start
        self._is_free[pages] = False
        return pages

    def free(self, slots: npt.ArrayLike) -> None:
        """Frees the pages of `slots`, which the caller must own wholly. Raises AssertionError for a double free."""
        slots = np.asarray(slots, np.int32)
        if slots.size == 0:
            return
        pages = slots if self.page_size == 1 else slots // self.page_size
        distinct = self._distinct(pages)
        if self.page_size == 1 and distinct.size != pages.size:
            raise AssertionError("the same cache slot was freed twice in one call")
        if self._is_free[distinct].any() or distinct.min() < 1:
            bad = [int(p) for p in distinct if p < 1 or self._is_free[p]]
            raise AssertionError(f"cache pages freed twice or never handed out: {bad[:8]}")
        self._is_free[distinct] = True
        self._stack[self._num_free : self._num_free + distinct.size] = distinct
        self._num_free += distinct.size

    def _distinct(self, pages: Slots) -> Slots:
        """Returns each page once, without sorting: among equal entries, the one whose index the scratch array keeps."""
        index = np.arange(pages.size, dtype=np.int32)
        self._mark[pages] = index
        distinct: Slots = pages[self._mark[pages] == index]
        return distinct

    def is_free(self, slots: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Returns whether the page of each slot is free; for invariant checks."""
        free: npt.NDArray[np.bool_] = self._is_free[np.asarray(slots, np.int64) // self.page_size]
        return free
