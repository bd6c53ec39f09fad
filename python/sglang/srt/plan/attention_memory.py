"""Computes the memory, in bytes, that an attention backend allocates besides the cache, by the kernel that the plan
chose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sglang.srt.kernels.spec import Choice

MIB = 1024**2
FLASHINFER_WORKSPACE = 256 * MIB
FLASHINFER_MLA_WORKSPACE = 128 * MIB
FLASHINFER_PLANS = 8 * MIB
"""Bytes of the lists that a planner makes: each attention site has three buffers for prefill and three for decoding, of
which the wrappers of all captured batch sizes share one. A test holds both sizes to the backend's."""
FLASHINFER_LATENT_WORKSPACE = 32 * MIB
FLASHINFER_LATENT_LISTS = MIB // 4
FLASHINFER_LATENT_CHUNKS = 32
"""For long prompts over latents: bytes of the workspace, bytes of the lists of one planned launch, and most chunks of
cached prefixes in a step, of which three may be planned at once. A test holds them to the builder's."""
INDEX_LOGIT_BYTES = 256 * MIB
"""Bytes of an indexer's scores that lie in memory at once; a test holds the number to the kernel's."""
SPARSE_ROUNDS = 4
"""Most rounds of programs in sparse attention where several share a token; a test holds the number to the kernel's."""
PART_BYTES = 14
"""Bytes of an element of partial attention that is merged: three copies in 16 bits, two in fp32."""
LIST_BYTES_PER_PAGE = 40
"""Bytes for each page in a step's page list and in the five int64 arrays from which it is gathered."""


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """The sizes on which an attention backend's buffers depend."""

    heads: tuple[tuple[int, int], ...]
    """Number of query heads on one rank and dims of a value, of each shape of attention that a backend computes."""
    value_dim: int
    """Largest number of dims of a head's output."""
    index_logits: int
    """Bytes of the scores of a step's tokens over requests of the full length, where there is an indexer."""
    num_sms: int
    max_running_requests: int
    graph_batch_sizes: tuple[int, ...]
    pages_per_request: int
    max_pages: int
    """Number of pages that all running requests together can have."""
    windows: tuple[int, ...]
    """Pages of a window, for each attention site; 0: all tokens."""
    part_heads: tuple[tuple[int, int], ...] = ()
    """As `heads`, for sites whose tokens are sharded over DCP ranks: the heads of all these ranks."""
    token_rows: int = 0
    """Most tokens of a step that attend one by one to sharded tokens."""
    verified_tokens: int = 1
    """Most tokens of a decoding request in one step."""
    verify_rows: int = 0
    """Most tokens of a step that verifies draft tokens."""
    own_tables: int = 0
    """Bytes of row tables of a DCP rank's own tokens."""
    gathered: int = 0
    """Bytes of the tokens of one layer that DCP ranks gather."""
    gathered_tokens: int = 0
    """Most gathered tokens."""


def attention_bytes(choices: Mapping[str, Choice], sizes: AttentionSizes) -> int:
    """Returns the bytes that the backends of prompts and of decode allocate; one backend may serve both."""
    ops = ("long_prompt_attention", "extend_attention", "decode_attention")
    backends = {choice.name: choice for op, choice in choices.items() if op in ops}
    decode = choices.get("decode_attention")
    if decode is not None:
        backends[decode.name] = decode
    total = sum(_BY_KERNEL[name](choice, sizes) for name, choice in backends.items() if name in _BY_KERNEL)
    return total + _long_latents(choices) + _sparse(choices, sizes) + _shared_tokens(sizes)


def _long_latents(choices: Mapping[str, Choice]) -> int:
    """Returns the bytes of the workspace and of the lists of all wrappers for long prompts over latents. One more
    buffer of plans exists while a wrapper is made."""
    if not any(op.startswith("long_latent_prompt") for op in choices):
        return 0
    lists = 3 * (1 + FLASHINFER_LATENT_CHUNKS) * FLASHINFER_LATENT_LISTS
    return FLASHINFER_LATENT_WORKSPACE + lists + FLASHINFER_PLANS


