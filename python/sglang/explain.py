"""Explains a plan: `python -m sglang.explain --arch sm_120 --model-path DIR [server flags] [--json]` prints which
kernels would run, and why. With `--time` it predicts the time of steps there; `--shape` predicts single ops, without a
model.

Works on any machine: no device is asked, nothing is compiled, the model's weights are not read. The exit status is 0
where a server would start, else 2.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang.ledger.why_slow import why_slow_json, why_slow_lines
from sglang.plan.floors import StepFloors
from sglang.plan.host_memory import UNBOUNDED, UNKNOWN, HostMemory, Machine
from sglang.plan.measured_times import measured_choices
from sglang.srt.configs.fused_projections import with_tp_blocks
from sglang.srt.configs.hf_config import merge_overrides, read_config, read_generation_config
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.configs.ngram_tables import with_table_dtype
from sglang.srt.configs.quantization import quantization_of
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import ArchTraits, arch_by_name, current_arch
from sglang.srt.hardware.common_traits import common_traits
from sglang.srt.kernels.ledger_file import judged_as, tile_key
from sglang.srt.kernels.measured.choices import NOT_MEASURED, MeasuredChoices
from sglang.srt.kernels.measured.decision import MEASURED
from sglang.srt.kernels.spec import Choice, NoKernel, Rejection
from sglang.srt.kernels.tile_configs import OpTileConfigs
from sglang.srt.plan.caches import CacheGroup, cache_groups
from sglang.srt.plan.capacity import describe_capacity
from sglang.srt.plan.draft_plan import DraftPlan, needs_with_draft, with_draft_layers
from sglang.srt.plan.expert_slot_plan import ExpertSlotPlan
from sglang.srt.plan.host_cache import GIB, keeps_unasked
from sglang.srt.plan.kernel_choice import KernelChoices, choose_kernels
from sglang.srt.plan.kv_spec import has_tensor_scales
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.layout import check_layout, check_machine, uneven_heads
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.model_planner import ModelPlanner, parallel_config_of, why_shared_apart
from sglang.srt.plan.plan import make_plan
from sglang.srt.plan.pool_checks import with_pages
from sglang.srt.plan.pool_sizes import cache_cost
from sglang.srt.plan.rank_weights import rank_weights
from sglang.srt.plan.remedies import trial_or_advice
from sglang.srt.plan.served_model import describe_served
from sglang.srt.plan.speculation import speculative_settings, verify_needs
from sglang.srt.plan.tile_configs import make_tile_configs
from sglang.srt.server_args import ServerArgs
from sglang.tuning.ops import MAX_SIZE
from sglang.tuning.report import (
    CONTEXT,
    Drafts,
    bus_json,
    bus_lines,
    drafted_json,
    drafted_lines,
    shape_json,
    shape_lines,
    time_json,
    time_lines,
)

USUAL_FREE_SHARE = 0.97
"""The share of a GPU's memory that is free once the driver and a CUDA context have theirs."""

WOULD_NOT_START = 2
"""Exit status where no server would start, the same as the server's."""

USUAL_LENGTHS = (2, 3, 4, 5)
"""Accept lengths of the predicted speeds, by default."""

