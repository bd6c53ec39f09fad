"""What LoRA adapters of linear layers add to a decode step of Qwen3-8B's sizes, with several constants of the kernels.

    python lab/gpu/adapter_kernels.py     # GPU; 45 seconds at most on an H200, compiling included

The products of six layers (q, k and v; o; gate and up; down) in a CUDA graph, without adapters and with adapters of
rank 16, requests in turn. A row for each pool (places on the GPU), number of tokens and of adapters has milliseconds
that 36 layers would take more with each choice of constants: columns of the table. Rows that the time does not suffice
for are missing.
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
import torch.nn.functional as F

from sglang.srt.layers import adapters as layer_adapters
from sglang.srt.layers.adapter_memory import StepTokens
from sglang.srt.layers.adapters import AdapterLinear, ModuleRows
from sglang.srt.layers.triton_ops import adapters, pdl
from sglang.srt.plan.adapters import AdapterPlan
from sglang.srt.plan.ranks import whole

LAYERS, ALL_LAYERS, RANK, ROUNDS = 6, 36, 16, 20
PRODUCTS: tuple[tuple[tuple[int, ...], int], ...] = (
    ((4096, 1024, 1024), 4096), ((4096,), 4096), ((12288, 12288), 4096), ((4096,), 12288),
)  # fmt: skip
"""Heights of the modules of each product, and its columns."""
CELLS = ((32, 64, 1), (8, 64, 8), (32, 64, 32), (32, 256, 1), (32, 256, 32), (8, 1, 1), (8, 64, 1), (8, 256, 8))
"""Places, tokens and adapters."""
CONSTANTS: Mapping[str, Mapping[str, Any]] = {
    "as it is": {},
    "spans of A for 4 programs": {"MOST_SPANS": 4},
    "not aside": {"ASIDE": 1 << 30},
    "chunks of 32": {"chunk_rows": lambda num_tokens: 32},
    "chunks of 64": {"chunk_rows": lambda num_tokens: 64},
}


@contextmanager
def constants(values: Mapping[str, Any]) -> Iterator[None]:
    """Sets constants of the modules inside the block."""
    places = {name: layer_adapters if name == "ASIDE" else adapters for name in values}
    before = {name: getattr(places[name], name) for name in values}
    try:
        for name, value in values.items():
            setattr(places[name], name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(places[name], name, value)


class Pool:
    """Adapters of all products in so many places."""

    def __init__(self, slots: int) -> None:
        device, dtype = torch.device("cuda"), torch.bfloat16
        count = LAYERS * len(PRODUCTS)
        self.layers: Any = SimpleNamespace(
            plan=AdapterPlan(slots, RANK, None), device=device, dtype=dtype, kernels=adapters.ADAPTERS,
            ranks=torch.full((count, slots), RANK, dtype=torch.int32, device=device), stream=torch.cuda.Stream(),
            tokens=None,
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
        F.linear(inputs[weight.shape[1]], weight)


def with_adapters(
    weights: list[torch.Tensor], inputs: Mapping[int, torch.Tensor], pool: Pool, slots: torch.Tensor
) -> None:
    """Computes the products with the adapters in these slots of the pool, one of each token."""
    pool.order(slots)
    for weight, linear in zip(weights, pool.linears, strict=True):
        x = inputs[weight.shape[1]]
        linear.added(partial(F.linear, x, weight), x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, help="begin no measurement after so long")
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
        print("places, tokens, adapters: the products alone | " + " | ".join(CONSTANTS), flush=True)
        for slots, tokens, count in CELLS:
            inputs = {cols: torch.randn(tokens, cols, device="cuda", dtype=torch.bfloat16) for _, cols in PRODUCTS}
            of_tokens = (torch.arange(tokens, device="cuda") % count + 1).to(torch.int32)
            if tokens not in plain:
                plain[tokens] = milliseconds(partial(products, weights, inputs))
            row = [f"{slots}, {tokens}, {count}: {plain[tokens] * ALL_LAYERS / LAYERS:.2f}"]
            for values in CONSTANTS.values():
                if time.monotonic() < deadline:
                    with constants(values):
                        took = milliseconds(partial(with_adapters, weights, inputs, pools[slots], of_tokens))
                    row.append(f"{(took - plain[tokens]) * ALL_LAYERS / LAYERS:.2f}")
            print(" | ".join(row), flush=True)


if __name__ == "__main__":
    main()
