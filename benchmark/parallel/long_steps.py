#!/usr/bin/env python3
"""Decode steps behind long contexts of a few layers of DeepSeek-V3's shapes, whose ranks share out heads (TP2), tokens
(DCP2) or requests (DP attention 2): the time of a step and what its kernels take, one layout after the other.

    python benchmark/parallel/long_steps.py --out DIR [--layouts TP2,DCP2] [--length 65536] [--batch-sizes 1,8]
        [--limit 120]

All layouts start side by side on two GPUs. Figures are in DIR/NAME.json. A kernel's time is what passes until the next
one begins.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "evals"), str(HERE.parent / "peers")]

import latent_slice  # noqa: E402
import two_gpus  # noqa: E402
from divided import LAYOUTS, names_of  # noqa: E402
from two_gpus import EMBEDDED, StepTimes, Window  # noqa: E402

OUTPUT_LEN, KERNELS = 24, 12
FLAGS = ("--max-total-tokens", "600000", "--one-way", "--profile")


def show(name: str, found: dict[str, Any]) -> None:
    first, *_ = found.values()
    print(f"\n{name}: {', '.join(f'{ms:.3f}' for ms in first['decode_ms'])} ms a step", flush=True)
    for key in [key for key in found if key.startswith("kernels of a decode step")]:
        print(f"  {key}: {sum(ms for _, _, ms in found[key]):.3f} ms")
        for kernel, count, ms in found[key][:KERNELS]:
            print(f"    {ms * 1e3:7.1f} us in {count:3}: {kernel}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layouts", type=names_of, default=("TP2", "DCP2"))
    parser.add_argument("--length", type=int, default=65536)
    parser.add_argument("--batch-sizes", default="1,8")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    window = Window(args.out.resolve(), args.limit)
    model = str(latent_slice.save_slice(window.out / "slice", EMBEDDED))
    with window.part("sgl-kernel"):
        two_gpus.install_kernels(window)
    flags = ("--batch-sizes", args.batch_sizes, "--lengths", f"{args.length},{OUTPUT_LEN}", *FLAGS)
    started = {name: StepTimes.start(name, window, model, *flags, *LAYOUTS[name]) for name in args.layouts}
    ready = []
    for name, steps in started.items():
        with window.part(f"start, {name}"):
            steps.wait_until_ready(window.end)
            ready.append(name)
    for name in ready:
        with window.part(name):
            show(name, started[name].measure())
    return 1 if window.failures else 0


if __name__ == "__main__":
    sys.exit(main())