COLUMNS = ("op", "kernel", "tile", "smem", "regs", "spill", "mma")


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything that is printed. A need without a kernel has a NoKernel instead of a Choice."""

    arch: ArchTraits
    model: ModelDescription
    kv_dtype: str
    parallel: ParallelConfig
    replicas: int = 1
    not_implemented: str | None = None  # why this model cannot be served yet
    refused: str | None = None  # why no server starts in this layout
    unfit: str | None = None  # why there is no room for it
    draft: DraftPlan | None = None
    width: int = 1
    """Tokens of a request in a step: the last sampled one and draft tokens."""
    groups: tuple[CacheGroup, ...] = ()
    outcomes: tuple[Choice | NoKernel, ...] = ()
    tile_configs: Mapping[str, OpTileConfigs] = field(default_factory=dict)  # the plan's, by the key of the need
    plan: dict[str, Any] | None = None  # sizes and memory
    host: HostMemory | None = None  # the prefix cache in main memory
    notes: tuple[str, ...] = ()

    @property
    def moe_tiles(self) -> str | None:
        """Source of the experts' tiles; None without experts."""
        return self.tile_configs["fused_moe"].source if "fused_moe" in self.tile_configs else None

    @property
    def slots(self) -> ExpertSlotPlan | None:
        """The experts in main memory; None: there are none."""
        described = (self.plan or {}).get("expert_slots")
        return None if described is None else ExpertSlotPlan(**described)

    def draft_json(self) -> dict[str, Any]:
        """Returns the draft's description, and the bytes of its weights and of a cached token on a GPU."""
        draft, parallel = self.draft, self.parallel
        assert draft is not None
        features = self.arch.features if self.arch.device == "cuda" else None
        size = draft.weight_bytes(parallel.dtype, has_tensor_scales(parallel.kv_dtype), features)
        cost = cache_cost(cache_groups(draft.description.model, parallel))
        return {**draft.describe(), "weight_bytes": size, "bytes_per_token": math.ceil(cost.bytes_per_token)}

    @property
    def gpus(self) -> int:
        """Number of GPUs of all replicas."""
        return self.replicas * self.parallel.ranks.world_size

    @property
    def missing(self) -> tuple[NoKernel, ...]:
        """The needs that no kernel serves."""
        return tuple(outcome for outcome in self.outcomes if isinstance(outcome, NoKernel))

    @property
    def problem(self) -> str | None:
        """The first reason why no server would start; None if one would."""
        missing = str(self.missing[0]) if self.missing else None
        return self.not_implemented or self.refused or missing or self.unfit


def explain(
    args: ServerArgs,
    arch: ArchTraits,
    packages: frozenset[str],
    available: int | None = None,
    advises: bool = True,
    machine: Machine = UNKNOWN,
    measured: MeasuredChoices = NOT_MEASURED,
) -> Explanation:
    """Plans a model for a GPU and collects the choices.

        packages: optional packages to count on
        available: bytes free on a GPU; None: the usual share of its memory
        advises: looks for flags that help where a model does not fit, which takes many plans
        measured: what was measured on the GPU

    Raises UserError for a model or configuration that cannot be read. What keeps a server from starting is in the
    result.
    """
    directory = resolve_model_path(args.model_path, args.revision, args.download_dir, False)
    config = merge_overrides(with_table_dtype(read_config(directory), directory), args.model_overrides())
    config = with_tp_blocks(config, directory)
    quantization = quantization_of(config, directory, args.quantization, args.flashinfer_mxfp4_moe_precision)
    model = describe_served(args, config, quantization, why_shared_apart(args), str(directory))
    parallel = parallel_config_of(args, model.dtype if args.dtype == "auto" else args.dtype, model)
    parallel = with_pages(args, model, parallel) if args.page_size is None else parallel
    not_implemented = "\n".join(model.unsupported) or None
    free = int(arch.memory * USUAL_FREE_SHARE) if available is None else available
    config_of_model = ModelConfig.from_hf(config, read_generation_config(directory), args=args, directory=directory)
    planner = ModelPlanner(
        args, config_of_model, arch, free, packages, served=not not_implemented, advises=advises,
        main_memory=machine.main_memory, measured=measured,
    )  # fmt: skip

    nothing = Explanation(arch, model, parallel.kv_dtype, parallel, args.dp_size, not_implemented)
    try:
        check_machine(arch, parallel.ranks, args.nnodes, args.dp_size)
        check_layout(model, parallel.ranks)
    except UserError:
        return replace(nothing, refused=_refusal(planner))
    draft = planner.draft(model)
    needs = needs_with_draft(rank_weights(model, parallel.ranks), draft, parallel)
    needs += verify_needs(args, parallel.dtype)
    chosen = choose_kernels(args, needs, arch, packages, measured)
    plan, notes, unfit, host = None, chosen.notes, None, None
    if arch.device != "cpu":
        try:
            plan, notes, host = _plan(planner, chosen, machine)
        except UserError as error:
            unfit = str(error)
    settings = speculative_settings(args, model.architecture)
    uneven = uneven_heads(model, parallel.attn_tp_size)
    if plan is not None and args.dcp_size > 1:
        notes = (*notes, *_describe_dcp(planner, plan["max_total_num_tokens"]))
    if plan is not None and args.attn_dp_size > 1:
        notes = (*notes, _describe_attention_groups(planner, plan["max_total_num_tokens"]))
    return replace(
        nothing,
        parallel=_with_libraries(parallel, chosen),
        unfit=unfit,
        draft=draft,
        width=1 if settings is None else settings.num_draft_tokens,
        groups=cache_groups(with_draft_layers(model, draft), parallel),
        outcomes=chosen.outcomes,
        tile_configs=make_tile_configs(chosen.chosen().values(), arch, measured),
        plan=plan,
        host=host,
        notes=(*notes, uneven) if uneven else notes,
    )


