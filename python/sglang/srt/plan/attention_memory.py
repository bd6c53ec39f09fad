"""What an attention backend allocates beside the cache, by the kernel that the plan chose. Bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sglang.srt.kernels.spec import Choice

MIB = 1024**2
FLASHINFER_WORKSPACE = 256 * MIB
FLASHINFER_MLA_WORKSPACE = 128 * MIB
FLASHINFER_PLANS = 8 * MIB
"""Of the lists that a planner makes: for each attention site one buffer for prefill and one for decoding, which the
wrappers of all captured batch sizes share. A test holds both sizes to the backend's."""
LIST_BYTES_PER_PAGE = 40
"""A step's page list and the five int64 arrays that it is gathered with."""


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    num_heads: int  # of one rank
    v_head_dim: int
    num_sms: int
    max_running_requests: int
    graph_batch_sizes: tuple[int, ...]
    pages_per_request: int
    max_pages: int
    """That all running requests together can have."""
    windows: tuple[int, ...] = (0,)
    """Pages of a window, for each attention site; 0: all tokens."""


def attention_bytes(choices: Mapping[str, Choice], sizes: AttentionSizes) -> int:
    """Of the backends of prefill and of decode, which may be one."""
    backends = {choice.name: choice for op, choice in choices.items() if op in ("extend_attention", "decode_attention")}
    decode = choices.get("decode_attention")
    if decode is not None:
        backends[decode.name] = decode
    return sum(_BY_KERNEL[name](choice, sizes) for name, choice in backends.items() if name in _BY_KERNEL)


def _flashinfer(choice: Choice, sizes: AttentionSizes) -> int:
    """Workspace; for each attention site two buffers of plans, and page lists: one for captured batches, sized for
    requests of the full length, and one that a step gathers. One more buffer of plans while a wrapper is made."""
    workspace = FLASHINFER_MLA_WORKSPACE if choice.name == "flashinfer_mla" else FLASHINFER_WORKSPACE
    largest = max(sizes.graph_batch_sizes, default=0)
    pages = [min(window or sizes.pages_per_request, sizes.pages_per_request) for window in sizes.windows]
    captured = sum(4 * largest * (each + 3) for each in pages)
    gathered = len(pages) * sizes.max_pages * LIST_BYTES_PER_PAGE
    return workspace + (2 * len(pages) + 1) * FLASHINFER_PLANS + captured + gathered


def _triton(choice: Choice, sizes: AttentionSizes) -> int:
    """Partial results of sequences that several programs share, in fp32 (`DecodeWorkspace`)."""
    if choice.need.op != "decode_attention" or choice.tile is None:
        return 0
    at_once = sizes.num_sms * choice.tile.get("ctas_per_sm", 1) * choice.tile.get("waves", 1)
    rows = max(sizes.max_running_requests, *sizes.graph_batch_sizes, 1) + at_once
    return rows * (sizes.num_heads * (sizes.v_head_dim + 1) * 4 + 24)


_BY_KERNEL: Mapping[str, Callable[[Choice, AttentionSizes], int]] = {
    "flashinfer": _flashinfer,
    "flashinfer_mla": _flashinfer,
    "triton": _triton,
}
