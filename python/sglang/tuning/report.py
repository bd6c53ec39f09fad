"""Predicted times as text and JSON: a model's steps op by op, and single ops of any size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.drafts.spec import DraftDescription
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.plan.expert_slot_plan import ExpertSlotPlan
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.model_description import ModelDescription
from sglang.tuning.best_times import best
from sglang.tuning.draft_steps import DraftedStep, time_drafted
from sglang.tuning.ops import describe, floor, parse_shape
from sglang.tuning.predicted_times import Predicted, predicted
from sglang.tuning.rates import UNMEASURED, ceilings_of
from sglang.tuning.sglang_times import time_by_sglang
from sglang.tuning.step import Step, decode_step, prefill_step, verify_step
from sglang.tuning.steps import StepTime, TimedOp, time_step, total
from sglang.tuning.two_batch_overlap import runs_overlapped, step_time

BATCHES, PREFILL, CONTEXT = (1, 16, 64, 256), 8192, 2048
HEAD = (
    "Predicted, not measured: nothing of this server has run on this card. 'ours': microseconds of one op that reads\n"
    "from memory, with its error; 'best': the best anyone measured, small operands read from memory (~: between\n"
    "measured sizes); 'floor': bytes or operations over the best rates that were measured."
)


def data_sheet_lines(arch: ArchTraits) -> Iterator[str]:
    """Yields the notes for a card that nobody timed."""
    if not ceilings_of(arch).measured:
        yield (
            f"Nobody timed kernels on {arch.product}: its data sheet stands in, with the shares of it that an RTX PRO\n"
            f"6000 Server reaches, and {UNMEASURED:.0%} are added to each error."
        )


def steps_of(context: int = CONTEXT) -> tuple[Step, ...]:
    """Returns the steps that a report times: decoding at each batch size, and a prompt."""
    return (*(decode_step(batch, context) for batch in BATCHES), prefill_step(PREFILL))


def time_lines(
    model: ModelDescription, parallel: ParallelConfig, arch: ArchTraits, context: int = CONTEXT, details: bool = True
) -> Iterator[str]:
    """Yields a summary of the steps, and each of them op by op. Raises UserError for a card that nobody measured."""
    timed = [(step, time_step(model, parallel, step, arch)) for step in steps_of(context)]
    yield HEAD
    yield from data_sheet_lines(arch)
    yield ""
    yield from _table(SUMMARY, [_summary(step, step_time(model, parallel, step, arch)) for step, _ in timed])
    for step, rows in timed:
        if runs_overlapped(model, parallel, step, arch):
            yield f"{step}: as two microbatches, one computes while the sums of the other travel; as one, whose"
            yield f"ops stand below, {total(rows).seconds * 1e3:.2f} ms."
    missing = total(timed[0][1]).missing
    if missing:
        yield f"No kernel here computes {', '.join(missing)}: counted as the best measured, or the floor."
    for step, rows in timed if details else ():
        yield ""
        yield f"{step}:"
        yield from _table(DETAILS, [_details(row) for row in sorted(rows, key=lambda row: -row.seconds)])


DRAFTED_BATCHES = (1, 8, 32, 64)
DRAFTED = ("requests", "plain, ms", "verify, ms", "draft, ms", "pays from")


def drafted_steps(drafts: Drafts, parallel: ParallelConfig, arch: ArchTraits, context: int) -> list[DraftedStep]:
    """Returns verify steps with all draft tokens for each number of requests in DRAFTED_BATCHES. Raises UserError."""
    steps = (verify_step(batch, drafts.width, context) for batch in DRAFTED_BATCHES)
    return [time_drafted(drafts.model, drafts.draft, parallel, step, arch) for step in steps]


@dataclass(frozen=True, slots=True)
class Drafts:
    """Inputs of a prediction of steps with drafts. draft None: draft tokens are looked up. `width`: tokens of a request
    in a step, including the last sampled one. `accept_lengths`: accepted tokens for which speeds are given."""

    model: ModelDescription
    draft: DraftDescription | None
    width: int
    accept_lengths: tuple[float, ...]


def drafted_lines(drafts: Drafts, parallel: ParallelConfig, arch: ArchTraits, context: int = CONTEXT) -> Iterator[str]:
    """Yields a table of steps with drafts. Raises UserError for a card that nobody measured."""
    draft_tokens = drafts.width - 1
    yield f"Steps with {draft_tokens} draft token{'s' * (draft_tokens > 1)} of a request. Pays from: the accept length"
    yield "(tokens of a request and step) from which drafts are faster. Then tokens/s, plain and at accept lengths."
    yield ""
    lengths = [f"at {length:g}" for length in drafts.accept_lengths]
    rows = []
    for drafted in drafted_steps(drafts, parallel, arch, context):
        batch, parts = drafted.step.batch, (drafted.plain, drafted.verify, drafted.draft)
        speeds = (batch / drafted.plain.seconds, *map(drafted.tokens_per_second, drafts.accept_lengths))
        ms = (f"{part.seconds * 1e3:.2f}" for part in parts)
        rows.append((str(batch), *ms, f"{drafted.pays_from:.2f}", *(f"{speed:,.0f}" for speed in speeds)))
    yield from _table((*DRAFTED, "plain tok/s", *lengths), rows)


def drafted_json(drafts: Drafts, parallel: ParallelConfig, arch: ArchTraits, context: int = CONTEXT) -> dict[str, Any]:
    """Returns, by number of requests, seconds of a step's parts and tokens a second by accept length."""
    return {
        str(drafted.step.batch): {
            "plain": drafted.plain.seconds,
            "verify": drafted.verify.seconds,
            "draft": drafted.draft.seconds,
            "pays_from": drafted.pays_from,
            "tokens_per_second": {f"{n:g}": drafted.tokens_per_second(n) for n in drafts.accept_lengths},
        }
        for drafted in drafted_steps(drafts, parallel, arch, context)
    }


