"""Best measured time of an op on a card, by any framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.hardware.arch import ArchTraits
from sglang.tuning import replays
from sglang.tuning.grid import Base, Grid
from sglang.tuning.measured import tables_of
from sglang.tuning.ops import (
    AllReduce,
    DecodeAttention,
    Experts,
    ExtendAttention,
    GatedDeltaRule,
    HyperConnection,
    LatentAbsorb,
    Linear,
    Op,
)
from sglang.tuning.predicted_times import beyond_cache
from sglang.tuning.rates import ceilings_of
from sglang.tuning.sglang_times import expert_form, gated, product_form, product_seconds


@dataclass(frozen=True, slots=True)
class Best:
    """`measured`: as in the tables, with small operands in the L2. `served`: with reading them from memory, and scales
    that were not timed. For experts both assume evenly distributed pairs. `exact`: these sizes were measured; otherwise
    neighbours were."""

    measured: float
    served: float
    exact: bool
    table: str


def best(op: Op, arch: ArchTraits) -> Best | None:
    """Returns the best time; None if nobody measured the op, or not on this card."""
    finder = _FINDERS.get(op.kind)
    row = finder(op, tables_of(arch)) if finder is not None else None
    if row is None:
        return None
    measured, exact, table = row
    if isinstance(op, AllReduce):
        return Best(measured, measured, exact, table)
    if isinstance(op, Experts):
        served = measured + _scales_not_timed(op) / ceilings_of(arch).read
        return Best(measured, beyond_cache(served, op.even_bytes, arch), exact, table)
    return Best(measured, beyond_cache(measured, op.num_bytes, arch), exact, table)


TIMED_INT4 = SCHEMES["int4_g128"]
"""What the published INT4 experts are: the collector has groups of 128 by default, and with groups of 32 Kimi-K2's
would have been read at 1.57 TB/s, more than any other kernel reached on the card."""


def _scales_not_timed(op: Experts) -> float:
    """Returns the bytes of scales of smaller groups than those that were timed."""
    if op.scheme is None or SCHEMES[op.scheme].element != "int4":
        return 0.0
    more = SCHEMES[op.scheme].bytes_per_weight() - TIMED_INT4.bytes_per_weight()
    return more * min(op.num_experts, op.pairs) * op.matrices * op.intermediate * op.hidden


_Row = tuple[float, bool, str] | None
_Tables = Mapping[str, Grid]


def _at(tables: _Tables, name: str, *sizes: float, base: Base | None = None) -> _Row:
    grid = tables.get(name)
    if grid is None or not grid.covers(*sizes):
        return None
    return grid.seconds(*sizes, base=base), grid.holds(*sizes), name


def _linear(op: Linear, tables: _Tables) -> _Row:
    name = f"product/{product_form(op.scheme)[0]}/best"
    seconds = product_seconds(tables, name, op)
    return None if seconds is None else (seconds, tables[name].holds(op.tokens, op.rows, op.cols), name)


def _experts(op: Experts, tables: _Tables) -> _Row:
    form = expert_form(op.scheme)
    forms = {"fp8_block": ("fp8_block", "fp8"), "mxfp4_mxfp8": ("mxfp4_mxfp8", form)}.get(op.scheme or "", (form,))
    # A fused shared expert counts as a further expert of the table, chosen by every token.
    for count, top_k in ((op.num_experts, op.top_k), (op.num_experts - 1, op.top_k - 1)):
        if gated(count, top_k) != op.gate:
            continue

        def base(inter: float, tokens: float, count: int = count, top_k: int = top_k) -> float:
            return replays.expert_layer(form, tokens, count, top_k, op.hidden, inter, op.matrices)

        for name in (f"experts/{of}/{op.hidden}x{count}x{top_k}" for of in forms):
            row = _at(tables, name, op.intermediate, op.tokens, base=base)
            if row is not None:
                return row[0], row[1] and count == op.num_experts, row[2]
    return None


def _decode(op: DecodeAttention, tables: _Tables) -> _Row:
    keys, short = op.keys, "fp8" if op.keys.item == 1 else "bf16"
    row = keys.row * keys.item

    def latent(heads: float, batch: float, context: float) -> float:
        return replays.decode(batch, context, heads, row)

    def shared(streams: float, context: float) -> float:
        return replays.decode(streams, context, keys.group, row)

    if keys.latent:
        sizes = (keys.heads, keys.batch, keys.context)
        return _at(tables, f"decode_attention/latent/{short}", *sizes, base=latent)
    sizes_of = (keys.batch * keys.kv_heads, keys.context)
    return _at(tables, f"decode_attention/{keys.head_dim}/{short}", *sizes_of, base=shared)


def _extend(op: ExtendAttention, tables: _Tables) -> _Row:
    prompt = op.prompt
    streams, short = prompt.batch * prompt.heads, "fp8" if prompt.item == 1 else "bf16"

    def base(streams: float, new: float) -> float:
        return replays.prompt(streams, new, prompt.head_dim + prompt.v_head_dim)

    if prompt.prefix or prompt.window:
        return None
    if prompt.head_dim == 192 and prompt.heads == prompt.kv_heads:
        return _at(tables, "extend_attention/latent/bf16", streams, prompt.new, base=base)
    return _at(tables, f"extend_attention/{prompt.head_dim}/{short}", streams, prompt.new, base=base)


def _absorb(op: LatentAbsorb, tables: _Tables) -> _Row:
    part = "pre" if op.rows >= op.cols else "post"
    row = _at(tables, f"latent_absorb/mla_gen_{part}", op.heads, op.tokens)
    if row is None:
        return None
    usual = op.rows * op.cols == 512 * 128
    return row[0] * op.rows * op.cols / (512 * 128), row[1] and usual, row[2]


def _gated_delta(op: GatedDeltaRule, tables: _Tables) -> _Row:
    if op.tokens == 1:
        return _at(tables, "gated_delta_rule/decode", op.heads, op.batch)
    return _at(tables, "gated_delta_rule/prompt", op.heads, op.batch * op.tokens)


def _all_reduce(op: AllReduce, tables: _Tables) -> _Row:
    name = "all_gather/nccl" if op.kind == "all_gather" else "all_reduce/best"
    return _at(tables, name, op.ranks, max(512, op.size)) if op.ranks in (2, 4, 8) else None


def _hyper(op: HyperConnection, tables: _Tables) -> _Row:
    parts = [_at(tables, f"hyper_connection/{part}", op.hidden, op.tokens) for part in ("pre", "post")]
    if op.streams != 4 or parts[0] is None or parts[1] is None:
        return None
    return parts[0][0] + parts[1][0], parts[0][1], "hyper_connection"


_FINDERS: Mapping[str, Callable[[Any, _Tables], _Row]] = {
    "linear": _linear,
    "fused_moe": _experts,
    "decode_attention": _decode,
    "extend_attention": _extend,
    "latent_absorb": _absorb,
    "gated_delta_rule": _gated_delta,
    "all_reduce": _all_reduce,
    "all_gather": _all_reduce,
    "quantized_sum": _all_reduce,  # timed in 16 bits: nobody has measured quantized ones
    "hyper_connection": _hyper,
}
