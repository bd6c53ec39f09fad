"""The candidates of every op, in order: the first one that can serve a need is chosen.

Rows with `not_here` exist in other servers and are listed so that `explain` can say why they are out. Hardware reasons
come from `requires`, never from comparing architectures.
"""

from __future__ import annotations

from sglang.srt.configs.quant_scheme import SCHEMES, widening
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.hardware.topology import Topology
from sglang.srt.kernels.all_reduce_table import algorithms, bands_for
from sglang.srt.kernels.spec import KernelSpec, Need, Refuse
from sglang.srt.kernels.tiles import MLA_LATENT

_ATTENTION = "sglang.srt.layers.attention"
_NATIVE = "sglang.srt.layers.native_ops"
_NATIVE_SPARSE = "sglang.srt.layers.native_sparse_ops"
_NATIVE_BLOCKS = "sglang.srt.layers.native_block_groups"
_TRITON = "sglang.srt.layers.triton_ops"
_EXPERTS = "sglang.srt.layers.moe"
_MOE = f"{_EXPERTS}.fused_moe_triton"
_COMPRESSED = "sglang.srt.layers.compressed"
_RECURRENT = "sglang.srt.layers.recurrent"
_NGRAMS = "sglang.srt.layers.ngrams"

NOT_YET = "not implemented yet in sm120-sglang"
NOT_PART = "not part of sm120-sglang"

CP_ASYNC = frozenset({"cp_async"})
SM12X_PRODUCTS = frozenset({"block_scaled_mma", "mma_sync_block_scale"})
TCGEN05 = frozenset({"tcgen05"})
WGMMA = frozenset({"wgmma"})
NVLINK = frozenset({"nvlink"})

# --- what kernels refuse ----------------------------------------------------------------------------------------------


def all_of(*refusals: Refuse) -> Refuse:
    return lambda need, arch: [reason for refuse in refusals for reason in refuse(need, arch)]


def lacks(*traits: str) -> Refuse:
    """The kernel has none of these."""
    return lambda need, arch: [f"no support for {trait.replace('_', ' ')}" for trait in traits if trait in need.traits]


def only_dtypes(*dtypes: str) -> Refuse:
    return lambda need, arch: [] if need.q_dtype in dtypes else [f"no {need.q_dtype} (has {', '.join(dtypes)})"]


def only_quant(*schemes: str | None) -> Refuse:
    def refuse(need: Need, arch: ArchTraits) -> list[str]:
        if need.quant in schemes:
            return []
        has = "unquantized" if schemes == (None,) else ", ".join(scheme or "unquantized" for scheme in schemes)
        return [f"no {need.quant} (has {has})" if need.quant else "no unquantized weights"]

    return refuse


def only_latent(need: Need, arch: ArchTraits) -> list[str]:
    return [] if "mla" in need.traits else ["serves latent attention (MLA) only"]


def only_full_heads(need: Need, arch: ArchTraits) -> list[str]:
    return ["does not serve latent attention (MLA)"] if "mla" in need.traits else []


def flashinfer_head_dims(need: Need, arch: ArchTraits) -> list[str]:
    if need.head_dim != need.v_head_dim:
        return [f"head dims {need.head_dim}/{need.v_head_dim} differ"]
    return [] if need.head_dim in (64, 128, 256) else [f"head dim {need.head_dim} (has 64, 128, 256)"]


def flashinfer_latents(need: Need, arch: ArchTraits) -> list[str]:
    """Refuse the sizes that FA2's latent kernels are not made for."""
    latent = (need.head_dim, need.v_head_dim)
    return [] if latent == MLA_LATENT else [f"latents of {latent[0]} dims, {latent[1]} of them values (has 576, 512)"]


def only_packed(need: Need, arch: ArchTraits) -> list[str]:
    """Float8 latents of sparse layers are packed, in one form."""
    if need.kv_dtype != "fp8_e4m3":
        return [f"no {need.kv_dtype} cache (has fp8_e4m3 and 16 bits)"]
    latent = (need.head_dim, need.v_head_dim)
    return [] if latent == MLA_LATENT else [f"latents of {latent[0]} dims, {latent[1]} of them values (has 576, 512)"]