def _with_libraries(parallel: ParallelConfig, chosen: KernelChoices) -> ParallelConfig:
    """Returns the config with the libraries that serve some ops noted, for predicted times."""
    names = {(choice.need.op, choice.name) for choice in chosen.chosen().values()}
    return replace(
        parallel,
        library_prompts=any(op == "long_prompt_attention" for op, _ in names),
        library_latents=any(op == "long_latent_prompt" for op, _ in names),
        sgl_kernel_experts=("fused_moe", "sgl_kernel") in names,
    )


def _refusal(planner: ModelPlanner) -> str:
    """Returns the server's message for a layout that it refuses."""
    try:
        trial_or_advice(planner)
    except UserError as error:
        return str(error)
    raise AssertionError("the planner takes a layout that was refused")


def _describe_attention_groups(planner: ModelPlanner, tokens: int) -> str:
    """Describes what DP attention gains and costs."""
    args, groups = planner.args, planner.args.attn_dp_size
    alone = planner.changed(attn_dp_size=1, enable_dp_attention=False, enable_dp_lm_head=False)
    each = f"{groups} groups of {args.tp_size // groups} GPUs hold {tokens:,} tokens each, {groups * tokens:,} in all"
    try:
        whole = trial_or_advice(replace(alone, advises=False))
        more = planner.weights() - alone.weights()
        gain = (
            f"{each}, in the place of {whole.capacity.max_total_num_tokens:,}; a GPU has {more / 1024**3:.2f} GiB more"
        )
    except UserError:
        return f"--attn-dp-size {groups}: {each}; without it there is room for none."
    return f"--attn-dp-size {groups}: {gain} of weights."


def _describe_dcp(planner: ModelPlanner, tokens: int) -> tuple[str, ...]:
    """Describes what DCP gains and costs."""
    args, (model, parallel) = planner.args, planner.describe()
    sites = [layer.mixer.attention_site(parallel.attn_tp_size, parallel.ranks.dcp_size) for layer in model.layers]
    layers = sum(site is not None and site.dcp_size > 1 for site in sites)
    try:
        whole = trial_or_advice(replace(planner.changed(dcp_size=1), advises=False)).capacity
        gain = f"{tokens:,} tokens in the place of {whole.max_total_num_tokens:,}"
    except UserError:
        gain = f"{tokens:,} tokens, and without it there is room for none"
    floors = StepFloors(model, parallel, planner.arch, {})
    cost = ""
    if floors.link != "NVLink":
        ms = [1e3 * floors.exchange_seconds(requests) for requests in (1, 64)]
        cost = (
            f", by NCCL as measured on RTX PRO 6000 Server cards {ms[0]:.2f} ms with 1 request and {ms[1]:.2f} with 64"
        )
    return (
        f"--dcp-size {args.dcp_size}: the cache holds {gain}. It costs two more collectives in {layers} layers of a"
        f" decode step{cost}.",
    )


