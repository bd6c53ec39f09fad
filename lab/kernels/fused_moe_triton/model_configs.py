"""Configurations for GPUs that are not at hand, from the cost model.

    python lab/kernels/fused_moe_triton/model_configs.py record     compile what to choose from: tile_costs.json
    python lab/kernels/fused_moe_triton/model_configs.py check      is the record that of today's kernels?
    python lab/kernels/fused_moe_triton/model_configs.py write      choose, and write configs/
        --triton DIR    with tiles that fit and do not spill with the Triton in that directory either

No step needs a GPU. What a tile costs depends on the scheme and on whether BLOCK_K divides the sum, not on the number
of experts or on other sizes, so each is compiled once. Few different tiles are chosen for each scheme, because every
one is compiled and verified again by the ledger.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[3] / "test"))
from published_shapes import CARDS, shapes
from tqdm import tqdm

from sglang.ledger.compile import CompileFailed, measure_cached, source_hash
from sglang.ledger.variant import Variant
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.environ import envs
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.ledger_file import tile_key
from sglang.srt.kernels.spec import TileRecord
from sglang.srt.layers.moe.fused_moe_triton.capacity import (
    RECORD_FILE,
    ProductTile,
    recorded_cost,
)
from sglang.srt.layers.moe.fused_moe_triton.config_files import PACKAGE_CONFIGS
from sglang.srt.layers.moe.fused_moe_triton.config_format import Content
from sglang.srt.layers.moe.fused_moe_triton.tiles import GroupedTile
from sglang.tuning.predict import Palette, Point, best_pair, point, small_palette
from sglang.tuning.search_space import (
    BATCH_SIZES,
    KINDS,
    STRIP,
    MoeShape,
    candidates,
    deepest_stages,
    space,
    why_not,
    widens,
)
from sglang.tuning.tile_files import directory_name, own_name, write_content

ARCH = arch_by_name("sm_120")
Kept = Mapping[MoeShape, Mapping[str, list[tuple[GroupedTile, TileRecord]]]]
MAX_TILES = 12
"""Of one scheme, both products together."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("record", "check", "write", "measure"))
    parser.add_argument("--triton", type=Path, help="another Triton that must agree; pip install --target DIR")
    parser.add_argument("--only", default="", help="schemes whose name contains this")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args(argv)
    if args.step == "record":
        record(args.only, args.processes)
    elif args.step == "check":
        return check()
    elif args.step == "measure":
        _measure_stdin()
    else:
        write(args.only, args.triton)
    return 0


# --- the record -------------------------------------------------------------------------------------------------------


def worth_recording(shape: MoeShape, kind: str, tile: GroupedTile) -> bool:
    """A part of the space: weight rows of 64 to 256 bytes that divide the sum if they can (two strips of widened ones
    need not), 64 to 256 of them (128 where they are widened one strip at a time, which takes registers; but high blocks
    need more, else every warp widens all of them); the deepest pipelines (of up to 4 stages) that one and that two
    programs on an SM allow; 8 warps where 4 would hold many sums. Of one scale a row, whose tiles were also timed on
    RTX PRO 6000 cards: rows from 32 on and either number of warps, because the fastest there are among those."""
    scheme, width = shape.scheme, 2 if kind == "gate_up" else 1
    sums = tile["BLOCK_M"] * tile["BLOCK_N"] * width // 128
    rows, timed = tile["BLOCK_N"] * width, scheme == "fp8_channel"
    dequantized = widens(scheme, ARCH)
    few = dequantized and tile["BLOCK_M"] < 64 and tile["BLOCK_K"] == STRIP
    if rows < (32 if timed else 64) or rows > (128 if few else 256):
        return False
    if not timed and sums != 64 and (tile["num_warps"] == 8) != (sums > 64):
        return False
    bits = SCHEMES[scheme].bits if scheme else 16
    row_bytes, ragged = tile["BLOCK_K"] * bits // 8, shape.depth(kind) % tile["BLOCK_K"] != 0
    if row_bytes > 256 or row_bytes < 64 or (ragged and tile["BLOCK_K"] > 128 and not dequantized):
        return False
    if bits == 8 and row_bytes == 64 and shape.depth(kind) % 128 == 0:
        return False
    return tile["num_stages"] in deepest_stages(scheme, kind, tile, ARCH)


