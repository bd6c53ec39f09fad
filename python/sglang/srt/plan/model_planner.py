"""Plans a model with one set of flags: kernels, and the sizes of what fits beside the weights. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.quantization import agree
from sglang.srt.drafts.config import DraftConfig
from sglang.srt.drafts.spec import DraftDescription
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import ArchTraits, current_arch, free_memory_bytes
from sglang.srt.kernels.conditions import SCALED_MM_SCHEMES
from sglang.srt.kernels.measured.choices import NOT_MEASURED, MeasuredChoices
from sglang.srt.kernels.resolve import installed_packages
from sglang.srt.kernels.spec import Need, PeerLinks
from sglang.srt.kernels.tables import FLASHINFER_FUSION
from sglang.srt.plan.adapters import adds_to_pairs, check_adapters, plan_adapters
from sglang.srt.plan.capacity import Trial
from sglang.srt.plan.capacity_plan import CapacityPlanner, args_of_group, stages_of
from sglang.srt.plan.cpu_experts import (
    check_experts,
    pays,
    threads_by_default,
    threads_of_rank,
    why_not_this_model,
    with_cpus,
)
from sglang.srt.plan.draft_plan import (
    DraftPlan,
    asked_draft,
    check_backends,
    needs_with_draft,
    plan_draft,
)
from sglang.srt.plan.equal_layers import interned
from sglang.srt.plan.expert_slot_plan import FETCHED, UNKNOWN, MainMemory, SlotCounts, bus_rate
from sglang.srt.plan.expert_slots import describe_slots, plan_in_main_memory, processes_of, why_not, with_slots
from sglang.srt.plan.host_tables import ENCODER, has_tables, with_embeddings, with_encoder, with_tables
from sglang.srt.plan.kernel_choice import choose_kernels
from sglang.srt.plan.kv_spec import FP4_KV, FP8_KV, kv_cache_dtype
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.layout import MAX_GPUS, LayoutProblem, asked_layout, check_layout, check_machine
from sglang.srt.plan.media import check_placeholders, describe_media
from sglang.srt.plan.memory import DoesNotFit
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.pool_checks import check_pool, with_pages
from sglang.srt.plan.rank_weights import rank_weights
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.remedies import trial_or_advice
from sglang.srt.plan.served_model import describe_served
from sglang.srt.plan.speculation import verify_needs
from sglang.srt.server_args import ServerArgs

Probe = Callable[[Need], str]
"""Tries a library's kernel of a need on this GPU. Returns the reason against it, or ""."""


