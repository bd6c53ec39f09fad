"""How many recurrent states there is room for: one a running request, and copies that prefixes end with. Bytes."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.errors import UserError
from sglang.srt.server_args import ServerArgs


@dataclass(frozen=True, slots=True)
class StateRows:
    """`running` requests at once; `checkpoints` beside their states. A model without states has none of these."""

    running: int
    checkpoints: int
    note: str | None = None
    """What of the user's wishes has no effect."""


def state_rows(args: ServerArgs, most: int, available: int, weights: int, bytes_per_request: int) -> StateRows:
    """For `most` requests, unless --max-running-requests says otherwise. States and checkpoints take half of what the
    weights leave, or as --max-mamba-cache-size and --mamba-full-memory-ratio say, all of that. Raises UserError."""
    flag = _flag(args)
    if not bytes_per_request:
        note = f"{flag} has no effect: the model has no recurrent states" if flag else None
        return StateRows(args.max_running_requests or most, 0, note)
    caching = not args.disable_radix_cache
    rows = _rows(args, available - weights, bytes_per_request)
    if rows is None:
        running = args.max_running_requests or requests_by_state(most, available, weights, 2 * bytes_per_request)
        checkpoints = checkpoints_by_state(running, available, weights, bytes_per_request)
        return StateRows(running, checkpoints if caching else 0)
    running = args.max_running_requests or max(1, min(most, rows // 2 if caching else rows))
    if running > rows:
        raise UserError(
            f"{flag} leaves room for {max(0, rows)} states of {bytes_per_request:,} B, and"
            f" {'--max-running-requests' if args.max_running_requests else 'a server'} needs {running}: one a request."
        )
    return StateRows(running, rows - running if caching else 0)


def _flag(args: ServerArgs) -> str | None:
    if args.max_mamba_cache_size is not None:
        return f"--max-mamba-cache-size {args.max_mamba_cache_size}"
    if args.mamba_full_memory_ratio is not None:
        return f"--mamba-full-memory-ratio {args.mamba_full_memory_ratio:g}"
    return None


def _rows(args: ServerArgs, left: int, bytes_per_request: int) -> int | None:
    """Of states altogether; None: nobody said. `left`: bytes that the weights leave."""
    if args.max_mamba_cache_size is not None:
        return args.max_mamba_cache_size
    ratio = args.mamba_full_memory_ratio
    return None if ratio is None else int(left * ratio / (1 + ratio)) // bytes_per_request


def checkpoints_by_state(running: int, available: int, weights: int, bytes_per_request: int) -> int:
    """One for each running request, or as many as their states leave of half of what the weights leave."""
    return max(0, min(running, (available - weights) // 2 // bytes_per_request - running))


def requests_by_state(running: int, available: int, weights: int, bytes_per_request: int) -> int:
    """Of `running` requests as many as leave half of what the weights leave to the tokens' caches, but at least 8."""
    return max(8, min(running, (available - weights) // 2 // bytes_per_request))
