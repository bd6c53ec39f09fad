"""Launch variants of the elementwise, sampling and matrix-vector kernels, described for the ledger."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from sglang.ledger.form_rule import FormRule
from sglang.ledger.variant import Variant, describe
from sglang.srt.blocks.gqa.kernels import whole_norm
from sglang.srt.blocks.mla.kernels import latent_store
from sglang.srt.blocks.moe.kernels import topk
from sglang.srt.configs.activation import GELU, GPT_OSS_SWIGLU, RELU2, SILU, Activation
from sglang.srt.kernels.tiles import HEAD_DIMS, fp4_head_dims
from sglang.srt.layers.triton_ops import (
    activation,
    decode_inputs,
    draft_rows,
    embedding,
    gemv,
    ngram,
    norm,
    part_rows,
    rope_store,
    sampling,
    skinny_gemm,
)

OPS = (
    "decode_inputs",
    "verify_inputs",
    "draft_inputs",
    "accept_drafts",
    "ngram_drafts",
    "embedding_rows",
    "rmsnorm",
    "fused_add_rmsnorm",
    "silu_and_mul",
    "gelu_and_mul",
    "relu2",
    "clamped_swiglu",
    "qk_whole_norm",
    "qk_norm_rope_store",
    "latent_norm_rope_store",
    "pack_parts",
    "merge_parts",
    "topk_softmax",
    "topk_sigmoid",
    "topk_sqrtsoftplus",
    "topk_hash",
    "draw_tokens",
    "filter_thresholds",
    "adjust_logits",
    "linear",
)

CLAMPED = Activation(limit=10.0)
"""DeepSeek-V4's shared expert has it alone: experts have activations inside. GPT-OSS's is that of MiniMax-M3's dense
layers."""
FP32_NORM_SIZES = (128, 10240)
"""Heads of Qwen3.8's indexer, and all streams of a token before its draft, whose weights are in fp32."""
HIDDEN_SIZES = (1024, 2048, 2880, 4096, 5120, 6144, 7168, 16384)
FP32_NORM_SHAPES = ((256, 64), (256, 256), (128, 128), (128, 64))
"""The norms of models that store norms of heads minus 1: kept in fp32 (Qwen3-Next, Gemma 3, MiniMax-M3, Step)."""
ROPE_SHAPES = ((64, 64), (128, 128), (128, 64), (256, 64), (256, 256), (512, 512))
"""(head dim, rotary dim) of published models."""
PART_DIMS = tuple(dict.fromkeys(dim for _, dim in HEAD_DIMS if dim % 16 == 0))
"""Columns of values that ranks exchange which share out tokens."""
INTERLEAVED_SHAPES = ((128, 64), (128, 128))
"""Those of models whose neighbouring dims rotate together (GLM-4, Llama 4)."""
OTHER_HEAD_DIMS = tuple(
    dim for dim, v_dim in HEAD_DIMS if dim == v_dim and dim not in {published for published, _ in ROPE_SHAPES}
)
"""The head dims of the other models that attention has tiles for, whose heads rotate whole."""
LATENT_SHAPES = ((128, 512, 64), (64, 256, 64))
"""Dims of a query head that do not rotate, of the latent, and of the rotary key."""
CACHE_TYPES = {"bfloat16": ("*bf16", 0.0), "fp8_e4m3": ("*fp8e4nv", 448.0), "fp8_e5m2": ("*fp8e5", 57344.0)}
ROUTINGS: Mapping[str, tuple[tuple[int, int, tuple[int, int]], ...]] = {
    "softmax": (
        *((2, 2, (1, 1)), (4, 2, (1, 1)), (8, 2, (1, 1)), (16, 4, (1, 1)), (32, 4, (1, 1))),
        *((60, 4, (1, 1)), (64, 6, (1, 1)), (128, 8, (1, 1))),
        *((160, 6, (8, 3)), (256, 8, (1, 1)), (512, 10, (1, 1))),
    ),
    "sigmoid": (
        *((64, 4, (1, 1)), (128, 8, (1, 1)), (160, 8, (1, 1)), (384, 8, (1, 1)), (512, 22, (1, 1))),
        (256, 8, (8, 4)),
        *((16, 1, (1, 1)), (128, 1, (1, 1))),
    ),
    "sqrtsoftplus": ((256, 6, (1, 1)), (384, 6, (1, 1))),
}
"""Score -> (experts, choices, (groups, best groups))."""
SPLITS = 128
"""Programs that share a row of logits, at most: of vocabularies up to 524,288."""

