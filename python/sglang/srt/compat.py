"""Spellings of other SGLang releases, as data: what we rename, what means nothing here, what we do not have.

Flags are written without the leading dashes. `upstream_interface.json` lists the flags that are no options here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.upstream_interface import ACCEPTED, REFUSED, FlagGroup

RENAMED_FLAGS: Mapping[str, str] = {
    "cuda-graph-max-bs-decode": "cuda-graph-max-bs",
    "cuda-graph-bs-decode": "cuda-graph-bs",
    "disable-decode-cuda-graph": "disable-cuda-graph",
    "stream-output": "incremental-streaming-output",
    "schedule-heuristic": "schedule-policy",
    "speculative-ngram-max-match-window-size": "speculative-ngram-max-trie-depth",
}

VALUE_ALIASES: Mapping[tuple[str, str], str] = {
    ("dtype", "half"): "float16",
    ("dtype", "fp16"): "float16",
    ("dtype", "bf16"): "bfloat16",
    ("dtype", "float"): "float32",
    ("dtype", "fp32"): "float32",
    ("kv_cache_dtype", "bfloat16"): "bf16",
    ("kv_cache_dtype", "fp8"): "fp8_e4m3",
    ("kv_cache_dtype", "nvfp4"): "fp4_e2m1",
    ("kv_cache_dtype", "fp4"): "fp4_e2m1",
    ("quantization", "compressed_tensors"): "compressed-tensors",
    ("quantization", "modelopt_nvfp4"): "modelopt_fp4",
    ("attention_backend", "torch"): "torch_native",
    ("prefill_attention_backend", "torch"): "torch_native",
    ("decode_attention_backend", "torch"): "torch_native",
    ("attention_backend", "FLASHINFER"): "flashinfer",
    ("attention_backend", "FLASH_ATTN"): "flash_attn",
    ("attention_backend", "TRITON_ATTN"): "triton",
    **{
        ("speculative_algorithm", name.lower()): name
        for name in "NGRAM STANDALONE EAGLE EAGLE3 NEXTN DFLASH DSPARK".split()
    },
    ("speculative_algorithm", "FROZEN_KV_MTP"): "NEXTN",  # what SGLang makes of it where the draft is an assistant
    ("speculative_algorithm", "frozen_kv_mtp"): "NEXTN",
    ("load_balance_method", "shortest_queue"): "total_requests",
    ("load_balance_method", "minimum_tokens"): "total_tokens",
    ("tool_call_parser", "qwen"): "qwen25",
    ("tool_call_parser", "qwen3"): "qwen25",
    ("tool_call_parser", "glm"): "glm45",
    ("tool_call_parser", "ling3"): "glm45",
    ("tool_call_parser", "poolside_v1"): "glm45",
    ("tool_call_parser", "spark25"): "glm45",
    ("tool_call_parser", "muse_glimmer"): "muse",
    ("tool_call_parser", "nanbeige"): "qwen3_coder",
    ("tool_call_parser", "step3p5"): "qwen3_coder",
    ("tool_call_parser", "step5"): "qwen3_coder",
    ("tool_call_parser", "trinity"): "qwen25",
    ("tool_call_parser", "qwen3_xml"): "qwen3_coder",
    ("tool_call_parser", "deepseek-v41"): "deepseekv41",
    ("reasoning_parser", "deepseek-v41"): "deepseek-v4",
    ("reasoning_parser", "deepseekv41"): "deepseek-v4",
    ("reasoning_parser", "dots"): "qwen3",
    ("reasoning_parser", "gigachat35"): "deepseek-r1",
    ("reasoning_parser", "granite"): "qwen3",
    ("reasoning_parser", "granite_thinking_parser"): "qwen3",
    ("reasoning_parser", "interns1"): "qwen3",
    ("reasoning_parser", "iquest_q1"): "deepseek-r1",
    ("reasoning_parser", "lfm2"): "qwen3",
    ("reasoning_parser", "ling3"): "glm45",
    ("reasoning_parser", "mimo"): "qwen3",
    ("reasoning_parser", "minicpm5"): "qwen3",
    ("reasoning_parser", "muse_glimmer"): "muse",
    ("reasoning_parser", "nanbeige"): "qwen3",
    ("reasoning_parser", "nemotron_3"): "qwen3",
    ("reasoning_parser", "poolside_v1"): "qwen3",
    ("reasoning_parser", "step3"): "deepseek-r1",
    ("reasoning_parser", "step3p5"): "deepseek-r1",
    ("reasoning_parser", "step5"): "deepseek-r1",
    ("reasoning_parser", "trinity"): "qwen3",
}
"""(field, value) -> our name of the same thing."""


_NVFP4 = "Checkpoints in NVFP4 are detected: leave the flag out, or write nvfp4."
VALUE_HINTS: Mapping[tuple[str, str], str] = {
    ("kv_cache_dtype", "fp4_mx_block16"): "Write fp4_e2m1: four bits with an e4m3 scale for 16 of them.",
    ("kv_cache_dtype", "nvfp4_ds_mla"): "Latents have no cache in 4 bits; fp8_e4m3 is the smallest.",
    ("kv_cache_dtype", "fp8_ds_mla"): "Write fp8_e4m3: how a model lays it out is its own affair.",
    ("kv_cache_dtype", "mxfp8"): "Write fp8_e4m3.",
    ("moe_runner_backend", "offload"): "Write --enable-paged-experts, which keeps experts in main memory.",
    ("quantization", "fp4"): _NVFP4,
    ("quantization", "nvfp4_online"): "Quantize the checkpoint beforehand, with python -m sglang.quantize.",
    ("quantization", "bitsandbytes"): "Take a checkpoint in FP8, NVFP4, GPTQ or AWQ, or write fp8 to quantize one.",
}
"""(field, value) of other releases and servers that is not read here -> what to do instead, in a sentence."""

WORDS_OF_OTHERS: Mapping[str, str] = {
    # vLLM
    "gpu-memory-utilization": "--mem-fraction-static, which counts weights and KV cache only",
    "max-model-len": "--context-length",
    "max-num-seqs": "--max-running-requests",
    "max-num-batched-tokens": "--chunked-prefill-size",
    "block-size": "--page-size",
    "enforce-eager": "--disable-cuda-graph",
    "max-cudagraph-capture-size": "--cuda-graph-max-bs",
    "cudagraph-capture-sizes": "--cuda-graph-bs",
    "enable-prefix-caching": "the default; remove it",
    "no-enable-prefix-caching": "--disable-radix-cache",
    "enable-chunked-prefill": "the default; remove it",
    "no-enable-chunked-prefill": "--chunked-prefill-size -1",
    "enable-expert-parallel": "--ep-size, with as many groups as GPUs",
    "enable-auto-tool-choice": "part of --tool-call-parser; remove it",
    "hf-overrides": "--json-model-override-args",
    "mamba-ssm-cache-dtype": "--mamba-ssm-dtype",
    "override-generation-config": "--preferred-sampling-params",
    "generation-config": "--sampling-defaults",
    "scheduling-policy": "--schedule-policy",
    "seed": "--random-seed",
    "uvicorn-log-level": "--log-level-http",
    "disable-log-requests": "the default; remove it",
    "enable-log-requests": "--log-requests",
    "speculative-config": "--speculative-algorithm, with --speculative-draft-model-path and --speculative-num-steps",
    "kv-transfer-config": "not available: prefixes go no further than main memory and a store of this server, with"
    " --enable-hierarchical-cache and --hicache-storage-backend",
    "swap-space": "--enable-hierarchical-cache, with --hicache-size",
    "distributed-executor-backend": "not needed; remove it",
    "master-addr": "--dist-init-addr, as HOST:PORT",
    "master-port": "--dist-init-addr, as HOST:PORT",
    "no-language-model-only": "the default; remove it",
    "kv-cache-memory-bytes": "--max-total-tokens, which counts tokens, or --mem-fraction-static",
    "cpu-offload-params": "not available: --cpu-offload-gb moves experts only, and --language-model-only does without"
    " the encoder of images",
    "tokenizer-pool-size": "not needed; remove it",
    "limit-mm-per-prompt": "--limit-mm-data-per-request",
    # FreeToken
    "moe-cache-auto": "the default with --enable-paged-experts; remove it",
    "kv-reserve-tokens": "--max-total-tokens",
    # llama.cpp
    "ctx-size": "--context-length",
    "n-gpu-layers": "not needed: all layers are on the GPU; remove it",
    "flash-attn": "not needed: the plan chooses the kernel; remove it",
    "parallel": "--max-running-requests",
    "jinja": "the default; remove it",
    "cache-type-k": "--kv-cache-dtype",
    "cache-type-v": "--kv-cache-dtype",
    "alias": "--served-model-name",
}
"""A flag of vLLM, FreeToken or llama.cpp -> its word here, which completes `here that is ...`."""


@dataclass(frozen=True, slots=True)
class RefusedValues:
    """Values of an option that other releases have, and that stand for what does not exist here."""

    reason: str
    """Reason, with {} in place of the value."""
    values: frozenset[str]


_NOT_READ = (
    "sm120-sglang does not read the format {{}} yet; {} auto chooses by the chat template among those that it reads"
)
_FORMATS_NOT_READ = frozenset("beam cohere_command4 k2_horizon kimi_k3 response_template".split())
_OTHER_DRAFTERS = frozenset({"UNO"})
REFUSED_VALUES: Mapping[str, RefusedValues] = {
    "speculative_algorithm": RefusedValues(
        "drafts of the kind {} are not supported yet; take NEXTN where the model brings layers for its drafts, EAGLE3"
        " where there is such a head for it, or NGRAM, which needs no weights",
        _OTHER_DRAFTERS | {name.lower() for name in _OTHER_DRAFTERS},
    ),
    "tool_call_parser": RefusedValues(
        _NOT_READ.format("--tool-call-parser") + ", and without the flag calls stay in the text",
        _FORMATS_NOT_READ,
    ),
    "reasoning_parser": RefusedValues(
        _NOT_READ.format("--reasoning-parser") + ", and without the flag thoughts stay in the text",
        _FORMATS_NOT_READ | {"gigachat3"},
    ),
}


def refusal(field: str, value: Any) -> str | None:
    """Returns why the option `field` does not take a value that other releases have; None for any other value."""
    refused = REFUSED_VALUES.get(field)
    return refused.reason.format(value) if refused is not None and value in refused.values else None


@dataclass(frozen=True, slots=True)
class TuningValues:
    """Values of an option that other releases have and that only tune: accepted with one warning, read as `instead`."""

    instead: str
    reason: str
    values: frozenset[str]


TUNING_VALUES: Mapping[str, TuningValues] = {
    "dcp_comm_backend": TuningValues(
        "a2a",
        "parts are exchanged by the library that all collectives use",
        frozenset({"fi_a2a"}),
    ),
    "load_format": TuningValues(
        "auto",
        "safetensors are read in one way",
        frozenset({"fastsafetensors", "instanttensor", "layered", "runai_streamer"}),
    ),
    "load_balance_method": TuningValues(
        "auto",
        "prefill and decode run in one server",
        frozenset({"follow_bootstrap_room", "decode_round_robin"}),
    ),
}


_ATTENTION_BACKENDS = frozenset(
    (
        "aiter ascend b12x compressed cutedsl_mla dsa dsv4 dual_chunk_flash_attn fa2 flash_attn flex_attention"
        " flashinfer_sparse_mla hpc_ops intel_amx intel_xpu llada2_cfg_flashinfer minicpm_flashattn minicpm_flashinfer"
        " mlu nsa qsa tokenspeed_mla wave"
    ).split()
)
_SPARSE_BACKENDS = frozenset("aiter ascend flashmla_auto flashmla_kv intel_xpu tilelang".split())
FOREIGN_KERNELS: Mapping[str, frozenset[str]] = {
    "dsa_prefill_backend": _SPARSE_BACKENDS,
    "dsa_decode_backend": _SPARSE_BACKENDS,
    "attention_backend": _ATTENTION_BACKENDS,
    "prefill_attention_backend": _ATTENTION_BACKENDS,
    "decode_attention_backend": _ATTENTION_BACKENDS,
    "sampling_backend": frozenset({"ascend", "flashinfer"}),
    "moe_runner_backend": frozenset(
        (
            "aiter b12x cutlass deep_gemm experimental_sgl_marlin experimental_sgl_trtllm flashinfer_cutedsl"
            " flashinfer_cutlass flashinfer_megamoe flashinfer_mxfp4 flashinfer_trtllm flashinfer_trtllm_routed"
            " hpc_ops humming intel_xpu lora_cutedsl lora_marlin lora_triton marlin megamoe triton_kernel"
        ).split()
    ),
    "fp8_gemm_backend": frozenset(
        (
            "aiter b12x cutlass deep_gemm flashinfer_cutedsl flashinfer_cutlass flashinfer_deepgemm flashinfer_trtllm"
        ).split()
    ),
}
"""Kernels of other releases and forks that an option may name: the plan says what serves instead."""


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A published flag that only tunes and has nothing to switch here; accepted with one warning."""

    reason: str
    max_values: int
    """Number of words after the flag that are its values."""


