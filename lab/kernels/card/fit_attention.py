"""How well the model of attention knows an RTX PRO 6000 Server, by timings of SGLang's Triton kernels on that card.

    pip install pandas pyarrow scipy
    python lab/kernels/card/fit_attention.py --tables DIR [--report report.json] [--constants]

Prints the error of the committed constants, and of constants that were fitted without the heads they are judged on
(every fifth pair of query and kv heads is left out); by kernel, requests and context, so that a trend would show. With
`--constants` also the constants fitted on everything, as they are committed. Times below 20 us are multiples of 2 us
in the tables and count apart. No GPU needed; five minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from measured_attention import MeasuredDecode, MeasuredPrompt, read_decode, read_prompts, sample

from sglang.tuning import upstream_attention as upstream
from sglang.tuning.attention_model import (
    SHARED,
    DecodeShared,
    PromptTimes,
    StepTimes,
    decode_seconds,
    prompt_seconds,
)

FOLDS = 5
OF_KERNEL, OF_ALL = 400, 1500
"""Rows that a fit looks at."""
LONG = 20e-6
START_DECODE, START_PROMPT = StepTimes(1.2, 0.7, 0.15, 6.0, 0.5), PromptTimes(2.0, 1.5, 2.0, 0.3, 5.0, 1.0)
SHARED_FITTED = ("dispatch", "l2", "bandwidth", "reread", "combine", "part")
"""`warm_mb` and `warm_width` were found by eye: the step from the L2 to memory at 100 to 150 MB."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True, help="directory with attention/ and mla/")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--constants", action="store_true")
    args = parser.parse_args(argv)
    decode, prompts = read_decode(args.tables), read_prompts(args.tables)
    if args.constants:
        _print_constants(*fit_decode(decode), fit_prompts(prompts))
        return 0
    report = {
        "decode": judge(
            decode, [error_of_decode(row, SHARED, upstream.DECODE_TIMES) for row in decode], axes_of_decode
        ),
        "decode, left out": judge(decode, left_out(decode, fit_decode, error_of_decode), axes_of_decode),
        "prompts": judge(prompts, [error_of_prompt(row, upstream.PROMPT_TIMES) for row in prompts], axes_of_prompt),
        "prompts, left out": judge(
            prompts, left_out(prompts, lambda rows: (fit_prompts(rows),), error_of_prompt), axes_of_prompt
        ),
    }
    if args.report:
        args.report.write_text(json.dumps(report, indent=1) + "\n")
    for name, parts in report.items():
        print(name)
        for part, found in parts.items():
            print(f"  {part:22} {found['count']:6} rows  {found['rms']:.3f} ({found['mean']:+.3f})", end="")
            print(f"   from 20 us on {found['rms_long']:.3f} ({found['mean_long']:+.3f})")
    return 0


def error_of_decode(row: MeasuredDecode, shared: DecodeShared, times: Mapping[str, StepTimes]) -> float:
    """Logarithm of predicted over measured."""
    predicted = decode_seconds(row.keys, upstream.decode_pieces(row.keys), times[upstream.decode_key(row.keys)], shared)
    return math.log(predicted / row.seconds)


def error_of_prompt(row: MeasuredPrompt, times: Mapping[str, PromptTimes]) -> float:
    key = upstream.prompt_key(row.prompt, row.q_item)
    return math.log(prompt_seconds(row.prompt, upstream.prompt_tile(row.prompt), times[key]) / row.seconds)


def fit_decode(rows: Sequence[MeasuredDecode]) -> tuple[DecodeShared, dict[str, StepTimes]]:
    """In turns: each kernel's own constants, and those that all share."""
    by_kernel = _by(rows, lambda row: upstream.decode_key(row.keys))
    shared, times = SHARED, dict.fromkeys(by_kernel, START_DECODE)
    for _ in range(3):
        for key, of_kernel in by_kernel.items():
            few = sample(of_kernel, OF_KERNEL)
            times[key] = _fit(times[key], START_DECODE, few, _decode_error_of(key, shared))
        few = sample(rows, OF_ALL)
        shared = _fit(shared, SHARED, few, lambda row, s: error_of_decode(row, s, times), SHARED_FITTED)
    return shared, times


def _decode_error_of(key: str, shared: DecodeShared) -> Callable[[MeasuredDecode, StepTimes], float]:
    return lambda row, times: error_of_decode(row, shared, {key: times})