def _plan(
    planner: ModelPlanner, chosen: KernelChoices, machine: Machine
) -> tuple[dict[str, Any] | None, tuple[str, ...], HostMemory | None]:
    """Returns the described plan, its notes, and what it takes of main memory. For a model that is not implemented the
    sizes are estimates. Raises UserError where there is no room."""
    if planner.served and len(chosen.chosen()) == len(chosen.outcomes):
        unasked = keeps_unasked(
            planner.args, planner.arch, UNBOUNDED if machine.host_bytes is None else machine.host_bytes
        )
        plan = make_plan(
            planner.args, planner.model, planner.arch, planner.available, planner.packages, advises=planner.advises,
            host_bytes=UNBOUNDED if unasked and machine.host_bytes is None else machine.host_bytes,
            tier_unasked=unasked, main_memory=machine.main_memory, measured=planner.measured,
        )  # fmt: skip
        host = None if plan.host_cache is None else HostMemory(plan.host_cache, machine, unasked)
        described = {key: value for key, value in plan.describe().items() if key not in ("kernels", "host_cache")}
        return described, (*plan.errors, *plan.warnings), host
    trial = trial_or_advice(replace(planner, served=False))
    return {"estimate": True, **describe_capacity(trial.capacity)}, (*chosen.notes, *trial.capacity.notes), None


def to_json(explanation: Explanation) -> dict[str, Any]:
    """Returns the explanation for JSON, with stable keys; sizes in bytes."""
    arch, model = explanation.arch, explanation.model
    return {
        "arch": arch.name,
        "product": arch.product,
        "features": sorted(arch.features),
        "model": model.architecture,
        **({"model_impl": model.model_impl} if model.transformers_class is not None else {}),
        "family_known": model.known,
        "not_implemented": explanation.not_implemented,
        "refused": explanation.refused,
        "unfit": explanation.unfit,
        "problem": explanation.problem,
        "missing": [outcome.need.key for outcome in explanation.missing],
        "replicas": explanation.replicas,
        "gpus": explanation.gpus,
        "kv_cache": _kv_json(explanation),
        **({"draft": explanation.draft_json()} if explanation.draft is not None else {}),
        "moe_tiles": explanation.moe_tiles,
        "ops": {outcome.need.key: _op_json(outcome, explanation.tile_configs) for outcome in explanation.outcomes},
        "plan": explanation.plan,
        **({"main_memory": explanation.host.to_json()} if explanation.host is not None else {}),
        "notes": list(explanation.notes),
    }


def _kv_json(explanation: Explanation) -> dict[str, Any]:
    cost = cache_cost(explanation.groups)
    return {
        "dtype": explanation.kv_dtype,
        "bytes_per_token": math.ceil(cost.bytes_per_token),
        "bytes_per_request": cost.bytes_per_request,
        "groups": [group.describe() for group in explanation.groups],
    }


def _op_json(outcome: Choice | NoKernel, tile_configs: Mapping[str, OpTileConfigs]) -> dict[str, Any]:
    rejected = {rejection.kernel: list(rejection.reasons) for rejection in outcome.rejected}
    need = outcome.need.describe()
    if isinstance(outcome, NoKernel):
        return {"need": need, "kernel": None, "not_chosen": rejected}
    record = outcome.record
    return {
        "need": need,
        "kernel": outcome.name,
        "note": outcome.note,
        "remark": outcome.remark,
        "tile": dict(outcome.tile) if outcome.tile else None,
        "tiles": tile_configs[outcome.need.key].to_json() if outcome.need.key in tile_configs else [],
        **_measured_json(tile_configs.get(outcome.need.key)),
        "smem": record.smem if record else None,
        "registers": record.registers if record else None,
        "spills": record.spills if record else None,
        "mma": list(record.mma) if record else [],
        "not_chosen": rejected,
    }


