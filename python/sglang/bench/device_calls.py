"""Launches this server's kernels for one op of `sglang.tuning.ops`, with random data in rotating buffers.

`calls_of` launches what the tables choose. With a `Launch` another kernel or tile of the op is launched, and
`Launches.problem` compares its result with the op's reference (`sglang.bench.references`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sglang.bench import references
from sglang.bench.device_time import Call
from sglang.srt.configs.activation import GPT_OSS_SWIGLU, SILU
from sglang.srt.configs.quant_scheme import SCHEMES, Scheme
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.spec import Need, Tile
from sglang.srt.kernels.tile_configs import TileConfig, TileConfigs
from sglang.srt.kernels.tiles import attention_tiles
from sglang.srt.layers.moe.expert_weights import ELEMENT_DTYPES, SCALE_DTYPES, ExpertWeights, repack
from sglang.srt.layers.moe.fused_moe_triton.expert_tile_configs import triton_tile_configs
from sglang.srt.layers.quantization.linear_weight import LinearWeight
from sglang.tuning.ops import DecodeAttention, Experts, ExtendAttention, GatedDeltaRule, LatentAbsorb, Linear, Op
from sglang.tuning.served_attention import SERVED_CONTEXT

COLD_BYTES = 512 << 20
"""Rotating buffers together exceed every cache."""
MAX_COPIES, MAX_ROUTINGS = 64, 8
RUN = 64  # tokens that lie next to each other in the cache


@dataclass(frozen=True, slots=True)
class Launch:
    """What is launched in the place of the tables' choice: a tile config of a product, a tile of attention, or a
    kernel by its name. Nothing of it: what the tables choose."""

    config: TileConfig | None = None
    tile: Tile | None = None
    kernel: str = ""

    @property
    def configs(self) -> TileConfigs | None:
        """Returns the tile config as that of steps of any size."""
        return None if self.config is None else (self.config,)


AS_TABLES = Launch()
Check = Callable[[torch.Tensor], str]
"""Compares the result of the first call with the reference. Returns what is wrong with it, or ""."""


@dataclass(frozen=True, slots=True)
class Launches:
    """The calls of an op, each with its own buffers, and the check of the first one's result."""

    calls: list[Call]
    check: Check | None = None

    def problem(self) -> str:
        """Runs the first call and returns what is wrong with its result; "" if it is the reference's."""
        result = self.calls[0]()
        assert isinstance(result, torch.Tensor) and self.check is not None, "the op has no reference here"
        return self.check(result)


def calls_of(op: Op, arch: ArchTraits, device: str) -> list[Call] | None:
    """Returns the launches; None for an op that needs several cards, or that is not supported here."""
    launches = launches_of(op, arch, device)
    return None if launches is None else launches.calls


def launches_of(op: Op, arch: ArchTraits, device: str, launch: Launch = AS_TABLES) -> Launches | None:
    """Returns the launches of an op; None as in `calls_of`."""
    maker = _MAKERS.get(op.kind)
    return None if maker is None else maker(op, arch, device, launch)