def fit_prompts(rows: Sequence[MeasuredPrompt]) -> dict[str, PromptTimes]:
    by_kernel = _by(rows, lambda row: upstream.prompt_key(row.prompt, row.q_item))
    return {
        key: _fit(
            START_PROMPT,
            START_PROMPT,
            sample(of_kernel, OF_KERNEL),
            lambda row, t, key=key: error_of_prompt(row, {key: t}),
        )
        for key, of_kernel in by_kernel.items()
    }


def _by(rows: Sequence[Any], key: Callable[[Any], str]) -> dict[str, list[Any]]:
    parts: dict[str, list[Any]] = {}
    for row in rows:
        parts.setdefault(key(row), []).append(row)
    return parts


def _fit(
    start: Any, anchor: Any, rows: Sequence[Any], error: Callable[[Any, Any], float], names: Sequence[str] = ()
) -> Any:
    """Least squares in logarithms of the constants `names` (all if empty), held weakly to `anchor`."""
    import numpy
    from scipy.optimize import least_squares

    names = names or tuple(field.name for field in dataclasses.fields(start))
    weights = numpy.array([1.0 / math.hypot(0.05, 0.9e-6 / row.seconds) for row in rows])
    zero = numpy.log([getattr(anchor, name) for name in names])

    def constants_at(logs: Any) -> Any:
        return dataclasses.replace(start, **dict(zip(names, map(float, numpy.exp(logs)), strict=True)))

    def residuals(logs: Any) -> Any:
        values = constants_at(logs)
        errors = numpy.array([error(row, values) for row in rows])
        return numpy.concatenate((errors * weights, 0.3 * (logs - zero)))

    first = numpy.log([getattr(start, name) for name in names])
    return constants_at(least_squares(residuals, first, max_nfev=20, loss="soft_l1").x)


def left_out(rows: Sequence[Any], fit: Callable[..., tuple[Any, ...]], error: Callable[..., float]) -> list[float]:
    """Each row's error with constants fitted on other numbers of heads; nan for kernels that only one fold has."""
    groups = sorted({row.group for row in rows})
    found: dict[Any, float] = {}
    for fold in range(FOLDS):
        out = set(groups[fold::FOLDS])
        fitted = fit([row for row in rows if row.group not in out])
        for row in rows:
            if row.group in out:
                try:
                    found[row] = error(row, *fitted)
                except KeyError:
                    continue  # a kernel of which no other heads were measured
    return [found.get(row, math.nan) for row in rows]


def axes_of_decode(row: MeasuredDecode) -> tuple[str, ...]:
    keys = row.keys
    return (
        f"kernel {upstream.decode_key(keys)}",
        f"requests {keys.batch}",
        f"context {keys.context}",
        f"head dim {keys.head_dim}",
        f"heads {keys.heads}",
        f"query heads to a kv head {keys.group}",
    )


def axes_of_prompt(row: MeasuredPrompt) -> tuple[str, ...]:
    prompt = row.prompt
    return (
        f"kernel {upstream.prompt_key(prompt, row.q_item)}",
        f"requests {prompt.batch}",
        f"tokens {prompt.new}",
        f"head dim {prompt.head_dim}",
        f"heads {prompt.heads}",
    )


def judge(rows: Sequence[Any], errors: Sequence[float], axes: Callable[[Any], tuple[str, ...]]) -> dict[str, Any]:
    parts: dict[str, list[tuple[float, bool]]] = {"all": []}
    for row, error in zip(rows, errors, strict=True):
        if not math.isnan(error):
            for name in ("all", *axes(row)):
                parts.setdefault(name, []).append((error, row.seconds >= LONG))
    return {name: _of(found) for name, found in parts.items()}


def _of(found: Sequence[tuple[float, bool]]) -> dict[str, float]:
    every, long = [error for error, _ in found], [error for error, is_long in found if is_long]
    parts: dict[str, float] = {"count": len(every)}
    for tail, errors in (("", every), ("_long", long or [0.0])):
        parts["rms" + tail] = round(math.sqrt(math.fsum(error**2 for error in errors) / len(errors)), 4)
        parts["mean" + tail] = round(math.fsum(errors) / len(errors), 4)
    return parts


def _print_constants(shared: DecodeShared, decode: Mapping[str, StepTimes], prompts: Mapping[str, PromptTimes]) -> None:
    print(", ".join(f"{name}={getattr(shared, name):.3g}" for name in SHARED_FITTED))
    for times in (decode, prompts):
        for key, values in times.items():
            print(
                f'    "{key}": {type(values).__name__}({", ".join(f"{v:.3g}" for v in dataclasses.astuple(values))}),'
            )


if __name__ == "__main__":
    raise SystemExit(main())
