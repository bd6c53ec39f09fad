"""The best time that anyone measured for an op on a card, and what SGLang's own Triton kernel would take there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.hardware.arch import ArchTraits
from sglang.tuning import upstream_attention as upstream
from sglang.tuning.attention_model import Keys, Prompt, decode_seconds, prompt_seconds
from sglang.tuning.cost_model import constants_of
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
from sglang.tuning.predicted_times import beyond_cache
from sglang.tuning.upstream_experts import SideKernels
from sglang.tuning.upstream_experts import predict as predict_experts


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
    row = finder(op, tables_of(arch)) if finder is not None else None
    if row is None:
        return None
    measured, exact, table = row
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
        row = _at(tables, f"experts/{form}/{op.hidden}x{count}x{top_k}", op.intermediate, op.tokens)
        if row is not None:
            return row[0], row[1] and count == op.num_experts, row[2]
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
    tables = tables_of(arch)
    if isinstance(op, Linear):
        return _interpolated(tables, f"product/{_form(op.scheme)[0]}/sglang", op.tokens, op.rows, op.cols)
    if isinstance(op, DecodeAttention):
        return _sglang_decode(op.keys, tables)
    if isinstance(op, ExtendAttention) and not op.prompt.prefix:
        return _sglang_prompt(op.prompt, tables)
    if isinstance(op, Experts) and op.scheme in (None, "fp8_block") and not op.bias:
        layer = EvenExperts(op)
        return predict_experts(layer, arch, constants_of(arch), SideKernels(), True), "its Triton kernels, predicted"
    return None


@dataclass(frozen=True, slots=True)
class EvenExperts:
    """An op as `upstream_experts` takes it."""

    op: Experts

    @property
    def scheme(self) -> str:
        return self.op.scheme or "bf16"

    @property
    def num_tokens(self) -> int:
        return self.op.tokens

    @property
    def hidden(self) -> int:
        return self.op.hidden

    @property
    def intermediate(self) -> int:
        return self.op.intermediate

    @property
    def num_experts(self) -> int:
        return self.op.num_experts

    @property
    def top_k(self) -> int:
        return self.op.top_k

    @property
    def pairs(self) -> int:
        return self.op.pairs


def _interpolated(tables: _Tables, name: str, *sizes: float) -> tuple[float, str] | None:
    row = _at(tables, name, *sizes)
    return None if row is None else (row[0], "interpolated")


_TRITON_GROUP = 5
"""Query heads to a kv head with which SGLang took its own kernel at head dim 128."""


def _flashinfer(op: str, dims: tuple[int, int], group: int, item: int) -> str | None:
    """The table, where SGLang takes FlashInfer."""
    if dims not in ((128, 128), (256, 256)) or (dims[0] == 128 and group == _TRITON_GROUP):
        return None
    return f"{op}/{dims[0]}/{'fp8' if item == 1 else 'bf16'}/sglang/{'alone' if group == 1 else 'shared'}"


def _sglang_decode(keys: Keys, tables: _Tables) -> tuple[float, str] | None:
    table = _flashinfer("decode_attention", (keys.head_dim, keys.v_head_dim), keys.group, keys.item)
    if table is not None:
        return _interpolated(tables, table, keys.batch * keys.kv_heads, keys.context)
    if upstream.decode_key(keys) not in upstream.DECODE_TIMES:
        return None
    times = upstream.DECODE_TIMES[upstream.decode_key(keys)]
    return decode_seconds(keys, upstream.decode_pieces(keys), times), "its Triton kernel, predicted"


def _sglang_prompt(prompt: Prompt, tables: _Tables) -> tuple[float, str] | None:
    group = prompt.heads // prompt.kv_heads
    table = _flashinfer("extend_attention", (prompt.head_dim, prompt.v_head_dim), group, prompt.item)
    if table is not None and not prompt.window:
        return _interpolated(tables, table, prompt.batch * prompt.heads, prompt.new)
    if upstream.prompt_key(prompt) not in upstream.PROMPT_TIMES:
        return None
    times = upstream.PROMPT_TIMES[upstream.prompt_key(prompt)]
    return prompt_seconds(prompt, upstream.prompt_tile(prompt), times), "its Triton kernel, predicted"