def products() -> Iterator[ProductTile]:
    """Every tile to record once, with sizes that make it what it is."""
    seen = set()
    for shape in shapes():
        for kind in KINDS:
            for tile in space(kind):
                if why_not(shape, kind, tile, ARCH) or not worth_recording(shape, kind, tile):
                    continue
                product = shape.product_tile(kind, tile)
                if product.record_keys not in seen:
                    seen.add(product.record_keys)
                    yield product


def record(only: str, processes: int) -> None:
    """Compiles what is not in the cache, and writes tile_costs.json. Other schemes keep what is recorded of them."""
    todo = [product for product in products() if only in (product.scheme or "none")]
    record = json.loads(RECORD_FILE.read_text())["products"] if RECORD_FILE.exists() and only else {}
    found: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(_compile, product): product for product in todo}
        for future in tqdm(as_completed(futures), total=len(todo), unit="tile"):
            product = futures[future]
            name, tile = product.record_keys
            entry = found.setdefault(name, {"code": code_of(product), "tiles": {}})
            entry["tiles"][tile] = future.result()
    record |= found
    _write_record(record)


def _compile(product: ProductTile, arch: str = ARCH.name) -> list[Any] | str:
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as today's launches; silences a notice of Triton 3.9
    try:
        measured = measure_cached(_variant(product), (arch,), envs.SGLANG_CACHE_DIR / "ledger")
    except CompileFailed as error:
        return f"does not compile: {str(error).splitlines()[0][:120]}"
    smem, registers, spills, stack, mma = measured[arch]
    return [smem, registers, spills, stack, "; ".join(mma)]


def code_of(product: ProductTile) -> str:
    """Hash of the kernel's source, as the ledger computes it."""
    return source_hash(_variant(product).fn)


def _variant(product: ProductTile) -> Variant:
    """As the server launches it. Imports Triton."""
    from srt.kernels.census.moe import grouped_product

    scheme = SCHEMES[product.scheme] if product.scheme else None
    sizes = product.hidden, product.intermediate
    return grouped_product(product.kind, scheme, product.tile, sizes, ARCH, product.bias)


def _write_record(record: Mapping[str, Any], path: Path = RECORD_FILE) -> None:
    """One line a tile."""
    lines = []
    for name, entry in sorted(record.items()):
        tiles = [f"   {json.dumps(tile)}: {json.dumps(cost)}" for tile, cost in sorted(entry["tiles"].items())]
        body = ",\n".join(tiles)
        lines.append(f'  {json.dumps(name)}: {{"code": {json.dumps(entry["code"])}, "tiles": {{\n{body}\n  }}}}')
    head = f' "arch": "{ARCH.name}",\n "triton": "{importlib.metadata.version("triton")}",\n "products": {{\n'
    path.write_text("{\n" + head + ",\n".join(lines) + "\n }\n}\n")


def check() -> int:
    """0 if every product of the record was compiled from the kernels as they are."""
    recorded = json.loads(RECORD_FILE.read_text())["products"]
    first = {product.record_keys[0]: product for product in products()}
    stale = sorted(name for name, product in first.items() if recorded.get(name, {}).get("code") != code_of(product))
    for name in stale:
        print(f"{name}: the kernel changed since its tiles were recorded", file=sys.stderr)
    if stale:
        print("Run the steps `record` and `write`.", file=sys.stderr)
    return 1 if stale else 0


# --- the configurations -----------------------------------------------------------------------------------------------


