"""Fit the cost model's constants on measured times, and say how well it chooses for shapes that it was not fitted on.

    python lab/kernels/fused_moe_triton/fit_cost_model.py measured.json [--report report.json]

`measured.json` is what `validate_cost_model.py` writes; `measured/` has such files, compressed. For every shape the
constants are fitted on all other shapes, and the tiles that the model then chooses for the one left out are compared
with the fastest measured ones: that is the claim. The constants printed at the end are fitted on everything;
`cost_model.Constants` holds them. No GPU needed; a few minutes.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang.srt.hardware.arch import ArchTraits, arch_by_name
from sglang.srt.kernels.spec import TileRecord
from sglang.tuning.cost_model import DEFAULT, Constants
from sglang.tuning.predict import predict
from sglang.tuning.search_space import KINDS, MoeShape

SOFTNESS = 0.05
"""How much slower (as a logarithm) a prediction may be and still count as chosen: makes the choice differentiable."""
ERROR_WEIGHT = 0.05
"""Of the error of the times themselves, beside that of the choice."""
PRIOR_WEIGHT = 0.004
"""Of the distance from START (squared logarithms): what the times do not decide stays where it was."""
START = Constants(
    bandwidth_share=0.92,
    in_flight=0.3,
    short_rows=0.05,
    matrix_share=0.70,
    l2_share=0.90,
    latency=0.75e-6,
    step_overhead=60e-9,
    prologue=1.2e-6,
    epilogue=0.4e-6,
    issue_share=0.8,
    scale_ops=1.0,
    launch=2.0e-6,
)
"""What was assumed before anything was measured."""
REWRITTEN = frozenset({"mxfp4"})
"""Schemes whose kernels were rewritten after `measured/` was: those times say nothing about the kernels of today."""
FITTED = tuple(name for name in asdict(START) if name != "spill_penalty")
"""No tile that spills is measured."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One tile of one product: what it costs and the seconds that it took."""

    tile: Mapping[str, int]
    record: TileRecord
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """All tiles of one shape with one number of tokens."""

    shape: MoeShape
    num_tokens: int
    timings: Mapping[str, Sequence[Timing]]  # by kind

    def best(self, order: Mapping[str, Sequence[float]] | None = None) -> float:
        """Measured seconds of both products with the tiles that `order` (predicted seconds; else measured) holds for
        the best with one BLOCK_M."""
        totals = []
        for block_m in {t.tile["BLOCK_M"] for t in self.timings["gate_up"]}:
            chosen = [self._best_of(kind, block_m, order) for kind in KINDS]
            if all(chosen):
                totals.append((sum(key for key, _ in chosen if key), sum(seconds for _, seconds in chosen)))
        return min(totals)[1]

    def _best_of(self, kind: str, block_m: int, order: Mapping[str, Sequence[float]] | None) -> tuple[float, float]:
        timings = self.timings[kind]
        keys = order[kind] if order is not None else [t.seconds for t in timings]
        pairs = [(key, t.seconds) for key, t in zip(keys, timings, strict=True) if t.tile["BLOCK_M"] == block_m]
        return min(pairs, default=(0.0, 0.0))


def read_measured(path: Path) -> tuple[ArchTraits, list[Measured]]:
    """The GPU and the points of a file that `validate_cost_model.py` wrote; it may be compressed (.gz)."""
    content = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    points = []
    for entry in content["points"]:
        if entry["shape"]["scheme"] in REWRITTEN:
            continue
        timings = {
            kind: [Timing(tile, to_record(cost), seconds) for tile, cost, seconds in entry["timings"][kind]]
            for kind in KINDS
        }
        points.append(Measured(MoeShape(**entry["shape"]), entry["num_tokens"], timings))
    return arch_by_name(content["product"]), points


def to_record(cost: Sequence[Any]) -> TileRecord:
    smem, registers, spills, stack, mma = cost
    return TileRecord(smem, registers, spills, stack, tuple(mma))


def predictions(point: Measured, arch: ArchTraits, constants: Constants) -> dict[str, list[float]]:
    """Seconds of every timing of a point."""
    return {
        kind: [
            predict(point.shape, kind, dict(t.tile), t.record, point.num_tokens, arch, constants)
            for t in point.timings[kind]
        ]
        for kind in KINDS
    }


def objective(points: Sequence[Measured], arch: ArchTraits, constants: Constants) -> float:
    """Mean logarithm of how much slower the tiles near the predicted best are than the best ones, plus a little of how
    wrong the predicted times are, and of how far the constants are from START."""
    regrets, errors = [], []
    for point in points:
        predicted = predictions(point, arch, constants)
        for kind in KINDS:
            logs = [
                (math.log(p), math.log(t.seconds)) for p, t in zip(predicted[kind], point.timings[kind], strict=True)
            ]
            least, best = min(p for p, _ in logs), min(m for _, m in logs)
            weights = [math.exp((least - p) / SOFTNESS) for p, _ in logs]
            regrets.append(sum(w * (m - best) for w, (_, m) in zip(weights, logs, strict=True)) / sum(weights))
            errors.append(sum((p - m) ** 2 for p, m in logs) / len(logs))
    prior = sum(math.log(getattr(constants, name) / getattr(START, name)) ** 2 for name in FITTED)
    return sum(regrets) / len(regrets) + ERROR_WEIGHT * sum(errors) / len(errors) + PRIOR_WEIGHT * prior


