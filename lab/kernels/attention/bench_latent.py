"""Latent attention (rank 512, rotary 64) as one rank of a model has it, beside what the GPU can do.

    python bench_latent.py                                # with this GPU's tiles
    SGLANG_FORCE_ARCH=sm_120 python bench_latent.py       # with those that sm_120 gets

Three tables: absorbed decoding by heads, batch and cache type; prompts with absorbed queries, and with expanded keys
and values, over prefixes of several lengths; what stands around attention in a decode step (store, products).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmark" / "kernels"))
from timing import copies_for, matmul_ceiling, read_ceiling, time_calls

from sglang.srt.blocks.mla.kernels.latent_prompt import latent_prompt_attention
from sglang.srt.blocks.mla.kernels.latent_store import latent_norm_rope_store
from sglang.srt.blocks.mla.reference import latent_absorb
from sglang.srt.hardware.arch import current_arch
from sglang.srt.kernels.tiles import attention_tiles
from sglang.srt.layers.attention.latent_chunks import cut_prefixes
from sglang.srt.layers.attention.triton_ops.decode_attention import DecodeWorkspace, decode_attention_fwd, plan_decode
from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd

RANK, ROT, NOPE, V_DIM = 512, 64, 128, 128
DIM = RANK + ROT
SCALE = (NOPE + ROT) ** -0.5
CACHES = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}
CHUNK = 8192


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda").to(dtype)


def scattered(batch: int, context: int) -> torch.Tensor:
    """[batch, context] int32: slots in runs of 64."""
    runs = torch.randperm(batch * context // 64, device="cuda")
    return (runs[:, None] * 64 + torch.arange(64, device="cuda")).view(batch, context).int()


def tile(op: str, dims: tuple[int, int], cache: str = "bfloat16", heads: int = 0) -> dict[str, int]:
    return dict(attention_tiles(op, *dims, cache, current_arch().features, heads)[0])


def decode_call(heads: int, batch: int, context: int, cache_name: str) -> Callable[[], None]:
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    chosen = tile("decode_attention", (DIM, RANK), cache_name, heads)
    workspace = DecodeWorkspace.allocate(batch, heads, 1, RANK, num_sms, chosen, "cuda")
    lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    plan = plan_decode(lens, workspace, chosen)
    cache, table = randn(batch * context, 1, DIM, dtype=CACHES[cache_name]), scattered(batch, context)
    q, out, rows = randn(batch, heads, DIM), randn(batch, heads, RANK), torch.arange(batch, device="cuda")
    return lambda: decode_attention_fwd(
        q, out, cache, cache[..., :RANK], table, rows, lens, plan, scale=SCALE, tile=chosen
    )


def decode_table(read: float, matmul: float) -> None:
    print("\nabsorbed decoding | cache | us | TB/s (of read) | TFLOP/s (of matmul)")
    for heads in (8, 16, 32, 64, 128):
        for batch, context in ((1, 8192), (16, 8192), (64, 2048)):
            for name in CACHES:
                size = batch * context * DIM * CACHES[name].itemsize
                calls = [decode_call(heads, batch, context, name) for _ in range(copies_for(size, maximum=16))]
                seconds = time_calls(calls, minimum=1)
                rate, flops = size / seconds, 2 * batch * context * heads * (DIM + RANK) / seconds
                print(
                    f"{heads:3} heads {batch:2} x {context} | {name:8} | {seconds * 1e6:8.1f}"
                    f" | {rate / 1e12:5.2f} ({rate / read:4.0%}) | {flops / 1e12:5.0f} ({flops / matmul:4.0%})",
                    flush=True,
                )


def prompt_calls(heads: int, new: int, prefix: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """(absorbed, expanded), both with their products."""
    table, rows = scattered(1, prefix + new), torch.zeros(1, dtype=torch.int64, device="cuda")
    cache, entries, q = randn(prefix + new, 1, DIM), randn(new, DIM), randn(new, heads, NOPE + ROT)
    w_uk, w_uv = randn(heads, NOPE, RANK), randn(heads, RANK, V_DIM)
    start = torch.tensor([0, new], dtype=torch.int32, device="cuda")
    prefix_lens = torch.tensor([prefix], dtype=torch.int32, device="cuda")
    out, latent = randn(new, heads, V_DIM), randn(new, heads, RANK)
    chunks = cut_prefixes(table, rows, [prefix], CHUNK)
    extend_tile = tile("extend_attention", (DIM, RANK))
    prompt_tile = tile("latent_prompt_attention", (NOPE + ROT, V_DIM))

    def absorbed() -> None:
        queries = torch.empty((new, heads, DIM), dtype=q.dtype, device="cuda")
        queries[..., RANK:] = q[..., NOPE:]
        latent_absorb(q[..., :NOPE], w_uk, queries[..., :RANK])
        keys = entries[:, None]
        extend_attention_fwd(
            queries, keys, keys[..., :RANK], latent, cache, cache[..., :RANK], table, rows, prefix_lens, start,
            scale=SCALE, tile=extend_tile, has_prefix=prefix > 0,
        )  # fmt: skip
        latent_absorb(latent, w_uv, out)

    def expanded() -> None:
        latent_prompt_attention(q, entries, w_uk, w_uv, out, start, cache, chunks, scale=SCALE, tile=prompt_tile)

    return absorbed, expanded


def prompt_table() -> None:
    print("\nprompts | absorbed us | expanded us | expanded is faster by")
    for heads in (16, 64):
        for new, prefix in ((8192, 0), (8192, 8192), (2048, 16384), (512, 8192), (256, 8192), (128, 8192), (64, 8192)):
            torch.manual_seed(0)
            absorbed, expanded = prompt_calls(heads, new, prefix)
            first, second = (time_calls([call], minimum=1) for call in (absorbed, expanded))
            times = f"{first * 1e6:9.1f} | {second * 1e6:9.1f} | {first / second:.2f}"
            print(f"{heads:3} heads, {new} over {prefix} | {times}", flush=True)


def around_calls(heads: int, batch: int) -> dict[str, Callable[[], object]]:
    w_uk, w_uv = randn(heads, NOPE, RANK), randn(heads, RANK, V_DIM)
    q, queries, latents = randn(batch, heads, NOPE + ROT), randn(batch, heads, DIM), randn(batch, DIM)
    cache, weight, values = randn(4096, 1, DIM), randn(RANK), randn(batch, heads, V_DIM)
    cos_sin, loc = torch.rand((4096, ROT), device="cuda"), torch.arange(batch, device="cuda")
    return {
        "store": lambda: latent_norm_rope_store(q, latents, queries, loc, cos_sin, weight, 1e-6, cache, loc, 1.0, True),
        "W_UK": lambda: latent_absorb(q[..., :NOPE], w_uk, queries[..., :RANK]),
        "W_UV": lambda: latent_absorb(queries[..., :RANK], w_uv, values),
    }


def around_table() -> None:
    print("\naround decoding | us")
    for heads in (8, 16, 128):
        for batch in (1, 16, 64):
            calls = around_calls(heads, batch).items()
            cells = " | ".join(f"{name} {time_calls([call]) * 1e6:.1f}" for name, call in calls)
            print(f"{heads:3} heads, batch {batch:2} | {cells}", flush=True)


def main() -> None:
    read, matmul = read_ceiling(), matmul_ceiling()
    print(f"{torch.cuda.get_device_name()}: read {read / 1e12:.2f} TB/s, matmul {matmul / 1e12:.0f} TFLOP/s")
    decode_table(read, matmul)
    prompt_table()
    around_table()


if __name__ == "__main__":
    main()
