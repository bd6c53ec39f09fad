"""`python -m sglang.bench.card [--out FILE]`: measures this server's kernels on this card, next to the predictions for
it and the best published times.

Takes about ten minutes on a free GPU and needs no model. The file that it writes may be sent in: it has only the card's
name, versions and times. `--shape` measures other sizes (see `python -m sglang.explain --shape`).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang.measuring.card_records import card_record
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import (
    ArchTraits,
    arch_by_name,
    cuda_available,
    current_arch,
    device_name,
    free_memory_bytes,
)
from sglang.srt.kernels.measured.records import Records, Setting, to_bytes
from sglang.srt.kernels.measured.setting import setting_here
from sglang.srt.kernels.measured.store import add, read
from sglang.tuning.best_times import best
from sglang.tuning.ops import Op, describe, floor, parse_shape
from sglang.tuning.predicted_times import predicted
from sglang.tuning.rates import ceilings_of, has_ceilings
from sglang.version import __version__

BUDGET_S = 600
TOKENS = (1, 16, 64, 256, 8192)
LINEARS = (
    "rows=1792 cols=5120 scheme=fp8_channel",  # GLM-4.7, 8 cards: q, k, v
    "rows=5120 cols=1536 scheme=fp8_channel",
    "rows=2112 cols=7168",  # Kimi-K2.5: latents
    "rows=7168 cols=1024",
    "rows=24576 cols=4096",  # Qwen3-8B: gate and up
    "rows=2112 cols=7168 scheme=fp8_block",  # DeepSeek-V3.2
    "rows=5120 cols=2880",  # GPT-OSS
    "rows=4096 cols=7168 scheme=nvfp4",
)
EXPERTS = (
    "num_experts=160 top_k=8 hidden=5120 intermediate=192 scheme=fp8_channel",  # GLM-4.7, 8 cards
    "num_experts=384 top_k=8 hidden=7168 intermediate=256 scheme=int4_g32",  # Kimi-K2.5, 8 cards
    "num_experts=384 top_k=8 hidden=7168 intermediate=256 scheme=nvfp4",
    "num_experts=256 top_k=8 hidden=7168 intermediate=256 scheme=fp8_block",  # DeepSeek-V3.2, 8 cards
    "num_experts=128 top_k=4 hidden=2880 intermediate=2880 scheme=mxfp4 bias=1",  # GPT-OSS-120B
    "num_experts=128 top_k=4 hidden=2880 intermediate=2880 scheme=mxfp4_mxfp8 bias=1",
    "num_experts=256 top_k=8 hidden=2048 intermediate=512",  # Qwen3.5-35B-A3B
)
HEADS = (
    "heads=12 kv_heads=1 head_dim=128",  # GLM-4.7, 8 cards
    "heads=32 kv_heads=8 head_dim=128",
    "heads=64 kv_heads=8 head_dim=64",  # GPT-OSS
    "heads=16 kv_heads=2 head_dim=256",  # Qwen3.5-35B-A3B
)
LATENT = "heads=8 kv_heads=1 head_dim=576 v_head_dim=512 latent=1"
CONTEXTS = ((1, 2048), (1, 32768), (16, 2048), (64, 2048), (256, 2048))


HEADS_OF_STATES = "heads=32 key_heads=16"  # Qwen3.5-35B-A3B


def shapes() -> Iterator[str]:
    """Yields the shapes to measure, as `parse_shape` reads them, alternating between ops and short ones first, so that
    a small budget omits large sizes and no op."""
    lists = (
        [f"linear tokens={tokens} {sizes}" for tokens in TOKENS for sizes in LINEARS],
        [f"fused_moe tokens={tokens} {sizes}" for tokens in TOKENS for sizes in EXPERTS],
        [
            f"decode_attention batch={batch} context={context} {heads}"
            for batch, context in CONTEXTS
            for heads in (*HEADS, LATENT)
        ],
        [f"extend_attention batch=1 new=8192 {heads}" for heads in HEADS],
        [
            *(f"gated_delta_rule batch={batch} tokens=1 {HEADS_OF_STATES}" for batch in (1, 16, 64, 256)),
            f"gated_delta_rule batch=1 tokens=8192 {HEADS_OF_STATES}",
        ],
        [f"latent_absorb tokens={tokens} heads=8 rows=512 cols=128" for tokens in (1, 16, 64, 256)],
    )
    for turn in itertools.zip_longest(*lists):
        yield from filter(None, turn)


@dataclass(frozen=True, slots=True)
class Row:
    """Times in microseconds; None if unknown. `problem`: why it was not measured."""

    shape: str
    predicted: float | None
    error: float | None
    measured: float | None
    best: float | None
    best_exact: bool
    floor: float | None
    problem: str = ""


Measure = Callable[[Op, ArchTraits], "float | None"]
"""Seconds on the device; None for an op that the kit does not launch."""


def measure_here(op: Op, arch: ArchTraits) -> float | None:
    """Returns the seconds of an op on this GPU; None for ops that cannot be launched here."""
    import torch

    from sglang.bench.device_calls import calls_of
    from sglang.bench.device_time import seconds_a_call
    from sglang.srt.layers.triton_ops import pdl

    pdl.enable("pdl" in arch.features)
    try:
        calls = calls_of(op, arch, "cuda")
        return None if calls is None else seconds_a_call(calls)
    finally:
        pdl.enable(False)
        calls = None
        gc.collect()
        torch.cuda.empty_cache()


def row_of(shape: str, arch: ArchTraits, measure: Measure) -> Row:
    """Returns a measured row. A kernel that fails gives a row with a problem."""
    op = parse_shape(shape)
    known = has_ceilings(arch)
    forecast = predicted(op, arch) if known else None
    quickest = best(op, arch)
    seconds, problem = None, ""
    try:
        seconds = measure(op, arch)
        problem = "" if seconds is not None else "not launched by this kit"
    except Exception as error:  # whatever a compiler or a driver raises
        problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
    return Row(
        describe(op),
        None if forecast is None else forecast.seconds * 1e6,
        None if forecast is None else forecast.error,
        None if seconds is None else seconds * 1e6,
        None if quickest is None else quickest.served * 1e6,
        bool(quickest and quickest.exact),
        floor(op, ceilings_of(arch)) * 1e6 if known else None,
        problem,
    )


def measured_rows(
    wanted: Sequence[str], arch: ArchTraits, measure: Measure, budget_s: float, clock: Callable[[], float]
) -> Iterator[Row]:
    """Times the wanted shapes in turn until `budget_s` seconds are spent; what is left out is printed."""
    end = clock() + budget_s
    for i, shape in enumerate(wanted):
        if clock() > end:
            print(f"{len(wanted) - i} shapes left out: {budget_s:.0f} s are over (--budget)", file=sys.stderr)
            return
        yield row_of(shape, arch, measure)


HEAD = ("shape", "predicted", "measured", "best known", "floor", "measured / predicted")


def line(row: Row, width: int) -> str:
    """Returns a row as text. `~`: the best known time is interpolated."""
    ratio = f"{row.measured / row.predicted:.2f}" if row.measured and row.predicted else ""
    cells = (
        _cell(row.predicted),
        row.problem or _cell(row.measured),
        ("" if row.best_exact or row.best is None else "~") + _cell(row.best),
        _cell(row.floor),
        ratio,
    )
    return row.shape.ljust(width) + "".join(f"  {cell:>10}" for cell in cells)


def _cell(microseconds: float | None) -> str:
    return "" if microseconds is None else f"{microseconds:.1f}"


def summary(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Summarizes the rows of each op: their number, the geometric mean of measured over predicted, and the spread (rms
    of the logarithm)."""
    by_op: dict[str, list[float]] = {}
    for row in rows:
        if row.measured and row.predicted:
            by_op.setdefault(row.shape.split()[0], []).append(math.log(row.measured / row.predicted))
    return {
        op: {
            "rows": len(logs),
            "measured_over_predicted": math.exp(math.fsum(logs) / len(logs)),
            "rms": math.sqrt(math.fsum(log**2 for log in logs) / len(logs)),
        }
        for op, logs in by_op.items()
    }


