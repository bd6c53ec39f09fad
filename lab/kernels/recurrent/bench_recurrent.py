"""Recurrent layers' kernels beside what the device can do at most.

    python lab/kernels/recurrent/bench_recurrent.py [--only decode] [--json out.json]

Decoding moves the state and little else: its bytes over the device's copy rate are the ceiling. For prompts the ceiling
is the larger of bytes moved and of products, each at the device's rate. Last comes the error of the state after 32,768
tokens, against the recurrence in fp64. Shapes are those of Qwen3.5-35B-A3B and Nemotron 3 Nano.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmark" / "kernels"))
from timing import copies_for, copy_ceiling, matmul_ceiling, time_calls

from sglang.srt.blocks.recurrent_state import reference
from sglang.srt.blocks.recurrent_state.kernels import causal_conv, gated_norm, recurrence, register_scan
from sglang.srt.blocks.recurrent_state.rule import Rule, gated_delta_rule

CONV_WIDTH = 4
LONG = 32_768
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of keys and values, dims of a key and a value."""

    name: str
    rule: Rule
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def values(self) -> int:
        return self.heads * self.value_dim

    @property
    def state_elements(self) -> int:
        return self.heads * self.key_dim * self.value_dim


SHAPES = (
    Shape("qwen3.5-35b", gated_delta_rule(128), 16, 32, 128, 128),
    Shape("nemotron-3-nano", Rule(delta=False), 8, 64, 128, 64),
)


@dataclass(frozen=True, slots=True)
class Case:
    """`make()` returns a call on buffers of its own that moves `num_bytes` and multiplies `flops`."""

    name: str
    num_bytes: int
    make: Callable[[], Call]
    flops: float = 0.0


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, device="cuda")


def inputs(shape: Shape, tokens: int) -> tuple[torch.Tensor, ...]:
    """Rule's arguments from q to skip, of `tokens` tokens."""
    keys = shape.key_heads * shape.key_dim
    rows = randn(tokens, shape.channels)
    parts = rows.split([keys, keys, shape.values], dim=-1)
    q, k = (torch.nn.functional.normalize(part.unflatten(-1, (-1, shape.key_dim)), dim=-1) for part in parts[:2])
    rows[:, : 2 * keys] = torch.cat((q.flatten(1), k.flatten(1)), dim=-1)
    q, k, v = (
        part.unflatten(-1, (-1, dim))
        for part, dim in zip(parts, (shape.key_dim, shape.key_dim, shape.value_dim), strict=True)
    )
    a, b = randn(tokens, 2 * shape.heads).split([shape.heads, shape.heads], dim=-1)
    per_head = [randn(shape.heads, dtype=torch.float32) for _ in range(3)]
    delta = shape.rule.delta
    return q, k, v, a, b if delta else None, *per_head[:2], None if delta else per_head[2]  # type: ignore[return-value]


def decode_cases(shape: Shape, num_sms: int) -> Iterator[Case]:
    for batch in (1, 16, 64, 256):
        slots = torch.arange(1, batch + 1, device="cuda")
        for dtype in (torch.float32, torch.bfloat16):

            def step(batch: int = batch, dtype: torch.dtype = dtype, slots: torch.Tensor = slots) -> Call:
                given = inputs(shape, batch)
                states = randn(batch + 1, shape.heads, shape.key_dim, shape.value_dim, dtype=dtype)
                out = randn(batch, shape.heads, shape.value_dim)
                return lambda: recurrence.recurrence_decode(shape.rule, *given, states, slots, out, num_sms)

            moved = batch * (2 * shape.state_elements * dtype.itemsize + 2 * (shape.channels + shape.values))
            yield Case(f"decode {shape.name} B={batch} {str(dtype).removeprefix('torch.')} state", moved, step)

        def conv(batch: int = batch, slots: torch.Tensor = slots) -> Call:
            x, weight = randn(batch, shape.channels), randn(shape.channels, CONV_WIDTH)
            states, out = randn(batch + 1, CONV_WIDTH - 1, shape.channels), randn(batch, shape.channels)
            norms = (2 * shape.key_heads, shape.key_dim) if shape.rule.delta else (0, 0)
            return lambda: causal_conv.causal_conv_decode(x, weight, None, states, slots, out, *norms)

        moved = 2 * shape.channels * (CONV_WIDTH + batch * 2 * CONV_WIDTH)
        yield Case(f"decode convolution {shape.name} B={batch}", moved, conv)
        yield norm_case(shape, batch)


