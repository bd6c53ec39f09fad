"""The candidates of attention's ops, dense and sparse, and of the indexers that select for it; see `tables`."""

from __future__ import annotations

from sglang.srt.kernels.conditions import (
    CP_ASYNC,
    HALF,
    NOT_PART,
    NOT_YET,
    TCGEN05,
    WGMMA,
    all_of,
    biased_heads,
    e4m3_or_16_bits,
    flashinfer_head_dims,
    flashinfer_latent_prompts_are_faster,
    flashinfer_latents,
    flashinfer_prompts_are_faster,
    hybrid_choice,
    lacks,
    library_fails,
    no_e4m3_conversion,
    no_fp4_cache,
    not_for_hybrids,
    only_16_bit_cache,
    only_full_heads,
    only_latent,
    packed_latents,
    torch_flash_heads,
    torch_flash_is_faster,
)
from sglang.srt.kernels.spec import KernelSpec

_ATTENTION = "sglang.srt.layers.attention"
_MLA = "sglang.srt.blocks.mla"
_NATIVE = "sglang.srt.layers.native_ops"
_NATIVE_SPARSE = "sglang.srt.layers.native_sparse_ops"
_SHARED_SPARSE = "sglang.srt.blocks.shared_sparse"
_POOLED_SPARSE = "sglang.srt.blocks.pooled_sparse"
_BLOCK_SELECTION = "sglang.srt.blocks.block_selection"


_FLASHINFER_REFUSES = all_of(
    only_full_heads, flashinfer_head_dims, HALF, no_fp4_cache, not_for_hybrids("flashinfer"),
    lacks("sinks", "sparse", "logit_cap", "custom_mask", "both_ways", "token_shares", "window_slack", "chunked",
          "relative_bias"),
)  # fmt: skip


