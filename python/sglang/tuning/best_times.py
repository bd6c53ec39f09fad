"""The best time that anyone measured for an op on a card, and what SGLang's own Triton kernel would take there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.hardware.arch import ArchTraits
from sglang.tuning import upstream_attention as upstream
from sglang.tuning.attention_model import decode_seconds, prompt_seconds
from sglang.tuning.grid import Grid
from sglang.tuning.measured import SAME_CARD, tables_of
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
from sglang.tuning.own_times import beyond_cache


@dataclass(frozen=True, slots=True)
class Best:
    """`measured`: as it stands in the tables, small operands in the L2. `served`: with reading them from memory.
    `exact`: a row of these sizes was measured; otherwise neighbours were."""

    measured: float
    served: float
    exact: bool
    table: str


def best(op: Op, arch: ArchTraits) -> Best | None:
    """None where nobody measured the op, or not on this card."""
    finder = _FINDERS.get(op.kind)
    found = finder(op, tables_of(arch)) if finder is not None else None
    if found is None:
        return None
    measured, exact, table = found
    served = measured if isinstance(op, AllReduce) else beyond_cache(measured, op.num_bytes, arch)
    return Best(measured, served, exact, table)


_Row = tuple[float, bool, str] | None
_Tables = Mapping[str, Grid]


def _at(tables: _Tables, name: str, *sizes: float) -> _Row:
    grid = tables.get(name)
    return None if grid is None else (grid.seconds(*sizes), grid.holds(*sizes), name)


def _least(*rows: _Row) -> _Row:
    return min((row for row in rows if row is not None), default=None)


def _form(scheme: str | None) -> tuple[str, ...]:
    """Tables whose kernels multiply the same numbers; weights of four bits that are widened compare with 16 bits."""
    if scheme is None:
        return ("bf16",)
    form = SCHEMES[scheme]
    if form.activation == "nvfp4":
        return ("nvfp4",)
    if scheme == "fp8_block":
        return ("fp8_block",)
    return ("fp8",) if form.element in ("e4m3", "int8") else ("bf16",)


def _linear(op: Linear, tables: _Tables) -> _Row:
    return _least(*(_at(tables, f"product/{form}/best", op.tokens, op.rows, op.cols) for form in _form(op.scheme)))


def _experts(op: Experts, tables: _Tables) -> _Row:
    if op.scheme is None:
        form = "bf16"
    else:
        scheme = SCHEMES[op.scheme]
        four = "nvfp4" if scheme.scale == "e4m3" else "int4" if scheme.element == "int4" else "mxfp4"
        form = four if scheme.bits == 4 else "fp8"
    # A fused shared expert is one more of the table's, which every token chooses.
    for count, top_k in ((op.num_experts, op.top_k), (op.num_experts - 1, op.top_k - 1)):
        found = _at(tables, f"experts/{form}/{op.hidden}x{count}x{top_k}", op.intermediate, op.tokens)
        if found is not None:
            return found[0], found[1] and count == op.num_experts, found[2]
    return None


def _decode(op: DecodeAttention, tables: _Tables) -> _Row:
    keys, short = op.keys, "fp8" if op.keys.item == 1 else "bf16"
    if keys.latent:
        return _at(tables, f"decode_attention/latent/{short}", keys.heads, keys.batch, keys.context)
    return _at(tables, f"decode_attention/{keys.head_dim}/{short}", keys.batch * keys.kv_heads, keys.context)


def _extend(op: ExtendAttention, tables: _Tables) -> _Row:
    prompt = op.prompt
    streams, short = prompt.batch * prompt.heads, "fp8" if prompt.item == 1 else "bf16"
    if prompt.prefix or prompt.window:
        return None
    if prompt.head_dim == 192 and prompt.heads == prompt.kv_heads:
        return _at(tables, "extend_attention/latent/bf16", streams, prompt.new)
    return _at(tables, f"extend_attention/{prompt.head_dim}/{short}", streams, prompt.new)


def _absorb(op: LatentAbsorb, tables: _Tables) -> _Row:
    part = "pre" if op.rows >= op.cols else "post"
    found = _at(tables, f"latent_absorb/mla_gen_{part}", op.heads, op.tokens)
    if found is None:
        return None
    usual = op.rows * op.cols == 512 * 128
    return found[0] * op.rows * op.cols / (512 * 128), found[1] and usual, found[2]


def _gated_delta(op: GatedDeltaRule, tables: _Tables) -> _Row:
    if op.tokens == 1:
        return _at(tables, "gated_delta_rule/decode", op.heads, op.batch)
    return _at(tables, "gated_delta_rule/prompt", op.heads, op.batch * op.tokens)


def _all_reduce(op: AllReduce, tables: _Tables) -> _Row:
    name = "all_reduce/best" if op.kind == "all_reduce" else "all_gather/nccl"
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
    "hyper_connection": _hyper,
}


def of_sglang(op: Op, arch: ArchTraits) -> tuple[float, str] | None:
    """Seconds that release 0.5.14 takes in a replay, and how that is known; None where it is not."""
    if SAME_CARD.get(arch.product or "", arch.product) != "rtx-pro-6000-server":
        return None
    if isinstance(op, Linear):
        form = _form(op.scheme)[0]
        row = _at(tables_of(arch), f"product/{form}/sglang", op.tokens, op.rows, op.cols)
        return (row[0], "interpolated") if row is not None else None
    if isinstance(op, DecodeAttention) and upstream.decode_key(op.keys) in upstream.DECODE_TIMES:
        times = upstream.DECODE_TIMES[upstream.decode_key(op.keys)]
        return decode_seconds(op.keys, upstream.decode_pieces(op.keys), times), "its Triton kernel, predicted"
    if (
        isinstance(op, ExtendAttention)
        and upstream.prompt_key(op.prompt) in upstream.PROMPT_TIMES
        and not op.prompt.prefix
    ):
        times_of_prompt = upstream.PROMPT_TIMES[upstream.prompt_key(op.prompt)]
        seconds = prompt_seconds(op.prompt, upstream.prompt_tile(op.prompt), times_of_prompt)
        return seconds, "its Triton kernel, predicted"
    return None
