"""How far off `explain --shape` is for shapes that nobody gave it: times of SGLang 0.5.14 on the card.

    pip install pandas pyarrow scipy
    python lab/kernels/card/judge_shapes.py --tables DIR [--op linear ...]

Of each op whole shapes are left out in turn (every fifth product's sides, every fifth pair of query and kv heads, every
fifth model's experts, ...), tables and constants are made anew without them, and what the command line would print for
them is compared with the published times. Prints, as markdown, the errors by op, and by size so that a trend shows.
No GPU needed; ten minutes.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fit_attention
import sglang_tables as derive
from cells import Source, Tables, even
from measured_attention import read_decode, read_prompts

from sglang.srt.hardware.arch import arch_by_name
from sglang.tuning.attention_model import Keys, Prompt
from sglang.tuning.grid import Grid
from sglang.tuning.ops import (
    AllReduce,
    CompressedAttention,
    DecodeAttention,
    Experts,
    ExtendAttention,
    GatedDeltaRule,
    HyperConnection,
    LatentAbsorb,
    Linear,
    Op,
)
from sglang.tuning.sglang_times import gated, time_by_sglang

CARD = arch_by_name("rtx-pro-6000-server")
FOLDS, MAX_ROWS = 5, 4000
"""Parts that are left out in turn; rows of each that are judged."""
SCHEMES = {"bfloat16": None, "fp8": "fp8_channel", "nvfp4": "nvfp4", "fp8_block": "fp8_block", "int4_wo": "int4_g32",
           "w4a16_mxfp4": "mxfp4"}  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """`pattern` of the files, columns of a whole shape, the tables that are made anew, and a row as an op. `size`: the
    column by which a trend would show."""

    pattern: str
    shape: tuple[str, ...]
    derive: Callable[[Source], Tables]
    op_of: Callable[[Any], Op]
    size: str
    part: str
    rows: Callable[[Any], Any] = lambda rows: rows


def _even(rows: Any) -> Any:
    rows = even(rows[rows.framework.str.startswith("sglang")])
    rows = rows.assign(release=rows.framework.str.split("/").str[1])
    newest = rows.groupby(["hidden_size", "num_experts", "topk", "moe_dtype"]).release.transform("max")
    return rows[(rows.inter % 32 == 0) & (rows.release == newest)]


def _layer(row: Any) -> Op:
    sizes = (int(row.num_tokens), int(row.num_experts), int(row.topk), int(row.hidden_size), int(row.inter))
    # Release 0.5.10 gave experts without a gate one.
    gate = gated(int(row.num_experts), int(row.topk)) or row.framework == "sglang/0.5.10"
    return Experts(*sizes, SCHEMES[row.moe_dtype], gate=gate)


def _heads(row: Any) -> tuple[int, int, int]:
    return int(row.num_heads), int(row.num_key_value_heads), int(row.head_dim)


def _decode(row: Any) -> Op:
    heads, kv, dim = _heads(row)
    return DecodeAttention(
        Keys(int(row.batch_size), int(row.step) + 1, heads, kv, dim, dim, 1 if row.kv_cache_dtype == "fp8" else 2)
    )


def _extend(row: Any) -> Op:
    heads, kv, dim = _heads(row)
    item = 1 if row.kv_cache_dtype == "fp8" else 2
    return ExtendAttention(Prompt(int(row.batch_size), int(row.isl), heads, kv, dim, dim, 0, 0, item))


def _flashinfer(rows: Any) -> Any:
    return rows[(rows.kernel_source == "flashinfer") & (rows.window_size == 0)]


def _rule(row: Any) -> Op:
    tokens = 1 if row.phase == "generation" else int(row.seq_len)
    return GatedDeltaRule(int(row.batch_size), tokens, int(row.num_v_heads), int(row.num_k_heads))


def _timed_rule(rows: Any) -> Any:
    """Prompts of one token are left out: such a request decodes."""
    rows = rows[rows.kernel_source.str.contains("gated_delta")]
    return rows[(rows.phase == "generation") | (rows.seq_len > 1)]


def _compressed(rate: int) -> Callable[[Any], Op]:
    def op_of(row: Any) -> Op:
        new, scheme = int(row.isl), SCHEMES[row.gemm_type]
        return CompressedAttention(int(row.batch_size), int(row.step) + new, int(row.num_heads), rate, new, scheme)

    return op_of


_GEMM, _MOE = "gemm/*/*/gemm_perf.parquet", "moe/*/*/moe_perf.parquet"
_GENERATION = "attention/sglang/*/generation_attention_perf.parquet"
_CONTEXT = "attention/sglang/*/context_attention_perf.parquet"
_SPARSE = "sparse_attention/sglang/*/dsv4_{}_module_perf.parquet"
TRIALS: dict[str, Trial] = {
    "linear": Trial(
        _GEMM, ("n", "k"), derive.products,
        lambda row: Linear(int(row.m), int(row.n), int(row.k), SCHEMES[row.gemm_dtype]), "m", "gemm_dtype",
        lambda rows: rows[rows.framework.str.startswith("sglang")],
    ),
    "fused_moe, other models": Trial(
        _MOE, ("hidden_size", "num_experts", "topk"), derive.experts, _layer, "num_tokens", "moe_dtype", _even
    ),
    "fused_moe, other shards": Trial(
        _MOE, ("hidden_size", "num_experts", "topk", "inter"), derive.experts, _layer, "num_tokens", "moe_dtype", _even
    ),
    "decode_attention, FlashInfer": Trial(
        _GENERATION, ("num_heads", "num_key_value_heads"), derive.attention, _decode, "step", "head_dim", _flashinfer
    ),
    "extend_attention, FlashInfer": Trial(
        _CONTEXT, ("num_heads", "num_key_value_heads"), derive.attention, _extend, "isl", "head_dim",
        lambda rows: _flashinfer(rows)[lambda r: r.attn_dtype == "bfloat16"],
    ),
    "gated_delta_rule": Trial(
        "linear_attention/sglang/*/gdn_perf.parquet", ("num_v_heads", "num_k_heads"), derive.recurrent, _rule,
        "seq_len", "phase", lambda rows: _timed_rule(rows),
    ),
    "hyper_connection": Trial(
        "mhc/sglang/0.5.14/mhc_module_perf.parquet", ("num_tokens",), derive.residual,
        lambda row: HyperConnection(int(row.num_tokens), int(row.hidden_size)), "num_tokens", "hidden_size",
    ),
    "latent_absorb": Trial(
        "mla_bmm/sglang/*/mla_bmm_perf.parquet", ("num_heads",), derive.residual,
        lambda row: LatentAbsorb(int(row.num_tokens), int(row.num_heads),
                                 *((512, 128) if row.op_name == "mla_gen_pre" else (128, 512))),
        "num_tokens", "op_name", lambda rows: rows[rows.bmm_dtype == "bfloat16"],
    ),
    "compressed_attention, rate 4": Trial(
        _SPARSE.format("csa_generation"), ("num_heads", "batch_size"), derive.compressed, _compressed(4), "step",
        "gemm_type",
    ),
    "compressed_attention, rate 128": Trial(
        _SPARSE.format("hca_generation"), ("num_heads", "batch_size"), derive.compressed, _compressed(128), "step",
        "gemm_type",
    ),
    "compressed_attention, prompts": Trial(
        _SPARSE.format("hca_context"), ("batch_size", "isl"), derive.compressed, _compressed(128), "isl", "gemm_type",
        lambda rows: rows[rows.isl > 1],  # a request with one token decodes
    ),
    "all_reduce": Trial(
        "comm/sglang/*/custom_allreduce_perf.parquet", ("message_size",), derive.collectives,
        lambda row: AllReduce(2 * int(row.message_size), int(row.num_gpus)), "message_size", "num_gpus",
        lambda rows: rows[rows.backend == "sglang_graph"],
    ),
}  # fmt: skip
Judged = tuple[str, float, float]
"""Part, size, logarithm of predicted over measured."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True, help="directory with gemm/, attention/, moe/, ...")
    parser.add_argument("--op", action="append", default=[], help="ops whose name begins so; all if not given")
    args = parser.parse_args(argv)
    print("| op | what | rows | rms | mean | median of the amounts | mean by size: small, ..., large |")
    print("|---|---|---|---|---|---|---|")
    wanted = tuple(args.op)
    for name, trial in TRIALS.items():
        if not wanted or name.startswith(wanted):
            _print(name, list(judged(trial, args.tables)))
    for name, triton in (
        ("decode_attention, Triton", of_triton_decode),
        ("extend_attention, Triton", of_triton_extend),
    ):
        if not wanted or name.startswith(wanted):
            _print(name, list(triton(args.tables)))
    return 0


