"""Find the fastest tiles of a model's expert kernels on this GPU, and write them where the server looks for them.

    python benchmark/kernels/fused_moe_triton/tuning_fused_moe_triton.py --model DIR --tp-size 8 --dtype auto --tune

reads DIR/config.json, times the tiles of both products for each number of tokens, and writes
`.../fused_moe_triton/configs/triton_X_Y_Z/E=..,N=..,device_name=..[,dtype=..].json`, or under `$SGLANG_MOE_CONFIG_DIR`.
Tiles that cannot fit the GPU or would spill are out before they are timed. An interrupted run goes on with `--resume`.
Several GPUs share the work if ray is installed. `--dry-run` prints what would be timed; it needs no GPU. Without
`--tune` the tiles that a server would use now are timed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm
from tuning_state import TuningState

from sglang.srt.configs.hf_config import read_config
from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.configs.quant_scheme import SCHEMES, expert_share
from sglang.srt.configs.quantization import detect
from sglang.srt.environ import envs
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import ArchTraits, arch_by_name, current_arch, device_count, device_name
from sglang.srt.kernels.ledger_file import tile_key
from sglang.srt.kernels.spec import TileRecord
from sglang.srt.layers.moe.fused_moe_triton import config_files
from sglang.srt.layers.moe.fused_moe_triton.capacity import recorded_cost
from sglang.srt.layers.moe.fused_moe_triton.config_format import TilePair
from sglang.srt.plan.model_description import describe_model
from sglang.srt.plan.ranks import RankLayout
from sglang.tuning import predict
from sglang.tuning.search_space import (
    BATCH_SIZES,
    KINDS,
    Candidates,
    MoeShape,
    candidates,
)
from sglang.tuning.tile_files import directory_name, upstream_name

DTYPES = ("auto", "bf16", "fp8_w8a8", "int8_w8a8", "int8_w8a16", "int4_w4a16", *SCHEMES)
DEFAULT_ARCH = "rtx-pro-6000-server"
"""Of a dry run on a machine without a GPU."""

Kept = dict[str, list[tuple[dict[str, int], TileRecord]]]
"""Kind -> tiles that can be used, with what they cost."""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        shape = read_shape(args)
        arch = _arch(args)
        if args.dry_run:
            print("\n".join(dry_run(shape, arch, args.batch_size or BATCH_SIZES, args.verbose)))
        elif args.tune:
            tune(shape, arch, args)
        else:
            show_current(shape, arch, args.batch_size or BATCH_SIZES)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory with the model's config.json")
    parser.add_argument("--tp-size", "--tp", type=int, default=1)
    parser.add_argument("--ep-size", "--ep", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of weights and activations; auto: the model's")
    parser.add_argument("--per-channel-quant", action="store_true", help="fp8_w8a8 with a scale a row and a token")
    parser.add_argument(
        "--batch-size", type=_positive, nargs="+", help="numbers of tokens; upstream's list if not given"
    )
    parser.add_argument("--tune", action="store_true", help="search and write the file")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    parser.add_argument("--dry-run", action="store_true", help="print the search space; nothing is compiled or timed")
    parser.add_argument("--arch", help="dry run: for this architecture or product, for example rtx-5090")
    parser.add_argument("--verbose", action="store_true", help="dry run: every tile")
    parser.add_argument("--output-dir", type=Path, help="instead of the package's configs directory")
    parser.add_argument("--disable-shared-experts-fusion", action="store_true", help="do not count shared experts in E")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=_positive, default=8, help="that compile")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _arch(args: argparse.Namespace) -> ArchTraits:
    if args.arch is not None:
        if not args.dry_run:
            raise UserError("--arch goes with --dry-run: times are those of this machine's GPU.")
        return arch_by_name(args.arch)
    arch = current_arch()
    if arch.capability is None:
        if not args.dry_run:
            raise UserError("There is no GPU here. --dry-run [--arch rtx-5090] prints what would be timed.")
        return arch_by_name(DEFAULT_ARCH)
    return arch


# --- the model --------------------------------------------------------------------------------------------------------


def read_shape(args: argparse.Namespace) -> MoeShape:
    """The experts of one rank. Raises UserError: no mixture of experts, sizes that do not divide, a foreign dtype."""
    directory = resolve_model_path(args.model, None, None, False)
    config = read_config(directory)
    quantization = detect(config, directory)
    apart = "--ep-size" if args.ep_size > 1 else "flag" if args.disable_shared_experts_fusion else ""
    model = describe_model(config, quantization, apart)
    experts = model.experts
    if experts is None:
        raise UserError(f"{args.model}: {model.architecture} has no experts; there is nothing to tune.")
    if args.tp_size % args.ep_size:
        raise UserError(f"--ep-size {args.ep_size} does not divide --tp-size {args.tp_size}.")
    ranks = RankLayout(args.tp_size, args.ep_size)
    quant = model.expert_quant
    scheme = scheme_of(args.dtype, args.per_channel_quant, quant.scheme if quant else None)
    return MoeShape(
        num_experts=ranks.padded_experts(experts.num_experts) + experts.fused_shared,
        intermediate=expert_share(experts.intermediate_size, ranks.expert_tp_size, SCHEMES[scheme] if scheme else None),
        hidden=model.hidden_size,
        top_k=experts.top_k + experts.fused_shared,
        scheme=scheme,
        bias=experts.bias,
    )


def scheme_of(dtype: str, per_channel: bool, of_model: str | None) -> str | None:
    """The scheme that --dtype stands for; `auto` is the model's. Raises UserError."""
    if per_channel and dtype not in ("auto", "fp8_w8a8", "fp8_channel", "int8_w8a8"):
        raise UserError(f"--per-channel-quant does not go with --dtype {dtype}.")
    if dtype == "int8_w8a16":
        raise UserError("--dtype int8_w8a16: there is no kernel for it here; int8_w8a8 and int4_w4a16 have one.")
    if dtype == "bf16":
        return None
    if dtype in SCHEMES:
        return dtype
    if dtype == "auto":
        if per_channel and of_model not in (None, "fp8_channel"):
            raise UserError(f"--per-channel-quant, but the model's experts are {of_model}.")
        return "fp8_channel" if per_channel else of_model
    families = {"fp8_w8a8": "fp8_", "int8_w8a8": "int8_channel", "int4_w4a16": "int4_"}
    defaults = {"fp8_w8a8": "fp8_tensor", "int8_w8a8": "int8_channel", "int4_w4a16": "int4_g32"}
    if per_channel and dtype == "fp8_w8a8":
        return "fp8_channel"
    return of_model if of_model and of_model.startswith(families[dtype]) else defaults[dtype]


