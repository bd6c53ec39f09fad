"""The points of a model's plan: what its steps launch, the candidates that the tables hold possible, and what each
choice may be worth. No torch.

    points_of(explanation)      # the most valuable first
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from sglang.explain import Explanation
from sglang.measuring.points import Candidate, Point
from sglang.srt.configs.quant_scheme import EXL3
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.measured.questions import (
    ATTENTION,
    BUCKETS,
    KERNELS,
    attention_question,
    candidate_name,
    kernel_question,
    name_of_config,
    product_question,
)
from sglang.srt.kernels.spec import Choice
from sglang.srt.kernels.tile_configs import Shape, config_for
from sglang.tuning.candidate_times import predicted_with
from sglang.tuning.ops import DecodeAttention, Experts, ExtendAttention, Linear, Op
from sglang.tuning.rates import has_ceilings
from sglang.tuning.step import Step, decode_step, prefill_step
from sglang.tuning.steps import ops_of

DECODING = 256
"""Most tokens of a step that decodes; steps of more are prompts."""
CONTEXT = 2048
FEW = (1, 4, 16)
"""Tokens of steps for which kernels of 16-bit weights differ."""
DECODED = ((1, 32768), (16, 4096), (64, CONTEXT))
"""(requests, tokens of each) for which tiles of decoding are timed, together."""
PROMPT = 4096
MEASURED_DTYPE = "bfloat16"
FURTHEST = 2.0
"""Times the best prediction from which on a candidate is not timed: no prediction of a tile was so far off."""
UNKNOWN_SPREAD = 0.3
"""How far candidates may lie apart where fewer than two of them are predicted."""
USUAL_RATE = 1e12
"""Bytes a second of a card that nobody knows, which orders its points."""


def points_of(explanation: Explanation) -> tuple[Point, ...]:
    """Returns the points of a plan, the most valuable first; none for a model in another dtype than the kernels' inputs
    are made in."""
    if explanation.parallel.dtype != MEASURED_DTYPE or explanation.refused is not None:
        return ()
    by_question: dict[object, Point] = {}
    for step in _steps(explanation):
        counted = _counted(explanation, step)
        whole = sum(count * _seconds(op, explanation.arch) for op, count in counted.items())
        for op, count in counted.items():
            for point in _points_of_op(explanation, op, step):
                share = count * _seconds(op, explanation.arch) / whole
                value = share * _spread(point) + by_question.get(point.question, point).value
                by_question[point.question] = replace(point, value=value)
    return tuple(sorted(by_question.values(), key=lambda point: -point.value))


def _steps(explanation: Explanation) -> Iterator[Step]:
    plan = explanation.plan or {}
    longest = int(plan.get("chunked_prefill_size", BUCKETS[-1]))
    longest = BUCKETS[-1] if longest < 0 else longest
    running = int(plan.get("max_running_requests", DECODING))
    for tokens in BUCKETS:
        if tokens <= min(running, DECODING):
            yield decode_step(tokens, CONTEXT)
        elif tokens <= longest:
            yield prefill_step(tokens)


def _counted(explanation: Explanation, step: Step) -> dict[Op, int]:
    counts: dict[Op, int] = {}
    for _, op in ops_of(explanation.model, explanation.parallel, step):
        counts[op] = counts.get(op, 0) + 1
    return counts


def _points_of_op(explanation: Explanation, op: Op, step: Step) -> Iterator[Point]:
    choices = [outcome for outcome in explanation.outcomes if isinstance(outcome, Choice)]
    if isinstance(op, Linear) and op.tokens == step.tokens:
        yield from _linear_points(explanation, choices, op)
    elif isinstance(op, Experts) and op.gate:
        yield from _expert_points(explanation, choices, op, step.tokens)
    elif isinstance(op, DecodeAttention | ExtendAttention):
        yield from _attention_points(explanation.arch, choices, op)


def _linear_points(explanation: Explanation, choices: Iterable[Choice], op: Linear) -> Iterator[Point]:
    for choice in choices:
        need = choice.need
        shapes = [shape for shape in need.shapes if shape[:2] == (op.rows, op.cols)]
        if need.op != "linear" or need.quant != op.scheme or not shapes or op.scheme == EXL3.name:
            continue
        if op.scheme is not None:
            yield from _product_points(explanation, choice, (*shapes[0][:2], False), op, op.tokens)
        elif op.tokens in FEW and choice.name in KERNELS["linear"]:
            ops = tuple(Linear(tokens, rows, cols) for tokens in FEW for rows, cols in _sizes(choice))
            names = (choice.name, *(name for name in KERNELS["linear"] if name != choice.name))
            yield Point(kernel_question(need), ops, tuple(Candidate(name, kernel=name) for name in names))


def _sizes(choice: Choice) -> list[tuple[int, int]]:
    return sorted({(rows, cols) for rows, cols, _ in choice.need.shapes})


def _expert_points(explanation: Explanation, choices: Iterable[Choice], op: Experts, tokens: int) -> Iterator[Point]:
    for choice in choices:
        if choice.need.op == "fused_moe" and choice.need.quant == op.scheme and choice.need.experts[2] == 1:
            yield from _product_points(explanation, choice, None, op, tokens)


def _product_points(
    explanation: Explanation, choice: Choice, shape: Shape | None, op: Op, tokens: int
) -> Iterator[Point]:
    """Yields the point of a product in steps of `tokens` tokens, if it has several candidates."""
    cut = explanation.tile_configs.get(choice.need.key)
    if cut is None or shape not in cut.by_shape or not choice.spec.alternatives:
        return
    arch = explanation.arch
    configs = {name_of_config(config_for(cut.by_shape[shape], tokens)): config_for(cut.by_shape[shape], tokens)}
    for config in choice.make_alternatives(arch, shape, tokens):
        configs.setdefault(name_of_config(config), config)
    candidates = _worth_a_try(
        Candidate(name, config=config, predicted=_predicted((op,), arch, Candidate(name, config=config)))
        for name, config in configs.items()
    )
    if len(candidates) > 1:
        yield Point(product_question(choice.need, shape, tokens), (op,), candidates)


def _worth_a_try(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Returns the tables' choice, which comes first, and the others but for those that are predicted to take several
    times as long as the best."""
    table, *others = candidates
    known = [each.predicted for each in (table, *others) if each.predicted is not None]
    limit = FURTHEST * min(known, default=math.inf)
    return (table, *(each for each in others if each.predicted is None or each.predicted <= limit))


