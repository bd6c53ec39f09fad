"""How well the models know an H200, on times that this project measured there, and the constants that the times tell.

    pip install scipy
    python lab/kernels/card/fit_h200.py

Reads measured_h200.json and the experts' tiles that were timed (fused_moe_triton/measured). Fits what
`tuning` says to be fitted on an H200: the two numbers of streamed weights, the share of instructions while weights are
widened, decode attention. Each is fitted again without a part of the times and judged on that part. No GPU; a minute.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

from derive_h200 import FORMS, rows_of

sys.path.insert(0, str(Path(__file__).parents[1] / "fused_moe_triton"))
import fit_cost_model

from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.layers.moe.fused_moe_triton.tiles import few_pairs
from sglang.srt.layers.triton_ops.linear_tiles import FEW_ROWS
from sglang.tuning import predicted_times, served_attention, streaming
from sglang.tuning.attention_model import Keys
from sglang.tuning.cost_model import DEFAULT
from sglang.tuning.ops import DecodeAttention, Experts, Linear, Op, parse_shape
from sglang.tuning.served_attention import READING, Reading

H200 = arch_by_name("h200")
SCHEME_OF = {"bf16": None, "fp8_block": "fp8_block", "fp8": "fp8_channel", "int4": "int4_g32"}
MERGED_THEN = 16
"""Pieces of a request that decode attention merged at once when it was measured."""
NEAR_BEST = 1.15
"""Of the experts' tiles those count that take up to so many times the best one's time: others are never launched."""


@dataclass(frozen=True, slots=True)
class Timed:
    op: Op
    seconds: float
    before: float | None = None  # what was predicted when it was measured


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    run = list(card_run())
    print("\n".join([*by_op(run), "", *streamed_weights(run), "", *dequantize_cost(), "", *decoding(run)]))
    return 0


# --- what was measured ------------------------------------------------------------------------------------------------


def card_run() -> Iterator[Timed]:
    """Yields the shapes of `python -m sglang.bench.card`, with what was predicted then and what was measured."""
    for shape, predicted, measured in rows_of("kit"):
        yield Timed(parse_shape(shape), measured * 1e-6, predicted * 1e-6)


def experts_before() -> Iterator[Timed]:
    """Yields this server's layers of experts that were timed before the kit."""
    for what, tokens, microseconds, _ in rows_of("experts"):
        layer = re.fullmatch(r"E=(\d+) N=(\d+) H=(\d+) (.+)", what)
        assert layer is not None, what
        experts, inter, hidden = (int(layer[i]) for i in (1, 2, 3))
        scheme = SCHEME_OF[FORMS[layer[4]]]
        yield Timed(Experts(tokens, experts, 8, hidden, inter, scheme), microseconds * 1e-6)


def attention_before() -> Iterator[Timed]:
    for name, microseconds, _ in rows_of("attention"):
        shape = re.fullmatch(r"decode gqa (\d+)x(\d+)", name)
        if shape:
            keys = Keys(int(shape[1]), int(shape[2]), 32, 8, 128, 128)
            yield Timed(DecodeAttention(keys), microseconds * 1e-6)
        prompt = re.fullmatch(r"extend (\d+)x(\d+)(?: over (\d+))?", name)
        if prompt:
            sizes = f"batch={prompt[1]} new={prompt[2]} prefix={prompt[3] or 0} heads=32 kv_heads=8 head_dim=128"
            yield Timed(parse_shape(f"extend_attention {sizes}"), microseconds * 1e-6)


# --- errors -----------------------------------------------------------------------------------------------------------


def rms(errors: Sequence[float]) -> float:
    return math.sqrt(math.fsum(error**2 for error in errors) / len(errors))


def shown(errors: Sequence[float]) -> str:
    return f"{rms(errors):.3f} ({math.fsum(errors) / len(errors):+.3f})"


def predicted_seconds(op: Op) -> float:
    found = predicted_times.predicted(op, H200)
    assert found is not None
    return found.seconds


def error_of(row: Timed) -> float:
    with mock.patch.object(served_attention, "merged_at_once", lambda keys: MERGED_THEN):
        return math.log(predicted_seconds(row.op) / row.seconds)


def by_op(run: Sequence[Timed]) -> Iterator[str]:
    yield "| op | times | predicted then: rms (mean) | now |"
    yield "|---|---|---|---|"
    for kind in dict.fromkeys(row.op.kind for row in run):
        rows = [row for row in run if row.op.kind == kind]
        then = [math.log(row.before / row.seconds) for row in rows if row.before]
        yield f"| {kind} | {len(rows)} | {shown(then)} | {shown([error_of(row) for row in rows])} |"
    prompts = [row for row in attention_before() if row.op.kind == "extend_attention"]
    yield f"| extend_attention, the earlier page | {len(prompts)} | - | {shown([error_of(row) for row in prompts])} |"


# --- fits -------------------------------------------------------------------------------------------------------------

Errors = Callable[[Sequence[float], Timed], float]


def fitted(rows: Sequence[Timed], error: Errors, start: Sequence[float]) -> list[float]:
    """Least squares of the errors, with a little for leaving the start (squared logarithms)."""
    from scipy.optimize import least_squares

    def residuals(logs: Sequence[float]) -> list[float]:
        values = [math.exp(log) for log in logs]
        away = [0.05 * (log - math.log(value)) for log, value in zip(logs, start, strict=True)]
        return [*(error(values, row) for row in rows), *away]

    return [math.exp(log) for log in least_squares(residuals, [math.log(value) for value in start]).x]


