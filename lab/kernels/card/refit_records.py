"""Fits the cost model's constants on owners' tables, and says how its error changes.

    python lab/kernels/card/refit_records.py python/sglang/tuning/tables/owners/TABLE.json [...] [--rounds 6]

The tables must be of one product; `scripts/owners_table.py` makes them. What is fitted are the times of Triton's tiled
products, linear layers and experts. The error is the rms of the logarithm of predicted over measured, three times: with
the constants of today, for each size with constants fitted on the other sizes (this is the claim), and fitted on all.
Constants that the times do not decide stay near those of today. They go to `sglang/tuning/cost_model.py` by hand: the
one who does it reads what changes. No GPU; a minute for 300 times.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang.measuring.record_ops import config_of, product_of
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import ArchTraits, arch_by_name
from sglang.srt.hardware.products import product_of_device_name
from sglang.srt.kernels.measured.records import RecordFile, from_bytes
from sglang.srt.kernels.tile_configs import TileConfig
from sglang.srt.layers.triton_ops.linear_tiles import MANY
from sglang.tuning.candidate_times import predicted_with
from sglang.tuning.cost_model import Constants, constants_of
from sglang.tuning.ops import Experts, Linear

PRIOR = 0.004
"""Weight of the distance from the constants of today (squared logarithms)."""
FITTED = tuple(name for name in asdict(Constants()) if name != "spill_penalty")
"""No tile that spills is measured."""
FOLDS = 5


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured product. `size`: its question without the number of tokens."""

    size: str
    op: Linear | Experts
    config: TileConfig
    seconds: float


def samples_of(files: Sequence[RecordFile], arch: ArchTraits) -> list[Sample]:
    """Returns the samples that the cost model predicts."""
    samples = []
    for record in (record for file in files for record in file.records):
        op, config = product_of(record.question), config_of(record.candidate)
        if op is None or config is None or config.variant != MANY or not record.rounds:
            continue
        sample = Sample(f"{record.question.op} {record.question.sizes}", op, config, record.seconds)
        if error_of(sample, arch, constants_of(arch)) is not None:
            samples.append(sample)
    return samples


def error_of(sample: Sample, arch: ArchTraits, constants: Constants) -> float | None:
    """Returns the logarithm of predicted over measured; None if nothing predicts the sample."""
    time = predicted_with(sample.op, arch, sample.config, None, constants)
    if time is None or not math.isfinite(time.seconds) or time.how.startswith("no record"):
        return None
    return math.log(time.seconds / sample.seconds)


def rms(samples: Sequence[Sample], arch: ArchTraits, constants: Constants) -> float:
    """Returns the error of all samples."""
    errors = [error_of(sample, arch, constants) for sample in samples]
    return math.sqrt(sum(error**2 for error in errors if error is not None) / len(errors))


def fit(samples: Sequence[Sample], arch: ArchTraits, rounds: int) -> Constants:
    """Coordinate search on the logarithms of the constants, with shrinking steps; never worse than those of today."""
    start = constants_of(arch)

    def objective(constants: Constants) -> float:
        prior = sum(math.log(getattr(constants, name) / getattr(start, name)) ** 2 for name in FITTED)
        return rms(samples, arch, constants) ** 2 + PRIOR * prior

    best, value, step = start, objective(start), 0.4
    for _ in range(rounds):
        before = value
        for name in FITTED:
            for factor in (math.exp(step), math.exp(-step)):
                changed = getattr(best, name) * factor
                changed = min(changed, 1.0) if name.endswith("_share") else changed
                candidate = best.replaced({name: changed})
                new = objective(candidate)
                if new < value:
                    best, value = candidate, new
                    break
        step /= 2 if value > before * 0.99 else 1
    return best


def held_out(samples: Sequence[Sample], arch: ArchTraits, rounds: int) -> float:
    """Returns the error of each size with constants fitted on the sizes of the other folds."""
    sizes = sorted({sample.size for sample in samples})
    folds = [set(sizes[i::FOLDS]) for i in range(min(FOLDS, len(sizes)))]
    total = 0.0
    for fold in folds:
        inside = [sample for sample in samples if sample.size in fold]
        outside = [sample for sample in samples if sample.size not in fold]
        total += len(inside) * rms(inside, arch, fit(outside, arch, rounds) if outside else constants_of(arch)) ** 2
    return math.sqrt(total / len(samples))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args(argv)
    try:
        files = [from_bytes(path.read_bytes()) for path in options.tables]
        products = {product_of_device_name(file.setting.gpu) for file in files}
        if len(products) > 1 or None in products:
            raise UserError(f"the tables must be of one product that is known; they are of {products}")
        arch = arch_by_name(str(products.pop()))
        samples = samples_of(files, arch)
        if not samples:
            raise UserError("the tables have no product that the cost model predicts")
    except (OSError, ValueError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    today, fitted = constants_of(arch), fit(samples, arch, options.rounds)
    sizes = len({sample.size for sample in samples})
    print(f"{arch.product}: {len(samples)} times of {sizes} sizes; rms of log(predicted / measured):")
    print(f"  constants of today {rms(samples, arch, today):.3f}")
    print(f"  each size with constants fitted on others {held_out(samples, arch, options.rounds):.3f}")
    print(f"  fitted on all {rms(samples, arch, fitted):.3f}")
    for name, value in asdict(fitted).items():
        if not math.isclose(value, getattr(today, name)):
            print(f"    {name}={value:.3g}  # {getattr(today, name):.3g}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