def _measured_json(tile_configs: OpTileConfigs | None) -> dict[str, list[str]]:
    lines = () if tile_configs is None else tile_configs.measured
    return {"measured": list(lines)} if lines else {}


def to_text(explanation: Explanation) -> str:
    """Returns the explanation as a table for people."""
    arch, model = explanation.arch, explanation.model
    lines = [f"{model.title} on {arch.name}" + (f" ({arch.product}, {arch.num_sms} SMs)" if arch.product else "")]
    if explanation.replicas > 1:
        each = explanation.parallel.ranks.world_size
        lines.append(
            f"{explanation.replicas} replicas of {each} GPU{'s' * (each > 1)} each: {explanation.gpus} GPUs. What"
            " follows is one replica."
        )
    if explanation.not_implemented:
        lines.append(f"This model is not implemented yet: {explanation.not_implemented}")
    if not model.known:
        lines.append(
            f"Nothing is known of model_type {model.model_type!r}: its keys are read as those of other models."
        )
    if explanation.refused:
        return "\n".join([*lines, f"No server starts in this layout: {explanation.refused}"])
    if explanation.missing:
        names = ", ".join(outcome.need.key for outcome in explanation.missing)
        lines.append(f"{len(explanation.missing)} of its {len(explanation.outcomes)} ops have no kernel here: {names}")
    lines += _cache_lines(explanation)
    if arch.capability and judged_as(arch) != arch.name:
        lines.append(f"{arch.name} is not verified: tiles and numbers are those of {judged_as(arch)}.")
    rows = [COLUMNS, *(_cells(outcome) for outcome in explanation.outcomes)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines.append("")
    for row, outcome in zip(rows, (None, *explanation.outcomes), strict=True):
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if outcome is not None:
            lines += _details(outcome, explanation.tile_configs.get(outcome.need.key))
    if explanation.plan:
        if "estimate" in explanation.plan:
            lines += ["", "An estimate: nothing here allocates this model yet."]
        lines += ["", *(f"{key}: {value}" for key, value in explanation.plan.items() if key != "warnings")]
    if explanation.host is not None:
        lines.append(f"main memory: {explanation.host}")
    lines += ["", *explanation.notes] if explanation.notes else []
    lines += ["", f"No server starts: {explanation.unfit}"] if explanation.unfit else []
    return "\n".join(lines)


def _cache_lines(explanation: Explanation) -> list[str]:
    cost = cache_cost(explanation.groups)
    total = f"KV cache: {explanation.kv_dtype}, {math.ceil(cost.bytes_per_token):,} B a token and GPU"
    if cost.bytes_per_request:
        total += f", {cost.bytes_per_request:,} B a request beside its tokens"
    lines = [total]
    lines += [f"  {group}" for group in explanation.groups]
    if explanation.draft is not None:
        facts = explanation.draft_json()
        sizes = f"{facts['weight_bytes'] / 1024**3:.2f} GiB of weights, {facts['bytes_per_token']:,} B of these a token"
        lines.append(f"Draft: {explanation.draft.description}: {sizes} and GPU")
    return lines


def _cells(outcome: Choice | NoKernel) -> tuple[str, ...]:
    if isinstance(outcome, NoKernel):
        return (outcome.need.key, "none", "", "", "", "", "")
    record = outcome.record
    if record is None:
        return (outcome.need.key, outcome.name, "", "", "", "", "")
    tile = tile_key(outcome.tile) if outcome.tile else ""
    mma = ", ".join(record.mma)
    return (outcome.need.key, outcome.name, tile, f"{record.smem:,}", str(record.registers), str(record.spills), mma)


def _details(outcome: Choice | NoKernel, tile_configs: OpTileConfigs | None) -> list[str]:
    """Returns lines with the need, the note, and the rejected candidates; candidates with equal reasons share an
    entry."""
    by_reason: dict[tuple[str, ...], list[str]] = {}
    for rejection in outcome.rejected:
        by_reason.setdefault(rejection.reasons, []).append(rejection.kernel)
    entries = [str(Rejection(", ".join(kernels), reasons)) for reasons, kernels in by_reason.items()]
    texts = [f"for {outcome.need.describe()}"]
    if isinstance(outcome, Choice) and outcome.note:
        texts.append(f"because {outcome.note}")
    if tile_configs is not None and tile_configs.source:
        texts.append(f"tiles: {tile_configs.source}")
    if isinstance(outcome, Choice) and outcome.remark:
        texts.append(f"how: {outcome.remark}")
    if isinstance(outcome, Choice) and outcome.spec.configs and tile_configs is not None:
        texts += [*tile_configs.describe(), *tile_configs.measured]
    if entries:
        texts.append("not chosen: " + " | ".join(entries))
    return [
        line
        for text in texts
        for line in textwrap.wrap(text, 116, initial_indent="    ", subsequent_indent="      ", break_on_hyphens=False)
    ]


def _counts_measured(explanation: Explanation) -> bool:
    """Returns whether a choice of the plan was measured."""
    choices = [outcome for outcome in explanation.outcomes if isinstance(outcome, Choice)]
    in_tiles = any(configs.measured for configs in explanation.tile_configs.values())
    return in_tiles or any((choice.note or "").startswith(MEASURED) for choice in choices)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang.explain",
        description="Print which kernels would serve a model on a GPU, and why the others would not. Any other"
        " flag of the server may be given and counts.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--arch",
        help="sm_120, ..., a product such as rtx-5090, several with commas for ranks on different ones, or cpu; this"
        " machine's if not given",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--with-package", action="append", default=[], metavar="NAME", help="count on flashinfer, ...")
    parser.add_argument("--host-memory", type=float, metavar="GIB", help="main memory that is free on the machine")
    parser.add_argument(
        "--numa-nodes", type=int, default=1, metavar="N", help="of the machine, with its GPUs shared out"
    )
    parser.add_argument(
        "--measured", type=Path, metavar="FILE", help="count on the times in this file, which `sglang tune` wrote"
    )
    parser.add_argument("--time", action="store_true", help="predict the time of steps, op by op")
    parser.add_argument("--time-context", type=int, default=CONTEXT, metavar="TOKENS", help="that requests have")
    parser.add_argument(
        "--accept-length",
        type=float,
        action="append",
        default=[],
        metavar="TOKENS",
        help="of a request and step with drafts, for which --time gives speeds; may be repeated",
    )
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar='"OP SIZE=N ..."',
        help='predict one op, such as "linear tokens=64 rows=4096 cols=7168 scheme=fp8_block"; needs no model',
    )
    parser.add_argument(
        "--why-slow",
        metavar="OP",
        help="print what executed launches of an op's kernels ask of the card's units, such as linear/gemv; needs no"
        " model",
    )
    options, rest = parser.parse_known_args(argv)
    try:
        if options.why_slow:
            return _print_why_slow(options.why_slow, arch_by_name(options.arch or "sm_120"), options.json)
        if options.shape:
            return _print_shapes(options.shape, arch_by_name(options.arch or "sm_120"), options.json)
        args = ServerArgs.from_cli(rest, prog="python -m sglang.explain")
        arch = _common_arch(options.arch) if options.arch else current_arch(device=args.device)
        explanation = explain(
            args,
            arch,
            frozenset({"triton", *options.with_package}),
            machine=_machine(options.host_memory, options.numa_nodes),
            measured=measured_choices(args, options.measured, options.arch is None and arch.device == "cuda"),
        )
        if options.measured is not None and not (args.no_measured_choices or _counts_measured(explanation)):
            print(f"{options.measured} has no times of what this model launches: the tables choose", file=sys.stderr)
        if not 1 <= options.time_context <= MAX_SIZE:
            raise UserError(f"--time-context {options.time_context}: must be 1 to {MAX_SIZE:,} tokens.")
        text = _json_text(explanation, options) if options.json else _text(explanation, options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text)
    return WOULD_NOT_START if explanation.problem else 0


