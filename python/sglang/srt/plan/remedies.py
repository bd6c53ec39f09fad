"""Makes the advice for a model that does not fit, or whose cache is small. No torch.

Every flag that a message names was planned first: a server starts with it, or has the larger cache that is promised.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from sglang.srt.cli_args import flag
from sglang.srt.errors import UserError
from sglang.srt.plan.capacity import Trial
from sglang.srt.plan.defaults import SMALLER
from sglang.srt.plan.kv_spec import has_tensor_scales
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.layout import LayoutProblem, larger_layouts
from sglang.srt.plan.memory import GIB, DoesNotFit
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.rank_weights import rank_weights
from sglang.srt.plan.ranks import ONE_RANK, RankLayout
from sglang.srt.plan.sizes import Sizes
from sglang.srt.plan.weights import wide_bytes
from sglang.srt.server_args import ServerArgs

CONTEXTS = (131072, 65536, 32768, 16384, 8192)
USEFUL_TOKENS = 4096
"""Fewest tokens that an advised server must hold; or one request, if that is shorter."""
CLEARLY_MORE = 1.1
"""Factor by which advice must raise the number of tokens."""
FOUR_BITS = 4.5
"""Bits of a weight in 4 bits, with its scales."""
WEIGHTS_SHARE = 0.85
"""Largest share of the free memory that the weights of an advised checkpoint may take."""

Change = Mapping[str, Any]
"""Changed fields of ServerArgs, with their new values."""


class Planner(Protocol):
    """A planner of one model with one set of flags, for one kind of GPU."""

    @property
    def args(self) -> ServerArgs: ...

    @property
    def advises(self) -> bool:
        """Returns whether to look for helpful flags, which takes many trials."""
        ...

    @property
    def max_gpus(self) -> int:
        """Most GPUs of one machine."""
        ...

    @property
    def available(self) -> int:
        """Bytes that are free on a GPU."""
        ...

    @property
    def context_len(self) -> int: ...

    def changed(self, **change: Any) -> Planner:
        """Returns the planner with other values of some flags."""
        ...

    def describe(self) -> tuple[ModelDescription, ParallelConfig]:
        """Describes the model. Raises UserError where the layout does not divide it."""
        ...

    def weights(self) -> int:
        """Returns the bytes of weights on one rank."""
        ...

    def quantizing(self, scheme: str) -> Planner | None:
        """Returns the planner of the model with --quantization SCHEME; None where the checkpoint is quantized already
        or cannot be quantized at the start."""
        ...

    def trial(self) -> Trial:
        """Plans the model. Raises UserError where no server would start."""
        ...


def trial_or_advice(planner: Planner) -> Trial:
    """Plans with these flags. Raises UserError that says which flags would start a server instead."""
    try:
        return planner.trial()
    except LayoutProblem as problem:
        if not planner.advises:
            raise UserError(problem.problem) from None
        most = max(planner.max_gpus, 1)
        refusal = problem.with_ways(lambda way: way.world_size <= most and _starts(planner, _layout(way)))
        raise UserError(refusal) from None
    except DoesNotFit as misfit:
        if not planner.advises:
            raise UserError(str(misfit)) from None
        ways = list(_ways_to_start(planner))
        kept = _kept_wide(planner)
        facts = f"{misfit}; the checkpoint keeps {kept} in 16 bits" if kept else str(misfit)
        offload = "; --cpu-offload-gb moves experts only" if planner.args.cpu_offload_gb else ""
        raise UserError(f"{facts}{offload}. {_advice(ways) if ways else _nothing_helps(planner)}") from None


def advice_to_hold_a_request(planner: Planner, trial: Trial) -> str:
    """Returns advice for a cache smaller than one request of the full context length: flags that give it clearly more
    tokens, and the context length that it holds. "" where the planner gives no advice."""
    args, tokens, sizes = planner.args, trial.capacity.max_total_num_tokens, trial.capacity.sizes
    if not planner.advises:
        return ""

    def helps(change: Change, wanted: float = CLEARLY_MORE * tokens) -> bool:
        larger = _planned(planner, change)
        return larger is not None and larger.capacity.max_total_num_tokens >= min(wanted, sizes.context_len)

    shorter_length = _held_length(planner, tokens)
    ways = [_words({"context_length": shorter_length})] if shorter_length else []
    if args.max_total_tokens is not None:
        all_tokens = {"max_total_tokens": sizes.context_len}
        return _advice([*ways, *([_words(all_tokens)] if helps(all_tokens, sizes.context_len) else [])])
    steps = _smaller_steps(args, sizes)
    for changes in (_higher_fraction(planner), _fp8_cache(trial.parallel), steps):
        ways += [_words(change) for change in changes if helps(change)][:1]
    layouts = _with_room(planner, trial.description, trial.parallel.ranks)
    more = next((layout for layout in layouts if helps(_layout(layout), sizes.context_len)), None)
    return _advice([*ways, *([f"more GPUs ({more.flags})"] if more else [])])


def _held_length(planner: Planner, tokens: int) -> int | None:
    """Returns a context length of about `tokens` that the cache holds; None if none is found. A shorter context may
    change other sizes and thus the number of tokens, hence the repeated trials."""
    for _ in range(4):
        shorter = _planned(planner, {"context_length": tokens})
        if shorter is None or shorter.capacity.max_total_num_tokens >= tokens:
            return tokens if shorter else None
        tokens = shorter.capacity.max_total_num_tokens
    return None


def _ways_to_start(planner: Planner) -> Iterator[str]:
    model, parallel = planner.describe()
    shorter = ({"context_length": tokens} for tokens in CONTEXTS if tokens < planner.context_len)
    given = (_higher_fraction(planner), _fp8_cache(parallel), _given_steps(planner.args), shorter)
    room = planner.weights() < planner.available
    for changes in given if room else ():
        yield from [_words(change) for change in changes if _starts(planner, change)][:1]
    for layout in _with_room(planner, model, parallel.ranks):
        if _starts(planner, _layout(layout)):
            yield f"more GPUs ({layout.flags})"
            break
    if _starts_in_fp8(planner):
        yield f"{flag('quantization')} fp8, which makes FP8 weights of 16 bits at the start"
    yield from _smaller_checkpoint(planner, model, parallel)


def _starts_in_fp8(planner: Planner) -> bool:
    quantizing = planner.quantizing("fp8") if planner.args.quantization is None else None
    return quantizing is not None and _starts(quantizing, {"quantization": "fp8"})


def _with_room(planner: Planner, model: ModelDescription, ranks: RankLayout) -> Iterator[RankLayout]:
    """Yields larger layouts on which an even part of the weights fits into each rank's memory."""
    whole = planner.changed(**_layout(ONE_RANK)).weights()
    layouts = larger_layouts(model, ranks, planner.max_gpus)
    return (layout for layout in layouts if whole < layout.world_size * planner.available)


