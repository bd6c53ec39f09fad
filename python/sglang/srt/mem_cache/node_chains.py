"""Chains of the prefix tree: nodes with one child each, which may become one node.

Each prompt that continues a cached one adds a node, and each that ends within one splits it. Every request walks its
path several times, so a conversation of thousands of turns would hold up all others. Paths are therefore shortened when
they are walked and have become long: a merge costs about as much as the walk that finds its nodes. A path whose nodes
must stay is tried again only when it has twice as many (`Node.tried`), so all attempts together cost as much as the
nodes that they find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from sglang.srt.mem_cache.radix_node import Node
from sglang.srt.mem_cache.window_table import WindowTable

MAX_PATH = 32
"""Nodes of a path beyond which its chains are merged."""
MAX_MERGED = 1 << 15
"""Most tokens of a node that is made of others; their keys and slots are copied for it."""
NOTHING, SOME, ALL = 0, 1, 2
"""What a node has of the slots of a window table."""


def chains(
    path: Sequence[Node], windows: Sequence[WindowTable], is_needed: Callable[[Node], bool]
) -> Iterator[list[Node]]:
    """Yields runs of at least two nodes of `path` that can become one. The path begins at the root, and all of it has
    just been used.

    The last node of a run takes the tokens of the others, whose ends are forgotten. So no lock may end there, no other
    child begin there, and no request be able to go on only from there. is_needed: returns whether the end of a node
    must stay for another reason.
    """
    run: list[Node] = []
    has: list[int] | None = None
    """What the run has in each window table; None until it is asked for, which costs more than all other questions."""
    for node in path:
        parts = joined = None
        if run and _is_passed(run[-1], node) and not is_needed(run[-1]):
            has = _contents(run[0], windows) if has is None else has
            parts = _contents(node, windows)
            joined = _joined(node.depth - run[0].depth + run[0].key.size, node, windows, has, parts)
        if joined is None:
            if len(run) > 1:
                yield run
            run = []
        run.append(node)
        has = parts if joined is None else joined
    if len(run) > 1:
        yield run


def _is_passed(node: Node, child: Node) -> bool:
    """Returns whether everything that comes to the end of `node` goes on to `child`, and both are treated alike."""
    return (
        len(node.children) == 1
        and node.lock_ref == child.lock_ref
        and not node.checkpoint
        and node.kept_until == child.kept_until
    )


def _contents(node: Node, windows: Sequence[WindowTable]) -> list[int]:
    return [_content(node, window) for window in windows]


def _content(node: Node, window: WindowTable) -> int:
    slots = node.windows[window.index]
    return ALL if slots.all() else SOME if slots.any() else NOTHING


def _joined(
    size: int, child: Node, windows: Sequence[WindowTable], has: Sequence[int], parts: Sequence[int]
) -> list[int] | None:
    """Returns what a run and `child` have together in each window table, or None if they must stay apart. size: their
    tokens.

    Nobody can go on from the end of a run that has nothing, unless a token there sees none before it (chunked windows).
    One that has everything is as useful with `child` as alone if `child` has everything too and all of it lies in the
    last window, which is evicted last.
    """
    if size > MAX_MERGED:
        return None
    joined = []
    for window, above, below in zip(windows, has, parts, strict=True):
        if above == NOTHING and window.seen_before(np.array(child.depth - child.key.size, np.int32)):
            joined.append(min(below, SOME))
        elif above == below == ALL and size <= window.num_kept(child.depth):
            joined.append(ALL)
        else:
            return None
    return joined