SUMMARY = ("step", "ours, ms", "range", "tok/s", "best ops, ms", "floor, ms")
DETAILS = ("op", "times", "ours", "+-", "best", "floor", "ms of the step", "rests on")


def _summary(step: Step, time: StepTime) -> tuple[str, ...]:
    return (
        str(step),
        f"{time.seconds * 1e3:.2f}",
        f"{time.low * 1e3:.2f} - {time.high * 1e3:.2f}",
        f"{step.tokens / time.seconds:,.0f}",
        f"{time.best * 1e3:.2f}",
        f"{time.floor * 1e3:.2f}",
    )


def _details(row: TimedOp) -> tuple[str, ...]:
    ours, best_known = row.ours, row.best
    return (
        row.name,
        str(row.count),
        _us(ours.seconds) if ours else "none",
        f"{ours.error:.0%}" if ours else "",
        ("" if best_known.exact else "~") + _us(best_known.served) if best_known else "",
        _us(row.floor),
        f"{row.seconds * 1e3:.2f}",
        _how(ours) if ours else "",
    )


def _how(ours: Predicted) -> str:
    """Returns the basis of a prediction, with the comparable time if published times had other inputs."""
    if abs(ours.comparable / ours.seconds - 1.0) < 0.01:
        return ours.how
    return f"{ours.how}; {_us(ours.comparable)} with even routing, as best"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        cells = (
            cell.ljust(w) if i in (0, len(head) - 1) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def shape_lines(shapes: Sequence[str], arch: ArchTraits) -> Iterator[str]:
    """Yields a line for each op of `--shape`. Raises UserError."""
    rows = [shape_json(shape, arch) for shape in shapes]
    names = ("ours_us", "error", "sglang_us", "best_us", "floor_us")
    head = ("shape", "ours", "+-", "sglang", "best measured", "floor", "rests on")
    cells = []
    for row in rows:
        figures = [
            "" if row[name] is None else f"{row[name]:.0%}" if name == "error" else f"{row[name]:.1f}" for name in names
        ]
        if row["best_us"] is not None and not row["best_exact"]:
            figures[3] = "~" + figures[3]
        known = [text for text in (row["ours_how"], row["sglang_how"] and f"sglang: {row['sglang_how']}") if text]
        cells.append((row["shape"], *figures, "; ".join(known)))
    yield "Predicted microseconds. 'ours' reads from memory; 'sglang' (release 0.5.14) and 'best' as in replays, in"
    yield "which weights and caches below some 100 MB are in the L2. ~: between measured sizes."
    yield from data_sheet_lines(arch)
    yield ""
    yield from _table(head, cells)


def shape_json(shape: str, arch: ArchTraits) -> dict[str, Any]:
    """Returns times in microseconds, None where nothing is known. Raises UserError."""
    op = parse_shape(shape)
    ours, best_known, theirs = predicted(op, arch), best(op, arch), time_by_sglang(op, arch)
    return {
        "shape": describe(op),
        "ours_us": ours and ours.seconds * 1e6,
        "error": ours and ours.error,
        "ours_how": ours and _how(ours),
        "sglang_us": theirs and theirs[0] * 1e6,
        "sglang_how": theirs and theirs[1],
        "best_us": best_known and best_known.measured * 1e6,
        "best_exact": bool(best_known and best_known.exact),
        "best_table": best_known and best_known.table,
        "floor_us": floor(op, ceilings_of(arch)) * 1e6,
    }


BUS = ("over the bus, of experts in main memory", "GB", "ms")


def bus_lines(slots: ExpertSlotPlan, context: int = CONTEXT) -> Iterator[str]:
    """Yields what steps copy of the experts that lie in main memory, which comes to the times of their ops."""
    rows = [
        (str(step), f"{slots.copied_bytes(step.tokens) / 1e9:.2f}", f"{1e3 * slots.copy_seconds(step.tokens):.1f}")
        for step in steps_of(context)
    ]
    yield from _table(BUS, rows)
    yield f"{slots.slots} of {slots.experts} experts of a layer have slots; the bus moves {slots.rate / 1e9:.0f} GB/s."


def bus_json(slots: ExpertSlotPlan, context: int = CONTEXT) -> dict[str, Any]:
    """Returns the bytes and seconds of the same copies by step."""
    return {
        str(step): {"bytes": round(slots.copied_bytes(step.tokens)), "seconds": slots.copy_seconds(step.tokens)}
        for step in steps_of(context)
    }


def time_json(
    model: ModelDescription, parallel: ParallelConfig, arch: ArchTraits, context: int = CONTEXT
) -> dict[str, Any]:
    """Returns the seconds of each step, and of its ops. Raises UserError."""
    steps = {}
    for step in steps_of(context):
        rows = time_step(model, parallel, step, arch)
        time = step_time(model, parallel, step, arch)
        steps[str(step)] = {
            "forward_microbatches": runs_overlapped(model, parallel, step, arch),
            "seconds": time.seconds,
            "low": time.low,
            "high": time.high,
            "best": time.best,
            "floor": time.floor,
            "missing": list(time.missing),
            "ops": [
                {
                    "name": row.name,
                    "op": describe(row.op),
                    "count": row.count,
                    "seconds": row.ours and row.ours.seconds,
                    "comparable": row.ours and row.ours.comparable,
                    "error": row.ours and row.ours.error,
                    "best": row.best and row.best.served,
                    "floor": row.floor,
                }
                for row in rows
            ],
        }
    return steps