# --- changes to try ---------------------------------------------------------------------------------------------------


def _higher_fraction(planner: Planner) -> Iterator[Change]:
    """Yields the --mem-fraction-static that the plan would choose by itself, if it is higher than the user's."""
    asked = planner.args.mem_fraction_static
    if asked is None:
        return
    free = _planned(planner, {"mem_fraction_static": None})
    share = math.floor(100 * free.capacity.memory.mem_fraction_static) / 100 if free else 0.0
    if asked < share < 1:
        yield {"mem_fraction_static": share}


def _fp8_cache(parallel: ParallelConfig) -> Iterator[Change]:
    if not has_tensor_scales(parallel.kv_dtype):
        yield {"kv_cache_dtype": "fp8_e4m3"}


def _given_steps(args: ServerArgs) -> Iterator[Change]:
    """Yields smaller values of the sizes that the user gave; the plan has already lowered the others."""
    for size in SMALLER:
        change = {}
        if args.chunked_prefill_size is not None and not 0 < args.chunked_prefill_size <= size.chunked_prefill_size:
            change["chunked_prefill_size"] = _whole_pages(args, size.chunked_prefill_size)
        if (args.max_running_requests or 0) > size.max_running_requests:
            change["max_running_requests"] = size.max_running_requests
        if (args.cuda_graph_max_bs or 0) > size.cuda_graph_max_bs and args.cuda_graph_bs is None:
            change["cuda_graph_max_bs"] = size.cuda_graph_max_bs
        if change:
            yield change


