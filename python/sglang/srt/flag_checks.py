"""Finds values of flags that contradict each other, and says what to do.

`server_args` calls it once every value is typed and in its range. `args` is a `ServerArgs`, whose module imports this
one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang.srt.cli_args import flag
from sglang.srt.composition import refused_pairs
from sglang.srt.configs.adapters.arguments import named_adapters
from sglang.srt.configs.speculative import DFLASH, DRAFT_MODEL_NEEDED, DSPARK, NGRAM
from sglang.srt.configs.storage_backend import BACKENDS, read_storage_config
from sglang.srt.errors import UserError

OUR_SAMPLING = (None, "pytorch")
ONE_SAMPLER = "sampling has one implementation for each device"
_API_KEY = re.compile(r"[^\s\x00-\x1f\x7f]([^\x00-\x1f\x7f]*[^\s\x00-\x1f\x7f])?")
_HOST_AND_PORT = re.compile(r"(tcp://)?(\[[0-9a-fA-F:]+\]|[^\s:/]+):[0-9]{1,5}")
_ORIGIN = re.compile(r"\*|null|[a-zA-Z][a-zA-Z0-9+.-]*://[^/\s?#@]+|file://")


def _check_host_cache(args: Any) -> Iterator[tuple[set[str], str]]:
    if args.enable_hierarchical_cache and args.disable_hierarchical_cache:
        text = "--enable-hierarchical-cache and --disable-hierarchical-cache: remove one of them."
        yield {"enable_hierarchical_cache", "disable_hierarchical_cache"}, text
    if args.enable_hierarchical_cache and args.disable_radix_cache:
        text = "--enable-hierarchical-cache keeps cached prefixes, of which --disable-radix-cache leaves none."
        yield {"enable_hierarchical_cache", "disable_radix_cache"}, text
    yield from _check_storage(args)
    if args.hicache_ratio is not None and args.hicache_ratio <= 0:
        yield {"hicache_ratio"}, f"--hicache-ratio must be above 0; got {args.hicache_ratio:g}."
    if args.hicache_host_memory_fraction <= 0:
        yield {"hicache_host_memory_fraction"}, "--hicache-host-memory-fraction must be above 0."


def _check_storage(args: Any) -> Iterator[tuple[set[str], str]]:
    backend, extra = args.hicache_storage_backend, args.hicache_storage_backend_extra_config
    if backend is None:
        if extra is not None:
            text = "--hicache-storage-backend-extra-config: add --hicache-storage-backend, or remove it."
            yield {"hicache_storage_backend", "hicache_storage_backend_extra_config"}, text
        return
    if backend not in BACKENDS:
        text = (
            f"--hicache-storage-backend {backend} is not supported: use file, nixl, mooncake or lmcache, or dynamic"
            " with a class that reaches the store."
        )
        yield {"hicache_storage_backend"}, text
        return
    if not args.enable_hierarchical_cache:
        text = "--hicache-storage-backend needs --enable-hierarchical-cache: what is read passes through main memory."
        yield {"hicache_storage_backend", "enable_hierarchical_cache"}, text
    try:
        read_storage_config(backend, args.hicache_storage_prefetch_policy, extra)
    except UserError as error:
        yield {"hicache_storage_backend_extra_config"}, str(error)


def contradictions(args: Any) -> Iterator[tuple[set[str], str]]:
    """Yields (fields, message) for each contradiction."""
    fraction, chunk, page = args.mem_fraction_static, args.chunked_prefill_size, args.page_size
    if fraction is not None and not 0 < fraction < 1:
        yield {"mem_fraction_static"}, f"--mem-fraction-static must be above 0 and below 1; got {fraction}."
    ratio = args.mamba_full_memory_ratio
    if ratio is not None and ratio <= 0:
        yield {"mamba_full_memory_ratio"}, f"--mamba-full-memory-ratio must be above 0; got {ratio:g}."
    if chunk == 0:
        text = "--chunked-prefill-size must be positive, or -1 to compute whole prompts; got 0."
        yield {"chunked_prefill_size"}, text
    if page is not None and chunk is not None and chunk > 0 and chunk % page:
        text = f"--chunked-prefill-size {chunk} is not a multiple of --page-size {page}."
        yield {"chunked_prefill_size", "page_size"}, text
    if page is not None and args.max_total_tokens is not None and args.max_total_tokens < page:
        text = f"--max-total-tokens {args.max_total_tokens} is less than one page of {page} tokens."
        yield {"max_total_tokens", "page_size"}, text
    yield from _check_host_cache(args)
    if args.retraction_policy == "priority" and not args.enable_priority_scheduling:
        text = "--retraction-policy priority needs --enable-priority-scheduling."
        yield {"retraction_policy", "enable_priority_scheduling"}, text
    for field, name in (("api_key", "--api-key"), ("admin_api_key", "--admin-api-key")):
        key = getattr(args, field)
        if key is not None and not _API_KEY.fullmatch(key):
            text = f"{name} must be text of one line that begins and ends with no blank; leave the flag out for no key."
            yield {field}, text
    wrong = next((origin for origin in args.allowed_origins or () if not _ORIGIN.fullmatch(origin)), None)
    if wrong is not None:
        text = (
            f"--allowed-origins takes what browsers call an origin, SCHEME://HOST or SCHEME://HOST:PORT; got {wrong!r}."
        )
        yield {"allowed_origins"}, text
    if args.node_rank >= args.nnodes:
        yield {"node_rank", "nnodes"}, f"--node-rank must be below --nnodes {args.nnodes}; got {args.node_rank}."
    yield from _check_machines(args)
    yield from _check_sleep(args)
    yield from _check_attention_groups(args)
    yield from refused_pairs(args)
    if args.strict_backends and args.sampling_backend not in OUR_SAMPLING:
        text = (
            f"--sampling-backend {args.sampling_backend} is not part of sm120-sglang: {ONE_SAMPLER}. Remove the flag."
        )
        yield {"sampling_backend"}, text
    if args.disable_cuda_graph and args.cuda_graph_bs is not None:
        text = "--cuda-graph-bs and --disable-cuda-graph contradict each other; remove one."
        yield {"cuda_graph_bs", "disable_cuda_graph"}, text
    if args.ple_offload_embedding and args.no_ple_offload_embedding:
        text = "--ple-offload-embedding and --no-ple-offload-embedding contradict each other; remove one."
        yield {"ple_offload_embedding", "no_ple_offload_embedding"}, text
    if args.embed_in_main_memory and args.pp_size > 1:
        text = "--embed-in-main-memory: stages of a pipeline (--pp-size) keep embeddings in GPU memory; remove one."
        yield {"embed_in_main_memory", "pp_size"}, text
    yield from _check_media(args)
    yield from _check_adapters(args)
    yield from _check_speculation(args)


def _check_sleep(args: Any) -> Iterator[tuple[set[str], str]]:
    if not args.enable_memory_saver:
        for name in ("enable_weights_cpu_backup", "wake_on_request"):
            if getattr(args, name):
                yield {name, "enable_memory_saver"}, f"{flag(name)} needs --enable-memory-saver."
        return
    for name in ("use_ray", "nnodes", "attn_dp_size"):
        if getattr(args, name) > 1 or getattr(args, name) is True:
            yield {"enable_memory_saver", name}, f"--enable-memory-saver does not go with {flag(name)} here."


_ONLY_WITH_ADAPTERS = (
    "max_lora_rank",
    "lora_target_modules",
    "max_loaded_loras",
    "lora_drain_wait_threshold",
    "lora_strict_loading",
)


def _check_adapters(args: Any) -> Iterator[tuple[set[str], str]]:
    if not args.enable_lora:
        given = [name for name in _ONLY_WITH_ADAPTERS if getattr(args, name)]
        if given:
            yield {"enable_lora", *given}, f"{flag(given[0])} needs --enable-lora or --lora-paths."
        return
    groups = ["attn_dp_size"] if args.attn_dp_size > 1 else []
    for name in groups + [name for name in ("use_ray", "is_embedding") if getattr(args, name)]:
        yield {"enable_lora", name}, f"--enable-lora does not go with {flag(name)} here."
    if args.experts_shared_outer_loras and args.no_experts_shared_outer_loras:
        both = {"experts_shared_outer_loras", "no_experts_shared_outer_loras"}
        yield both, "--experts-shared-outer-loras and --no-experts-shared-outer-loras contradict each other."
    names = args.lora_target_modules
    if names is not None and "all" in names and len(names) > 1:
        yield {"lora_target_modules"}, "--lora-target-modules all stands alone: remove the others."
    least = max(args.max_loras_per_batch, len(args.lora_paths or ()))
    if args.max_loaded_loras is not None and args.max_loaded_loras < least:
        text = (
            f"--max-loaded-loras {args.max_loaded_loras} is below {least}, as many as --max-loras-per-batch or"
            " --lora-paths need."
        )
        yield {"max_loaded_loras", "max_loras_per_batch", "lora_paths"}, text
    try:
        pinned = sum(adapter.pinned for adapter in named_adapters(args.lora_paths or ()))
    except UserError as error:
        yield {"lora_paths"}, str(error)
        return
    if pinned >= args.max_loras_per_batch:
        text = f"--lora-paths pins {pinned} adapters; --max-loras-per-batch must be larger, so that others can run."
        yield {"lora_paths", "max_loras_per_batch"}, text
    directory = args.allowed_local_lora_path
    if directory is not None and not Path(directory).is_dir():
        yield {"allowed_local_lora_path"}, f"--allowed-local-lora-path {directory} is no directory."


def _check_machines(args: Any) -> Iterator[tuple[set[str], str]]:
    if args.use_ray:
        yield from _check_ray(args)
    if args.nnodes == 1:
        return
    ranks = args.tp_size * args.pp_size
    if ranks % args.nnodes:
        text = f"--nnodes {args.nnodes} does not divide the {ranks} ranks of --tp-size and --pp-size."
        yield {"nnodes", "tp_size", "pp_size"}, text
    if args.dist_init_addr is None and args.use_ray:
        pass  # a port of the node that Ray chooses
    elif args.dist_init_addr is None:
        yield {"dist_init_addr", "nnodes"}, f"--nnodes {args.nnodes} needs --dist-init-addr HOST:PORT of machine 0."
    elif not _HOST_AND_PORT.fullmatch(args.dist_init_addr):
        yield {"dist_init_addr"}, f"--dist-init-addr must be HOST:PORT; got {args.dist_init_addr!r}."


def _check_ray(args: Any) -> Iterator[tuple[set[str], str]]:
    if args.node_rank:
        yield {"use_ray", "node_rank"}, "--use-ray starts all machines by one command: remove --node-rank."
    if args.base_gpu_id:
        yield {"use_ray", "base_gpu_id"}, "--use-ray leaves the choice of GPUs to Ray: remove --base-gpu-id."
    if args.dist_init_addr is not None and args.nnodes == 1:
        text = "--dist-init-addr is where the machines of a server meet: with --use-ray it needs --nnodes above 1."
        yield {"use_ray", "dist_init_addr"}, text
    if args.dist_init_addr is not None and args.dp_size > 1:
        text = "--dist-init-addr is for one replica; with --use-ray and --dp-size leave it out, and ports are chosen."
        yield {"use_ray", "dist_init_addr", "dp_size"}, text


def _check_attention_groups(args: Any) -> Iterator[tuple[set[str], str]]:
    groups = args.attn_dp_size
    if args.enable_dp_lm_head and groups == 1:
        text = (
            "--enable-dp-lm-head gives every attention group the whole vocabulary: it needs --enable-dp-attention, with"
            " --tp-size above 1."
        )
        yield {"enable_dp_lm_head", "attn_dp_size"}, text
    if groups == 1:
        return
    if args.tp_size % groups:
        text = f"--attn-dp-size {groups} does not divide --tp-size {args.tp_size}, whose GPUs are the groups."
        yield {"attn_dp_size", "tp_size"}, text


MEDIA_KINDS = ("image", "video", "audio")


def _check_media(args: Any) -> Iterator[tuple[set[str], str]]:
    limits = json.loads(args.limit_mm_data_per_request)
    if any(kind not in MEDIA_KINDS or type(limit) is not int or limit < 0 for kind, limit in limits.items()):
        text = f'--limit-mm-data-per-request takes whole numbers by kind, such as {{"image": 4}}; got {limits}.'
        yield {"limit_mm_data_per_request"}, text
    directory = args.allowed_local_media_path
    if directory is not None and not Path(directory).is_dir():
        yield {"allowed_local_media_path"}, f"--allowed-local-media-path {directory} is no directory."


_SPECULATION_ONLY = (
    "speculative_draft_model_path",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_dflash_block_size",
    "speculative_dspark_block_size",
    "speculative_adaptive",
    "speculative_adaptive_config",
    "speculative_ngram_external_corpus_path",
)


def _check_speculation(args: Any) -> Iterator[tuple[set[str], str]]:
    algorithm, path = args.speculative_algorithm, args.speculative_draft_model_path
    if algorithm is None:
        given = [name for name in _SPECULATION_ONLY if getattr(args, name)]
        if given:
            names = ", ".join(map(flag, given))
            text = f"{names}: nothing drafts without --speculative-algorithm. Add it, or remove the others."
            yield {"speculative_algorithm", *given}, text
        return
    both = {"speculative_algorithm", "speculative_draft_model_path"}
    if algorithm in DRAFT_MODEL_NEEDED and path is None:
        text = (
            f"--speculative-algorithm {algorithm} needs --speculative-draft-model-path with the draft's checkpoint;"
            " NEXTN drafts with the model's own layers, and NGRAM with earlier tokens."
        )
        yield both, text
    if algorithm == NGRAM and path is not None:
        text = "--speculative-algorithm NGRAM drafts without a model; remove --speculative-draft-model-path."
        yield both, text
    if algorithm != NGRAM and args.speculative_ngram_external_corpus_path is not None:
        text = "--speculative-ngram-external-corpus-path needs --speculative-algorithm NGRAM."
        yield {"speculative_algorithm", "speculative_ngram_external_corpus_path"}, text
    yield from _check_blocks(args)
    if args.is_embedding:
        text = "--is-embedding generates no tokens that could be drafted; remove --speculative-algorithm."
        yield {"speculative_algorithm", "is_embedding"}, text


def _check_blocks(args: Any) -> Iterator[tuple[set[str], str]]:
    """Yields contradictions among the numbers of tokens and draft tokens of block drafts."""
    tokens = args.speculative_num_draft_tokens
    for kind, name, more in (
        (DFLASH, "speculative_dflash_block_size", 0),
        (DSPARK, "speculative_dspark_block_size", 1),
    ):
        size = getattr(args, name)
        if size is None:
            continue
        if args.speculative_algorithm != kind:
            yield {name, "speculative_algorithm"}, f"{flag(name)} needs --speculative-algorithm {kind}."
        if tokens is not None and tokens != size + more:
            text = (
                f"--speculative-num-draft-tokens {tokens} and {flag(name)} {size} contradict each other: the second"
                f" asks for {size + more} tokens of each request in a step. Remove one."
            )
            yield {name, "speculative_num_draft_tokens"}, text
