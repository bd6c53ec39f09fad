"""The candidates of every op, in order: the first one that can serve a need is chosen.

Rows with `not_here` exist in other servers and are listed so that `explain` can say why they are out. Hardware reasons
come from `requires`, never from comparing architectures.
"""

from __future__ import annotations

from sglang.srt.configs.quant_scheme import EXL3, SCHEMES
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.hardware.topology import Topology
from sglang.srt.kernels.all_reduce_table import algorithms, ranges_for
from sglang.srt.kernels.attention_table import (
    BLOCK_ATTENTION,
    BLOCK_INDEXER,
    CANDIDATE_BLOCKS,
    DECODE_ATTENTION,
    EXTEND_ATTENTION,
    LATENT_PROMPT_ATTENTION,
    LONG_LATENT_PROMPT,
    LONG_PROMPT_ATTENTION,
    PREFILL_ATTENTION,
    SELECTED_BLOCK_ATTENTION,
    SPARSE_ATTENTION,
    SPARSE_INDEXER,
)
from sglang.srt.kernels.conditions import (
    CP_ASYNC,
    HALF,
    NOT_PART,
    NOT_YET,
    NVLINK,
    SCALED_MM_FEATURES,
    SCALED_MM_SCHEMES,
    SM12X_PRODUCTS,
    TCGEN05,
    WGMMA,
    all_of,
    dequantized,
    dequantized_in_registers,
    e4m3_or_16_bits,
    few_rows_or_cublas,
    lacks,
    library_fails,
    mixed_or_dequantized,
    native_fp4_available,
    no_e4m3_arithmetic,
    no_e4m3_conversion,
    not_for_hybrids,
    only_dtypes,
    only_equal_head_dims,
    only_latent,
    only_packed,
    only_quant,
    scaled_mm_or_triton,
    trellis_tiles,
)
from sglang.srt.kernels.spec import KernelSpec, Need, Refuse

_NATIVE = "sglang.srt.layers.native_ops"
_NATIVE_SPARSE = "sglang.srt.layers.native_sparse_ops"
_TRELLIS = "sglang.srt.layers.quantization.trellis"
_TRITON = "sglang.srt.layers.triton_ops"
_EXPERTS = "sglang.srt.layers.moe"
_MOE = f"{_EXPERTS}.fused_moe_triton"
_ROUTED = "sglang.srt.blocks.moe"
_GQA = "sglang.srt.blocks.gqa"
_MLA = "sglang.srt.blocks.mla"
_COMPRESSED = "sglang.srt.blocks.compressed"
_RECURRENT = "sglang.srt.blocks.recurrent_state"
_KIMI_DELTA = "sglang.srt.blocks.kimi_delta"
_NGRAMS = "sglang.srt.blocks.ngram_embedding"
_CONVOLUTION = "sglang.srt.blocks.short_convolution"
_STREAMS = "sglang.srt.blocks.gated_streams"
_GATED_SUM = "sglang.srt.blocks.gated_sum"
_HYPER = "sglang.srt.blocks.hyper_connections"


def _elementwise(op: str, module: str, *refusals: Refuse, block: str = "") -> tuple[KernelSpec, ...]:
    """Returns the Triton and the torch kernel of an op. `refusals`: what both of them refuse; `block`: the package of
    the block that the op belongs to."""
    triton, native = (f"{block}.kernels", f"{block}.reference") if block else (_TRITON, _NATIVE)
    refuse = all_of(no_e4m3_conversion, *refusals)
    return (
        KernelSpec("triton", f"{triton}.{module}:{op}", CP_ASYNC, "triton", refuse=refuse),
        KernelSpec("torch_native", f"{native}:{op}", refuse=all_of(*refusals)),
    )


def _draft_rows(op: str) -> tuple[KernelSpec, ...]:
    return (
        KernelSpec("triton", f"{_TRITON}.draft_rows:{op}", CP_ASYNC, "triton"),
        KernelSpec("torch_native", f"sglang.srt.layers.native_draft_rows:{op}"),
    )


