"""Chooses the replica of a request (--dp-size, --load-balance-method). No sockets, no clock.

    auto             the replica that has most of the prompt in its prefix cache, as long as it has at most twice the
                     tokens in flight that the least loaded one would have with the request; otherwise that one
    prefix_affinity  a session that the client names (`session_affinity`): the replica of its last request, within the
                     same bound, and otherwise, or for a new session, the one that --prefix-affinity-fallback chooses;
                     without a session as `auto`, with the fallback in place of the least loaded one
    total_tokens     the one with the fewest tokens in flight: prompts and outputs of its unfinished requests
    total_requests   the one with the fewest unfinished requests
    round_robin      one after the other

Among equals, the least recently chosen one is taken, so that quiet hours fill all prefix caches. The bound of `auto`
keeps a common prefix from overloading one replica: when its holder has too much to do, the next request goes elsewhere,
and from then on there are two holders, of which the less loaded one is taken. Sessions that begin with the same long
instructions are spread from their first request on by `prefix_affinity`, which asks for no prefix then. The bound
counts requests where the fallback is `total_requests`.

The router does not ask what a replica has cached but remembers it: the pages of the prompts that it was sent lately, as
hashes of all tokens and images up to the end of each page, at most as many as its KV cache holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang.srt.configs.load_balance import AUTO, PREFIX_AFFINITY, ROUND_ROBIN, TOTAL_REQUESTS, TOTAL_TOKENS
from sglang.srt.managers.front.session_affinity import SessionReplicas
from sglang.srt.managers.wire.token_ids import Ids
from sglang.srt.utils.media_item import MediaItem

PAGE_TOKENS = 32
MAX_PAGES = 2048
"""Pages of a prompt that are hashed, at 20 us per thousand tokens on the event loop; later pages hardly affect the
choice."""
REMEMBERED_PAGES = 1 << 17
"""Most pages remembered for a replica, about 15 MB."""
MAX_LOAD_RATIO = 2
"""A replica is chosen for its prefix or session while it has at most this many times the load of the least loaded one,
were that one to get the request."""


@dataclass(slots=True, eq=False)
class ReplicaLoad:
    """Load of a replica: its unfinished requests, and the tokens of their prompts and outputs so far."""

    index: int
    num_requests: int = 0
    num_tokens: int = 0


def page_hashes(ids: Sequence[int] | Ids, namespace: str | None = None, media: Sequence[MediaItem] = ()) -> list[int]:
    """Returns a hash for each whole page of the prompt, of all tokens up to its end and the images whose placeholders
    are among them. Prompts of different namespaces have no hash in common."""
    shown: dict[int, list[bytes]] = {}
    for item in media:
        for first, last in item.spans:
            for page in range(first // PAGE_TOKENS, min((last - 1) // PAGE_TOKENS + 1, MAX_PAGES)):
                shown.setdefault(page, []).append(item.digest)
    tokens = memoryview(np.array(ids[: MAX_PAGES * PAGE_TOKENS], np.int32).tobytes())
    size = PAGE_TOKENS * 4
    value, hashes = hash(namespace), []
    for page, end in enumerate(range(size, len(tokens) + 1, size)):
        value = hash((value, tokens[end - size : end].tobytes(), *shown.get(page, ())))
        hashes.append(value)
    return hashes


class RecentPages:
    """The pages that a replica was sent lately; the least recently used are dropped first."""

    def __init__(self) -> None:
        self.capacity = REMEMBERED_PAGES
        self._pages: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def matched(self, hashes: Sequence[int]) -> int:
        """Returns how many leading pages of a prompt are remembered."""
        pages = self._pages
        return next((i for i, value in enumerate(hashes) if value not in pages), len(hashes))

    def add(self, hashes: Sequence[int]) -> None:
        for value in reversed(hashes):  # reversed, so that the end of a prompt is forgotten before its beginning
            self._pages[value] = None
            self._pages.move_to_end(value)
        while len(self._pages) > self.capacity:
            self._pages.popitem(last=False)

    def clear(self) -> None:
        """Forgets all pages."""
        self._pages.clear()


class ReplicaRouter:
    """Chooses replicas by a load balancing method."""

    def __init__(
        self, method: str, num_replicas: int, caches_prefixes: bool = True, fallback: str = TOTAL_TOKENS
    ) -> None:
        """method: one of BALANCE_METHODS. caches_prefixes: whether replicas have a prefix cache; otherwise `auto` means
        `total_tokens`, and `prefix_affinity` its fallback. fallback: one of LOAD_METHODS, for `prefix_affinity`."""
        self._by_prefix = method in (AUTO, PREFIX_AFFINITY) and caches_prefixes
        self._by_session = method == PREFIX_AFFINITY and caches_prefixes
        self._method = {AUTO: TOTAL_TOKENS, PREFIX_AFFINITY: fallback}.get(method, method)
        """One of LOAD_METHODS: the choice where no prefix or session decides."""
        self._counts_requests = self._method == TOTAL_REQUESTS
        self._sessions = SessionReplicas()
        self._pages = [RecentPages() for _ in range(num_replicas)]
        self._chosen_at = [0] * num_replicas
        self._num_chosen = 0

    def set_cache_size(self, index: int, num_tokens: int) -> None:
        """Sets the number of tokens of a replica's KV cache."""
        self._pages[index].capacity = min(REMEMBERED_PAGES, num_tokens // PAGE_TOKENS)

    def forget_prefixes(self) -> None:
        """Forgets all pages and sessions, because the caches were flushed."""
        self._sessions.clear()
        for pages in self._pages:
            pages.clear()

    def choose(
        self,
        loads: Sequence[ReplicaLoad],
        ids: Sequence[int] | Ids,
        namespace: str | None = None,
        media: Sequence[MediaItem] = (),
        session: bytes | None = None,
    ) -> int:
        """Returns the index of one of `loads`, those of the serving replicas, of which there is at least one. session:
        the client's name of it; None: it gave none."""
        if session is not None and self._by_session:
            index = self._of_session(loads, session, len(ids)).index
            self._sessions.put(session, index)
        elif len(loads) == 1:
            return loads[0].index
        else:
            hashes = page_hashes(ids, namespace, media) if self._by_prefix else []
            index = self._chosen(loads, hashes, len(ids)).index
            self._pages[index].add(hashes)
        self._num_chosen += 1
        self._chosen_at[index] = self._num_chosen
        return index

    def _chosen(self, loads: Sequence[ReplicaLoad], hashes: Sequence[int], num_tokens: int) -> ReplicaLoad:
        minimum = min(loads, key=self._load)
        if not hashes:
            return minimum
        matched = {load.index: self._pages[load.index].matched(hashes) for load in loads}
        longest = max(matched.values())
        nearest = min((load for load in loads if matched[load.index] == longest), key=self._load)
        return nearest if self._has_room(nearest, loads, num_tokens) else minimum

    def _of_session(self, loads: Sequence[ReplicaLoad], session: bytes, num_tokens: int) -> ReplicaLoad:
        """Returns the replica for a session's request of `num_tokens`."""
        index = self._sessions.get(session)
        last = next((load for load in loads if load.index == index), None)  # None, too, where it has ended
        if last is not None and self._has_room(last, loads, num_tokens):
            return last
        return min(loads, key=self._load)

    def _has_room(self, replica: ReplicaLoad, loads: Sequence[ReplicaLoad], num_tokens: int) -> bool:
        """Returns whether a replica may get a request for what it has cached, although others have less to do."""
        if self._counts_requests:
            return replica.num_requests <= MAX_LOAD_RATIO * (min(load.num_requests for load in loads) + 1)
        return replica.num_tokens <= MAX_LOAD_RATIO * (min(load.num_tokens for load in loads) + num_tokens)

    def _load(self, load: ReplicaLoad) -> tuple[int, int]:
        if self._method == ROUND_ROBIN:
            amount = 0
        else:
            amount = load.num_requests if self._counts_requests else load.num_tokens
        return amount, self._chosen_at[load.index]
