"""What an RTX PRO 6000 Server reached in anyone's hands, found in the published tables.

    pip install pandas pyarrow
    python lab/kernels/card/ceilings.py --tables DIR        # the directory with gemm/, attention/, comm/

Prints each figure of `sglang.tuning.rates.CEILINGS["rtx-pro-6000-server"]` with the row that it is from. Caches and
weights of less than 384 MB are passed over for reads: replays find part of them in the L2.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cells import Source

COLD = 384e6


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True)
    tables = parser.parse_args(argv).tables
    for name, value, row in (*products(tables), *reads(tables), *all_reduces(tables)):
        print(f"{name:22} {value:10.2f}   {row}")
    return 0


Found = Iterator[tuple[str, float, str]]


def products(tables: Path) -> Found:
    """TFLOP/s."""
    rows = Source(tables).rows("gemm/*/*/gemm_perf.parquet")
    rows["rate"] = 2e-9 * rows.m * rows.n * rows.k / rows.latency
    for kind, of_kind in rows.groupby("gemm_dtype"):
        best = of_kind.loc[of_kind.rate.idxmax()]
        yield (
            f"{kind}, TFLOP/s",
            float(best.rate),
            f"{best.framework} {best.kernel_source} {best.m} x {best.n} x {best.k}",
        )


def reads(tables: Path) -> Found:
    """TB/s, of attention whose keys and values are equally wide, and of FP8 weights."""
    rows = Source(tables).rows("attention/*/*/generation_attention_perf.parquet")
    rows = rows[(rows.window_size == 0) & (rows.head_dim != 192)]
    item = rows.kv_cache_dtype.map({"bfloat16": 2, "fp8": 1})
    yield _read(
        "decode attention, TB/s",
        rows,
        rows.batch_size * (rows.step + 1) * rows.num_key_value_heads * rows.head_dim * 2 * item,
    )
    rows = Source(tables).rows("gemm/*/*/gemm_perf.parquet")
    rows = rows[(rows.m <= 16) & (rows.gemm_dtype == "fp8")]
    yield _read("fp8 weights, TB/s", rows, rows.n * rows.k)


def _read(name: str, rows: Any, size: Any) -> tuple[str, float, str]:
    rows = rows.assign(rate=size / rows.latency * 1e-9)[size > COLD]
    best = rows.loc[rows.rate.idxmax()]
    columns = ("batch_size", "step", "num_heads", "num_key_value_heads", "head_dim", "m", "n", "k")
    return name, float(best.rate), " ".join([best.framework, *(f"{c}={best[c]}" for c in columns if c in best)])


def all_reduces(tables: Path) -> Found:
    """Microseconds, up to 16 KiB."""
    rows = Source(tables).rows("comm/*/*/custom_allreduce_perf.parquet")
    rows = rows[rows.message_size * 2 <= 16384]
    for cards, of_count in rows.groupby("num_gpus"):
        best = of_count.loc[of_count.latency.idxmin()]
        what = f"{best.framework} {best.kernel_source}, {best.message_size * 2} bytes"
        yield f"all-reduce, {cards} cards, us", float(best.latency) * 1e3, what


if __name__ == "__main__":
    raise SystemExit(main())