def _common_arch(names: str) -> ArchTraits:
    """Returns the traits that the GPUs of these comma-separated names have in common. Raises UserError."""
    traits = [arch_by_name(name.strip()) for name in names.split(",")]
    if len({each.name for each in traits}) > 1:
        raise UserError(f"--arch {names}: ranks of a server need GPUs of one architecture")
    return common_traits(traits)


def _machine(free_gib: float | None, numa_nodes: int) -> Machine:
    """Returns the machine of these options. Raises UserError for values out of range."""
    if free_gib is not None and not 0 <= free_gib <= 1 << 20:
        raise UserError(f"--host-memory {free_gib:g}: must be 0 to {1 << 20:,} GiB.")
    if not 1 <= numa_nodes <= 64:
        raise UserError(f"--numa-nodes {numa_nodes}: must be 1 to 64.")
    return Machine(None if free_gib is None else int(free_gib * GIB), numa_nodes)


def _json_text(explanation: Explanation, options: argparse.Namespace) -> str:
    content = to_json(explanation)
    if options.time and explanation.refused is None:
        where = explanation.parallel, explanation.arch, options.time_context
        content["time"] = time_json(explanation.model, *where)
        if explanation.slots is not None:
            content["expert_copies"] = bus_json(explanation.slots, options.time_context)
        if explanation.host is not None:
            content["main_memory"]["loading_seconds"] = explanation.host.loading_seconds(options.time_context)
        if explanation.width > 1:
            content["time_with_drafts"] = drafted_json(_drafts(explanation, options), *where)
    return json.dumps(content, indent=2)


