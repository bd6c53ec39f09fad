"""Writes a sample of the published rows that the tests recompute: `measured_rows.json`.

pip install pandas pyarrow
python lab/kernels/card/take_sample.py --tables DIR
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

from cells import Source
from derive_tables import ROWS, SIDES
from measured_attention import read_decode, read_prompts, sample

OUT = Path(__file__).with_name("measured_rows.json")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True)
    tables = parser.parse_args(argv).tables
    products = Source(tables).rows("gemm/sglang/*/gemm_perf.parquet")
    on_grid = products.m.isin(ROWS) & products.n.isin(SIDES) & products.k.isin(SIDES)
    large = (products.n >= 128) & (products.k >= 128) & (products.n <= 65536) & (products.k <= 65536)
    reduces = Source(tables).rows("comm/vllm/*/custom_allreduce_perf.parquet")
    reduces = reduces[reduces.backend == "vllm_graph"]
    columns = ["gemm_dtype", "m", "n", "k", "latency"]
    parts = {
        "decode": [[*astuple(row.keys), row.seconds] for row in sample(read_decode(tables), 150)],
        "prompts": [[*astuple(row.prompt), row.q_item, row.seconds] for row in sample(read_prompts(tables), 120)],
        "products on the grid": _rows(products[on_grid], columns, 60),
        "products between": _rows(products[~on_grid & large], columns, 120),
        "all-reduce elements": _rows(reduces, ["num_gpus", "message_size", "latency"], 24),
    }
    body = [
        f" {json.dumps(name)}: [\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]"
        for name, rows in parts.items()
    ]
    OUT.write_text("{\n" + ",\n".join(body) + "\n}\n")
    return 0


def _rows(table, columns: list[str], count: int) -> list[list[object]]:  # type: ignore[no-untyped-def]
    """Latencies become seconds."""
    every = table[columns].sort_values(columns).values.tolist()
    return [[*row[:-1], row[-1] * 1e-3] for row in sample(every, count)]


if __name__ == "__main__":
    raise SystemExit(main())
