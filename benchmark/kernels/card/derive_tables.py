"""Writes the small tables of measured times that `sglang.tuning` ships, from the published tables of the card.

    pip install pandas pyarrow
    python benchmark/kernels/card/derive_tables.py --tables DIR        # the directory with gemm/, attention/, ...

A table is a grid: the least time of all frameworks at each of a few sizes ("best"), or that of one kernel. Where the
published tables have no row, the time of another framework stands in, times the ratio of the two elsewhere, or the
neighbour's time in proportion to the work. Run it again after the published tables changed; no GPU needed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang.tuning.grid import code_of
from sglang.tuning.measured import table_path

SOURCE = (
    "ai-dynamo/aiconfigurator (Apache-2.0), systems/data/rtx_pro_6000_server, snapshot of August 2026:"
    " NVIDIA RTX PRO 6000 Blackwell Server Edition; figures only"
)
ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 32768)
SIDES = (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 7168, 8192, 12288, 16384, 65536)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
PROMPTS = (1, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
FAMILIES = (
    (7168, 384, 8), (7168, 256, 8), (4096, 256, 6), (2880, 128, 4), (2048, 256, 8), (2048, 128, 8), (6144, 256, 8),
    (3072, 256, 8), (4096, 512, 10), (4096, 256, 8), (2816, 128, 8),
)  # fmt: skip
"""(hidden, experts, top-k) of the models that people run on the card."""
EXPERT_TYPES: Mapping[str, tuple[str, ...]] = {
    "bf16": ("bfloat16",),
    "fp8": ("fp8", "fp8_block"),
    "int4": ("int4_wo",),
    "nvfp4": ("nvfp4",),
    "mxfp4": ("w4a16_mxfp4", "w4a8_mxfp4_mxfp8"),
}

Cells = dict[tuple[int, ...], float]
"""Sizes -> microseconds."""
Tables = dict[str, dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True, help="directory with gemm/, attention/, moe/, ...")
    parser.add_argument("--out", type=Path, default=table_path("rtx-pro-6000-server"))
    args = parser.parse_args(argv)
    tables: Tables = {}
    for derive in (products, experts, attention, flashinfer, latent, recurrent, residual, collectives):
        tables |= derive(args.tables)
    write(args.out, tables)
    print(f"{args.out}: {len(tables)} tables, {args.out.stat().st_size:,} bytes")
    return 0


def write(path: Path, tables: Tables) -> None:
    command = "python benchmark/kernels/card/derive_tables.py --tables DIR"
    lines = [f" {json.dumps(name)}: {json.dumps(table, separators=(',', ':'))}" for name, table in tables.items()]
    head = f' "source": {json.dumps(SOURCE)},\n "made by": {json.dumps(command)},\n "unit": "40 * log2(microseconds)"'
    path.write_text("{\n" + head + ',\n "tables": {\n' + ",\n".join(lines) + "\n }\n}\n")


def read(tables: Path, pattern: str) -> Any:
    """The rows of all files, with `framework` from their paths ("sglang/0.5.14")."""
    import pandas  # a tool's dependency

    paths = sorted(tables.glob(pattern))
    if not paths:
        raise FileNotFoundError(
            f"{tables} holds no {pattern}: --tables names the directory with gemm/, attention/, ..."
        )
    parts = [pandas.read_parquet(path).assign(framework="/".join(path.parts[-3:-1])) for path in paths]
    return pandas.concat(parts, ignore_index=True)


def cells(rows: Any, columns: Sequence[str]) -> Cells:
    """The least time for each combination of sizes."""
    least = rows.groupby(list(columns)).latency.min()
    return {tuple(int(v) for v in (key if isinstance(key, tuple) else (key,))): t * 1e3 for key, t in least.items()}


def means(rows: Any, columns: Sequence[str]) -> Cells:
    """The geometric mean for each combination of sizes."""
    import numpy  # comes with pandas

    logs = numpy.log(rows.latency).groupby([rows[column] for column in columns]).mean()
    return {tuple(int(v) for v in key): math.exp(log) * 1e3 for key, log in logs.items()}


def grid(times: Cells, what: str, **axes: Sequence[int]) -> dict[str, Any]:
    """Of the given axes. A missing time is that of the nearest smaller sizes, in proportion to the product of all; of
    the nearest larger ones where there are none."""
    if not times:
        raise ValueError(f"no rows for {what}")
    codes = [code_of(_time(times, sizes)) for sizes in itertools.product(*axes.values())]
    return {"what": what, "axes": {name: list(axis) for name, axis in axes.items()}, "codes": codes}


def _time(times: Cells, sizes: tuple[int, ...]) -> float:
    if sizes in times:
        return times[sizes]

    def distance(other: tuple[int, ...]) -> float:
        return sum(abs(math.log(a / b)) * (1 if b <= a else 3) for a, b in zip(sizes, other, strict=True))

    nearest = min(times, key=distance)
    work = math.prod(a / b for a, b in zip(sizes, nearest, strict=True))
    return times[nearest] * max(1.0, work)


def products(tables: Path) -> Tables:
    """x [m, k] times weights [n, k]: SGLang's kernels, and the best of all."""
    rows = read(tables, "gemm/*/*/gemm_perf.parquet")
    rows = rows[rows.m.isin(ROWS) & rows.n.isin(SIDES) & rows.k.isin(SIDES)]
    axes = {"m": ROWS, "n": SIDES, "k": SIDES}
    grids: Tables = {}
    for name, kind in (("bf16", "bfloat16"), ("fp8", "fp8"), ("nvfp4", "nvfp4")):
        of_kind = rows[rows.gemm_dtype == kind]
        first = cells(of_kind[of_kind.framework.str.startswith("sglang")], axes)
        second = cells(of_kind[of_kind.framework.str.startswith("vllm")], axes)
        grids[f"product/{name}/sglang"] = grid(completed(first, second), f"{kind}, SGLang 0.5.14", **axes)
        grids[f"product/{name}/best"] = grid(cells(of_kind, axes), f"{kind}, least of all", **axes)
    blocks = rows[rows.gemm_dtype == "fp8_block"]
    grids["product/fp8_block/best"] = grid(cells(blocks, axes), "fp8 blocks of 128x128, least of all", **axes)
    return grids


