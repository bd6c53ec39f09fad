"""Plans the sizes of everything on a rank; `capacity` has the results. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

from sglang.srt.configs.speculative import SpeculativeSettings
from sglang.srt.drafts.kv_sharing.spec import check_stage
from sglang.srt.drafts.ngram.spec import ngram_bytes
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.spec import Choice
from sglang.srt.plan import defaults
from sglang.srt.plan.adapters import AdapterPlan
from sglang.srt.plan.caches import CacheGroup, cache_groups, row_tables
from sglang.srt.plan.capacity import Capacity
from sglang.srt.plan.draft_plan import DraftPlan, tables_on_host, with_draft_layers, with_draft_memory
from sglang.srt.plan.host_cache import copy_bytes
from sglang.srt.plan.host_tables import host_table_note
from sglang.srt.plan.kv_spec import has_tensor_scales
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.memory import (
    CPU_KV_TOKENS,
    FixedMemory,
    Room,
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
from sglang.srt.plan.speculation import speculative_settings, step_widths
from sglang.srt.plan.stages import NO_EXTRAS, Behind, Stage, cut_stages, fullest_caches
from sglang.srt.plan.state_rows import state_rows
from sglang.srt.plan.weights import expert_bytes, slot_bytes
from sglang.srt.server_args import ServerArgs

NOT_OF_GRAPHS = ("extend_attention", "long_prompt_attention", "long_latent_prompt", "prefill_attention")
"""Ops that decode graphs do not contain: those of prompts, and of image encoders."""


@dataclass(frozen=True)
class CapacityPlanner:
    """Plans the capacity of a rank for any model that can be described, also one without a model class. `args`: the
    flags as they apply to one attention group (`args_of_group`)."""

    args: ServerArgs
    of_rank: RankWeights
    parallel: ParallelConfig
    context_len: int
    arch: ArchTraits
    choices: Mapping[str, Choice]
    available: int
    draft: DraftPlan | None
    adapters: AdapterPlan | None = None

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return stages_of(self.of_rank, self.parallel, self.arch, self.draft)

    @cached_property
    def weights(self) -> int:
        in_main_memory = sum(expert_bytes(self.of_rank, self.parallel.dtype)) if self.on_cpu else 0
        return max(stage.weight_bytes + self._adapter_bytes(stage) for stage in self.stages) + in_main_memory

    def _adapter_bytes(self, stage: Stage) -> int:
        if self.adapters is None:
            return 0
        return self.adapters.num_bytes(self.of_rank.select_stage(stage.model), self.parallel.dtype)

    @cached_property
    def has_slots(self) -> bool:
        """True: experts lie in main memory."""
        return any(matrix.slots for matrix, _ in self.of_rank.matrices())

    @cached_property
    def everything(self) -> ModelDescription:
        """The model with the layers of the draft."""
        return with_draft_layers(self.of_rank.model, self.draft)

    @cached_property
    def groups(self) -> tuple[CacheGroup, ...]:
        return fullest_caches(cache_groups(self.everything, self.parallel), self.stages)

    @cached_property
    def settings(self) -> SpeculativeSettings | None:
        """The settings of the drafter; None: nothing drafts."""
        return speculative_settings(self.args, self.of_rank.model.architecture)

    @cached_property
    def room(self) -> Room:
        return Room(self.weights, self.available, self.args.mem_fraction_static)

    @property
    def on_cpu(self) -> bool:
        return self.arch.device == "cpu"

    def plan(self) -> Capacity:
        """Plans the capacity. Sizes that the user did not give are as large as possible while the caches get their
        share (`defaults.CACHE_SHARE`). Raises UserError if the model does not fit."""
        steps = defaults.default_sizes(self.arch.device, self.available, self.context_len, self.has_slots)
        if self.args.mem_fraction_static is not None:  # it decides what caches get: smaller steps give them no more
            steps = steps[:1]
        chosen, best = defaults.with_share(steps, self._capacity, self._share)
        if chosen != steps[0] and not self.has_slots:
            best.notes.append(smaller_sizes(best, self.weights, self.available))
        return best

    def _share(self, capacity: Capacity) -> float:
        """Returns the share of the memory besides the weights that the caches get."""
        if self.args.max_total_tokens is not None and capacity.max_total_num_tokens >= self.args.max_total_tokens:
            return 1.0
        if self.has_slots:  # which get what steps and caches leave, so that steps are chosen first
            memory, features = capacity.memory, None if self.on_cpu else self.arch.features
            room = self.available - self.weights + slot_bytes(self.of_rank, self.parallel.dtype, features)
            steps = memory.activations + memory.logits + memory.graphs
            return defaults.CACHE_SHARE * room / max(1, defaults.ROOM_OF_STEPS * steps)
        return capacity.memory.caches / (self.available - self.weights)

    def _capacity(self, size: defaults.DefaultSizes) -> Capacity:
        args, cost = self.args, cache_cost(self.groups)
        states = state_rows(args, size.max_running_requests, self.context_len, cost, partial(self._left, size))
        sizes, cost, notes = self._sized(size, states.running)
        sizes = replace(sizes, checkpoints=states.checkpoints)
        tables = tables_on_host(self.everything, self.draft, self.parallel)
        notes += [states.note] if states.note else []
        notes += [host_table_note(self.everything, tables)] if tables else []
        max_tokens = args.max_total_tokens or self.available  # a token takes at least a byte; the exception is below
        if sizes.num_positions < self.context_len:
            max_tokens = min(max_tokens, sizes.num_positions - SPARE)
        if not cost.bytes_per_token:
            max_tokens = min(max_tokens, FREE_TOKENS, states.running * self.context_len)
        if self.on_cpu:
            model, dtype = self.of_rank.model, self.parallel.dtype
            memory, pools = plan_cpu_memory(model, dtype, self.room, sizes, cost, max_tokens, args.max_total_tokens)
        else:
            memory, pools = plan_gpu_memory(self.room, sizes, cost, self._fixed(sizes, cost), max_tokens)
        tokens = pools.tokens - self.parallel.page_size  # page 0 is padding
        chunk = self._chunk(size)
        return Capacity(sizes, self.groups, self.stages, memory, tokens, pools.windows, chunk, states.reason, notes)

    def _sized(self, size: defaults.DefaultSizes, running: int) -> tuple[Sizes, CacheCost, list[str]]:
        """Returns the sizes for `running` requests, what their caches cost, and notes for the user."""
        args, page, chunk, settings = self.args, self.parallel.page_size, self._chunk(size), self.settings
        uncertain_slots = 1 if settings is None else settings.uncertain_slots_of(args.steps_in_flight)
        tokens = max(args.max_prefill_tokens, self.context_len) if chunk == -1 else chunk
        graphs, prefill_graphs, notes = self._graphs(size, running, tokens)
        sizes = Sizes(
            running, self.context_len, tokens, graphs, page, self.parallel.ranks, prefill_graphs,
            row_tables=len(row_tables(self.groups)), ngram_bytes=ngram_bytes(args, running, self.context_len),
            uncertain_slots=uncertain_slots, drafts=step_widths(settings),
            copy_bytes=copy_bytes(args, self.arch),
        )  # fmt: skip
        cost = sized_cost(self.groups, page, running, self.context_len, tokens, uncertain_slots)
        positions = num_positions(self.context_len, tokens, lambda: self._pool_tokens(sizes, cost))
        return replace(sizes, num_positions=positions), cost, notes

    def _graphs(
        self, size: defaults.DefaultSizes, running: int, tokens: int
    ) -> tuple[tuple[int, ...], tuple[int, ...], list[str]]:
        """Returns the batch sizes of decode graphs, the tokens of prefill graphs, and why there are none."""
        no_graphs = self.on_cpu or self.of_rank.model.pooling is not None
        graphs = () if no_graphs else defaults.cuda_graph_batch_sizes(self.args, size.cuda_graph_max_bs, running)
        kernels = [choice for op, choice in self.choices.items() if op.partition("/")[0] not in NOT_OF_GRAPHS]
        unsafe = sorted({choice.name for choice in kernels if not choice.spec.graph_safe})
        if graphs and unsafe:
            return (), (), [f"CUDA graphs are off: {', '.join(unsafe)} cannot run inside one"]
        extend = self.choices.get("extend_attention")
        # Where experts are copied for a prompt, the bus decides how long it takes and not the host's launches.
        if not graphs or self.has_slots or not (extend is None or extend.spec.graph_prefill):
            return graphs, (), []
        return graphs, defaults.cuda_graph_prefill_tokens(self.of_rank.model, self.parallel.ranks.tp_size, tokens), []

    def _pool_tokens(self, sizes: Sizes, cost: CacheCost) -> int:
        """Returns the most tokens that the pool can have besides rotary tables with a position for each of them."""
        asked = self.args.max_total_tokens
        if self.on_cpu:
            return asked or CPU_KV_TOKENS
        if not cost.bytes_per_token:
            return self.context_len
        none, one = (self._fixed(replace(sizes, num_positions=rows), cost) for rows in (0, 1))
        # A fraction fixes the caches, whatever tables take.
        row = one.rotary - none.rotary if self.room.fraction is None else 0
        return tokens_beside_rows(
            cost, self.room.of_caches(none), row, self.parallel.page_size, asked or self.available
        )

    def _fixed(self, sizes: Sizes, cost: CacheCost) -> FixedMemory:
        model, dtype, everything = self.of_rank.model, self.parallel.dtype, self.everything
        fixed = fixed_memory(model, everything, dtype, self.room, sizes, cost, self.choices, self.arch)
        if self.adapters is not None:  # each graph exists with adapters and without
            fixed = replace(fixed, graphs=2 * fixed.graphs)
        if self.arch.unified_memory:
            fixed = replace(fixed, reserve=fixed.reserve + tables_on_host(everything, self.draft, self.parallel))
        return fixed if self.draft is None else with_draft_memory(fixed, self.draft, model, dtype, sizes)

    def _left(self, size: defaults.DefaultSizes, running: int) -> int:
        """Returns the bytes for tokens and states besides the windows of `running` requests."""
        sizes, cost, _ = self._sized(size, running)
        caches = self.room.on_cpu() if self.on_cpu else self.room.of_caches(self._fixed(sizes, cost))
        return caches - cost.limited(caches).max_window_bytes

    def _chunk(self, size: defaults.DefaultSizes) -> int:
        """Returns the prompt tokens of a step of one attention group: an even share of --chunked-prefill-size, in whole
        pages; -1: whole prompts."""
        chunk, page = self.args.chunked_prefill_size, self.parallel.page_size
        chunk = size.chunked_prefill_size if chunk is None else chunk
        chunk = chunk if self.of_rank.model.pooling is None else -1
        return chunk if chunk == -1 else max(page, chunk // self.parallel.ranks.attn_dp_size // page * page)


def stages_of(
    of_rank: RankWeights, parallel: ParallelConfig, arch: ArchTraits, draft: DraftPlan | None
) -> tuple[Stage, ...]:
    """Cuts the model into pipeline stages. The last one has the draft. Raises UserError for drafts that read caches of
    other stages."""
    features, fp8_cache = arch.features if arch.device == "cuda" else None, has_tensor_scales(parallel.kv_dtype)
    behind = NO_EXTRAS
    if draft is not None:
        copies = of_rank.head.rows if parallel.ranks.pp_size > 1 and not of_rank.model.tie_embeddings else 0
        behind = Behind(draft.num_layers, draft.weight_bytes(parallel.dtype, fp8_cache, features, copies))
    stages = cut_stages(of_rank, parallel.dtype, fp8_cache, features, behind)
    if draft is not None:
        check_stage(draft.description, stages[-1].layers.start)
    return stages


def args_of_group(args: ServerArgs, attn_dp_size: int) -> ServerArgs:
    """Returns the flags as they apply to one attention group of DP attention: an even share of the running requests,
    rounded up."""
    running = args.max_running_requests
    return args if running is None else replace(args, max_running_requests=-(-running // attn_dp_size))