def only_16_bit_cache(need: Need, arch: ArchTraits) -> list[str]:
    return [] if need.kv_dtype in ("bfloat16", "float16") else [f"no {need.kv_dtype} cache (has 16 bits)"]


def no_fp8_cache(need: Need, arch: ArchTraits) -> list[str]:
    return [f"no {need.kv_dtype} cache (--kv-cache-dtype bf16 works)"] if need.kv_dtype.startswith("fp8") else []


def no_fp4_cache(need: Need, arch: ArchTraits) -> list[str]:
    return ["no fp4_e2m1 cache (has fp8_e4m3, fp8_e5m2, 16 bits)"] if need.kv_dtype == "fp4_e2m1" else []


def only_equal_head_dims(need: Need, arch: ArchTraits) -> list[str]:
    return [] if need.head_dim == need.v_head_dim else [f"head dims {need.head_dim}/{need.v_head_dim} differ"]


HYBRIDS = {"hybrid_gdn": "gated-delta-net", "hybrid_mamba2": "Mamba-2"}
"""Traits of models with recurrent layers: what these layers are."""
HYBRID_LINEAR_ATTN_BACKENDS: tuple[tuple[str, tuple[str, ...], tuple[str, str]], ...] = (
    ("tcgen05", ("hybrid_gdn",), ("triton", "trtllm_mha")),
    ("mma_sync_block_scale", tuple(HYBRIDS), ("triton", "flashinfer")),
)
"""Backends of the full-attention layers of models with recurrent layers, for GPUs with a feature. The first row counts;
others take what every model may have. torch_native serves everywhere."""


def hybrid_linear_attn_backend(need: Need, arch: ArchTraits) -> tuple[tuple[str, ...], str] | None:
    """The names that the need may have, and why; None: any."""
    for feature, traits, (first, second) in HYBRID_LINEAR_ATTN_BACKENDS:
        for trait in need.traits.intersection(traits):
            if feature in arch.features:
                why = f"hybrid {HYBRIDS[trait]} models take {first} or {second} on GPUs with {feature}"
                return (first, second, "torch_native"), why
    return None


def not_for_hybrids(name: str) -> Refuse:
    def refuse(need: Need, arch: ArchTraits) -> list[str]:
        allowed = hybrid_linear_attn_backend(need, arch)
        return [] if allowed is None or name in allowed[0] else [allowed[1]]

    return refuse


def hybrid_choice(need: Need, arch: ArchTraits) -> str:
    allowed = hybrid_linear_attn_backend(need, arch)
    return "" if allowed is None else allowed[1]


def no_e4m3_conversion(need: Need, arch: ArchTraits) -> list[str]:
    """Triton converts e4m3 on GPUs that multiply it, e5m2 on all."""
    if need.kv_dtype == "fp8_e4m3" and "fp8_mma" not in arch.features:
        return [f"cannot convert fp8_e4m3 on {arch.name} (fp8_e5m2 works)"]
    return []


def e4m3_or_16_bits(need: Need, arch: ArchTraits) -> list[str]:
    """Entries of sparse attention have scales of their own, for which e4m3 is the format."""
    return ["no fp8_e5m2 cache (has fp8_e4m3, 16 bits)"] if need.kv_dtype == "fp8_e5m2" else []


def packed_latents(need: Need, arch: ArchTraits) -> str:
    return "latents of 656 bytes: e4m3 with a scale for 128 columns, rotary columns in bfloat16" * (
        need.kv_dtype == "fp8_e4m3"
    )


def no_e4m3_arithmetic(need: Need, arch: ArchTraits) -> list[str]:
    """Weights or scales of e4m3, on GPUs that do not have the type."""
    scheme = SCHEMES.get(need.quant or "")
    if scheme is not None and "e4m3" in (scheme.element, scheme.scale) and "fp8_mma" not in arch.features:
        return [f"no e4m3 arithmetic on {arch.name}, which {need.quant} needs"]
    return []


def widened(need: Need, arch: ArchTraits) -> str:
    return widening(SCHEMES[need.quant], arch.features) if need.quant else ""