@dataclass(frozen=True, slots=True)
class ModelPlanner:
    """The planner of one model with one set of flags for one kind of GPU, as `remedies.Planner`. With `served` it
    refuses what is not computed here; otherwise sizes are estimates, made of the ops that have a kernel."""

    args: ServerArgs
    model: ModelConfig
    arch: ArchTraits
    available: int
    packages: frozenset[str]
    served: bool = True
    links: PeerLinks | None = None
    probe: Probe | None = None
    advises: bool = True
    main_memory: MainMemory = UNKNOWN
    measured: MeasuredChoices = NOT_MEASURED
    slots: SlotCounts | None = None  # of experts in main memory
    described: dict[str, ModelDescription] = field(default_factory=dict)  # by the result of `why_shared_apart`
    drafts: dict[str, tuple[DraftConfig, DraftDescription] | None] = field(default_factory=dict)  # likewise

    @property
    def max_gpus(self) -> int:
        return self.arch.gpus_per_machine or MAX_GPUS

    @property
    def context_len(self) -> int:
        return min(self.model.context_len, self.args.context_length or self.model.context_len)

    def changed(self, **change: Any) -> ModelPlanner:
        """Returns the planner with other values of some flags."""
        return replace(self, args=replace(self.args, **change))

    def with_slots(self, counts: SlotCounts) -> ModelPlanner:
        """Returns the planner of the model with its experts in main memory."""
        return replace(self, slots=counts)

    def like(self, trial: Trial) -> ModelPlanner:
        """Returns the planner with as many slots as a plan has, so that trials of other flags need not look for them
        again."""
        slots = trial.expert_slots
        return self if slots is None else self.with_slots(SlotCounts(slots.slots, slots.buffered))

    def quantizing(self, scheme: str) -> ModelPlanner | None:
        """Returns the planner of the model quantized with --quantization SCHEME; None where the checkpoint is quantized
        already or the scheme does not apply."""
        if self.model.quantization is not None:
            return None
        try:
            quantization = agree(scheme, None, self.model.model_path)
        except UserError:
            return None
        return replace(self, model=replace(self.model, quantization=quantization), described={}, drafts={})

    def describe(self) -> tuple[ModelDescription, ParallelConfig]:
        """Returns the description of the model and the parallel config. Raises UserError for malformed configs, for
        what is not computed here, and for layouts that do not divide the model."""
        args, ranks = self.args, asked_layout(self.args)
        check_machine(self.arch, ranks, args.nnodes, args.dp_size)
        apart = why_shared_apart(args)
        if apart not in self.described:
            self.described[apart] = _described(args, self.model, apart)
        model = _with_shared_tower(args, self.described[apart])
        model = with_tables(model, args.ple_offload_embedding and self.arch.device != "cpu")
        if args.embed_in_main_memory and self.arch.device != "cpu":
            model = with_embeddings(model)
        if args.encoder_in_main_memory and self.arch.device != "cpu":
            if self.arch.unified_memory:
                raise UserError(f"{ENCODER}: the memory of {self.arch.product} is main memory. Remove the flag.")
            model = with_encoder(model)
        model = with_slots(model, self.slots)
        threads = self._cpu_threads(model, ranks)
        if threads and self.slots is not None:
            model = with_cpus(model, threads)
        if self.served:
            model.require_served()
        check_layout(model, ranks)
        parallel = parallel_config_of(args, self.model.dtype, model)
        return model, with_pages(args, model, parallel) if self.served else parallel

    def _cpu_threads(self, model: ModelDescription, ranks: RankLayout) -> int:
        """Returns the threads of a rank that compute experts in main memory. Raises UserError where a flag asks for
        what cannot be."""
        asked, processes = self.args.kt_cpuinfer, processes_of(self.args, ranks)
        if asked:
            check_experts(model, self.model.dtype)
            return threads_of_rank(asked, processes)
        with_adapters = plan_adapters(self.args) is not None  # which CPUs do not add
        if asked is not None or self.slots is None or with_adapters or why_not_this_model(model, self.model.dtype):
            return 0
        rate = FETCHED * bus_rate(self.arch, self.main_memory, processes)
        return threads_by_default(rate, self.main_memory, processes)

    def draft(self, target: ModelDescription) -> DraftPlan | None:
        """Returns the plan of the draft, or None without one. Raises UserError for a draft that is not computed here or
        does not match the target."""
        apart = why_shared_apart(self.args)
        if apart not in self.drafts:
            self.drafts[apart] = asked_draft(self.args, self.model, target, apart) if self.served else None
        asked = self.drafts[apart]
        if asked is None:
            return None
        config, description = asked
        if self.args.embed_in_main_memory and self.arch.device != "cpu":
            description = description.with_embedding_on_host()
        return plan_draft(config, description, asked_layout(self.args))

    def weights(self) -> int:
        """Returns the bytes of weights on the rank that has most."""
        model, parallel = self.describe()
        of_rank, draft = rank_weights(model, parallel.ranks), self.draft(model)
        return max(stage.weight_bytes for stage in stages_of(of_rank, parallel, self.arch, draft))

    def trial(self) -> Trial:
        """Plans the model. Unless a flag decides, experts go to main memory where the GPU has no room for the weights
        and main memory is known to have. Raises UserError where no server would start."""
        if self.slots is not None:
            return self._trial_with_tables()
        if self.args.enable_paged_experts or self.args.paged_experts_num_resident is not None:
            return self._in_main_memory()
        try:
            return self._trial_with_tables()
        except DoesNotFit:
            if self.main_memory.free is None or not self.served or why_not(self):
                raise
            try:
                return self._in_main_memory()
            except UserError:
                pass
            raise

    def _in_main_memory(self) -> Trial:
        """Plans the model with its experts in main memory. Unless a flag decides, CPUs compute some of them where that
        pays. Raises UserError where no server would start."""
        trial = plan_in_main_memory(self)
        slots = trial.expert_slots
        if self.args.kt_cpuinfer is not None or slots is None or not slots.cpu_threads:
            return trial
        without = self.changed(kt_cpuinfer=0).like(trial).trial()
        return trial if without.expert_slots is None or pays(slots, without.expert_slots) else without

    def _trial_with_tables(self) -> Trial:
        """Plans the model. Unless a flag decides, n-gram tables go to host memory where the GPU has no room for both
        them and a request of the full context length. Raises UserError where no server would start."""
        args = self.args
        fixed = args.ple_offload_embedding or args.no_ple_offload_embedding or self.arch.unified_memory
        if fixed or self.arch.device == "cpu" or not has_tables(self.describe()[0]):
            return self._trial()
        offloading = self.changed(ple_offload_embedding=True)
        try:
            trial = self._trial()
            if trial.capacity.max_total_num_tokens >= trial.capacity.sizes.context_len:
                return trial
        except UserError as error:
            try:
                return offloading._trial()
            except UserError:
                raise error from None
        return offloading._trial()

    def _trial(self) -> Trial:
        args, (model, parallel) = self.args, self.describe()
        of_rank, draft = rank_weights(model, parallel.ranks), self.draft(model)
        adapters = plan_adapters(args)
        wanted = (*needs_with_draft(of_rank, draft, parallel), *verify_needs(args, parallel.dtype))
        if adapters is not None:
            check_adapters(adapters, model)
            adapters = adapters.for_names(model.names)
            ops = ("add_adapters", "add_expert_adapters") if adds_to_pairs(model) else ("add_adapters",)
            wanted = (*wanted, *(Need(op, q_dtype=parallel.dtype) for op in ops))
        needs = tuple(map(self._with_probed_facts, wanted))
        chosen = choose_kernels(args, needs, self.arch, self.packages, self.measured)
        choices = chosen.by_key() if self.served else chosen.chosen()
        check_backends(choices, None if draft is None else draft.description)
        of_group = args_of_group(args, parallel.ranks.attn_dp_size)
        planner = CapacityPlanner(
            of_group, of_rank, parallel, self.context_len, self.arch, choices, self.available, draft, adapters
        )
        capacity = planner.plan()
        check_pool(args, capacity)
        trial = Trial(of_rank, parallel, chosen, capacity, draft, adapters=adapters)
        return trial if self.slots is None else replace(trial, expert_slots=describe_slots(self, trial, self.slots))

    def _with_probed_facts(self, need: Need) -> Need:
        """Returns the need completed by what was found on this machine: a library's defect, the links of an
        all-reduce."""
        of_torch = need.op == "prefill_attention" or (need.op == "linear" and need.quant in SCALED_MM_SCHEMES)
        if of_torch and self.probe is not None:
            return replace(need, library_problem=self.probe(need))
        if need.op != "all_reduce":
            return need
        asked = {FLASHINFER_FUSION} if self.args.enable_flashinfer_allreduce_fusion else set()
        return replace(need, links=self.links, traits=need.traits | asked)


