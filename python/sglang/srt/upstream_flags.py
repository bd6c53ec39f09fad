"""Every flag that a release of SGLang knows and that is no option here: accepted with one warning, or refused.

Accepted is what only tunes: the answers are the same without it, and what it tunes is decided here without it or does
not exist. Refused is what would change answers, replies or who may connect, and what asks for a feature that does not
exist. When a feature arrives, its names leave this file and become fields of `ServerArgs`.

Names are without their dashes. `name` takes no value, `name=` takes one, `name=...` any number. For a refused flag
`name=a|b` lists values that ask for nothing and pass.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FlagGroup:
    """Names with one reason, which completes `... has no effect: REASON.` or `... is not implemented: REASON`."""

    title: str
    reason: str
    names: str


ACCEPTED: tuple[FlagGroup, ...] = (
    FlagGroup(
        "Choice of kernels",
        "kernels are chosen by the plan; see `python -m sglang.explain`",
        """
        bf16-gemm-backend= fp4-gemm-backend= fp4-gemm-runner-backend=
        dsa-decode-backend= dsa-paged-mqa-logits-backend= dsa-prefill-backend= dsa-topk-backend= dsa-triton-union=
        dsv4-attn-backend= dsv4-prefill-backend= enable-dsa-fused-indexer no-enable-dsa-fused-indexer
        nsa-decode-backend= nsa-prefill-backend=
        linear-attn-backend= linear-attn-decode-backend= linear-attn-prefill-backend= linear-attn-verify-backend=
        mamba-backend= enable-linear-replayssm linear-replayssm-cache-len=
        enable-fused-qk-norm-rope no-enable-fused-qk-norm-rope enable-fused-moe-sum-all-reduce
        enable-amd-monokernel enable-lean-attention enable-nvidia-megakernel monokernel-backend=
        disable-flashinfer-autotune flashinfer-autotune-skip-ops=... flashinfer-mla-disable-ragged
        triton-attention-num-kv-splits= triton-attention-split-tile-size=
        """,
    ),
    FlagGroup("Sampling", "sampling has one implementation for each device", "mlx-enable-sampling"),
    FlagGroup("Precision", "attention accumulates in fp32", "triton-attention-reduce-in-fp32"),
    FlagGroup(
        "Shared experts",
        "they are fused unless --disable-shared-experts-fusion is given",
        "enforce-shared-experts-fusion",
    ),
    FlagGroup(
        "Graphs and compilation",
        "the plan decides which steps run from CUDA graphs, and the model is not compiled as a whole",
        """
        cuda-graph-bs-prefill=... cuda-graph-max-bs-prefill= cuda-graph-max-seq-len-prefill=
        cuda-graph-prefill-max-context= context-bucket= cuda-graph-tc-compiler= disable-cuda-graph-padding
        cuda-graph-backend-prefill= disable-prefill-cuda-graph enable-cudagraph-gc
        disable-piecewise-cuda-graph enable-breakable-cuda-graph enable-piecewise-cuda-graph
        enforce-piecewise-cuda-graph piecewise-cuda-graph-compiler= piecewise-cuda-graph-max-tokens=
        piecewise-cuda-graph-tokens=...
        enable-torch-compile enable-torch-compile-debug-mode torch-compile-max-bs=
        """,
    ),
    FlagGroup(
        "Collectives",
        "the plan chooses how ranks exchange data; see `python -m sglang.explain`",
        """
        enforce-disable-flashinfer-allreduce-fusion
        flashinfer-allreduce-fusion-backend= enable-aiter-allreduce-fusion disable-aiter-allreduce-fusion-in-decode
        disable-aiter-allreduce-fusion-in-prefill disable-flashinfer-cutlass-moe-fp4-allgather boundary-reduction=
        enable-mscclpp enable-nccl-nvls enable-p2p-check enable-scattered-sconv enable-symm-mem enable-torch-symm-mem
        pre-warm-nccl enable-pcie-oneshot-allreduce enable-pcie-oneshot-allreduce-fusion
        pcie-oneshot-allreduce-max-size=
        """,
    ),
    FlagGroup(
        "How layers are split",
        "what each rank computes follows from --tp-size",
        """
        disable-attn-tp-gather enable-attn-tp-input-scattered enable-dense-mlp-attn-tp enable-layernorm-sp
        enable-megamoe-for-layernorm-sp enable-shared-experts-attn-tp shared-experts-tp-size=
        enable-tp-lm-head-all-to-all no-enable-tp-lm-head-all-to-all moe-dense-tp-size=
        """,
    ),
    FlagGroup(
        "Order of steps",
        "the scheduler decides when to prefill and what overlaps, and running requests decode in the steps that compute"
        " prompts; --max-prefill-tokens and --chunked-prefill-size bound a step",
        """
        enable-mixed-chunk enable-overlap-schedule num-continuous-decode-steps= scheduler-recv-interval=
        enable-dynamic-chunking prefill-decode-interval= prefill-decode-interval-min-bs= prefill-max-requests=
        min-free-slots-delay= enable-prefill-delayer prefill-delayer-max-delay-ms= prefill-delayer-max-delay-passes=
        prefill-delayer-queue-min-ratio= prefill-delayer-token-usage-low-watermark=
        prefill-delayer-forward-passes-buckets=... prefill-delayer-wait-seconds-buckets=...
        enable-single-batch-overlap enable-two-batch-overlap tbo-token-distribution-threshold= enable-pdmux
        pdmux-config-path= sm-group-num= disable-regex-jump-forward
        """,
    ),
    FlagGroup("Idle server", "an idle server sleeps already", "sleep-on-idle"),
    FlagGroup("Stored responses", "responses are stored unless a request says otherwise", "enable-response-store"),
    FlagGroup(
        "Layout of the caches",
        "the plan divides the memory, and the least recently used prefixes go first",
        """
        radix-eviction-policy= radix-eviction-policy-config= strip-thinking-cache disable-chunked-prefix-cache
        disable-hybrid-swa-memory swa-full-tokens-ratio= swa-prefix-tails= hybrid-kvcache-ratio=...
        enable-encoder-swa-bounded-replay enable-decoder-swa-bounded-replay no-enable-decoder-swa-bounded-replay
        enable-page-major-kv-layout enable-unified-memory c128-page-size=
        """,
    ),
    FlagGroup(
        "States of hybrid models",
        "states at the ends of chunks, prompts and requests are copied while steps overlap, and the least recently used"
        " copies go first",
        """
        mamba-scheduler-strategy= mamba-radix-cache-strategy= mamba-track-interval= mamba-max-states-per-path=
        """,
    ),
    FlagGroup(
        "How weights are read",
        "safetensors are read in one way, each tensor once",
        """
        model-impl= model-loader-extra-config= startup-weight-load-mode= weight-loader-disable-mmap
        weight-loader-drop-cache-after-load weight-loader-prefetch-checkpoints weight-loader-prefetch-num-threads=
        """,
    ),
    FlagGroup(
        "Processes",
        "the server decides which processes and threads it runs, and where",
        """
        numa-node=... use-ray gc-threshold=... tokenizer-worker-num= detokenizer-worker-num=
        enable-http-worker-reuseport batch-notify-size= enable-tokenizer-batch-encode disable-tokenizer-batch-decode
        enable-dynamic-batch-tokenizer dynamic-batch-tokenizer-batch-size= dynamic-batch-tokenizer-batch-timeout=
        """,
    ),
    FlagGroup("Tokenizer", "its files decide how it is read", "tokenizer-mode= tokenizer-backend="),
    FlagGroup(
        "Meeting of the ranks",
        "the ranks of one machine meet by themselves, and a stuck one ends with --watchdog-timeout",
        "dist-init-addr= nccl-init-addr= nccl-port= dist-timeout=",
    ),
    FlagGroup(
        "Replicas and stages",
        "there is one replica, and as many batches are under way as a pipeline has stages, of as many requests each",
        """
        load-balance-method= load-watch-interval= prefill-round-robin-balance
        pp-async-batch-depth= pp-max-micro-batch-size=
        """,
    ),
    FlagGroup(
        "Grammars", "compiled grammars are kept in memory only", "disable-disk-cache disable-outlines-disk-cache"
    ),
    FlagGroup(
        "Images, video and sound",
        "only the language model is served",
        """
        language-only language-model-only mm-attention-backend= disable-fast-image-processor image-processor-backend=
        allowed-media-domains=... media-url-max-file-size-mb= limit-mm-data-per-request= mm-process-config=
        mm-feature-transport= keep-mm-feature-on-device mm-io-worker-num= mm-processor-worker-num=
        mm-max-concurrent-calls= mm-per-request-timeout= mm-preprocess-cache-size-mb= enable-prefix-mm-cache
        enable-mm-global-cache mm-global-cache-backend= enable-broadcast-mm-inputs-process
        enable-precise-embedding-interpolation mm-enable-dp-encoder trust-mm-content-hashes
        asr-max-buffer-seconds= asr-max-concurrent-sessions=
        """,
    ),
    FlagGroup("Start and files", "one warm-up request is sent, and no files are stored", "warmups= file-storage-path="),
    FlagGroup(
        "Logs and metrics",
        "timings and totals are on the metrics page, from one rank for all",
        """
        show-time-cost enable-request-time-stats-logging collect-tokens-histogram enable-metrics-for-all-schedulers
        gc-warning-threshold-secs= soft-watchdog-timeout= uvicorn-access-log-exclude-prefixes=...
        """,
    ),
    FlagGroup(
        "Off already",
        "it switches off what is not there",
        """
        no-dcp-replicate-q-proj no-dllm-fdfo no-enable-tf32-matmul no-experts-shared-outer-loras
        no-lora-strict-loading no-mm-enable-dp-encoder no-ple-offload-embedding no-record-nolora-graph
        no-speculative-enable-w4a4-mxfp4-megamoe
        """,
    ),
)

REFUSED: tuple[FlagGroup, ...] = (
    FlagGroup(
        "Speculative decoding",
        "there is no speculative decoding yet; remove the --speculative-* flags",
        """
        decoupled-spec-bind-endpoint decoupled-spec-connect-endpoints decoupled-spec-rank decoupled-spec-role=null
        enable-draft-weights-cpu-backup enable-gdn-replayssm-spec enable-linear-replayssm-spec
        enable-multi-layer-eagle spec-trace-dir uno-lora-path
        speculative-accept-threshold-acc=1|1.0 speculative-accept-threshold-single=1|1.0 speculative-adaptive
        speculative-adaptive-config speculative-algorithm speculative-attention-mode
        speculative-dflash-block-size speculative-dflash-draft-window-size speculative-domino-candidate-pool-size
        speculative-draft-attention-backend speculative-draft-kv-cache-dtype speculative-draft-load-format
        speculative-draft-model speculative-draft-model-path speculative-draft-model-quantization
        speculative-draft-model-revision speculative-draft-sink-size speculative-draft-window-size
        speculative-dsa-topk-backend speculative-dspark-align-verify-tokens-to-graph-tier
        speculative-dspark-block-size speculative-dspark-confidence-sts-path speculative-dspark-sps-table-path
        speculative-eagle-topk speculative-enable-w4a4-mxfp4-megamoe speculative-moe-a2a-backend
        speculative-moe-runner-backend speculative-ngram-branch-length speculative-ngram-capacity
        speculative-ngram-external-corpus-max-tokens speculative-ngram-external-corpus-path
        speculative-ngram-external-sam-budget speculative-ngram-match-type speculative-ngram-max-bfs-breadth
        speculative-ngram-max-match-window-size speculative-ngram-max-trie-depth speculative-ngram-min-bfs-breadth
        speculative-ngram-min-match-window-size speculative-num-draft-tokens speculative-num-steps
        speculative-skip-dp-mlp-sync speculative-token-map speculative-use-block-verification
        speculative-use-rejection-sampling
        """,
    ),
    FlagGroup(
        "LoRA",
        "LoRA adapters are not supported yet; merge the adapter into the checkpoint",
        """
        enable-lora enable-lora-overlap-loading experts-shared-outer-loras lora-backend lora-drain-wait-threshold
        lora-eviction-policy lora-paths lora-strict-loading lora-target-modules lora-use-virtual-experts
        max-loaded-loras max-lora-chunk-size max-lora-rank max-loras-per-batch record-nolora-graph
        """,
    ),
    FlagGroup(
        "Prefill and decode apart",
        "prefill and decode run in one server; remove the flag",
        """
        disaggregation-bootstrap-port disaggregation-decode-allocation-policy disaggregation-decode-dp
        disaggregation-decode-enable-fake-auto disaggregation-decode-enable-offload-kvcache
        disaggregation-decode-enable-radix-cache disaggregation-decode-extra-slots
        disaggregation-decode-host-receive-threshold disaggregation-decode-polling-interval
        disaggregation-decode-retraction-backup disaggregation-decode-tp disaggregation-enable-kv-checksum
        disaggregation-ib-device disaggregation-mode=null disaggregation-prefill-pp disaggregation-transfer-backend
        enable-pd-role-switch mooncake-ib-device num-reserved-decode-tokens optimistic-prefill-attempts=0
        optimistic-prefill-retries=0
        """,
    ),
    FlagGroup(
        "Cache in main memory or elsewhere",
        "the prefix cache lives in GPU memory only; remove the flag",
        """
        disable-hicache-numa-detect enable-flexkv enable-hicache enable-hierarchical-cache enable-linker-mla-dedup
        enable-lmcache enable-unified-cache-external-linker flexkv-config-file hicache-host-memory-fraction
        hicache-host-memory-mode hicache-io-backend hicache-mem-layout hicache-ratio hicache-size
        hicache-storage-backend hicache-storage-backend-extra-config hicache-storage-prefetch-policy
        hicache-storage-prefetch-retry-max-attempts hicache-storage-prefetch-retry-poll-interval
        hicache-write-policy lmcache-config-file radix-cache-backend unified-cache-external-linker-backend
        unified-cache-external-linker-config kv-events-config
        """,
    ),
    FlagGroup(
        "Expert parallelism",
        "whole experts a GPU are asked for with --ep-size; remove the flag",
        """
        deepep-config deepep-dispatcher-output-dtype deepep-mode deepep-v2-mode dwdp-size=1 elastic-ep-backend=none
        elastic-ep-initial-size elastic-ep-join-mode elastic-ep-join-rank-offset elastic-ep-rejoin
        elastic-ep-scale-timeout enable-deepep-moe enable-deepep-waterfill enable-elastic-expert-backup enable-ep-moe
        enable-eplb enable-expert-distribution-metrics enable-w4a4-mxfp4-megamoe enable-waterfill
        ep-dispatch-algorithm ep-num-redundant-experts=0 eplb-algorithm eplb-min-rebalancing-utilization-threshold
        eplb-rebalance-layers-per-chunk eplb-rebalance-num-iterations expert-balancedness-report-mode=off
        expert-distribution-recorder-buffer-size expert-distribution-recorder-mode flashinfer-a2a-dispatch-type
        fuseep-mode init-expert-location=trivial max-ep-size moe-a2a-backend=none moe-data-parallel-size=1
        moe-dp-size=1
        """,
    ),
    FlagGroup(
        "Attention of several replicas",
        "start one server for each replica behind a load balancer; remove the flag",
        """
        attention-data-parallel-size=1 attn-dp-size=1 enable-dp-attention enable-dp-attention-local-control-broadcast
        enable-dp-lm-head
        """,
    ),
    FlagGroup(
        "Context parallelism",
        "the tokens of a request are not shared out over GPUs; remove the flag, and for a longer context use"
        " --kv-cache-dtype fp8_e4m3 or a larger --tp-size",
        """
        attention-context-parallel-size=1 attn-cp-size=1 cp-strategy dcp-comm-backend dcp-replicate-q-proj dcp-size=1
        decode-context-parallel-size=1 dsa-prefill-cp-mode enable-cp-decode-attn-tp enable-dsa-cache-layer-split
        enable-dsa-prefill-context-parallel enable-kv-cache-sharding enable-nsa-prefill-context-parallel
        enable-prefill-context-parallel enable-prefill-cp nsa-prefill-cp-mode prefill-cp-mode
        """,
    ),
    FlagGroup(
        "Sparse attention",
        "models with sparse attention are not supported yet; remove the flag",
        """
        ds-channel-config-path ds-heavy-channel-num ds-heavy-channel-type ds-heavy-token-num
        ds-sparse-decode-threshold enable-deepseek-v4-fp4-indexer enable-double-sparsity enable-hisparse
        hierarchical-sparse-attention-extra-config hisparse-config qsa-indexer-dtype=auto
        """,
    ),
    FlagGroup(
        "Hybrid models",
        "recurrent states are kept as they are computed, in the type of --mamba-ssm-dtype; remove the flag",
        """
        enable-int8-mamba-checkpoint enable-mamba-cache-stochastic-rounding int8-mamba-ckpt-size
        mamba-cache-philox-rounds=0
        """,
    ),
    FlagGroup(
        "Multimodal models",
        "only the language model is served; remove the flag",
        """
        enable-adaptive-dispatch-to-encoder enable-multimodal encoder-bootstrap-port encoder-only
        encoder-register-urls encoder-transfer-backend encoder-urls
        """,
    ),
    FlagGroup(
        "Kinds of models",
        "only text generation from left to right is served",
        """
        dllm-algorithm dllm-algorithm-config dllm-fdfo enable-mis multi-item-scoring-delimiter
        prefill-only-disable-kv-cache
        """,
    ),
    FlagGroup(
        "Weights outside of the GPU",
        "weights stay in GPU memory; remove the flag, and `sglang plan` shows which layouts of GPUs have room",
        """
        enable-paged-experts kt-amx-method
        kt-amx-weight-path kt-cpuinfer kt-max-deferred-experts-per-token kt-method kt-num-gpu-experts
        kt-threadpool-count kt-weight-path offload-group-size=-1 offload-mode offload-num-in-group
        offload-prefetch-step paged-experts-num-resident ple-offload-backend ple-offload-dir ple-offload-embedding
        """,
    ),
    FlagGroup(
        "Memory handed back",
        "the server keeps its memory until it ends; remove the flag",
        "enable-memory-saver enable-weights-cpu-backup",
    ),
    FlagGroup(
        "Weights from elsewhere",
        "weights come as safetensors from a local directory or the Hugging Face hub; remove the flag",
        """
        checkpoint-engine-wait-weights-before-ready custom-weight-loader decrypted-config-file
        decrypted-draft-config-file delete-ckpt-after-loading engine-info-bootstrap-port model-checksum
        model-config-parser=auto modelexpress-config remote-instance-weight-loader-backend
        remote-instance-weight-loader-seed-instance-ip remote-instance-weight-loader-seed-instance-service-port
        remote-instance-weight-loader-send-weights-group-ports
        remote-instance-weight-loader-start-seed-via-transfer-engine weight-cache-mode=off weight-cache-socket
        weight-cache-timeout
        """,
    ),
    FlagGroup(
        "Other precision of weights",
        "a checkpoint is quantized beforehand, with python -m sglang.quantize, or with --quantization fp8",
        """
        modelopt-checkpoint-restore-path modelopt-checkpoint-save-path modelopt-export-path modelopt-quant
        quantize-and-serve rl-quant-profile torchao-config=
        """,
    ),
    FlagGroup(
        "Other arithmetic",
        "it would change answers, and the plan has no such choice; remove the flag",
        """
        enable-deterministic-inference enable-fp32-lm-head enable-quant-communications
        enable-tf32-matmul prefill-kv-cache-dequant-dtype=auto
        rl-on-policy-target
        """,
    ),
    FlagGroup(
        "Scales of the KV cache", "scales are read from the checkpoint; remove the flag", "quantization-param-path"
    ),
    FlagGroup("Logits", "use logit_bias or structured output", "enable-custom-logit-processor"),
    FlagGroup(
        "Whitespace of JSON",
        "the grammar chooses the whitespace; remove the flag",
        """
        constrained-json-disable-any-whitespace constrained-json-max-whitespace-cnt
        constrained-json-whitespace-pattern
        """,
    ),
    FlagGroup(
        "Watermarks and thinking",
        "tokens are sampled as the request says, and neither marked nor held to a form of thinking; remove the flag",
        "enable-strict-thinking enable-watermark watermark-config",
    ),
    FlagGroup(
        "More in the replies",
        "replies have the published fields only; remove the flag",
        """
        enable-return-aux-hidden-states enable-return-hidden-states enable-return-indexer-topk
        enable-return-routed-experts return-aux-hidden-state-layer-ids return-hidden-states-mode return-input-ids
        return-output-ids sampling-mask-max-tokens stream-response-default-include-usage weight-version=default
        """,
    ),
    FlagGroup(
        "Prompts",
        "give a template with --chat-template, and its values with --default-chat-template-kwargs",
        "hf-chat-template-name trust-request-chat-template",
    ),
    FlagGroup("Completion template", "send the finished prompt to /v1/completions", "completion-template"),
    FlagGroup(
        "State kept for clients",
        "send the whole conversation with each request; remove the flag",
        "enable-session-radix-cache",
    ),
    FlagGroup("Tools of the server", "call tools from the client", "tool-server"),
    FlagGroup("Administrators", "use --api-key", "admin-api-key"),
    FlagGroup(
        "TLS",
        "terminate TLS in a reverse proxy",
        "enable-ssl-refresh ssl-ca-certs ssl-certfile ssl-keyfile ssl-keyfile-password",
    ),
    FlagGroup(
        "Protocols",
        "the server speaks HTTP/1.1; put a proxy before it",
        """
        enable-http2 gated-launch-port grpc-http-sidecar-port grpc-mode grpc-port grpc-response-timeout-secs
        http2-initial-connection-window-size http2-max-concurrent-streams load-publish-endpoint
        load-snapshot-publish-interval sidecar sidecar-args smg-grpc-mode smg-http-sidecar-port
        """,
    ),
    FlagGroup("Path", "rewrite the path in a reverse proxy", "fastapi-root-path="),
    FlagGroup("Name", "use --served-model-name", "ollama-model-name"),
    FlagGroup("GPUs", "choose the GPUs with CUDA_VISIBLE_DEVICES", "base-gpu-id=0 gpu-id-step=1"),
    FlagGroup(
        "Graphs",
        "use --cuda-graph-bs, --cuda-graph-max-bs or --disable-cuda-graph",
        "cuda-graph-backend-decode=full|breakable cuda-graph-config debug-cuda-graph",
    ),
    FlagGroup(
        "Histograms and labels",
        "buckets and labels are those of the published dashboard; remove the flag",
        """
        bucket-e2e-request-latency bucket-inter-token-latency bucket-time-to-first-token extra-metric-labels
        generation-tokens-buckets prompt-tokens-buckets tokenizer-metrics-allowed-custom-labels
        tokenizer-metrics-custom-labels-header
        """,
    ),
    FlagGroup(
        "Telemetry",
        "there are --enable-metrics, --enable-trace, --log-requests and /start_profile; remove the flag",
        """
        crash-dump-folder custom-sigquit-handler debug-tensor-dump-inject debug-tensor-dump-input-file
        debug-tensor-dump-layers debug-tensor-dump-output-folder enable-forward-pass-metrics
        enable-layerwise-nvtx-marker enable-mfu-metrics enable-nan-detection enable-profile-cuda-graph
        export-metrics-to-file export-metrics-to-file-dir forward-hooks forward-pass-metrics-ipc-name
        forward-pass-metrics-worker-id hooks
        kv-canary=none kv-canary-real-data=none kv-canary-sweep-interval=0 log-requests-format=text
        log-requests-target=stdout msprobe-dump-config trace-modules
        """,
    ),
)
