"""Sizes of the pools, one for each kind of cache. The pools of tokens and of windows are sized together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from sglang.srt.plan.cache_spec import Full, PerRequest, Window
from sglang.srt.plan.caches import CacheGroup, row_tables

WINDOW_SHARE = 2
"""Divisor of the memory for tokens: windows take at most half of it, unless one request needs more."""
STATE_COPY_BYTES = 64 << 20
"""Bytes of the buffer through which states are copied."""
FREE_TOKENS = 1 << 24
"""Most tokens in the pool of a model that keeps nothing for each token: a token still costs the host some bytes,
because prefixes are found by tokens."""


@dataclass(frozen=True, slots=True)
class WindowSize:
    """The size of a pool for caches that keep `window` tokens of a request; `chunked`: as in `cache_spec.Window`."""

    window: int
    tokens: int
    chunked: bool = False


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """The sizes of a rank's caches, in tokens of whole pages, without the padding page.

    windows: the pools of windows, ordered as in `row_tables`
    checkpoints: rows of states besides those of requests
    growing: most positions with a cache slot behind the certain ones of a decoding request; more than one where
        steps verify draft tokens
    """

    tokens: int
    page_size: int
    max_requests: int
    context_len: int
    windows: tuple[WindowSize, ...] = ()
    has_states: bool = False
    checkpoints: int = 0
    uncertain_slots: int = 1

    @property
    def state_rows(self) -> int:
        """Rows of states: one for each request slot, of which 0 is padding, and the checkpoints."""
        return self.max_requests + 1 + self.checkpoints


def window_tokens(window: int, page_size: int, chunk: int = 1) -> int:
    """Returns the most tokens, in whole pages, that a request keeps of a window while `chunk` tokens are computed:
    those that the first of these sees before it, and the pages that they touch."""
    pages = -(-(window - 1) // page_size) + -(-chunk // page_size) + (1 if chunk > 1 else 0)
    return pages * page_size


@dataclass(frozen=True, slots=True)
class WindowDemand:
    """Demand for a window's pool, in tokens, the padding page included: `least` is what one request needs, `most` what
    can be in use at once."""

    window: int
    bytes_per_token: int
    least: int
    most: int
    chunked: bool = False


@dataclass(frozen=True, slots=True)
class CacheCost:
    """Bytes that caches cost on one rank. A window's pool never needs more tokens than the pool of all tokens has."""

    bytes_per_token: Fraction
    window_bytes: int = 0  # for each request
    state_bytes: int = 0  # for each request
    windows: tuple[WindowDemand, ...] = ()
    shared_entry: int = 0
    """Bytes of the largest entry of a layer whose tokens are sharded over DCP ranks."""

    @property
    def bytes_per_request(self) -> int:
        """Bytes of a request besides those of its tokens."""
        return self.window_bytes + self.state_bytes

    @property
    def max_window_bytes(self) -> int:
        """Bytes of the windows' pools if the pool of tokens does not limit them."""
        return sum(demand.most * demand.bytes_per_token for demand in self.windows)

    def states_bytes(self, rows: int) -> int:
        """Returns the bytes of `rows` states, with the staging buffer of their copies."""
        return rows * self.state_bytes + STATE_COPY_BYTES if self.state_bytes else 0

    def pool_bytes(self, tokens: int) -> int:
        """Returns the bytes of the pools for `tokens` tokens, those of windows included."""
        of_tokens = -(-tokens * self.bytes_per_token.numerator // self.bytes_per_token.denominator)
        return of_tokens + self.windows_bytes(tokens)

    def windows_bytes(self, tokens: int) -> int:
        """Returns the bytes of the windows' pools beside a pool of `tokens` tokens."""
        return sum(min(tokens, demand.most) * demand.bytes_per_token for demand in self.windows)

    def tokens_in(self, pool_bytes: int) -> int:
        """Returns the tokens that fit into `pool_bytes`: the inverse of the method pool_bytes. Where no cache grows
        with the tokens it returns FREE_TOKENS."""
        grows, fixed = self.bytes_per_token, self.max_window_bytes
        for demand in sorted(self.windows, key=lambda demand: -demand.most):
            if (grows and (pool_bytes - fixed) / grows >= demand.most) or (not grows and pool_bytes >= fixed):
                break  # this window, and the smaller ones, are limited by the demand and not by the tokens
            grows += demand.bytes_per_token
            fixed -= demand.most * demand.bytes_per_token
        return max(0, int((pool_bytes - fixed) / grows)) if grows else FREE_TOKENS

    def limited(self, pool_bytes: int) -> CacheCost:
        """Returns the cost with windows limited to their share of a pool of `pool_bytes`, unless one request needs
        more."""
        together = sum(demand.bytes_per_token for demand in self.windows)
        if not self.bytes_per_token or not together:
            return self
        share = pool_bytes // WINDOW_SHARE // together
        limited = (replace(demand, most=min(demand.most, max(demand.least, share))) for demand in self.windows)
        return replace(self, windows=tuple(limited))

    def window_sizes(self, tokens: int, page_size: int) -> tuple[WindowSize, ...]:
        """Returns the sizes of the windows' pools beside a pool for `tokens`, which includes the padding page."""
        return tuple(
            WindowSize(demand.window, min(tokens, demand.most) // page_size * page_size - page_size, demand.chunked)
            for demand in self.windows
        )


@dataclass(frozen=True, slots=True)
class Pools:
    """The pools, in bytes: for `tokens` tokens, the padding page included, and for windows."""

    tokens: int
    token_bytes: int
    window_bytes: int
    windows: tuple[WindowSize, ...]


def plan_pools(cost: CacheCost, pool_bytes: int, page_size: int, max_tokens: int) -> Pools:
    """Plans pools of as many whole pages as fit into `pool_bytes`, for at most `max_tokens` tokens and the padding
    page."""
    cost = cost.limited(pool_bytes)
    tokens = cost.tokens_in(pool_bytes)
    if tokens > max_tokens + page_size:
        tokens = max_tokens + page_size
        pool_bytes = cost.pool_bytes(tokens)
    windows = cost.windows_bytes(tokens)
    tokens = tokens // page_size * page_size
    return Pools(tokens, pool_bytes - windows, windows, cost.window_sizes(tokens, page_size))


def cache_cost(groups: Sequence[CacheGroup]) -> CacheCost:
    """Returns the cost of the groups without the windows' demands, which depend on what runs at once."""
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
    uncertain_slots: int = 1,
) -> CacheCost:
    """Returns the cost with the windows' demands, where `max_requests` run at once and steps have `step_tokens` prompt
    tokens. `uncertain_slots`: as in PoolSizes."""
    demands = []
    for lifetime in row_tables(groups):
        if isinstance(lifetime, Full):
            continue
        chunk = min(step_tokens + uncertain_slots - 1, context_len)
        least = window_tokens(lifetime.tokens, page_size, chunk) + 2 * page_size
        running = max_requests * window_tokens(lifetime.tokens, page_size, uncertain_slots)
        steps = -(-step_tokens // page_size) * page_size + page_size
        of_token = sum(group.bytes_per_entry for group in groups if group.lifetime == lifetime)
        most = max(least, running + steps)
        demands.append(WindowDemand(lifetime.tokens, of_token, least, most, lifetime.chunked))
    return replace(cache_cost(groups), windows=tuple(demands))
