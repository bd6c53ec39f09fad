"""Checks the size of a plan's KV cache, and makes the messages where it holds less than was asked for. No torch."""

from __future__ import annotations

import math
from dataclasses import replace

from sglang.srt.errors import UserError
from sglang.srt.plan.caches import cache_groups
from sglang.srt.plan.capacity import Capacity, Trial
from sglang.srt.plan.kv_spec import has_tensor_scales
from sglang.srt.plan.layer_spec import ParallelConfig, PerRequest
from sglang.srt.plan.memory import GIB, MIN_POOL_TOKENS, DoesNotFit
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.pool_sizes import cache_cost
from sglang.srt.plan.remedies import Planner, advice_to_hold_a_request
from sglang.srt.server_args import ServerArgs

STATE_PAGE = 16
"""Tokens of a page where requests have states, which decoding copies for each page that it fills."""


def tokens_of_entries(model: ModelDescription, parallel: ParallelConfig) -> int:
    """Returns the fewest tokens of a page that holds whole entries, and whole blocks, of every cache."""
    return math.lcm(*(group.page_multiple for group in cache_groups(model, parallel)))


def with_pages(args: ServerArgs, model: ModelDescription, parallel: ParallelConfig) -> ParallelConfig:
    """Returns the choices with the smallest pages that hold whole entries, where the user names no size, and with
    pages of at least STATE_PAGE tokens where requests have states beside entries of several tokens. Raises UserError
    for pages that do not hold whole entries."""
    whole = tokens_of_entries(model, parallel)
    if args.page_size is None:
        states = any(isinstance(group.lifetime, PerRequest) for group in cache_groups(model, parallel))
        return replace(parallel, page_size=math.lcm(whole, STATE_PAGE) if states and whole > 1 else whole)
    # Ranks that share out tokens have a page of each other's size together.
    parallel = replace(parallel, page_size=math.lcm(parallel.page_size, parallel.dcp_size))
    if parallel.page_size % whole:
        raise UserError(
            f"{model.architecture} caches or reads up to {whole} tokens as one, and a page holds these together:"
            f" --page-size {parallel.page_size} must be a multiple of {whole}."
        )
    return parallel


def flag_notes(args: ServerArgs, model: ModelDescription, capacity: Capacity) -> tuple[str, ...]:
    """Returns notes about flags that ask for something that is not there, where a server starts nevertheless."""
    notes, tokens, page_size = [], capacity.max_total_num_tokens, capacity.sizes.page_size
    if args.max_total_tokens is not None and args.max_total_tokens // page_size * page_size > tokens:
        notes.append(f"--max-total-tokens {args.max_total_tokens} does not fit: the KV cache holds {tokens} tokens")
    if has_tensor_scales(args.kv_cache_dtype) and not model.caches_in_fp8:
        notes.append(
            f"--kv-cache-dtype {args.kv_cache_dtype} has no effect: compressed entries and their window stay in 16 bits"
        )
    if args.cpu_offload_gb:
        memory = capacity.memory
        notes.append(
            f"--cpu-offload-gb {args.cpu_offload_gb:g} has no effect: all {memory.weights / GIB:.2f} GiB of weights a"
            f" GPU fit in its {memory.available / GIB:.2f} GiB, and stay there"
        )
    return tuple(notes)


def _pool_facts(capacity: Capacity) -> str:
    tokens, per_token = capacity.max_total_num_tokens, cache_cost(capacity.groups).bytes_per_token
    size = f"{capacity.memory.kv_cache / GIB:.2f} GiB at {math.ceil(per_token):,} B a token"
    return f"the KV cache holds {max(0, tokens):,} tokens ({size})"


def check_pool(args: ServerArgs, capacity: Capacity) -> None:
    """Raises UserError where the KV cache is too small to serve anything."""
    if args.max_total_tokens is not None and args.max_total_tokens < 2:
        raise UserError(f"{_pool_facts(capacity)}, too few to serve anything. Use a larger --max-total-tokens.")
    if capacity.max_total_num_tokens < min(MIN_POOL_TOKENS, args.max_total_tokens or MIN_POOL_TOKENS):
        raise DoesNotFit(f"{_pool_facts(capacity)}, too few to serve anything")


def short_of_context(planner: Planner, args: ServerArgs, trial: Trial) -> tuple[str, ...]:
    sizes = trial.capacity.sizes
    if trial.capacity.max_total_num_tokens >= sizes.context_len:
        return ()
    return (
        f"{_pool_facts(trial.capacity)}, less than one request of the full context length {sizes.context_len:,}: longer"
        f" requests are refused. {advice_to_hold_a_request(planner, args, trial)}".rstrip(),
    )


def smaller_sizes(capacity: Capacity, weights: int, available: int) -> str:
    sizes = capacity.sizes
    return (
        f"the weights leave {(available - weights) / GIB:.2f} GiB a GPU: so that the caches get their share, steps are"
        f" at most --chunked-prefill-size {capacity.chunk}, --max-running-requests {sizes.max_running_requests} and"
        f" --cuda-graph-max-bs {max(sizes.graph_batch_sizes, default=0)}, unless flags say otherwise"
    )