MIXED_ROWS = 48
"""Pairs an expert from which sgl-kernel's products serve."""


def mixed_or_widened(need: Need, arch: ArchTraits) -> str:
    triton = widened(need, arch)
    return f"e2m1 times e4m3 as they are, from {MIXED_ROWS} pairs an expert on; for fewer by triton, {triton}"


GEMV_LEAST_K = 512
"""Columns that it takes at least; a test holds both to the launcher's."""
GEMV_MULTIPLE = 16
"""The divisor of the columns that it serves."""


def gemv_or_cublas(need: Need, arch: ArchTraits) -> str:
    """Describe which of the products of unquantized weights is served by which kernel."""
    by_gemv: dict[bool, list[str]] = {True: [], False: []}
    for rows, cols, bias in need.shapes:
        by_gemv[cols >= GEMV_LEAST_K and cols % GEMV_MULTIPLE == 0].append(f"{rows}x{cols}{' + bias' * bias}")
    served, left = by_gemv[True], by_gemv[False]
    text = "cublas for steps of several tokens"
    if left:
        text += f", and for one token with K below {GEMV_LEAST_K} or no multiple of {GEMV_MULTIPLE}: {', '.join(left)}"
    return text + (f"; gemv_kernel for one token with {', '.join(served)}" if served else "")


SCALED_MM_ROWS = 1024
"""Tokens of a step from which torch's scaled products serve: fewer would not fill their large tiles."""
SCALED_MM_SCHEMES = ("fp8_tensor", "fp8_channel", "fp8_block")
SCALED_MM_FEATURES = WGMMA


def library_fails(need: Need, arch: ArchTraits) -> list[str]:
    return [need.library_problem] if need.library_problem else []


def scaled_mm_or_triton(need: Need, arch: ArchTraits) -> str:
    """Describe which of the products of e4m3 weights is served by which kernel."""
    step = 128 if need.quant == "fp8_block" else 16
    odd = [f"{rows}x{cols}" for rows, cols, _ in need.shapes if rows % 16 or cols % step]
    text = f"torch.nn.functional.scaled_mm for steps of {SCALED_MM_ROWS:,} tokens and more, triton for fewer"
    return text + (f" and for sizes that its blocks do not divide: {', '.join(odd)}" if odd else "")


def dequantized(need: Need, arch: ArchTraits) -> str:
    return "weights dequantized for each product; activations stay in 16 bits" if need.quant else ""


def native_fp4_available(need: Need, arch: ArchTraits) -> list[str]:
    if need.quant in ("nvfp4", "mxfp4") and "block_scaled_mma" in arch.features:
        return ["weight-only; native FP4 is available"]
    return []


# --- attention --------------------------------------------------------------------------------------------------------

_HALF = only_dtypes("bfloat16", "float16")


def _attention(op: str) -> tuple[KernelSpec, ...]:
    flashinfer_refuses = all_of(
        only_full_heads, flashinfer_head_dims, _HALF, no_fp4_cache, not_for_hybrids("flashinfer"),
        lacks("sinks", "sparse", "logit_cap", "custom_mask", "both_ways", "token_shares", "kept_longer"),
    )  # fmt: skip
    return (
        KernelSpec(
            "triton",
            f"{_ATTENTION}.triton_backend:TritonAttnBackend",
            CP_ASYNC,
            "triton",
            tiled=True,
            kernel_module=f"{_ATTENTION}.triton_ops.{op}",
            refuse=all_of(_HALF, no_e4m3_conversion, lacks("sparse")),
            graph_prefill=True,
            remark=hybrid_choice,
        ),
        KernelSpec(
            "flashinfer",
            f"{_ATTENTION}.flashinfer_backend:FlashInferAttnBackend",
            CP_ASYNC,
            "flashinfer",
            refuse=flashinfer_refuses,
            remark=hybrid_choice,
        ),
        KernelSpec(
            "torch_native",
            f"{_ATTENTION}.torch_native_backend:TorchNativeAttnBackend",
            refuse=lacks("custom_mask", "sparse"),
            graph_safe=False,
        ),
        KernelSpec(
            "flashinfer_mla",
            f"{_ATTENTION}.flashinfer_mla_backend:FlashInferMLABackend",
            CP_ASYNC,
            "flashinfer",
            refuse=all_of(
                only_latent,
                flashinfer_latents,
                _HALF,
                only_16_bit_cache,
                lacks("sparse", "custom_mask", "both_ways", "token_shares"),
            ),
            asked_as="flashinfer",
        ),
        KernelSpec(
            "trtllm_mha",
            requires=TCGEN05,
            refuse=all_of(only_full_heads, not_for_hybrids("trtllm_mha")),
            not_here=NOT_PART,
        ),
        KernelSpec("trtllm_mla", requires=TCGEN05, refuse=only_latent, not_here=NOT_PART),
        KernelSpec("cutlass_mla", requires=TCGEN05, refuse=only_latent, not_here=NOT_PART),
        KernelSpec("fa3", requires=WGMMA, not_here=NOT_PART),
        KernelSpec("fa4", requires=TCGEN05, not_here=NOT_PART),
        KernelSpec("flashmla", requires=WGMMA, refuse=only_latent, not_here=NOT_PART),
    )