def records_of(rows: Sequence[Row], arch: ArchTraits) -> Records:
    """Returns the rows of products as records, which `sglang tune` writes, too."""
    records = (
        card_record(parse_shape(row.shape), arch, row.measured / 1e6, row.predicted and row.predicted / 1e6)
        for row in rows
        if row.measured
    )
    return {(record.question, record.candidate): record for record in records if record is not None}


def _keep(setting: Setting, records: Records) -> None:
    """Adds records to the cache but for those that it has: they may be of several rounds."""
    known = read(setting)
    problem = add(setting, [record for key, record in records.items() if key not in known])
    if problem is not None:
        print(f"The times could not be kept beside those of `sglang tune`: {problem}", file=sys.stderr)


def card_facts(arch: ArchTraits) -> dict[str, Any]:
    """Returns facts of the card and the software for readers of the file."""
    facts: dict[str, Any] = {
        "arch": arch.name,
        "product": arch.product,
        "num_sms": arch.num_sms,
        "version": __version__,
    }
    import torch
    import triton

    facts |= {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
    if cuda_available():
        facts |= {"device": device_name(), "free_memory": free_memory_bytes()}
    return facts


def main(
    argv: Sequence[str] | None = None, measure: Measure = measure_here, clock: Callable[[], float] = time.monotonic
) -> int:
    """Runs the command and returns its exit status. measure, clock: replaced by tests."""
    parser = argparse.ArgumentParser(prog="python -m sglang.bench.card", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("card-times.json"), help="the file to write")
    parser.add_argument("--shape", action="append", default=[], metavar='"OP SIZE=N ..."', help="instead of the list")
    parser.add_argument("--only", default="", help="measure only shapes whose text contains this")
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, help=f"seconds after which no shape is begun; default: {BUDGET_S}"
    )
    parser.add_argument("--arch", help="product to predict for; default: this machine's")
    return _run(parser.parse_args(argv), measure, clock)


