"""What LoRA adapters of linear layers add to a decode step of Qwen3-8B's sizes, with several constants of the kernels.

    python lab/gpu/adapter_kernels.py     # GPU; 100 seconds at most on an H200, compiling included

The products of six layers (q, k and v; o; gate and up; down) in a CUDA graph, without adapters and with adapters of
rank 16, requests in turn. A row for each pool (places on the GPU), number of tokens and of adapters has the launches of
a layer, and the microseconds that a layer takes more with each choice of constants: columns of the table. Rows that the
time does not suffice for are missing. First the results are compared with the reference's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from sglang.srt.layers import native_adapters
from sglang.srt.layers.adapter_memory import StepTokens
from sglang.srt.layers.adapters import AdapterLinear, ModuleRows
from sglang.srt.layers.triton_ops import adapters, pdl
from sglang.srt.layers.triton_ops.gemv import linear
from sglang.srt.plan.adapters import AdapterPlan
from sglang.srt.plan.ranks import whole

LAYERS, RANK, ROUNDS = 6, 16, 20
PRODUCTS: tuple[tuple[tuple[int, ...], int], ...] = (
    ((4096, 1024, 1024), 4096), ((4096,), 4096), ((12288, 12288), 4096), ((4096,), 12288),
)  # fmt: skip
"""Heights of the modules of each product, and its columns."""
CELLS = (
    (8, 1, 1), (8, 64, 1), (8, 64, 8), (32, 64, 1), (32, 64, 32), (8, 256, 8), (32, 256, 1), (32, 256, 32), (8, 2, 1),
    (8, 2, 2), (8, 4, 1), (8, 4, 4), (8, 8, 1), (8, 8, 8), (8, 16, 1),
)  # fmt: skip
"""Places, tokens and adapters."""
CONSTANTS: Mapping[str, Mapping[str, Any]] = {
    "as it is": {},
    "always two launches": {"ONE_LAUNCH_TOKENS": 0},
    "one launch up to 16 tokens": {"MOST_OF_PROGRAM": 1 << 30, "MOST_READ": 1 << 40},
    "one launch up to 64 tokens": {"MOST_OF_PROGRAM": 1 << 30, "MOST_READ": 1 << 40, "ONE_LAUNCH_TOKENS": 64},
    "half a tile": {"FEW_TILES": 1 << 40},
    "spans of A for 4 programs": {"MOST_SPANS": 4},
    "chunks of 64": {"chunk_rows": lambda num_tokens: 64},
}


@contextmanager
def constants(values: Mapping[str, Any]) -> Iterator[None]:
    """Sets constants of the kernels' module inside the block."""
    before = {name: getattr(adapters, name) for name in values}
    try:
        for name, value in values.items():
            setattr(adapters, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(adapters, name, value)


class Pool:
    """Adapters of all products in so many places."""

    def __init__(self, slots: int) -> None:
        device, dtype = torch.device("cuda"), torch.bfloat16
        count = LAYERS * len(PRODUCTS)
        self.layers: Any = SimpleNamespace(
            plan=AdapterPlan(slots, RANK, None), device=device, dtype=dtype, kernels=adapters.ADAPTERS,
            ranks=torch.full((count, slots), RANK, dtype=torch.int32, device=device), scales={}, tokens=None,
        )  # fmt: skip
        self.linears = []
        for number in range(count):
            heights, cols = PRODUCTS[number % len(PRODUCTS)]
            shards = [ModuleRows(f"m{i}", f"{i}", whole(height), whole(cols)) for i, height in enumerate(heights)]
            linear = AdapterLinear(self.layers, number, shards)
            linear.weights.a.normal_(0, cols**-0.5)
            linear.weights.b.normal_(0, 0.1)
            self.linears.append(linear)

    def order(self, slots: torch.Tensor) -> None:
        self.layers.tokens = StepTokens(slots, adapters.order_tokens(slots, self.layers.plan.slots))

    def launches(self, slots: torch.Tensor) -> int:
        """Returns those of a layer."""
        self.order(slots)
        one = [adapters.takes_one_launch(self.layers.tokens.ordered, each.weights) for each in self.linears]
        return sum(1 if each else 2 for each in one[: len(PRODUCTS)])


def milliseconds(launch: Callable[[], None]) -> float:
    """Returns the time of a graph of the launches."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for _ in range(3):
        graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(ROUNDS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / ROUNDS


def products(weights: list[torch.Tensor], inputs: Mapping[int, torch.Tensor]) -> None:
    """Computes the products alone."""
    for weight in weights:
        linear(inputs[weight.shape[1]], weight)


def with_adapters(
    weights: list[torch.Tensor], inputs: Mapping[int, torch.Tensor], pool: Pool, slots: torch.Tensor
) -> None:
    """Computes the products with the adapters in these slots of the pool, one of each token."""
    pool.order(slots)
    for weight, one in zip(weights, pool.linears, strict=True):
        x = inputs[weight.shape[1]]
        one.added(partial(linear, x, weight), x)


def largest_difference(
    weights: list[torch.Tensor], inputs: Mapping[int, torch.Tensor], pool: Pool, slots: torch.Tensor
) -> float:
    """Returns the largest difference from the reference in a graph of the layers, as a share of the largest number."""
    results: list[torch.Tensor] = []

    def launch() -> None:
        results.clear()
        pool.order(slots)
        for weight, one in zip(weights, pool.linears, strict=True):
            x = inputs[weight.shape[1]] * 1.0  # written by the kernel ahead of the product
            results.append(one.added(partial(linear, x, weight), x))

    milliseconds(launch)
    worst = 0.0
    for weight, one, got in zip(weights, pool.linears, results, strict=True):
        x = inputs[weight.shape[1]]
        wanted = linear(x, weight)
        native_adapters.add_adapters(x, wanted, slots, one.weights)
        worst = max(worst, float((got - wanted).abs().max() / wanted.abs().max()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0, help="begin no measurement after so long")
    deadline = time.monotonic() + parser.parse_args().seconds
    pdl.enable(True)
    plain: dict[int, float] = {}
    with torch.inference_mode():
        weights = [
            torch.randn(sum(heights), cols, device="cuda", dtype=torch.bfloat16) * cols**-0.5
            for _ in range(LAYERS)
            for heights, cols in PRODUCTS
        ]
        pools = {slots: Pool(slots) for slots in {slots for slots, _, _ in CELLS}}
        names = " | ".join(CONSTANTS)
        print(f"places, tokens, adapters: largest difference | launches | the products alone | {names}", flush=True)
        for slots, tokens, count in CELLS:
            inputs = {cols: torch.randn(tokens, cols, device="cuda", dtype=torch.bfloat16) for _, cols in PRODUCTS}
            of_tokens = (torch.arange(tokens, device="cuda") % count + 1).to(torch.int32)
            if tokens not in plain:
                plain[tokens] = milliseconds(partial(products, weights, inputs))
            off = largest_difference(weights, inputs, pools[slots], of_tokens)
            launches = pools[slots].launches(of_tokens)
            row = [f"{slots}, {tokens}, {count}: {off:.4f} | {launches} | {plain[tokens] * 1000 / LAYERS:.1f}"]
            for values in CONSTANTS.values():
                if time.monotonic() < deadline:
                    with constants(values):
                        took = milliseconds(partial(with_adapters, weights, inputs, pools[slots], of_tokens))
                    row.append(f"{(took - plain[tokens]) * 1000 / LAYERS:.1f}")
            print(" | ".join(row), flush=True)


if __name__ == "__main__":
    main()
