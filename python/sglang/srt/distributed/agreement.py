"""The agreement of the ranks before anything is allocated: one plan for all of them.

Ranks stay together without messages only if each makes the same decisions: the same number of collectives, with the
same shapes, in the same order. What every rank computes for itself, such as a MoE router's choice of experts, must be
equal to the last bit, so ranks need the same kernels with the same tiles. Therefore every rank plans with the minimum
of all GPUs' properties (`agree_on_gpus`), and plans or programs that differ nevertheless are refused on every rank with
the same message (`agreed_plan`).

The hosts exchange JSON, one or two KB per rank; whole plans only if they differ.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.custom_all_reduce import exchange
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.hardware.common_traits import common_traits
from sglang.srt.kernels.resolve import installed_packages
from sglang.srt.plan.plan import Plan
from sglang.srt.plan.plan_items import Items, plan_items

PACKAGES = (
    *("torch", "triton", "flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache", "sm120-sgl-kernel"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cublas-cu12", "nvidia-cublas", "nvidia-cudnn-cu12"),
    *("nvidia-cudnn-cu13", "xgrammar", "llguidance", "tokenizers"),
)
"""Distributions with kernels, collectives, grammars or tokens of the ranks: other versions may compute others."""
VARIABLES = (
    *("SGLANG_SIMULATE_ACC_LEN", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "SGLANG_SM120_TRITON_FLASHMLA"),
    *("SGLANG_SM120_MQA_FALLBACK", "SGLANG_OPT_USE_TILELANG_MHC_PRE", "SGLANG_OPT_USE_TILELANG_MHC_POST"),
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_NTHREADS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
    *("NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_NVLS_ENABLE", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"),
)
"""Variables of the environment that must be equal, because ranks decide by them, NCCL's protocols among them. Others
may differ: those of interfaces and directories; what a directory of tuning files holds is compared with the tiles."""
_OTHER_TILES = (
    "compute with different tiles, as where a compiler on one of them has no main memory left (free some, and start the"
    " server again)"
)
MAX_NAMED = 5
"""Differences that a message names."""


class _Named(msgspec.Struct):
    """Values of a rank that must equal those of all ranks. `name`: of its GPU or machine, for messages."""

    name: str
    items: Items


class _Tiles(_Named):
    """The tiles in use on a rank."""

    stage: int


class _Summary(msgspec.Struct):
    """A rank's report on its plan. `problem`: why it has none."""

    stage: int
    problem: str
    digests: tuple[str, str]
    """Of what is equal on all ranks, and of what is on the ranks of its stage."""


@dataclass(frozen=True, slots=True)
class AgreedGpus:
    """The GPUs of all ranks by name, and what all of them have."""

    gpus: tuple[str, ...]
    arch: ArchTraits
    note: str = ""
    """For the user, where the GPUs differ."""


def gather_from_ranks(data: bytes) -> list[bytes]:
    """Returns the data of all ranks, in rank order. Collective, in host memory."""
    return exchange(parallel_state.host_group(), data)


def agree_on_gpus(arch: ArchTraits, gpu: str) -> AgreedGpus:
    """Returns the traits that all ranks' GPUs share. gpu: name of this rank's. Collective. Raises UserError on every
    rank if architectures differ, or packages or environment variables that change results or decisions."""
    if parallel_state.num_ranks() == 1:
        return AgreedGpus((gpu,), arch)
    gpus = refuse_unlike_ranks(gpu, facts_that_must_be_alike(arch), "cannot share a model")
    from_all = [msgspec.json.decode(data, type=ArchTraits) for data in gather_from_ranks(msgspec.json.encode(arch))]
    common = common_traits(from_all)
    return AgreedGpus(gpus, common, _note(gpus, from_all, common))


def refuse_unlike_ranks(name: str, items: Items, what: str) -> tuple[str, ...]:
    """Returns the names of all ranks if their `items` are equal. Collective. Raises UserError on every rank otherwise;
    what: how the message goes on after the names of two ranks that differ."""
    mine = msgspec.json.encode(_Named(name, items))
    from_all = [msgspec.json.decode(data, type=_Named) for data in gather_from_ranks(mine)]
    names = tuple(each.name for each in from_all)
    refuse_difference(names, dict(enumerate(each.items for each in from_all)), what)
    return names