def norm_case(shape: Shape, tokens: int) -> Case:
    def norm() -> Call:
        groups = shape.heads if shape.rule.delta else shape.key_heads
        x, gate = randn(tokens, groups, shape.values // groups), randn(tokens, shape.values)
        weight = randn(shape.values // groups if shape.rule.delta else shape.values)
        return lambda: gated_norm.gated_rmsnorm(x, gate, weight, 1e-6, not shape.rule.delta)

    return Case(f"gated norm {shape.name} T={tokens}", 6 * tokens * shape.values, norm)


def prompt_cases(shape: Shape, num_sms: int) -> Iterator[Case]:
    chunk = register_scan.CHUNK
    for length, count in ((64, 1), (1024, 1), (8192, 1), (1024, 8)):
        tokens = length * count
        slots = torch.arange(1, count + 1, device="cuda")
        prefix = torch.zeros(count, dtype=torch.int32, device="cuda")
        loc = torch.arange(count + 1, dtype=torch.int32, device="cuda") * length
        ragged = (slots, slots, prefix, loc)

        def scan(tokens: int = tokens, count: int = count, ragged: tuple = ragged) -> Call:
            given = inputs(shape, tokens)
            states = randn(count + 1, shape.heads, shape.key_dim, shape.value_dim, dtype=torch.float32)
            out = randn(tokens, shape.heads, shape.value_dim)
            return lambda: recurrence.recurrence_extend(shape.rule, *given, states, *ragged, out, num_sms)

        def conv(tokens: int = tokens, count: int = count, ragged: tuple = ragged) -> Call:
            x, weight = randn(tokens, shape.channels), randn(shape.channels, CONV_WIDTH)
            states, out = randn(count + 1, CONV_WIDTH - 1, shape.channels), torch.empty_like(x)
            norms = (2 * shape.key_heads, shape.key_dim) if shape.rule.delta else (0, 0)
            return lambda: causal_conv.causal_conv_extend(x, weight, None, states, *ragged, out, *norms)

        k, v = shape.key_dim, shape.value_dim
        # Of a token and head: scores, their product with values, reading and writing the state; and with the delta rule
        # the products of keys, of the inverse with keys and values, and of w with the state.
        per_token = chunk * (k + v) + 2 * k * v + (chunk * (2 * k + v) + k * v if shape.rule.delta else 0)
        moved = 2 * tokens * (shape.channels + shape.values)
        name = f"{shape.name} {count} x {length}"
        yield Case(f"prompt {name}", moved, scan, 2.0 * tokens * shape.heads * per_token)
        yield Case(f"prompt convolution {name}", 4 * tokens * shape.channels, conv)
        yield norm_case(shape, tokens)


def state_error(shape: Shape) -> str:
    """After 32,768 tokens, with states in fp32, relative to the norm of the state in fp64."""
    small = Shape(shape.name, shape.rule, 2, 4, shape.key_dim, shape.value_dim)
    torch.manual_seed(0)
    given = inputs(small, LONG)
    slots, loc = torch.ones(1, dtype=torch.int64, device="cuda"), torch.tensor([0, LONG], dtype=torch.int32)
    prefix = torch.zeros(1, dtype=torch.int32, device="cuda")
    states = torch.zeros(2, small.heads, small.key_dim, small.value_dim, device="cuda")
    out = torch.empty(LONG, small.heads, small.value_dim, dtype=torch.bfloat16, device="cuda")
    recurrence.recurrence_extend(small.rule, *given, states, slots, slots, prefix, loc.cuda(), out)
    exact = [None if x is None else x.double() for x in given]
    right, right_out = states.double(), out.double()
    reference.recurrence_extend(small.rule, *exact, right, slots, slots, prefix, loc, right_out)  # type: ignore[arg-type]
    errors = [
        float((mine.double() - other).norm() / other.norm())
        for mine, other in ((states[1], right[1]), (out, right_out))
    ]
    return f"{shape.name}: state {errors[0]:.2e}, outputs {errors[1]:.2e} after {LONG:,} tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    rate, flops = copy_ceiling(), matmul_ceiling()
    print(f"{torch.cuda.get_device_name()}: copy {rate / 1e12:.2f} TB/s, bf16 products {flops / 1e12:.0f} TFLOP/s\n")
    print(f"{'':<58} {'us':>9} {'GB/s':>7} {'TFLOP/s':>8} {'of ceiling':>10}")
    rows = []
    for shape in SHAPES:
        for case in (*decode_cases(shape, num_sms), *prompt_cases(shape, num_sms)):
            if args.only not in case.name:
                continue
            seconds = time_calls([case.make() for _ in range(copies_for(case.num_bytes, maximum=16))])
            ceiling = max(case.num_bytes / rate, case.flops / flops)
            share, gb, tf = ceiling / seconds, case.num_bytes / seconds / 1e9, case.flops / seconds / 1e12
            print(f"{case.name:<58} {seconds * 1e6:>9.1f} {gb:>7.0f} {tf:>8.1f} {share:>10.0%}")
            described = {key: value for key, value in asdict(case).items() if key != "make"}
            rows.append(described | {"seconds": seconds, "of_ceiling": share})
    for shape in SHAPES:
        if args.only in "error of the state":
            print(state_error(shape))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