EXTEND_ATTENTION = _attention("extend_attention")
DECODE_ATTENTION = _attention("decode_attention")
# Graphs hold absorbed attention: how many chunks a prefix has is known to the host only.
LATENT_PROMPT_ATTENTION = (
    KernelSpec(
        "triton",
        f"{_ATTENTION}.latent_prompt:TritonLatentPrompt",
        CP_ASYNC,
        "triton",
        tiled=True,
        kernel_module=f"{_ATTENTION}.triton_ops.latent_prompt",
        refuse=_HALF,
    ),
    KernelSpec("torch_native", f"{_NATIVE}:latent_prompt_attention", graph_safe=False),
)
PREFILL_ATTENTION = (
    KernelSpec(
        "triton",
        f"{_ATTENTION}.triton_ops.prefill_attention:context_attention_fwd",
        CP_ASYNC,
        "triton",
        tiled=True,
        refuse=_HALF,
    ),
    KernelSpec("torch_native", f"{_NATIVE}:context_attention", graph_safe=False),
    KernelSpec("fa3", requires=WGMMA, not_here=NOT_PART),
)

# --- elementwise, mixture of experts ----------------------------------------------------------------------------------


def _elementwise(op: str, module: str, *refusals: Refuse) -> tuple[KernelSpec, ...]:
    """`refusals`: what both forms refuse."""
    refuse = all_of(no_e4m3_conversion, *refusals)
    return (
        KernelSpec("triton", f"{_TRITON}.{module}:{op}", CP_ASYNC, "triton", refuse=refuse),
        KernelSpec("torch_native", f"{_NATIVE}:{op}", refuse=all_of(*refusals)),
    )


def _guess_rows(op: str) -> tuple[KernelSpec, ...]:
    return (
        KernelSpec("triton", f"{_TRITON}.guess_rows:{op}", CP_ASYNC, "triton"),
        KernelSpec("torch_native", f"sglang.srt.layers.native_guesses:{op}"),
    )


def _indexer(op: str, graph_safe: bool = True) -> tuple[KernelSpec, ...]:
    """Returns the kernels that prepare the indexer's keys and queries; `graph_safe` is that of plain torch."""
    refuse = all_of(_HALF, e4m3_or_16_bits, no_e4m3_conversion)
    return (
        KernelSpec("triton", f"{_TRITON}.index_store:{op}", CP_ASYNC, "triton", refuse=refuse),
        KernelSpec("torch_native", f"{_NATIVE_SPARSE}:{op}", refuse=e4m3_or_16_bits, graph_safe=graph_safe),
    )


def _compressed(
    triton_entry: str, native_entry: str, *refusals: Refuse, graph_safe: bool = True
) -> tuple[KernelSpec, ...]:
    """An op of compressed attention. `refusals`: what both forms refuse; `graph_safe`: in plain torch."""
    refuse = all_of(_HALF, lacks("uneven_sizes"), *refusals)
    return (
        KernelSpec("triton", f"{_COMPRESSED}.triton_ops.{triton_entry}", CP_ASYNC, "triton", refuse=refuse),
        KernelSpec(
            "torch_native", f"{_COMPRESSED}.native:{native_entry}", refuse=all_of(*refusals), graph_safe=graph_safe
        ),
    )


