"""Latents in eight and in four bits on one GPU: the kernels against plain torch, and decode steps beside 16 bits.

    python lab/gpu/latent_caches.py            # GPU; two to four minutes on an H200 machine
    python lab/gpu/latent_caches.py --tiles    # also the times of other tiles
    SGLANG_FORCE_ARCH=sm_120 python lab/gpu/latent_caches.py      # with the tiles that sm_120 gets

Checks: the bytes that the store writes, and attention over records of every form against fp64 within 2e-3 of its norm,
of one token and of 200. Then times of one layer's attention and indexer in decode steps of 1 and of 16 requests with
131,072 tokens each, over caches that no level of memory keeps: DeepSeek-V4 (its layers with 4 and with 128 tokens an
entry), GLM-5.3-Flash, DeepSeek-V3.2 (8 and 128 heads) and Qwen3.8-Flash-Next.

Ends with PASSED, or with FAILED and what is outside. A cache of fewer bits that is slower than 16 bits in a whole layer
is outside.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark" / "kernels"))
from timing import copies_for, time_calls

from sglang.srt.blocks.pooled_sparse.block_selection import BlockSelection
from sglang.srt.blocks.pooled_sparse.kernels.selected_blocks import selected_block_attention_fwd
from sglang.srt.hardware.arch import current_arch
from sglang.srt.kernels.tiles import attention_tiles
from sglang.srt.layers import native_latent_records, native_sparse_ops
from sglang.srt.layers.attention.selection import EntryRows, Selection
from sglang.srt.layers.attention.triton_ops.index_logits import index_logits
from sglang.srt.layers.attention.triton_ops.sparse_attention import sparse_attention_fwd
from sglang.srt.layers.triton_ops.latent_records import latent_record_store
from sglang.srt.plan.latent_record import LatentRecord, latent_record

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
CONTEXT, BATCHES = 131_072, (1, 16)
BOUND = 2e-3
OTHER_TILES = ((16, 32, 4, 3), (16, 32, 8, 3), (16, 64, 8, 2), (32, 32, 8, 3), (16, 16, 4, 3), (16, 16, 4, 4))
failures: list[str] = []


def expect(true: bool, what: str) -> None:
    if not true:
        failures.append(what)
        print("  OUTSIDE:", what, flush=True)


@dataclass(frozen=True)
class Layer:
    """Attention of one layer to selected latents: `widths`: entries of one or two caches that a token selects;
    `rates`: tokens of an entry; `index`: heads of the indexer and tokens of a key, or None."""

    name: str
    dims: tuple[int, int]
    heads: int
    widths: tuple[int, ...]
    rates: tuple[int, ...]
    index: tuple[int, int] | None = None
    sinks: bool = False

    @property
    def values(self) -> int:
        return 512


LAYERS = (
    Layer("V4, 4 tokens an entry", (448, 64), 64, (128, 512), (1, 4), (64, 4), True),
    Layer("V4, 128 tokens an entry", (448, 64), 64, (128, 1024), (1, 128), None, True),
    Layer("V4 at TP4, 4 tokens an entry", (448, 64), 16, (128, 512), (1, 4), (64, 4), True),
    Layer("GLM-5.3-Flash", (512, 0), 32, (2048, 3), (1, 1), (32, 4)),
    Layer("V3.2, 8 heads", (512, 64), 8, (2048,), (1,)),
    Layer("V3.2, 128 heads", (512, 64), 128, (2048,), (1,)),
)
KV_DTYPES = ("bfloat16", "fp8_e4m3", "fp4_e2m1")


def record_of(layer: Layer, kv_dtype: str) -> LatentRecord | None:
    """Returns the record; None: 16 bits, or the packed latents that V3.2 has in eight."""
    return None if layer.name.startswith("V3.2") and kv_dtype == "fp8_e4m3" else latent_record(kv_dtype, *layer.dims)


def entries(count: int, layer: Layer, kv_dtype: str) -> torch.Tensor:
    """Returns a cache of random entries as they are stored."""
    rows = torch.randn(count, sum(layer.dims), device="cuda").to(BF16)
    if kv_dtype == "bfloat16":
        return rows[:, None]
    record = record_of(layer, kv_dtype)
    if record is None:
        return native_sparse_ops.pack_latents(rows)[:, None]
    cache = torch.zeros(count, 1, record.size, dtype=torch.uint8, device="cuda")
    latent_record_store(rows, cache, torch.arange(count, device="cuda"), record)
    return cache


def tile_of(layer: Layer, kv_dtype: str, tokens: int) -> dict[str, int]:
    tiles = attention_tiles(
        "sparse_attention", sum(layer.dims), layer.values, kv_dtype, current_arch().features, layer.heads
    )
    return dict(next(tile for tile in tiles if tile.get("least_tokens", 1) <= tokens))


def num_sms() -> int:
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def attend(
    layer: Layer, kv_dtype: str, q: torch.Tensor, sources: Sequence[tuple[torch.Tensor, Selection]],
    out: torch.Tensor, tile: dict[str, int],
) -> None:  # fmt: skip
    sinks = torch.zeros(layer.heads, device="cuda") if layer.sinks else None
    sparse_attention_fwd(
        q, sources, out, scale=0.05, tile=tile, num_sms=num_sms(), sinks=sinks, record=record_of(layer, kv_dtype)
    )


def selections(layer: Layer, tokens: int, pool: int) -> list[Selection]:
    made = []
    for width, rate in zip(layer.widths, layer.rates, strict=True):
        slots = torch.stack([torch.randperm(pool // rate, device="cuda")[:width] for _ in range(tokens)]).int()
        made.append(Selection(slots, torch.full((tokens,), width, dtype=torch.int32, device="cuda")))
    return made


def check(layer: Layer, kv_dtype: str, tokens: int) -> None:
    """Compares with fp64 over the values that are stored."""
    torch.manual_seed(tokens)
    record, pool = record_of(layer, kv_dtype), 20_000
    caches = [entries(pool // rate, layer, kv_dtype) for rate in layer.rates]
    q = torch.randn(tokens, layer.heads, sum(layer.dims), device="cuda").to(BF16)
    chosen = selections(layer, tokens, min(pool, 16_384))
    chosen = [replace_width(each, cache) for each, cache in zip(chosen, caches, strict=True)]
    sources = list(zip(caches, chosen, strict=True))
    out = torch.empty(tokens, layer.heads, layer.values, device="cuda")
    attend(layer, kv_dtype, q, sources, out, tile_of(layer, kv_dtype, tokens))
    wanted = out.double()
    sinks = torch.zeros(layer.heads, device="cuda") if layer.sinks else None
    native_sparse_ops.attend_selected(q.double(), sources, wanted, scale=0.05, sinks=sinks, record=record)
    error = float((out - wanted).norm() / wanted.norm())
    print(f"  {layer.name}, {kv_dtype}, {tokens} tokens: {error:.1e}", flush=True)
    expect(error < BOUND, f"{layer.name}, {kv_dtype}, {tokens} tokens: error {error:.2e}")


def replace_width(selection: Selection, cache: torch.Tensor) -> Selection:
    return Selection(selection.slots.clamp(max=len(cache) - 1), selection.counts)


def check_stores() -> None:
    rows = torch.randn(300, 576, device="cuda") * torch.randn(300, 1, device="cuda").mul(3).exp()
    places = torch.randperm(400, device="cuda")[:300]
    places[7] = -1
    for layer in {layer.dims: layer for layer in LAYERS}.values():
        for kv_dtype in KV_DTYPES[1:]:
            record = latent_record(kv_dtype, *layer.dims)
            assert record is not None
            some = rows[:, : record.dim].to(BF16)
            got, want = (torch.zeros(400, 1, record.size, dtype=torch.uint8, device="cuda") for _ in range(2))
            latent_record_store(some, got, places, record)
            native_latent_records.latent_record_store(some, want, places, record)
            same = torch.equal(got, want)
            print(f"  {record.describe()}: {'equal' if same else 'DIFFERENT'} bytes", flush=True)
            expect(same, f"bytes of {record}")


def time_attention(layer: Layer, kv_dtype: str, batch: int, tile: dict[str, int]) -> float:
    """Returns seconds, over pools that exceed every cache."""
    pool = batch * CONTEXT
    made = [entries(pool // rate, layer, kv_dtype) for rate in layer.rates]
    out = torch.empty(batch, layer.heads, layer.values, dtype=BF16, device="cuda")
    q = torch.randn(batch, layer.heads, sum(layer.dims), device="cuda").to(BF16)
    width = made[0].shape[-1] * made[0].element_size()
    copies = copies_for(batch * sum(layer.widths) * width)
    calls: list[Callable[[], object]] = []
    for _ in range(copies):
        sources = list(zip(made, selections(layer, batch, pool), strict=True))
        calls.append(lambda sources=sources: attend(layer, kv_dtype, q, sources, out, tile))  # type: ignore[misc]
    return time_calls(calls)


def time_indexer(heads: int, rate: int, kv_dtype: str, batch: int) -> float:
    """Returns seconds of the logits of all keys of the requests."""
    count = CONTEXT // rate
    name = "bfloat16" if kv_dtype == "bfloat16" else "fp8_e4m3"
    stored = BF16 if name == "bfloat16" else E4M3
    tile = dict(attention_tiles("sparse_indexer", 128, 128, name, current_arch().features)[0])
    table = torch.randperm(batch * count, device="cuda").int().view(batch, count)
    table = (table[:, :, None] * rate + torch.arange(rate, device="cuda", dtype=torch.int32)).flatten(1).contiguous()
    lens = torch.full((batch,), count, dtype=torch.int32, device="cuda")
    rows = EntryRows(table, torch.arange(batch, device="cuda"), lens, count, rate)
    q = torch.randn(batch, heads, 128, device="cuda").to(stored)
    weights = torch.rand(batch, heads, device="cuda")
    logits = torch.empty(batch, count, device="cuda")
    calls: list[Callable[[], object]] = []
    for _ in range(copies_for(batch * count * 128 * stored.itemsize, 8)):
        keys = torch.randn(batch * count, 1, 128, device="cuda").to(stored)
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
    tile = dict(
        attention_tiles("selected_block_attention", dim, dim, kv_dtype, current_arch().features, heads // kv)[0]
    )
    k, v = (torch.randn(pool, kv, dim, device="cuda").to(stored) for _ in range(2))
    q, out = (
        torch.randn(batch, heads, dim, device="cuda").to(BF16),
        torch.empty(batch, heads, dim, device="cuda").to(BF16),
    )
    counts, none = (torch.full((batch,), n, dtype=torch.int32, device="cuda") for n in (512, 0))
    calls: list[Callable[[], object]] = []
    for _ in range(copies_for(batch * 512 * block * kv * dim * 2 * stored.itemsize)):
        blocks = torch.stack([torch.randperm(pool // block, device="cuda")[:512] for _ in range(batch)]).int()
        chosen = BlockSelection(blocks, counts, none, none, block)
        calls.append(
            lambda chosen=chosen: selected_block_attention_fwd(  # type: ignore[misc]
                q, k, v, chosen, out, scale=0.06, tile=tile, num_sms=num_sms()
            )
        )
    return time_calls(calls)


def show(name: str, batch: int, times: dict[str, tuple[float, float]]) -> None:
    """Prints microseconds of attention, of the indexer and of both, beside those over 16 bits."""
    wide = sum(times["bfloat16"])
    for kv_dtype, (attention, indexer) in times.items():
        total = attention + indexer
        both = f"attention {attention * 1e6:.1f} us, indexer {indexer * 1e6:.1f} us"
        print(f"  {name}, {batch} requests, {kv_dtype}: {both}, {total / wide:.2f} of 16 bits", flush=True)
        # A microsecond is within what two runs differ by.
        expect(total <= max(wide * 1.02, wide + 1e-6), f"{name}, {batch} requests, {kv_dtype}: {total / wide:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiles", action="store_true", help="times of other tiles, too")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), current_arch().name, flush=True)
    print("stores", flush=True)
    check_stores()
    print("attention, error beside fp64", flush=True)
    for layer in LAYERS:
        for kv_dtype in KV_DTYPES:
            for tokens in (1, 200):
                check(layer, kv_dtype, tokens)
    print(f"decode steps, {CONTEXT:,} tokens a request, one layer", flush=True)
    for batch in BATCHES:
        for layer in LAYERS:
            times = {}
            for kv_dtype in KV_DTYPES:
                attention = time_attention(layer, kv_dtype, batch, tile_of(layer, kv_dtype, batch))
                indexer = time_indexer(*layer.index, kv_dtype, batch) if layer.index else 0.0
                times[kv_dtype] = (attention, indexer)
                torch.cuda.empty_cache()
            show(layer.name, batch, times)
            for kv_dtype in KV_DTYPES[1:] if options.tiles else ():
                for h, n, warps, stages in OTHER_TILES:
                    if h > max(16, layer.heads):
                        continue
                    for together in (1, 2):
                        tile = {"BLOCK_H": h, "BLOCK_N": n, "num_warps": warps, "num_stages": stages}
                        seconds = time_attention(layer, kv_dtype, batch, tile | {"ctas_per_sm": together})
                        print(
                            f"    {kv_dtype} {h}x{n} w{warps} s{stages} {together}: {seconds * 1e6:.1f} us", flush=True
                        )
        blocks = {
            kv_dtype: (time_blocks(kv_dtype, batch), time_indexer(4, 4, kv_dtype, batch)) for kv_dtype in KV_DTYPES[:2]
        }
        show("Qwen3.8-Flash-Next", batch, blocks)
        torch.cuda.empty_cache()
    print("FAILED\n  " + "\n  ".join(failures) if failures else "PASSED", flush=True)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
