"""Predicted times of products with quantized weights before and after their tiles changed, on an RTX PRO 6000 Server.

    python benchmark/kernels/card/compare_tiles.py --configs test/srt/kernels/configs [--before TREE]

Before: the tile by rows alone, K in parts up to 64 rows only, and two stages of the large tiles of block-scaled
formats. Prints, as markdown, single products, and the steps of models that changed. TREE: a checkout with other tiles
of experts; prints their layers beside today's, all by today's cost model. No GPU needed.
"""

from __future__ import annotations

import argparse
import runpy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import model_tables

from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.spec import TileRecord
from sglang.srt.layers.moe.fused_moe_triton.capacity import recorded_cost
from sglang.srt.layers.moe.fused_moe_triton.config_format import TilePair, read_content
from sglang.srt.layers.moe.fused_moe_triton.tiles import MoeTiles
from sglang.srt.layers.triton_ops import linear_tiles
from sglang.tuning import predicted_times
from sglang.tuning.best_times import best
from sglang.tuning.ops import Linear
from sglang.tuning.predict import predict
from sglang.tuning.search_space import KINDS, MoeShape
from sglang.tuning.steps import decode_step, time_step, total
from sglang.tuning.tile_files import own_name

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
    parser.add_argument("--before", type=Path, help="a checkout whose tiles of experts to compare with")
    args = parser.parse_args(argv)
    print("\n".join([*products(), "", *steps(args.configs)]))
    if args.before:
        print("\n".join(["", *experts(args.before)]))
    return 0


def products() -> Iterator[str]:
    yield "| product | rows: before / after / best measured, us | " + " | ".join([""] * (len(ROWS) - 1)) + " |"
    yield "|---|" + "---|" * len(ROWS)
    for name, rows, cols, scheme in PRODUCTS:
        cells = []
        for tokens in ROWS:
            op = Linear(tokens, rows, cols, scheme)
            before, after, other = _before(op), _seconds(op), best(op, CARD)
            known = f"{other.served * 1e6:.0f}" if other and scheme != "mxfp8" else "-"
            cells.append(f"{tokens}: {before * 1e6:.0f} / {after * 1e6:.0f} / {known}")
        yield f"| {name}, {scheme} | " + " | ".join(cells) + " |"


LAYERS = (
    ("GPT-OSS-120B on 1", MoeShape(128, 2880, 2880, 4, "mxfp4", True)),
    ("GPT-OSS-120B on 2", MoeShape(128, 1440, 2880, 4, "mxfp4", True)),
    ("DeepSeek-V4-Flash on 4", MoeShape(256, 512, 4096, 6, "mxfp4")),
    ("GPT-OSS-120B on 1", MoeShape(128, 2880, 2880, 4, "mxfp4_mxfp8", True)),
)
BATCHES = (64, 256, 512, 1024, 2048, 4096, 8192)


def experts(before: Path) -> Iterator[str]:
    """Both products of a layer; microseconds."""
    yield "| experts | " + " | ".join(f"{tokens} tokens" for tokens in BATCHES) + " |"
    yield "|---|" + "---|" * len(BATCHES)
    for name, shape in LAYERS:
        cells = []
        for tokens in BATCHES:
            then, now = (_layer(shape, tokens, root) for root in (before, Path(__file__).parents[3]))
            cells.append(f"{then * 1e6:.0f} / {now * 1e6:.0f}")
        yield f"| {name}, {shape.scheme} | " + " | ".join(cells) + " |"


def _layer(shape: MoeShape, tokens: int, tree: Path) -> float:
    pair = _pair_of(shape, tokens, tree)
    seconds = 0.0
    for kind in KINDS:
        tile = getattr(pair, kind)
        record = recorded_cost(shape.product_tile(kind, tile), CARD)
        # A tile that is no longer on record: its registers did not decide.
        record = record if isinstance(record, TileRecord) else TileRecord(25_000, 255, 0, 0, ("m16n8k32 mxf8f6f4 1X",))
        seconds += predict(shape, kind, tile, record, tokens, CARD)
    return seconds


def _pair_of(shape: MoeShape, tokens: int, tree: Path) -> TilePair | MoeTiles:
    """From the tree's file, or from its table, which is data."""
    package = tree / "python" / "sglang" / "srt" / "layers" / "moe" / "fused_moe_triton"
    name = own_name(shape.num_experts, shape.intermediate, shape.hidden, shape.scheme, CARD)
    path = package / "configs" / "triton_3_9_0" / str(name)
    if path.is_file():
        by_tokens = read_content(path).by_tokens
        return by_tokens[min(by_tokens, key=lambda known: (abs(known - tokens), known))]
    table = runpy.run_path(str(package / "tiles.py"))["TILES"]
    rows = table.get("mx_e2m1", table["mx"])
    return next(row for row in rows if tokens * shape.top_k / shape.num_experts <= row.max_rows_per_expert)


def steps(configs: Path) -> Iterator[str]:
    yield "| model | cards | step | before, ms | after, ms | |"
    yield "|---|---|---|---|---|---|"
    for config, name, cards in model_tables.LAYOUTS:
        model, parallel = model_tables.described(configs, config, cards)
        for step in (decode_step(64), decode_step(128), decode_step(256)):
            rows = time_step(model, parallel, step, CARD)
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
    def linear_tile(op: Linear, arch: ArchTraits) -> linear_tiles.ScaledTile:
        kind = predicted_times.kind_of(op.scheme, arch)
        rows = linear_tiles.tile_rows(kind, arch.features)
        tile = next(row.tile for row in rows if op.tokens <= row.max_rows)
        return tile | {"num_stages": 2} if kind == "mx" and op.tokens > 128 else tile

    def num_splits(num_rows: int, *sizes: Any) -> int:
        return linear_tiles.num_splits(num_rows, *sizes) if num_rows <= linear_tiles.SPLIT_ROWS else 1

    return _seconds(op, linear_tile=linear_tile, num_splits=num_splits)


def _seconds(op: Linear, **changed: object) -> float:
    """With the records of the tile with two stages or three, whichever there are: registers are the same, and shared
    memory does not bound these tiles."""
    found = predicted_times._linear_record

    def record(op: Linear, tile: linear_tiles.ScaledTile, arch: ArchTraits) -> TileRecord | None:
        records = (found(op, tile | {"num_stages": stages}, arch) for stages in (tile["num_stages"], 2, 3))
        return next((known for known in records if known is not None), None)

    with mock.patch.multiple(predicted_times, _linear_record=record, **changed):
        time = predicted_times.predicted(op, CARD)
    assert time is not None
    return time.seconds


if __name__ == "__main__":
    raise SystemExit(main())
