"""Time of an op in SGLang 0.5.14 on an RTX PRO 6000 Server when a graph replays it with the same operands: from tables
of measured times, interpolated in multiples of `replays`, or by the models of its kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.hardware.arch import ArchTraits
from sglang.tuning import replays
from sglang.tuning import upstream_attention as upstream
from sglang.tuning.attention_model import Keys, Prompt, decode_seconds, prompt_seconds
from sglang.tuning.cost_model import constants_of
from sglang.tuning.grid import Grid
from sglang.tuning.measured import SAME_CARD, tables_of
from sglang.tuning.ops import (
    WITHOUT_GATE,
    AllReduce,
    CompressedAttention,
    DecodeAttention,
    Experts,
    ExtendAttention,
    GatedDeltaRule,
    HyperConnection,
    LatentAbsorb,
    Linear,
    Op,
)
from sglang.tuning.upstream_experts import SideKernels, predict_replayed

Tables = Mapping[str, Grid]
Known = tuple[float, str] | None
"""Seconds, and how that is known."""
TIMED = "interpolated"
PREDICTED = "its Triton kernel, predicted"


def time_by_sglang(op: Op, arch: ArchTraits, tables: Tables | None = None) -> Known:
    """Returns the time; None if nothing is known. `tables`: replace the shipped ones."""
    if SAME_CARD.get(arch.product or "", arch.product) != "rtx-pro-6000-server" or op.kind not in _KINDS:
        return None
    return _KINDS[op.kind](op, tables_of(arch) if tables is None else tables, arch)


def product_form(scheme: str | None) -> tuple[str, ...]:
    """Returns the form of tables with kernels for the same numbers; four-bit weights that are dequantized compare with
    16 bits."""
    if scheme is None:
        return ("bf16",)
    form = SCHEMES[scheme]
    if form.activation == "nvfp4":
        return ("nvfp4",)
    if scheme == "fp8_block":
        return ("fp8_block",)
    return ("fp8",) if form.element in ("e4m3", "int8") else ("bf16",)


def product_seconds(tables: Tables, name: str, op: Linear) -> float | None:
    """Returns the seconds of a product by the table `name` ("product/FORM/..."); None if the card has none."""
    if name not in tables:
        return None
    form = name.split("/")[1]

    def base(m: float, n: float, k: float) -> float:
        return replays.product(form, m, n, k)

    return tables[name].seconds(op.tokens, op.rows, op.cols, base=base)


def gated(num_experts: int, top_k: int) -> bool:
    """Returns whether the experts of a table have gates."""
    return (num_experts, top_k) not in WITHOUT_GATE


def expert_form(scheme: str | None) -> str:
    """Returns the weight form of a table of experts."""
    if scheme is None:
        return "bf16"
    form = SCHEMES[scheme]
    four = "nvfp4" if form.scale == "e4m3" else "int4" if form.element == "int4" else "mxfp4"
    return four if form.bits == 4 else "fp8"


# --- products and experts ---------------------------------------------------------------------------------------------


def _linear(op: Linear, tables: Tables, arch: ArchTraits) -> Known:
    seconds = product_seconds(tables, f"product/{product_form(op.scheme)[0]}/sglang", op)
    return None if seconds is None else (seconds, TIMED)


def _experts(op: Experts, tables: Tables, arch: ArchTraits) -> Known:
    """Returns the time of a measured model; for others, that of the cost model, or from similar measured models where
    no Triton kernel is used. SGLang uses FlashInfer's kernels for experts without a gate, also in 16 bits."""
    form = expert_form(op.scheme)
    table = tables.get(f"experts/{form}/{op.hidden}x{op.num_experts}x{op.top_k}/sglang")
    if table is not None and op.gate == gated(op.num_experts, op.top_k):
        return _layer(
            table, form, op, arch
        ), TIMED if form != "fp8" or op.scheme == "fp8_block" else f"{TIMED}, FP8 blocks"
    if op.gate and op.scheme in (None, "fp8_block"):
        layer = EvenExperts(op)
        return predict_replayed(layer, arch, constants_of(arch), SideKernels()), "its Triton kernels, predicted"
    return _like_others(op, form, tables, arch)


