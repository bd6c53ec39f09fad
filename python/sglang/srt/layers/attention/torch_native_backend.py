"""Attention in plain torch: the CPU backend, and the reference for the others.

Softmax and products are fp32. Work is cut into pieces with small score matrices, so memory is bounded for any length.
All keys and values are read from the cache, the new tokens' too. It needs lengths on the host, so it cannot be
captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang.srt.layers.attention.attention_layer import AttentionLayer
from sglang.srt.layers.native_ops import load_cache
from sglang.srt.layers.step_rows import DecodeRows

if TYPE_CHECKING:
    from sglang.srt.layers.step_rows import ExtendRows
    from sglang.srt.mem_cache.memory_pool import CacheStore
    from sglang.srt.plan.layer_spec import AttentionShape, AttentionSite
    from sglang.srt.plan.plan import Plan

_MAX_SCORES = 1 << 23
"""Elements of one piece's score matrix (32 MiB in fp32)."""


class TorchNativeAttnBackend:
    """Implements AttentionBackend and PartBackend. Keeps nothing between steps."""

    reads_new_tokens = True

    def __init__(self, plan: Plan, device: str | torch.device) -> None:
        del plan, device

    def part_builder(self, shape: AttentionShape, max_rows: int) -> NativeDecode:
        return NativeDecode()

    def decode_builder(self, site: AttentionSite) -> NativeDecode:
        return NativeDecode()

    def extend_builder(self, site: AttentionSite) -> NativeExtend:
        return NativeExtend()


class _OutsideGraphs:
    """Lengths are those on the host."""

    plans_on_host = True
    in_graphs = False


class NativeDecode(_OutsideGraphs):
    """Implements DecodeBuilder."""

    def build(self, rows: DecodeRows) -> NativeDecodeMetadata:
        assert rows.seq_lens_cpu is not None
        return NativeDecodeMetadata(rows, rows.seq_lens_cpu)

    def prepare_graphs(self, batch_sizes: tuple[int, ...]) -> None:
        raise NotImplementedError(
            "the torch_native attention backend cannot run in CUDA graphs; pass --disable-cuda-graph"
        )

    def build_in_graph(self, rows: DecodeRows) -> NativeDecodeMetadata:
        raise NotImplementedError("the torch_native attention backend cannot run in CUDA graphs")

    def refresh(self, rows: DecodeRows) -> None:
        raise NotImplementedError("the torch_native attention backend cannot run in CUDA graphs")


class NativeExtend(_OutsideGraphs):
    """Implements ExtendBuilder."""

    def build(self, rows: ExtendRows, causal: bool = True) -> NativeExtendMetadata:
        return NativeExtendMetadata(rows, causal)

    def num_parts(self, new_lens: Sequence[int], prefix_lens: Sequence[int]) -> int:
        return 1


