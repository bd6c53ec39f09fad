"""A node of the prefix tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from sglang.srt.mem_cache.allocator import Slots

Keys = npt.NDArray[np.int64]
"""Keys of tokens in the prefix cache: token ids, and numbers unique to each image or video for its tokens."""
Edge = bytes | tuple[str, bytes]
"""The key by which a parent finds a child: the bytes of its first page; below the root with the namespace, if it has
one."""

Array = TypeVar("Array", bound=npt.NDArray[np.integer])

EMPTY: Slots = np.empty(0, np.int32)


class Node:
    """A run of tokens (`key`) and their slots (`value`), both of one length, a multiple of the page size. `depth`
    counts the tokens from the root to its end. Out of the tree it has no parent. `windows`: for each window table the
    slots that are still cached, as long as `key`, and 0 for the others."""

    __slots__ = (
        "checkpoint",
        "children",
        "depth",
        "edge",
        "heap_entry",
        "in_window_heap",
        "kept_until",
        "key",
        "last_access",
        "lock_ref",
        "parent",
        "shrunk",
        "tried",
        "value",
        "window_entries",
        "windows",
    )

    def __init__(self, key: Keys, value: Slots, parent: Node | None, edge: Edge, last_access: int) -> None:
        self.key = key
        self.value = value
        self.parent = parent
        self.edge = edge
        self.depth: int = key.size + (parent.depth if parent is not None else 0)
        self.children: dict[Edge, Node] = {}
        self.lock_ref = 0
        self.last_access = last_access
        self.heap_entry = 0  # the number of its entry in the eviction heap; 0: it has none
        self.shrunk = False  # its last tokens were evicted
        self.tried = 0  # nodes of its path that the last attempt to merge them left; a child begins with its parent's
        self.windows: list[Slots] = []
        self.checkpoint = 0  # the row of the state at its end; 0: none
        self.in_window_heap = 0  # a bit for each window table
        self.window_entries: list[int] = []  # for each, its entries in that table's heap, outdated ones included
        self.kept_until = 0.0  # kept before others until this time; 0: not kept


def compact(part: Array) -> Array:
    """Returns `part` of an array, or a copy where it would keep more than twice its own memory alive."""
    whole = part.base
    return part.copy() if isinstance(whole, np.ndarray) and whole.nbytes > 2 * part.nbytes else part


NodesCallback = Callable[[Sequence[Node]], None]
"""Callback that gets nodes which are about to be evicted in part. It may copy them, but must not take or free slots of
the same memory."""