FUSED_MOE = (
    KernelSpec(
        "sgl_kernel",
        f"{_EXPERTS}.mixed_moe:fused_moe",
        SM12X_PRODUCTS,
        "sm120_sgl_kernel",
        bands=f"{_MOE}.expert_bands:mixed_bands",
        refuse=all_of(_HALF, only_quant("mxfp4_mxfp8"), lacks("gelu_gate", "no_gate")),
        remark=mixed_or_widened,
    ),
    KernelSpec(
        "triton",
        f"{_MOE}.fused_moe:fused_moe",
        CP_ASYNC,
        "triton",
        bands=f"{_MOE}.expert_bands:triton_bands",
        refuse=all_of(_HALF, only_quant(None, *SCHEMES), no_e4m3_arithmetic),
        remark=widened,
    ),
    KernelSpec(
        "torch_native",
        f"{_NATIVE}:fused_moe",
        refuse=only_quant(None, *SCHEMES),
        graph_safe=False,
        remark=dequantized,
    ),
    KernelSpec("trtllm_gen", requires=TCGEN05, not_here=NOT_PART),
    KernelSpec("deep_gemm", requires=WGMMA, not_here=NOT_PART),
    KernelSpec("cutlass", requires=frozenset({"tma"}), not_here=NOT_PART),
    KernelSpec("marlin", requires=CP_ASYNC, refuse=native_fp4_available, not_here=NOT_PART),
)
LINEAR = (
    KernelSpec(
        "triton_gemv",
        f"{_TRITON}.gemv:linear",
        CP_ASYNC,
        "triton",
        refuse=all_of(_HALF, only_quant(None)),
        remark=gemv_or_cublas,
    ),
    KernelSpec("cublas", f"{_NATIVE}:linear", CP_ASYNC, refuse=only_quant(None)),
    KernelSpec("torch_native", f"{_NATIVE}:linear", refuse=only_quant(None)),
    # Without wgmma Triton's tiles are what the GPU has, or nobody has measured that the library is faster.
    KernelSpec(
        "torch_scaled_mm",
        "sglang.srt.layers.quantization.scaled_mm:quantized_linear",
        SCALED_MM_FEATURES,
        "triton",
        bands=f"{_TRITON}.linear_tiles:library_bands",
        refuse=all_of(_HALF, only_quant(*SCALED_MM_SCHEMES), library_fails),
        remark=scaled_mm_or_triton,
    ),
    KernelSpec(
        "triton_quantized",
        f"{_TRITON}.quant_linear:quantized_linear",
        CP_ASYNC,
        "triton",
        bands=f"{_TRITON}.linear_tiles:triton_bands",
        refuse=all_of(_HALF, only_quant(*SCHEMES), no_e4m3_arithmetic),
        asked_as="triton",
        remark=widened,
    ),
    KernelSpec("torch_dequantized", f"{_NATIVE}:quantized_linear", refuse=only_quant(*SCHEMES), remark=dequantized),
    KernelSpec("cutlass", requires=frozenset({"tma"}), not_here=NOT_PART),
    KernelSpec("marlin", requires=CP_ASYNC, refuse=native_fp4_available, not_here=NOT_PART),
)


def _recurrent(triton_entry: str, native_entry: str) -> tuple[KernelSpec, ...]:
    """An op of layers with a recurrent state, where only 16-bit activations are worth a kernel."""
    return (
        KernelSpec("triton", f"{_RECURRENT}.triton_ops.{triton_entry}", CP_ASYNC, "triton", refuse=_HALF),
        KernelSpec("torch_native", f"{_RECURRENT}.native:{native_entry}", graph_safe=False),
    )


