"""Tables of what SGLang 0.5.14 takes on the card, for `explain --shape`: sizes that it was not timed with are
drawn from the others, and from what other frameworks take there."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from cells import Cells, Source, Tables, cells, even, filled, means, smoothed

from sglang.tuning import replays
from sglang.tuning.sglang_times import gated

SIDES = (
    32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 10240, 12288, 16384,
    51200, 65536,
)  # fmt: skip
ROWS = (
    1, 2, 4, 8, 16, 17, 32, 33, 64, 65, 96, 128, 129, 192, 193, 256, 257, 512, 513, 768, 1024, 1025, 1536, 2048, 2049,
    3072, 4096, 4097, 8192, 16384, 32768,
)  # fmt: skip
"""Times jump where a block of rows is full."""
LAYER_TOKENS = (
    1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144,
    8192, 12288, 16384,
)  # fmt: skip
GROUPS = (1, 2, 3, 4, 8, 16, 32, 48, 64, 128)
PROMPTS = (1, 16, 32, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 10240, 12288, 16384)
EXPERT_FORMS = {"bf16": "bfloat16", "fp8": "fp8_block", "int4": "int4_wo", "nvfp4": "nvfp4", "mxfp4": "w4a16_mxfp4"}
CHUNK = 8192
"""Keys that DeepSeek-V4's attention of prompts takes at a time."""


def sglang_tables(source: Source) -> Tables:
    tables: Tables = {}
    for derive in (products, experts, attention, recurrent, residual, compressed, collectives):
        tables |= derive(source)
    return tables


def powers(last: int, first: int = 0) -> tuple[int, ...]:
    """Of two."""
    return tuple(1 << power for power in range(first, last + 1))


# --- products ---------------------------------------------------------------------------------------------------------


def products(source: Source) -> Tables:
    """x [m, k] times weights [n, k]. bf16 is cuBLAS everywhere, so that vLLM's times stand in where there are none."""
    rows = source.rows("gemm/*/*/gemm_perf.parquet")
    rows = rows[rows.m.isin(ROWS)]
    forms = (("bf16", "bfloat16", ("vllm",)), ("fp8", "fp8", ("", "vllm")), ("nvfp4", "nvfp4", ("", "vllm", "trtllm")))
    grids: Tables = {}
    for form, kind, others in forms:
        of_kind = rows[rows.gemm_dtype == kind]
        sides = tuple(side for side in SIDES if form != "nvfp4" or side >= 128)
        times = completed(of_kind, form, sides, others)
        axes = {"m": ROWS, "n": sides, "k": sides}

        def base(m: float, n: float, k: float, form: str = form) -> float:
            return replays.product(form, m, n, k)

        what = f"{kind}, SGLang 0.5.14, completed by {' and '.join(name for name in others if name) or 'itself'}"
        grids[f"product/{form}/sglang"] = filled(times, what, base, (3.0, 2.0, 2.0), **axes)
    return grids


def completed(rows: Any, form: str, sides: Sequence[int], others: Sequence[str]) -> Cells:
    """SGLang's times. Of weights that it was not timed with: the mean of what it takes in multiples of each of `others`
    ("": of the least possible) with weights of about the same sides."""
    import numpy

    columns = ["n", "k", "m"]
    of = {
        name: numpy.log(rows[rows.framework.str.startswith(name)].groupby(columns).latency.min().unstack("m"))
        for name in ("sglang", *filter(None, others))
    }
    first = of["sglang"].reindex(columns=list(ROWS))
    known = [pair for pair in first.index if pair[0] in sides and pair[1] in sides]
    missing = [pair for pair in itertools.product(sides, sides) if pair not in set(known)]
    bases = {name: _bases(name, of, form, ROWS, [*known, *missing]) for name in others}
    whole = [i for i, pair in enumerate([*known, *missing]) if all(b[i] is not None for b in bases.values())]
    train = [i for i in whole if i < len(known)]
    times: Cells = {}
    for pair in known:
        times |= {(m, *pair): float(numpy.exp(t)) * 1e3 for m, t in zip(ROWS, first.loc[pair], strict=True) if t == t}
    at = numpy.log2([*known, *missing]).astype(float)
    values = numpy.array([first.loc[known[i]].to_numpy() for i in train])
    wanted = [i for i in whole if i >= len(known)]
    if not wanted:
        return times
    logs = numpy.mean(
        [_drawn(at, train, wanted, values, numpy.array([base[i] for i in (*train, *wanted)]), bool(name))
         for name, base in bases.items()], axis=0,
    )  # fmt: skip
    for i, row in zip(wanted, logs, strict=True):
        pair = missing[i - len(known)]
        times |= {(m, *pair): float(numpy.exp(t)) * 1e3 for m, t in zip(ROWS, row, strict=True)}
    return times