def _copies(num_bytes: float) -> int:
    return max(2, min(MAX_COPIES, int(COLD_BYTES // max(1.0, num_bytes)) + 1))


def _half(*shape: int, device: str) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()


def _linear(op: Linear, arch: ArchTraits, device: str, launch: Launch) -> Launches:
    from sglang.srt.layers.quantization.scaled_mm import quantized_linear
    from sglang.srt.layers.triton_ops import gemv, linear_tiles

    x = _half(op.tokens, op.cols, device=device)
    count = _copies(op.weights)
    if op.scheme is None:
        weights = [_half(op.rows, op.cols, device=device) for _ in range(count)]
        product_of = torch.nn.functional.linear if launch.kernel == "cublas" else gemv.linear
        plain: list[Call] = [lambda w=w: product_of(x, w) for w in weights]  # type: ignore[misc]
        return Launches(plain, references.of_plain_linear(x, weights[0]))
    scheme, shape = SCHEMES[op.scheme], (op.rows, op.cols, False)
    configs = launch.configs or linear_tiles.tile_configs_of(scheme, shape, arch)
    packed = [_linear_weight(scheme, op, device) for _ in range(count)]
    check = None if launch.config is None else references.of_linear(x, packed[0], arch, launch.config)
    products = [quantized_linear(weight, arch, configs) for weight in packed]
    return Launches([lambda product=product: product(x) for product in products], check)  # type: ignore[misc]


def _linear_weight(scheme: Scheme, op: Linear, device: str) -> LinearWeight:
    if scheme.group == (0, 0):  # held with a scale for each row
        scheme = SCHEMES["fp8_channel"]
    data, scale = _codes(scheme, (op.rows, op.cols), device)
    factor = torch.ones(op.rows, device=device) if scheme.global_scale else None
    needs_scale = scheme.activation in ("tensor", "nvfp4")
    return LinearWeight(data, scheme, scale, factor, torch.ones(1, device=device) if needs_scale else None)


def _codes(scheme: Scheme, shape: tuple[int, ...], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns random weights [..., N, K] without NaN, and scales of about one."""
    rows, cols = shape[-2:]
    data = torch.randint(0, 255, (*shape[:-1], cols * scheme.bits // 8), dtype=torch.uint8, device=device)
    if scheme.element == "e4m3":
        data &= 0xF7
    scale = torch.ones((*shape[:-2], *scheme.scale_shape(rows, cols)), device=device)
    if scheme.scale == "e8m0":
        return data.view(ELEMENT_DTYPES[scheme.element]), torch.full_like(scale, 120, dtype=torch.uint8)
    return data.view(ELEMENT_DTYPES[scheme.element]), scale.to(SCALE_DTYPES[scheme.scale])


def _experts(op: Experts, arch: ArchTraits, device: str, launch: Launch) -> Launches:
    from sglang.srt.layers.moe.fused_moe_triton.fused_moe import fused_moe
    from sglang.srt.layers.moe.fused_moe_triton.tiles import MIXED
    from sglang.srt.layers.moe.mixed_moe import fused_moe as mixed_moe

    w13 = _expert_weights(op, 2 * op.intermediate, op.hidden, arch, device)
    w2 = _expert_weights(op, op.hidden, op.intermediate, arch, device)
    shapes = ((2 * op.intermediate, op.hidden, op.bias), (op.hidden, op.intermediate, op.bias))
    need = Need("fused_moe", quant=op.scheme, shapes=shapes, experts=(op.num_experts, op.top_k, 1))
    configs = launch.configs or triton_tile_configs(need, arch).by_shape[None]
    x = _half(op.tokens, op.hidden, device=device)
    weights = torch.full((op.tokens, op.top_k), 1.0 / op.top_k, device=device)
    routings = [
        torch.rand((op.tokens, op.num_experts), device=device).topk(op.top_k).indices.int() for _ in range(MAX_ROUTINGS)
    ]
    activation = GPT_OSS_SWIGLU if op.bias else SILU
    product = mixed_moe if configs[0].variant == MIXED else fused_moe

    def call(ids: torch.Tensor) -> torch.Tensor:
        return product(x, w13, w2, weights, ids, activation, configs, arch.features)

    check = None
    if launch.config is not None:
        check = references.of_experts(x, (w13, w2), weights, routings[0], activation, arch, launch.config)
    return Launches([lambda ids=ids: call(ids) for ids in routings], check)  # type: ignore[misc]


def _expert_weights(op: Experts, rows: int, cols: int, arch: ArchTraits, device: str) -> ExpertWeights:
    bias = _half(op.num_experts, rows, device=device) if op.bias else None
    if op.scheme is None:
        return ExpertWeights(_half(op.num_experts, rows, cols, device=device) * cols**-0.5, bias=bias)
    scheme = SCHEMES[op.scheme]
    data, scale = _codes(scheme, (op.num_experts, rows, cols), device)
    factor = torch.ones(op.num_experts, device=device) if scheme.global_scale else None
    input_scale = torch.ones(1, device=device) if scheme.activation in ("tensor", "nvfp4") else None
    return repack(ExpertWeights(data, scheme, scale, factor, input_scale, bias), arch.features)


# --- attention --------------------------------------------------------------------------------------------------------


class _Caches:
    """Keys and values of `batch` requests with `context` tokens each, in disjoint parts that together exceed the L2."""

    def __init__(
        self, batch: int, context: int, kv_heads: int, dims: tuple[int, int], item: int, latent: bool, device: str
    ) -> None:
        row = kv_heads * (dims[0] if latent else sum(dims)) * item
        runs_each = max(1, math.ceil(context / RUN))
        self.parts = min(8, _copies(batch * max(1, context) * row))
        runs = self.parts * batch * runs_each
        dtype = torch.bfloat16 if item == 2 else torch.float8_e4m3fn
        slots = (runs + 1) * RUN
        self.k = torch.empty((slots, kv_heads, dims[0]), dtype=torch.bfloat16, device=device).normal_().to(dtype)
        values = torch.empty((slots, kv_heads, dims[1]), dtype=torch.bfloat16, device=device).normal_().to(dtype)
        self.v = self.k[..., : dims[1]] if latent else values
        order = torch.randperm(runs, device=device) + 1
        table = (order[:, None] * RUN + torch.arange(RUN, device=device)).int()
        self.tables = table.view(self.parts, batch, runs_each * RUN)
        self.rows = torch.arange(batch, device=device)


def _tile(op: str, dims: tuple[int, int], item: int, arch: ArchTraits, group: int = 0) -> dict[str, int]:
    tiles = attention_tiles(op, *dims, "bfloat16" if item == 2 else "fp8_e4m3", arch.features, group)
    return dict(tiles[0])


def _decode(op: DecodeAttention, arch: ArchTraits, device: str, launch: Launch) -> Launches:
    from sglang.srt.layers.attention.triton_ops.decode_attention import (
        DecodeWorkspace,
        decode_attention_fwd,
        plan_decode,
    )

    keys = op.keys
    dims = (keys.head_dim, keys.v_head_dim)
    caches = _Caches(keys.batch, keys.context, keys.kv_heads, dims, keys.item, keys.latent, device)
    tile = dict(launch.tile or _tile("decode_attention", dims, keys.item, arch, keys.group))
    seq_lens = torch.full((keys.batch,), keys.context, dtype=torch.int32, device=device)
    workspace = DecodeWorkspace.allocate(
        keys.batch, keys.heads, keys.kv_heads, keys.v_head_dim, max(1, arch.num_sms), tile, device,
        max(SERVED_CONTEXT, keys.context),
    )  # fmt: skip
    plan = plan_decode(seq_lens, workspace, tile)  # once a step, for all layers: not timed
    q = _half(keys.batch, keys.heads, keys.head_dim, device=device)
    out = _half(keys.batch, keys.heads, keys.v_head_dim, device=device)

    def call(part: int) -> torch.Tensor:
        decode_attention_fwd(
            q, out, caches.k, caches.v, caches.tables[part], caches.rows, seq_lens, plan,
            scale=keys.head_dim**-0.5, tile=tile,
        )  # fmt: skip
        return out

    check = references.of_decode(q, caches.k, caches.v, caches.tables[0][:, : keys.context])
    return Launches([lambda part=part: call(part) for part in range(caches.parts)], check)  # type: ignore[misc]


def _extend(op: ExtendAttention, arch: ArchTraits, device: str, launch: Launch) -> Launches:
    from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd

    prompt = op.prompt
    dims = (prompt.head_dim, prompt.v_head_dim)
    caches = _Caches(prompt.batch, max(1, prompt.prefix), prompt.kv_heads, dims, prompt.item, False, device)
    tile = dict(launch.tile or _tile("extend_attention", dims, prompt.item, arch))
    tokens = prompt.batch * prompt.new
    q = _half(tokens, prompt.heads, dims[0], device=device)
    k, v = (_half(tokens, prompt.kv_heads, dim, device=device) for dim in dims)
    out = _half(tokens, prompt.heads, dims[1], device=device)
    prefix = torch.full((prompt.batch,), prompt.prefix, dtype=torch.int32, device=device)
    start = torch.arange(0, tokens + 1, prompt.new, dtype=torch.int32, device=device)

    def call(part: int) -> torch.Tensor:
        extend_attention_fwd(
            q, k, v, out, caches.k, caches.v, caches.tables[part], caches.rows, prefix, start,
            scale=dims[0] ** -0.5, tile=tile, sliding_window=prompt.window, has_prefix=prompt.prefix > 0,
        )  # fmt: skip
        return out

    check = None  # windows are timed only
    if not prompt.window:
        cached = caches.tables[0][0, : prompt.prefix]
        check = references.of_extend(q, k, v, caches.k[cached], caches.v[cached], prompt.new)
    return Launches([lambda part=part: call(part) for part in range(caches.parts)], check)  # type: ignore[misc]


# --- the rest ---------------------------------------------------------------------------------------------------------


def _absorb(op: LatentAbsorb, arch: ArchTraits, device: str, launch: Launch) -> Launches:
    x = _half(op.heads, op.tokens, op.cols, device=device)
    weights = [_half(op.heads, op.cols, op.rows, device=device) for _ in range(_copies(op.num_bytes))]
    return Launches([lambda w=w: torch.bmm(x, w) for w in weights])  # type: ignore[misc]


def _gated_delta(op: GatedDeltaRule, arch: ArchTraits, device: str, launch: Launch) -> Launches:
    """Returns the call with random gates, and queries and keys of length 1."""
    from sglang.srt.blocks.recurrent_state.kernels import recurrence
    from sglang.srt.blocks.recurrent_state.rule import gated_delta_rule

    rule, tokens, keys = gated_delta_rule(op.key_dim), op.batch * op.tokens, op.key_heads * op.key_dim
    rows = _half(tokens, 2 * keys + op.heads * op.value_dim, device=device)
    rows[:, : 2 * keys] *= op.key_dim**-0.5
    parts = rows.split([keys, keys, op.heads * op.value_dim], dim=-1)
    q, k, v = (
        part.unflatten(-1, (-1, d)) for part, d in zip(parts, (op.key_dim, op.key_dim, op.value_dim), strict=True)
    )
    a, b = _half(tokens, 2 * op.heads, device=device).split([op.heads, op.heads], dim=-1)
    a_log, dt_bias = torch.randn(2, op.heads, device=device).unbind()
    out = _half(tokens, op.heads, op.value_dim, device=device)
    parts_of_pool = min(8, _copies(2.0 * op.batch * op.heads * op.key_dim * op.value_dim * op.state_item))
    dtype = torch.float32 if op.state_item == 4 else torch.bfloat16
    pool = torch.zeros((parts_of_pool * op.batch + 1, op.heads, op.key_dim, op.value_dim), dtype=dtype, device=device)
    all_slots = 1 + torch.arange(parts_of_pool * op.batch, device=device).view(parts_of_pool, op.batch)
    prefix = torch.zeros(op.batch, dtype=torch.int32, device=device)
    start = torch.arange(op.batch + 1, dtype=torch.int32, device=device) * op.tokens

    def call(slots: torch.Tensor) -> None:
        given = (rule, q, k, v, a, b, a_log, dt_bias, None, pool)
        if op.tokens == 1:
            recurrence.RECURRENCE.decode(*given, slots, out, max(1, arch.num_sms))
        else:
            recurrence.RECURRENCE.extend(*given, slots, slots, prefix, start, out, max(1, arch.num_sms))

    return Launches([lambda slots=slots: call(slots) for slots in all_slots.unbind()])  # type: ignore[misc]


_MAKERS: Mapping[str, Callable[[Any, ArchTraits, str, Launch], Launches]] = {
    "linear": _linear,
    "fused_moe": _experts,
    "decode_attention": _decode,
    "extend_attention": _extend,
    "latent_absorb": _absorb,
    "gated_delta_rule": _gated_delta,
}
