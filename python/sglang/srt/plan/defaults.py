"""Sizes that the user did not give, from the amount of memory. Bytes."""

from __future__ import annotations

from sglang.srt.server_args import ServerArgs

GIB = 1024**3
TABLE_SHARE = 32
"""req_to_token takes at most 1/32 of the available memory; long contexts lower the number of requests."""


def default_chunked_prefill_size(device: str, available: int) -> int:
    if device == "cpu":
        return 512
    if available >= 72 * GIB:
        return 8192
    return 4096 if available >= 36 * GIB else 2048


def default_max_running_requests(device: str, available: int, context_len: int) -> int:
    if device == "cpu":
        return 64
    by_memory = 1024 if available >= 72 * GIB else 512 if available >= 36 * GIB else 256
    by_table = available // TABLE_SHARE // (context_len * 4)
    return max(8, min(by_memory, by_table))


def default_cuda_graph_max_bs(available: int) -> int:
    if available >= 72 * GIB:
        return 512
    return 256 if available >= 36 * GIB else 160


def cuda_graph_batch_sizes(args: ServerArgs, available: int, max_running_requests: int) -> tuple[int, ...]:
    """Ascending sizes: every 8 to 160, then every 16 to 256, every 32 beyond; no gap that pads more than a sixth."""
    if args.disable_cuda_graph:
        return ()
    if args.cuda_graph_bs is not None:
        return tuple(sorted({size for size in args.cuda_graph_bs if size <= max_running_requests})) or (
            max_running_requests,
        )
    largest = min(args.cuda_graph_max_bs or default_cuda_graph_max_bs(available), max_running_requests)
    steps = (1, 2, 4, *range(8, 161, 8), *range(176, 257, 16), *range(288, largest + 1, 32))
    return tuple(sorted({size for size in steps if size <= largest} | {largest}))


LAUNCH_S_PER_LAYER = 2e-4
FLOP_RATE = 5e14
"""Roughly what the host needs to launch a decoder layer kernel by kernel, and what a large GPU computes per second:
where they meet, graphs stop paying. Measured on an H200: 0.2-0.3 ms a layer, 7e14 FLOP/s."""
PREFILL_GRAPH_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


def cuda_graph_prefill_tokens(num_layers: int, weight_elements: int, chunk: int) -> tuple[int, ...]:
    """Step sizes whose computation takes less time than their launches would."""
    limit = num_layers * LAUNCH_S_PER_LAYER * FLOP_RATE / (2 * weight_elements)
    return tuple(size for size in PREFILL_GRAPH_TOKENS if size <= min(limit, chunk))
