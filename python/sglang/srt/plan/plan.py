"""Everything decided before the first allocation: kernels, tiles, dtypes, sizes, each with its reason."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from sglang.srt.configs.merge_methods import ALL_TO_ALL
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.launch import FallbackTiles
from sglang.srt.kernels.ledger_file import tile_key
from sglang.srt.kernels.measured.choices import NOT_MEASURED, MeasuredChoices
from sglang.srt.kernels.measured.decision import MEASURED
from sglang.srt.kernels.op import Op
from sglang.srt.kernels.resolve import installed_packages
from sglang.srt.kernels.spec import Choice, PeerLinks, Tile
from sglang.srt.kernels.tile_configs import OpTileConfigs, Shape, TileConfigs
from sglang.srt.plan.adapters import AdapterPlan
from sglang.srt.plan.attention_sites import attention_sites
from sglang.srt.plan.cache_scales import CacheScales, plan_cache_scales
from sglang.srt.plan.cache_spec import PER_REQUEST
from sglang.srt.plan.caches import CacheGroup, cache_groups, ranks_share_caches
from sglang.srt.plan.capacity import Trial, describe_pools
from sglang.srt.plan.decode_interval import NEVER, IntervalRule, interval_rule
from sglang.srt.plan.draft_plan import (
    DraftPlan,
    tables_on_host,
    with_draft_layers,
)
from sglang.srt.plan.expert_slot_plan import UNKNOWN, ExpertSlotPlan, MainMemory
from sglang.srt.plan.host_cache import HostCachePlan, RankBytes, active_share, plan_host_cache
from sglang.srt.plan.layer_spec import AttentionShape, AttentionSite, ParallelConfig
from sglang.srt.plan.memory import (
    MemoryPlan,
)
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.model_planner import ModelPlanner, Probe
from sglang.srt.plan.pool_checks import flag_notes, short_of_context
from sglang.srt.plan.pool_sizes import PoolSizes, WindowSize
from sglang.srt.plan.quantized_sums import QuantizedAllReduceRule, quantized_sum_rule
from sglang.srt.plan.rank_weights import RankWeights
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.remedies import trial_or_advice
from sglang.srt.plan.selection import describe_selection
from sglang.srt.plan.stages import caches_of_stage
from sglang.srt.plan.step_widths import ONE_TOKEN, StepWidths
from sglang.srt.plan.tile_configs import make_tile_configs
from sglang.srt.plan.two_batch_overlap import TwoBatchRule, two_batch_rule
from sglang.srt.plan.weights_copy import WeightsCopy, plan_weights_copy
from sglang.srt.server_args import ServerArgs

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """The plan of one rank: everything decided before the first allocation. Read-only after `make_plan`. Sizes are
    those of one rank. Ranks of one pipeline stage have equal plans; those of other stages differ in `description`
    (their own layers) and in `caches`."""

    arch: ArchTraits
    model: ModelConfig
    description: ModelDescription
    weights: RankWeights
    caches: tuple[CacheGroup, ...]
    attention_sites: tuple[AttentionSite, ...]
    dtype: str
    kv_cache_dtype: str
    device: str
    ranks: RankLayout
    choices: Mapping[str, Choice]
    tile_configs: Mapping[str, OpTileConfigs]
    memory: MemoryPlan
    max_total_num_tokens: int
    windows: tuple[WindowSize, ...]
    uncertain_slots: int  # as PoolSizes.growing
    verified_tokens: int  # tokens of a decoding request in one step: 1 without drafts
    state_checkpoints: int
    states: str  # text for people: how many requests and checkpoints have states, and why
    page_size: int
    max_running_requests: int
    context_len: int
    num_positions: int  # as Sizes.num_positions
    chunked_prefill_size: int  # -1: whole prompts
    max_prefill_tokens: int
    cuda_graph_bs: tuple[int, ...]  # empty: no graphs
    cuda_graph_prefill_tokens: tuple[int, ...] = ()
    draft: DraftPlan | None = None  # None on other stages than the last
    merge_method: str = ALL_TO_ALL  # how DCP ranks merge their partial attention
    token_rows: int = 1  # as Sizes.token_rows
    step_widths: StepWidths = ONE_TOKEN  # as Sizes.step_widths
    aux_layers: tuple[int, ...] = ()  # layers whose outputs the draft reads, on every stage
    next_tokens_read: int = 0  # as `Form.next_tokens_read` of drafts, on every stage
    aux_keeps_streams: bool = False  # the draft reads all residual streams behind the last layer, not their mean
    host_cache: HostCachePlan | None = None  # the prefix cache in main memory
    expert_slots: ExpertSlotPlan | None = None  # the experts in main memory
    weights_copy: WeightsCopy | None = None  # of a sleeping server, in main memory
    quantized_sums: QuantizedAllReduceRule | None = None  # which all-reduces are quantized
    two_batch_overlap: TwoBatchRule | None = None  # which steps run as two microbatches
    adapters: AdapterPlan | None = None  # the memory for LoRA adapters; None: the server takes none
    decode_interval: IntervalRule = NEVER  # which steps have no prompts
    cache_scales: CacheScales | None = None  # of keys and values, by --quantization-param-path
    shares_encoder: bool = False  # the ranks divide the images and frames of an encoder step among them
    stages: tuple[str, ...] = ()  # descriptions of the pipeline stages, if there are several
    warnings: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()  # messages about a server that works, but not as the user will want

    @property
    def for_draft(self) -> Plan:
        """The plan as the draft's layers see it: their description, weights and kernels."""
        draft = self.draft
        assert draft is not None
        description = draft.description.model
        return replace(
            self,
            model=replace(self.model, quantization=description.quantization),
            description=description,
            weights=draft.weights,
            choices=draft.own_choices(self.choices),
            tile_configs=draft.own_choices(self.tile_configs),
            draft=None,
            aux_layers=(),
            adapters=None,
            cache_scales=None,
        )

    @property
    def has_states(self) -> bool:
        return any(group.lifetime == PER_REQUEST for group in self.caches)

    @property
    def caches_prefixes(self) -> bool:
        """Returns whether a cached prefix can serve another request. A recurrent state stands for all tokens before it,
        so models with states need room for copies of states (checkpoints). Models that pool whole texts cache nothing.
        """
        return self.description.pooling is None and (not self.has_states or self.state_checkpoints > 0)

    @property
    def selection(self) -> str:
        """Where attention reads only what an indexer selects, and why not everywhere, as text for people; "" without an
        indexer."""
        return describe_selection(
            self.description, ParallelConfig(self.dtype, self.kv_cache_dtype, 1, RankLayout(self.ranks.attn_tp_size))
        )

    @property
    def pool_sizes(self) -> PoolSizes:
        return PoolSizes(
            self.max_total_num_tokens,
            self.page_size,
            self.max_running_requests,
            self.context_len,
            self.windows,
            self.has_states,
            self.state_checkpoints,
            self.uncertain_slots,
        )

    @property
    def attention_shapes(self) -> tuple[AttentionShape, ...]:
        """The heads of all attention call sites, each once, in the order of the layers."""
        return tuple(dict.fromkeys(site.shape for site in self.attention_sites))

    def attention_op(self, op: str, shape: AttentionShape) -> str:
        """Returns the key of the choice for an op that attends with heads of this shape."""
        variant = f"{op}/{shape.head_dim}x{shape.v_head_dim}"
        return variant if variant in self.choices else op

    @property
    def decode_rows(self) -> int:
        """Most rows of a step without prompts."""
        return self.step_widths.step_rows(self.max_running_requests)

    @property
    def tokens_per_step(self) -> int:
        """Most tokens that one step computes."""
        if self.chunked_prefill_size == -1:
            return max(self.max_prefill_tokens, self.context_len)
        return self.chunked_prefill_size

    def entry(self, op: Op[T], key: str = "") -> T:
        """Returns the kernel chosen for the op. `key`: its key in `choices`, if that is not the op's name."""
        choice = self.choices[key or op.name]
        kernel = choice.load()
        return cast(T, kernel(self) if choice.spec.takes_plan else kernel)

    def tiles(self, op: str, shape: Shape | None = None) -> TileConfigs:
        """Returns the tile configs of an op, ordered by the tokens of a step. `shape`: that of the weight, for linear
        layers. Empty where the op is not planned or its kernel takes no tile."""
        cut = self.tile_configs.get(op)
        return () if cut is None else cut.by_shape[shape]

    def bucket_sizes(self, max_tokens: int) -> list[int]:
        """Returns step sizes in tokens, ascending, that together launch every tile that a step of up to `max_tokens`
        tokens may launch (for warm-up)."""
        tile_configs = (
            tile_config for cut in self.tile_configs.values() for each in cut.by_shape.values() for tile_config in each
        )
        return sorted({int(min(tile_config.max_tokens, max_tokens)) for tile_config in tile_configs} - {0})

    def tile(self, op: str) -> Tile:
        """Returns the tile of an op whose kernel launches one tile for steps of any size."""
        return self._candidates(op)[0]

    def fallbacks(self, op: str) -> FallbackTiles[Tile]:
        """Returns the op's tile with the smaller ones that a launch may fall back to (`kernels/launch.py`)."""
        spec = self.choices[op].spec
        return FallbackTiles(op, self._candidates(op), spec.kernel_module or spec.entry.partition(":")[0])

    def _candidates(self, op: str) -> tuple[Tile, ...]:
        tile_configs = self.tiles(op)
        assert len(tile_configs) == 1, f"{op} runs on {self.choices[op].name}, which takes no tile, or several"
        return tuple(tile for (tile,) in tile_configs[0].candidates)

    def describe(self) -> dict[str, Any]:
        """Describes the plan for /server_info."""
        return {
            "arch": self.arch.name,
            "product": self.arch.product,
            "device": self.device,
            **({} if self.description.transformers_class is None else {"model_impl": self.description.model_impl}),
            **({} if self.description.pooling is None else {"pooling": self.description.pooling.describe()}),
            "dtype": self.dtype,
            "kv_cache_dtype": self.kv_cache_dtype,
            **({"kv_cache_scales": str(self.cache_scales)} if self.cache_scales is not None else {}),
            "quantization": None if self.model.quantization is None else self.model.quantization.describe(),
            "tp_size": self.ranks.tp_size,
            "ep_size": self.ranks.ep_size,
            **({"attn_dp_size": self.ranks.attn_dp_size} if self.ranks.attn_dp_size > 1 else {}),
            **({"pp_size": self.ranks.pp_size, "stages": list(self.stages)} if self.stages else {}),
            **({"draft": self.draft.describe()} if self.draft is not None else {}),
            **({"quantized_sums": str(self.quantized_sums)} if self.quantized_sums is not None else {}),
            **({"two_batch_overlap": str(self.two_batch_overlap)} if self.two_batch_overlap is not None else {}),
            "page_size": self.page_size,
            **({"selection": self.selection} if self.selection else {}),
            **self._sizes(),
            "cuda_graph_bs": list(self.cuda_graph_bs),
            "cuda_graph_prefill_tokens": list(self.cuda_graph_prefill_tokens),
            "memory": self.memory.describe(),
            **({"host_cache": self.host_cache.describe()} if self.host_cache is not None else {}),
            **({"adapters": self.adapters.describe()} if self.adapters is not None else {}),
            **({"expert_slots": self.expert_slots.describe()} if self.expert_slots is not None else {}),
            **({"weights_copy": self.weights_copy.describe()} if self.weights_copy is not None else {}),
            "kernels": {
                op: {
                    "kernel": choice.name,
                    "tile": None if choice.tile is None else tile_key(choice.tile),
                    "tiles": self.tile_configs[op].describe() if choice.spec.configs else [],
                    **self._measured(op),
                    "remark": choice.remark,
                    "not_chosen": [str(rejection) for rejection in choice.rejected],
                }
                for op, choice in self.choices.items()
            },
            "warnings": [*self.errors, *self.warnings],
        }

    def _measured(self, op: str) -> dict[str, Any]:
        """Describes what was measured for an op on this GPU; empty if nothing was."""
        lines = self.tile_configs[op].measured if op in self.tile_configs else ()
        note = self.choices[op].note or ""
        lines = (*([note] if note.startswith(MEASURED) else []), *lines)
        return {"measured": list(lines)} if lines else {}

    def _sizes(self) -> dict[str, Any]:
        return {
            "max_total_num_tokens": self.max_total_num_tokens,
            **describe_pools(self.windows, self.state_checkpoints, self.states),
            "chunked_prefill_size": self.chunked_prefill_size,
            "max_prefill_tokens": self.max_prefill_tokens,
            "max_running_requests": self.max_running_requests,
            "context_len": self.context_len,
        }

    def log(self) -> None:
        """Logs the decisions at start-up."""
        if self.model.quantization is not None:
            logger.info("Quantization: %s", self.model.quantization.describe())
        if self.cache_scales is not None:
            logger.info("Scales of the KV cache: %s", self.cache_scales)
        for op, choice in self.choices.items():
            tile = f" tile {tile_key(choice.tile)}" if choice.tile else ""
            remark = f" ({choice.remark})" if choice.remark else ""
            logger.info("%s: %s%s%s", op, choice.name, tile, remark)
        for op, cut in self.tile_configs.items():
            if cut.source:
                logger.info("%s: tiles of %s", op, cut.source)
            for message in cut.warnings:
                logger.warning(message)
        for op in self.choices:
            for line in self._measured(op).get("measured", ()):
                logger.info("%s: %s", op, line)
        if self.description.shared_apart is not None:
            logger.info("The shared expert is computed apart from the routed ones: %s", self.description.shared_apart)
        if self.draft is not None:
            logger.info("Draft: %s", self.draft.description)
        if self.selection:
            logger.info("Sparse attention: %s", self.selection)
        for number, stage in enumerate(self.stages):
            logger.info("Stage %d: %s", number, stage)
        if self.quantized_sums is not None:
            logger.info("Sums over ranks: %s", self.quantized_sums)
        if self.two_batch_overlap is not None:
            logger.info("Steps with prompts as two microbatches: %s", self.two_batch_overlap)
        logger.info(self.memory.log_line())
        if self.expert_slots is not None:
            logger.info("Weights: %s", self.expert_slots)
        if self.host_cache is not None:
            logger.info("Prefixes in main memory: %s", self.host_cache)
        if self.weights_copy is not None:
            logger.info("Sleep: %s", self.weights_copy)
        logger.info(", ".join(f"{name}={value}" for name, value in self._sizes().items()))
        for message in self.warnings:
            logger.warning(message)
        for message in self.errors:
            logger.error(message)