_RECURRENCE = _recurrent("recurrence:RECURRENCE", "RECURRENCE")
GATED_DELTA_RULE = (
    *_RECURRENCE,
    KernelSpec("flashinfer", requires=CP_ASYNC, refuse=not_for_hybrids("flashinfer"), not_here=NOT_YET),
)
SPARSE_INDEXER = (
    KernelSpec(
        "triton",
        f"{_ATTENTION}.sparse:TritonSparseIndexer",
        CP_ASYNC,
        "triton",
        tiled=True,
        kernel_module=f"{_ATTENTION}.triton_ops.index_logits",
        refuse=all_of(_HALF, e4m3_or_16_bits, no_e4m3_conversion),
    ),
    KernelSpec("torch_native", f"{_NATIVE_SPARSE}:sparse_indexer", graph_safe=False),
    KernelSpec("deep_gemm", requires=WGMMA, not_here=NOT_PART),
)
SPARSE_ATTENTION = (
    KernelSpec(
        "triton",
        f"{_ATTENTION}.sparse:TritonSparseAttention",
        CP_ASYNC,
        "triton",
        tiled=True,
        kernel_module=f"{_ATTENTION}.triton_ops.sparse_attention",
        refuse=all_of(_HALF, e4m3_or_16_bits, no_e4m3_conversion),
        remark=packed_latents,
    ),
    KernelSpec("torch_native", f"{_NATIVE_SPARSE}:sparse_attention", graph_safe=False),
    KernelSpec("flashinfer_sparse_mla", requires=CP_ASYNC, refuse=only_latent, not_here=NOT_YET),
    KernelSpec("flashmla_sparse", requires=WGMMA, refuse=only_latent, not_here=NOT_PART),
    KernelSpec("fa3", requires=WGMMA, not_here=NOT_PART),
    KernelSpec("trtllm", requires=TCGEN05, refuse=only_latent, not_here=NOT_PART),
)
SELECTED_BLOCK_ATTENTION = (
    KernelSpec(
        "triton",
        f"{_ATTENTION}.pooled_blocks:TritonSelectedBlocks",
        CP_ASYNC,
        "triton",
        tiled=True,
        kernel_module=f"{_ATTENTION}.triton_ops.selected_blocks",
        refuse=all_of(_HALF, only_16_bit_cache, lacks("uneven_sizes")),
    ),
    KernelSpec("torch_native", "sglang.srt.layers.native_pooled_blocks:selected_block_attention", graph_safe=False),
)
BLOCK_INDEXER = (
    KernelSpec(
        "triton",
        f"{_ATTENTION}.block_groups:TritonBlockIndexer",
        CP_ASYNC,
        "triton",
        tiled=True,
        kernel_module=f"{_ATTENTION}.triton_ops.block_scores",
        refuse=all_of(_HALF, lacks("uneven_sizes")),
    ),
    KernelSpec("torch_native", f"{_NATIVE_BLOCKS}:block_indexer", graph_safe=False),
)
BLOCK_ATTENTION = (
    KernelSpec(
        "triton",
        f"{_ATTENTION}.block_groups:TritonBlockAttention",
        CP_ASYNC,
        "triton",
        tiled=True,
        kernel_module=f"{_ATTENTION}.triton_ops.block_attention",
        refuse=all_of(_HALF, no_e4m3_conversion, only_equal_head_dims, lacks("uneven_sizes")),
    ),
    KernelSpec("torch_native", f"{_NATIVE_BLOCKS}:block_attention", graph_safe=False),
    KernelSpec("flashinfer_msa", requires=CP_ASYNC, not_here=NOT_YET),
)
FLASHINFER_FUSION = "flashinfer_fusion"
MOST_RANKS = 8
"""The limit of sgl-kernel's all-reduce; a test holds it to the library's number."""


def no_way_to_peers(need: Need, arch: ArchTraits) -> list[str]:
    if need.links is not None and need.links.problem:
        return [need.links.problem]
    if not bands_for(topology_of(need, arch), need.ranks):
        return [f"no row for {need.ranks} ranks over {topology_of(need, arch).value} (has 2 to {MOST_RANKS} ranks)"]
    return []


def topology_of(need: Need, arch: ArchTraits) -> Topology:
    """The connection of the GPUs of an all-reduce. If it was not probed: that of machines with so many such cards."""
    if need.links is not None:
        return need.links.topology
    if "nvlink" in arch.features:
        return Topology.NVLINK
    return Topology.HOST_BRIDGE if need.ranks <= 4 else Topology.CROSS_NUMA