_LOGITS_COUNTS = frozenset({"vocab_size", "mask_stride"})
FORM_RULES = {
    "decode_inputs.decode_inputs_kernel": FormRule(at_most=frozenset({"WINDOWS"})),
    "draft_rows.verify_inputs_kernel": FormRule(at_most=frozenset({"TABLES"})),
    "draft_rows.draft_inputs_kernel": FormRule(at_most=frozenset({"TABLES"})),
    "draft_rows.accept_drafts_kernel": FormRule(at_most=frozenset({"FORCED"})),
    "ngram.longest_match_kernel": FormRule(free=frozenset({"SPLITS"})),
    "ngram.corpus_match_kernel": FormRule(at_most=frozenset({"LONGEST"})),
    "ngram.copy_drafts_kernel": FormRule(at_most=frozenset({"SPLITS", "CORPUS"})),
    "activation.activation_kernel": FormRule(at_most=frozenset({"LIMIT"})),
    "rope_store.qk_norm_rope_store_kernel": FormRule(
        free=frozenset({"Q_HEADS", "KV_HEADS"}),
        at_most=frozenset({"NORM_Q", "NORM_K"}),
        absent={"NORM_Q": ("q_weight",), "NORM_K": ("k_weight",)},
    ),
    "rope_store.qk_norm_rope_store_fp4_kernel": FormRule(
        free=frozenset({"Q_HEADS", "KV_HEADS"}),
        at_most=frozenset({"NORM_Q", "NORM_K"}),
        absent={"NORM_Q": ("q_weight",), "NORM_K": ("k_weight",)},
    ),
    "latent_store.latent_norm_rope_store_kernel": FormRule(
        free=frozenset({"Q_HEADS", "NOPE"}),
        at_most=frozenset({"INTERLEAVED"}),
        counts=frozenset({"num_absorbed"}),
    ),
    "part_rows.pack_parts_kernel": FormRule(
        counts=frozenset({"num_tokens", "num_heads", "num_ranks"}),
    ),
    "part_rows.merge_parts_kernel": FormRule(
        at_most=frozenset({"HAS_SINKS"}),
        counts=frozenset({"num_heads", "num_ranks"}),
        absent={"HAS_SINKS": ("sinks",)},
    ),
    "topk.topk_kernel": FormRule(
        free=frozenset({"K", "COLUMNS", "MEMBERS"}),
        at_most=frozenset({"K_BLOCK"}),
        optional=frozenset({"bias", "image_bias", "token_ids", "num_valid", "expert_map"}),
    ),
    "topk.topk_hash_kernel": FormRule(
        free=frozenset({"K", "COLUMNS"}),
        at_most=frozenset({"K_BLOCK"}),
        counts=frozenset({"num_experts"}),
        optional=frozenset({"num_valid", "expert_map"}),
    ),
    "sampling.draw_tokens_kernel": FormRule(
        at_most=frozenset({"WRITE_NEXT", "MAX_SPLITS"}),
        counts=_LOGITS_COUNTS,
        absent={"FILTER": ("thresholds",), "WRITE_NEXT": ("next_token",)},
    ),
    "sampling.threshold_kernel": FormRule(counts=_LOGITS_COUNTS),
    "sampling.adjust_logits_kernel": FormRule(
        at_most=frozenset({"PENALTIES", "MASK"}),
        counts=_LOGITS_COUNTS,
        absent={"PENALTIES": ("state",), "MASK": ("vocab_mask", "mask_stride")},
    ),
    "gemv.gemv_kernel": FormRule(
        at_least=frozenset({"EVEN_K"}),
        at_most=frozenset({"HAS_BIAS"}),
        counts=frozenset({"N"}),
        absent={"HAS_BIAS": ("bias",)},
    ),
    "skinny_gemm.skinny_gemm_kernel": FormRule(
        at_least=frozenset({"EVEN_K"}),
        at_most=frozenset({"HAS_BIAS"}),
        counts=frozenset({"N"}),
        absent={"HAS_BIAS": ("bias",)},
    ),
}