def _smaller_steps(args: ServerArgs, sizes: Sizes) -> Iterator[Change]:
    for size in SMALLER:
        change = {}
        if sizes.tokens_per_step > size.chunked_prefill_size:
            change["chunked_prefill_size"] = _whole_pages(args, size.chunked_prefill_size)
        if sizes.max_running_requests > size.max_running_requests:
            change["max_running_requests"] = size.max_running_requests
        if max(sizes.graph_batch_sizes, default=0) > size.cuda_graph_max_bs and args.cuda_graph_bs is None:
            change["cuda_graph_max_bs"] = size.cuda_graph_max_bs
        if change:
            yield change


def _whole_pages(args: ServerArgs, tokens: int) -> int:
    page = args.page_size or 1
    return max(page, tokens // page * page)


def _layout(layout: RankLayout) -> Change:
    return {
        "tp_size": layout.tp_size,
        "ep_size": layout.ep_size,
        "pp_size": layout.pp_size,
        "dcp_size": layout.dcp_size,
        "attn_dp_size": layout.attn_dp_size,
    }


def _planned(planner: Planner, change: Change) -> Trial | None:
    try:
        return planner.changed(**change).trial()
    except UserError:
        return None


def _starts(planner: Planner, change: Change) -> bool:
    trial = _planned(planner, change)
    return trial is not None and trial.capacity.max_total_num_tokens >= min(
        USEFUL_TOKENS, trial.capacity.sizes.context_len, planner.args.max_total_tokens or USEFUL_TOKENS
    )


# --- words ------------------------------------------------------------------------------------------------------------


def _words(change: Change) -> str:
    return " ".join(f"{flag(name)} {value}" for name, value in change.items())


def _advice(ways: Iterable[str]) -> str:
    text = ", or ".join(ways)
    return f"What helps: {text}." if text else ""


def _nothing_helps(planner: Planner) -> str:
    if planner.max_gpus == 1:
        return "A machine of this kind has one GPU, and no flag makes room: choose a smaller model."
    return f"No flag makes room, and no layout of up to {planner.max_gpus} such GPUs: choose a smaller model."


def _kept_wide(planner: Planner) -> str:
    """Names the parts that a quantized checkpoint keeps in 16 bits, if they are over a twentieth of the weights."""
    model, parallel = planner.describe()
    least = planner.weights() // 20
    wide = wide_bytes(rank_weights(model, parallel.ranks), parallel.dtype)
    return ", ".join(f"{size / GIB:.2f} GiB of {name}" for name, size in wide.items() if size > least)


def _smaller_checkpoint(planner: Planner, model: ModelDescription, parallel: ParallelConfig) -> Iterator[str]:
    """Yields advice to take a checkpoint with fewer bits, if its weights would leave room."""
    weights = planner.weights()
    of_rank = rank_weights(model, parallel.ranks)
    wide, quants = wide_bytes(of_rank, parallel.dtype), (quant for _, quant in of_rank.matrices())
    bits = max((quant.format.bits for quant in quants if quant is not None), default=16)
    in_16_bits = sum(wide.values()) if wide else weights
    narrow = (weights - in_16_bits) * min(1.0, FOUR_BITS / bits)
    if narrow + in_16_bits * FOUR_BITS / 16 > WEIGHTS_SHARE * planner.available:
        return
    if not wide:
        yield "a quantized checkpoint"
    elif _kept_wide(planner):
        yield "a checkpoint that quantizes these too"
    elif bits > FOUR_BITS:
        yield "a checkpoint in fewer bits"
