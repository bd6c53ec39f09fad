"""Chooses the number of recurrent states: one for each running request, and checkpoints at the ends of cached prefixes.
Sizes in bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from sglang.srt.errors import UserError
from sglang.srt.plan.pool_sizes import CacheCost
from sglang.srt.server_args import ServerArgs

CONVERSATION_TOKENS = 4096
"""Assumed tokens of a conversation, by which memory is divided between states and tokens: a conversation has a state
and a checkpoint while it runs, and a checkpoint while it waits for its next message. With more states there would be
too few cached tokens for them; with fewer, cached tokens from which no request can continue."""
MIN_REQUESTS = 8
"""Number of requests, and of checkpoints, beyond which tokens for one request of the full context length have
priority."""


@dataclass(frozen=True, slots=True)
class StateRows:
    """The rows of states: for `running` requests at once, and `checkpoints` besides. Models without states have no
    rows."""

    running: int
    checkpoints: int
    reason: str = ""
    """Numbers and size of the states, and the reason for them."""
    note: str | None = None
    """Note that the user should see."""


def state_rows(args: ServerArgs, most: int, context_len: int, cost: CacheCost, room: Callable[[int], int]) -> StateRows:
    """Chooses the rows for at most `most` requests, unless --max-running-requests says otherwise. `room(running)`:
    bytes for tokens and states if that many requests run at once; it falls as they become more. Raises UserError where
    the flags leave no state for each request."""
    flag, caching = _flag(args), not args.disable_radix_cache
    if not cost.state_bytes:
        note = f"{flag} has no effect: the model has no recurrent states" if flag else None
        return StateRows(args.max_running_requests or most, 0, note=note)

    @functools.cache  # `room` goes through the whole model
    def need(running: int) -> _Need:
        left = room(running) - cost.states_bytes(1)  # row 0 is padding
        return _Need(left, running, most, context_len, cost)

    def checkpoints(running: int) -> int:
        """Returns the number of checkpoints; negative: there is not even room for the requests' states."""
        if flag:
            return _rows_by_flag(args, need(running).left, cost.state_bytes) - running
        return need(running).checkpoints

    def fits(running: int) -> bool:
        wanted = running if caching else 0
        beside_context = running <= MIN_REQUESTS or flag is not None or need(running).beside_context >= wanted
        return beside_context and checkpoints(running) >= wanted

    running = args.max_running_requests or _largest(most, fits)
    number = checkpoints(running)
    if flag and number < 0:
        raise UserError(
            f"{flag} leaves room for {max(0, running + number)} states of {cost.state_bytes:,} B, and"
            f" {'--max-running-requests' if args.max_running_requests else 'a server'} needs {running}: one a request."
        )
    note = None
    if caching and number <= 0:
        note = (
            f"the states of {running} requests leave no room for checkpoints: no request goes on from what another one"
            " computed. What helps: a smaller --max-running-requests, or a larger --max-mamba-cache-size"
        )
    number = max(0, number) if caching else 0
    reason = (
        f"{running:,} requests and {number:,} checkpoints of {cost.state_bytes / 1e6:.1f} MB,"
        f" by {flag or f'conversations of {CONVERSATION_TOKENS:,} tokens'}"
    )
    return StateRows(running, number, reason, note)


@dataclass(frozen=True, slots=True)
class _Need:
    """The checkpoints that `running` requests need, with `left` bytes for tokens and states."""

    left: int
    running: int
    most: int
    context_len: int
    cost: CacheCost

    @property
    def beside_context(self) -> int:
        """Number of checkpoints that leave tokens for one request of the full context length."""
        tokens = int(self.context_len * self.cost.bytes_per_token)
        return (self.left - tokens) // self.cost.state_bytes - self.running

    @property
    def checkpoints(self) -> int:
        state, running = self.cost.state_bytes, self.running
        tokens = int(CONVERSATION_TOKENS * self.cost.bytes_per_token)
        spare = self.left - running * (state + tokens)
        of_running = min(running, spare // state)
        of_waiting = max(0, (spare - running * state) // (state + tokens))
        of_use = min(of_running + of_waiting, 2 * max(running, self.most) - running)
        return min(of_use, max(self.beside_context, MIN_REQUESTS))


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """Returns the largest count up to `most` that fits, if all smaller ones do; at least 1."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _rows_by_flag(args: ServerArgs, left: int, state_bytes: int) -> int:
    """Returns the number of states, of requests and checkpoints, that the flags ask for."""
    if args.max_mamba_cache_size is not None:
        return args.max_mamba_cache_size
    assert args.mamba_full_memory_ratio is not None
    ratio = args.mamba_full_memory_ratio
    return max(0, int(left * ratio / (1 + ratio)) // state_bytes)


def _flag(args: ServerArgs) -> str | None:
    if args.max_mamba_cache_size is not None:
        return f"--max-mamba-cache-size {args.max_mamba_cache_size}"
    if args.mamba_full_memory_ratio is not None:
        return f"--mamba-full-memory-ratio {args.mamba_full_memory_ratio:g}"
    return None
