"""Plans the sizes of everything on a rank; `capacity` has the results. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sglang.srt.drafts.kv_sharing.spec import check_stage
from sglang.srt.drafts.ngram.spec import ngram_bytes
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.spec import Choice
from sglang.srt.plan import defaults
from sglang.srt.plan.caches import cache_groups, row_tables
from sglang.srt.plan.capacity import Capacity
from sglang.srt.plan.draft_plan import DraftPlan, with_draft_layers, with_draft_memory
from sglang.srt.plan.host_cache import copy_bytes
from sglang.srt.plan.host_tables import host_table_bytes, host_table_note
from sglang.srt.plan.kv_spec import has_tensor_scales
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.memory import (
    CPU_KV_TOKENS,
    FixedMemory,
    cache_room,
    cpu_cache_room,
    fixed_memory,
    plan_cpu_memory,
    plan_gpu_memory,
)
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.pool_checks import smaller_sizes
from sglang.srt.plan.pool_sizes import FREE_TOKENS, CacheCost, cache_cost, sized_cost
from sglang.srt.plan.positions import SPARE, num_positions, tokens_beside_rows
from sglang.srt.plan.rank_weights import RankWeights
from sglang.srt.plan.sizes import Sizes
from sglang.srt.plan.speculation import step_widths, uncertain_slots_of
from sglang.srt.plan.stages import NO_EXTRAS, Behind, Stage, cut_stages, fullest_caches
from sglang.srt.plan.state_rows import state_rows
from sglang.srt.server_args import ServerArgs

NOT_OF_GRAPHS = ("extend_attention", "long_prompt_attention", "long_latent_prompt", "prefill_attention")
"""Ops that decode graphs do not contain: those of prompts, and of image encoders."""


def plan_capacity(
    args: ServerArgs,
    of_rank: RankWeights,
    parallel: ParallelConfig,
    context_len: int,
    arch: ArchTraits,
    choices: Mapping[str, Choice],
    available: int,
    draft: DraftPlan | None,
) -> Capacity:
    """Plans the capacity of any model that can be described, also one without a model class. Sizes that the user did
    not give are as large as possible while the caches get their share (`defaults.CACHE_SHARE`). Raises UserError if the
    model does not fit."""
    args = args_of_group(args, parallel.attn_dp_size)
    model, stages = of_rank.model, stages_of(of_rank, parallel, arch, draft)
    weights = max(stage.weight_bytes for stage in stages)
    steps = defaults.default_sizes(arch.device, available, context_len)
    if args.mem_fraction_static is not None:  # the flag decides what the caches get, so smaller steps give them no more
        steps = steps[:1]

    def capacity(size: defaults.DefaultSizes) -> Capacity:
        return _capacity(args, model, parallel, context_len, arch, choices, available, stages, size, draft)

    def share(capacity: Capacity) -> float:
        if args.max_total_tokens is not None and capacity.max_total_num_tokens >= args.max_total_tokens:
            return 1.0
        return capacity.memory.caches / (available - weights)

    chosen, best = defaults.with_share(steps, capacity, share)
    if chosen != steps[0]:
        best.notes.append(smaller_sizes(best, weights, available))
    return best


def stages_of(
    of_rank: RankWeights, parallel: ParallelConfig, arch: ArchTraits, draft: DraftPlan | None
) -> tuple[Stage, ...]:
    """Cuts the model into pipeline stages. The last one has the draft. Raises UserError for drafts that read caches of
    other stages."""
    features, fp8_cache = arch.features if arch.device == "cuda" else None, has_tensor_scales(parallel.kv_dtype)
    behind = NO_EXTRAS
    if draft is not None:
        copies = of_rank.head.rows if parallel.pp_size > 1 and not of_rank.model.tie_embeddings else 0
        behind = Behind(draft.num_layers, draft.weight_bytes(parallel.dtype, fp8_cache, features, copies))
    stages = cut_stages(of_rank, parallel.dtype, fp8_cache, features, behind)
    if draft is not None:
        check_stage(draft.description, stages[-1].layers.start)
    return stages


def _capacity(
    args: ServerArgs,
    model: ModelDescription,
    parallel: ParallelConfig,
    context_len: int,
    arch: ArchTraits,
    choices: Mapping[str, Choice],
    available: int,
    stages: tuple[Stage, ...],
    size: defaults.DefaultSizes,
    draft: DraftPlan | None,
) -> Capacity:
    weights = max(stage.weight_bytes for stage in stages)
    everything = with_draft_layers(model, draft)
    groups = fullest_caches(cache_groups(everything, parallel), stages)
    on_cpu, fraction = arch.device == "cpu", args.mem_fraction_static
    chunk = _chunk(args, size, parallel.page_size, parallel.attn_dp_size)

    def sized(running: int) -> tuple[Sizes, CacheCost, list[str]]:
        largest_graph = size.cuda_graph_max_bs
        sizes, notes = _sizes(args, model, parallel, context_len, arch, choices, chunk, running, largest_graph)
        tables = ngram_bytes(args, running, context_len)
        uncertain_slots = uncertain_slots_of(args, model.architecture)
        sizes = replace(
            sizes, row_tables=len(row_tables(groups)), ngram_bytes=tables, uncertain_slots=uncertain_slots,
            drafts=step_widths(args, model.architecture), copy_bytes=copy_bytes(args, arch),
        )  # fmt: skip
        cost = sized_cost(groups, parallel.page_size, running, context_len, sizes.tokens_per_step, uncertain_slots)
        positions = num_positions(context_len, sizes.tokens_per_step, lambda: pool_tokens(sizes, cost))
        return replace(sizes, num_positions=positions), cost, notes

    def pool_tokens(sizes: Sizes, cost: CacheCost) -> int:
        """Returns the most tokens that the pool can have besides rotary tables with a position for each of them."""
        if on_cpu:
            return args.max_total_tokens or CPU_KV_TOKENS
        if not cost.bytes_per_token:
            return context_len
        none, one = (fixed(replace(sizes, num_positions=rows), cost) for rows in (0, 1))
        row = one.rotary - none.rotary if fraction is None else 0  # a fraction fixes the caches, whatever tables take
        left = cache_room(weights, available, none, fraction)
        return tokens_beside_rows(cost, left, row, parallel.page_size, args.max_total_tokens or available)

    def fixed(sizes: Sizes, cost: CacheCost) -> FixedMemory:
        fixed = fixed_memory(model, everything, parallel.dtype, weights, available, sizes, cost, choices, arch)
        if arch.unified_memory:
            fixed = replace(fixed, reserve=fixed.reserve + host_table_bytes(everything, parallel))
        return fixed if draft is None else with_draft_memory(fixed, draft, model, parallel.dtype, sizes)

    def room(running: int) -> int:
        """Returns the bytes for tokens and states besides the windows of `running` requests."""
        sizes, cost, _ = sized(running)
        if on_cpu:
            caches = cpu_cache_room(weights, available)
        else:
            caches = cache_room(weights, available, fixed(sizes, cost), fraction)
        return caches - cost.limited(caches).max_window_bytes

    states = state_rows(args, size.max_running_requests, context_len, cache_cost(groups), room)
    sizes, cost, notes = sized(states.running)
    sizes = replace(sizes, checkpoints=states.checkpoints)
    notes += [states.note] if states.note else []
    notes += [host_table_note(size) for size in [host_table_bytes(everything, parallel)] if size]
    max_tokens = args.max_total_tokens or available  # a token takes at least a byte; the exception is below
    if sizes.num_positions < context_len:
        max_tokens = min(max_tokens, sizes.num_positions - SPARE)
    if not cost.bytes_per_token:
        max_tokens = min(max_tokens, FREE_TOKENS, states.running * context_len)
    if on_cpu:
        memory, pools = plan_cpu_memory(
            model, parallel.dtype, weights, available, sizes, cost, max_tokens, args.max_total_tokens
        )
    else:
        memory, pools = plan_gpu_memory(weights, available, sizes, cost, fixed(sizes, cost), fraction, max_tokens)
    tokens = pools.tokens - parallel.page_size  # page 0 is padding
    return Capacity(sizes, groups, stages, memory, tokens, pools.windows, chunk, states.reason, notes)


def args_of_group(args: ServerArgs, attn_dp_size: int) -> ServerArgs:
    """Returns the flags as they apply to one attention group of DP attention: an even share of the running requests,
    rounded up."""
    running = args.max_running_requests
    return args if running is None else replace(args, max_running_requests=-(-running // attn_dp_size))


def _chunk(args: ServerArgs, size: defaults.DefaultSizes, page_size: int, attn_dp_size: int) -> int:
    """Returns the prompt tokens of a step of one attention group: an even share of --chunked-prefill-size, in whole
    pages; -1: whole prompts."""
    chunk = size.chunked_prefill_size if args.chunked_prefill_size is None else args.chunked_prefill_size
    return chunk if chunk == -1 else max(page_size, chunk // attn_dp_size // page_size * page_size)


def _sizes(
    args: ServerArgs,
    model: ModelDescription,
    parallel: ParallelConfig,
    context_len: int,
    arch: ArchTraits,
    choices: Mapping[str, Choice],
    chunk: int,
    running: int,
    largest_graph: int,
) -> tuple[Sizes, list[str]]:
    notes: list[str] = []
    graphs: tuple[int, ...] = ()
    if arch.device != "cpu":
        graphs = defaults.cuda_graph_batch_sizes(args, largest_graph, running)
        kernels = [choice for op, choice in choices.items() if op.partition("/")[0] not in NOT_OF_GRAPHS]
        unsafe = sorted({choice.name for choice in kernels if not choice.spec.graph_safe})
        if graphs and unsafe:
            notes.append(f"CUDA graphs are off: {', '.join(unsafe)} cannot run inside one")
            graphs = ()
    tokens = max(args.max_prefill_tokens, context_len) if chunk == -1 else chunk
    prefill_graphs: tuple[int, ...] = ()
    extend = choices.get("extend_attention")
    if graphs and (extend is None or extend.spec.graph_prefill):
        prefill_graphs = defaults.cuda_graph_prefill_tokens(model, parallel.tp_size, tokens)
    sizes = Sizes(running, context_len, tokens, graphs, parallel.page_size, parallel.ranks, prefill_graphs)
    return sizes, notes
