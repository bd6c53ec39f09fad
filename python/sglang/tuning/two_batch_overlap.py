"""Predicted time of prompt steps with two-batch overlap (--enable-two-batch-overlap): all-reduces of one microbatch run
while the other computes.

Three clocks follow the order of `distributed/ping_pong`: the host's launches and the computation, in the order A1, B1,
A2, B2, ..., and the all-reduces, one after the other. A microbatch is priced as a step of its own: the second one of a
prompt attends to the first, and each reads all weights. Computation during an all-reduce is slower by SLOWDOWN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.hardware.topology import Topology
from sglang.srt.kernels.two_batch_table import TwoBatchThreshold, two_batch_threshold
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.two_batch_overlap import alternates_by_block, has_experts, min_tokens, why_not_split
from sglang.tuning.ops import AllReduce, Op
from sglang.tuning.step import Step
from sglang.tuning.steps import StepTime, TimedOp, head_ops, ops_to_hidden_states, time_step, timed, total, unserved_ops

SLOWDOWN = 1.1
"""A guess: NCCL's kernels take up to 16 of 188 SMs, and 50 GB/s each way of 1,540 of the memory."""
LAUNCH_S = 0.43e-3
"""What the host takes to launch a microbatch up to its next sum, as much as a whole step: measured beside an H100
(benchmark/results/several_gpus.md#two-batch-overlap-and-all-reduces-in-eight-bits)."""
THREADS_LAUNCH_S = 2 * LAUNCH_S
"""The same where microbatches are threads, and the other one goes on: measured there."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """The computation of a microbatch up to an all-reduce, and the all-reduce: seconds."""

    compute: float
    sums: float


def runs_overlapped(model: ModelDescription, parallel: ParallelConfig, step: Step, arch: ArchTraits) -> bool:
    """Returns whether a server computes the step as two microbatches with cards joined by PCIe or NVLink; False for
    attention groups with their own requests, for which nothing is predicted."""
    prompt = not step.decodes and not step.verifies
    whole = why_not_split(parallel.ranks.tp_size, parallel.ranks.dcp_size) or parallel.ranks.attn_dp_size > 1
    if parallel.two_batch == "off" or whole or not prompt:
        return False
    config = _threshold(model, parallel, arch)
    minimum = min_tokens(config, model, parallel.ranks.attn_dp_size)
    return step.tokens >= minimum and (config.unasked or parallel.two_batch == "on")


def _threshold(model: ModelDescription, parallel: ParallelConfig, arch: ArchTraits) -> TwoBatchThreshold:
    links = Topology.NVLINK if "nvlink" in arch.features else Topology.HOST_BRIDGE
    return two_batch_threshold(links, parallel.ranks.tp_size, has_experts(model), parallel.quantized_sums != "off")


def step_time(model: ModelDescription, parallel: ParallelConfig, step: Step, arch: ArchTraits) -> StepTime:
    """Returns the time of a step, as two microbatches if it runs so. Raises UserError like `time_step`."""
    whole = total(time_step(model, parallel, step, arch))
    if not runs_overlapped(model, parallel, step, arch):
        return whole
    seconds = overlapped_seconds(model, parallel, step, arch)
    shorter = seconds / whole.seconds
    return replace(whole, seconds=seconds, low=whole.low * shorter, high=whole.high * shorter)


def overlapped_seconds(
    model: ModelDescription, parallel: ParallelConfig, step: Step, arch: ArchTraits, slowdown: float = SLOWDOWN
) -> float:
    """Returns the seconds of a prompt step as two microbatches, whose all-reduces are exact where the table says so."""
    if _threshold(model, parallel, arch).exact:
        parallel = replace(parallel, quantized_sums="off")
    unserved = unserved_ops(model, parallel, arch)
    first, second = (stretches(model, parallel, microbatch, unserved, arch) for microbatch in split_step(step))
    head = timed(head_ops(model, parallel, step.batch), unserved, arch)
    turn = LAUNCH_S if alternates_by_block(model, parallel.ranks.attn_dp_size) else THREADS_LAUNCH_S
    return alternating_seconds(first, second, slowdown, turn) + sum(row.seconds for row in head)


def split_step(step: Step) -> tuple[Step, Step]:
    """Returns both microbatches: a single prompt is cut in the middle, several are divided."""
    if step.batch > 1:
        first = (step.batch + 1) // 2
        return replace(step, batch=first), replace(step, batch=step.batch - first)
    first = (step.new + 1) // 2
    return replace(step, new=first, context=step.context - step.new + first), replace(step, new=step.new - first)


def stretches(
    model: ModelDescription, parallel: ParallelConfig, step: Step, unserved: frozenset[str], arch: ArchTraits
) -> list[Stretch]:
    """Returns the step up to its last hidden states; the last stretch has no all-reduce."""
    before_sums, compute = [], 0.0
    for row in _rows(model, parallel, step, unserved, arch):
        if isinstance(row.op, AllReduce):
            before_sums.append(Stretch(compute, row.seconds))
            compute = 0.0
        else:
            compute += row.seconds
    return [*before_sums, Stretch(compute, 0.0)]


def alternating_seconds(
    first: Sequence[Stretch], second: Sequence[Stretch], slowdown: float = SLOWDOWN, turn: float = LAUNCH_S
) -> float:
    """Returns the seconds until both microbatches, with equally many stretches, are computed. turn: the host's time for
    each stretch."""
    launched = computed = travelled = 0.0
    arrived = [0.0, 0.0]
    for pair in zip(first, second, strict=True):
        for microbatch, stretch in enumerate(pair):
            launched += turn
            computed = max(launched, max(computed, arrived[microbatch]) + slowdown * stretch.compute)
            travelled = max(travelled, computed) + stretch.sums
            arrived[microbatch] = travelled
    return computed


def _rows(
    model: ModelDescription, parallel: ParallelConfig, step: Step, unserved: frozenset[str], arch: ArchTraits
) -> Iterator[TimedOp]:
    """Yields the ops in order, each timed once."""
    known: dict[tuple[str, Op], TimedOp] = {}
    for name, op in ops_to_hidden_states(model, parallel, step):
        if (name, op) not in known:
            (known[name, op],) = timed([(name, op)], unserved, arch)
        yield known[name, op]