def _text(explanation: Explanation, options: argparse.Namespace) -> str:
    if not options.time or explanation.refused is not None:
        return to_text(explanation)
    where = explanation.parallel, explanation.arch, options.time_context
    lines = [to_text(explanation).splitlines()[0], *time_lines(explanation.model, *where)]
    if explanation.slots is not None:
        lines += ["", *bus_lines(explanation.slots, options.time_context)]
    if explanation.host is not None:
        seconds = explanation.host.loading_seconds(options.time_context)
        lines.append(
            f"A session that returns with {options.time_context:,} tokens in main memory waits {1e3 * seconds:,.1f} ms"
            " for them, and then for a step with its new ones (predicted)."
        )
    if explanation.width > 1:
        lines += ["", *drafted_lines(_drafts(explanation, options), *where)]
    return "\n".join(lines)


def _drafts(explanation: Explanation, options: argparse.Namespace) -> Drafts:
    """Returns the drafts to time. Raises UserError for accept lengths that no step reaches."""
    width = explanation.width
    for length in options.accept_length:
        if not 1 <= length <= width:
            raise UserError(
                f"--accept-length {length:g}: a step verifies {width} tokens of a request; give 1 to {width}."
            )
    lengths = tuple(options.accept_length) or tuple(float(n) for n in USUAL_LENGTHS if n <= width) or (float(width),)
    draft = None if explanation.draft is None else explanation.draft.description
    return Drafts(explanation.model, draft, width, lengths)


def _print_shapes(shapes: Sequence[str], arch: ArchTraits, as_json: bool) -> int:
    """Prints the predictions of single ops. Returns the exit status. Raises UserError for a shape that cannot be
    read."""
    if as_json:
        print(json.dumps([shape_json(shape, arch) for shape in shapes], indent=2))
    else:
        print("\n".join(shape_lines(shapes, arch)))
    return 0


def _print_why_slow(op: str, arch: ArchTraits, as_json: bool) -> int:
    """Prints the counts of an op's executed launches. Returns the exit status. Raises UserError for an unknown op."""
    print(json.dumps(why_slow_json(op, arch), indent=2) if as_json else "\n".join(why_slow_lines(op, arch)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