def _run(options: argparse.Namespace, measure: Measure, clock: Callable[[], float]) -> int:
    try:
        arch = arch_by_name(options.arch) if options.arch else current_arch(device="cuda")
        wanted = [describe(parse_shape(shape)) for shape in options.shape or shapes() if options.only in shape]
        if not options.budget > 0:
            raise UserError(f"--budget {options.budget:g}: must be seconds above 0.")
        if not wanted:
            raise UserError(f"--only {options.only!r} leaves no shape.")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    width = max(map(len, wanted))
    print(
        "Microseconds, operands read from memory."
        + ("" if has_ceilings(arch) else " Nobody measured this card: nothing is predicted.")
    )
    print(HEAD[0].ljust(width) + "".join(f"  {name:>10}" for name in HEAD[1:]))
    rows: list[Row] = []
    facts = card_facts(arch)
    setting = setting_here(0) if cuda_available() and not options.arch else None
    for row in measured_rows(wanted, arch, measure, options.budget, clock):
        print(line(row, width), flush=True)
        rows.append(row)
        # After each row, so that a run that is stopped keeps what it has.
        report = {"card": facts, "summary": summary(rows), "rows": [asdict(row) for row in rows]}
        if setting is not None:
            report["measured"] = json.loads(to_bytes(setting, records_of(rows, arch)))
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    if setting is not None:
        _keep(setting, records_of(rows, arch))
    for op, figures in summary(rows).items():
        ratio = f"measured / predicted {figures['measured_over_predicted']:.2f}, rms {figures['rms']:.2f}"
        print(f"{op}: {ratio}, {figures['rows']} shapes")
    print(f"Written to {options.out}. Please send it in: the predictions for your card rest on others' kernels so far.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