def fit(points: Sequence[Measured], arch: ArchTraits, rounds: int = 12, seed: int = 0) -> Constants:
    """Coordinate search on the logarithms of the constants, with shrinking steps; never worse than START."""
    generator = random.Random(seed)
    best, best_value = START, objective(points, arch, START)
    step = 0.5
    for _ in range(rounds):
        improved = False
        for name in generator.sample(FITTED, len(FITTED)):
            for factor in (math.exp(step), math.exp(-step)):
                candidate = best.replaced({name: _bounded(name, getattr(best, name) * factor)})
                value = objective(points, arch, candidate)
                if value < best_value - 1e-6:
                    best, best_value, improved = candidate, value, True
                    break
        if not improved:
            step /= 2
    return best


def _bounded(name: str, value: float) -> float:
    """Shares of a peak rate are at most 1."""
    return min(value, 1.0) if name.endswith("_share") else value


@dataclass(frozen=True, slots=True)
class Choice:
    """How the model's choice does on one point that it was not fitted on."""

    shape: str
    num_tokens: int
    best_us: float
    chosen_us: float

    @property
    def ratio(self) -> float:
        return self.chosen_us / self.best_us


def judge(points: Sequence[Measured], arch: ArchTraits, constants: Constants) -> list[Choice]:
    choices = []
    for point in points:
        chosen = point.best(predictions(point, arch, constants))
        choices.append(Choice(str(point.shape), point.num_tokens, point.best() * 1e6, chosen * 1e6))
    return choices


def leave_one_out(
    points: Sequence[Measured], arch: ArchTraits, rounds: int, apply: Callable[..., Iterable[Constants]] = map
) -> list[Choice]:
    """Each shape judged with constants fitted on the other shapes. `apply`: as `map`, which fits one after another."""
    shapes = list(dict.fromkeys(point.shape for point in points))
    others = [[point for point in points if point.shape != shape] for shape in shapes]
    fitted = apply(functools.partial(fit, arch=arch, rounds=rounds), others)
    return [
        choice
        for shape, constants in zip(shapes, fitted, strict=True)
        for choice in judge([point for point in points if point.shape == shape], arch, constants)
    ]


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))


def table(choices: Sequence[Choice]) -> list[str]:
    """Chosen over best, a line a shape and a column a number of tokens."""
    shapes, tokens = list(dict.fromkeys(c.shape for c in choices)), sorted({c.num_tokens for c in choices})
    by_point = {(c.shape, c.num_tokens): c.ratio for c in choices}
    width = max(len(shape) for shape in shapes)
    lines = [" " * width + "".join(f"{t:>7}" for t in tokens) + "   mean"]
    for shape in shapes:
        ratios = [by_point[shape, t] for t in tokens if (shape, t) in by_point]
        cells = "".join(f"{by_point[shape, t]:>7.2f}" if (shape, t) in by_point else " " * 7 for t in tokens)
        lines.append(f"{shape:<{width}}{cells}{geometric_mean(ratios):>7.3f}")
    lines.append(f"geometric mean {geometric_mean([c.ratio for c in choices]):.3f}, worst {max(by_point.values()):.2f}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--report", type=Path, help="write the results as JSON")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args(argv)
    arch, points = read_measured(args.measured)
    with ProcessPoolExecutor(args.processes) as pool:
        fit_on_all = pool.submit(fit, points, arch, args.rounds)
        held_out = leave_one_out(points, arch, args.rounds, pool.map)
        constants = fit_on_all.result()
    judged = {
        "unfitted": judge(points, arch, START),
        "held_out": held_out,
        "fitted": judge(points, arch, constants),
        "as_committed": judge(points, arch, DEFAULT),
    }
    titles = ("Not fitted", "Each shape with constants fitted on the others", "Fitted on all", "As committed")
    print("Time of the tiles that the model chooses over the best measured time.")
    for title, choices in zip(titles, judged.values(), strict=True):
        print(f"\n{title}:", *table(choices), sep="\n")
    print(
        "\nFitted on all:",
        *(f"    {name}: float = {value:.3g}" for name, value in asdict(constants).items()),
        sep="\n",
    )
    if args.report:
        report = {
            "product": arch.product,
            **{name: [asdict(choice) for choice in choices] for name, choices in judged.items()},
            "geometric_means": {name: geometric_mean([c.ratio for c in choices]) for name, choices in judged.items()},
            "constants": asdict(constants),
        }
        args.report.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
