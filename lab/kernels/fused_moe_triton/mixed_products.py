"""What e2m1 weights cost beside e4m3 activations on sm_120, where nothing of it runs: counted, and predicted.

    python lab/kernels/fused_moe_triton/mixed_products.py [--product rtx-pro-6000-server]

Compiles the experts' tiles for sm_120, disassembles them (Triton brings the disassembler) and counts the instructions
of the loop over K. A tile with e4m3 weights differs from one with e2m1 weights by the conversion, which a mixed
mxf8f6f4 product would not need. The cost model then says what that is of a step: GPT-OSS-120B on one GPU,
DeepSeek-V4-Flash on two. Both are published for 16-bit activations or e4m3 ones; the first form is what runs today when
no flag is given. "sgl-kernel" is its grouped product, with the registers and the shared memory on its record. Takes a
minute and needs no GPU.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import machine_code

from sglang.ledger.compile import compile_for
from sglang.ledger.variants.expert_products import product_variant
from sglang.srt.hardware.arch import ArchTraits, arch_by_name
from sglang.srt.kernels.ledger_file import tile_key
from sglang.srt.layers.moe.fused_moe_triton.capacity import recorded_cost
from sglang.srt.layers.moe.fused_moe_triton.tiles import GroupedTile, MoeTiles, tile_rows
from sglang.tuning.cost_model import LANES_PER_SM, constants_of, estimate
from sglang.tuning.mixed_products import RECORDS, mixed_product, mixed_tile
from sglang.tuning.rates import rates_of
from sglang.tuning.search_space import KINDS, MoeShape, candidates, grouped_product

TOKENS = (8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
CONVERTED, NATIVE = "mxfp4_mxfp8", "mxfp8"
"""Schemes whose tiles are compiled: the second one's loop is that of a product that needs no conversion."""


@dataclass(frozen=True, slots=True)
class Model:
    """`rest`: bytes of the weights outside the experts that one GPU reads for a decode step, and their number."""

    name: str
    shape: MoeShape
    layers: int
    rest_bytes: float
    rest_weights: float


def gpt_oss() -> Model:
    per_layer = (64 + 2 * 8) * 64 * 2880 + 64 * 64 * 2880 + 128 * 2880  # q, k, v, o, router
    weights = 36 * per_layer + 201_088 * 2880
    return Model("GPT-OSS-120B, 1 GPU", MoeShape(128, 2880, 2880, 4, CONVERTED, True), 36, 2.0 * weights, weights)


def deepseek_v4_flash() -> Model:
    """Attention and the shared expert in fp8, the output head in bf16; half of it on each of two GPUs. The indexer,
    compressors and hyper-connections are left out, which makes the experts' share larger than it is."""
    attention = 4096 * 1024 + 1024 * 64 * 512 + 4096 * 512 + 64 * 512 * 1024 + 8 * 1024 * 4096
    per_layer, head = (attention + 3 * 4096 * 2048) / 2, 129_280 * 4096 / 2
    shape = MoeShape(256, 1024, 4096, 6, CONVERTED)
    return Model("DeepSeek-V4-Flash, 2 GPUs", shape, 43, 43 * per_layer + 2 * head, 43 * per_layer + head)


@dataclass(frozen=True, slots=True)
class Loop:
    """Of one round of the loop over K: instructions of a thread that are no matrix instructions, and registers."""

    others: int
    registers: int
    shared: int


def loop_of(kind: str, scheme: str, tile: GroupedTile, shape: MoeShape, arch: ArchTraits) -> Loop:
    variant = product_variant(
        kind, scheme, tile, shape.hidden, shape.intermediate, shape.top_k, sorted(arch.features), bias=shape.bias
    )
    compiled = compile_for(variant, arch.name)
    loop = max(machine_code.loops(machine_code.disassemble(compiled.ptx)))
    assert loop.matrix, f"no loop with matrix instructions in {variant.key}"
    return Loop(loop.others, compiled.measurement[1], compiled.measurement[0])