def _indexer(op: str, graph_safe: bool = True) -> tuple[KernelSpec, ...]:
    """Returns the kernels that prepare the indexer's keys and queries; `graph_safe` is that of plain torch."""
    refuse = all_of(HALF, e4m3_or_16_bits, no_e4m3_conversion)
    return (
        KernelSpec("triton", f"{_TRITON}.index_store:{op}", CP_ASYNC, "triton", refuse=refuse),
        KernelSpec("torch_native", f"{_NATIVE_SPARSE}:{op}", refuse=e4m3_or_16_bits, graph_safe=graph_safe),
    )


def _compressed(
    triton_entry: str, native_entry: str, *refusals: Refuse, graph_safe: bool = True
) -> tuple[KernelSpec, ...]:
    """Returns the kernels of an op of compressed attention. `refusals`: what both of them refuse; `graph_safe`: that of
    plain torch."""
    refuse = all_of(HALF, lacks("uneven_sizes"), *refusals)
    return (
        KernelSpec("triton", f"{_COMPRESSED}.kernels.{triton_entry}", CP_ASYNC, "triton", refuse=refuse),
        KernelSpec(
            "torch_native", f"{_COMPRESSED}.reference:{native_entry}", refuse=all_of(*refusals), graph_safe=graph_safe
        ),
    )


FUSED_MOE = (
    KernelSpec(
        "sgl_kernel",
        f"{_EXPERTS}.mixed_moe:fused_moe",
        SM12X_PRODUCTS,
        "sm120_sgl_kernel",
        configs=f"{_MOE}.expert_tile_configs:mixed_tile_configs",
        alternatives=f"{_MOE}.expert_alternatives:mixed_alternatives",
        refuse=all_of(HALF, only_quant("mxfp4_mxfp8"), lacks("gelu_gate", "no_gate")),
        remark=mixed_or_dequantized,
    ),
    KernelSpec(
        "triton",
        f"{_MOE}.fused_moe:fused_moe",
        CP_ASYNC,
        "triton",
        configs=f"{_MOE}.expert_tile_configs:triton_tile_configs",
        alternatives=f"{_MOE}.expert_alternatives:triton_alternatives",
        refuse=all_of(HALF, only_quant(None, *SCHEMES), no_e4m3_arithmetic),
        remark=dequantized_in_registers,
    ),
    KernelSpec(
        "torch_native",
        f"{_NATIVE}:fused_moe",
        refuse=only_quant(None, *SCHEMES),
        graph_safe=False,
        remark=dequantized,
    ),
    KernelSpec(
        "triton_trellis",
        f"{_TRITON}.trellis_experts:fused_moe",
        CP_ASYNC,
        "triton",
        refuse=all_of(HALF, only_quant(EXL3.name)),
        asked_as="triton",
        remark=trellis_tiles,
    ),
    KernelSpec(
        "torch_trellis",
        f"{_TRELLIS}_banks:fused_moe",
        refuse=only_quant(EXL3.name),
        graph_safe=False,
        asked_as="torch_native",
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
        refuse=all_of(HALF, only_quant(None)),
        remark=few_rows_or_cublas,
    ),
    KernelSpec("cublas", f"{_NATIVE}:linear", CP_ASYNC, refuse=only_quant(None)),
    KernelSpec("torch_native", f"{_NATIVE}:linear", refuse=only_quant(None)),
    # Without wgmma Triton's tiles use all that the GPU has, or nobody has measured that the library is faster.
    KernelSpec(
        "torch_scaled_mm",
        "sglang.srt.layers.quantization.scaled_mm:quantized_linear",
        SCALED_MM_FEATURES,
        "triton",
        configs=f"{_TRITON}.linear_tiles:library_tile_configs",
        alternatives=f"{_TRITON}.linear_alternatives:library_alternatives",
        refuse=all_of(HALF, only_quant(*SCALED_MM_SCHEMES), library_fails),
        remark=scaled_mm_or_triton,
    ),
    KernelSpec(
        "triton_quantized",
        f"{_TRITON}.linear_products:quantized_linear",
        CP_ASYNC,
        "triton",
        configs=f"{_TRITON}.linear_tiles:triton_tile_configs",
        alternatives=f"{_TRITON}.linear_alternatives:triton_alternatives",
        refuse=all_of(HALF, only_quant(*SCHEMES), no_e4m3_arithmetic),
        asked_as="triton",
        remark=dequantized_in_registers,
    ),
    KernelSpec("torch_dequantized", f"{_NATIVE}:quantized_linear", refuse=only_quant(*SCHEMES), remark=dequantized),
    KernelSpec(
        "triton_trellis",
        f"{_TRITON}.trellis_products:trellis_linear",
        CP_ASYNC,
        "triton",
        refuse=all_of(HALF, only_quant(EXL3.name)),
        asked_as="triton",
        remark=trellis_tiles,
    ),
    KernelSpec(
        "torch_trellis",
        f"{_TRELLIS}:trellis_linear",
        refuse=only_quant(EXL3.name),
        asked_as="torch_dequantized",
        remark=dequantized,
    ),
    KernelSpec("cutlass", requires=frozenset({"tma"}), not_here=NOT_PART),
    KernelSpec("marlin", requires=CP_ASYNC, refuse=native_fp4_available, not_here=NOT_PART),
)


