"""Latents in eight and in four bits on one GPU: the kernels against plain torch, and decode steps beside 16 bits.

    python lab/gpu/latent_caches.py               # GPU; about 100 seconds on an H200 machine with 16 processors
    python lab/gpu/latent_caches.py --limit 300   # with the times of more tiles
    SGLANG_FORCE_ARCH=sm_120 python lab/gpu/latent_caches.py      # with the tiles that sm_120 gets

First, in processes side by side, which also compile everything: the bytes that the store writes, and attention over
each form of records against fp64 within 2e-3 of its norm, of one token and of 200, from one cache and from two, over a
selection and over all tokens of a table. Then times of one layer's attention and indexer in decode steps of 1 and of 16
requests with 131,072 tokens each, over caches that no level of memory keeps, until `--limit` seconds have passed.

Ends with PASSED, or with FAILED and what is outside. A wrong result is outside. What is slower than over 16 bits is
printed as SLOWER and changes no verdict.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark" / "kernels"))
from timing import copies_for, time_calls

from sglang.srt.blocks.mla.kernels.latent_prompt import gather_records
from sglang.srt.blocks.pooled_sparse.block_selection import BlockSelection
from sglang.srt.blocks.pooled_sparse.kernels.selected_blocks import selected_block_attention_fwd
from sglang.srt.blocks.pooled_sparse.reference import attend_blocks
from sglang.srt.hardware.arch import current_arch
from sglang.srt.kernels.tiles import attention_tiles
from sglang.srt.layers import native_latent_records, native_sparse_ops
from sglang.srt.layers.attention.selection import EntryRows, Selection
from sglang.srt.layers.attention.triton_ops.decode_attention import decode_attention_fwd, plan_decode
from sglang.srt.layers.attention.triton_ops.decode_workspace import DecodeWorkspace
from sglang.srt.layers.attention.triton_ops.index_logits import index_logits
from sglang.srt.layers.attention.triton_ops.sparse_records import attention_fwd
from sglang.srt.layers.triton_ops.latent_records import latent_record_store
from sglang.srt.plan.latent_record import LatentRecord, latent_record

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
CONTEXT, BATCHES, POOL = 131_072, (1, 16), 20_000
BOUND = 2e-3
KV_DTYPES = ("bfloat16", "fp8_e4m3", "fp4_e2m1")
OTHER_TILES = ((16, 32, 4, 3), (16, 32, 8, 3), (16, 64, 8, 2), (32, 32, 8, 3), (16, 16, 4, 3))


@dataclass(frozen=True)
class Layer:
    """Attention of one layer to selected latents: `widths`: entries of one or two caches that a token selects (none:
    all tokens, in a table); `rates`: tokens of an entry; `index`: heads of the indexer and tokens of a key, or None."""

    name: str
    dims: tuple[int, int]
    heads: int
    widths: tuple[int, ...]
    rates: tuple[int, ...]
    index: tuple[int, int] | None = None
    sinks: bool = False

    @property
    def dense(self) -> bool:
        return not self.widths

    def record(self, kv_dtype: str) -> LatentRecord | None:
        """Returns the record; None: 16 bits, or the forms in eight that MLA has had before."""
        return None if self.dims == (512, 64) and kv_dtype != "fp4_e2m1" else latent_record(kv_dtype, *self.dims)


LAYERS = (
    Layer("V4, 4 tokens an entry", (448, 64), 64, (128, 512), (1, 4), (64, 4), True),
    Layer("GLM-5.3-Flash", (512, 0), 32, (2048, 3), (1, 1), (32, 4)),
    Layer("V3.2, 16 heads", (512, 64), 16, (2048,), (1,)),
    Layer("V3, 16 heads, all tokens", (512, 64), 16, (), (1,)),
    Layer("V4, 128 tokens an entry", (448, 64), 64, (128, 1024), (1, 128), None, True),
    Layer("V3.2, 128 heads", (512, 64), 128, (2048,), (1,)),
)
CHECKED = tuple((i, kv_dtype) for i in range(4) for kv_dtype in KV_DTYPES[1:] if LAYERS[i].record(kv_dtype))


def entries(count: int, layer: Layer, kv_dtype: str) -> torch.Tensor:
    """Returns a cache of random entries as they are stored."""
    rows = torch.randn(count, sum(layer.dims), device="cuda", dtype=BF16)
    if kv_dtype == "bfloat16":
        return rows[:, None]
    record = layer.record(kv_dtype)
    if record is None:
        return rows[:, None].to(E4M3) if layer.dense else native_sparse_ops.pack_latents(rows)[:, None]
    cache = torch.zeros(count, 1, record.size, dtype=torch.uint8, device="cuda")
    latent_record_store(rows, cache, torch.arange(count, device="cuda"), record)
    return cache


def tiles_of(layer: Layer, kv_dtype: str) -> tuple[dict[str, int], ...]:
    features = current_arch().features
    return tuple(map(dict, attention_tiles("sparse_attention", sum(layer.dims), 512, kv_dtype, features, layer.heads)))


def tile_of(layer: Layer, kv_dtype: str, tokens: int) -> dict[str, int]:
    return next(tile for tile in tiles_of(layer, kv_dtype) if tile.get("least_tokens", 1) <= tokens)


def num_sms() -> int:
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def attend(
    layer: Layer, kv_dtype: str, q: torch.Tensor, sources: Sequence[tuple[torch.Tensor, Selection]],
    out: torch.Tensor, tile: dict[str, int], sinks: torch.Tensor | None,
) -> None:  # fmt: skip
    attention_fwd(q, sources, out, scale=0.05, tile=tile, num_sms=num_sms(), sinks=sinks, record=layer.record(kv_dtype))


def sinks_of(layer: Layer) -> torch.Tensor | None:
    return torch.zeros(layer.heads, device="cuda") if layer.sinks else None


def selections(layer: Layer, tokens: int, pool: int, context: int = CONTEXT) -> list[Selection]:
    def counts(width: int) -> torch.Tensor:
        return torch.full((tokens,), width, dtype=torch.int32, device="cuda")

    if layer.dense:
        table = torch.randint(0, pool, (tokens, context), dtype=torch.int32, device="cuda")
        return [Selection(table, counts(context), torch.arange(tokens, device="cuda").flip(0))]
    made = []
    for width, rate in zip(layer.widths, layer.rates, strict=True):
        slots = torch.randint(0, pool // rate, (tokens, width), dtype=torch.int32, device="cuda")
        made.append(Selection(slots, counts(width)))
    return made


def check(index: int, kv_dtype: str) -> list[tuple[str, bool]]:
    """Returns what was compared, and whether it is right; in a process of its own."""
    layer, found = LAYERS[index], list[tuple[str, bool]]()
    record = layer.record(kv_dtype)
    assert record is not None
    torch.manual_seed(index)
    rows = (torch.randn(300, record.dim, device="cuda") * torch.randn(300, 1, device="cuda").mul(3).exp()).to(BF16)
    places = torch.randperm(399, device="cuda")[:300]
    places[7] = -1
    got, want = (torch.zeros(400, 1, record.size, dtype=torch.uint8, device="cuda") for _ in range(2))
    for scale in (1.0, 0.3):
        latent_record_store(rows, got, places, record, scale)
        native_latent_records.latent_record_store(rows, want, places, record, scale)
        found.append((f"{record.describe()}, scale {scale}: bytes", torch.equal(got, want)))
    if layer.dense:
        k = torch.zeros(300, 8, 128 + record.rope, dtype=BF16, device="cuda")
        latent = gather_records(got, places.clamp(min=0), k, record, 0.3)
        rows = native_latent_records.unpack_records(got[places.clamp(min=0), 0], record, 0.3).to(BF16)
        same = torch.equal(latent, rows[:, :512]) and torch.equal(k[:, 3, 128:], rows[:, 512:])
        found.append((f"{layer.name}: gathered for prompts", same))
    caches = [entries(POOL // rate, layer, kv_dtype) for rate in layer.rates]
    for tokens in (1, 200):
        q = torch.randn(tokens, layer.heads, record.dim, device="cuda").to(BF16)
        sources = list(zip(caches, selections(layer, tokens, POOL, 3000), strict=True))
        wanted = torch.empty(tokens, layer.heads, 512, device="cuda", dtype=torch.float64)
        native_sparse_ops.attend_selected(
            q.double(), sources, wanted, scale=0.05, sinks=sinks_of(layer), record=record, record_scale=1.0
        )
        for tile in tiles_of(layer, kv_dtype):
            out = torch.empty(tokens, layer.heads, 512, device="cuda")
            attend(layer, kv_dtype, q, sources, out, tile, sinks_of(layer))
            error = float((out - wanted).norm() / wanted.norm())
            text = f"{layer.name}, {kv_dtype}, {tokens} tokens, {tile['BLOCK_H']}x{tile['BLOCK_N']}: {error:.1e}"
            found.append((text, error < BOUND))
            rounded = torch.empty_like(out, dtype=BF16)  # what the server asks for, and what is timed
            attend(layer, kv_dtype, q, sources, rounded, tile, sinks_of(layer))
            if not torch.equal(rounded, out.to(BF16)):
                found.append((f"{text}, in bfloat16", False))
    return found


def compile_others(index: int, kv_dtype: str) -> list[tuple[str, bool]]:
    """Runs what is only timed once, so that others need not wait for its compilation."""
    layer = LAYERS[index]
    if layer.index:
        time_indexer(*layer.index, kv_dtype, 1)
    if layer.record(kv_dtype) is None:
        for batch in BATCHES:
            time_attention(layer, kv_dtype, batch, pool=POOL)
    return []


def check_blocks(index: int, kv_dtype: str) -> list[tuple[str, bool]]:
    """Does as `check` for Qwen3.8-Flash-Next's selected blocks in FP8."""
    tokens, kv, dim, block = 50, 2, 256, 4
    k, v = (torch.randn(POOL, kv, dim, device="cuda").to(E4M3) for _ in range(2))
    q, numbers = torch.randn(tokens, 24, dim, device="cuda").to(BF16), torch.zeros(tokens, device="cuda").int()
    blocks = torch.randint(1, POOL // block, (tokens, 512), dtype=torch.int32, device="cuda")
    chosen = BlockSelection(blocks, numbers + 500, numbers, numbers + 3, block)
    options = {"k_scale": 0.5, "v_scale": 2.0}
    out, wanted = torch.empty_like(q), torch.empty_like(q)
    attend_blocks(q, k, v, chosen, wanted, scale=0.06, **options)
    tile = dict(attention_tiles("selected_block_attention", dim, dim, kv_dtype, current_arch().features, 12)[0])
    selected_block_attention_fwd(q, k, v, chosen, out, scale=0.06, tile=tile, num_sms=num_sms(), **options)
    error = float((out.float() - wanted.float()).norm() / wanted.float().norm())
    return [(f"Qwen3.8-Flash-Next, {kv_dtype}: {error:.1e}", error < 5e-3)]


def time_attention(layer: Layer, kv_dtype: str, batch: int, tile: dict[str, int] | None = None, pool: int = 0) -> float:
    """Returns seconds, over pools that exceed every cache, unless `pool` says otherwise."""
    pool = pool or batch * CONTEXT
    made = [entries(pool // rate, layer, kv_dtype) for rate in layer.rates]
    if layer.dense and layer.record(kv_dtype) is None:
        return _time_dense(layer, kv_dtype, batch, made[0])
    out, sinks = torch.empty(batch, layer.heads, 512, dtype=BF16, device="cuda"), sinks_of(layer)
    q = torch.randn(batch, layer.heads, sum(layer.dims), device="cuda").to(BF16)
    width = made[0].shape[-1] * made[0].element_size()
    tile = tile or tile_of(layer, kv_dtype, batch)
    calls: list[Callable[[], object]] = []
    for _ in range(copies_for(batch * (sum(layer.widths) or CONTEXT) * width, 24)):
        sources = list(zip(made, selections(layer, batch, pool), strict=True))
        calls.append(lambda sources=sources: attend(layer, kv_dtype, q, sources, out, tile, sinks))  # type: ignore[misc]
    return time_calls(calls)


def _time_dense(layer: Layer, kv_dtype: str, batch: int, cache: torch.Tensor) -> float:
    """Returns seconds of the kernel that reads all latents in 16 bits or in FP8."""
    tile = dict(attention_tiles("decode_attention", 576, 512, kv_dtype, current_arch().features, layer.heads)[0])
    lens = torch.full((batch,), CONTEXT, dtype=torch.int32, device="cuda")
    workspace = DecodeWorkspace.allocate(batch, layer.heads, 1, 512, num_sms(), tile, "cuda")
    plan, rows = plan_decode(lens, workspace, tile), torch.arange(batch, device="cuda")
    q = torch.randn(batch, layer.heads, 576, device="cuda").to(BF16)
    out = torch.empty(batch, layer.heads, 512, dtype=BF16, device="cuda")
    calls: list[Callable[[], object]] = []
    for _ in range(3):
        table = torch.randint(0, len(cache), (batch, CONTEXT), dtype=torch.int32, device="cuda")
        calls.append(
            lambda table=table: decode_attention_fwd(  # type: ignore[misc]
                q, out, cache, cache[..., :512], table, rows, lens, plan, scale=0.05, tile=tile
            )
        )
    return time_calls(calls)


def time_indexer(heads: int, rate: int, kv_dtype: str, batch: int) -> float:
    """Returns seconds of the logits of all keys of the requests."""
    count = CONTEXT // rate
    name = "bfloat16" if kv_dtype == "bfloat16" else "fp8_e4m3"
    stored = BF16 if name == "bfloat16" else E4M3
    tile = dict(attention_tiles("sparse_indexer", 128, 128, name, current_arch().features)[0])
    table = torch.randint(0, batch * count, (batch, count), device="cuda", dtype=torch.int32)
    table = (table[:, :, None] * rate + torch.arange(rate, device="cuda", dtype=torch.int32)).flatten(1).contiguous()
    lens = torch.full((batch,), count, dtype=torch.int32, device="cuda")
    rows = EntryRows(table, torch.arange(batch, device="cuda"), lens, count, rate)
    q, weights = torch.randn(batch, heads, 128, device="cuda").to(stored), torch.rand(batch, heads, device="cuda")
    logits = torch.empty(batch, count, device="cuda")
    calls: list[Callable[[], object]] = []
    for _ in range(copies_for(batch * count * 128 * stored.itemsize, 8)):
        keys = torch.randn(batch * count, 1, 128, device="cuda", dtype=BF16).to(stored)
        scales = torch.ones(batch * count, 1, device="cuda") if stored == E4M3 else None
        calls.append(
            lambda keys=keys, scales=scales: index_logits(  # type: ignore[misc]
                q, weights, keys, scales, rows, 512, logits, tile=tile, num_sms=num_sms()
            )
        )
    return time_calls(calls)


def time_blocks(kv_dtype: str, batch: int) -> float:
    """Returns seconds of Qwen3.8-Flash-Next: 512 blocks of 4 tokens, 24 heads and 2 KV heads of 256 dims."""
    stored = BF16 if kv_dtype == "bfloat16" else E4M3
    heads, kv, dim, block, pool = 24, 2, 256, 4, batch * CONTEXT
    tile = dict(attention_tiles("selected_block_attention", dim, dim, kv_dtype, current_arch().features, 12)[0])
    k, v = (torch.randn(pool, kv, dim, device="cuda", dtype=BF16).to(stored) for _ in range(2))
    q = torch.randn(batch, heads, dim, device="cuda").to(BF16)
    out, none = torch.empty_like(q), torch.zeros(batch, dtype=torch.int32, device="cuda")
    calls: list[Callable[[], object]] = []
    for _ in range(copies_for(batch * 512 * block * kv * dim * 2 * stored.itemsize, 24)):
        blocks = torch.randint(1, pool // block, (batch, 512), dtype=torch.int32, device="cuda")
        chosen = BlockSelection(blocks, none + 512, none, none, block)
        calls.append(
            lambda chosen=chosen: selected_block_attention_fwd(  # type: ignore[misc]
                q, k, v, chosen, out, scale=0.06, tile=tile, num_sms=num_sms()
            )
        )
    return time_calls(calls)


def show(name: str, batch: int, times: dict[str, tuple[float, float]]) -> None:
    """Prints microseconds of attention, of the indexer, and of both beside those over 16 bits."""
    wide = sum(times["bfloat16"])
    for kv_dtype, (attention, indexer) in times.items():
        total = attention + indexer
        slower = "  SLOWER" if total > max(wide * 1.02, wide + 1e-6) else ""
        both = f"attention {attention * 1e6:.1f} us, indexer {indexer * 1e6:.1f} us"
        print(f"  {name}, {batch} requests, {kv_dtype}: {both}, {total / wide:.2f} of 16 bits{slower}", flush=True)


def timed() -> Iterator[None]:
    """Times everything, a piece at a time: what decides something first."""
    for layer in LAYERS:
        for batch in BATCHES:
            times = {}
            for kv_dtype in KV_DTYPES:
                indexer = time_indexer(*layer.index, kv_dtype, batch) if layer.index else 0.0
                times[kv_dtype] = (time_attention(layer, kv_dtype, batch), indexer)
                torch.cuda.empty_cache()
            show(layer.name, batch, times)
            yield
    for batch in BATCHES:
        blocks = {name: (time_blocks(name, batch), time_indexer(4, 4, name, batch)) for name in KV_DTYPES[:2]}
        show("Qwen3.8-Flash-Next", batch, blocks)
        yield
    for layer in LAYERS[:4]:
        for batch in BATCHES:
            for kv_dtype in KV_DTYPES[1:]:
                for h, n, warps, stages in OTHER_TILES if layer.record(kv_dtype) else ():
                    tile = {"BLOCK_H": h, "BLOCK_N": n, "num_warps": warps, "num_stages": stages, "ctas_per_sm": 1}
                    seconds = time_attention(layer, kv_dtype, batch, tile)
                    print(f"  {layer.name}, {batch}, {kv_dtype}, {h}x{n} w{warps}: {seconds * 1e6:.1f} us", flush=True)
                    yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, default=95.0, help="seconds after which nothing more is timed")
    options = parser.parse_args()
    begun = time.monotonic()
    print(torch.cuda.get_device_name(), current_arch().name, flush=True)
    failures = []
    others = [(i, kv_dtype) for i in range(4) for kv_dtype in KV_DTYPES[:2]]
    with ProcessPoolExecutor(len(CHECKED) + 1 + len(others), multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(check, *case) for case in CHECKED] + [pool.submit(check_blocks, 0, "fp8_e4m3")]
        jobs += [pool.submit(compile_others, *case) for case in others]
        for job in jobs:
            try:
                found = job.result()
            except Exception as error:
                found = [(f"{type(error).__name__}: {error}"[:500], False)]
            for text, right in found:
                print(f"  {text}{'' if right else '  WRONG'}", flush=True)
                failures += [] if right else [text]
    print(f"{time.monotonic() - begun:.0f} s; decode steps, {CONTEXT:,} tokens a request, one layer", flush=True)
    try:
        for _ in timed():
            if time.monotonic() - begun > options.limit:
                print("  (no time for the rest)", flush=True)
                break
    except Exception as error:  # the verdict is that of the results
        print(f"  times ended: {type(error).__name__}: {error}"[:500], flush=True)
    print("FAILED\n  " + "\n  ".join(failures) if failures else "PASSED", flush=True)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
