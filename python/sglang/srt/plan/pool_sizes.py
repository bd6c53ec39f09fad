"""Sizes of the pools for each kind of cache. The pools of tokens and of windows are sized together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from sglang.srt.plan.caches import CacheGroup, row_tables
from sglang.srt.plan.layer_spec import Full, PerRequest, Window

WINDOW_SHARE = 2
"""Divisor of the memory for tokens: windows take at most half of it, as long as one request can run."""
STATE_COPY_BYTES = 64 << 20
"""Bytes that copies of states take while they are made, however many there are."""
FREE_TOKENS = 1 << 24
"""Most tokens in the pool of a model that keeps nothing for every token: each token costs the host some bytes, because
prefixes are known by them."""


@dataclass(frozen=True, slots=True)
class WindowSize:
    """The size of a pool for caches that keep `window` tokens of a request; `chunked`: as in `layer_spec.Window`."""

    window: int
    tokens: int
    chunked: bool = False


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """The sizes of a rank's caches. Tokens are whole pages, without the padding page. `windows`: as in `row_tables`,
    after the first. `checkpoints`: rows of states beside those of requests. `growing`: the most positions of a request
    that decodes, behind those that are certain, which have a cache slot; more than one where steps verify draft
    tokens."""

    tokens: int
    page_size: int
    max_requests: int
    context_len: int
    windows: tuple[WindowSize, ...] = ()
    has_states: bool = False
    checkpoints: int = 0
    growing: int = 1

    @property
    def state_rows(self) -> int:
        """Rows of states: one for each request slot, of which 0 is padding, and the checkpoints."""
        return self.max_requests + 1 + self.checkpoints


def window_tokens(window: int, page_size: int, chunk: int = 1) -> int:
    """Returns the most tokens, in whole pages, that a request has of a window while `chunk` tokens are computed: those
    that the first of them sees before it, counted from the end of a whole page, and the pages that they touch."""
    pages = -(-(window - 1) // page_size) + -(-chunk // page_size) + (1 if chunk > 1 else 0)
    return pages * page_size


@dataclass(frozen=True, slots=True)
class WindowDemand:
    """Demand for a window's pool, in tokens with the padding page: the least that one request needs, and the most that
    can be used at once."""

    window: int
    bytes_per_token: int
    least: int
    most: int
    chunked: bool = False


@dataclass(frozen=True, slots=True)
class CacheCost:
    """Bytes that caches cost on one rank. A window's pool never needs more tokens than the pool of all tokens has."""

    bytes_per_token: Fraction
    window_bytes: int = 0  # of a request
    state_bytes: int = 0  # of a request
    windows: tuple[WindowDemand, ...] = ()
    shared_entry: int = 0
    """Bytes of the largest entry of one layer whose tokens ranks share out."""

    @property
    def bytes_per_request(self) -> int:
        """Bytes of a request beside those of its tokens."""
        return self.window_bytes + self.state_bytes

    @property
    def max_window_bytes(self) -> int:
        """Bytes of windows' pools beside a pool of as many tokens as they can use."""
        return sum(demand.most * demand.bytes_per_token for demand in self.windows)

    def states_bytes(self, rows: int) -> int:
        """Returns the bytes of `rows` states, with what copies of them take."""
        return rows * self.state_bytes + STATE_COPY_BYTES if self.state_bytes else 0

    def pool_bytes(self, tokens: int) -> int:
        """Returns the bytes of pools for `tokens` and for the windows of their requests."""
        of_tokens = -(-tokens * self.bytes_per_token.numerator // self.bytes_per_token.denominator)
        return of_tokens + self.windows_bytes(tokens)

    def windows_bytes(self, tokens: int) -> int:
        return sum(min(tokens, demand.most) * demand.bytes_per_token for demand in self.windows)

    def tokens_in(self, pool_bytes: int) -> int:
        """Returns the tokens for which there is room in `pool_bytes`: the inverse of the method pool_bytes. Where no
        cache grows with the tokens it returns the number of bytes."""
        grows, fixed = self.bytes_per_token, self.max_window_bytes
        for demand in sorted(self.windows, key=lambda demand: -demand.most):
            if (grows and (pool_bytes - fixed) / grows >= demand.most) or (not grows and pool_bytes >= fixed):
                break  # enough for all that requests can have of the larger windows, so of this one too
            grows += demand.bytes_per_token
            fixed -= demand.most * demand.bytes_per_token
        return max(0, int((pool_bytes - fixed) / grows)) if grows else pool_bytes

    def limited(self, pool_bytes: int) -> CacheCost:
        """Returns the cost with windows that take no more than their share of a pool, unless one request needs more."""
        together = sum(demand.bytes_per_token for demand in self.windows)
        if not self.bytes_per_token or not together:
            return self
        share = pool_bytes // WINDOW_SHARE // together
        limited = (replace(demand, most=min(demand.most, max(demand.least, share))) for demand in self.windows)
        return replace(self, windows=tuple(limited))

    def window_sizes(self, tokens: int, page_size: int) -> tuple[WindowSize, ...]:
        """Returns the sizes of the windows' pools beside a pool for `tokens`, the padding page included."""
        return tuple(
            WindowSize(demand.window, min(tokens, demand.most) // page_size * page_size - page_size, demand.chunked)
            for demand in self.windows
        )


@dataclass(frozen=True, slots=True)
class Pools:
    """The allocated pools: for `tokens`, the padding page included, and for windows."""

    tokens: int
    token_bytes: int
    window_bytes: int
    windows: tuple[WindowSize, ...]


def plan_pools(cost: CacheCost, pool_bytes: int, page_size: int, max_tokens: int) -> Pools:
    """Plans pools for as many tokens as fit, but no more than `max_tokens` and the padding page."""
    cost = cost.limited(pool_bytes)
    tokens = cost.tokens_in(pool_bytes)
    if tokens > max_tokens + page_size:
        tokens = max_tokens + page_size
        pool_bytes = cost.pool_bytes(tokens)
    windows = cost.windows_bytes(tokens)
    tokens = tokens // page_size * page_size
    return Pools(tokens, pool_bytes - windows, windows, cost.window_sizes(tokens, page_size))


def cache_cost(groups: Sequence[CacheGroup]) -> CacheCost:
    """Returns the cost of the groups without the demands for windows, which depend on what runs at once."""
    return CacheCost(
        sum((group.bytes_per_token for group in groups), Fraction(0)),
        sum(group.bytes_per_request for group in groups if isinstance(group.lifetime, Window)),
        sum(group.bytes_per_request for group in groups if isinstance(group.lifetime, PerRequest)),
        shared_entry=max(
            (member.cache.entry_bytes for group in groups if group.dcp_size > 1 for member in group.members),
            default=0,
        ),
    )


def sized_cost(
    groups: Sequence[CacheGroup],
    page_size: int,
    max_requests: int,
    context_len: int,
    step_tokens: int,
    growing: int = 1,
) -> CacheCost:
    """Returns the cost with the demands for windows, where `max_requests` run at once and steps have `step_tokens`
    tokens of prompts. `growing`: as in PoolSizes."""
    demands = []
    for lifetime in row_tables(groups):
        if isinstance(lifetime, Full):
            continue
        chunk = min(step_tokens + growing - 1, context_len)
        least = window_tokens(lifetime.tokens, page_size, chunk) + 2 * page_size
        running = max_requests * window_tokens(lifetime.tokens, page_size, growing)
        steps = -(-step_tokens // page_size) * page_size + page_size
        of_token = sum(group.bytes_per_entry for group in groups if group.lifetime == lifetime)
        most = max(least, running + steps)
        demands.append(WindowDemand(lifetime.tokens, of_token, least, most, lifetime.chunked))
    return replace(cache_cost(groups), windows=tuple(demands))