def _drawn(at: Any, train: Sequence[int], wanted: Sequence[int], values: Any, base: Any, measured: bool) -> Any:
    ratios = values - base[: len(train)]
    return base[len(train) :] + smoothed(at[train], ratios, at[wanted], (2.0, 2.0), 0.1 if measured else 0.02)


def _bases(name: str, of: Mapping[str, Any], form: str, rows: Sequence[int], pairs: Sequence[Any]) -> list[Any]:
    """A row of logarithms for each pair of sides; None where there is none."""
    import numpy

    if not name:
        return [numpy.log([replays.product(form, m, n, k) * 1e3 for m in rows]) for n, k in pairs]
    table = of[name].reindex(columns=list(rows)).dropna()
    have = set(table.index)
    return [table.loc[pair].to_numpy() if pair in have else None for pair in pairs]


# --- experts ----------------------------------------------------------------------------------------------------------


SAME_KERNEL = ("vllm", "trtllm")
"""Frameworks with FlashInfer's CUTLASS experts, which SGLang takes for NVFP4 and for experts without a gate, or with
Marlin's: the first one's times are within 3% of SGLang's for NVFP4 and within 1% in 16 bits without a gate."""
COMPLETED = ("nvfp4", "mxfp4", "bf16")
"""Forms whose models are completed by those: of bf16 only experts without a gate, as SGLang has a kernel of its own."""


def experts(source: Source) -> Tables:
    """Whole layers without the router's product, even routing, tensor shards: of each model that SGLang was timed with,
    or a framework with the same kernel. Release 0.5.10 gave experts without a gate one."""
    rows = even(source.rows("moe/*/*/moe_perf.parquet"))
    rows = rows.assign(release=rows.framework.str.split("/").str[1])
    rows = rows[rows.inter % 32 == 0]  # other rows are not aligned: they take ten times as long
    rows = rows[
        [gated(e, k) or r != "0.5.10" for e, k, r in zip(rows.num_experts, rows.topk, rows.release, strict=True)]
    ]
    others, rows = rows, rows[rows.framework.str.startswith("sglang")]
    grids: Tables = {}
    for form, kind in EXPERT_FORMS.items():
        of_kind = rows[rows.moe_dtype == kind]
        if form in COMPLETED:
            grids |= _of_others(form, others[others.moe_dtype == kind], of_kind)
        for (hidden, count, top_k), family in of_kind.groupby(["hidden_size", "num_experts", "topk"]):
            newest = family[family.release == family.release.max()]
            times = cells(newest, ("inter", "num_tokens"))
            older = cells(family, ("inter", "num_tokens"))
            times = older | times

            def base(inter: float, tokens: float, sizes: Any = (form, count, top_k, hidden)) -> float:
                form_, experts_, top_k_, hidden_ = sizes
                return replays.expert_layer(form_, tokens, experts_, top_k_, hidden_, inter, matrices(experts_, top_k_))

            axes = {"inter": tuple(sorted({inter for inter, _ in times})), "tokens": LAYER_TOKENS}
            what = f"{kind}, SGLang {family.release.max()}"
            grids[f"experts/{form}/{hidden}x{count}x{top_k}/sglang"] = filled(times, what, base, (2.0, 2.0), **axes)
    return grids


def matrices(num_experts: int, top_k: int) -> int:
    return 3 if gated(num_experts, top_k) else 2