def _shared_tokens(sizes: AttentionSizes) -> int:
    """Returns the bytes that DCP takes: partial attention, its copies that are sent and received, and its sums in fp32;
    row tables; gathered tokens."""
    parts = max((heads * value_dim for heads, value_dim in sizes.part_heads), default=0)
    return sizes.token_rows * parts * PART_BYTES + sizes.own_tables + sizes.gathered


def _sparse(choices: Mapping[str, Choice], sizes: AttentionSizes) -> int:
    """Returns the bytes of the indexer's scores, of the entries that it keeps of long rows (at most a quarter as many,
    as `select_entries.launch_for` chooses), and of the partial results, in fp32, of programs that share a token's
    selected entries; graphs have their own."""
    chosen = (choices.get(op) for op in ("block_attention", "selected_block_attention", "sparse_attention"))
    attention = next((choice for choice in chosen if choice is not None), None)
    if attention is None:
        return 0
    scores = bool({"sparse_indexer", "block_indexer"} & choices.keys())
    total = min(INDEX_LOGIT_BYTES, sizes.index_logits) * 5 // 4 if scores else 0
    if attention.tile is not None:
        tiles = (attention.tile, *attention.smaller_tiles)
        heads_at_once = max(tile["ctas_per_sm"] * tile["BLOCK_H"] for tile in tiles)
        total += sizes.num_sms * SPARSE_ROUNDS * heads_at_once * (sizes.value_dim + 1) * 4
    return total * (2 if sizes.graph_batch_sizes else 1)


def _flashinfer(choice: Choice, sizes: AttentionSizes) -> int:
    """Returns the bytes of the workspace and, for each attention site, of seven buffers of plans and of page lists: one
    list for captured batches, sized for requests of the full length, and one that a step gathers. One more buffer of
    plans exists while a wrapper is made. With DCP, decoding requests and single tokens have three buffers each and
    prompts one; a page has as many entries on all ranks together as without DCP, and each gathered token is a page."""
    workspace = FLASHINFER_MLA_WORKSPACE if choice.name == "flashinfer_mla" else FLASHINFER_WORKSPACE
    largest = max(sizes.graph_batch_sizes, default=0)
    pages = [min(window or sizes.pages_per_request, sizes.pages_per_request) for window in sizes.windows]
    captured = sum(4 * largest * (each + 3) for each in pages)
    gathered = (len(pages) * sizes.max_pages + sizes.gathered_tokens) * LIST_BYTES_PER_PAGE
    return workspace + (7 * len(pages) + 1) * FLASHINFER_PLANS + captured + gathered


def _triton(choice: Choice, sizes: AttentionSizes) -> int:
    """Returns the bytes of partial results, in fp32, of sequences that several programs share (`DecodeWorkspace`), for
    each shape of attention; and of those of draft tokens, of which each is as many heads more."""
    if choice.need.op != "decode_attention" or choice.tile is None:
        return 0
    at_once = sizes.num_sms * choice.tile.get("ctas_per_sm", 1) * choice.tile.get("waves", 1)
    batch = max(sizes.max_running_requests, *sizes.graph_batch_sizes, 1)
    rows = batch + at_once
    of_each = [(rows, shape) for shape in sizes.heads]
    of_each += [(rows + sizes.token_rows + at_once, shape) for shape in sizes.part_heads]
    if sizes.verified_tokens > 1:
        block, tokens = choice.tile.get("BLOCK_H", 1), sizes.verified_tokens
        # Programs that run at once have BLOCK_H heads each, or one piece has them all.
        of_each += [
            (
                sizes.verify_rows + max(-(-at_once * block // heads), tokens * choice.tile.get("waves", 1)),
                (heads, value_dim),
            )
            for heads, value_dim in sizes.heads
        ]
    return sum(count * (num_heads * (v_head_dim + 1) * 4 + 24) for count, (num_heads, v_head_dim) in of_each)


_BY_KERNEL: Mapping[str, Callable[[Choice, AttentionSizes], int]] = {
    "flashinfer": _flashinfer,
    "flashinfer_mla": _flashinfer,
    "triton": _triton,
}
