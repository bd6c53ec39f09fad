"""How well the cost model knows an RTX PRO 6000 Server, by timings of SGLang's Triton experts on that card.

    pip install pandas pyarrow scipy
    python lab/kernels/card/fit_experts.py --tables DIR [--report report.json]

Prints the error of the committed constants, and of constants that were fitted on the layers of other models only; by
scheme and number of tokens, so that a trend would show. Then the constants fitted on everything: those of
`sglang.tuning.cost_model.SM120` are these, rounded. No GPU needed; about two minutes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from measured_experts import MeasuredLayer, read

from sglang.srt.hardware.arch import arch_by_name
from sglang.tuning.cost_model import DEFAULT, SM120, Constants
from sglang.tuning.upstream_experts import SideKernels, predict

ARCH = arch_by_name("rtx-pro-6000-server")
FITTED = ("short_rows", "row_power", "matrix_share", "prologue")
"""The others are not told apart by these data: launches and epilogues from the side kernels, the L2's rate and the
scales' cost from the matrix rate, and latency, loads on their way and overhead of a step from one another (with half or
twice of each the error is the same). They stay as committed; `bandwidth_share` is the best read that was measured."""
SIDE = tuple(asdict(SideKernels()))
FOLDS = 5
SAMPLE = 700
"""Layers that a fit looks at."""


@dataclass(frozen=True, slots=True)
class Fit:
    constants: Constants
    side: SideKernels

    def error(self, layer: MeasuredLayer) -> float:
        """Logarithm of predicted over measured seconds."""
        return math.log(predict(layer, ARCH, self.constants, self.side) / layer.seconds)


COMMITTED = Fit(SM120, SideKernels())
H200 = Fit(DEFAULT, SideKernels())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True, help="directory with moe/sglang/VERSION/moe_perf.parquet")
    parser.add_argument("--report", type=Path)
    args = parser.parse_args(argv)
    layers = read(args.tables)
    everything = fit(sample(layers))
    report = {
        "layers": len(layers),
        "h200_constants": judge(layers, [H200.error(layer) for layer in layers]),
        "committed": judge(layers, [COMMITTED.error(layer) for layer in layers]),
        "left_out": judge(layers, left_out(layers)),
        "constants": {name: getattr(everything.constants, name) for name in FITTED},
        "side": asdict(everything.side),
    }
    if args.report:
        args.report.write_text(json.dumps(report, indent=1) + "\n")
    _print(report)
    return 0


def fit(layers: Sequence[MeasuredLayer]) -> Fit:
    """By least squares of the errors, less for large ones; in logarithms of the constants, held weakly to the start."""
    import numpy
    from scipy.optimize import least_squares

    start = replace(SM120, short_rows=0.05, row_power=3.0, matrix_share=DEFAULT.matrix_share, prologue=DEFAULT.prologue)

    def made(steps: Any) -> Fit:
        factors = [math.exp(step) for step in steps]
        constants = start.replaced({n: getattr(start, n) * f for n, f in zip(FITTED, factors, strict=False)})
        sides = {n: getattr(SideKernels(), n) * f for n, f in zip(SIDE, factors[len(FITTED) :], strict=True)}
        return Fit(constants, SideKernels(**sides))

    def residuals(steps: Any) -> Any:
        current = made(steps)
        held = 0.006 * math.sqrt(len(layers) / len(steps)) * steps
        return numpy.concatenate(([current.error(layer) for layer in layers], held))

    zeros = numpy.zeros(len(FITTED) + len(SIDE))
    return made(least_squares(residuals, zeros, max_nfev=25, loss="soft_l1", f_scale=0.1).x)


def sample(layers: Sequence[MeasuredLayer]) -> list[MeasuredLayer]:
    """Every so-manieth of the ordered layers."""
    return list(layers[:: max(1, len(layers) // SAMPLE)])


def left_out(layers: Sequence[MeasuredLayer]) -> list[float]:
    """Each layer's error with constants fitted on other models."""
    groups = sorted({layer.group for layer in layers})
    errors = dict.fromkeys(layers, 0.0)
    for fold in range(FOLDS):
        out = set(groups[fold::FOLDS])
        fitted = fit(sample([layer for layer in layers if layer.group not in out]))
        errors |= {layer: fitted.error(layer) for layer in layers if layer.group in out}
    return [errors[layer] for layer in layers]


def judge(layers: Sequence[MeasuredLayer], errors: Sequence[float]) -> dict[str, Any]:
    """Root mean square and mean of the errors, of all and by scheme and tokens."""
    by_scheme: dict[str, list[float]] = {}
    by_tokens: dict[str, list[float]] = {}
    for layer, error in zip(layers, errors, strict=True):
        by_scheme.setdefault(layer.scheme, []).append(error)
        by_tokens.setdefault(f"{layer.scheme} {layer.num_tokens}", []).append(error)
    return {
        "all": _of(errors),
        "by_scheme": {name: _of(values) for name, values in by_scheme.items()},
        "by_tokens": {name: _of(values) for name, values in by_tokens.items()},
    }


def _of(errors: Sequence[float]) -> dict[str, float]:
    count = len(errors)
    rms = math.sqrt(math.fsum(error**2 for error in errors) / count)
    return {"count": count, "rms": round(rms, 4), "mean": round(math.fsum(errors) / count, 4)}


def _print(report: dict[str, Any]) -> None:
    print(f"{report['layers']} layers; errors are logarithms of predicted over measured: rms (mean)")
    for name in ("h200_constants", "committed", "left_out"):
        parts = {"all": report[name]["all"], **report[name]["by_scheme"]}
        print(
            f"{name:16}", ", ".join(f"{key} {value['rms']:.3f} ({value['mean']:+.3f})" for key, value in parts.items())
        )
    for key, value in report["left_out"]["by_tokens"].items():
        print(f"  left out, {key:16} {value['rms']:.3f} ({value['mean']:+.3f}), {value['count']} layers")
    print("constants:", ", ".join(f"{key} {value:.4g}" for key, value in report["constants"].items()))
    print("side kernels:", ", ".join(f"{key} {value:.4g}" for key, value in report["side"].items()))


if __name__ == "__main__":
    raise SystemExit(main())