def make_plan(
    args: ServerArgs,
    model: ModelConfig,
    arch: ArchTraits,
    available_bytes: int,
    packages: frozenset[str] | None = None,
    links: PeerLinks | None = None,
    rank: int = 0,
    probe: Probe | None = None,
    advises: bool = True,
    host_bytes: int | None = None,
    tier_unasked: bool = False,
    main_memory: MainMemory = UNKNOWN,
    measured: MeasuredChoices = NOT_MEASURED,
) -> Plan:
    """Makes the plan of one rank.

        available_bytes: free on the device before anything is allocated, the least over the ranks
        packages: optional packages to count on; None: those installed here
        links: the probed links between the ranks' GPUs
        rank: whose plan; only the stages of a pipeline differ
        probe: tries a library's kernel on this GPU
        advises: whether messages say what would help, which takes further trials
        host_bytes: free main memory of the rank's machine; None: unknown
        tier_unasked: prefixes are kept in main memory by default, without a flag that asks for it
        main_memory: what experts may take of it
        measured: what was measured on these GPUs

    Raises UserError where a kernel that was asked for cannot run, heads do not divide or weights do not fit.
    """
    packages = packages or installed_packages()
    planner = ModelPlanner(
        args, model, arch, available_bytes, packages, True, links, probe, advises, main_memory, measured
    )
    trial = trial_or_advice(planner)
    parallel, capacity, draft = trial.parallel, trial.capacity, trial.draft
    everything = with_draft_layers(trial.description, draft)
    sizes, tokens, stages = capacity.sizes, capacity.max_total_num_tokens, capacity.stages
    stage = stages[parallel.ranks.stage(rank)]
    cache_scales, unused_scales = plan_cache_scales(
        args.quantization_param_path, model.model_types, trial.description, parallel.kv_dtype
    )
    plan = Plan(
        arch=arch,
        model=model,
        description=stage.model,
        weights=trial.of_rank.select_stage(stage.model),
        caches=caches_of_stage(cache_groups(everything, parallel), stage.cache_layers),
        attention_sites=attention_sites(everything, parallel.attn_tp_size, args.dcp_size),
        dtype=model.dtype,
        kv_cache_dtype=parallel.kv_dtype,
        device=arch.device,
        ranks=parallel.ranks,
        choices=trial.chosen.by_key(),
        tile_configs=make_tile_configs(trial.chosen.by_key().values(), arch, measured),
        memory=capacity.memory,
        max_total_num_tokens=tokens,
        windows=capacity.windows,
        uncertain_slots=sizes.uncertain_slots,
        verified_tokens=sizes.verified_tokens,
        state_checkpoints=sizes.checkpoints,
        states=capacity.states,
        page_size=parallel.page_size,
        max_running_requests=sizes.max_running_requests,
        context_len=sizes.context_len,
        num_positions=sizes.num_positions,
        chunked_prefill_size=capacity.chunk,
        max_prefill_tokens=args.max_prefill_tokens,
        cuda_graph_bs=sizes.graph_batch_sizes,
        cuda_graph_prefill_tokens=sizes.prefill_graph_tokens,
        draft=draft if stage.model.last_stage else None,
        merge_method=args.dcp_comm_backend,
        token_rows=sizes.token_rows,
        step_widths=sizes.step_widths,
        aux_layers=draft.description.aux_layers if draft is not None else (),
        next_tokens_read=draft.description.form.next_tokens_read if draft is not None else 0,
        aux_keeps_streams=draft is not None and draft.description.form.reads_streams,
        quantized_sums=quantized_sum_rule(
            args,
            arch,
            links,
            stage.model.hidden_size,
            sizes.decode_rows * parallel.ranks.attn_dp_size,
        ),
        two_batch_overlap=two_batch_rule(
            args, None if links is None else links.library_topology, trial.description, trial.chosen.by_key()
        ),
        decode_interval=interval_rule(args, trial.description),
        adapters=trial.adapters,
        cache_scales=cache_scales,
        shares_encoder=args.mm_enable_dp_encoder and args.tp_size > 1,
        stages=tuple(map(str, stages)) if len(stages) > 1 else (),
        expert_slots=trial.expert_slots,
        warnings=(
            *trial.chosen.notes,
            *capacity.notes,
            *unused_scales,
            *flag_notes(args, trial.description, capacity, trial.expert_slots is not None, arch.device == "cpu"),
        ),
        errors=short_of_context(planner.like(trial), trial),
    )
    return _with_main_memory(plan, args, trial, everything, host_bytes, tier_unasked)