def refuse_unlike_tiles(gpu: str, stage: int, tiles: Items) -> None:
    """Refuses ranks of one pipeline stage whose kernels go on with different tiles: what each rank computes for itself
    would differ. gpu: name of this rank's; stage: this rank's; tiles: the tile in use of each call site that was used,
    of which those are compared that all ranks of the stage used. Collective. Raises UserError on every rank."""
    if parallel_state.num_ranks() == 1:
        return
    mine = msgspec.json.encode(_Tiles(gpu, tiles, stage))
    from_all = [msgspec.json.decode(data, type=_Tiles) for data in gather_from_ranks(mine)]
    for stage_now in range(1 + max(each.stage for each in from_all)):
        stage_items = {rank: each.items for rank, each in enumerate(from_all) if each.stage == stage_now}
        common = set.intersection(*(set(items) for items in stage_items.values()))
        compared = {rank: {name: items[name] for name in common} for rank, items in stage_items.items()}
        refuse_difference([each.name for each in from_all], compared, _OTHER_TILES)


def facts_that_must_be_alike(arch: ArchTraits) -> Items:
    """Returns the architecture, the versions of packages and the variables of this process."""
    versions: Items = {name: _version(name) for name in PACKAGES}
    modules = ", ".join(sorted(installed_packages()))
    return {"architecture": arch.name, "packages": modules} | versions | {v: os.environ.get(v) for v in VARIABLES}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _note(gpus: Sequence[str], traits: Sequence[ArchTraits], common: ArchTraits) -> str:
    if all(each == common for each in traits):
        return ""
    of_ranks = "; ".join(
        f"{gpu} on rank{'s' * (gpus.count(gpu) > 1)} {', '.join(str(r) for r, name in enumerate(gpus) if name == gpu)}"
        for gpu in dict.fromkeys(gpus)
    )
    bandwidth = f", {common.bandwidth / 1e9:,.0f} GB/s" if common.bandwidth else ""
    return (
        f"the GPUs differ ({of_ranks}): every rank is planned for the least of each,"
        f" {common.num_sms} SMs{bandwidth}, and the step takes as long as on the slowest"
    )


def agreed_plan(agreed: AgreedGpus, stage: int, make: Callable[[], Plan]) -> Plan:
    """Returns this rank's plan from `make` if all ranks have one and these agree. stage: this rank's pipeline stage.
    Collective. Raises UserError, with the same text on every rank, otherwise."""
    if len(agreed.gpus) == 1:
        return make()
    plan, problem, everywhere, in_stage = None, None, Items(), Items()
    try:
        plan = make()
        everywhere, in_stage = plan_items(plan)
    except UserError as error:
        problem = error
    summary = _Summary(stage, str(problem or ""), (digest(everywhere), digest(in_stage)))
    summaries = [msgspec.json.decode(data, type=_Summary) for data in gather_from_ranks(msgspec.json.encode(summary))]
    if any(each.problem for each in summaries):
        if problem is not None and len({each.problem for each in summaries}) == 1:
            raise problem
        rank = next(rank for rank, each in enumerate(summaries) if each.problem)
        raise UserError(f"{_named(agreed.gpus, rank)} has no plan: {summaries[rank].problem}")
    for items, place in ((everywhere, 0), (in_stage, 1)):
        parts: dict[int, list[int]] = {}
        for rank, each in enumerate(summaries):
            parts.setdefault(each.stage * place, []).append(rank)
        if any(len({summaries[rank].digests[place] for rank in part}) > 1 for part in parts.values()):
            from_all = [msgspec.json.decode(data, type=Items) for data in gather_from_ranks(msgspec.json.encode(items))]
            for part in parts.values():
                refuse_difference(agreed.gpus, {rank: from_all[rank] for rank in part}, "have different plans")
    assert plan is not None
    return plan


def digest(items: Items) -> str:
    """Returns the SHA-256 hex digest of the items, independent of their order."""
    return hashlib.sha256(msgspec.json.encode(items, order="deterministic")).hexdigest()


def refuse_difference(gpus: Sequence[str], items: Mapping[int, Items], what: str) -> None:
    """Raises UserError if a rank's items (by rank) are not those of the first. gpus: names of all ranks."""
    first, *others = items
    for other in others:
        names = items[first].keys() | items[other].keys()
        different = sorted(name for name in names if items[first].get(name) != items[other].get(name))
        if different:
            pairs = [
                f"{name}: {_text(items[first].get(name))} and {_text(items[other].get(name))}"
                for name in different[:MAX_NAMED]
            ]
            more = f"; and {len(different) - MAX_NAMED:,} more" if len(different) > MAX_NAMED else ""
            raise UserError(
                f"{_named(gpus, first)} and {_named(gpus, other)} {what}: {'; '.join(pairs)}{more}. All ranks of a"
                " server need the same release, flags, checkpoint, packages and tuning files, and GPUs of one"
                " architecture."
            )


def _named(gpus: Sequence[str], rank: int) -> str:
    return f"rank {rank} ({gpus[rank]})"


def _text(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "nothing" if value is None else str(value)
