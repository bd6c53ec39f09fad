"""Default sizes, in bytes where not said otherwise, that follow from the amount of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from sglang.srt.errors import UserError
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.ranks import ONE_RANK
from sglang.srt.plan.weight_spec import Matrix
from sglang.srt.server_args import ServerArgs

GIB = 1024**3
Made = TypeVar("Made")
TABLE_SHARE = 32
"""Share of the available memory that req_to_token takes at most: 1/32; long contexts lower the number of requests."""


@dataclass(frozen=True, slots=True)
class DefaultSizes:
    """Default values of sizes that the user did not give."""

    chunked_prefill_size: int
    max_running_requests: int
    cuda_graph_max_bs: int


_BY_MEMORY: tuple[tuple[int, DefaultSizes], ...] = (
    (72 * GIB, DefaultSizes(8192, 1024, 512)),
    (36 * GIB, DefaultSizes(4096, 512, 256)),
    (0, DefaultSizes(2048, 256, 160)),
)
"""Pairs (available memory in bytes from which the sizes apply, default sizes)."""
SMALLER = (DefaultSizes(2048, 64, 64), DefaultSizes(1024, 32, 32), DefaultSizes(512, 16, 16), DefaultSizes(256, 8, 8))
"""Default sizes for when the weights leave little memory, as with a model that just fits."""
BESIDE_SLOTS = (DefaultSizes(8192, 64, 64), DefaultSizes(4096, 64, 64), DefaultSizes(2048, 32, 32), *SMALLER[1:])
"""Default sizes where experts lie in main memory: the longest chunks whose steps leave slots their room."""
ROOM_OF_STEPS = 4
"""Steps get at most a quarter of the memory besides the weights that are always there."""
CACHE_SHARE = 0.5
"""Share of the memory besides the weights that the caches should get; otherwise smaller sizes are tried."""


def default_sizes(device: str, available: int, context_len: int, has_slots: bool = False) -> tuple[DefaultSizes, ...]:
    """Returns the default sizes for this amount of memory, then smaller ones to try. has_slots: experts lie in main
    memory, whose bytes a prompt costs once a chunk."""
    if device == "cpu":
        return (DefaultSizes(512, 64, 0),)
    if has_slots:
        return BESIDE_SLOTS
    by_table = max(8, available // TABLE_SHARE // (context_len * 4))
    sizes = [*(sizes for least, sizes in _BY_MEMORY if available >= least), *SMALLER]
    return tuple(replace(size, max_running_requests=min(size.max_running_requests, by_table)) for size in sizes)


def with_share(
    steps: Sequence[DefaultSizes], make: Callable[[DefaultSizes], Made], share: Callable[[Made], float]
) -> tuple[DefaultSizes, Made]:
    """Returns the first of `steps` with which the caches get their share of the memory besides the weights, or the one
    with the largest share, and what `make` made of it. `make` raises UserError where nothing is left; if it always
    does, so does this, with the last message."""
    refusal: UserError | None = None
    best: tuple[float, DefaultSizes, Made] | None = None
    for size in steps:
        try:
            candidate = make(size)
        except UserError as error:
            refusal = error
            continue
        if best is None or share(candidate) > best[0]:
            best = share(candidate), size, candidate
        if best[0] >= CACHE_SHARE:
            break
    if best is None:
        assert refusal is not None
        raise refusal
    return best[1], best[2]


def cuda_graph_batch_sizes(args: ServerArgs, default_max: int, max_running_requests: int) -> tuple[int, ...]:
    """Returns the batch sizes of decode graphs, ascending: every 8 up to 160, every 16 up to 256, every 32 beyond, so
    that padding is at most a sixth for larger ones."""
    if args.disable_cuda_graph:
        return ()
    if args.cuda_graph_bs is not None:
        return tuple(sorted({size for size in args.cuda_graph_bs if size <= max_running_requests})) or (
            max_running_requests,
        )
    largest = min(args.cuda_graph_max_bs or default_max, max_running_requests)
    steps = (1, 2, 4, *range(8, 161, 8), *range(176, 257, 16), *range(288, largest + 1, 32))
    return tuple(sorted({size for size in steps if size <= largest} | {largest}))


DENSE_LAUNCH_S = 2.5e-4
EXPERT_LAUNCH_S = 9e-4
"""Seconds that the host needs to launch a decoder layer kernel by kernel. Measured on an H200: 0.2-0.3 ms, and 0.9 ms
if it has quantized experts.

