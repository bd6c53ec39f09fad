"""The experts of a shape on this GPU, with random weights and routings, and the device time of their products.

A CUDA graph holds the same product for several routings, so that neither launches nor a warm cache flatter a tile.
"""

from __future__ import annotations

import functools
import multiprocessing
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import triton
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
from timing import Calls, copies_for, replays

from sglang.ledger.compile import matrix_instructions
from sglang.srt.configs.activation import SILU
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.hardware.arch import current_arch
from sglang.srt.kernels.ledger_file import tile_key
from sglang.srt.kernels.spec import TileRecord
from sglang.srt.kernels.tile_configs import TileConfigs
from sglang.srt.layers.moe.expert_weights import ELEMENT_DTYPES, SCALE_DTYPES, ExpertWeights, repack
from sglang.srt.layers.moe.fused_moe_triton import kernels
from sglang.srt.layers.moe.fused_moe_triton.align import ExpertBlocks, align
from sglang.srt.layers.moe.fused_moe_triton.config_format import TilePair
from sglang.srt.layers.moe.fused_moe_triton.expert_tile_configs import ExpertLayer, forced, tile_configs_of
from sglang.srt.layers.moe.fused_moe_triton.fused_moe import (
    Operand,
    _operand,
    fused_moe,
    grouped_launch,
    matrix_of,
    product_for,
)
from sglang.srt.layers.moe.fused_moe_triton.tiles import GroupedTile, MoeTiles
from sglang.srt.layers.triton_ops import pdl
from sglang.srt.layers.triton_ops.activation import gate_constants
from sglang.tuning.search_space import KINDS, TUNED_GROUP_M, MoeShape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""On a CPU the kernels can be launched in Triton's interpreter, but not timed."""
COLD_BYTES = 256 << 20
"""The weights that one graph reads exceed every cache."""
MAX_ROUTINGS = 16
REPLAYS = 3
HOPELESS = 2.5
"""A tile that is so much slower than the best one in its first replay gets no other."""

Kept = Mapping[str, Sequence[tuple[GroupedTile, TileRecord]]]


@dataclass(slots=True)
class Inputs:
    """For one number of tokens: operands of both products, and routings."""

    x: torch.Tensor
    topk_ids: tuple[torch.Tensor, ...]
    topk_weights: torch.Tensor
    a: Operand
    inter: torch.Tensor
    b: Operand
    out: torch.Tensor