def left_out(
    rows: Sequence[Timed], error: Errors, start: Sequence[float], part_of: Callable[[Op], object]
) -> tuple[list[float], list[list[float]]]:
    """Errors of each part with constants fitted on the others, and those constants."""
    errors, constants = [], []
    for part in dict.fromkeys(part_of(row.op) for row in rows):
        found = fitted([row for row in rows if part_of(row.op) != part], error, start)
        errors += [error(found, row) for row in rows if part_of(row.op) == part]
        constants.append(found)
    return errors, constants


def ranges(names: Sequence[str], on_all: Sequence[float], parts: Sequence[Sequence[float]]) -> Iterator[str]:
    yield "| constant | fitted on all | without a part |"
    yield "|---|---|---|"
    for i, name in enumerate(names):
        found = [values[i] for values in parts]
        yield f"| {name} | {on_all[i]:.3g} | {min(found):.3g} to {max(found):.3g} |"


def streamed_weights(run: Sequence[Timed]) -> Iterator[str]:
    rows = [row for row in (*run, *experts_before()) if _is_streamed(row.op)]

    def error(values: Sequence[float], row: Timed) -> float:
        with mock.patch.multiple(streaming, ISSUED=values[0], LAST_WARPS=values[1]):
            return math.log(predicted_seconds(row.op) / row.seconds)

    start = (0.8, 16.0)
    on_all = fitted(rows, error, start)
    errors, parts = left_out(rows, error, start, lambda op: (op.kind, getattr(op, "scheme", None)))
    here = [error((streaming.ISSUED, streaming.LAST_WARPS), row) for row in rows]
    yield f"Streamed weights, {len(rows)} times: as committed {shown(here)}, schemes left out {shown(errors)}"
    yield ""
    yield from ranges(("ISSUED", "LAST_WARPS"), on_all, parts)


def _is_streamed(op: Op) -> bool:
    if isinstance(op, Experts):
        return few_pairs(op.pairs, op.num_experts)
    return isinstance(op, Linear) and op.scheme is not None and op.tokens <= FEW_ROWS


def dequantize_cost() -> Iterator[str]:
    """The share with which the mean error of the fastest tiles vanishes, by shape."""
    folder = Path(fit_cost_model.__file__).parent / "measured"
    yield "| experts whose weights are widened | issue_share without bias | rms with it | choice over best: 0.66 |"
    yield "|---|---|---|---|"
    for path in sorted(folder.glob("*.json.gz")):
        arch, points = fit_cost_model.read_measured(path)
        for shape in dict.fromkeys(point.shape for point in points):
            if shape.scheme is None or SCHEMES[shape.scheme].bits != 4:
                continue
            of_shape = [point for point in points if point.shape == shape]
            low, high = 0.3, 1.5
            for _ in range(12):
                middle = (low + high) / 2
                biased = math.fsum(_near_best(of_shape, middle)) > 0  # predicted too slow: more is issued
                low, high = (middle, high) if biased else (low, middle)
            choice = fit_cost_model.geometric_mean([c.ratio for c in fit_cost_model.judge(of_shape, arch, DEFAULT)])
            yield f"| {shape} | {low:.2f} | {rms(_near_best(of_shape, low)):.3f} | {choice:.3f} |"


def _near_best(points: Sequence[fit_cost_model.Measured], issue_share: float) -> list[float]:
    errors = []
    for point in points:
        found = fit_cost_model.predictions(point, H200, replace(DEFAULT, issue_share=issue_share))
        for kind, seconds in found.items():
            timings = point.timings[kind]
            most = NEAR_BEST * min(timing.seconds for timing in timings)
            pairs = zip(seconds, timings, strict=True)
            errors += [math.log(time / timing.seconds) for time, timing in pairs if timing.seconds < most]
    return errors


DECODING = ("base", "step", "per_elements", "arithmetic", "program", "tail", "merge", "bandwidth")


def decoding(run: Sequence[Timed]) -> Iterator[str]:
    rows = [row for row in (*run, *attention_before()) if isinstance(row.op, DecodeAttention)]

    def error(values: Sequence[float], row: Timed) -> float:
        times = Reading(**dict(zip(DECODING, values, strict=True)))
        with mock.patch.object(predicted_times, "READING", times):
            return error_of(row)

    def heads(op: Op) -> object:
        assert isinstance(op, DecodeAttention)
        return op.keys.heads, op.keys.head_dim

    start = (5.0, 0.6, 0.33, 1.5, 1.0, 0.5, 1.0, 4.3)
    on_all = fitted(rows, error, start)
    errors, parts = left_out(rows, error, start, heads)
    committed: Mapping[str, float] = {name: getattr(READING, name) for name in DECODING}
    here = [error(list(committed.values()), row) for row in rows]
    yield f"Decode attention, {len(rows)} times: as committed {shown(here)}, heads left out {shown(errors)}"
    yield ""
    yield from ranges(DECODING, on_all, parts)


if __name__ == "__main__":
    raise SystemExit(main())