def product_seconds(model: Model, kind: str, tokens: int, tile: GroupedTile, arch: ArchTraits, extra: float) -> float:
    """Of one layer's product; `extra` instructions a thread in each round, beside what the model knows of. Inf for a
    tile that does not fit."""
    record = recorded_cost(model.shape.product_tile(kind, tile), arch)
    if record is None or isinstance(record, str):
        return math.inf
    found = estimate(grouped_product(model.shape, kind, record), tokens, tile, record, arch)
    if found is None:
        return math.inf
    rounds = found.programs * -(-model.shape.depth(kind) // tile["BLOCK_K"])
    lanes = arch.num_sms * LANES_PER_SM * rates_of(arch).clock
    chain = found.chain + rounds * extra * 32 * tile["num_warps"] / lanes
    return constants_of(arch).launch + math.fsum(t**4 for t in (chain, found.memory, found.l2)) ** 0.25


def rest_seconds(model: Model, tokens: int, arch: ArchTraits) -> float:
    """Everything but the experts, as if it were one product; attention over the cache is left out."""
    flops = rates_of(arch).matrix["half"] * constants_of(arch).matrix_share
    return max(model.rest_bytes / arch.bandwidth, 2.0 * model.rest_weights * tokens / flops)


def report(model: Model, rows: tuple[MoeTiles, ...], arch: ArchTraits) -> None:
    print(f"\n{model.name}: experts {model.shape}\n")
    print("| product, tile | loop, e4m3 weights | loop, e2m1 converted | instructions a weight | registers | shared |")
    print("|---|---|---|---|---|---|")
    extra: dict[tuple[str, str], float] = {}
    for kind in KINDS:
        for tile in {tile_key(t): t for t in (getattr(row, kind) for row in rows)}.values():
            native, converted = (loop_of(kind, s, tile, model.shape, arch) for s in (NATIVE, CONVERTED))
            more = extra[kind, tile_key(tile)] = converted.others - native.others
            held = tile["BLOCK_N"] * (2 if kind == "gate_up" else 1) * tile["BLOCK_K"] / (32 * tile["num_warps"])
            print(
                f"| {kind} {tile_key(tile)} | {native.others} | {converted.others} | {more / held:.1f} "
                f"| {native.registers} -> {converted.registers} | {native.shared:,} -> {converted.shared:,} |"
            )
    print("\n| tokens | bf16 | converted | native | experts of a step | native saves of the step | sgl-kernel |")
    print("|---|---|---|---|---|---|---|")
    widened = replace(model, shape=replace(model.shape, scheme="mxfp4"))
    for tokens in TOKENS:
        times = {"bf16": sum(_best_of_record(widened, kind, tokens, arch) for kind in KINDS)}
        for name, share in (("converted", 1.0), ("native", 0.0)):
            times[name] = min(
                sum(
                    product_seconds(model, kind, tokens, t, arch, share * extra[kind, tile_key(t)])
                    for kind, t in zip(KINDS, (row.gate_up, row.down), strict=True)
                )
                for row in rows
            )
        rest = rest_seconds(model, tokens, arch)
        step = rest + model.layers * times["converted"]
        saved = model.layers * (times["converted"] - times["native"]) / step
        us = " | ".join(f"{1e6 * times[name]:.0f}" for name in ("bf16", "converted", "native"))
        kernel = ", ".join(f"{1e6 * t:.0f} with {m} rows" for m, t in kernel_seconds(model, tokens, arch).items())
        print(f"| {tokens} | {us} | {1 - rest / step:.0%} | {saved:.0%} | {kernel} |")


def kernel_seconds(model: Model, tokens: int, arch: ArchTraits) -> dict[int, float]:
    """Of both products of sgl-kernel, by rows of a block."""
    times: dict[int, float] = {}
    for (kind, m), record in RECORDS.items():
        product = mixed_product(model.shape, kind, m)
        found = estimate(product, tokens, mixed_tile(model.shape, kind, m), record, arch)
        times[m] = times.get(m, 0.0) + (math.inf if found is None else found.total)
    return times


def _best_of_record(model: Model, kind: str, tokens: int, arch: ArchTraits) -> float:
    kept = candidates(model.shape, kind, arch, recorded_cost).kept
    return min(product_seconds(model, kind, tokens, tile, arch, 0.0) for tile, _ in kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--product", default="rtx-pro-6000-server")
    arch = arch_by_name(parser.parse_args().product)
    rows = tile_rows("mx", arch.features)
    print(f"{arch.product}; us are those of one layer's two products")
    for model in (gpt_oss(), deepseek_v4_flash()):
        report(model, rows, arch)


if __name__ == "__main__":
    main()