def variants(op: str, features: tuple[str, ...] = ()) -> Iterator[Variant]:
    """Every launch of `op` over the sizes of the published models. The same for every GPU."""
    yield from _VARIANTS[op]()


def _decode_inputs() -> Iterator[Variant]:
    indices = ("slots", "out_cache_loc", "next_tokens", "input_ids", "positions", "window_locs")
    types = dict.fromkeys(indices, "*i64") | {"seq_lens": "*i32", "req_to_token": "*i32"}
    types |= dict.fromkeys(("num_reqs", "num_rows", "context_len", "window_stride"), "i32")
    kernel, constants = decode_inputs.decode_inputs_kernel, {"WINDOWS": 2}
    yield describe("decode_inputs", "all", kernel, types, constants, decode_inputs.LAUNCH, ("window_stride",))


def _verify_inputs() -> Iterator[Variant]:
    yield _draft_rows("verify_inputs", draft_rows.verify_inputs_kernel, {"TABLES": 3})


def _draft_inputs() -> Iterator[Variant]:
    yield _draft_rows("draft_inputs", draft_rows.draft_inputs_kernel, {"TABLES": 3})


def _accept_drafts() -> Iterator[Variant]:
    yield _draft_rows("accept_drafts", draft_rows.accept_drafts_kernel, {"FORCED": True})


def _draft_rows(op: str, kernel: Any, constants: dict[str, Any]) -> Variant:
    indices = ("slots", "tokens", "next_tokens", "input_ids", "rows", "positions", "locs", "draft_slots", "next_ids")
    lengths = ("lens", "widths", "first", "ends", "forced", "counts", "new_lens", "prefix_lens", "seq_lens")
    sizes = ("num_tokens", "num_reqs", "width", "num_rows", "context_len", "num_next", "loc_stride")
    types = dict.fromkeys((*indices, "last_rows", "last"), "*i64") | dict.fromkeys(sizes, "i32")
    types |= dict.fromkeys((*lengths, "req_to_token", "start_loc"), "*i32")
    taken = {name: kind for name, kind in types.items() if name in kernel.arg_names}
    strides = tuple({"loc_stride"} & taken.keys())
    return describe(op, "all", kernel, taken, constants, draft_rows.LAUNCH, strides)


def _ngram_drafts() -> Iterator[Variant]:
    types = dict.fromkeys(("slots", "tokens", "places", "draft_tokens", "corpus_places"), "*i64")
    types |= dict.fromkeys(("history", "lens", "corpus", "order", "size"), "*i32")
    types |= dict.fromkeys(("context_len", "longest", "num_speculative_tokens", "corpus_size"), "i32")
    splits = {"SPLITS": ngram.MAX_SPLITS}
    yield describe("ngram_drafts", "match", ngram.longest_match_kernel, types, splits, ngram.LAUNCH)
    longest = {"LONGEST": ngram.MAX_COMPARED}
    yield describe("ngram_drafts", "corpus", ngram.corpus_match_kernel, types, longest, ngram.ONE_WARP)
    constants = splits | {"MAX_DRAFT_TOKENS": ngram.MAX_DRAFT_TOKENS, "CORPUS": True}
    yield describe("ngram_drafts", "copy", ngram.copy_drafts_kernel, types, constants, ngram.ONE_WARP)


def _embedding_rows() -> Iterator[Variant]:
    types = {"ids": "*i64", "weight": "*bf16", "out": "*bf16", "first": "i32", "num_rows": "i32", "size": "i32"}
    yield describe("embedding_rows", "all", embedding.embedding_rows_kernel, types, {}, embedding.LAUNCH, ("size",))


