"""Spellings of other SGLang releases, as data: what we rename, what means nothing here, what we do not have yet.

Flags are written without the leading dashes. When a feature arrives, its rows leave `UNIMPLEMENTED` and become fields
of `ServerArgs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RENAMED_FLAGS: Mapping[str, str] = {
    "cuda-graph-max-bs-decode": "cuda-graph-max-bs",
    "cuda-graph-bs-decode": "cuda-graph-bs",
    "disable-decode-cuda-graph": "disable-cuda-graph",
    "stream-output": "incremental-streaming-output",
    "schedule-heuristic": "schedule-policy",
}

VALUE_ALIASES: Mapping[tuple[str, str], str] = {
    ("dtype", "half"): "float16",
    ("dtype", "fp16"): "float16",
    ("dtype", "bf16"): "bfloat16",
    ("dtype", "float"): "float32",
    ("dtype", "fp32"): "float32",
    ("kv_cache_dtype", "bfloat16"): "bf16",
    ("attention_backend", "torch"): "torch_native",
    ("tool_call_parser", "qwen"): "qwen25",
    ("tool_call_parser", "qwen3"): "qwen25",
    ("tool_call_parser", "glm"): "glm45",
}


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A published flag that has nothing to switch here; accepted with one warning."""

    reason: str
    takes_value: bool = False


NO_EFFECT: Mapping[str, NoEffect] = {
    "dist-init-addr": NoEffect("the ranks of one machine meet without an address", takes_value=True),
    "nccl-init-addr": NoEffect("the ranks of one machine meet without an address", takes_value=True),
    "sampling-backend": NoEffect("sampling has one implementation for each device", takes_value=True),
    "disable-custom-all-reduce": NoEffect("there is no custom all-reduce to disable"),
    "disable-disk-cache": NoEffect("grammars are not cached on disk"),
    "disable-fast-image-processor": NoEffect("there are no image inputs"),
    "disable-flashinfer-cutlass-moe-fp4-allgather": NoEffect("the kernel does not exist here"),
    "disable-outlines-disk-cache": NoEffect("grammars are not cached on disk"),
    "disable-regex-jump-forward": NoEffect("there is no jump-forward decoding"),
    "enable-nccl-nvls": NoEffect("SM120 cards have no NVLink"),
    "enable-overlap-schedule": NoEffect("overlap scheduling is on by default"),
    "enable-p2p-check": NoEffect("peer access is left to NCCL"),
    "nccl-port": NoEffect("ports for process groups are picked at start-up", takes_value=True),
    "prefill-round-robin-balance": NoEffect("there is one data-parallel rank"),
    "show-time-cost": NoEffect("timings are on the metrics page"),
    "tokenizer-mode": NoEffect("fast tokenizers are always used", takes_value=True),
    "tokenizer-worker-num": NoEffect("one tokenizer process serves all requests", takes_value=True),
}

_LATER = "remove the flag"
_ONE_ORDER = "requests are served in the order of --schedule-policy; remove the flag"
_NO_SPECULATION = "speculative decoding does not exist yet; remove the --speculative-* flags"
_NO_LORA = "LoRA adapters are not supported yet; merge the adapter into the checkpoint"
_NO_DISAGGREGATION = "prefill and decode run in one server; remove the --disaggregation-* flags"
_NO_HICACHE = "the prefix cache lives in GPU memory only; remove the flag"
_NO_EXPERT_PARALLEL = "experts are sharded with --tp-size; remove the flag"
_NO_DP = "start one server for each replica behind a load balancer; remove the flag"
_NO_MULTIMODAL = "only text models are served; remove the flag"
_NO_TLS = "terminate TLS in a reverse proxy"
_NO_SPARSE_ATTENTION = "models with sparse attention are not supported yet; remove the flag"
_NO_OFFLOAD = "weights stay in GPU memory; use more GPUs with --tp-size"
_NO_TRITON_TUNING = "tiles and splits come from the kernel tables; see `python -m sglang.explain`"
_NO_MAMBA = "hybrid models are not supported yet; remove the flag"
_NO_QUANTIZATION = "quantized checkpoints are not supported yet; remove the flag"
_NO_COMPILE = "the model already runs from CUDA graphs with fused kernels; remove the flag"

