"""Checks the size of a plan's KV cache, and makes the messages where it holds less than was asked for. No torch."""

from __future__ import annotations

import math
from dataclasses import replace

from sglang.srt.errors import UserError
from sglang.srt.plan.cache_spec import PerRequest
from sglang.srt.plan.caches import cache_groups
from sglang.srt.plan.capacity import Capacity, Trial
from sglang.srt.plan.kv_spec import FP4_KV, FP8_KV, kv_cache_dtype
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.memory import GIB, MIN_POOL_TOKENS, DoesNotFit
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.pool_sizes import cache_cost
from sglang.srt.plan.remedies import Planner, advice_to_hold_a_request
from sglang.srt.server_args import ServerArgs

STATE_PAGE = 16
"""Fewest tokens of a page where requests have states: decode copies the state once for each page that it fills."""


def tokens_of_entries(model: ModelDescription, parallel: ParallelConfig) -> int:
    """Returns the fewest tokens of a page that holds whole entries and whole blocks of every cache."""
    return math.lcm(*(group.page_multiple for group in cache_groups(model, parallel)))


def with_pages(args: ServerArgs, model: ModelDescription, parallel: ParallelConfig) -> ParallelConfig:
    """Returns the config with a page size, in tokens. Where the user names none: the smallest that holds whole entries,
    and at least STATE_PAGE tokens where requests have both states and entries of several tokens. Raises UserError for a
    page size that does not hold whole entries."""
    whole = tokens_of_entries(model, parallel)
    if args.page_size is None:
        states = any(isinstance(group.lifetime, PerRequest) for group in cache_groups(model, parallel))
        return replace(parallel, page_size=math.lcm(whole, STATE_PAGE) if states and whole > 1 else whole)
    # DCP ranks shard the tokens of a page, so their number must divide it.
    parallel = replace(parallel, page_size=math.lcm(parallel.page_size, parallel.ranks.dcp_size))
    if parallel.page_size % whole:
        raise UserError(
            f"{model.architecture} caches or reads up to {whole} tokens as one, and a page holds these together:"
            f" --page-size {parallel.page_size} must be a multiple of {whole}."
        )
    return parallel


def flag_notes(
    args: ServerArgs, model: ModelDescription, capacity: Capacity, in_main_memory: bool = False, on_cpu: bool = False
) -> tuple[str, ...]:
    """Returns notes about flags that cannot be followed, where a server starts nevertheless. in_main_memory: the
    experts are. on_cpu: the server runs there."""
    notes, tokens, page_size = [], capacity.max_total_num_tokens, capacity.sizes.page_size
    if args.max_total_tokens is not None and args.max_total_tokens // page_size * page_size > tokens:
        notes.append(f"--max-total-tokens {args.max_total_tokens} does not fit: the KV cache holds {tokens} tokens")
    if kv_cache_dtype(args.kv_cache_dtype, FP8_KV) == FP4_KV and not model.caches_four_bits:
        notes.append(
            f"--kv-cache-dtype {args.kv_cache_dtype} became {FP8_KV}: keys and values of blocks that pooled keys select"
            " have a byte an element at least"
        )
    if args.kt_cpuinfer and not in_main_memory:
        notes.append(
            f"--kt-cpuinfer {args.kt_cpuinfer} has no effect: no experts lie in main memory, where"
            " --enable-paged-experts puts them"
        )
    if on_cpu:
        asked = {
            "--embed-in-main-memory": args.embed_in_main_memory,
            "--encoder-in-main-memory": args.encoder_in_main_memory,
            "--ple-offload-embedding": args.ple_offload_embedding,
        }
        notes += [f"{name} has no effect: on a CPU all weights lie in main memory" for name, on in asked.items() if on]
    if args.cpu_offload_gb and not in_main_memory:
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


def short_of_context(planner: Planner, trial: Trial) -> tuple[str, ...]:
    """Returns the message, with advice, of a KV cache that holds less than one request of the full context length;
    empty if it holds one."""
    sizes = trial.capacity.sizes
    if trial.capacity.max_total_num_tokens >= sizes.context_len:
        return ()
    return (
        f"{_pool_facts(trial.capacity)}, less than one request of the full context length {sizes.context_len:,}: longer"
        f" requests are refused. {advice_to_hold_a_request(planner, trial)}".rstrip(),
    )


def smaller_sizes(capacity: Capacity, weights: int, available: int) -> str:
    """Returns the note that default sizes were lowered because the weights leave little memory."""
    sizes = capacity.sizes
    return (
        f"the weights leave {(available - weights) / GIB:.2f} GiB a GPU: so that the caches get their share, steps are"
        f" at most --chunked-prefill-size {capacity.chunk}, --max-running-requests {sizes.max_running_requests} and"
        f" --cuda-graph-max-bs {max(sizes.graph_batch_sizes, default=0)}, unless flags say otherwise"
    )
