"""Speed of the experts' products beside the GPU's ceilings, and beside upstream's fused MoE kernel at the same inputs.

    python bench_fused_moe.py --out results.json [--peer-site DIR] [--shapes qwen3-bf16,...] [--batches 1,8,64,512,4096]

`--peer-site` is a folder with upstream and its dependencies. Both sides have the package name `sglang`, so each runs in
a process of its own, with inputs from the same seeds, and first compares its results with dequantized fp32. Times are
of CUDA graphs that hold calls with several routings, so that neither launches nor caches flatter them. A ratio above 1
means that ours is faster.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmark" / "kernels"))
from timing import copies_for, matmul_ceiling, read_ceiling, time_calls

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
BATCHES = (1, 8, 64, 512, 4096)
CHECKED_TOKENS = 16
BOUNDS = {"bf16": 1e-2, "int4": 2e-2, "fp8_block": 6e-2, "fp8_channel": 6e-2}
"""Of the error's norm; x is rounded to e4m3 on one or both sides, which fp32 does not do."""
CHANNEL_SCALE, BLOCK = 2.0**-7, 128


@dataclass(frozen=True)
class Shape:
    """The experts of one rank. `kind`: "bf16", "fp8_block" (128x128), "fp8_channel" or "int4" (groups of 32)."""

    name: str
    kind: str
    num_experts: int
    intermediate: int
    hidden: int
    top_k: int = 8

    @property
    def weight_bytes(self) -> float:
        """Of one weight, scales included."""
        return {"bf16": 2.0, "fp8_block": 1 + 4 / BLOCK**2, "fp8_channel": 1.0, "int4": 0.5 + 2 / 32}[self.kind]

    def bytes(self, used_experts: float, num_tokens: int) -> float:
        """Least traffic: the used experts' weights once, x and the result once."""
        return used_experts * 3 * self.hidden * self.intermediate * self.weight_bytes + 4 * num_tokens * self.hidden

    def flops(self, num_tokens: int) -> float:
        return 6.0 * num_tokens * self.top_k * self.hidden * self.intermediate


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-bf16", "bf16", 128, 768, 2048),
        Shape("qwen3-fp8-block", "fp8_block", 128, 768, 2048),
        Shape("glm47-fp8-channel", "fp8_channel", 161, 192, 5120),
        Shape("kimi-int4", "int4", 384, 256, 7168),
    )
}


@dataclass
class Matrix:
    """`data` [E, N, K] (int4: [E, N, K / 2] uint8, even columns in the low bits, plus 8) and its scales."""

    data: torch.Tensor
    scale: torch.Tensor | None