def _layer(table: Grid, form: str, op: Experts, arch: ArchTraits) -> float:
    """Returns the seconds of a layer of experts; between timed shards, in multiples of the model of its Triton kernels,
    where those are used."""

    def modelled(inter: float, tokens: float) -> float:
        scheme = None if form == "bf16" else "fp8_block"
        layer = EvenExperts(replace(op, tokens=round(tokens), intermediate=round(inter), scheme=scheme))
        return predict_replayed(layer, arch, constants_of(arch), SideKernels())

    def least(inter: float, tokens: float) -> float:
        return replays.expert_layer(form, tokens, op.num_experts, op.top_k, op.hidden, inter, op.matrices)

    by_model = op.gate and form in ("bf16", "fp8")
    return table.seconds(op.intermediate, op.tokens, base=modelled if by_model else least)


def _like_others(op: Experts, form: str, tables: Tables, arch: ArchTraits) -> Known:
    """Returns a time derived from experts of other models with the same number of tokens, in multiples of the lower
    bound: a mean weighted by similarity of sizes. Without a gate, uses those without, if any were timed."""
    timed = {
        (hidden, count, top_k): table
        for name, table in tables.items()
        if name.startswith(f"experts/{form}/") and name.endswith("/sglang")
        for hidden, count, top_k in [map(int, name.split("/")[2].split("x"))]
    }
    alike = {sizes: table for sizes, table in timed.items() if gated(*sizes[1:]) == op.gate}
    total, logs = 0.0, 0.0
    for (hidden, count, top_k), table in (alike or timed).items():
        tokens = op.pairs / op.num_experts * count / top_k
        gate = gated(count, top_k)
        other = Experts(max(1, round(tokens)), count, top_k, hidden, op.intermediate, op.scheme, gate=gate)
        minimum = replays.expert_layer(form, other.tokens, count, top_k, hidden, op.intermediate, other.matrices)
        apart = abs(math.log2(hidden / op.hidden)) + abs(math.log2(count / op.num_experts))
        weight = 1.0 / (0.25 + apart) ** 2
        total, logs = total + weight, logs + weight * math.log(_layer(table, form, other, arch) / minimum)
    if not total:
        return None
    sizes = (op.tokens, op.num_experts, op.top_k, op.hidden, op.intermediate)
    minimum = replays.expert_layer(form, *sizes, op.matrices)
    return minimum * math.exp(logs / total), "as experts of other models"


@dataclass(frozen=True, slots=True)
class EvenExperts:
    """An op in the interface of `upstream_experts`."""

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


# --- attention --------------------------------------------------------------------------------------------------------

_LLAMA_4 = frozenset({(5, 1), (10, 2), (20, 4)})
"""Query and kv heads of head dim 128 that were timed with SGLang's own kernel: shards of Llama 4, to which it gives
that kernel because of its windows. The kernel follows from the model: the same 40 and 8 heads whole, or other groups of
five, take FlashInfer's in a model without windows."""


def _flashinfer(op: str, sizes: Keys | Prompt, tables: Tables) -> Grid | None:
    """Returns the table's time where SGLang uses FlashInfer."""
    dims, item = (sizes.head_dim, sizes.v_head_dim), sizes.item
    if dims not in ((128, 128), (256, 256)) or (dims[0] == 128 and (sizes.heads, sizes.kv_heads) in _LLAMA_4):
        return None
    return tables.get(f"{op}/{dims[0]}/{'fp8' if item == 1 else 'bf16'}/sglang")


def _decode(op: DecodeAttention, tables: Tables, arch: ArchTraits) -> Known:
    keys: Keys = op.keys
    table = _flashinfer("decode_attention", keys, tables)
    if table is not None:

        def base(shared: float, streams: float, context: float) -> float:
            return replays.decode(streams, context, shared, keys.row * keys.item)

        return table.seconds(keys.group, keys.batch * keys.kv_heads, keys.context, base=base), TIMED
    if upstream.decode_key(keys) not in upstream.DECODE_TIMES:
        return None
    times = upstream.DECODE_TIMES[upstream.decode_key(keys)]
    return decode_seconds(keys, upstream.decode_pieces(keys), times), PREDICTED