@dataclass(slots=True)
class NativeExtendMetadata:
    """Implements ExtendMetadata."""

    rows: ExtendRows
    causal: bool

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        extend = self.rows
        start = int(extend.start_loc[0])
        slots = extend.req_pool_indices.tolist()
        req_to_token = extend.token_slots[layer.cache.table].req_to_token
        for slot, prefix, new in zip(slots, extend.prefix_lens_cpu, extend.new_lens_cpu, strict=True):
            begin = _first_visible(prefix, layer)
            keys, values = _gather(layer.cache, req_to_token[slot, begin : prefix + new])
            step = max(1, _MAX_SCORES // (layer.num_heads * (prefix + new - begin)))
            for first in range(0, new, step):
                rows = slice(start + first, start + min(first + step, new))
                last = prefix + first + rows.stop - rows.start
                end = last if self.causal else prefix + new
                positions = torch.arange(prefix + first, last, device=q.device)
                keys_at = torch.arange(begin, end, device=q.device)
                mask = _visible(positions, keys_at, layer, self.causal)
                distance_bias = None if bias is None else _bias_by_distance(bias[rows], positions, keys_at)
                out[rows] = attend(q[rows], keys[: end - begin], values[: end - begin], mask, layer, bias=distance_bias)
            start += new


@dataclass(slots=True)
class NativeDecodeMetadata:
    """Implements DecodeMetadata and PartMetadata."""

    rows: DecodeRows
    seq_lens: list[int]

    def attend(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
    ) -> None:
        if starts is not None:
            self._row_by_row(len(q) // len(starts), starts).attend(q, layer, out)
            return
        start = 0
        while start < len(q):
            group = _group(self.seq_lens, start, layer.num_heads)
            biased = None if bias is None else bias[group]
            out[group] = self._attend_group(q[group], layer, group, bias=biased)
            start = group.stop

    def _row_by_row(self, width: int, starts: torch.Tensor) -> NativeDecodeMetadata:
        """Returns the metadata of `width` rows for each request, from its start on, as decoding requests."""
        rows = self.rows
        ends = torch.minimum(starts[:, None] + torch.arange(1, width + 1), rows.seq_lens[:, None]).flatten()
        slots = rows.req_pool_indices.repeat_interleave(width)
        return NativeDecodeMetadata(DecodeRows(slots, ends.to(torch.int32), rows.token_slots), ends.tolist())

    def attend_part(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Attends as `dcp.PartMetadata` says."""
        start = 0
        while start < len(q):
            group = _group(self.seq_lens, start, q.shape[1])
            out[group] = self._attend_group(q[group], layer, group, lse[group])
            start = group.stop

    def _attend_group(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        group: slice,
        lse: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows, seq_lens = self.rows, self.seq_lens[group]
        lens = rows.seq_lens[group].long()
        key_positions = torch.arange(_first_visible(min(seq_lens) - 1, layer), max(seq_lens), device=q.device)
        slots = rows.req_pool_indices[group, None]
        mask = _visible(lens[:, None] - 1, key_positions, layer)
        # Other table entries are undefined: the query's own key is read in their place and masked.
        table = rows.token_slots[layer.cache.table].req_to_token
        loc = table[slots, torch.where(mask[:, 0], key_positions, lens[:, None] - 1)]
        keys, values = _gather(layer.cache, loc)
        distance_bias = None if bias is None else _bias_by_distance(bias[:, None], lens[:, None] - 1, key_positions)
        return attend(q[:, None], keys, values, mask, layer, None if lse is None else lse[:, None], distance_bias)[:, 0]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    layer: AttentionLayer,
    lse: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns attention [..., N, Hq, Dv] in the dtype of q. q [..., N, Hq, D], k [..., L, Hkv, D], v [..., L, Hkv, Dv],
    mask [..., N, L] bool, True if a query sees a key. Every query must see a key, unless `lse` [..., N, Hq] is given:
    it receives the log-sum-exps, and sinks are left out. bias [..., N, Hq, L] is added to the scores."""
    group = q.shape[-2] // layer.num_kv_heads
    # Query heads of one kv head become rows of one product: [..., Hkv, group * N, D].
    queries = torch.unflatten(q.float(), -2, (layer.num_kv_heads, group)).movedim(-4, -2).flatten(-3, -2)
    # With heads outermost in memory the products run several times faster on a CPU.
    keys, values = (x.transpose(-3, -2).contiguous().float() for x in (k, v))
    scores = (queries @ keys.transpose(-2, -1)) * layer.scale
    if layer.logit_cap > 0:
        scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
    scores = torch.unflatten(scores, -2, (group, -1))
    if bias is not None:
        scores = scores + torch.unflatten(bias.transpose(-3, -2), -3, (layer.num_kv_heads, group))
    scores = scores.masked_fill(~mask[..., None, None, :, :], float("-inf"))
    if lse is not None:
        sums = scores.logsumexp(dim=-1)
        lse.copy_(sums.flatten(-3, -2).transpose(-1, -2))
        probs = (scores - sums[..., None]).exp().nan_to_num(0.0)
    elif layer.sinks is None:
        probs = torch.softmax(scores, dim=-1)
    else:
        sinks = layer.sinks.float().view(layer.num_kv_heads, group, 1, 1).expand(*scores.shape[:-1], 1)
        probs = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]
    out = probs.flatten(-3, -2) @ values
    return torch.unflatten(out, -2, (group, -1)).movedim(-2, -4).flatten(-3, -2).to(q.dtype)


def _bias_by_distance(bias: torch.Tensor, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
    """Returns the bias of each key [..., N, Hq, L] fp32 from bias [..., N, Hq, E] by distance, with positions [..., N]
    and [L]; 0 for keys after the query or at distance E and more."""
    distance = (query_positions[..., None] - key_positions)[..., None, :]
    inside = (distance >= 0) & (distance < bias.shape[-1])
    index = distance.clamp(0, bias.shape[-1] - 1).expand(*bias.shape[:-1], -1)
    return bias.float().gather(-1, index).masked_fill(~inside, 0.0)


def _gather(cache: CacheStore, loc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns dequantized keys [..., Hkv, D] and values [..., Hkv, Dv] of the slots `loc` [...]."""
    scales = cache.group_scales()
    keys = load_cache(cache.k, loc, cache.k_scale, scales.get("k_group_scales"))
    return keys, load_cache(cache.v, loc, cache.v_scale, scales.get("v_group_scales"))


def _first_visible(position: int, layer: AttentionLayer) -> int:
    """Returns the first position that a query at `position` sees; earlier keys may be gone."""
    if layer.chunked:
        return position // layer.sliding_window * layer.sliding_window
    return max(0, position + 1 - layer.sliding_window) if layer.sliding_window > 0 else 0


def _visible(
    query_positions: torch.Tensor, key_positions: torch.Tensor, layer: AttentionLayer, causal: bool = True
) -> torch.Tensor:
    """Returns the mask [..., N, L] of query positions [..., N] and key positions [L]: causal, and within the sliding
    window or chunk if there is one."""
    window = layer.sliding_window
    distance = query_positions[..., None] - key_positions
    mask = distance >= (0 if causal else -len(key_positions))
    if layer.chunked:
        return mask & (key_positions >= (query_positions // window * window)[..., None])
    return mask & (distance < window) if window > 0 else mask


def _group(seq_lens: list[int], start: int, num_heads: int) -> slice:
    """Returns the longest run of requests from `start` whose padded score matrix stays within the limit; at least
    one."""
    longest, stop = seq_lens[start], start + 1
    while stop < len(seq_lens):
        longest = max(longest, seq_lens[stop])
        if (stop + 1 - start) * longest * num_heads > _MAX_SCORES:
            break
        stop += 1
    return slice(start, stop)