@dataclass(frozen=True, slots=True)
class NotImplementedFlag:
    """A published flag that asks for what we do not have. `reason` says what to do instead."""

    reason: str
    harmless: frozenset[str]
    """Values that ask for nothing: such a flag is accepted."""

    def is_off(self, value: Any) -> bool:
        """Returns whether the value leaves the feature off. Values from Python and YAML count too: None and False do
        so."""
        return value is None or value is False or str(value) in self.harmless


ANY_NUMBER = 1 << 30
"""Number of values of a flag that takes all words that follow it."""
_NUM_VALUES = {"": 1, "...": ANY_NUMBER}


def _words(groups: tuple[FlagGroup, ...]) -> Iterator[tuple[str, bool, str, str]]:
    """Yields for each name: the name itself, whether `=` follows it, what follows the `=`, and the group's reason."""
    for group in groups:
        for word in group.names:
            name, equals, rest = word.partition("=")
            yield name, bool(equals), rest, group.reason


NO_EFFECT: Mapping[str, NoEffect] = {
    name: NoEffect(reason, _NUM_VALUES[rest] if takes_value else 0)
    for name, takes_value, rest, reason in _words(ACCEPTED)
}
UNIMPLEMENTED: Mapping[str, NotImplementedFlag] = {
    name: NotImplementedFlag(reason, frozenset(rest.split("|") if has_harmless else ()))
    for name, has_harmless, rest, reason in _words(REFUSED)
}
