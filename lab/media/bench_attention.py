#!/usr/bin/env python3
"""Attention of image encoders, one layer: our kernel with this GPU's tiles and with those of SM120, our kernel where
heads are filled up to multiples of 16 elements, and what torch has.

    python lab/media/bench_attention.py [--patches 4096,16384] [--heads 64,72,80,128]

Queries, keys and values are views of one product [patches, 3, heads, head dim], as encoders have them; all patches see
one another, unless `--clips` cuts them into as many clips. Times are medians, in microseconds; TFLOP/s count the
products of `head dim` elements, whatever a kernel fills up. `first` is the first call at this size, in milliseconds:
where kernels are built for each size it is long. The error is the largest one against float32, over the largest value.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

from sglang.srt.kernels import tiles
from sglang.srt.layers.attention.triton_ops.prefill_attention import context_attention_fwd

NUM_HEADS, REPEATS, WIDTH = 16, 7, 16
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(patches: int, dim: int, stored: int) -> Heads:
    """Heads of `dim` elements, filled with zeros up to `stored`."""
    generator = torch.Generator("cuda").manual_seed(patches + dim)
    qkv = torch.zeros(patches, 3, NUM_HEADS, stored, dtype=torch.bfloat16, device="cuda")
    qkv[..., :dim] = torch.randn(patches, 3, NUM_HEADS, dim, generator=generator, device="cuda")
    q, k, v = qkv.unbind(1)
    return q, k, v


def triton(heads: Heads, starts: torch.Tensor, dim: int, tile: dict[str, int]) -> torch.Tensor:
    q, k, v = heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    context_attention_fwd(q, k, v, out, starts, is_causal=False, scale=dim**-0.5, tile=tile)
    return out


def library(heads: Heads, clips: int, backend: SDPBackend) -> torch.Tensor:
    q, k, v = (x.view(clips, -1, *x.shape[1:]).transpose(1, 2) for x in heads)
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(q, k, v)
    return out.transpose(1, 2).flatten(0, 1)


def varlen(heads: Heads, starts: torch.Tensor, longest: int) -> torch.Tensor:
    result = torch.ops.aten._flash_attention_forward(*heads, starts, starts, longest, longest, 0.0, False, False)
    out: torch.Tensor = result[0]
    return out


def reference(heads: Heads, clips: int, rows: int) -> torch.Tensor:
    """The first rows."""
    q, k, v = (x[: len(x) // clips].float() for x in heads)
    return F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q[:rows], k, v)))[0].transpose(0, 1)


def variants(patches: int, dim: int, clips: int) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    starts = torch.arange(clips + 1, dtype=torch.int32, device="cuda") * (patches // clips)
    plain, filled = inputs(patches, dim, dim), inputs(patches, dim, -(-dim // WIDTH) * WIDTH)
    for name, features in (("this GPU's tile", ("wgmma",)), ("SM120's tile", ())):
        for stored in {dim: plain, filled[0].shape[2]: filled}.values():
            size = stored[0].shape[2]
            (row,) = (r for r in tiles.ROWS if r.op == "prefill_attention" and (size, size) in r.head_dims)
            tile = next(iter(row.candidates(features)))
            yield f"triton, {name}, {size} stored", lambda x=stored, t=tile: triton(x, starts, dim, t)  # type: ignore[misc]
    yield "torch, flash", lambda: library(plain, clips, SDPBackend.FLASH_ATTENTION)
    yield "torch, cuDNN", lambda: library(plain, clips, SDPBackend.CUDNN_ATTENTION)
    yield "torch, flash, ragged", lambda: varlen(plain, starts, patches // clips)


def microseconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patches", default="4096,16384")
    parser.add_argument("--heads", default="64,72,80,128")
    parser.add_argument("--clips", type=int, default=1)
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {NUM_HEADS} heads, {args.clips} clips")
    print("| patches | head dim | kernel | us | TFLOP/s | first, ms | error |\n|---|---|---|---|---|---|---|")
    for patches in map(int, args.patches.split(",")):
        for dim in map(int, args.heads.split(",")):
            expected = reference(inputs(patches, dim, dim), args.clips, min(256, patches // args.clips))
            for name, call in variants(patches, dim, args.clips):
                began = time.perf_counter()
                try:
                    result = call()
                    torch.cuda.synchronize()
                except (RuntimeError, TypeError) as error:
                    print(f"| {patches} | {dim} | {name} | {str(error).splitlines()[0][:80]} | | | |", flush=True)
                    continue
                first = 1e3 * (time.perf_counter() - began)
                us = microseconds(call)
                rate = 4 * patches**2 / args.clips * NUM_HEADS * dim / us / 1e6
                off = (result[: len(expected), :, :dim].float() - expected).abs().max() / expected.abs().max()
                print(
                    f"| {patches} | {dim} | {name} | {us:.0f} | {rate:.0f} | {first:.0f} | {float(off):.4f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
