"""Launch variants of the expert kernels, described for the ledger."""

from __future__ import annotations

from collections.abc import Iterator

from sglang.srt.kernels.variant import Variant
from sglang.srt.layers.moe.fused_moe_triton import align, kernels
from sglang.srt.layers.moe.fused_moe_triton.fused_moe import COMBINE_BLOCK
from sglang.srt.layers.moe.fused_moe_triton.tiles import PAIR_DOWN, PAIR_GATE_UP, TILES
from sglang.srt.layers.triton_ops.variants import describe

OPS = ("fused_moe",)

_GROUPING = {"sorted_pairs": "*i32", "block_expert": "*i32", "num_blocks": "*i32", "num_pairs": "i32"}
_SIZES = {"hidden": "i32", "intermediate": "i32", "expert_stride": "i32"}
_ROUTING = {"topk_weights": "*fp32", "topk_ids": "*i32"}
_UP = {"x": "*bf16", "w13": "*bf16", "inter": "*bf16", "top_k": "i32", "x_stride": "i32"}
_DOWN = {"inter": "*bf16", "w2": "*bf16", "out": "*bf16"}
_MULTIPLES = ("hidden", "intermediate", "expert_stride")


def variants(op: str, features: tuple[str, ...] = ()) -> Iterator[Variant]:
    """Every launch of the fused experts in bf16. The same for every GPU."""
    assert op == "fused_moe"
    for even in (True, False):
        yield from _products(even)
    constants = {"TOP_K": 8}
    types = {"pair_out": "*bf16", "out": "*bf16", "hidden": "i32"} | _ROUTING
    launch = {"BLOCK": COMBINE_BLOCK, "num_warps": 4}
    yield describe(op, "combine", kernels.combine_kernel, types, constants, launch, ("hidden",))
    yield from _alignment()


def _products(even: bool) -> Iterator[Variant]:
    tail = "even" if even else "ragged"
    flag = {"EVEN_K": even}
    for row in TILES:
        up, down = _GROUPING | _SIZES | _UP, _GROUPING | _SIZES | _DOWN
        yield describe(
            "fused_moe", f"gate_up/{tail}", kernels.gate_up_kernel, up, flag, row.gate_up, (*_MULTIPLES, "x_stride")
        )
        yield describe("fused_moe", f"down/{tail}", kernels.down_kernel, down, flag, row.down, _MULTIPLES)
    up, down = _SIZES | _UP | {"topk_ids": "*i32"}, _SIZES | _DOWN | _ROUTING
    yield describe(
        "fused_moe",
        f"gate_up_pairs/{tail}",
        kernels.gate_up_pairs_kernel,
        up,
        flag,
        PAIR_GATE_UP,
        (*_MULTIPLES, "x_stride"),
    )
    yield describe(
        "fused_moe", f"down_sum/{tail}", kernels.down_sum_kernel, down, flag | {"TOP_K": 8}, PAIR_DOWN, _MULTIPLES
    )


def _alignment() -> Iterator[Variant]:
    types = {
        "topk_ids": "*i32",
        "cursors": "*i32",
        "counts": "*i32",
        "num_places": "i32",
        "max_blocks": "i32",
    } | _GROUPING
    steps = {
        align.align_small_kernel: {"EXPERTS": 512, "BLOCK_M": 16, "CHUNK": align.CHUNK, "num_warps": 16},
        align.align_count_kernel: {"EXPERTS": 512, "CHUNK": align.CHUNK, "num_warps": 8},
        align.align_offsets_kernel: {"EXPERTS": 512, "BLOCK_M": 64, "num_warps": 8},
        align.align_scatter_kernel: {"CHUNK": align.CHUNK, "num_warps": 8},
    }
    for fn, launch in steps.items():
        own = {name: kind for name, kind in types.items() if name in fn.arg_names}
        yield describe("fused_moe", fn.fn.__name__.removesuffix("_kernel"), fn, own, {}, launch)
