"""Predicted times of products with quantized weights before and after their tiles changed, on an RTX PRO 6000 Server.

    python benchmark/kernels/card/compare_tiles.py --configs test/srt/kernels/configs

Before: the tile by rows alone, K in parts up to 64 rows only, and two stages of the large tiles of block-scaled
formats. Prints, as markdown, single products, and the steps of models that changed. No GPU needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from unittest import mock

import model_tables

from sglang.srt.layers.triton_ops import linear_tiles
from sglang.tuning import predicted_times
from sglang.tuning.best_times import best
from sglang.tuning.ops import Linear
from sglang.tuning.steps import decode_step, time_step, total

CARD = model_tables.CARD
PRODUCTS = (
    ("GLM-4.7-FP8 on 8: q, k, v", 1792, 5120, "fp8_channel"),
    ("DeepSeek-V3.2: latents", 2112, 7168, "fp8_block"),
    ("DeepSeek-V4-Flash on 8", 2048, 4096, "fp8_block"),
    ("a layer of 6,144 x 4,096", 6144, 4096, "nvfp4"),
    ("a layer of 24,576 x 4,096", 24576, 4096, "nvfp4"),
    ("a layer of 24,576 x 4,096", 24576, 4096, "mxfp8"),
)
ROWS = (96, 128, 256, 512, 1024, 8192)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=Path, required=True, help="directory of NAME.json")
    args = parser.parse_args(argv)
    print("\n".join([*products(), "", *steps(args.configs)]))
    return 0


def products() -> Iterator[str]:
    yield "| product | rows: before / after / best measured, us | " + " | ".join([""] * (len(ROWS) - 1)) + " |"
    yield "|---|" + "---|" * len(ROWS)
    for name, rows, cols, scheme in PRODUCTS:
        cells = []
        for tokens in ROWS:
            op = Linear(tokens, rows, cols, scheme)
            before, after, other = _before(op), predicted_times.predicted(op, CARD), best(op, CARD)
            assert after is not None
            known = f"{other.served * 1e6:.0f}" if other and scheme != "mxfp8" else "-"
            cells.append(f"{tokens}: {before * 1e6:.0f} / {after.seconds * 1e6:.0f} / {known}")
        yield f"| {name}, {scheme} | " + " | ".join(cells) + " |"


def steps(configs: Path) -> Iterator[str]:
    yield "| model | cards | step | before, ms | after, ms | |"
    yield "|---|---|---|---|---|---|"
    for config, name, cards in model_tables.LAYOUTS:
        model, serving = model_tables.described(configs, config, cards)
        for step in (decode_step(64), decode_step(128), decode_step(256)):
            rows = time_step(model, serving, step, CARD)
            after = total(rows).seconds
            before = after + sum(
                row.count * (_before(row.op) - row.ours.seconds)
                for row in rows
                if row.ours and isinstance(row.op, Linear) and row.op.scheme
            )
            if before > 1.01 * after:
                times = f"{before * 1e3:.1f} | {after * 1e3:.1f} | {after / before - 1:.1%}"
                yield f"| {name} | {cards} | {step} | {times} |"


def _before(op: Linear) -> float:
    def tile_for(kind: str, num_rows: int, features: Collection[str] = (), *sizes: int) -> linear_tiles.ScaledTile:
        tile = linear_tiles.tile_for(kind, num_rows, features)
        return tile | {"num_stages": 2} if kind == "mx" and num_rows > 128 else tile

    def num_splits(num_rows: int, *sizes: object) -> int:
        return linear_tiles.num_splits(num_rows, *sizes) if num_rows <= linear_tiles.SPLIT_ROWS else 1  # type: ignore[arg-type]

    def record(op: Linear, tile: linear_tiles.ScaledTile, arch: object) -> object:
        """Two stages take as many registers as three, and less shared memory, which does not bound these tiles."""
        return found(op, tile, arch) or found(op, tile | {"num_stages": 3}, arch)  # type: ignore[arg-type]

    found = predicted_times._linear_record
    changed = {"tile_for": tile_for, "num_splits": num_splits, "_linear_record": record}
    with mock.patch.multiple(predicted_times, **changed):
        time = predicted_times.predicted(op, CARD)
    assert time is not None
    return time.seconds


if __name__ == "__main__":
    raise SystemExit(main())