def write(only: str, other_triton: Path | None) -> None:
    """Every shape on every card, with the tiles of a palette of its scheme."""
    by_scheme: dict[str | None, list[MoeShape]] = {}
    for shape in shapes():
        if only in (shape.scheme or "none"):
            by_scheme.setdefault(shape.scheme, []).append(shape)
    for scheme, of_scheme in by_scheme.items():
        kept = {
            shape: {kind: candidates(shape, kind, ARCH, recorded_cost).kept for kind in KINDS} for shape in of_scheme
        }
        points = [
            point(shape, tokens, arch_by_name(card), kept[shape])
            for shape in of_scheme
            for card in CARDS
            for tokens in BATCH_SIZES
        ]
        palette = _verified_palette(points, kept, other_triton)
        loss = max(p.best(palette)[0] / p.best()[0] for p in points)
        print(f"{scheme or 'bf16'}: {len(palette)} tiles, at most {loss:.2f} of the best predicted time")
        by_file: dict[tuple[MoeShape, str], list[Point]] = {}
        for p in points:
            by_file.setdefault((p.shape, p.arch.product or ""), []).append(p)
        for (shape, card), of_file in by_file.items():
            pairs = {p.num_tokens: best_pair(p, kept[shape], palette) for p in of_file}
            write_content(config_path(shape, card), Content(about(shape, card), pairs))


def _verified_palette(points: list[Point], kept: Kept, other_triton: Path | None) -> Palette:
    """A palette that the other Triton compiles without spills. Takes tiles that it does not out of `points`."""
    while True:
        palette = small_palette(points, MAX_TILES)
        if other_triton is None:
            return palette
        used = {
            product.record_keys: product
            for shape, by_kind in kept.items()
            for kind, key in sorted(palette)
            for tile, _ in by_kind[kind]
            if tile_key(tile) == key
            for product in (shape.product_tile(kind, tile),)
        }
        costs = _measure_with(other_triton, list(used.values()))
        bad = {
            (product.kind, tile_key(product.tile))
            for product, cost in zip(used.values(), costs, strict=True)
            if isinstance(cost, str) or cost[2] > 0 or cost[0] > ARCH.smem_per_block
        }
        if not bad:
            return palette
        print(f"  out with the other Triton: {', '.join(' '.join(tile) for tile in sorted(bad))}")
        for p in points:
            for (kind, _), times in p.times.items():
                for key in [key for key in times if (kind, key) in bad]:
                    del times[key]


def _measure_with(triton: Path, wanted: list[ProductTile]) -> list[Any]:
    """Costs by another Triton, in a process of its own."""
    paths = [str(triton), *(path for path in sys.path if path)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    request = json.dumps([asdict(product) for product in wanted])
    command = [sys.executable, __file__, "measure"]
    done = subprocess.run(command, env=env, input=request, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} with {triton}: {done.stderr[-2000:]}")
    results: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return results


def _measure_stdin() -> None:
    """Costs of the tiles on stdin with the most shared memory of sm_120 and sm_121, which differ with some Tritons."""
    results = []
    for fields in json.load(sys.stdin):
        cost = _compile(ProductTile(**fields))
        other = _compile(ProductTile(**fields), "sm_121")
        if not isinstance(cost, str) and not isinstance(other, str):
            cost[0] = max(cost[0], other[0])
        results.append(cost)
    print(json.dumps(results))


def config_path(shape: MoeShape, card: str) -> Path:
    name = own_name(shape.num_experts, shape.intermediate, shape.hidden, shape.scheme, arch_by_name(card))
    return PACKAGE_CONFIGS / directory_name(importlib.metadata.version("triton")) / str(name)


def about(shape: MoeShape, card: str) -> dict[str, Any]:
    arch = arch_by_name(card)
    return {
        "source": "model",
        "arch": arch.name,
        "num_sms": arch.num_sms,
        "scheme": shape.scheme or "none",
        "hidden": shape.hidden,
        "top_k": shape.top_k,
        "bias": shape.bias,
        "triton": importlib.metadata.version("triton"),
    }


if __name__ == "__main__":
    raise SystemExit(main())