def algorithms_by_size(need: Need, arch: ArchTraits) -> str:
    assumed = " (assumed)" if need.links is None else ""
    return algorithms(topology_of(need, arch), need.ranks) + assumed


def flashinfer_fuses(need: Need, arch: ArchTraits) -> list[str]:
    """Reasons against FlashInfer's sums."""
    if FLASHINFER_FUSION not in need.traits:
        return ["only with --enable-flashinfer-allreduce-fusion (over PCIe not measured to win)"]
    return [need.links.fusion_problem] if need.links is not None and need.links.fusion_problem else []


ALL_REDUCE = (
    KernelSpec(
        "flashinfer",
        "sglang.srt.distributed.flashinfer_fusion:FlashInferFusion",
        CP_ASYNC,
        "flashinfer",
        refuse=all_of(_HALF, flashinfer_fuses),
        remark=lambda need, arch: "sums that a residual and a norm follow, in one launch; the others as without it",
    ),
    KernelSpec(
        "sgl_kernel",
        "sglang.srt.distributed.custom_all_reduce:CustomAllReduce",
        CP_ASYNC,
        "sm120_sgl_kernel",
        refuse=all_of(only_dtypes("bfloat16", "float16", "float32"), no_way_to_peers),
        remark=algorithms_by_size,
    ),
    KernelSpec("nccl", "sglang.srt.distributed.parallel_state:all_reduce", CP_ASYNC),
    KernelSpec("gloo", "sglang.srt.distributed.parallel_state:all_reduce"),
    KernelSpec("nvls", requires=NVLINK, not_here=NOT_PART),
)

ROUTERS = ("softmax", "sigmoid", "sqrtsoftplus", "hash")
"""The ways in which tokens find their experts: by a score, or by a table of token ids."""

