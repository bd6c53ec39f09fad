"""States of many layers go on by the tokens of a verified step that stand: one launch for the states of recurrences,
and one for those of convolutions, whatever the number of layers.

A layer's tensors are found by their addresses, a row of a table for each layer, in the order of the fields of
`step_kernels.VerifiedRows`. The arguments of the same names say only of which type they are. Memory-bound: a state is
read once and written once. References: `reference.commit_states`, `reference.commit_conv`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sglang.srt.blocks.recurrent_state.kernels.state_verify import VERIFY_TILE
from sglang.srt.blocks.recurrent_state.rule import Rule
from sglang.srt.blocks.recurrent_state.step_kernels import VerifiedRows

NUM_ADDRESSES = 7
CONV_TILE = {"BLOCK": 512, "num_warps": 4}


@triton.jit
def _tensor_of(addresses, layer, FIELD: tl.constexpr, like, NUM_ADDRESSES: tl.constexpr):
    """The pointer to a layer's tensor, of the type of `like`."""
    return tl.load(addresses + layer * NUM_ADDRESSES + FIELD).to(like.dtype)


@triton.jit
def _loaded(
    k, v, betas, log_decays, row, head, heads, group, token_stride, k_cols, v_cols, K: tl.constexpr, V: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """A row's key, value, gate and decay."""
    key = tl.load(k + row * token_stride + (head // group) * K + k_cols, mask=k_cols < K, other=0.0)
    value = tl.load(v + row * token_stride + head * V + v_cols, mask=v_cols < V, other=0.0)
    beta = tl.load(betas + row * heads + head)
    if BY_CHANNEL:
        decay = tl.load(log_decays + (row * heads + head) * K + k_cols, mask=k_cols < K, other=0.0)
    else:
        decay = tl.load(log_decays + row * heads + head)
    return key, value, beta, decay


@triton.jit(
    do_not_specialize=["width"],
    do_not_specialize_on_alignment=["slots", "counts", "states", "k", "v", "log_decays", "betas"],
)
def commit_states_kernel(
    addresses, states, k, v, log_decays, betas, slots, counts, width, heads, group, token_stride, slot_stride,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, DELTA: tl.constexpr,
    BY_CHANNEL: tl.constexpr, NUM_ADDRESSES: tl.constexpr,
):  # fmt: skip
    """Computes the state as `state_step_kernel` and `channel_step_kernel` do. Grid: (blocks of V times heads, B,
    layers). Rows of slot 0 are padding."""
    V_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head, request = tl.program_id(0) // V_BLOCKS, tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2)
    slot = tl.load(slots + request).to(tl.int64)
    if slot <= 0:
        return
    count = tl.load(counts + request)
    own_states = tl.multiple_of(_tensor_of(addresses, layer, 0, states, NUM_ADDRESSES), 16)
    own_k = _tensor_of(addresses, layer, 3, k, NUM_ADDRESSES)
    own_v = _tensor_of(addresses, layer, 4, v, NUM_ADDRESSES)
    own_decays = _tensor_of(addresses, layer, 5, log_decays, NUM_ADDRESSES)
    own_betas = _tensor_of(addresses, layer, 6, betas, NUM_ADDRESSES)
    k_cols = tl.arange(0, BLOCK_K)
    v_cols = (tl.program_id(0) % V_BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_ok, v_ok = k_cols < K, v_cols < V
    tile = own_states + slot * slot_stride + head * K * V + k_cols[:, None] * V + v_cols[None, :]
    tile_ok = k_ok[:, None] & v_ok[None, :]
    state = tl.load(tile, mask=tile_ok, other=0.0).to(tl.float32)
    # Of the next row all is loaded before this one is computed.
    first = request * width
    next_key, next_value, next_beta, next_decay = _loaded(
        own_k, own_v, own_betas, own_decays, first, head, heads, group, token_stride, k_cols, v_cols, K, V, BY_CHANNEL
    )
    for i in range(count):
        key, value, beta, decay = next_key.to(tl.float32), next_value.to(tl.float32), next_beta, next_decay
        after = first + tl.minimum(i + 1, count - 1)
        next_key, next_value, next_beta, next_decay = _loaded(
            own_k, own_v, own_betas, own_decays, after, head, heads, group, token_stride, k_cols, v_cols, K, V,
            BY_CHANNEL,
        )  # fmt: skip
        if BY_CHANNEL:
            state *= tl.exp(decay)[:, None]
        else:
            state *= tl.exp(decay)
        new = value
        if DELTA:
            new = value - tl.sum(state * key[:, None], 0)
        state += key[:, None] * (new * beta)[None, :]
        state = state.to(states.dtype.element_ty).to(tl.float32)
    tl.store(tile, state.to(states.dtype.element_ty), mask=tile_ok)


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["slots", "counts", "states", "x"])
def commit_conv_kernel(
    addresses, states, x, slots, counts, width, channels, slot_stride, ENTRIES: tl.constexpr, BLOCK: tl.constexpr,
    NUM_ADDRESSES: tl.constexpr,
):  # fmt: skip
    """The last `ENTRIES` inputs of each request. Grid: (blocks of channels, B, layers)."""
    request, layer = tl.program_id(1).to(tl.int64), tl.program_id(2)
    slot = tl.load(slots + request).to(tl.int64)
    if slot <= 0:
        return
    count = tl.load(counts + request)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = cols < channels
    state = _tensor_of(addresses, layer, 1, states, NUM_ADDRESSES) + slot * slot_stride + cols
    rows = _tensor_of(addresses, layer, 2, x, NUM_ADDRESSES) + request * width * channels + cols
    # From the oldest entry on: with few tokens an entry moves to a place that was read before.
    for entry in tl.static_range(ENTRIES):
        last = count - ENTRIES + entry
        recent = tl.load(rows + last * channels, mask=exists & (last >= 0), other=0.0).to(states.dtype.element_ty)
        older = tl.load(state + (last + ENTRIES) * channels, mask=exists & (last < 0), other=0.0)
        tl.store(state + entry * channels, tl.where(last >= 0, recent, older), mask=exists)


def commit_states(
    rule: Rule,
    layers: Sequence[VerifiedRows],
    addresses: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    width: int,
) -> None:
    """Advances the states of the requests `slots` [B] int64 by the first `counts` [B] int32 of their `width` tokens, in
    all `layers`, which differ only in their tensors' addresses [L, NUM_ADDRESSES] int64. Rows of slot 0 are padding.
    CUDA-graph safe."""
    first, batch = layers[0], len(counts)
    if batch == 0:
        return
    (heads, value_dim), (key_heads, key_dim) = first.v.shape[1:], first.k.shape[1:]
    assert not any(layer.states.data_ptr() % 16 for layer in layers)
    assert len(first.v) == 1 or first.k.stride(0) == first.v.stride(0), "k and v are parts of one row"
    tile = VERIFY_TILE
    grid = (triton.cdiv(value_dim, tile["BLOCK_V"]) * heads, batch, len(layers))
    commit_states_kernel[grid](
        addresses, first.states, first.k, first.v, first.log_decays, first.betas, slots, counts, width, heads,
        heads // key_heads, first.v.stride(0), first.states.stride(0), K=key_dim, V=value_dim,
        BLOCK_K=triton.next_power_of_2(key_dim), DELTA=rule.delta, BY_CHANNEL=rule.by_channel,
        NUM_ADDRESSES=NUM_ADDRESSES, **tile,
    )  # fmt: skip


def commit_conv(
    layers: Sequence[VerifiedRows], addresses: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor, width: int
) -> None:
    """Advances the convolutions' last inputs; as `commit_states`."""
    first, batch = layers[0], len(counts)
    if batch == 0:
        return
    entries, channels = first.conv_states.shape[1:]
    grid = (triton.cdiv(channels, CONV_TILE["BLOCK"]), batch, len(layers))
    commit_conv_kernel[grid](
        addresses, first.conv_states, first.x, slots, counts, width, channels, first.conv_states.stride(0),
        ENTRIES=entries, NUM_ADDRESSES=NUM_ADDRESSES, **CONV_TILE,
    )  # fmt: skip
