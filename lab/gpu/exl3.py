"""Holds the kernels of EXL3 to plain torch on this machine's GPU, and times them. Takes about a minute.

    python lab/gpu/exl3.py [--no-times]

Every form (codebook, bits) is compared for one row, 16 rows and a prompt, and experts by routing. Then a table: the
time of a product in a replayed CUDA graph over as many matrices as the L2 cache does not hold, and what part that is of
reading the tiles at the rate of a copy; of prompts beside a product of 16 bits. Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python")]

import torch  # noqa: E402

from sglang.srt.configs.activation import SILU  # noqa: E402
from sglang.srt.configs.trellis import CODEBOOKS, Trellis  # noqa: E402
from sglang.srt.hardware.arch import CPU  # noqa: E402
from sglang.srt.layers.quantization import trellis, trellis_banks  # noqa: E402
from sglang.srt.layers.quantization.trellis import TrellisModule, TrellisWeight  # noqa: E402
from sglang.srt.layers.quantization.trellis_banks import TrellisBank, places_of  # noqa: E402
from sglang.srt.layers.triton_ops import trellis_experts, trellis_products  # noqa: E402

FORMS = [Trellis(2 * bits, codebook) for codebook in CODEBOOKS for bits in range(1, 9)] + [
    Trellis(2 * bits + 1, "mul1") for bits in range(1, 8)
]
TIMED = (Trellis(6, "mul1"), Trellis(7, "mul1"), Trellis(8, "mul1"), Trellis(8, "mcg"), Trellis(8, "3inst"))
SIZES = ((4096, 4096), (12288, 4096), (4096, 12288))
COLD_BYTES = 200 << 20
"""Bytes of the matrices that a graph goes through, more than the L2 cache holds."""


def tiles_of(form: Trellis, rows: int, cols: int, *experts: int) -> torch.Tensor:
    shape = (*experts, cols // 16, rows // 16, form.words)
    return torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, device="cuda")


def scales(size: int, scale: float, *experts: int) -> torch.Tensor:
    return (scale * (0.5 + torch.rand(*experts, size, device="cuda"))).half()


def weight_of(form: Trellis, rows: int, cols: int) -> TrellisWeight:
    module = TrellisModule(form, tiles_of(form, rows, cols), scales(cols, 1.0), scales(rows, 0.02), 0, rows)
    return TrellisWeight([module], cols)


def bank_of(form: Trellis, rows: int, cols: int, experts: int) -> TrellisBank:
    places = places_of(rows, rows, torch.device("cuda"))
    tiles = tiles_of(form, rows, cols, experts)
    return TrellisBank(form, tiles, scales(cols, 1.0, experts), scales(rows, 0.02, experts), rows, cols, places)


def differs(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def check() -> bool:
    """Prints the largest error of each kind of product; returns whether all are small."""
    worst: dict[str, float] = {}
    for form in FORMS:
        weight = weight_of(form, 384, 512)
        of_torch = trellis.trellis_linear(weight, CPU, ())
        of_triton = trellis_products.trellis_linear(weight, CPU, ())
        for rows in (1, 16, 100):
            for dtype in (torch.bfloat16, torch.float16):
                x = torch.randn(rows, 512, device="cuda", dtype=dtype)
                error = differs(of_triton(x, None, torch.float32), of_torch(x.float()))
                name = f"{rows} rows"
                worst[name] = max(worst.get(name, 0.0), error)
                if error > 2e-3:
                    print(f"  {form}, {rows} rows, {dtype}: {error:.1e}")
    for tokens in (1, 40, 1500):
        experts = 8
        w13 = tuple(bank_of(Trellis(6, "mul1"), 256, 512, experts) for _ in range(2))
        w2 = (bank_of(Trellis(8, "mul1"), 512, 256, experts),)
        x = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16)
        ids = torch.rand(tokens, experts, device="cuda").topk(3).indices.int()
        ids[::5, 0] = -1
        weights = torch.rand(tokens, 3, device="cuda")
        want = trellis_banks.fused_moe(x.float(), w13, w2, weights, ids, SILU, ())
        error = differs(trellis_experts.fused_moe(x, w13, w2, weights, ids, SILU, ()), want)
        worst[f"experts, {tokens} tokens"] = error
    for name, error in worst.items():
        print(f"{name}: largest relative error {error:.1e}")
    return all(error < (1e-2 if "experts" in name else 2e-3) for name, error in worst.items())


def seconds(run: Callable[[], None]) -> float:
    """Returns the time of `run` in a replayed graph: the best of some."""
    for _ in range(2):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return min(times)


def read_rate() -> float:
    """Returns the bytes that are read a second by a sum over 1 GiB."""
    data = torch.zeros(1 << 28, device="cuda")
    return data.nbytes / seconds(lambda: data.sum())


def times() -> None:
    rate = read_rate()
    print(f"\n{torch.cuda.get_device_name()}: {rate / 1e12:.2f} TB/s read by a sum\n")
    print(
        f"{'form':<12}{'rows x cols':<14}{'tokens':>7}{'us':>9}{'tiles alone':>13}{'of reading':>12}{'16 bits, us':>13}"
    )
    for form in TIMED:
        for rows, cols in SIZES if form == TIMED[2] else SIZES[:1]:
            weight = weight_of(form, rows, cols)
            num_bytes = weight.modules[0].tiles.nbytes
            count = max(1, COLD_BYTES // num_bytes)
            packed = [trellis_products.pack(weight_of(form, rows, cols)) for _ in range(count)]
            dense = [torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16) for _ in range(min(count, 8))]
            for tokens in (1, 4, 16, 64, 2048) if form == TIMED[2] else (1, 16):
                x = torch.randn(tokens, cols, device="cuda", dtype=torch.bfloat16)
                used = packed if tokens <= 64 else packed[:2]

                def all_products(x: torch.Tensor = x, used: list[trellis_products.PackedTrellis] = used) -> None:
                    for one in used:
                        trellis_products.product(x, one)

                def all_dense(x: torch.Tensor = x, dense: list[torch.Tensor] = dense) -> None:
                    for one in dense:
                        torch.nn.functional.linear(x, one)

                alone = float("nan")
                if tokens <= trellis_products.MAX_ROWS:
                    splits, chunk = trellis_products.splits_of(rows, cols)
                    parts = torch.empty((splits, tokens, rows), device="cuda")
                    inner = x.half()

                    def all_tiles(
                        used: list[trellis_products.PackedTrellis] = used, inner: torch.Tensor = inner,
                        parts: torch.Tensor = parts, chunk: int = chunk,
                    ) -> None:  # fmt: skip
                        for one in used:
                            trellis_products.few_rows(inner, one.modules[0], parts, chunk)

                    alone = seconds(all_tiles) / len(used)
                whole, wide = seconds(all_products) / len(used), seconds(all_dense) / len(dense)
                share = num_bytes / rate / alone
                name, size = f"{form.codebook} {form.half_bits / 2:g}", f"{rows}x{cols}"
                print(
                    f"{name:<12}{size:<14}{tokens:>7}{whole * 1e6:>9.1f}{alone * 1e6:>13.1f}{share:>12.0%}"
                    f"{wide * 1e6:>13.1f}"
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-times", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        right = check()
        if right and not args.no_times:
            times()
    print("\nAll products are right." if right else "\nSome products differ.")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