def _recurrent(triton_entry: str, native_entry: str, block: str = _RECURRENT) -> tuple[KernelSpec, ...]:
    """Returns the kernels of an op of recurrent layers, for which Triton serves 16-bit activations only. `block`: the
    package of the block whose Triton kernel it is."""
    return (
        KernelSpec("triton", f"{block}.kernels.{triton_entry}", CP_ASYNC, "triton", refuse=HALF),
        KernelSpec("torch_native", f"{_RECURRENT}.reference:{native_entry}", graph_safe=False),
    )


_RECURRENCE = _recurrent("recurrence:RECURRENCE", "RECURRENCE")
GATED_DELTA_RULE = (
    *_RECURRENCE,
    KernelSpec("flashinfer", requires=CP_ASYNC, refuse=not_for_hybrids("flashinfer"), not_here=NOT_YET),
)
FLASHINFER_FUSION = "flashinfer_fusion"
MAX_RANKS = 8
"""Most ranks of sgl-kernel's all-reduce; a test holds it to the library's number."""


def no_peer_memory(need: Need, arch: ArchTraits) -> list[str]:
    """Returns the reasons against all-reduces through peers' memory."""
    if need.links is not None and need.links.problem:
        return [need.links.problem]
    if not ranges_for(topology_of(need, arch), need.ranks):
        return [f"no row for {need.ranks} ranks over {topology_of(need, arch).value} (has 2 to {MAX_RANKS} ranks)"]
    return []


def topology_of(need: Need, arch: ArchTraits) -> Topology:
    """Returns the links of an all-reduce's GPUs; if they were not probed, those usual for such cards in one machine."""
    if need.links is not None:
        return need.links.topology
    if "nvlink" in arch.features:
        return Topology.NVLINK
    return Topology.HOST_BRIDGE if need.ranks <= 4 else Topology.CROSS_NUMA


def algorithms_by_size(need: Need, arch: ArchTraits) -> str:
    """Describes the all-reduce algorithms of the group by message size."""
    assumed = " (assumed)" if need.links is None else ""
    return algorithms(topology_of(need, arch), need.ranks) + assumed


def flashinfer_fuses(need: Need, arch: ArchTraits) -> list[str]:
    """Returns the reasons against FlashInfer's fused all-reduces."""
    if FLASHINFER_FUSION not in need.traits:
        return ["only with --enable-flashinfer-allreduce-fusion (over PCIe not measured to win)"]
    return [need.links.fusion_problem] if need.links is not None and need.links.fusion_problem else []


ALL_REDUCE = (
    KernelSpec(
        "flashinfer",
        "sglang.srt.distributed.flashinfer_fusion:FlashInferFusion",
        CP_ASYNC,
        "flashinfer",
        refuse=all_of(HALF, flashinfer_fuses),
        remark=lambda need, arch: "sums that a residual and a norm follow, in one launch; the others as without it",
    ),
    KernelSpec(
        "sgl_kernel",
        "sglang.srt.distributed.custom_all_reduce:CustomAllReduce",
        CP_ASYNC,
        "sm120_sgl_kernel",
        refuse=all_of(only_dtypes("bfloat16", "float16", "float32"), no_peer_memory),
        remark=algorithms_by_size,
    ),
    KernelSpec("nccl", "sglang.srt.distributed.parallel_state:all_reduce", CP_ASYNC),
    KernelSpec("gloo", "sglang.srt.distributed.parallel_state:all_reduce"),
    KernelSpec("nvls", requires=NVLINK, not_here=NOT_PART),
)

