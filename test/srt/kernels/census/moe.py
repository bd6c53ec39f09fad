"""Launches of blocks/moe: routing, and products of experts in every format."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import torch

from sglang.ledger.launch_form import named, recording
from sglang.ledger.variant import Variant
from sglang.srt.blocks.moe.kernels import topk
from sglang.srt.blocks.moe.reference import ImageCorrection
from sglang.srt.blocks.moe.spec import MoE, Router
from sglang.srt.configs.activation import GPT_OSS_SWIGLU, SILU, Activation
from sglang.srt.configs.quant_scheme import SCHEMES, Scheme, expert_share, wants_planes
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.conditions import MIXED_ROWS
from sglang.srt.kernels.scaled_product import product_of
from sglang.srt.kernels.spec import Tile
from sglang.srt.layers.moe import mixed_moe
from sglang.srt.layers.moe.cpu_experts.ops import Request
from sglang.srt.layers.moe.expert_weights import ELEMENT_DTYPES, SCALE_DTYPES, ExpertWeights
from sglang.srt.layers.moe.fused_moe_triton import config_files
from sglang.srt.layers.moe.fused_moe_triton import fused_moe as moe
from sglang.srt.layers.moe.fused_moe_triton.config_files import find
from sglang.srt.layers.moe.fused_moe_triton.expert_tile_configs import TALL_ROWS, mixed_from
from sglang.srt.layers.moe.fused_moe_triton.tiles import MoeTiles, last_resort, tile_rows
from sglang.srt.layers.moe.output_norm import OutputNorm
from sglang.srt.layers.moe.slot_ops import ExpertCopies, Moves, SlotTables, Wave
from sglang.srt.layers.triton_ops import cpu_experts, expert_rows, expert_slots, norm

from ...layers.moe.moe_harness import tile_configs_of
from .inputs import BF16, LAUNCHED, MANY, each_once, empty, few_as_rounded, of_scheme

OWN_FORMAT_OF_BIASES = "mxfp4"
_find_files = config_files.files


@functools.cache
def _tuning_files(root: Path) -> list[Path]:
    return list(_find_files(root))


def launch_routing(router: Router, experts: int, fused: bool, vocab: int) -> None:
    top_k, groups = router.top_k, (router.num_groups, router.top_groups)
    for valid, dtype in itertools.product((None, empty(1, dtype=torch.int32)), (BF16, torch.float32)):
        logits = empty(100, experts, dtype=dtype)
        if router.hash_table:
            ids, table = empty(100, dtype=torch.int64), empty(vocab, top_k, dtype=torch.int32)
            topk.topk_hash(logits, ids, table, router.score, router.scale, fused, valid)
        elif router.score == "softmax":
            topk.topk_softmax(logits, top_k, router.renormalize, router.scale, fused, valid, groups)
        else:
            bias = empty(experts, dtype=torch.float32) if router.correction else None
            route = getattr(topk, f"topk_{router.score}")
            route(logits, bias, top_k, router.renormalize, groups, router.scale, fused, valid)
            if router.image_correction:
                images = ImageCorrection(empty(experts, dtype=torch.float32), empty(100, dtype=torch.int64), 7)
                route(logits, bias, top_k, router.renormalize, groups, router.scale, fused, valid, None, images)


def expert_layers(experts: MoE, hidden: int, tp_size: int) -> Iterator[tuple[int, int, int, int, Scheme | None, bool]]:
    """(experts, choices, hidden, this rank's share of the intermediate size, scheme, static scales). Biases come in the
    model's own format only (with activations of either precision); any other experts may be quantized in every way."""
    for scheme in [None, *LAUNCHED]:
        if experts.bias and scheme is not None and not scheme.name.startswith(OWN_FORMAT_OF_BIASES):
            continue
        try:
            inter = expert_share(experts.intermediate_size, tp_size, scheme)
        except UserError:
            continue  # such a layout is refused
        for static in (False, True) if scheme and scheme.activation in ("tensor", "nvfp4") else (False,):
            choices, width = experts.top_k + experts.fused_shared, experts.latent_size or hidden
            yield experts.num_experts + experts.fused_shared, choices, width, inter, scheme, static


def expert_weights(
    experts: int,
    rows: int,
    cols: int,
    scheme: Scheme | None,
    static: bool,
    bias: bool,
    arch: ArchTraits,
    zero_points: bool = False,
) -> ExpertWeights:
    """As `expert_weights.repack` leaves them."""
    own_bias = empty(experts, rows) if bias else None
    if scheme is None:
        return ExpertWeights(empty(experts, rows, cols), bias=own_bias)
    planes = wants_planes(scheme, arch.features)
    stored = cols + (-cols % 128 if planes else 0)
    dtype = torch.int32 if planes else ELEMENT_DTYPES[scheme.element]
    per_element = 8 if planes else 8 // scheme.bits
    return ExpertWeights(
        empty(experts, rows, stored // per_element, dtype=dtype),
        scheme,
        empty(
            experts,
            *scheme.scale_shape(rows, stored),
            dtype=torch.int16 if zero_points else SCALE_DTYPES[scheme.scale],
        ),
        empty(experts, dtype=torch.float32) if scheme.global_scale else None,
        empty(1, dtype=torch.float32) if static else None,
        own_bias,
        cols if planes else None,
    )


def launch_experts(
    experts: int,
    top_k: int,
    hidden: int,
    inter: int,
    scheme: Scheme | None,
    static: bool,
    act: Activation,
    bias: bool,
    arch: ArchTraits,
    normed: bool = False,
) -> None:
    """Few pairs, many, groups of every size, and the tiles of a tuning file."""
    matrices, zeros = expert_matrices(experts, hidden, inter, scheme, static, act, bias, arch)
    candidates = _candidates(scheme, arch)
    with patch.object(config_files, "files", _tuning_files):
        tuned = find(experts, inter, scheme.name if scheme else None, arch, hidden=hidden, bias=bias).tiles
    pairs = {str(pair): pair for pair in tuned.by_tokens.values()} if tuned else {}
    own = [(16, MoeTiles(float("inf"), pair.gate_up, pair.down)) for pair in pairs.values()]
    for each in filter(None, (matrices, zeros)):
        launches = [(1, None), (MANY, candidates[0]), *(own if each is matrices else ())]
        launch_fused_moe(each, top_k, launches, act, arch, normed)
    for block in {candidate.gate_up["BLOCK_M"] for candidate in candidates}:
        moe.align(empty(16, top_k, dtype=torch.int32), experts, block)
    own_kernel = "mma_sync_block_scale" in arch.features and act.trait in ("", "clamped_gate")
    if scheme is SCHEMES["mxfp4_mxfp8"] and own_kernel:
        with patch.multiple(mixed_moe, _library=NoLibrary, _stream=lambda x: 0):
            configs = tuple(mixed_from(0, -(-TALL_ROWS * experts // top_k) - 1))
            for pairs_an_expert in (MIXED_ROWS, TALL_ROWS):
                tokens = -(-pairs_an_expert * experts // top_k)
                x, weights = empty(tokens, hidden), empty(tokens, top_k, dtype=torch.float32)
                ids = empty(tokens, top_k, dtype=torch.int32)
                mixed_moe.fused_moe(x, *matrices, weights, ids, act, configs)


def launch_latent_norms(width: int) -> None:
    """Before experts that take a projection, of few tokens and of many."""
    for tokens in (1, 100):
        norm.rmsnorm(empty(tokens, width), empty(width, dtype=torch.float32), 1e-6)


def launch_expert_slots() -> None:
    """Of steps of any size and layers of any number of experts: they are no constants."""
    narrow, wide = torch.int32, torch.int64
    tables = SlotTables(*(empty(9, dtype=dtype) for dtype in (narrow, narrow, wide, wide, wide, narrow)))
    moves = Moves(*(empty(*shape, dtype=narrow) for shape in ((9,), (9, 2), (1,))))
    ids, blocks, count = (empty(*shape, dtype=narrow) for shape in ((3, 2), (5,), (1,)))
    with named("expert_slots", "all"):
        expert_slots.choose_slots(ids, tables, moves)
        expert_slots.stage_experts(ids, tables, moves, Wave(0, 2, False))
        expert_slots.copy_experts(ExpertCopies((), (), empty(8, 4, dtype=torch.int64)), moves)
        expert_slots.mask_pairs(ids, moves)
        expert_rows.look_up(ids, moves.row_of_expert)
        expert_rows.place_blocks(blocks, count, moves.row_of_expert)


def launch_cpu_experts() -> None:
    """Of steps of any size and layers of any sizes: they are no constants."""
    ids, out = empty(3, 2, dtype=torch.int32), empty(3, 20, dtype=torch.bfloat16)
    table, clock = empty(9, dtype=torch.int32), empty(1, dtype=torch.int64)
    part, asked = empty(8), empty(1, dtype=torch.int32)
    request = Request(part, part, part, part, part, asked, empty(5, dtype=torch.int64))
    with named("cpu_experts", "all"):
        cpu_experts.divide_misses(ids, empty(3, 2, dtype=torch.float32), out, table, clock, request)
        cpu_experts.add_results(out, request)


def launch_expert_tiles(
    top_k: int,
    hidden: int,
    inter: int,
    scheme: Scheme | None,
    static: bool,
    act: Activation,
    bias: bool,
    arch: ArchTraits,
) -> None:
    """All tiles that many pairs may get: of the table, and what they step down to."""
    for each in filter(None, expert_matrices(128, hidden, inter, scheme, static, act, bias, arch)):
        launch_fused_moe(each, top_k, [(16, candidate) for candidate in _candidates(scheme, arch)], act, arch)


Experts = tuple[ExpertWeights, ExpertWeights]


def expert_matrices(
    experts: int,
    hidden: int,
    inter: int,
    scheme: Scheme | None,
    static: bool,
    act: Activation,
    bias: bool,
    arch: ArchTraits,
) -> tuple[Experts, Experts | None]:
    """Both matrices, and those with zero points where the scheme has such."""

    def of(zero_points: bool) -> Experts:
        sizes = ((1 + act.gated) * inter, hidden), (hidden, inter)
        first, second = (expert_weights(experts, *each, scheme, static, bias, arch, zero_points) for each in sizes)
        return first, second

    return of(False), of(True) if scheme is not None and scheme.element == "int4" else None


def _candidates(scheme: Scheme | None, arch: ArchTraits) -> list[MoeTiles]:
    kind = product_of(scheme, arch.features).tile_kind
    return [*tile_rows(kind, arch.features), last_resort(kind)]


def launch_fused_moe(
    matrices: Experts,
    top_k: int,
    launches: Sequence[tuple[int, MoeTiles | None]],
    act: Activation,
    arch: ArchTraits,
    normed: bool = False,
) -> None:
    """For so many tokens, with tiles or those that a plan would choose. normed: each expert's output is."""
    w13, w2 = matrices
    output_norm = OutputNorm(empty(w2.rows, dtype=torch.float32), 1e-8) if normed else None
    once = patch.multiple(moe, _operand=each_once(moe._operand), align=each_once(moe.align))
    with of_scheme("fused_moe", w13.scheme, arch), once:
        for tokens, tiles in launches:
            if tiles is None and few_as_rounded(moe.product_for(w13)):
                continue
            x, weights = empty(tokens, w2.rows), empty(tokens, top_k, dtype=torch.float32)
            ids = empty(tokens, top_k, dtype=torch.int32)
            configs = tile_configs_of(w13, w2, ids, arch.features, tiles)
            moe.fused_moe(x, w13, w2, weights, ids, act, configs, arch.features, norm=output_norm)


def grouped_product(
    kind: str, scheme: Scheme | None, tile: Tile, sizes: tuple[int, int], arch: ArchTraits, bias: bool = False
) -> Variant:
    """One grouped product, `kind` "gate_up" or "down", with a tile, in the table or not. sizes: hidden, of an
    expert."""
    act = GPT_OSS_SWIGLU if bias else SILU
    static = scheme is not None and scheme.activation == "nvfp4"
    matrices, _ = expert_matrices(128, *sizes, scheme, static, act, bias, arch)
    with recording(arch.name) as found:
        launch_fused_moe(matrices, 8, [(16, MoeTiles(float("inf"), tile, tile))], act, arch)
    return next(form.variant("fused_moe", kind) for form in found if form.kernel.endswith(f".{kind}_kernel"))


class NoLibrary:
    """sgl-kernel's, without launches: what is around them is Triton's."""

    MixedArguments = dict

    def mixed_moe_gate_up(self, args: object, block_m: int, max_blocks: int, stream: int) -> None: ...

    def mixed_moe_down(self, args: object, block_m: int, max_blocks: int, stream: int) -> None: ...