class Problem:
    """One shape. Weights take E x 3 x H x N elements; the rest is small."""

    def __init__(self, shape: MoeShape, seed: int = 0) -> None:
        self.shape = shape
        self.features = current_arch().features
        self.generator = torch.Generator(DEVICE).manual_seed(seed)
        self.w13 = self._weights(2 * shape.intermediate, shape.hidden)
        self.w2 = self._weights(shape.hidden, shape.intermediate)
        self._tokens = 0
        self._blocks: dict[int, list[ExpertBlocks]] = {}

    def _weights(self, rows: int, cols: int) -> ExpertWeights:
        scheme = SCHEMES[self.shape.scheme] if self.shape.scheme else None
        shape = (self.shape.num_experts, rows, cols)
        if scheme is None:
            data = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
            return ExpertWeights(data.normal_(0, cols**-0.5, generator=self.generator))
        data = torch.empty((*shape[:2], cols * scheme.bits // 8), dtype=torch.uint8, device=DEVICE)
        data.random_(0, 256, generator=self.generator)
        if scheme.element == "e4m3":
            data.bitwise_and_(0xFE)  # NaN is the largest code of either sign
        scale = torch.ones(shape[:1] + scheme.scale_shape(rows, cols), device=DEVICE) * 2.0**-8
        if scheme.scale == "e8m0":
            scale.fill_(119)
        elif scheme.scale == "e4m3":
            scale.fill_(1)
        factor = torch.full(shape[:1], 2.0**-8, device=DEVICE) if scheme.global_scale else None
        weights = ExpertWeights(
            data.view(ELEMENT_DTYPES[scheme.element]),
            scheme,
            scale.to(SCALE_DTYPES[scheme.scale]),
            factor,
            torch.full((1,), 1.0, device=DEVICE) if scheme.activation == "nvfp4" else None,
        )
        return repack(weights, self.features)

    # --- one product --------------------------------------------------------------------------------------------------

    def prepare(self, num_tokens: int) -> None:
        """Make `inputs` for so many tokens, unless they are there."""
        if self._tokens == num_tokens:
            return
        shape, pairs = self.shape, num_tokens * self.shape.top_k
        x = torch.randn((num_tokens, shape.hidden), generator=self.generator, device=DEVICE).bfloat16()
        inter = torch.randn((pairs, shape.intermediate), generator=self.generator, device=DEVICE).bfloat16()
        ids = tuple(self._route(num_tokens) for _ in range(self._num_routings(num_tokens)))
        weights = torch.full((num_tokens, shape.top_k), 1 / shape.top_k, device=DEVICE)
        out = torch.empty((pairs, shape.hidden), dtype=torch.bfloat16, device=DEVICE)
        self.inputs = Inputs(x, ids, weights, _operand(x, self.w13), inter, _operand(inter, self.w2), out)
        self._tokens = num_tokens
        self._blocks = {}

    def _route(self, num_tokens: int) -> torch.Tensor:
        """Distinct experts for each token, every one as likely."""
        scores = torch.rand((num_tokens, self.shape.num_experts), generator=self.generator, device=DEVICE)
        return scores.topk(self.shape.top_k, dim=1).indices.int()

    def _num_routings(self, num_tokens: int) -> int:
        """So many that together they read COLD_BYTES of weights."""
        used = min(self.shape.num_experts, num_tokens * self.shape.top_k)
        bits = SCHEMES[self.shape.scheme].bits if self.shape.scheme else 16
        read = used * self.shape.hidden * self.shape.intermediate * bits // 8
        return copies_for(read, MAX_ROUTINGS, COLD_BYTES)

    def calls(self, kind: str, tile: GroupedTile) -> list[Callable[[], Any]]:
        """A launch of the product for each routing of `inputs`; each returns the compiled kernel."""
        block_m = tile["BLOCK_M"]
        if block_m not in self._blocks:
            self._blocks[block_m] = [align(ids, self.shape.num_experts, block_m) for ids in self.inputs.topk_ids]
        launch = self._gate_up if kind == "gate_up" else self._down
        return [functools.partial(launch, tile, blocks) for blocks in self._blocks[block_m]]

    def _gate_up(self, tile: GroupedTile, blocks: ExpertBlocks) -> Any:
        """As in `fused_moe`."""
        shape, a, w = self.shape, self.inputs.a, matrix_of(self.w13)
        return kernels.gate_up_kernel[(blocks.max_blocks * triton.cdiv(shape.intermediate, tile["BLOCK_N"]),)](
            a.data, a.scale, w.data, w.scale, w.factor, a.factor, w.bias, self.inputs.inter,
            blocks.sorted_pairs, blocks.block_expert, blocks.num_blocks, self.inputs.inter.shape[0], shape.top_k,
            shape.hidden, shape.intermediate, a.data.stride(0), a.scale_stride, *w.strides,
            **grouped_launch(product_for(self.w13), tile, shape.hidden, shape.intermediate, self.features), **w.flags,
            **gate_constants(SILU), **pdl.options(),
        )  # fmt: skip

    def _down(self, tile: GroupedTile, blocks: ExpertBlocks) -> Any:
        """As in `fused_moe`."""
        shape, b, w = self.shape, self.inputs.b, matrix_of(self.w2)
        return kernels.down_kernel[(blocks.max_blocks * triton.cdiv(shape.hidden, tile["BLOCK_N"]),)](
            b.data, b.scale, w.data, w.scale, w.factor, b.factor, w.bias, self.inputs.out,
            blocks.sorted_pairs, blocks.block_expert, blocks.num_blocks, self.inputs.inter.shape[0],
            shape.hidden, shape.intermediate, b.data.stride(0), b.scale_stride, *w.strides,
            **grouped_launch(product_for(self.w2), tile, shape.intermediate, 0, self.features), **w.flags,
            **pdl.options(),
        )  # fmt: skip

    def time(self, kind: str, tile: GroupedTile, num_tokens: int, best: float = float("inf")) -> float:
        """Seconds of one product. `best`: the shortest time so far."""
        self.prepare(num_tokens)
        return time_graph(self.calls(kind, tile), best)

    def compile(self, kind: str, tile: GroupedTile) -> list[Any] | str:
        """What a tile costs on this GPU, in the order of a TileRecord, or why it cannot be launched."""
        self.prepare(16)
        try:
            compiled = self.calls(kind, tile)[0]()
        except Exception as error:  # Triton raises many kinds; all mean that this tile cannot be used
            return f"does not compile: {type(error).__name__}: {str(error)[:200]}"
        torch.cuda.synchronize()  # what fails here is a kernel's mistake, and ends the run
        spilled = 4 * compiled.n_spills  # words of local memory
        return [compiled.metadata.shared, compiled.n_regs, spilled, spilled, matrix_instructions(compiled.asm["ptx"])]

    # --- the layer ----------------------------------------------------------------------------------------------------

    def fastest(self, kept: Kept, num_tokens: int) -> tuple[int, TilePair, float]:
        """(tokens, tiles, seconds of both products): the fastest with one BLOCK_M."""
        self.prepare(num_tokens)
        best: dict[tuple[str, int], tuple[float, GroupedTile]] = {}
        for kind in KINDS:
            for tile, _ in kept[kind]:
                key = (kind, tile["BLOCK_M"])
                so_far = best.get(key, (float("inf"), tile))
                seconds = self.time(kind, tile, num_tokens, so_far[0])
                if seconds < so_far[0]:
                    best[key] = (seconds, tile)
        for (kind, block_m), (_, tile) in list(best.items()):
            for group in TUNED_GROUP_M:
                ordered = {**tile, "GROUP_M": group}
                seconds = self.time(kind, ordered, num_tokens, best[kind, block_m][0])
                if seconds < best[kind, block_m][0]:
                    best[kind, block_m] = (seconds, ordered)
        block_ms = sorted({m for _, m in best if all((kind, m) in best for kind in KINDS)})
        pairs = [(best["gate_up", m], best["down", m]) for m in block_ms]
        up, down = min(pairs, key=lambda pair: pair[0][0] + pair[1][0])
        return num_tokens, TilePair(up[1], down[1]), up[0] + down[0]

    def time_layer(self, num_tokens: int, pair: TilePair | None) -> float:
        """Seconds of `fused_moe`; with the tiles of the tables if there are none."""
        return self.time_configs(num_tokens, self.configs(pair))

    def configs(self, pair: TilePair | None = None) -> TileConfigs:
        """With these tiles, or those of the tables."""
        shape, product = self.shape, product_for(self.w13)
        if pair is not None:
            return forced(MoeTiles(float("inf"), pair.gate_up, pair.down), product)
        layer = ExpertLayer(product, shape.num_experts, shape.top_k, shape.hidden, shape.intermediate)
        return tile_configs_of(layer, self.features)

    def time_configs(self, num_tokens: int, configs: TileConfigs) -> float:
        self.prepare(num_tokens)
        inputs = self.inputs
        given = (inputs.x, self.w13, self.w2, inputs.topk_weights)
        calls = [functools.partial(fused_moe, *given, ids, SILU, configs, self.features) for ids in inputs.topk_ids]
        return time_graph(calls)


def time_graph(calls: Calls, best: float = float("inf")) -> float:
    """Seconds a call: the best of some replays; of fewer, where it will not come near `best`."""
    times: list[float] = []
    for seconds in islice(replays(calls), 1 + REPLAYS):
        times.append(seconds)
        if seconds > HOPELESS * best:
            break
    return min(times)


# --- compiling in parallel --------------------------------------------------------------------------------------------

Costs = dict[tuple[str, str], "TileRecord | str"]
"""By (kind, tile key): what a tile costs, or why it cannot be launched."""


@functools.lru_cache(maxsize=1)
def _problem(shape: MoeShape) -> Problem:
    """Of a worker process."""
    return Problem(shape)


def _compile_one(shape: MoeShape, kind: str, tile: GroupedTile) -> list[Any] | str:
    return _problem(shape).compile(kind, tile)


def compile_tiles(shape: MoeShape, tiles: Mapping[str, Sequence[GroupedTile]], processes: int) -> Costs:
    """What the tiles of one shape cost."""
    return compile_all({shape: tiles}, processes)[shape]


def compile_all(
    wanted: Mapping[MoeShape, Mapping[str, Sequence[GroupedTile]]], processes: int
) -> dict[MoeShape, Costs]:
    """What the tiles of each shape cost. Worker processes launch each once: then Triton's cache has it."""
    costs: dict[MoeShape, Costs] = {shape: {} for shape in wanted}
    jobs = [(shape, kind, tile) for shape, tiles in wanted.items() for kind in KINDS for tile in tiles[kind]]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, max(1, len(jobs))), context) as pool:
        futures = {}
        for shape, kind, tile in jobs:
            few = replace(shape, num_experts=max(8, shape.top_k))  # the number of experts is not compiled in
            futures[pool.submit(_compile_one, few, kind, tile)] = (shape, kind, tile_key(tile))
        for future in tqdm(as_completed(futures), total=len(jobs), unit="tile", desc="compiling"):
            shape, kind, key = futures[future]
            result = future.result()
            costs[shape][kind, key] = result if isinstance(result, str) else TileRecord(*result)
    return costs