def judged(trial: Trial, tables: Path) -> Iterator[Judged]:
    """Of every row whose shape was left out."""
    rows = trial.rows(Source(tables).rows(trial.pattern))
    if trial.size == "m":
        rows = rows[(rows.n >= 32) & (rows.k >= 32)]
    shapes = sorted({tuple(shape) for shape in rows[list(trial.shape)].itertuples(index=False)})
    for fold in range(FOLDS):
        out = set(map(tuple, (shape for i, shape in enumerate(shapes) if _part(i) == fold)))
        grids = {name: Grid.from_json(table) for name, table in trial.derive(_source(trial, tables, out)).items()}
        here = rows[[tuple(shape) in out for shape in rows[list(trial.shape)].itertuples(index=False)]]
        for row in here.iloc[:: max(1, len(here) // MAX_ROWS)].itertuples():
            known = time_by_sglang(trial.op_of(row), CARD, grids)
            measured = _measured(row, here)
            if known is not None and measured is not None:
                yield str(getattr(row, trial.part)), float(getattr(row, trial.size)), math.log(known[0] / measured)


def _part(i: int) -> int:
    """Scattered, so that neighbours are not left out together."""
    return (i * 7 + i // FOLDS) % FOLDS


def _measured(row: Any, rows: Any) -> float | None:
    """Seconds; of hyper-connections both parts together, once."""
    if "hc_mult" not in rows.columns:
        return float(row.latency) * 1e-3
    if row.op_name != "pre":
        return None
    same = rows[(rows.num_tokens == row.num_tokens) & (rows.hidden_size == row.hidden_size)]
    return float(same.latency.sum()) * 1e-3 if len(same) == 2 else None


def _source(trial: Trial, tables: Path, out: set[tuple[Any, ...]]) -> Source:
    def keep(pattern: str, rows: Any) -> Any:
        if pattern != trial.pattern:
            return rows
        filtered = rows
        if "inter" in trial.shape:
            filtered = filtered.assign(inter=filtered.inter_size // filtered.moe_tp_size)
        inside = [tuple(shape) in out for shape in filtered[list(trial.shape)].itertuples(index=False)]
        ours = filtered.framework.str.startswith("sglang")
        return rows[[not (a and b) for a, b in zip(inside, ours, strict=True)]]

    return Source(tables, keep)


def of_triton_decode(tables: Path) -> Iterator[Judged]:
    rows = read_decode(tables)
    for row, error in zip(
        rows, fit_attention.left_out(rows, fit_attention.fit_decode, fit_attention.error_of_decode), strict=True
    ):
        if not math.isnan(error):
            yield str(row.keys.head_dim), float(row.keys.context), error


def of_triton_extend(tables: Path) -> Iterator[Judged]:
    rows = read_prompts(tables)
    errors = fit_attention.left_out(rows, lambda r: (fit_attention.fit_prompts(r),), fit_attention.error_of_prompt)
    for row, error in zip(rows, errors, strict=True):
        if not math.isnan(error):
            yield str(row.prompt.head_dim), float(row.prompt.new), error


def _print(name: str, rows: list[Judged]) -> None:
    parts = {"all": rows} | {part: [row for row in rows if row[0] == part] for part in sorted({r[0] for r in rows})}
    if len(parts) == 2:
        del parts[next(part for part in parts if part != "all")]
    for part, of_part in parts.items():
        errors = [error for _, _, error in of_part]
        rms = math.sqrt(math.fsum(e * e for e in errors) / len(errors))
        median = sorted(map(abs, errors))[len(errors) // 2]
        mean = math.fsum(errors) / len(errors)
        print(f"| {name} | {part} | {len(errors):,} | {rms:.3f} | {mean:+.3f} | {median:.3f} | {_trend(of_part)} |")


def _trend(rows: list[Judged], pieces: int = 4) -> str:
    """Means of quarters of the rows, by size."""
    ordered = sorted(rows, key=lambda row: row[1])
    cuts = [len(ordered) * i // pieces for i in range(pieces + 1)]
    quarters = [ordered[a:b] for a, b in itertools.pairwise(cuts) if b > a]
    return ", ".join(f"{math.fsum(row[2] for row in quarter) / len(quarter):+.2f}" for quarter in quarters)


if __name__ == "__main__":
    raise SystemExit(main())
