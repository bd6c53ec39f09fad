"""Orders the waiting requests (--schedule-policy)."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import chain, islice

from sglang.srt.managers.scheduler.schedule_batch import Req
from sglang.srt.managers.scheduler.schedule_policy import Priorities
from sglang.srt.managers.scheduler.waiting_queue import Rank, WaitingQueue
from sglang.srt.mem_cache.kv_table import KVTable
from sglang.srt.mem_cache.radix_node import Node

MAX_ORDERED = 128
"""Waiting requests that a policy orders in each step; more would cost more than the order gains. With `dfs-weight` and
`random` the others follow these; with `lpm` a longer queue is FCFS."""
MAX_MATCHED = 16
"""Number of these that a step matches with the prefix tree, in rotation. The others keep their last result; the order
is made anew after the last one, or if others are among the first."""


def _node(req: Req, root: Node) -> Node:
    """Returns the node where the request's cached prefix was found to end; the root if that node has left the tree."""
    return root if req.node is None or req.node.parent is None else req.node


def _longest_prefix(first: list[Req], root: Node) -> list[Req]:
    return sorted(first, key=lambda req: -_node(req, root).depth)


def _depth_first(first: list[Req], root: Node) -> list[Req]:
    """Orders requests depth first, larger subtrees of requests first, so that a branch is used up before it can be
    evicted."""
    at_node: dict[Node, list[Req]] = defaultdict(list)
    for req in first:
        at_node[_node(req, root)].append(req)
    below: dict[Node, list[Node]] = defaultdict(list)
    weight: dict[Node, int] = {root: 0}
    for end, reqs in at_node.items():
        node = end
        while node.parent is not None:
            if node not in weight:
                weight[node] = 0
                below[node.parent].append(node)
            weight[node] += len(reqs)
            node = node.parent
    order: list[Req] = []
    stack = [root]
    while stack:
        node = stack.pop()
        order += at_node.get(node, ())
        stack += sorted(below.get(node, ()), key=weight.__getitem__)
    return order


_RANKS: dict[str, Rank] = {"lof": lambda req: -req.max_output}
"""Policies by which the queue is kept sorted."""
_BY_PREFIX: dict[str, Callable[[list[Req], Node], list[Req]]] = {"lpm": _longest_prefix, "dfs-weight": _depth_first}
"""Policies that order requests by where their prefixes end in the tree."""
POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random")


class QueueOrder:
    """Orders the queue for a step, with bounded work: the queue itself keeps orders that do not change while requests
    wait; for other policies only the first requests are ordered."""

    def __init__(self, policy: str, priorities: Priorities | None, kv: KVTable) -> None:
        self._policy, self._priorities, self._kv = policy, priorities, kv
        self._by_prefix = _BY_PREFIX.get(policy)
        self._turn = 0
        """Index of the next request that is matched with the tree."""
        self._places: dict[str, int] = {}
        """Places of the first requests by rid, as ordered last."""

    def new_queue(self) -> WaitingQueue:
        """Returns an empty queue, sorted by what does not change while a request waits."""
        ranks = [] if self._priorities is None else [self._priorities.rank]
        return WaitingQueue(*ranks, *(_RANKS[name] for name in [self._policy] if name in _RANKS))

    def enqueued(self, req: Req) -> None:
        """Notes that a request has entered the queue."""
        if self._by_prefix is not None:
            self._kv.match(req)

    def ordered(self, queue: WaitingQueue) -> Iterable[Req]:
        """Returns the waiting requests in the order in which they enter. The queue must not change while the result is
        read."""
        first = list(islice(queue, MAX_ORDERED))
        if self._policy == "random":  # all ranks have the same seed
            first = random.Random(len(queue)).sample(first, len(first))
        elif self._by_prefix is not None and (self._policy != "lpm" or len(queue) <= MAX_ORDERED):
            all_matched = self._match_some(first)
            if all_matched or any(req.rid not in self._places for req in first):
                ordered = self._by_prefix(first, self._kv.tree.root)
                self._places = {req.rid: place for place, req in enumerate(ordered)}
            first.sort(key=lambda req: self._places[req.rid])
        else:
            return queue
        if self._priorities is not None:
            first.sort(key=self._priorities.rank)
        return chain(first, islice(queue, MAX_ORDERED, None))

    def _match_some(self, reqs: list[Req]) -> bool:
        """Matches the next ones with the prefix tree. Returns whether the last one was among them."""
        if self._turn >= len(reqs):
            self._turn = 0
        for req in reqs[self._turn : self._turn + MAX_MATCHED]:
            self._kv.match(req)
        self._turn += MAX_MATCHED
        return self._turn >= len(reqs)