ROUTERS = ("softmax", "sigmoid", "sqrtsoftplus", "hash")
"""Kinds of routers: by one of the score functions, or by a hash table of token ids."""

TABLES: dict[str, tuple[KernelSpec, ...]] = {
    "decode_inputs": _elementwise("decode_inputs", "decode_inputs"),
    **{op: _draft_rows(op) for op in ("verify_inputs", "draft_inputs", "accept_drafts")},
    "ngram_drafts": (
        KernelSpec("triton", f"{_TRITON}.ngram:ngram_drafts", CP_ASYNC, "triton"),
        KernelSpec("torch_native", "sglang.srt.layers.native_ngram:ngram_drafts"),
    ),
    "add_adapters": (
        KernelSpec("triton", f"{_TRITON}.adapters:ADAPTERS", CP_ASYNC, "triton", refuse=HALF),
        KernelSpec("torch_native", "sglang.srt.layers.native_adapters:ADAPTERS", graph_safe=False),
    ),
    "add_expert_adapters": (
        KernelSpec("triton", f"{_MOE}.expert_adapters:EXPERT_ADAPTERS", CP_ASYNC, "triton", refuse=HALF),
        KernelSpec("torch_native", "sglang.srt.layers.native_adapters:EXPERT_ADAPTERS", graph_safe=False),
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
        KernelSpec("torch_native", f"{_GQA}.reference:qk_norm_rope_store"),
    ),
    "qk_whole_norm": _elementwise("qk_whole_norm", "whole_norm", block=_GQA),
    "q_norm_rope": (KernelSpec("torch_native", f"{_GQA}.reference:q_norm_rope"),),
    "value_norm": (KernelSpec("torch_native", f"{_GQA}.reference:value_norm"),),
    "latent_norm_rope_store": _elementwise("latent_norm_rope_store", "latent_store", only_latent, block=_MLA),
    **{op: _elementwise(op, "part_rows") for op in ("pack_parts", "merge_parts")},
    "latent_absorb": (
        KernelSpec("cublas", f"{_MLA}.reference:latent_absorb", CP_ASYNC),
        KernelSpec("torch_native", f"{_MLA}.reference:latent_absorb"),
    ),
    "latent_prompt_attention": LATENT_PROMPT_ATTENTION,
    **{
        op: (
            KernelSpec("triton", f"{_RECURRENT}.kernels.gated_norm:{op}", CP_ASYNC, "triton", refuse=HALF),
            KernelSpec("torch_native", f"{_GQA}.reference:{op}", graph_safe=False),
        )
        for op in ("attention_output_gate", "attention_head_gate")
    },
    "index_key_store": _indexer("index_key_store", graph_safe=False),
    "index_queries": _indexer("index_queries"),
    "latent_pack_store": (
        KernelSpec(
            "triton",
            f"{_MLA}.kernels.latent_pack:latent_pack_store",
            CP_ASYNC,
            "triton",
            refuse=all_of(HALF, only_packed, no_e4m3_conversion),
        ),
        KernelSpec("torch_native", f"{_MLA}.reference:latent_pack_store", refuse=only_packed),
    ),
    "latent_record_store": (
        KernelSpec(
            "triton",
            f"{_TRITON}.latent_records:latent_record_store",
            CP_ASYNC,
            "triton",
            refuse=all_of(HALF, no_e4m3_conversion),
        ),
        KernelSpec("torch_native", "sglang.srt.layers.native_latent_records:latent_record_store", graph_safe=False),
    ),
    "index_norm_rope": (
        KernelSpec("triton", f"{_TRITON}.index_rope:index_norm_rope", CP_ASYNC, "triton", refuse=HALF),
        KernelSpec("torch_native", f"{_NATIVE_SPARSE}:index_norm_rope"),
    ),
    "kv_compressor": _compressed("compressor:KV_COMPRESSOR", "KV_COMPRESSOR", graph_safe=False),
    "shared_kv_norm_rope_store": _compressed("tail_rotation:shared_kv_norm_rope_store", "shared_kv_norm_rope_store"),
    "tail_rotation": _compressed("tail_rotation:tail_rotation", "tail_rotation"),
    "gated_streams": (
        KernelSpec("triton", f"{_STREAMS}.kernels.gated_streams:GATED_STREAMS", CP_ASYNC, "triton", refuse=HALF),
        KernelSpec("torch_native", f"{_STREAMS}.reference:GATED_STREAMS"),
    ),
    "gated_sum": (
        KernelSpec("triton", f"{_GATED_SUM}.kernels.gated_sum:gated_sum", CP_ASYNC, "triton", refuse=HALF),
        KernelSpec("torch_native", f"{_GATED_SUM}.reference:gated_sum"),
    ),
    "ngram_embedding": (
        KernelSpec(
            "triton",
            f"{_NGRAMS}.kernels.ngram_embedding:NGRAM_EMBEDDING",
            CP_ASYNC,
            "triton",
            refuse=all_of(HALF, no_e4m3_conversion),
        ),
        KernelSpec("torch_native", f"{_NGRAMS}.reference:NGRAM_EMBEDDING"),
    ),
    "short_convolution": (
        KernelSpec("triton", f"{_CONVOLUTION}.kernels.short_convolution:KERNELS", CP_ASYNC, "triton", refuse=HALF),
        KernelSpec("torch_native", f"{_CONVOLUTION}.reference:KERNELS"),
    ),
    "hyper_connection": (
        KernelSpec(
            "triton",
            f"{_HYPER}.kernels.hyper_connection:hyper_connection",
            CP_ASYNC,
            "triton",
            refuse=all_of(only_dtypes("bfloat16"), lacks("uneven_sizes")),
        ),
        KernelSpec("torch_native", f"{_HYPER}.reference:hyper_connection"),
    ),
    "causal_conv1d": _recurrent("causal_conv:CAUSAL_CONV", "CAUSAL_CONV"),
    "gated_rmsnorm": _recurrent("gated_norm:gated_rmsnorm", "gated_rmsnorm"),
    **{f"topk_{kind}": _elementwise(f"topk_{kind}", "topk", block=_ROUTED) for kind in ROUTERS},
    "linear": LINEAR,
    "fused_moe": FUSED_MOE,
    "expert_slots": (
        KernelSpec("triton", f"{_TRITON}.expert_slots:EXPERT_SLOTS", CP_ASYNC, "triton"),
        KernelSpec("torch_native", f"{_EXPERTS}.slot_ops:EXPERT_SLOTS", graph_safe=False),
    ),
    "cpu_experts": (
        KernelSpec("triton", f"{_TRITON}.cpu_experts:CPU_EXPERTS", CP_ASYNC, "triton"),
        KernelSpec("torch_native", f"{_EXPERTS}.cpu_experts.ops:CPU_EXPERTS", graph_safe=False),
    ),
    "extend_attention": EXTEND_ATTENTION,
    "long_prompt_attention": LONG_PROMPT_ATTENTION,
    "long_latent_prompt": LONG_LATENT_PROMPT,
    "decode_attention": DECODE_ATTENTION,
    "prefill_attention": PREFILL_ATTENTION,
    "gated_delta_rule": GATED_DELTA_RULE,
    "kimi_delta_rule": _recurrent("channel_recurrence:CHANNEL_RECURRENCE", "RECURRENCE", _KIMI_DELTA),
    "state_space_duality": _RECURRENCE,
    "sparse_indexer": SPARSE_INDEXER,
    "candidate_blocks": CANDIDATE_BLOCKS,
    "sparse_attention": SPARSE_ATTENTION,
    "selected_block_attention": SELECTED_BLOCK_ATTENTION,
    "block_indexer": BLOCK_INDEXER,
    "block_attention": BLOCK_ATTENTION,
    "all_reduce": ALL_REDUCE,
}

FP8_GEMM_BACKENDS = ("triton", "torch_scaled_mm", "torch_dequantized")
"""Values of --fp8-gemm-backend; the resolver says which of them can run."""
