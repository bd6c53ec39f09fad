"""Steps with prompts as two halves, whose sums over ranks travel while the other half computes
(--enable-two-batch-overlap).

Three clocks follow the turns of `distributed/turns`: the host's launches and what is computed, in the order A1, B1, A2,
B2, ..., and the sums, one behind the other. A half is priced as a step of its own: the second one of a prompt attends
to the first, and each reads all weights. While sums travel, what is computed takes longer by SLOWDOWN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.hardware.topology import Topology
from sglang.srt.kernels.halves_table import HalvesBand, halves_from
from sglang.srt.plan.halves import has_experts, least_tokens, turns_by_block, why_whole
from sglang.srt.plan.layer_spec import Serving
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.rank_weights import expert_rows
from sglang.tuning.ops import AllReduce, Elementwise, Op
from sglang.tuning.steps import (
    Step,
    StepTime,
    TimedOp,
    head_ops,
    layer_ops,
    time_step,
    timed,
    total,
    unserved_ops,
)

SLOWDOWN = 1.1
"""A guess: NCCL's kernels take up to 16 of 188 SMs, and 50 GB/s each way of 1,540 of the memory."""
TURN_S = 0.43e-3
"""What the host takes to launch a half up to its next sum, as much as a whole step: measured beside an H100
(benchmark/results/several_gpus.md#two-batch-overlap-and-all-reduces-in-eight-bits)."""
THREADS_TURN_S = 2 * TURN_S
"""The same where halves are threads, and the other one goes on: measured there."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """What a half computes up to a sum, and the sum: seconds."""

    compute: float
    sums: float


def runs_in_halves(model: ModelDescription, serving: Serving, step: Step, arch: ArchTraits) -> bool:
    """Returns whether a server computes the step as two halves there, its cards joined by PCIe or by NVLink; False of
    attention groups with requests of their own, of whose halves nothing is predicted."""
    prompt = not step.decodes and not step.verifies
    whole = why_whole(serving.tp_size, serving.dcp_size) or serving.attn_dp_size > 1
    if serving.two_batch == "off" or whole or not prompt:
        return False
    band = _band(model, serving, arch)
    least = least_tokens(band, model, serving.attn_dp_size)
    return step.tokens >= least and (band.unasked or serving.two_batch == "on")


def _band(model: ModelDescription, serving: Serving, arch: ArchTraits) -> HalvesBand:
    links = Topology.NVLINK if "nvlink" in arch.features else Topology.HOST_BRIDGE
    return halves_from(links, serving.tp_size, has_experts(model), serving.quantized_sums != "off")


def step_time(model: ModelDescription, serving: Serving, step: Step, arch: ArchTraits) -> StepTime:
    """The time of a step, as two halves where it runs so. Raises UserError as `time_step`."""
    whole = total(time_step(model, serving, step, arch))
    if not runs_in_halves(model, serving, step, arch):
        return whole
    seconds = halved_seconds(model, serving, step, arch)
    shorter = seconds / whole.seconds
    return replace(whole, seconds=seconds, low=whole.low * shorter, high=whole.high * shorter)


def halved_seconds(
    model: ModelDescription, serving: Serving, step: Step, arch: ArchTraits, slowdown: float = SLOWDOWN
) -> float:
    """The seconds of a step of prompts as two halves, whose sums are exact where the table says so."""
    if _band(model, serving, arch).exact:
        serving = replace(serving, quantized_sums="off")
    unserved = unserved_ops(model, serving, arch)
    first, second = (stretches(model, serving, half, unserved, arch) for half in halves_of(step))
    head = timed(head_ops(model, serving, step.batch), unserved, arch)
    turn = TURN_S if turns_by_block(model, serving.attn_dp_size) else THREADS_TURN_S
    return in_turns(first, second, slowdown, turn) + sum(row.seconds for row in head)


def halves_of(step: Step) -> tuple[Step, Step]:
    """A prompt is cut in the middle, several between two of them."""
    if step.batch > 1:
        first = (step.batch + 1) // 2
        return replace(step, batch=first), replace(step, batch=step.batch - first)
    first = (step.new + 1) // 2
    return replace(step, new=first, context=step.context - step.new + first), replace(step, new=step.new - first)


def stretches(
    model: ModelDescription, serving: Serving, step: Step, unserved: frozenset[str], arch: ArchTraits
) -> list[Stretch]:
    """The step up to its last hidden states; the last stretch has no sum."""
    before_sums, compute = [], 0.0
    for row in _rows(model, serving, step, unserved, arch):
        if isinstance(row.op, AllReduce):
            before_sums.append(Stretch(compute, row.seconds))
            compute = 0.0
        else:
            compute += row.seconds
    return [*before_sums, Stretch(compute, 0.0)]


def in_turns(
    first: Sequence[Stretch], second: Sequence[Stretch], slowdown: float = SLOWDOWN, turn: float = TURN_S
) -> float:
    """The seconds until both halves are computed, of as many stretches. turn: of the host, for each of them."""
    launched = computed = travelled = 0.0
    arrived = [0.0, 0.0]
    for pair in zip(first, second, strict=True):
        for half, stretch in enumerate(pair):
            launched += turn
            computed = max(launched, max(computed, arrived[half]) + slowdown * stretch.compute)
            travelled = max(travelled, computed) + stretch.sums
            arrived[half] = travelled
    return computed


def _rows(
    model: ModelDescription, serving: Serving, step: Step, unserved: frozenset[str], arch: ArchTraits
) -> Iterator[TimedOp]:
    """The ops in their order, each timed once."""
    known: dict[tuple[str, Op], TimedOp] = {}
    for name, op in _ops(model, serving, step):
        if (name, op) not in known:
            (known[name, op],) = timed([(name, op)], unserved, arch)
        yield known[name, op]


def _ops(model: ModelDescription, serving: Serving, step: Step) -> Iterator[tuple[str, Op]]:
    rows, quant = expert_rows(model, serving.ranks), model.expert_quant
    yield "embedding", Elementwise("embedding", 4.0 * step.tokens * model.hidden_size)
    for i, layer in enumerate(model.layers):
        yield from layer_ops(model, i, layer, serving, step, rows, quant.scheme if quant else None)