def _of_others(form: str, others: Any, ours: Any) -> Tables:
    """Of models that SGLang was not timed with: the time of a framework with the same kernel, times the mean of what
    SGLang takes in multiples of it, by numbers of tokens, for models that both were timed with."""
    import numpy

    model, sizes = ["hidden_size", "num_experts", "topk"], ["inter", "num_tokens"]
    timed = {tuple(key) for key in ours[model].itertuples(index=False)}
    theirs = ours.groupby([*model, *sizes]).latency.min()
    grids: Tables = {}
    for framework in SAME_KERNEL:
        times = others[others.framework.str.startswith(framework)]
        newest = times[times.release == times.release.max()]
        ratios = numpy.log(theirs / newest.groupby([*model, *sizes]).latency.min()).dropna().reset_index()
        for key, family in newest.groupby(model):
            hidden, count, top_k = key
            if tuple(key) in timed or (form == "bf16" and gated(count, top_k)):
                continue
            timed.add(tuple(key))
            alike = ratios[
                [gated(e, k) == gated(count, top_k) for e, k in zip(ratios.num_experts, ratios.topk, strict=True)]
            ]
            known = alike if len(alike) else ratios
            factor = numpy.exp(known.groupby("num_tokens").latency.mean())
            scaled = family.assign(latency=family.latency * family.num_tokens.map(factor).fillna(1.0))
            cell = cells(scaled, sizes)

            def base(inter: float, tokens: float, of: Any = (form, hidden, count, top_k)) -> float:
                form_, hidden_, count_, top_k_ = of
                return replays.expert_layer(form_, tokens, count_, top_k_, hidden_, inter, matrices(count_, top_k_))

            axes = {"inter": tuple(sorted({inter for inter, _ in cell})), "tokens": LAYER_TOKENS}
            what = f"{family.moe_dtype.iloc[0]}, as {family.framework.iloc[0]}, whose kernel SGLang takes"
            grids[f"experts/{form}/{hidden}x{count}x{top_k}/sglang"] = filled(cell, what, base, (2.0, 2.0), **axes)
    return grids


# --- attention --------------------------------------------------------------------------------------------------------


