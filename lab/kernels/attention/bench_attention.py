"""Speed of the attention kernels beside the GPU's ceilings, and beside another implementation at the same shapes.

    python bench_attention.py run ours.json                                  # this project's kernels
    SGLANG_FORCE_ARCH=sm_120 python bench_attention.py run forced.json       # with the tiles that sm_120 gets
    PYTHONPATH=PEER python bench_attention.py run peer.json --impl peer  # SGLang's Triton kernels, in their own process
    python bench_attention.py run whole.json --impl whole --only turn        # with one program for each prefix
    python bench_attention.py compare ours.json peer.json
    python bench_attention.py sweep decode|extend|mla                        # tiles against each other

Every number is the median over CUDA-graph replays. A graph walks through enough disjoint sequences to exceed the L2
cache several times. What a server prepares once a step (our plan_decode, the peer's kv_indices) is not timed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmark" / "kernels"))
from timing import matmul_ceiling, read_ceiling, time_calls

ROTATE_BYTES = 256 << 20
RUN = 64  # tokens that lie next to each other in the cache
Launch = Callable[[], None]


@dataclass(frozen=True)
class Shape:
    """`new` tokens of each of `batch` sequences over `prefix` cached ones. Decode: new == 0, and prefix counts all."""

    name: str
    kind: str
    batch: int
    prefix: int
    new: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    v_head_dim: int = 128

    @property
    def latent(self) -> bool:
        return self.head_dim != self.v_head_dim

    @property
    def kv_token_bytes(self) -> int:
        return 2 * self.num_kv_heads * (self.head_dim + (0 if self.latent else self.v_head_dim))

    @property
    def bytes(self) -> int:
        """Least traffic: cached and new keys and values once, queries and outputs once."""
        rows = self.batch * max(self.new, 1)
        io = 2 * rows * self.num_heads * (self.head_dim + self.v_head_dim)
        return self.batch * (self.prefix + self.new) * self.kv_token_bytes + io

    @property
    def flops(self) -> int:
        pairs = self.prefix * max(self.new, 1) + self.new * (self.new + 1) // 2
        return 2 * self.batch * pairs * self.num_heads * (self.head_dim + self.v_head_dim)


def shapes() -> list[Shape]:
    extend = [
        Shape("extend 1x8192", "extend", 1, 0, 8192),
        Shape("extend 16x1024", "extend", 16, 0, 1024),
        Shape("extend 1x512 over 8192", "extend", 1, 8192, 512),
        Shape("extend 16x512 over 8192", "extend", 16, 8192, 512),
    ]
    # Turns of a conversation: with 8 kv heads, and on a rank that has one of them.
    turns = [(new, prefix, heads) for new in (64, 256, 1024) for prefix in (16_384, 131_072) for heads in (8, 1)]
    extend += [Shape(f"turn {n} over {p}, {h} kv heads", "extend", 1, p, n, 4 * h, h) for n, p, h in turns]
    grid = [(batch, context) for batch in (1, 16, 64, 256) for context in (1024, 8192, 32768)]
    gqa = [Shape(f"decode gqa {b}x{c}", "decode", b, c, 0) for b, c in grid]
    mla = [Shape(f"decode mla {b}x{c}", "decode", b, c, 0, 128, 1, 576, 512) for b, c in grid]
    return [*extend, *gqa, *mla]


class Data:
    """Inputs of one shape: `rotations` batches over disjoint parts of one cache."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        self.shape = shape
        context = max(shape.prefix, 1)
        self.rotations = max(1, min(64, math.ceil(ROTATE_BYTES / shape.bytes)))
        runs_each = math.ceil(context / RUN)
        runs = self.rotations * shape.batch * runs_each
        slots = (runs + 1) * RUN
        half = {"dtype": torch.bfloat16, "device": "cuda"}
        self.k_cache = torch.empty(slots, shape.num_kv_heads, shape.head_dim, **half).normal_()
        if shape.latent:
            self.v_cache = self.k_cache[..., : shape.v_head_dim]
        else:
            self.v_cache = torch.empty(slots, shape.num_kv_heads, shape.v_head_dim, **half).normal_()
        order = torch.randperm(runs, device="cuda") + 1
        table = (order[:, None] * RUN + torch.arange(RUN, device="cuda")).int()
        self.tables = table.view(self.rotations, shape.batch, runs_each * RUN)[:, :, :context]
        tokens = shape.batch * max(shape.new, 1)
        self.q = torch.empty(self.rotations, tokens, shape.num_heads, shape.head_dim, **half).normal_()
        self.k = torch.empty(self.rotations, tokens, shape.num_kv_heads, shape.head_dim, **half).normal_()
        self.v = torch.empty(self.rotations, tokens, shape.num_kv_heads, shape.v_head_dim, **half).normal_()
        self.out = torch.full((tokens, shape.num_heads, shape.v_head_dim), float("nan"), **half)

    def ints(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5


# --- implementations: each gives one launch for each rotation ---------------------------------------------------------


def ours(data: Data, tile: dict[str, int] | None = None, in_parts: bool = True) -> list[Launch]:
    """in_parts: programs may share a cached prefix of prompts."""
    from sglang.srt.hardware.arch import current_arch
    from sglang.srt.kernels.tiles import attention_tiles

    shape, arch = data.shape, current_arch()
    op = f"{shape.kind}_attention"
    tile = tile or dict(attention_tiles(op, shape.head_dim, shape.v_head_dim, "bfloat16", arch.features)[0])
    return _our_decode(data, tile) if shape.kind == "decode" else _our_extend(data, tile, in_parts)


def num_multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def _our_extend(data: Data, tile: dict[str, int], in_parts: bool) -> list[Launch]:
    from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd
    from sglang.srt.layers.attention.triton_ops.prefix_parts import PrefixParts, count_parts

    shape = data.shape
    heads, num_sms = (shape.num_heads, shape.num_kv_heads, shape.v_head_dim), num_multiprocessors()
    count = count_parts([shape.new] * shape.batch, [shape.prefix] * shape.batch, *heads, num_sms, tile)
    parts = None
    if in_parts and count > 1:
        num_tokens = shape.batch * shape.new
        parts = PrefixParts.allocate(count, num_tokens, data.ints(0), shape.num_heads, shape.v_head_dim)
    rows = torch.arange(shape.batch, device="cuda")
    prefix = data.ints(*[shape.prefix] * shape.batch)
    start = data.ints(*(i * shape.new for i in range(shape.batch + 1)))

    def launch(i: int) -> None:
        extend_attention_fwd(
            data.q[i], data.k[i], data.v[i], data.out, data.k_cache, data.v_cache, data.tables[i], rows, prefix, start,
            scale=data.scale, tile=tile, has_prefix=shape.prefix > 0, parts=parts,
        )  # fmt: skip

    return [lambda i=i: launch(i) for i in range(data.rotations)]


def _our_decode(data: Data, tile: dict[str, int]) -> list[Launch]:
    from sglang.srt.layers.attention.triton_ops.decode_attention import (
        DecodeWorkspace,
        decode_attention_fwd,
        plan_decode,
    )

    shape = data.shape
    rows = torch.arange(shape.batch, device="cuda")
    seq_lens = data.ints(*[shape.prefix] * shape.batch)
    workspace = DecodeWorkspace.allocate(
        shape.batch, shape.num_heads, shape.num_kv_heads, shape.v_head_dim, num_multiprocessors(), tile, "cuda"
    )
    plan = plan_decode(seq_lens, workspace, tile)

    def launch(i: int) -> None:
        decode_attention_fwd(
            data.q[i], data.out, data.k_cache, data.v_cache, data.tables[i], rows, seq_lens, plan,
            scale=data.scale, tile=tile,
        )  # fmt: skip

    return [lambda i=i: launch(i) for i in range(data.rotations)]


def peer_extend(data: Data) -> list[Launch]:
    from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd

    shape = data.shape
    qo_indptr = data.ints(*(i * shape.new for i in range(shape.batch + 1)))
    kv_indptr = data.ints(*(i * shape.prefix for i in range(shape.batch + 1)))
    indices = [t.reshape(-1)[: shape.batch * shape.prefix].long() for t in data.tables]

    def launch(i: int) -> None:
        extend_attention_fwd(
            data.q[i], data.k[i], data.v[i], data.out, data.k_cache, data.v_cache, qo_indptr, kv_indptr, indices[i],
            None, True, None, shape.new, 1.0, 1.0, sm_scale=data.scale,
        )  # fmt: skip

    return [lambda i=i: launch(i) for i in range(data.rotations)]


def peer_decode(data: Data, splits: int) -> list[Launch]:
    from sglang.srt.layers.attention.triton_ops.decode_attention import decode_attention_fwd

    shape = data.shape
    kv_indptr = data.ints(*(i * shape.prefix for i in range(shape.batch + 1)))
    indices = [t.reshape(-1).long() for t in data.tables]
    logits = torch.empty(shape.batch, shape.num_heads, splits, shape.v_head_dim, device="cuda")
    lse = torch.empty(shape.batch, shape.num_heads, splits, device="cuda")
    num_splits = data.ints(*[splits] * shape.batch)

    def launch(i: int) -> None:
        decode_attention_fwd(
            data.q[i], data.k_cache, data.v_cache, data.out, kv_indptr, indices[i], logits, lse, num_splits, splits,
            data.scale, 1.0, 1.0,
        )  # fmt: skip

    return [lambda i=i: launch(i) for i in range(data.rotations)]


# --- timing -----------------------------------------------------------------------------------------------------------


def time_us(launches: list[Launch], budget_s: float = 0.15) -> float:
    """Microseconds of one launch."""
    return time_calls(launches, minimum=1, budget_s=budget_s) * 1e6


def ceilings() -> dict[str, float]:
    """TB/s of reading and bf16 TFLOP/s of this GPU, now."""
    return {"read_tb_s": read_ceiling() / 1e12, "matmul_tflop_s": matmul_ceiling() / 1e12}


def measure(shape: Shape, impl: str) -> dict[str, Any]:
    data = Data(shape)
    if impl in ("ours", "whole"):
        time, note = time_us(ours(data, in_parts=impl == "ours")), ""
    elif shape.kind == "extend":
        time, note = time_us(peer_extend(data)), ""
    else:  # the best of the split counts that it chooses from by default
        time, note = min((time_us(peer_decode(data, splits)), f"{splits} splits") for splits in (1, 2, 4, 8))
    return {
        "name": shape.name,
        "us": time,
        "tb_s": shape.bytes / time / 1e6,
        "tflop_s": shape.flops / time / 1e6,
        "note": note,
        "sample": data.out[-1, 0, :8].float().tolist(),
        "nan": bool(data.out.isnan().any()),
    }


def run(args: argparse.Namespace) -> None:
    ceiling = ceilings()
    read, matmul = ceiling["read_tb_s"], ceiling["matmul_tflop_s"]
    print(f"{torch.cuda.get_device_name()}: read {read:.2f} TB/s, matmul {matmul:.0f} TFLOP/s")
    results = []
    for shape in shapes():
        if args.only in shape.name:
            result = measure(shape, args.impl)
            results.append(result)
            print(_line(result, ceiling), flush=True)
            torch.cuda.empty_cache()
    Path(args.file).write_text(json.dumps({"impl": args.impl, "ceilings": ceiling, "results": results}, indent=1))


def _line(r: dict[str, Any], ceiling: dict[str, float]) -> str:
    bandwidth = f"{r['tb_s']:6.2f} TB/s ({r['tb_s'] / ceiling['read_tb_s']:4.0%})"
    compute = f"{r['tflop_s']:6.0f} TFLOP/s ({r['tflop_s'] / ceiling['matmul_tflop_s']:4.0%})"
    nan = "  NaN in the output" if r["nan"] else ""
    return f"{r['name']:30} {r['us']:10.1f} us {bandwidth} {compute} {r['note']}{nan}"


def compare(args: argparse.Namespace) -> int:
    """Table of both; ratio above 1: the first is faster."""
    first, second = (json.loads(Path(f).read_text()) for f in (args.file, args.other))
    others = {r["name"]: r for r in second["results"]}
    ratios: dict[str, list[float]] = {}
    for r in first["results"]:
        other = others[r["name"]]
        ratio = other["us"] / r["us"]
        ratios.setdefault(" ".join(r["name"].split()[:-1]) if "decode" in r["name"] else "extend", []).append(ratio)
        difference = max(abs(a - b) for a, b in zip(r["sample"], other["sample"], strict=True))
        versus = f"{other['us']:10.1f} us {other['note']:9} ratio {ratio:5.2f}  diff {difference:.1e}"
        print(f"{_line(r, first['ceilings'])} | {versus}")
    everything = [x for values in ratios.values() for x in values]
    for name, values in {**ratios, "all": everything}.items():
        print(f"{name:12} geometric mean {statistics.geometric_mean(values):.3f}, least {min(values):.3f}")
    return 0 if statistics.geometric_mean(everything) >= 1.1 and min(everything) >= 0.9 else 1


# --- tile search ------------------------------------------------------------------------------------------------------


def tiles_to_try(what: str) -> Iterator[dict[str, int]]:
    if what == "extend":
        for m, n, warps, stages in (
            (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3),
            (64, 128, 4, 2), (128, 64, 4, 3), (128, 32, 8, 3), (64, 64, 8, 2),
        ):  # fmt: skip
            yield {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages}
        return
    latent = what == "mla"
    candidates = (
        ((64, 32, 8, 2, 1, 2), (64, 32, 8, 3, 1, 2), (64, 64, 8, 2, 1, 2), (64, 16, 8, 2, 1, 2), (64, 64, 4, 2, 1, 2),
         (32, 32, 8, 2, 2, 2), (32, 32, 4, 2, 2, 2), (16, 32, 4, 2, 3, 2), (64, 32, 8, 2, 1, 1), (64, 32, 8, 2, 1, 4))
        if latent
        else ((16, 64, 4, 3, 4, 4), (16, 64, 4, 4, 3, 4), (16, 128, 4, 3, 2, 4), (16, 32, 4, 3, 8, 4),
              (16, 32, 2, 4, 8, 4), (16, 64, 2, 3, 5, 4), (16, 64, 8, 3, 4, 4), (16, 128, 8, 3, 2, 4),
              (16, 64, 4, 3, 4, 1), (16, 64, 4, 3, 4, 8), (16, 64, 4, 2, 6, 4),
              (16, 64, 4, 1, 4, 4), (16, 32, 4, 1, 4, 4), (16, 32, 2, 2, 4, 4), (16, 64, 2, 3, 4, 4))
    )  # fmt: skip
    for h, n, warps, stages, ctas, waves in candidates:
        yield {
            "BLOCK_H": h,
            "BLOCK_N": n,
            "num_warps": warps,
            "num_stages": stages,
            "ctas_per_sm": ctas,
            "waves": waves,
        }


def sweep(args: argparse.Namespace) -> None:
    prefix = {"extend": "extend", "decode": "decode gqa", "mla": "decode mla"}[args.what]
    chosen = [s for s in shapes() if s.name.startswith(prefix) and args.only in s.name]
    datas: list[Data] = []
    for shape in chosen:
        if shape.batch * shape.prefix <= 64 * 32768:
            datas.append(Data(shape))
    print("tile", *(d.shape.name.removeprefix(prefix) for d in datas), sep=" | ")
    for tile in tiles_to_try(args.what):
        cells = []
        for data in datas:
            try:
                cells.append(f"{time_us(ours(data, tile), 0.03):.1f}")
            except Exception as error:  # a tile that does not fit is a result of a search
                cells.append(type(error).__name__)
        print(
            " ".join(f"{k.removeprefix('BLOCK_').removeprefix('num_')}{v}" for k, v in tile.items()),
            *cells,
            sep=" | ",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("file")
    runner.add_argument("--impl", choices=("ours", "whole", "peer"), default="ours")
    runner.add_argument("--only", default="", help="shapes whose name contains this")
    comparer = commands.add_parser("compare")
    comparer.add_argument("file")
    comparer.add_argument("other")
    sweeper = commands.add_parser("sweep")
    sweeper.add_argument("what", choices=("extend", "decode", "mla"))
    sweeper.add_argument("--only", default="")
    args = parser.parse_args()
    if args.command == "compare":
        return compare(args)
    {"run": run, "sweep": sweep}[args.command](args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