def _norms(op: str) -> Iterator[Variant]:
    if op == "rmsnorm":
        fn, types = norm.rmsnorm_kernel, {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "row_stride": "i32"}
        strides: tuple[str, ...] = ("row_stride",)
    else:
        fn = norm.fused_add_rmsnorm_kernel
        types = {"x": "*bf16", "residual": "*bf16", "weight": "*bf16", "row_stride": "i32", "residual_stride": "i32"}
        strides = ("row_stride", "residual_stride")
    launches = {launch["BLOCK"]: launch for launch in map(norm.row_launch, HIDDEN_SIZES)}
    others = {launch["BLOCK"]: launch for launch in map(norm.row_launch, FP32_NORM_SIZES if op == "rmsnorm" else ())}
    types |= {"size": "i32", "eps": "fp32"}
    for block, launch in others.items():
        if block not in launches:
            yield describe(op, f"{block}/fp32", fn, types | {"weight": "*fp32"}, {}, launch, (*strides, "size"))
    for block, launch in launches.items():
        yield describe(op, f"{block}", fn, types, {}, launch, (*strides, "size"))
        form = describe(op, f"{block}/fp32", fn, types | {"weight": "*fp32"}, {}, launch, (*strides, "size"))
        yield replace(form, form_only=True)


def _activation(gate: Activation, form: str = "") -> Iterator[Variant]:
    types = {"x": "*bf16", "out": "*bf16", "row_stride": "i32", "size": "i32"}
    fn, constants = activation.activation_kernel, activation.gate_constants(gate)
    for name, launch in (("small", activation.SMALL_BLOCK), ("large", activation.LARGE_BLOCK)):
        name += form
        yield describe(gate.op, name, fn, types, constants, launch, ("row_stride", "size"))
        # Of shares that 16 does not divide; rows of two such halves it does.
        strides = ("row_stride",) if gate.gated else ()
        yield replace(describe(gate.op, f"{name}/odd", fn, types, constants, launch, strides), form_only=True)


def _whole_norm() -> Iterator[Variant]:
    op, sizes = "qk_whole_norm", ("row_stride", "num_q", "num_k")
    types = {"qkv": "*bf16", "sums": "*fp32", "q_weight": "*bf16", "k_weight": "*bf16", "eps": "fp32"}
    types |= dict.fromkeys(sizes, "i32") | dict.fromkeys(("q_share", "k_share"), "fp32")
    arguments = {name: kind for name, kind in types.items() if name in whole_norm.whole_sums_kernel.arg_names}
    yield describe(op, "sums", whole_norm.whole_sums_kernel, arguments, {}, whole_norm.LAUNCH, sizes)
    for name, from_sums in (("norm", False), ("norm_of_ranks", True)):
        arguments = types | ({} if from_sums else {"sums": "*bf16"})
        constants = {"FROM_SUMS": from_sums}
        yield describe(op, name, whole_norm.whole_norm_kernel, arguments, constants, whole_norm.LAUNCH, sizes)


def _rope_store() -> Iterator[Variant]:
    types = {"qkv": "*bf16", "positions": "*i64", "cos_sin": "*fp32", "q_weight": "*bf16", "k_weight": "*bf16"}
    types |= {"out_cache_loc": "*i64", "eps": "fp32", "k_scale": "fp32", "v_scale": "fp32"}
    types |= dict.fromkeys(("row_stride", "k_slot_stride", "v_slot_stride"), "i32")
    strides = ("row_stride", "k_slot_stride", "v_slot_stride")
    for dim, rot in (*ROPE_SHAPES, *((dim, dim) for dim in OTHER_HEAD_DIMS)):
        for cache, (pointer, limit) in CACHE_TYPES.items():
            for heads in (1, 4, 8):
                constants: dict[str, Any] = {"Q_HEADS": 32, "KV_HEADS": 8, "DIM": dim, "ROT": rot}
                constants |= {"NORM_Q": True, "NORM_K": True}
                constants |= {"INTERLEAVED": False, "FP8_LIMIT": limit}
                variant = describe(
                    "qk_norm_rope_store",
                    f"{dim}r{rot}/{cache}/{heads}",
                    rope_store.qk_norm_rope_store_kernel,
                    types | {"k_cache": pointer, "v_cache": pointer},
                    constants,
                    rope_store.launch_constants(dim, rot, heads),
                    strides,
                )
                yield replace(variant, form_only=dim in OTHER_HEAD_DIMS)
                yield from _rope_store_forms(variant, (dim, rot))
    yield from _rope_store_fp4()