def attention(source: Source) -> Tables:
    """FlashInfer, which SGLang takes for full attention with head dims of 128 and 256: means over numbers of heads, by
    sequences times heads and by how many query heads share a kv head."""
    decode = source.rows("attention/sglang/*/generation_attention_perf.parquet")
    extend = source.rows("attention/sglang/*/context_attention_perf.parquet")
    decode, extend = decode[decode.kernel_source == "flashinfer"], extend[extend.kernel_source == "flashinfer"]
    decode = decode.assign(context=decode.step + 1, streams=decode.batch_size * decode.num_key_value_heads)
    extend = extend.assign(streams=extend.batch_size * extend.num_heads)
    grids: Tables = {}
    for dim, (kind, short) in itertools.product((128, 256), (("bfloat16", "bf16"), ("fp8", "fp8"))):
        row = 2 * dim * (1 if short == "fp8" else 2)
        for op, rows in (("decode", decode), ("extend", extend)):
            part = rows[(rows.head_dim == dim) & (rows.kv_cache_dtype == kind)]
            if part.empty:
                continue
            part = part.assign(shared=part.num_heads // part.num_key_value_heads)
            if op == "decode":
                times = means(part, ("shared", "streams", "context"))
                axes = {"shared": GROUPS, "streams": powers(15), "context": powers(17, 1)}

                def base(shared: float, streams: float, context: float, row: int = row) -> float:
                    return replays.decode(streams, context, shared, row)

                lengths = (2.0, 2.0, 2.0)
            else:
                times = means(part, ("shared", "streams", "isl"))
                axes = {"shared": (1, 2, 4, 8, 16, 64), "streams": powers(13), "tokens": PROMPTS}

                def base(shared: float, streams: float, new: float, dim: int = dim) -> float:
                    return replays.prompt(streams, new, 2 * dim)

                lengths = (4.0, 2.0, 2.0)
            name = f"{op}_attention/{dim}/{short}/sglang"
            grids[name] = filled(times, "FlashInfer, SGLang 0.5.14", base, lengths, **axes)
    return grids


# --- the rest ---------------------------------------------------------------------------------------------------------


def recurrent(source: Source) -> Tables:
    """Gated delta rule, by value heads of 128 on a rank."""
    rows = source.rows("linear_attention/sglang/*/gdn_perf.parquet")
    rows = rows[rows.kernel_source.str.contains("gated_delta")]
    heads = (2, 4, 8, 16, 32, 64)
    decode = means(rows[rows.phase == "generation"], ("num_v_heads", "batch_size"))
    prompt = means(rows[rows.phase == "context"], ("num_v_heads", "batch_size", "seq_len"))

    def of_decode(heads: float, batch: float) -> float:
        return replays.states(heads, batch, 1)

    return {
        "gated_delta_rule/decode/sglang": filled(
            decode, "SGLang 0.5.14", of_decode, (2.0, 2.0), heads=heads, batch=powers(10)
        ),
        "gated_delta_rule/prompt/sglang": filled(
            prompt, "SGLang 0.5.14", replays.states, (2.0, 2.0, 2.0), heads=heads, batch=powers(8), tokens=powers(15)
        ),
    }


def residual(source: Source) -> Tables:
    """Hyper-connections of four streams, before a block ("pre") and after it, and the products of latent attention."""
    rows = source.rows("mhc/sglang/0.5.14/mhc_module_perf.parquet")
    grids: Tables = {}

    def mixed(hidden: float, tokens: float) -> float:
        return replays.replayed(20.0 * tokens * hidden)

    tokens = tuple(t for t in sorted({int(t) for t in rows.num_tokens}) if t <= 131072)
    for part in ("pre", "post"):
        times = cells(rows[rows.op_name == part], ("hidden_size", "num_tokens"))
        axes = {"hidden": (4096, 7168), "tokens": tokens}
        grids[f"hyper_connection/{part}/sglang"] = filled(times, "SGLang 0.5.14", mixed, (2.0, 1.0), **axes)
    absorb = source.rows("mla_bmm/sglang/*/mla_bmm_perf.parquet")
    absorb = absorb[absorb.bmm_dtype == "bfloat16"]

    def absorbed(heads: float, tokens: float) -> float:
        size = 2.0 * heads * (512 * 128 + tokens * 640)
        return replays.replayed(size, 2.0 * tokens * heads * 512 * 128)

    for name in ("mla_gen_pre", "mla_gen_post"):
        times = cells(absorb[absorb.op_name == name], ("num_heads", "num_tokens"))
        axes = {"heads": powers(7), "tokens": LAYER_TOKENS}
        grids[f"latent_absorb/{name}/sglang"] = filled(times, "torch.bmm, SGLang 0.5.14", absorbed, (2.0, 2.0), **axes)
    return grids


def compressed(source: Source) -> Tables:
    """DeepSeek-V4's attention of one layer with its projections: "csa" keeps every fourth key and chooses among them,
    "hca" every 128th. Prompts go through their keys in chunks: by tokens of all requests and chunks."""
    grids: Tables = {}
    heads = (8, 16, 32, 64)

    def linear(heads: float, batch: float, context: float) -> float:
        return 1e-4 * batch

    for name, batches in (("csa", powers(4)), ("hca", powers(10))):
        rows = source.rows(f"sparse_attention/sglang/*/dsv4_{name}_generation_module_perf.parquet")
        for form in ("bfloat16", "fp8_block"):
            part = rows[rows.gemm_type == form].assign(context=lambda r: r.step + 1)
            contexts = (2, 129, 1025, 4097, 8193, 16385, 32769, 65537, 131073, 262145, 524289, 1048576)
            times = cells(part[part.context.isin(contexts)], ("num_heads", "batch_size", "context"))
            axes = {"heads": heads, "batch": batches, "context": contexts}
            table = filled(times, "SGLang 0.5.14", linear, (4.0, 2.0, 4.0), **axes)
            grids[f"compressed_attention/decode/{name}/{_short(form)}/sglang"] = table
    rows = source.rows("sparse_attention/sglang/*/dsv4_hca_context_module_perf.parquet")
    rows = rows.assign(tokens=rows.batch_size * rows.isl, chunks=-(-(rows.isl + rows.step) // CHUNK))

    def by_chunk(heads: float, tokens: float, chunks: float) -> float:
        return 2e-5 * tokens * (0.7 + 0.3 * chunks)

    for form in ("bfloat16", "fp8_block"):
        times = means(rows[rows.gemm_type == form], ("num_heads", "tokens", "chunks"))
        axes = {"heads": heads, "tokens": powers(13), "chunks": (1, 2, 3, 5, 9, 17, 33, 65, 123, 129)}
        table = filled(times, "SGLang 0.5.14", by_chunk, (4.0, 2.0, 2.0), **axes)
        grids[f"compressed_attention/prompt/hca/{_short(form)}/sglang"] = table
    return grids


def _short(form: str) -> str:
    return "bf16" if form == "bfloat16" else form


def collectives(source: Source) -> Tables:
    """SGLang's all-reduce in a graph, by cards and bytes of the tensor."""
    rows = source.rows("comm/sglang/*/custom_allreduce_perf.parquet")
    rows = rows[rows.backend == "sglang_graph"].assign(bytes=lambda r: r.message_size * 2)
    times = cells(rows, ("num_gpus", "bytes"))

    def sent(cards: float, size: float) -> float:
        return 3e-6 * cards + size / 20e9

    table = filled(times, "SGLang 0.5.14", sent, (2.0, 2.0), cards=(2, 4, 8), bytes=powers(30, 8))
    return {"all_reduce/sglang": table}