TABLES: dict[str, tuple[KernelSpec, ...]] = {
    "decode_inputs": _elementwise("decode_inputs", "decode_inputs"),
    **{op: _guess_rows(op) for op in ("verify_inputs", "draft_inputs", "settle_guesses")},
    "ngram_guesses": (
        KernelSpec("triton", f"{_TRITON}.ngram:ngram_guesses", CP_ASYNC, "triton"),
        KernelSpec("torch_native", "sglang.srt.layers.native_ngram:ngram_guesses"),
    ),
    "embedding_rows": _elementwise("embedding_rows", "embedding"),
    "rmsnorm": _elementwise("rmsnorm", "norm"),
    "fused_add_rmsnorm": _elementwise("fused_add_rmsnorm", "norm"),
    "silu_and_mul": _elementwise("silu_and_mul", "activation"),
    "clamped_swiglu": (
        KernelSpec("triton", f"{_TRITON}.activation:activate", CP_ASYNC, "triton"),
        KernelSpec("torch_native", f"{_NATIVE}:gated"),
    ),
    "gelu_and_mul": _elementwise("gelu_and_mul", "activation"),
    "relu2": _elementwise("relu2", "activation"),
    "qk_norm_rope_store": (
        KernelSpec(
            "triton",
            f"{_TRITON}.rope_store:qk_norm_rope_store",
            CP_ASYNC,
            "triton",
            refuse=all_of(no_e4m3_conversion, only_equal_head_dims),
        ),
        KernelSpec("torch_native", f"{_NATIVE}:qk_norm_rope_store"),
    ),
    "qk_whole_norm": _elementwise("qk_whole_norm", "whole_norm"),
    "q_norm_rope": (KernelSpec("torch_native", f"{_NATIVE}:q_norm_rope"),),
    "value_norm": (KernelSpec("torch_native", f"{_NATIVE}:value_norm"),),
    "latent_norm_rope_store": _elementwise("latent_norm_rope_store", "latent_store", only_latent),
    "latent_absorb": (
        KernelSpec("cublas", f"{_NATIVE}:latent_absorb", CP_ASYNC),
        KernelSpec("torch_native", f"{_NATIVE}:latent_absorb"),
    ),
    "latent_prompt_attention": LATENT_PROMPT_ATTENTION,
    "attention_output_gate": _recurrent("gated_norm:attention_output_gate", "attention_output_gate"),
    "attention_head_gate": _recurrent("gated_norm:attention_head_gate", "attention_head_gate"),
    "index_key_store": _indexer("index_key_store", graph_safe=False),
    "index_queries": _indexer("index_queries"),
    "latent_pack_store": (
        KernelSpec(
            "triton",
            f"{_TRITON}.latent_pack:latent_pack_store",
            CP_ASYNC,
            "triton",
            refuse=all_of(_HALF, only_packed, no_e4m3_conversion),
        ),
        KernelSpec("torch_native", f"{_NATIVE_SPARSE}:latent_pack_store", refuse=only_packed),
    ),
    "index_norm_rope": (
        KernelSpec("triton", f"{_TRITON}.index_rope:index_norm_rope", CP_ASYNC, "triton", refuse=_HALF),
        KernelSpec("torch_native", f"{_NATIVE_SPARSE}:index_norm_rope"),
    ),
    "kv_compressor": _compressed("compressor:KV_COMPRESSOR", "KV_COMPRESSOR", no_fp8_cache, graph_safe=False),
    "shared_kv_norm_rope_store": _compressed(
        "tail_rotation:shared_kv_norm_rope_store", "shared_kv_norm_rope_store", no_fp8_cache
    ),
    "tail_rotation": _compressed("tail_rotation:tail_rotation", "tail_rotation"),
    "gated_streams": (
        KernelSpec("triton", f"{_TRITON}.gated_streams:GATED_STREAMS", CP_ASYNC, "triton", refuse=_HALF),
        KernelSpec("torch_native", "sglang.srt.layers.native_streams:GATED_STREAMS"),
    ),
    "ngram_embedding": (
        KernelSpec(
            "triton",
            f"{_NGRAMS}.triton_ops.ngram_embedding:NGRAM_EMBEDDING",
            CP_ASYNC,
            "triton",
            refuse=all_of(_HALF, no_e4m3_conversion),
        ),
        KernelSpec("torch_native", f"{_NGRAMS}.native:NGRAM_EMBEDDING"),
    ),
    "hyper_connection": (
        KernelSpec(
            "triton",
            f"{_TRITON}.hyper_connection:hyper_connection",
            CP_ASYNC,
            "triton",
            refuse=all_of(only_dtypes("bfloat16"), lacks("uneven_sizes")),
        ),
        KernelSpec("torch_native", "sglang.srt.layers.hyper_native:hyper_connection"),
    ),
    "causal_conv1d": _recurrent("causal_conv:CAUSAL_CONV", "CAUSAL_CONV"),
    "gated_rmsnorm": _recurrent("gated_norm:gated_rmsnorm", "gated_rmsnorm"),
    **{f"topk_{kind}": _elementwise(f"topk_{kind}", "topk") for kind in ROUTERS},
    "linear": LINEAR,
    "fused_moe": FUSED_MOE,
    "extend_attention": EXTEND_ATTENTION,
    "decode_attention": DECODE_ATTENTION,
    "prefill_attention": PREFILL_ATTENTION,
    "gated_delta_rule": GATED_DELTA_RULE,
    "kimi_delta_rule": _recurrent("channel_recurrence:CHANNEL_RECURRENCE", "RECURRENCE"),
    "state_space_duality": _RECURRENCE,
    "sparse_indexer": SPARSE_INDEXER,
    "sparse_attention": SPARSE_ATTENTION,
    "selected_block_attention": SELECTED_BLOCK_ATTENTION,
    "block_indexer": BLOCK_INDEXER,
    "block_attention": BLOCK_ATTENTION,
    "all_reduce": ALL_REDUCE,
}

ATTENTION_BACKENDS: tuple[str, ...] = tuple(spec.name for spec in EXTEND_ATTENTION)
"""The names that --attention-backend takes; the resolver says which of them can run."""

FP8_GEMM_BACKENDS = ("triton", "torch_scaled_mm", "torch_dequantized")
"""The names that --fp8-gemm-backend takes; the same holds."""
