"""Writes how many instructions this server's kernels spend where arithmetic other than matrix products can bind them.

    python lab/kernels/card/count_instructions.py [--out FILE] [--only PART]

Compiles for sm_90 and sm_120 what the tables of tiles name, disassembles it (Triton brings the tools) and counts the
longest loop, as instructions of a lane: for a weight that is widened to other bits before it is multiplied ("tiles"),
for a weight that is streamed without matrix instructions ("streams"), for a pair of a query and a key ("prompts"). Ten
minutes of one core with Triton 3.6.0, and no GPU. "mixed", the weights of sgl-kernel's products, takes nvcc.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[3] / "test"))
import machine_code
from srt.kernels.census.moe import grouped_product

from sglang.ledger.compile import compile_for
from sglang.ledger.measure import variant_of
from sglang.ledger.variant import Variant
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.hardware.arch import ArchTraits, arch_by_name
from sglang.srt.kernels.ledger_file import LOCKS
from sglang.srt.kernels.scaled_product import product_of
from sglang.srt.layers.moe.fused_moe_triton.tiles import GroupedTile, tile, tile_rows
from sglang.tuning.instructions import COUNTS, tile_form
from sglang.tuning.search_space import MAX_ACCUMULATORS, MIN_ACCUMULATORS, STRIP

ARCHS = ("h200", "rtx-pro-6000-server")
WIDENED = ("int4_g32", "mxfp4", "nvfp4_a16", "mxfp4_mxfp8")
STREAMED = (None, "fp8_channel", "fp8_block", "int4_g32", "mxfp4", "nvfp4")
CHOSEN = "mxfp4"
"""The scheme of which all tiles of the tuner's space are counted on sm_120, not only the shipped ones."""
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
CUDA = Path(__file__).parents[3] / "sgl-kernel" / "csrc"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=COUNTS)
    parser.add_argument(
        "--only", choices=("tiles", "streams", "prompts", "mixed"), help="of the file's parts; others stay"
    )
    options = parser.parse_args(argv)
    import triton

    content = json.loads(options.out.read_text()) if options.only else {}
    content |= {"made by": "python lab/kernels/card/count_instructions.py"}
    if options.only != "mixed":
        content["triton"] = triton.__version__
    for part, counts in (("tiles", tiles), ("streams", streams), ("prompts", prompts), ("mixed", mixed)):
        if options.only in (None, part):
            content[part] = {}
            for arch in map(arch_by_name, ARCHS):
                for form, key, count in counts(arch):
                    content[part].setdefault(form, {}).setdefault(key, round(count, 2))
                    print(part, form, key, round(count, 2), file=sys.stderr)
    options.out.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    return 0


def lock_of(arch: ArchTraits) -> str:
    return next(lock for lock, archs in LOCKS.items() if arch.name in archs)


def longest_loop(variant: Variant, arch: ArchTraits) -> int:
    """Instructions of a thread besides matrix products: of the loop with the most of those, or of the longest one."""
    return max(machine_code.loops(machine_code.disassemble(compile_for(variant, arch.name).ptx))).others


def tiles(arch: ArchTraits) -> Iterator[tuple[str, str, float]]:
    """A weight of the experts' products, by all warps that widen it."""
    packed = "block_scaled_mma" in arch.features
    for scheme in WIDENED if packed else WIDENED[:3]:
        for kind in ("gate_up", "down"):
            for choice in _tiles_of(scheme, kind, arch):
                variant = grouped_product(kind, SCHEMES[scheme], choice, (4096, 1024), arch)
                width = 2 if kind == "gate_up" else 1
                weights = choice["BLOCK_N"] * width * choice["BLOCK_K"] / (32 * choice["num_warps"])
                yield tile_form(scheme, arch.features), tile_key(width, choice), longest_loop(variant, arch) / weights


def tile_key(width: int, choice: GroupedTile) -> str:
    return "x".join(str(size) for size in (width, choice["BLOCK_M"], choice["BLOCK_N"], choice["num_warps"]))


def _tiles_of(scheme: str, kind: str, arch: ArchTraits) -> Iterator[GroupedTile]:
    for row in tile_rows(product_of(SCHEMES[scheme], arch.features).tile_kind, arch.features):
        yield getattr(row, kind)
    if scheme == CHOSEN and "wgmma" not in arch.features:
        width = 2 if kind == "gate_up" else 1
        for m in (16, 32, 64, 128):
            for n in (32, 64, 128, 256):
                for warps in (4, 8):
                    if MIN_ACCUMULATORS <= m * n * width / (32 * warps) <= MAX_ACCUMULATORS:
                        yield tile(m, n, STRIP, 1, warps, 3)


def streams(arch: ArchTraits) -> Iterator[tuple[str, str, float]]:
    """A weight that is streamed: gate and up of few pairs, down of few pairs, a product of few rows."""
    for name in STREAMED:
        rows = [("fused_moe", "gate_up_pairs"), ("fused_moe", "down_sum"), *([("linear", "few")] if name else [])]
        for op, kind in rows:
            variant = variant_of(lock_of(arch), op, f"{kind}/{name or 'bf16'}")
            sizes = variant.tile
            width = 2 if "gate_up" in variant.key else 1
            weights = sizes["BLOCK_N"] * sizes["COLS"] * sizes["UNROLL"] * width / (32 * sizes["num_warps"])
            count = longest_loop(variant, arch) / weights
            yield f"{name or 'bf16'}/{arch.name}", variant.key.split("/")[0], count


def prompts(arch: ArchTraits) -> Iterator[tuple[str, str, float]]:
    """A pair of a query and a key of `extend_attention` with a 16-bit cache, and no window."""
    for dims in HEAD_DIMS:
        shape = f"{dims[0]}x{dims[1]}"
        variant = variant_of(lock_of(arch), "extend_attention", f"{shape}/bfloat16/bfloat16/plain")
        pairs = variant.tile["BLOCK_M"] * variant.tile["BLOCK_N"] / (32 * variant.tile["num_warps"])
        text = machine_code.disassemble(compile_for(variant, arch.name).ptx)
        # Of the loops over cached and new keys, masked and not: most steps are not masked.
        fewest = min(loop.others for loop in machine_code.loops(text) if loop.matrix)
        yield arch.name, shape, fewest / pairs


def mixed(arch: ArchTraits) -> Iterator[tuple[str, str, float]]:
    """A weight of the first of sgl-kernel's products, by all warps, for each number of pairs of a block."""
    if "block_scaled_mma" not in arch.features:
        return
    for symbol, text in machine_code.functions_of(CUDA / "mixed_moe.cu", f"{arch.name}f", CUDA).items():
        sizes = re.search(r"TileILi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)ELi\d+EEELb1E", symbol)
        if sizes is not None:
            m, rows, *warps = map(int, sizes.groups())
            weights = rows * STRIP / (32 * warps[0] * warps[1])
            yield arch.name, str(m), max(machine_code.loops(text)).others / weights


if __name__ == "__main__":
    raise SystemExit(main())