UNIMPLEMENTED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "speculative-algorithm",
            "speculative-draft-model-path",
            "speculative-draft-model-revision",
            "speculative-draft-model",
            "speculative-draft-load-format",
            "speculative-draft-attention-backend",
            "speculative-draft-model-quantization",
            "speculative-num-steps",
            "speculative-eagle-topk",
            "speculative-num-draft-tokens",
            "speculative-accept-threshold-single",
            "speculative-accept-threshold-acc",
            "speculative-attention-mode",
            "speculative-token-map",
            "speculative-moe-runner-backend",
            "speculative-ngram-max-bfs-breadth",
            "speculative-ngram-min-bfs-breadth",
            "speculative-ngram-max-match-window-size",
            "speculative-ngram-min-match-window-size",
            "speculative-ngram-branch-length",
            "speculative-ngram-capacity",
            "speculative-ngram-match-type",
        ),
        _NO_SPECULATION,
    ),
    **dict.fromkeys(
        (
            "enable-lora",
            "lora-paths",
            "lora-backend",
            "lora-eviction-policy",
            "lora-target-modules",
            "max-lora-rank",
            "max-loaded-loras",
            "max-loras-per-batch",
        ),
        _NO_LORA,
    ),
    **dict.fromkeys(
        (
            "disaggregation-mode",
            "disaggregation-transfer-backend",
            "disaggregation-bootstrap-port",
            "disaggregation-ib-device",
            "disaggregation-decode-tp",
            "disaggregation-decode-dp",
            "disaggregation-prefill-pp",
            "disaggregation-decode-enable-offload-kvcache",
            "num-reserved-decode-tokens",
        ),
        _NO_DISAGGREGATION,
    ),
    **dict.fromkeys(
        (
            "enable-hierarchical-cache",
            "enable-lmcache",
            "hicache-ratio",
            "hicache-size",
            "hicache-io-backend",
            "hicache-mem-layout",
            "hicache-storage-backend",
            "hicache-storage-backend-extra-config",
            "hicache-storage-prefetch-policy",
            "hicache-write-policy",
            "radix-eviction-policy",
        ),
        _NO_HICACHE,
    ),
    **dict.fromkeys(
        (
            "deepep-config",
            "deepep-mode",
            "elastic-ep-backend",
            "enable-deepep-moe",
            "enable-elastic-expert-backup",
            "enable-ep-moe",
            "enable-eplb",
            "enable-expert-distribution-metrics",
            "ep-dispatch-algorithm",
            "ep-num-redundant-experts",
            "eplb-algorithm",
            "eplb-rebalance-num-iterations",
            "expert-distribution-recorder-mode",
            "init-expert-location",
            "moe-a2a-backend",
            "moe-dense-tp-size",
        ),
        _NO_EXPERT_PARALLEL,
    ),
    **dict.fromkeys(
        ("enable-dp-attention", "enable-dp-lm-head", "load-balance-method", "load-watch-interval", "dist-timeout"),
        _NO_DP,
    ),
    **dict.fromkeys(
        (
            "enable-multimodal",
            "limit-mm-data-per-request",
            "mm-attention-backend",
            "mm-enable-dp-encoder",
            "mm-process-config",
            "keep-mm-feature-on-device",
        ),
        _NO_MULTIMODAL,
    ),
    **dict.fromkeys(
        ("ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-keyfile-password", "enable-ssl-refresh"), _NO_TLS
    ),
    **dict.fromkeys(
        (
            "nsa-prefill-backend",
            "nsa-decode-backend",
            "dsa-prefill-backend",
            "dsa-decode-backend",
            "enable-nsa-prefill-context-parallel",
            "attn-cp-size",
            "enable-double-sparsity",
        ),
        _NO_SPARSE_ATTENTION,
    ),
    **dict.fromkeys(
        ("cpu-offload-gb", "offload-group-size", "offload-mode", "enable-weights-cpu-backup", "enable-memory-saver"),
        _NO_OFFLOAD,
    ),
    **dict.fromkeys(
        (
            "triton-attention-num-kv-splits",
            "triton-attention-split-tile-size",
            "triton-attention-reduce-in-fp32",
            "num-continuous-decode-steps",
        ),
        _NO_TRITON_TUNING,
    ),
    **dict.fromkeys(
        (
            "mamba-ssm-dtype",
            "mamba-full-memory-ratio",
            "max-mamba-cache-size",
            "mamba-scheduler-strategy",
            "mamba-track-interval",
            "linear-attn-backend",
        ),
        _NO_MAMBA,
    ),
    **dict.fromkeys(
        (
            "enable-torch-compile",
            "torch-compile-max-bs",
            "enable-piecewise-cuda-graph",
            "piecewise-cuda-graph-max-tokens",
            "piecewise-cuda-graph-tokens",
            "torchao-config",
            "cuda-graph-max-bs-prefill",
            "cuda-graph-bs-prefill",
        ),
        _NO_COMPILE,
    ),
    **dict.fromkeys(
        ("fp8-gemm-backend", "fp8-gemm-runner-backend", "fp4-gemm-backend", "fp4-gemm-runner-backend"), _NO_QUANTIZATION
    ),
    "admin-api-key": "use --api-key",
    "base-gpu-id": "choose the GPUs with CUDA_VISIBLE_DEVICES",
    "bucket-inter-token-latency": "histogram buckets are fixed; remove the flag",
    "bucket-e2e-request-latency": "histogram buckets are fixed; remove the flag",
    "bucket-time-to-first-token": "histogram buckets are fixed; remove the flag",
    "collect-tokens-histogram": "remove the flag; --enable-metrics has totals",
    "completion-template": "send the finished prompt to /v1/completions",
    "constrained-json-whitespace-pattern": "xgrammar chooses the whitespace; remove the flag",
    "constrained-json-disable-any-whitespace": "xgrammar chooses the whitespace; remove the flag",
    "crash-dump-folder": _LATER,
    "custom-weight-loader": _LATER,
    "debug-tensor-dump-output-folder": _LATER,
    "delete-ckpt-after-loading": _LATER,
    "disable-cuda-graph-padding": "a batch is padded to the next graph size; list the sizes with --cuda-graph-bs",
    "disable-chunked-prefix-cache": _LATER,
    "disable-hybrid-swa-memory": _LATER,
    "enable-custom-logit-processor": "use logit_bias or structured output",
    "enable-deterministic-inference": "seeded sampling is reproducible already; remove the flag",
    "enable-flashinfer-allreduce-fusion": "all-reduce is not fused yet; remove the flag",
    "enable-mscclpp": "all-reduce goes through NCCL; remove the flag",
    "enable-nan-detection": _LATER,
    "enable-return-hidden-states": "hidden states are not returned; remove the flag",
    "enable-symm-mem": "all-reduce goes through NCCL; remove the flag",
    "enable-tokenizer-batch-encode": _LATER,
    "enable-torch-symm-mem": "all-reduce goes through NCCL; remove the flag",
    "enable-trace": _LATER,
    "enable-two-batch-overlap": _LATER,
    "enable-single-batch-overlap": _LATER,
    "fastapi-root-path": "rewrite the path in a reverse proxy",
    "gpu-id-step": "choose the GPUs with CUDA_VISIBLE_DEVICES",
    "grpc-mode": "the server speaks HTTP; remove the flag",
    "hooks": _LATER,
    "hybrid-kvcache-ratio": _LATER,
    "is-embedding": "only text generation is served",
    "kt-weight-path": "experts stay on the GPU; remove the flag",
    "kt-method": "experts stay on the GPU; remove the flag",
    "model-impl": "every model has one implementation; remove the flag",
    "model-loader-extra-config": "remove the flag; --load-format auto reads safetensors",
    "modelopt-quant": "quantize the checkpoint beforehand",
    "ollama-model-name": "use --served-model-name",
    "pp-max-micro-batch-size": "pipeline parallelism does not exist yet; use --tp-size",
    "pp-async-batch-depth": "pipeline parallelism does not exist yet; use --tp-size",
    "quantization-param-path": "scales are read from the checkpoint; remove the flag",
    "enable-priority-scheduling": _ONE_ORDER,
    "priority-scheduling-preemption-threshold": _ONE_ORDER,
    "schedule-low-priority-values-first": _ONE_ORDER,
    "rl-on-policy-target": _LATER,
    "sleep-on-idle": "an idle server sleeps already; remove the flag",
    "swa-full-tokens-ratio": "all layers keep the full context; remove the flag",
    "tool-server": "call tools from the client",
    "warmups": "one warm-up request is always sent unless --skip-server-warmup is given",
    "weight-loader-disable-mmap": _LATER,
    "weight-version": _LATER,
}
"""Flags of upstream releases that we do not implement, each with what to do instead."""