# --- dry run ----------------------------------------------------------------------------------------------------------


def dry_run(shape: MoeShape, arch: ArchTraits, batch_sizes: Sequence[int], verbose: bool) -> Iterator[str]:
    """What would be timed and what not, and why; with the record of compiled tiles also what is expected of them."""
    yield f"{shape} on {arch.product or arch.name} ({arch.name}, {arch.num_sms} SMs)"
    yield f"shared memory of a block: {arch.smem_per_block:,} B"
    found = {kind: candidates(shape, kind, arch, recorded_cost) for kind in KINDS}
    for kind in KINDS:
        yield from _space_lines(kind, found[kind], verbose)
    compiled = {kind: found[kind].kept for kind in KINDS}
    if not all(compiled.values()):
        yield "No tile of it is on record; they are compiled first, and those that spill or do not fit are out as well."
        return
    yield "Fastest by the cost model:"
    for tokens in batch_sizes:
        point = predict.point(shape, tokens, arch, compiled)
        seconds, keys = point.best()
        tiles = "  ".join(f"{kind} {key}" for kind, key in zip(KINDS, keys, strict=True))
        yield f"{tokens:>7} tokens {seconds * 1e6:>9.1f} us  {tiles}"


def _space_lines(kind: str, found: Candidates, verbose: bool) -> Iterator[str]:
    total = len(found.kept) + len(found.unknown) + len(found.pruned)
    yield f"{kind}: {total} tiles, {len(found.kept)} to time, {len(found.unknown)} to compile first; pruned:"
    for reason, count in found.reasons().most_common():
        tile, example = next((tile, text) for tile, text in found.pruned if text.split(":")[0] == reason)
        yield f"  {count:>4} {reason}; for example {tile_key(tile)}: {example.partition(': ')[2]}"
    if verbose:
        yield from (f"    out  {tile_key(tile)}: {reason}" for tile, reason in found.pruned)
        yield from (
            f"    in   {tile_key(tile)}: {record.smem:,} B, {record.registers} registers, {', '.join(record.mma)}"
            for tile, record in found.kept
        )
        yield from (f"    in?  {tile_key(tile)}" for tile in found.unknown)


# --- tuning -----------------------------------------------------------------------------------------------------------