def _with_main_memory(
    plan: Plan,
    args: ServerArgs,
    trial: Trial,
    everything: ModelDescription,
    host_bytes: int | None,
    unasked: bool,
) -> Plan:
    """Returns the plan with what lies in main memory: a sleeping server's weights, and cached prefixes, of which all
    stages have equally many tokens. `everything`: the model with the layers of a draft."""
    parallel, memory = trial.parallel, plan.memory
    processes = -(-parallel.ranks.world_size * args.dp_size // args.nnodes)
    slots = trial.expert_slots
    if host_bytes is not None:
        taken = memory.weights + memory.caches if plan.device == "cpu" else 0
        of_experts = 0 if slots is None or plan.device == "cpu" else slots.host_bytes * slots.banks
        tables = tables_on_host(everything, trial.draft, parallel) * processes
        host_bytes = max(0, host_bytes - taken - tables - of_experts)
    weights_copy, said = plan_weights_copy(args, memory.weights, processes, host_bytes)
    if weights_copy is not None and weights_copy.always and host_bytes is not None:
        host_bytes = max(0, host_bytes - weights_copy.total)
    ranks_share = ranks_share_caches(everything, parallel)
    weights = RankBytes(memory.weights, int(memory.weights * active_share(everything)))
    alike = ranks_share and parallel.ranks.pp_size == 1 and args.nnodes == 1 and parallel.ranks.attn_dp_size == 1
    sharers = parallel.ranks.world_size if alike else 1
    host_cache, notes = plan_host_cache(
        args,
        trial.capacity.groups,
        plan.pool_sizes,
        plan.arch,
        host_bytes,
        processes // sharers,
        ranks_share,
        weights,
        unasked,
        sharers,
        None if slots is None else slots.rate,
    )
    warnings = (*plan.warnings, *said, *notes)
    return replace(plan, host_cache=host_cache, weights_copy=weights_copy, warnings=warnings)