def _attention_points(
    arch: ArchTraits, choices: Iterable[Choice], op: DecodeAttention | ExtendAttention
) -> Iterator[Point]:
    """Yields the point of attention's tile, which is one for steps of any size. Windows are timed as the whole."""
    sizes = op.keys if isinstance(op, DecodeAttention) else op.prompt
    for choice in choices:
        need, tiles = choice.need, (choice.tile, *choice.smaller_tiles)
        if need.op != op.kind or need.op not in ATTENTION or len(tiles) < 2 or need.variant:
            continue
        same_heads = need.heads in ((0, 0), (sizes.heads, sizes.kv_heads))  # 0: the need does not say
        if not same_heads or (need.head_dim, need.v_head_dim) != (sizes.head_dim, sizes.v_head_dim):
            continue
        ops = _timed_attention(op)
        named = [Candidate(candidate_name("tiles", (tile,)), tile=tile) for tile in tiles if tile is not None]
        candidates = tuple(replace(each, predicted=_predicted(ops, arch, each)) for each in named)
        yield Point(attention_question(need), ops, candidates)


def _timed_attention(op: DecodeAttention | ExtendAttention) -> tuple[Op, ...]:
    if isinstance(op, DecodeAttention):
        return tuple(DecodeAttention(replace(op.keys, batch=batch, context=context)) for batch, context in DECODED)
    return (ExtendAttention(replace(op.prompt, batch=1, new=PROMPT, prefix=0, window=0)),)


# --- predictions ------------------------------------------------------------------------------------------------------


def _predicted(ops: Iterable[Op], arch: ArchTraits, candidate: Candidate) -> float | None:
    """Returns the predicted seconds of all ops; None if one of them is not predicted."""
    if not has_ceilings(arch):
        return None
    times = [predicted_with(op, arch, candidate.config, candidate.tile) for op in ops]
    known = [time.seconds for time in times if time is not None and math.isfinite(time.seconds)]
    return sum(known) if len(known) == len(times) else None


def _seconds(op: Op, arch: ArchTraits) -> float:
    """Returns the predicted seconds of an op, or those of its bytes on a card that nobody measured."""
    by_bytes = op.num_bytes / (arch.bandwidth or USUAL_RATE)
    time = predicted_with(op, arch, None, None) if has_ceilings(arch) else None
    return by_bytes if time is None else time.seconds


def _spread(point: Point) -> float:
    """Returns by how much of the fastest prediction the candidates lie apart."""
    known = [each.predicted for each in point.candidates if each.predicted is not None]
    return UNKNOWN_SPREAD if len(known) < 2 else min(1.0, max(known) / min(known) - 1.0) + UNKNOWN_SPREAD / 10
