"""What changed in the launches of a decode step, against what was before, in one process: pieces merged by columns,
products with a bias and with fp32 weights in one launch. Checks the results of both.

    python benchmark/kernels/decode_launches.py [--json FILE]  # GPU, about a minute; exits with 1 if results differ

Times are medians over replays of a CUDA graph with dependent launches, operands read from memory. What sums over ranks
gain is in `benchmark/parallel/two_gpus.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent / "attention"))
sys.path.insert(0, str(Path(__file__).parent))
from bench_attention import Data, Shape
from timing import copies_for, time_calls

from sglang.srt.hardware.arch import current_arch
from sglang.srt.kernels.tiles import attention_tiles
from sglang.srt.layers.attention.triton_ops import decode_attention
from sglang.srt.layers.triton_ops import gemv, pdl

Calls = list[Callable[[], torch.Tensor]]
CONTEXT = 202_752
"""Tokens of the longest sequence that a server of GLM-4.7 is asked for."""
HEADS = {"12/1 heads": (12, 1, 128, 128), "64/8 heads of 64": (64, 8, 64, 64), "latent, 8 heads": (8, 1, 576, 512)}
BIASED = {"GPT-OSS-20B qkv": (5120, 2880), "GPT-OSS-20B o": (2880, 4096), "GPT-OSS-20B router": (32, 2880)}


def attention_calls(data: Data, before: bool) -> Calls:
    """`before`: one program a head, 16 pieces at a time, and a grid for sequences of any length."""
    shape, arch = data.shape, current_arch()
    group = shape.num_heads // shape.num_kv_heads
    tile = attention_tiles("decode_attention", shape.head_dim, shape.v_head_dim, "bfloat16", arch.features, group)[0]
    sizes = (shape.batch, shape.num_heads, shape.num_kv_heads, shape.v_head_dim, arch.num_sms, tile, "cuda")
    workspace = decode_attention.DecodeWorkspace.allocate(*sizes, *(() if before else (CONTEXT,)))
    rows, lens = torch.arange(shape.batch, device="cuda"), data.ints(*[shape.prefix] * shape.batch)
    plan = decode_attention.plan_decode(lens, workspace, tile)
    torch.cuda.synchronize()  # a kernel that begins early reads the plan
    whole = 1 << (shape.v_head_dim - 1).bit_length()
    launch = {"V_HEAD_DIM": shape.v_head_dim, "BLOCK_DV": whole, "BLOCK_P": 16, "num_warps": 4}
    constants = (lambda *_: launch) if before else decode_attention.combine_constants

    def call(i: int) -> torch.Tensor:
        with patch.object(decode_attention, "combine_constants", constants):
            decode_attention.decode_attention_fwd(
                data.q[i], data.out, data.k_cache, data.v_cache, data.tables[i], rows, lens, plan,
                scale=data.scale, tile=tile,
            )  # fmt: skip
        return data.out

    return [lambda i=i: call(i) for i in range(data.rotations)]  # type: ignore[misc]


def gemv_calls(rows: int, cols: int, fp32: bool, before: bool) -> Calls:
    """With a bias, or with weights in fp32. `before`: by torch."""
    torch.manual_seed(0)
    x = torch.randn(1, cols, device="cuda").bfloat16()
    dtype = torch.float32 if fp32 else torch.bfloat16
    bias = None if fp32 else torch.randn(rows, device="cuda").to(dtype)
    count = copies_for(rows * cols * dtype.itemsize)
    weights = [(torch.randn(rows, cols, device="cuda") * cols**-0.5).to(dtype) for _ in range(count)]

    def call(w: torch.Tensor) -> torch.Tensor:
        if before:
            return F.linear(x.to(dtype), w, bias)
        return gemv.linear(x, w, bias, torch.float32 if fp32 else None)

    return [lambda w=w: call(w) for w in weights]  # type: ignore[misc]


def cases() -> dict[str, Callable[[bool], Calls]]:
    """Name -> what makes the calls of it, before or now."""
    made: dict[str, Callable[[bool], Calls]] = {}
    for name, heads in HEADS.items():
        for batch, context in ((1, 2048), (1, 32_768), (1, 131_072), (8, 32_768), (16, 2048), (64, 2048)):
            title = f"attention {name}, {batch} x {context:,}"
            shape = Shape(title, "decode", batch, context, 0, *heads)
            made[title] = lambda before, shape=shape: attention_calls(Data(shape), before)  # type: ignore[misc]
    for name, size in BIASED.items():
        made[f"{name} with a bias"] = lambda before, size=size: gemv_calls(*size, False, before)  # type: ignore[misc]
    made["a router of 160 experts in fp32"] = lambda before: gemv_calls(160, 5120, True, before)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    path = parser.parse_args().json
    pdl.enable("pdl" in current_arch().features)
    times: dict[str, tuple[float, float]] = {}
    wrong = []
    print(f"{torch.cuda.get_device_name()}, microseconds\n\n| | before | now |\n|---|---|---|")
    for name, make in cases().items():
        micros, results = [], []
        for before in (True, False):
            calls = make(before)
            results.append(calls[0]().double().clone())
            micros.append(time_calls(calls) * 1e6)
            del calls
        error = ((results[1] - results[0]).norm() / results[0].norm()).item()
        if not error < 4e-3:
            wrong.append(f"{name}: results differ by {error:.1e}")
        times[name] = (micros[0], micros[1])
        print(f"| {name} | {micros[0]:.1f} | {micros[1]:.1f} |", flush=True)
    print("\n".join(wrong) or "\nresults agree")
    if path:
        path.write_text(json.dumps(times, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