def _rope_store_forms(variant: Variant, shape: tuple[int, int]) -> Iterator[Variant]:
    """The forms of a variant that few models launch. shape: widths of the head and of its rotary part."""
    if shape in INTERLEAVED_SHAPES:
        interleaved = {**variant.constexprs, "INTERLEAVED": True}
        yield replace(variant, key=f"{variant.key}/interleaved", constexprs=interleaved, form_only=True)
    if shape in FP32_NORM_SHAPES:
        signature = {**variant.signature, "q_weight": "*fp32", "k_weight": "*fp32"}
        yield replace(variant, key=f"{variant.key}/fp32", signature=signature, form_only=True)


def _rope_store_fp4() -> Iterator[Variant]:
    """Into four-bit caches, for the heads whose attention has tiles for them."""
    types = {"qkv": "*bf16", "positions": "*i64", "cos_sin": "*fp32", "q_weight": "*bf16", "k_weight": "*bf16"}
    types |= dict.fromkeys(("k_codes", "k_scales", "v_codes", "v_scales"), "*u8") | {"out_cache_loc": "*i64"}
    types |= dict.fromkeys(("eps", "k_scale", "v_scale"), "fp32")
    strides = ("row_stride", "k_codes_stride", "v_codes_stride")
    types |= dict.fromkeys((*strides, "k_scales_stride", "v_scales_stride"), "i32")
    served = {dim for dim, v_dim in fp4_head_dims() if dim == v_dim}
    shapes = (*ROPE_SHAPES, *((dim, dim) for dim in OTHER_HEAD_DIMS))
    for dim, rot in (shape for shape in shapes if shape[0] in served):
        # Slots of an odd number of heads of 80 dims are no multiples of 16 bytes.
        forms = {"": strides} | ({"/odd_heads": strides[:1]} if dim // 2 % 16 else {})
        for heads, (form, divisible) in itertools.product((1, 4, 8), forms.items()):
            constants: dict[str, Any] = {"Q_HEADS": 32, "KV_HEADS": 8, "DIM": dim, "ROT": rot}
            constants |= {"NORM_Q": True, "NORM_K": True, "INTERLEAVED": False}
            variant = describe(
                "qk_norm_rope_store",
                f"{dim}r{rot}/fp4_e2m1/{heads}{form}",
                rope_store.qk_norm_rope_store_fp4_kernel,
                types,
                constants,
                rope_store.fp4_constants(dim, rot, heads),
                divisible,
            )
            yield replace(variant, form_only=dim in OTHER_HEAD_DIMS)
            yield from _rope_store_forms(variant, (dim, rot))


def _latent_store() -> Iterator[Variant]:
    types = dict.fromkeys(("q", "latent", "absorbed", "normed", "weight"), "*bf16")
    types |= {"positions": "*i64", "cos_sin": "*fp32", "out_cache_loc": "*i64", "num_absorbed": "i32"}
    strides = ("q_stride", "q_head_stride", "latent_stride", "absorbed_stride", "slot_stride")
    types |= dict.fromkeys(strides, "i32") | {"eps": "fp32", "scale": "fp32"}
    for (nope, rank, rot), (cache, (pointer, limit)), heads in itertools.product(
        LATENT_SHAPES, CACHE_TYPES.items(), (1, 4, 8)
    ):
        constants: dict[str, Any] = {"Q_HEADS": 16, "NOPE": nope, "RANK": rank, "ROT": rot}
        constants |= {"INTERLEAVED": True, "FP8_LIMIT": limit}
        yield describe(
            "latent_norm_rope_store",
            f"{rank}r{rot}/{cache}/{heads}",
            latent_store.latent_norm_rope_store_kernel,
            types | {"cache": pointer},
            constants,
            latent_store.launch_constants(rank, rot, heads),
            strides,
        )


def _pack_parts() -> Iterator[Variant]:
    counts = ("num_tokens", "num_heads", "num_ranks")
    types = {"parts": "*bf16", "lse": "*fp32", "packed": "*bf16"} | dict.fromkeys(counts, "i32")
    for dims in PART_DIMS:
        launch = part_rows.launch_constants(dims, torch.bfloat16)
        yield describe("pack_parts", f"{dims}", part_rows.pack_parts_kernel, types, {}, launch)


def _merge_parts() -> Iterator[Variant]:
    strides = ("out_stride", "head_stride")
    types = {"received": "*bf16", "sinks": "*fp32", "out": "*bf16"}
    types |= dict.fromkeys(("num_heads", "num_ranks", *strides), "i32")
    for dims in PART_DIMS:
        launch = part_rows.launch_constants(dims, torch.bfloat16)
        kernel, constants = part_rows.merge_parts_kernel, {"HAS_SINKS": True}
        yield describe("merge_parts", f"{dims}", kernel, types, constants, launch, strides)


def _routing(score: str) -> Iterator[Variant]:
    """The widest form: with bias, shared expert, padding and a map of experts, and with a bias for tokens of images
    where a published model has one."""
    types = {"weights": "*fp32", "ids": "*i32", "num_valid": "*i32", "num_tokens": "i32", "row_stride": "i32"}
    types |= {"scale": "fp32", "expert_map": "*i32"} | ({} if score == "softmax" else {"bias": "*fp32"})
    types |= {"image_token": "i32"} | ({"image_bias": "*fp32", "token_ids": "*i64"} if score == "sqrtsoftplus" else {})
    for (experts, k, groups), logits, renormalize in itertools.product(
        ROUTINGS[score], ("bf16", "fp32"), (True, False)
    ):
        if score != "softmax" and renormalize == (k == 1):  # one score is not made 1
            continue
        constants: dict[str, Any] = {"SCORE": score, "RENORMALIZE": renormalize}
        constants |= {"bias": None} if score == "softmax" else {}
        constants |= {} if score == "sqrtsoftplus" else {"image_bias": None, "token_ids": None}
        constants |= topk.topk_constants(experts, k, groups, with_shared=True)
        key = f"{experts}k{k}" + (f"g{groups[0]}" if groups[0] > 1 else "") + f"/{logits}"
        key += "" if renormalize else "/raw"
        arguments = types | {"logits": f"*{logits}"}
        strides = () if experts % 16 else ("row_stride",)
        yield describe(f"topk_{score}", key, topk.topk_kernel, arguments, constants, topk.LAUNCH, strides)


def _hash_routing() -> Iterator[Variant]:
    types = {"token_ids": "*i64", "table": "*i32", "weights": "*fp32", "ids": "*i32", "num_valid": "*i32"}
    types |= {"num_tokens": "i32", "row_stride": "i32", "num_experts": "i32", "scale": "fp32", "expert_map": "*i32"}
    constants = {"SCORE": "sqrtsoftplus"} | topk.choice_constants(6, True)
    for logits in ("bf16", "fp32"):
        arguments = types | {"logits": f"*{logits}"}
        key, kernel = f"k6/{logits}", topk.topk_hash_kernel
        yield describe("topk_hash", key, kernel, arguments, constants, topk.HASH_LAUNCH, ("row_stride",))


_LOGITS = {"logits": "*fp32", "table": "*i32", "slots": "*i64", "vocab_size": "i32", "stride": "i32"}


def _logit_variants(
    op: str, key: str, fn: Any, more: Mapping[str, str], constants: Mapping[str, Any], launch: Mapping[str, int]
) -> Iterator[Variant]:
    """Rows of logits lie at multiples of 16, and of vocabularies that tokens were added to anywhere."""
    types = _LOGITS | dict(more)
    yield describe(op, key, fn, types, constants, launch, ("stride",))
    yield replace(describe(op, f"{key}/odd", fn, types, constants, launch), form_only=True)


def _draw() -> Iterator[Variant]:
    types = {"positions": "*i32", "thresholds": "*fp32", "scores_out": "*fp32", "ids_out": "*i32"}
    types |= {"arrivals": "*i32", "tokens": "*i64", "next_token": "*i64", "num_splits": "i32"}
    launch = {"BLOCK": sampling.DRAW_BLOCK, "num_warps": 8}
    for name, noise, filtered in (("greedy", False, False), ("sampled", True, False), ("filtered", True, True)):
        constants = {"NOISE": noise, "FILTER": filtered, "WRITE_NEXT": True, "MAX_SPLITS": SPLITS}
        yield from _logit_variants("draw_tokens", name, sampling.draw_tokens_kernel, types, constants, launch)


def _thresholds() -> Iterator[Variant]:
    launch = {"BLOCK": sampling.THRESHOLD_BLOCK, "num_warps": sampling.THRESHOLD_WARPS}
    kernel = sampling.threshold_kernel
    yield from _logit_variants("filter_thresholds", "all", kernel, {"thresholds": "*fp32"}, {}, launch)


def _adjust() -> Iterator[Variant]:
    types = {"state": "*i32", "vocab_mask": "*i32", "mask_stride": "i32"}
    launch = {"BLOCK": sampling.ADJUST_BLOCK, "num_warps": 8}
    constants = {"PENALTIES": True, "MASK": True}
    yield from _logit_variants("adjust_logits", "all", sampling.adjust_logits_kernel, types, constants, launch)


def _gemv() -> Iterator[Variant]:
    """Logits of the vocabulary are fp32, and so are those of routers, whose weights may be as well."""
    types = {"x": "*bf16", "w": "*bf16", "bias": "*bf16", "out": "*bf16", "N": "i32", "K": "i32"}
    forms: dict[str, dict[str, str]] = {
        "gemv": {},
        "gemv_logits": {"out": "*fp32", "bias": "*fp32"},
        "gemv_fp32": {"out": "*fp32", "bias": "*fp32", "w": "*fp32"},
    }
    constants = {"EVEN_K": False, "HAS_BIAS": True}
    for (name, pointers), tile in itertools.product(forms.items(), (gemv.TILE, *gemv.WHOLE_ROW_TILES)):
        key = name if tile is gemv.TILE else f"{name}/row{tile['BLOCK_K']}"
        yield describe("linear", key, gemv.gemv_kernel, types | pointers, constants, tile, ("N", "K"))


def _skinny_gemm() -> Iterator[Variant]:
    types = {"x": "*bf16", "w": "*bf16", **dict.fromkeys(("T", "N", "K", "x_stride"), "i32")}
    constants = {"BLOCK_M": skinny_gemm.MAX_ROWS, "EVEN_K": False, "HAS_BIAS": True}
    for (name, out), tile in itertools.product(
        {"skinny": "*bf16", "skinny_logits": "*fp32"}.items(), skinny_gemm.TILES
    ):
        key = f"{name}/{tile['BLOCK_N']}x{tile['BLOCK_K']}"
        pointers = {"out": out, "bias": out}
        kernel = skinny_gemm.skinny_gemm_kernel
        yield describe("linear", key, kernel, types | pointers, constants, tile, ("N", "K", "x_stride"))


def _linear() -> Iterator[Variant]:
    yield from _gemv()
    yield from _skinny_gemm()


_VARIANTS = {
    "decode_inputs": _decode_inputs,
    "verify_inputs": _verify_inputs,
    "draft_inputs": _draft_inputs,
    "accept_drafts": _accept_drafts,
    "ngram_drafts": _ngram_drafts,
    "embedding_rows": _embedding_rows,
    "rmsnorm": lambda: _norms("rmsnorm"),
    "fused_add_rmsnorm": lambda: _norms("fused_add_rmsnorm"),
    "silu_and_mul": lambda: _activation(SILU),
    "gelu_and_mul": lambda: _activation(GELU),
    "relu2": lambda: _activation(RELU2),
    "clamped_swiglu": lambda: (*_activation(CLAMPED), *_activation(GPT_OSS_SWIGLU, "/shifted")),
    "qk_whole_norm": _whole_norm,
    "qk_norm_rope_store": _rope_store,
    "latent_norm_rope_store": _latent_store,
    "pack_parts": _pack_parts,
    "merge_parts": _merge_parts,
    "topk_softmax": lambda: _routing("softmax"),
    "topk_sigmoid": lambda: _routing("sigmoid"),
    "topk_sqrtsoftplus": lambda: _routing("sqrtsoftplus"),
    "topk_hash": _hash_routing,
    "draw_tokens": _draw,
    "filter_thresholds": _thresholds,
    "adjust_logits": _adjust,
    "linear": _linear,
}