Another host took 0.8 to 1.3 ms for dense layers in FP8 and 2 ms with experts
(benchmark/results/several_gpus.md). The numbers stay, because FLOP_RATE is too high for the cards in view by as much:
at the limits that follow an RTX PRO 6000 is predicted to compute for 0.6 to 1.4 ms a dense layer in FP8 (Qwen3-8B 0.75
at 640 tokens, 70B 0.76 at 128), about as long as such a host launches; a test holds them there. With 0.83 ms the limits
would be 2,048 and 448 tokens, 2.1 and 1.7 ms, where launches hide behind the computation anyway and what graphs cost
would be left: padded rows, and for Qwen3-8B 28 more graphs of 0.3 GiB to capture."""
FLOP_RATE = 5e14
"""Operations per second of a large GPU in products of some hundred rows (7e14 in large ones on an H200)."""
GRAPH_MARGIN = 2.0
"""Factor by which a step may compute longer than its launches take and still gain from a graph, because the host is
free meanwhile."""
PREFILL_GRAPH_TOKENS = (
    *(16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896),
    *(1024, 1280, 1536, 1792, 2048, 2560, 3072, 4096),
)
"""Numbers of tokens for which prefill graphs may be captured. From 128 on no step is padded by more than a third."""


def layer_products(model: ModelDescription) -> float:
    """Returns the average number of multiplications by weights of a token in a decoder layer of the whole model.
    Routers and other small products that are never quantized do not count."""
    total = 0
    for layer, count in Counter(model.layers).items():
        experts = layer.ffn.experts
        rows = experts.intermediate_size if experts else 0
        columns = experts.top_k + experts.fused_shared if experts else 0
        weights = layer.weights(model.hidden_size, ONE_RANK, rows)
        matrices = [part for part in weights if isinstance(part, Matrix) and part.quantized]
        total += count * sum(part.rows * part.cols * (columns if part.experts else 1) for part in matrices)
    return total / len(model.layers)


def cuda_graph_prefill_tokens(model: ModelDescription, tp_size: int, chunk: int) -> tuple[int, ...]:
    """Returns the token counts of prefill graphs: steps whose launches would keep the host busy for about as long as
    the GPU computes. Only the weights that a token multiplies count, so of the experts only the chosen ones."""
    launch = EXPERT_LAUNCH_S if model.experts else DENSE_LAUNCH_S
    limit = GRAPH_MARGIN * launch * FLOP_RATE / (2 * layer_products(model) / tp_size)
    if any(layer.mixer.short_prefill_graphs for layer in model.layers):
        limit = min(limit, LATENT_GRAPH_TOKENS)
    return tuple(size for size in PREFILL_GRAPH_TOKENS if size <= min(limit, chunk))


LATENT_GRAPH_TOKENS = 512
"""Number of tokens up to which models with latent, compressed or block-sparse attention have prefill graphs. These hold
the absorbed form, whatever the prefixes; in longer steps that costs more than launches: about three times the work of
the expanded form, whose launches depend on the prefixes. What tokens see of compressed entries, and the scores of
blocks, are as wide in a graph as the context length allows."""
MIXED_DECODES = (64, 256)
"""Numbers of decoding requests for which there are prefill graphs, besides none and the most: a row of padding costs
little."""


def mixed_decode_sizes(graph_batch_sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the numbers of decoding requests in graphs with prompts, ascending from 0 to the largest decode graph."""
    largest = graph_batch_sizes[-1]
    return (0, *(size for size in MIXED_DECODES if size < largest), largest)