def tune(shape: MoeShape, arch: ArchTraits, args: argparse.Namespace) -> None:
    batch_sizes = args.batch_size or BATCH_SIZES
    triton_version = importlib.metadata.version("triton")
    path = output_path(shape, args.output_dir, triton_version, device_name())
    state = TuningState(path, about_run(shape, arch, triton_version))
    if args.resume:
        state.resume()
    todo = [tokens for tokens in batch_sizes if tokens not in state.done]
    print(f"{shape} on {device_name()}: {len(todo)} of {len(batch_sizes)} batch sizes to tune")
    if todo:
        kept = compile_space(shape, arch, args.processes)
        for tokens, pair, seconds in tqdm(
            measure_all(shape, kept, todo, args.seed), total=len(todo), unit="batch size", desc="timing"
        ):
            state.add(tokens, pair, seconds)
    state.finish()
    print("\n".join(state.lines()))
    print(f"Wrote {path}")


def about_run(shape: MoeShape, arch: ArchTraits, triton_version: str) -> dict[str, object]:
    """What identifies a run, and what the file says of itself."""
    return {
        "arch": arch.name,
        "num_sms": arch.num_sms,
        "scheme": shape.scheme or "none",
        "hidden": shape.hidden,
        "top_k": shape.top_k,
        "bias": shape.bias,
        "triton": triton_version,
    }


def output_path(shape: MoeShape, directory: Path | None, triton_version: str, device: str) -> Path:
    """Where the server looks: the given directory, $SGLANG_MOE_CONFIG_DIR or the package."""
    user = envs.SGLANG_MOE_CONFIG_DIR
    root = directory or (user / "configs" if user is not None else config_files.PACKAGE_CONFIGS)
    name = upstream_name(shape.num_experts, shape.intermediate, shape.scheme, device)
    return root / directory_name(triton_version) / str(name)


def compile_space(shape: MoeShape, arch: ArchTraits, processes: int) -> Kept:
    """The tiles to time, by kind: every one compiled, none that spills. Raises UserError when nothing is left."""
    from moe_problem import compile_tiles

    known = {kind: candidates(shape, kind, arch, recorded_cost) for kind in KINDS}
    possible = {kind: [*found.unknown, *(tile for tile, _ in found.kept)] for kind, found in known.items()}
    costs = compile_tiles(shape, possible, processes)
    kept: Kept = {}
    for kind in KINDS:
        found = candidates(shape, kind, arch, lambda product, arch: costs.get((product.kind, tile_key(product.tile))))
        if not found.kept:
            reasons = known[kind].reasons() + found.reasons()
            why = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common(3))
            raise UserError(f"No tile of {kind} can be used for {shape} on {arch.name}: {why}.")
        kept[kind] = found.kept
        out = f"{len(known[kind].pruned)} out before, {len(possible[kind]) - len(found.kept)} after compiling"
        print(f"{kind}: {len(found.kept)} tiles to time, {out}")
    return kept


Result = tuple[int, TilePair, float]


def measure_all(shape: MoeShape, kept: Kept, todo: Sequence[int], seed: int) -> Iterator[Result]:
    """The fastest tiles of each batch size, as they are found: on all GPUs with ray, otherwise on one."""
    from moe_problem import Problem

    if device_count() > 1 and importlib.util.find_spec("ray") is not None:
        yield from _measure_with_ray(shape, kept, todo, seed)
        return
    problem = Problem(shape, seed)
    for tokens in todo:
        yield problem.fastest(kept, tokens)


def _measure_with_ray(shape: MoeShape, kept: Kept, todo: Sequence[int], seed: int) -> Iterator[Result]:
    """One actor a GPU; the next batch size goes to whichever is free, the largest first."""
    import ray
    from moe_problem import Problem

    here = str(Path(__file__).parent)
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": here}}, log_to_driver=False)
    worker = ray.remote(num_gpus=1)(Problem)
    waiting = sorted(todo)
    free = [worker.remote(shape, seed) for _ in range(min(device_count(), len(waiting)))]
    running = {actor.fastest.remote(kept, waiting.pop()): actor for actor in free}
    while running:
        (done,), _ = ray.wait(list(running))
        actor = running.pop(done)
        if waiting:
            running[actor.fastest.remote(kept, waiting.pop())] = actor
        yield ray.get(done)
    ray.shutdown()


def show_current(shape: MoeShape, arch: ArchTraits, batch_sizes: Sequence[int]) -> None:
    """Times of the tiles that a server would use now."""
    from moe_problem import Problem

    found = config_files.find(shape.num_experts, shape.intermediate, shape.scheme, arch, hidden=shape.hidden)
    print(f"{shape} on {device_name()}: {found.describe()}")
    problem = Problem(shape, 0)
    start = time.perf_counter()
    for tokens in batch_sizes:
        seconds = problem.time_layer(tokens, found.tiles.at(tokens) if found.tiles else None)
        print(f"{tokens:>7} tokens {seconds * 1e6:>9.1f} us")
    print(f"{time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    raise SystemExit(main())
