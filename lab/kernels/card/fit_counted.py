"""Whether counts of executed instructions make the cost model of experts better, by timings of a real card.

    pip install pandas pyarrow scipy
    python lab/kernels/card/fit_counted.py --tables DIR    # no GPU; ten minutes

Fits as fit_experts.py does, of each layer with the layers of other models only, four times: with the model as it is,
and with what `count_experts.py` counted in its place: turns of shared memory, issued instructions as one more unit, and
the overhead of a step by its instructions. Prints the errors; they decide nothing here.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import fit_experts
from measured_experts import read

from sglang.tuning import cost_model
from sglang.tuning.upstream_experts import BLOCKS, LARGE, SMALL

COUNTED = {
    (SMALL["BLOCK_M"], SMALL["BLOCK_N"]): (176.0, 144.0),
    (LARGE["BLOCK_M"], LARGE["BLOCK_N"]): (240.0, 192.0),
    (BLOCKS["BLOCK_M"], BLOCKS["BLOCK_N"]): (868.0, 576.0),
}
"""Instructions of warps and turns of shared memory in a step, by BLOCK_M and BLOCK_N (SGLang 0.5.14, Triton 3.9)."""
TYPICAL = 240.0
"""Instructions of a step that takes `step_overhead`."""
SCHEDULERS = 4
Stock = cost_model._Launch


class Counted(Stock):
    """A launch whose units are asked for what was counted."""

    turns = issued = by_instructions = False

    def _program(self, sharing: float) -> float:
        constants, tile, clock = self.constants, self.tile, self.rates.clock
        instructions, turns = COUNTED[tile["BLOCK_M"], tile["BLOCK_N"]]
        loaded = 2.0 * self.loaded / (cost_model.SHARED_BYTES_PER_CLOCK * clock)
        units = [self._arithmetic(sharing), turns / clock if self.turns else loaded]
        if self.issued:
            units.append(instructions / SCHEDULERS / clock)
        fetched = sharing * self.loaded / self._l2_rate()
        share = instructions / TYPICAL if self.by_instructions else tile["num_warps"] / 4
        busy = max(sharing * max(units), fetched) + constants.step_overhead * share
        waited = (constants.latency + fetched) / max(1, tile["num_stages"] - 1)
        stored = tile["BLOCK_M"] * tile["BLOCK_N"] * self.product.out_bytes * sharing / self._l2_rate()
        return constants.prologue + self.steps * max(busy, waited) + constants.epilogue + stored


class Turns(Counted):
    turns = True


class Issued(Turns):
    issued = True


class ByInstructions(Issued):
    by_instructions = True


VARIANTS: dict[str, Callable[..., object]] = {
    "as it is": Stock,
    "turns of shared memory": Turns,
    "and instructions": Issued,
    "and overhead by instructions": ByInstructions,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True, help="directory with moe/sglang/VERSION/moe_perf.parquet")
    layers = read(parser.parse_args(argv).tables)
    print(f"{len(layers)} layers, each by constants fitted on other models: rms (mean) of log predicted over measured")
    for name, launch in VARIANTS.items():
        cost_model._Launch = launch  # type: ignore[misc, assignment]
        errors = fit_experts.left_out(layers)
        judged = fit_experts.judge(layers, errors)
        parts = {"all": judged["all"], **judged["by_scheme"]}
        shown = ", ".join(f"{key} {value['rms']:.4f} ({value['mean']:+.4f})" for key, value in parts.items())
        print(f"{name:30} {shown}, median {sorted(map(math.fabs, errors))[len(errors) // 2]:.4f}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