class Inputs:
    """Weights, and for each number of tokens x and routings. Whoever makes it in the same order has the same."""

    def __init__(self, shape: Shape, device: str = "cuda") -> None:
        self.shape, self.device = shape, device
        self.generator = torch.Generator(device).manual_seed(1)
        self.w13 = self._matrix(2 * shape.intermediate, shape.hidden)
        self.w2 = self._matrix(shape.hidden, shape.intermediate)

    def _matrix(self, rows: int, cols: int) -> Matrix:
        experts, kind = self.shape.num_experts, self.shape.kind
        if kind == "bf16":
            data = torch.empty((experts, rows, cols), dtype=torch.bfloat16, device=self.device)
            return Matrix(data.normal_(0, cols**-0.5, generator=self.generator), None)
        if kind == "int4":
            data = torch.empty((experts, rows, cols // 2), dtype=torch.uint8, device=self.device)
            data.random_(0, 256, generator=self.generator)
            return Matrix(data, (self._rand(experts, rows, cols // 32) * (cols**-0.5 / 4)).bfloat16())
        data = torch.empty((experts, rows, cols), dtype=torch.float8_e4m3fn, device=self.device)
        for expert in data:
            values = torch.randn((rows, cols), generator=self.generator, device=self.device)
            expert.copy_(values.mul_(1 / CHANNEL_SCALE).clamp_(-448, 448))
        scale_shape = (rows // BLOCK, cols // BLOCK) if kind == "fp8_block" else (rows,)
        return Matrix(data, self._rand(experts, *scale_shape) * (CHANNEL_SCALE * cols**-0.5))

    def _rand(self, *shape: int) -> torch.Tensor:
        """Uniform between 0.5 and 1.5."""
        return torch.rand(shape, generator=self.generator, device=self.device) + 0.5

    def batch(self, num_tokens: int) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """x [T, H], and (weights, ids) of enough routings to make the caches cold. The seed is the batch size's."""
        shape, generator = self.shape, torch.Generator(self.device).manual_seed(num_tokens)
        x = torch.randn((num_tokens, shape.hidden), generator=generator, device=self.device).bfloat16()
        routings = []
        for _ in range(self._num_routings(num_tokens)):
            logits = torch.randn((num_tokens, shape.num_experts), generator=generator, device=self.device)
            weights, ids = logits.softmax(-1).topk(shape.top_k, dim=-1)
            routings.append((weights / weights.sum(-1, keepdim=True), ids.int()))
        return x, routings

    def _num_routings(self, num_tokens: int) -> int:
        used = min(self.shape.num_experts, num_tokens * self.shape.top_k)
        return copies_for(int(self.shape.bytes(used, 0)), maximum=32)

    def reference(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """[T, H] fp32, pair by pair."""
        out = torch.zeros(x.shape, device=x.device)
        for token in range(x.shape[0]):
            for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
                gate, up = (dequantized(self.w13, expert, self.shape.kind) @ x[token].float()).chunk(2)
                inter = (torch.nn.functional.silu(gate) * up).bfloat16().float()
                out[token] += weight * (dequantized(self.w2, expert, self.shape.kind) @ inter)
        return out


def dequantized(matrix: Matrix, expert: int, kind: str) -> torch.Tensor:
    """[N, K] fp32."""
    data = matrix.data[expert]
    if matrix.scale is None:
        return data.float()
    scale = matrix.scale[expert].float()
    if kind == "int4":
        codes = torch.stack((data & 15, data >> 4), -1).flatten(-2).float() - 8
        return codes * scale.repeat_interleave(32, -1)
    if kind == "fp8_channel":
        return data.float() * scale[:, None]
    return data.float() * scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


# --- the two sides ----------------------------------------------------------------------------------------------------

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""x, weights, ids -> result."""


def our_layer(inputs: Inputs) -> Layer:
    from sglang.srt.configs.activation import SILU
    from sglang.srt.configs.quant_scheme import SCHEMES
    from sglang.srt.hardware.arch import current_arch
    from sglang.srt.kernels.spec import Need
    from sglang.srt.layers.moe.expert_weights import ExpertWeights, repack
    from sglang.srt.layers.moe.fused_moe_triton.expert_tile_configs import triton_tile_configs
    from sglang.srt.layers.moe.fused_moe_triton.fused_moe import fused_moe
    from sglang.srt.layers.triton_ops import pdl

    shape, arch = inputs.shape, current_arch()
    pdl.enable("pdl" in arch.features)  # as a server does
    name = our_scheme(shape)
    scheme = SCHEMES[name] if name else None
    # A copy: repacking reorders, and the reference needs the original.
    matrices = [
        repack(ExpertWeights(m.data.clone() if scheme else m.data, scheme, m.scale), arch.features)
        for m in (inputs.w13, inputs.w2)
    ]
    sizes = ((2 * shape.intermediate, shape.hidden, False), (shape.hidden, shape.intermediate, False))
    need = Need("fused_moe", quant=name, shapes=sizes, experts=(shape.num_experts, shape.top_k, 1))
    configs = triton_tile_configs(need, arch).by_shape[None]

    def layer(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return fused_moe(x, *matrices, weights, ids, SILU, configs, arch.features)

    return layer


def our_scheme(shape: Shape) -> str | None:
    return {"bf16": None, "int4": "int4_g32"}.get(shape.kind, shape.kind)


class _Settings:
    """Upstream reads its server's arguments inside the kernel's launcher; whatever it asks for is off."""

    def __getattr__(self, name: str) -> bool:
        return False


def peer_layer(inputs: Inputs) -> Layer:
    from sglang.srt.blocks.moe.routing import StandardTopKOutput
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts
    from sglang.srt.server_args import set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(_Settings())
    shape = inputs.shape
    config = MoeRunnerConfig(num_experts=shape.num_experts, num_local_experts=shape.num_experts, inplace=False)
    own: dict[str, Any] = {
        "bf16": {},
        "fp8_block": {"use_fp8_w8a8": True, "block_shape": [BLOCK, BLOCK]},
        "fp8_channel": {"use_fp8_w8a8": True, "per_channel_quant": True},
        "int4": {"use_int4_w4a16": True, "block_shape": [0, 32]},
    }[shape.kind]
    scales = [m.scale for m in (inputs.w13, inputs.w2)]
    if shape.kind == "fp8_channel":
        scales = [scale[..., None] for scale in scales if scale is not None]

    def layer(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        routing = StandardTopKOutput(weights, ids, weights)
        return fused_experts(
            x, inputs.w13.data, inputs.w2.data, routing, config, w1_scale=scales[0], w2_scale=scales[1], **own
        )

    return layer


SIDES = ("ours", "peer")


def measure(side: str, shapes: list[Shape], batches: list[int], out: Path) -> None:
    """The rows of one side, written after each so that a failure leaves the others."""
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        inputs = Inputs(shape)
        layer = our_layer(inputs) if side == "ours" else peer_layer(inputs)
        for num_tokens in batches:
            x, routings = inputs.batch(num_tokens)
            error = error_of(layer, inputs, x, *routings[0])
            calls = [functools.partial(layer, x, weights, ids) for weights, ids in routings]
            used = sum(len(ids.unique()) for _, ids in routings) / len(routings)
            row = {
                "shape": shape.name,
                "batch": num_tokens,
                "seconds": time_calls(calls),
                "error": error,
                "bytes": shape.bytes(used, num_tokens),
                "flops": shape.flops(num_tokens),
            }
            rows.append(row)
            print(
                f"  {side} {shape.name} batch {num_tokens}: {row['seconds'] * 1e6:.1f} us, error {error:.1e}",
                flush=True,
            )
            out.write_text(json.dumps(rows, indent=1))
        del inputs, layer, calls
        torch.cuda.empty_cache()


def error_of(layer: Layer, inputs: Inputs, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> float:
    """Relative, of the first tokens of the batch. Raises SystemExit where the results are wrong."""
    actual = layer(x, weights, ids)[:CHECKED_TOKENS].float()
    wanted = inputs.reference(x[:CHECKED_TOKENS], weights[:CHECKED_TOKENS], ids[:CHECKED_TOKENS])
    error = float((actual - wanted).norm() / wanted.norm())
    if not error < BOUNDS[inputs.shape.kind]:
        raise SystemExit(f"{inputs.shape.name}, batch {x.shape[0]}: wrong results (relative error {error:.2e})")
    return error


def ceilings() -> dict[str, float]:
    """Measured: bytes a second of a reduction, FLOPs a second of square products in bf16 and e4m3."""
    fp8 = matmul_ceiling(torch.float8_e4m3fn)
    return {"read": read_ceiling(), "bf16": matmul_ceiling(), "fp8": fp8}


# --- the table --------------------------------------------------------------------------------------------------------


def table(results: dict[str, Any]) -> str:
    """A line a row of ours: time, share of the ceilings, and the peer's time with the ratio."""
    limits = results["ceilings"]
    peers = {(row["shape"], row["batch"]): row for row in results.get("peer", [])}
    lines = [
        f"ceilings: {limits['read'] / 1e12:.2f} TB/s read, {limits['bf16'] / 1e12:.0f} TFLOP/s bf16,"
        f" {limits['fp8'] / 1e12:.0f} fp8",
        f"{'shape':<20}{'batch':>6}{'ours us':>10}{'% bandwidth':>13}{'% FLOPs':>9}{'peer us':>10}{'ratio':>8}",
    ]
    ratios = []
    for row in results["ours"]:
        peak = limits["fp8" if "fp8" in SHAPES[row["shape"]].kind else "bf16"]
        cells = f"{row['shape']:<20}{row['batch']:>6}{row['seconds'] * 1e6:>10.1f}"
        cells += f"{100 * row['bytes'] / row['seconds'] / limits['read']:>13.1f}"
        cells += f"{100 * row['flops'] / row['seconds'] / peak:>9.1f}"
        peer = peers.get((row["shape"], row["batch"]))
        if peer is not None:
            ratios.append(peer["seconds"] / row["seconds"])
            cells += f"{peer['seconds'] * 1e6:>10.1f}{ratios[-1]:>8.3f}"
        lines.append(cells)
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        lines.append(f"geometric mean {mean:.3f}, least {min(ratios):.3f}")
    return "\n".join(lines)


def compare(args: argparse.Namespace) -> None:
    """Each side in a process of its own, then the table."""
    our_path = os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH")]))
    sides = {"ours": our_path} | ({"peer": args.peer_site} if args.peer_site else {})
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "ceilings": ceilings()}
    results["shapes"] = [asdict(SHAPES[name]) for name in args.shapes]
    torch.cuda.empty_cache()
    for side, path in sides.items():
        with tempfile.TemporaryDirectory() as folder:
            rows = Path(folder) / "rows.json"
            command = [sys.executable, __file__, "--side", side, "--out", str(rows)]
            command += ["--shapes", ",".join(args.shapes), "--batches", ",".join(map(str, args.batches))]
            env = {**os.environ, "PYTHONPATH": path}
            if side == "peer":
                env.pop("SGLANG_MOE_CONFIG_DIR", None)  # it cannot read our files
            done = subprocess.run(command, env=env)
            results[side] = json.loads(rows.read_text()) if rows.exists() else []
            if done.returncode:
                print(f"{side} failed with status {done.returncode}; its {len(results[side])} rows are kept")
        args.out.write_text(json.dumps(results, indent=1))
    print(table(results))


def listed(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON with every row")
    parser.add_argument("--peer-site", help="folder with upstream and its dependencies")
    parser.add_argument("--shapes", type=listed, default=list(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--batches", type=lambda text: [int(b) for b in listed(text)], default=list(BATCHES))
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = [name for name in args.shapes if name not in SHAPES]
    if unknown:
        parser.error(f"unknown shape {unknown[0]!r}; known: {', '.join(SHAPES)}")
    if args.side:
        measure(args.side, [SHAPES[name] for name in args.shapes], args.batches, args.out)
    else:
        compare(args)


if __name__ == "__main__":
    main()
