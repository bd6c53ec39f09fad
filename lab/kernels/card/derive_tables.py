"""Writes the small tables of measured times that `sglang.tuning` ships, from the published tables of the card.

    pip install pandas pyarrow
    python lab/kernels/card/derive_tables.py --tables DIR        # the directory with gemm/, attention/, ...

A table is a grid: the least time of all frameworks at each of a few sizes ("best"), or that of one kernel. Where the
published tables have no row, the neighbour's time stands in, in proportion to the work; `sglang_tables.py` says what
stands in for SGLang's. Run it again after the published tables changed; no GPU needed; two minutes.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from cells import Source, Tables, cells, even, grid, write
from sglang_tables import sglang_tables

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
    "mxfp4": ("w4a16_mxfp4",),
    "mxfp4_mxfp8": ("w4a16_mxfp4", "w4a8_mxfp4_mxfp8"),
}
"""Who rounds activations to eight bits may also leave them as they are; who keeps 16 bits is not compared with the
others."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True, help="directory with gemm/, attention/, moe/, ...")
    parser.add_argument("--out", type=Path, default=table_path("rtx-pro-6000-server"))
    args = parser.parse_args(argv)
    tables: Tables = {}
    source = Source(args.tables)
    for derive in (products, experts, attention, latent, recurrent, residual, collectives, sglang_tables):
        tables |= derive(source)
    write(args.out, tables, SOURCE, "python lab/kernels/card/derive_tables.py --tables DIR")
    print(f"{args.out}: {len(tables)} tables, {args.out.stat().st_size:,} bytes")
    return 0


def products(source: Source) -> Tables:
    """x [m, k] times weights [n, k]."""
    rows = source.rows("gemm/*/*/gemm_perf.parquet")
    rows = rows[rows.m.isin(ROWS) & rows.n.isin(SIDES) & rows.k.isin(SIDES)]
    axes = {"m": ROWS, "n": SIDES, "k": SIDES}
    grids: Tables = {}
    for name, kind in (("bf16", "bfloat16"), ("fp8", "fp8"), ("nvfp4", "nvfp4")):
        times = cells(rows[rows.gemm_dtype == kind], axes)
        grids[f"product/{name}/best"] = grid(times, f"{kind}, least of all", **axes)
    blocks = rows[rows.gemm_dtype == "fp8_block"]
    grids["product/fp8_block/best"] = grid(cells(blocks, axes), "fp8 blocks of 128x128, least of all", **axes)
    return grids


def experts(source: Source) -> Tables:
    """Whole layers of experts without the router's product, even routing, tensor shards."""
    rows = even(source.rows("moe/*/*/moe_perf.parquet"))
    rows = rows[rows.num_tokens.isin(TOKENS)]
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


def attention(source: Source) -> Tables:
    """Decode by sequences times kv heads and context, prompts by sequences times heads and their length, where 4 to 16
    query heads share a kv head."""
    grids: Tables = {}
    decode = source.rows("attention/*/*/generation_attention_perf.parquet")
    prompt = source.rows("attention/*/*/context_attention_perf.parquet")
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


def latent(source: Source) -> Tables:
    """MLA: absorbed decoding, prompts, and the products that absorb."""
    decode = source.rows("mla/*/*/generation_mla_perf.parquet")
    decode = decode.assign(context=decode.step + 1)
    prompt = source.rows("mla/*/*/context_mla_perf.parquet")
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
    absorb = source.rows("mla_bmm/*/*/mla_bmm_perf.parquet")
    absorb = absorb[absorb.bmm_dtype == "bfloat16"]
    for name in sorted(absorb.op_name.unique()):
        times = cells(absorb[absorb.op_name == name], ("num_heads", "num_tokens"))
        grids[f"latent_absorb/{name}"] = grid(times, "least of all", heads=HEADS, tokens=TOKENS)
    return grids


def recurrent(source: Source) -> Tables:
    """Gated delta rule and its convolution, by value heads of 128 on a rank."""
    rows = source.rows("linear_attention/*/*/gdn_perf.parquet")
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


def residual(source: Source) -> Tables:
    """Hyper-connections of four streams: before a block ("pre") and after it ("post")."""
    rows = source.rows("mhc/*/*/mhc_module_perf.parquet")
    grids: Tables = {}
    for part in ("pre", "post"):
        times = cells(rows[rows.op_name == part], ("hidden_size", "num_tokens"))
        grids[f"hyper_connection/{part}"] = grid(times, "least of all", hidden=(4096, 7168), tokens=TOKENS)
    return grids


def collectives(source: Source) -> Tables:
    """By cards and bytes of the whole tensor, of all-gather the gathered one. Rows count elements: NCCL's of one byte
    take the time of half as many of two."""
    sizes = tuple(1 << power for power in range(9, 28))
    custom = source.rows("comm/*/*/custom_allreduce_perf.parquet")
    custom = custom.assign(bytes=custom.message_size * 2)
    nccl = source.rows("comm/nccl/*/nccl_perf.parquet")
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