def _described(args: ServerArgs, model: ModelConfig, apart: str) -> ModelDescription:
    source = str(Path(model.model_path) / "config.json")
    description = describe_served(
        args, model.hf_config, model.quantization, apart, model.model_path, model.text_keys, model.written_config
    )
    if description.transformers_class is not None:
        if args.mm_enable_dp_encoder and description.media is not None:
            raise UserError(
                f"--mm-enable-dp-encoder shares out frames, and {description.title} encodes whole images; start without"
                " it."
            )
        return replace(description, media=None) if args.language_model_only else description
    media = None if args.language_model_only else describe_media(model.media_config)
    if media is not None:
        check_placeholders(media, description.vocab_size, source)
    layers = description.layers
    if media is not None and media.image_token is not None:
        token = media.image_token
        layers = interned(
            replace(layer, ffn=layer.ffn.with_image_token(token), ngrams=layer.ngrams.with_image_token(token))
            for layer in layers
        )
    # Embedding models are published without an output head. Nobody asks for logits, and the start-up checks, which
    # compute some, do so with the embedding's rows.
    tied = description.tie_embeddings or args.is_embedding
    return replace(description, media=media, layers=layers, tie_embeddings=tied)


def _with_shared_tower(args: ServerArgs, description: ModelDescription) -> ModelDescription:
    """Returns the model with the share of its encoder that each rank has."""
    media = description.media
    together = args.pp_size == args.attn_dp_size == 1  # else only some of the ranks encode at the same time
    if media is None or not together or args.mm_enable_dp_encoder:
        return description
    return replace(description, media=replace(media, tower=media.tower.shared_by(args.tp_size)))


def describe_served_model(args: ServerArgs, model: ModelConfig) -> ModelDescription:
    """Describes the model to be served. Raises UserError for malformed configs, for what is not computed here, and for
    layouts that do not divide the model. Looks at the device only to give advice on layouts."""
    description = _with_shared_tower(args, _described(args, model, why_shared_apart(args)))
    description.require_served()
    try:
        check_layout(description, asked_layout(args))
    except LayoutProblem:
        arch = current_arch(device=args.device)
        available = arch.memory or free_memory_bytes(None)
        return trial_or_advice(ModelPlanner(args, model, arch, available, installed_packages())).description
    return description


def why_shared_apart(args: ServerArgs) -> str:
    """Returns the flag that keeps shared experts out of the routed ones; "" if none does."""
    if args.disable_shared_experts_fusion:
        return "--disable-shared-experts-fusion"
    return f"with --ep-size {args.ep_size} all ranks share it" if args.ep_size > 1 else ""


def parallel_config_of(args: ServerArgs, dtype: str, model: ModelDescription) -> ParallelConfig:
    """Returns the parallel and dtype config that the layers' ops depend on. Raises UserError for an unknown cache
    dtype."""
    kv_dtype = kv_cache_dtype(args.kv_cache_dtype, dtype, model.quantization)
    if kv_dtype == FP4_KV and not model.caches_four_bits:
        kv_dtype = FP8_KV
    return ParallelConfig(
        dtype,
        kv_dtype,
        args.page_size or 1,
        asked_layout(args),
        args.mamba_ssm_dtype or "",
        args.enable_quantized_all_reduce,
        "off" if args.disable_two_batch_overlap else "on" if args.enable_two_batch_overlap else "auto",
    )