def completed(first: Cells, second: Cells) -> Cells:
    """`ours`, and where it has no row the time of `others` times the mean ratio of the two at the same number of rows
    with weights of about the same size."""
    ratios: dict[tuple[int, int], list[float]] = {}

    def group(key: tuple[int, ...]) -> tuple[int, int]:
        return key[0], round(math.log2(key[1] * key[2]) / 2)

    for key in first.keys() & second.keys():
        ratios.setdefault(group(key), []).append(math.log(first[key] / second[key]))
    means = {key: math.exp(math.fsum(logs) / len(logs)) for key, logs in ratios.items()}
    return {key: time * means.get(group(key), 1.0) for key, time in second.items()} | first


def experts(tables: Path) -> Tables:
    """Whole layers of experts without the router's product, even routing, tensor shards."""
    rows = read(tables, "moe/*/*/moe_perf.parquet")
    rows = rows[(rows.distribution == "balanced") & (rows.moe_ep_size == 1)]
    rows = rows[rows.num_tokens.isin(TOKENS)].assign(inter=rows.inter_size // rows.moe_tp_size)
    grids: Tables = {}
    for hidden, count, top_k in FAMILIES:
        family = rows[(rows.hidden_size == hidden) & (rows.num_experts == count) & (rows.topk == top_k)]
        for name, types in EXPERT_TYPES.items():
            times = cells(family[family.moe_dtype.isin(types)], ("inter", "num_tokens"))
            inters = sorted({inter for inter, _ in times if inter >= 32})
            if inters:
                key = f"experts/{name}/{hidden}x{count}x{top_k}"
                grids[key] = grid(times, ", ".join(types), inter=inters, tokens=TOKENS)
    return grids


def attention(tables: Path) -> Tables:
    """Decode by sequences times kv heads and context, prompts by sequences times heads and their length, where 4 to 16
    query heads share a kv head."""
    grids: Tables = {}
    decode = read(tables, "attention/*/*/generation_attention_perf.parquet")
    prompt = read(tables, "attention/*/*/context_attention_perf.parquet")
    for rows in (decode, prompt):
        rows["shared"] = rows.num_heads // rows.num_key_value_heads
    decode = decode[(decode.window_size == 0) & decode.shared.between(4, 16)]
    decode = decode.assign(streams=decode.batch_size * decode.num_key_value_heads, context=decode.step + 1)
    prompt = prompt[(prompt.window_size == 0) & prompt.shared.between(4, 16) & (prompt.attn_dtype == "bfloat16")]
    prompt = prompt.assign(streams=prompt.batch_size * prompt.num_heads)
    for dim, (kind, short) in itertools.product((64, 128, 192, 256), (("bfloat16", "bf16"), ("fp8", "fp8"))):
        rows = decode[(decode.head_dim == dim) & (decode.kv_cache_dtype == kind)]
        times = cells(rows, ("streams", "context"))
        grids[f"decode_attention/{dim}/{short}"] = grid(
            times, "least of all", streams=(*BATCHES, 1024, 2048), context=CONTEXTS
        )
        rows = prompt[(prompt.head_dim == dim) & (prompt.kv_cache_dtype == kind)]
        times = cells(rows, ("streams", "isl"))
        grids[f"extend_attention/{dim}/{short}"] = grid(times, "least of all", streams=BATCHES, tokens=PROMPTS)
    return grids


def flashinfer(tables: Path) -> Tables:
    """What SGLang takes for full attention with head dims of 128 and 256: means over heads, of query heads with a kv
    head of their own ("alone") and of those that share one."""
    decode = read(tables, "attention/sglang/*/generation_attention_perf.parquet")
    prompt = read(tables, "attention/sglang/*/context_attention_perf.parquet")
    decode = decode.assign(context=decode.step + 1, streams=decode.batch_size * decode.num_key_value_heads)
    prompt = prompt.assign(streams=prompt.batch_size * prompt.num_heads)
    axes = {
        "decode": {"streams": powers(15), "context": powers(17, 1)},
        "extend": {"streams": powers(13), "isl": (1, 16, 32, 64, *PROMPTS[3:], 1536, 3072, 6144, 12288)},
    }
    grids: Tables = {}
    for op, rows in (("decode", decode), ("extend", prompt)):
        rows = rows[rows.kernel_source == "flashinfer"]
        alone = rows.num_heads == rows.num_key_value_heads
        for dim, (kind, short), sharing in itertools.product(
            (128, 256), (("bfloat16", "bf16"), ("fp8", "fp8")), ("alone", "shared")
        ):
            part = rows[(rows.head_dim == dim) & (rows.kv_cache_dtype == kind) & (alone == (sharing == "alone"))]
            sizes = {name: tuple(sorted(axis)) for name, axis in axes[op].items()}
            times = means(part, tuple(sizes))
            grids[f"{op}_attention/{dim}/{short}/sglang/{sharing}"] = grid(times, "FlashInfer, SGLang 0.5.14", **sizes)
    return grids


def powers(last: int, first: int = 0) -> tuple[int, ...]:
    """Of two."""
    return tuple(1 << power for power in range(first, last + 1))


def latent(tables: Path) -> Tables:
    """MLA: absorbed decoding, prompts, and the products that absorb."""
    decode = read(tables, "mla/*/*/generation_mla_perf.parquet")
    decode = decode.assign(context=decode.step + 1)
    prompt = read(tables, "mla/*/*/context_mla_perf.parquet")
    grids: Tables = {}
    for kind, short in (("bfloat16", "bf16"), ("fp8", "fp8")):
        times = cells(decode[decode.kv_cache_dtype == kind], ("num_heads", "batch_size", "context"))
        grids[f"decode_attention/latent/{short}"] = grid(
            times, "least of all", heads=HEADS, batch=BATCHES, context=CONTEXTS
        )
    prompt = prompt.assign(streams=prompt.batch_size * prompt.num_heads)
    grids["extend_attention/latent/bf16"] = grid(
        cells(prompt, ("streams", "isl")), "least of all", streams=BATCHES, tokens=PROMPTS
    )
    absorb = read(tables, "mla_bmm/*/*/mla_bmm_perf.parquet")
    absorb = absorb[absorb.bmm_dtype == "bfloat16"]
    for name in sorted(absorb.op_name.unique()):
        times = cells(absorb[absorb.op_name == name], ("num_heads", "num_tokens"))
        grids[f"latent_absorb/{name}"] = grid(times, "least of all", heads=HEADS, tokens=TOKENS)
    return grids


def recurrent(tables: Path) -> Tables:
    """Gated delta rule and its convolution, by value heads of 128 on a rank."""
    rows = read(tables, "linear_attention/*/*/gdn_perf.parquet")
    grids: Tables = {}
    heads = (4, 8, 16, 32, 64)
    for name, kernel in (("gated_delta_rule", "gated_delta"), ("causal_conv1d", "conv1d")):
        of_op = rows[rows.kernel_source.str.contains(kernel)]
        times = cells(of_op[of_op.phase == "generation"], ("num_v_heads", "batch_size"))
        grids[f"{name}/decode"] = grid(times, "least of all", heads=heads, batch=BATCHES)
        alone = of_op[(of_op.phase == "context") & (of_op.batch_size == 1)]
        grids[f"{name}/prompt"] = grid(
            cells(alone, ("num_v_heads", "seq_len")), "least of all", heads=heads, tokens=PROMPTS
        )
    return grids


def residual(tables: Path) -> Tables:
    """Hyper-connections of four streams: before a block ("pre") and after it ("post")."""
    rows = read(tables, "mhc/*/*/mhc_module_perf.parquet")
    grids: Tables = {}
    for part in ("pre", "post"):
        times = cells(rows[rows.op_name == part], ("hidden_size", "num_tokens"))
        grids[f"hyper_connection/{part}"] = grid(times, "least of all", hidden=(4096, 7168), tokens=TOKENS)
    return grids


def collectives(tables: Path) -> Tables:
    """By cards and bytes of the whole tensor, of all-gather the gathered one. Rows count elements: NCCL's of one byte
    take the time of half as many of two."""
    sizes = tuple(1 << power for power in range(9, 28))
    custom = read(tables, "comm/*/*/custom_allreduce_perf.parquet")
    custom = custom.assign(bytes=custom.message_size * 2)
    nccl = read(tables, "comm/nccl/*/nccl_perf.parquet")
    nccl = nccl[(nccl.nccl_dtype == "half")]
    nccl = nccl.assign(bytes=nccl.message_size * 2)
    reduce = nccl[nccl.op_name == "all_reduce"]
    columns = ("num_gpus", "bytes")
    axes = {"cards": (2, 4, 8), "bytes": sizes}
    nccl_reduce = cells(reduce, columns)
    other = cells(custom, columns)
    least = {key: min(t[key] for t in (nccl_reduce, other) if key in t) for key in nccl_reduce.keys() | other.keys()}
    return {
        "all_reduce/nccl": grid(nccl_reduce, "NCCL 2.29.2", **axes),
        "all_reduce/best": grid(least, "least of NCCL and custom kernels", **axes),
        "all_gather/nccl": grid(cells(nccl[nccl.op_name == "all_gather"], columns), "NCCL 2.29.2", **axes),
    }


if __name__ == "__main__":
    raise SystemExit(main())