def _extend(op: ExtendAttention, tables: Tables, arch: ArchTraits) -> Known:
    prompt: Prompt = op.prompt
    if prompt.prefix:
        return None
    group = prompt.heads // prompt.kv_heads
    table = _flashinfer("extend_attention", prompt, tables)
    if table is not None and not prompt.window:

        def base(shared: float, streams: float, new: float) -> float:
            return replays.prompt(streams, new, prompt.head_dim + prompt.v_head_dim)

        return table.seconds(group, prompt.batch * prompt.heads, prompt.new, base=base), TIMED
    if prompt.window >= prompt.new and upstream.prompt_key(prompt) not in upstream.PROMPT_TIMES:
        prompt = replace(prompt, window=0)  # models with windows use its own kernel, even if the window masks nothing
    if upstream.prompt_key(prompt) not in upstream.PROMPT_TIMES:
        return None
    times = upstream.PROMPT_TIMES[upstream.prompt_key(prompt)]
    return prompt_seconds(prompt, upstream.prompt_tile(prompt), times), PREDICTED


def _compressed(op: CompressedAttention, tables: Tables, arch: ArchTraits) -> Known:
    kind, form = "csa" if op.rate == 4 else "hca", "bf16" if op.scheme is None else "fp8_block"
    if op.rate not in (4, 128):
        return None
    if op.new == 1:
        table = tables.get(f"compressed_attention/decode/{kind}/{form}/sglang")

        def by_request(heads: float, batch: float, context: float) -> float:
            return 1e-4 * batch

        known = table and table.seconds(op.heads, op.batch, op.context, base=by_request)
    else:
        table = tables.get(f"compressed_attention/prompt/{kind}/{form}/sglang")

        def by_chunk(heads: float, tokens: float, chunks: float) -> float:
            return 2e-5 * tokens * (0.7 + 0.3 * chunks)

        chunks = -(-op.context // op.CHUNK)
        known = table and table.seconds(op.heads, op.batch * op.new, chunks, base=by_chunk)
    return (known, "with its projections, interpolated") if known else None


# --- the rest ---------------------------------------------------------------------------------------------------------


def _absorb(op: LatentAbsorb, tables: Tables, arch: ArchTraits) -> Known:
    table = tables.get(f"latent_absorb/mla_gen_{'pre' if op.rows >= op.cols else 'post'}/sglang")

    def base(heads: float, tokens: float) -> float:
        usual = LatentAbsorb(int(tokens), int(heads), 512, 128)
        return replays.replayed(usual.num_bytes, usual.operations)

    if table is None:
        return None
    usual = table.seconds(op.heads, op.tokens, base=base)
    ratio = replays.replayed(op.num_bytes, op.operations) / base(op.heads, op.tokens)
    return usual * ratio, TIMED


def _gated_delta(op: GatedDeltaRule, tables: Tables, arch: ArchTraits) -> Known:
    table = tables.get(f"gated_delta_rule/{'decode' if op.tokens == 1 else 'prompt'}/sglang")
    if table is None:
        return None
    if op.tokens == 1:

        def base(heads: float, batch: float) -> float:
            return replays.states(heads, batch, 1)

        return table.seconds(op.heads, op.batch, base=base), TIMED
    return table.seconds(op.heads, op.batch, op.tokens, base=replays.states), TIMED


def _hyper(op: HyperConnection, tables: Tables, arch: ArchTraits) -> Known:
    parts = [tables.get(f"hyper_connection/{part}/sglang") for part in ("pre", "post")]

    def base(hidden: float, tokens: float) -> float:
        return replays.replayed(20.0 * tokens * hidden)

    if op.streams != 4 or None in parts:
        return None
    return sum(table.seconds(op.hidden, op.tokens, base=base) for table in parts if table), TIMED


def _all_reduce(op: AllReduce, tables: Tables, arch: ArchTraits) -> Known:
    table = tables.get("all_gather/nccl" if op.kind == "all_gather" else "all_reduce/sglang")
    if table is None or op.ranks not in (2, 4, 8):
        return None
    return table.seconds(op.ranks, max(256, op.size)), TIMED


_KINDS: Mapping[str, Callable[[Any, Tables, ArchTraits], Known]] = {
    "linear": _linear,
    "fused_moe": _experts,
    "decode_attention": _decode,
    "extend_attention": _extend,
    "compressed_attention": _compressed,
    "latent_absorb": _absorb,
    "gated_delta_rule": _gated_delta,
    "hyper_connection": _hyper,
    "all_reduce": _all_reduce,
    "all_gather": _all_reduce,
    "quantized_sum": _all_reduce,
}