def _attention(op: str) -> tuple[KernelSpec, ...]:
    return (
        KernelSpec(
            "triton",
            f"{_ATTENTION}.triton_backend:TritonAttnBackend",
            CP_ASYNC,
            "triton",
            tiled=True,
            kernel_module=f"{_ATTENTION}.triton_ops.{op}",
            refuse=all_of(HALF, no_e4m3_conversion, lacks("sparse"), biased_heads),
            graph_prefill=True,
            remark=hybrid_choice,
        ),
        KernelSpec(
            "flashinfer",
            f"{_ATTENTION}.flashinfer_backend:FlashInferAttnBackend",
            CP_ASYNC,
            "flashinfer",
            refuse=_FLASHINFER_REFUSES,
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
                HALF,
                only_16_bit_cache,
                lacks("sparse", "custom_mask", "both_ways", "sinks"),
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
# Takes the place of Triton's kernel (which steps in CUDA graphs keep) for long prompts, unless a flag names a kernel.
LONG_PROMPT_ATTENTION = (
    KernelSpec(
        "flashinfer",
        f"{_ATTENTION}.flashinfer_backend:FlashInferAttnBackend",
        CP_ASYNC,
        "flashinfer",
        refuse=all_of(_FLASHINFER_REFUSES, flashinfer_prompts_are_faster),
        graph_safe=False,
    ),
)
# CUDA graphs hold absorbed attention, because only the host knows how many chunks a prefix has.
LATENT_PROMPT_ATTENTION = (
    KernelSpec(
        "triton",
        f"{_MLA}.prompt:TritonLatentPrompt",
        CP_ASYNC,
        "triton",
        takes_plan=True,
        tiled=True,
        kernel_module=f"{_MLA}.kernels.latent_prompt",
        refuse=HALF,
    ),
    KernelSpec("torch_native", f"{_MLA}.reference:expanded_latent_attention", graph_safe=False),
)
# Takes the place of Triton's kernel as LONG_PROMPT_ATTENTION does.
LONG_LATENT_PROMPT = (
    KernelSpec(
        "flashinfer",
        f"{_MLA}.flashinfer_prompt:FlashInferLatentPrompt",
        CP_ASYNC,
        "flashinfer",
        refuse=all_of(HALF, lacks("sinks"), flashinfer_latent_prompts_are_faster),
        graph_safe=False,
    ),
)
PREFILL_ATTENTION = (
    # Serves image encoders, and classes of transformers that generate no text. Measured beside Triton's on an H100:
    # benchmark/results/images.md.
    KernelSpec(
        "torch_flash",
        f"{_ATTENTION}.flash_varlen:flash_attention",
        CP_ASYNC,
        refuse=all_of(HALF, torch_flash_heads, torch_flash_is_faster, library_fails),
        graph_safe=False,
    ),
    KernelSpec(
        "triton",
        f"{_ATTENTION}.triton_ops.prefill_attention:context_attention_fwd",
        CP_ASYNC,
        "triton",
        tiled=True,
        refuse=all_of(HALF, lacks("two_sided_window")),
    ),
    KernelSpec("torch_native", f"{_NATIVE}:context_attention", graph_safe=False),
    KernelSpec("fa3", requires=WGMMA, not_here=NOT_PART),
)
SPARSE_INDEXER = (
    KernelSpec(
        "triton",
        f"{_ATTENTION}.sparse:TritonSparseIndexer",
        CP_ASYNC,
        "triton",
        takes_plan=True,
        tiled=True,
        kernel_module=f"{_ATTENTION}.triton_ops.index_logits",
        refuse=all_of(HALF, e4m3_or_16_bits, no_e4m3_conversion),
    ),
    KernelSpec("torch_native", f"{_NATIVE_SPARSE}:sparse_indexer", graph_safe=False),
    KernelSpec("deep_gemm", requires=WGMMA, not_here=NOT_PART),
)
CANDIDATE_BLOCKS = (
    KernelSpec(
        "triton", f"{_SHARED_SPARSE}.triton_candidates:TritonCandidateBlocks", CP_ASYNC, "triton",
        takes_plan=True,
        refuse=all_of(HALF, e4m3_or_16_bits, no_e4m3_conversion),
    ),
    KernelSpec("torch_native", f"{_SHARED_SPARSE}.candidates:candidate_blocks", graph_safe=False),
)  # fmt: skip
SPARSE_ATTENTION = (
    KernelSpec(
        "triton",
        f"{_ATTENTION}.sparse:TritonSparseAttention",
        CP_ASYNC,
        "triton",
        takes_plan=True,
        tiled=True,
        kernel_module=f"{_ATTENTION}.triton_ops.sparse_attention",
        refuse=all_of(HALF, e4m3_or_16_bits, no_e4m3_conversion),
        remark=packed_latents,
    ),
    KernelSpec("torch_native", f"{_NATIVE_SPARSE}:attend_selected", graph_safe=False),
    KernelSpec("flashinfer_sparse_mla", requires=CP_ASYNC, refuse=only_latent, not_here=NOT_YET),
    KernelSpec("flashmla_sparse", requires=WGMMA, refuse=only_latent, not_here=NOT_PART),
    KernelSpec("fa3", requires=WGMMA, not_here=NOT_PART),
    KernelSpec("trtllm", requires=TCGEN05, refuse=only_latent, not_here=NOT_PART),
)
SELECTED_BLOCK_ATTENTION = (
    KernelSpec(
        "triton",
        f"{_POOLED_SPARSE}.selected_blocks:TritonSelectedBlocks",
        CP_ASYNC,
        "triton",
        takes_plan=True,
        tiled=True,
        kernel_module=f"{_POOLED_SPARSE}.kernels.selected_blocks",
        refuse=all_of(HALF, no_fp4_cache, no_e4m3_conversion, lacks("uneven_sizes")),
    ),
    KernelSpec("torch_native", f"{_POOLED_SPARSE}.reference:attend_blocks", graph_safe=False),
)
BLOCK_INDEXER = (
    KernelSpec(
        "triton",
        f"{_BLOCK_SELECTION}.indexer:TritonBlockIndexer",
        CP_ASYNC,
        "triton",
        takes_plan=True,
        tiled=True,
        kernel_module=f"{_BLOCK_SELECTION}.kernels.block_scores",
        refuse=all_of(HALF, lacks("uneven_sizes")),
    ),
    KernelSpec("torch_native", f"{_BLOCK_SELECTION}.reference:block_indexer", graph_safe=False),
)
BLOCK_ATTENTION = (
    KernelSpec(
        "triton",
        f"{_ATTENTION}.block_attention:TritonBlockAttention",
        CP_ASYNC,
        "triton",
        takes_plan=True,
        tiled=True,
        kernel_module=f"{_ATTENTION}.triton_ops.block_attention",
        refuse=all_of(HALF, no_e4m3_conversion, lacks("uneven_sizes")),
    ),
    KernelSpec("torch_native", f"{_NATIVE_SPARSE}:attend_blocks", graph_safe=False),
    KernelSpec("flashinfer_msa", requires=CP_ASYNC, not_here=NOT_YET),
)
