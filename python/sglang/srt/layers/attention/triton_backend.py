"""Attention with this project's Triton kernels, for every head dim and cache dtype in the tile table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.layers.attention.triton_ops.decode_attention import (
    DecodePlan,
    DecodeWorkspace,
    decode_attention_fwd,
    keep_all_pieces,
    plan_decode,
)
from sglang.srt.layers.attention.triton_ops.decode_biased import decode_biased_fwd
from sglang.srt.layers.attention.triton_ops.decode_fp4 import decode_fp4_fwd
from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd
from sglang.srt.layers.attention.triton_ops.extend_biased import extend_biased_fwd
from sglang.srt.layers.attention.triton_ops.extend_fp4 import extend_fp4_fwd
from sglang.srt.layers.attention.triton_ops.prefix_parts import WHOLE, PrefixParts, count_parts

if TYPE_CHECKING:
    from sglang.srt.kernels.launch import FallbackTiles
    from sglang.srt.kernels.spec import Tile
    from sglang.srt.layers.attention.attention_layer import AttentionLayer
    from sglang.srt.layers.step_rows import DecodeRows, ExtendRows, VerifyRows
    from sglang.srt.plan.layer_spec import AttentionShape, AttentionSite
    from sglang.srt.plan.plan import Plan


class TritonAttnBackend:
    """Implements AttentionBackend and PartBackend. Sites of the same shape share builders, with and without a window,
    because the kernels skip the keys outside a window."""

    reads_new_tokens = False

    def __init__(self, plan: Plan, device: torch.device | str) -> None:
        self._plan, self._device = plan, device
        self._decode: dict[AttentionShape, TritonDecode] = {}
        self._extend: dict[tuple[AttentionShape, bool], TritonExtend] = {}

    def decode_builder(self, site: AttentionSite) -> TritonDecode:
        if site.shape not in self._decode:
            self._decode[site.shape] = TritonDecode(
                self._plan, site.shape, self._device, self._plan.max_running_requests
            )
        return self._decode[site.shape]

    def part_builder(self, shape: AttentionShape, max_rows: int) -> TritonDecode:
        return TritonDecode(self._plan, shape, self._device, max_rows, parts=True)

    def extend_builder(self, site: AttentionSite) -> TritonExtend:
        key = site.shape, site.dcp_size == 1
        if key not in self._extend:
            self._extend[key] = TritonExtend(self._plan, *key, self._device)
        return self._extend[key]


class _SplitContexts:
    """Base of builders that split the keys of long contexts between programs. The split of a step is planned on the
    device from the requests' lengths, also inside a graph, so that a replay needs no work on the host."""

    workspaces: Mapping[int, DecodeWorkspace]
    """Workspaces by the number of new tokens per sequence. Steps use them one after the other."""

    def __init__(self, plan: Plan, shape: AttentionShape, device: torch.device | str, max_rows: int) -> None:
        self.shape, self.max_rows = shape, max_rows
        self.fallbacks = plan.fallbacks(plan.attention_op("decode_attention", shape))
        self.tile = self.fallbacks.tile
        self.num_sms, self.context_len = plan.arch.num_sms, plan.context_len
        self.device = device
        self._replaced: list[Mapping[int, DecodeWorkspace]] = []
        """Workspaces of tiles that failed to launch, kept alive because graphs captured earlier write there."""

    def sizes(self) -> tuple[int, int, int, int, int, Tile, torch.device | str, int]:
        """Returns the arguments of `DecodeWorkspace.allocate`."""
        shape = self.shape
        heads = (shape.num_heads, shape.num_kv_heads, shape.v_head_dim)
        return (self.max_rows, *heads, self.num_sms, self.tile, self.device, self.context_len)

    def allocate(self) -> None:
        """Creates new workspaces for `max_rows` and `tile`."""
        raise NotImplementedError

    def step_down(self, tile: Tile, make_plan: Callable[[], DecodePlan]) -> DecodePlan:
        """Switches to another tile for good, with new workspaces, and returns this step's new plan."""
        if tile is not self.tile:
            self.tile = tile
            self._replaced.append(self.workspaces)
            self.allocate()
        plan = make_plan()
        plan.part_lse.zero_()  # some launch must lie between plan and reader (`plan_decode`); q is computed already
        return plan


class TritonDecode(_SplitContexts):
    """Builds decode metadata. Implements DecodeBuilder and PartBuilder."""

    plans_on_host = False
    in_graphs = True

    def __init__(
        self, plan: Plan, shape: AttentionShape, device: torch.device | str, max_rows: int, parts: bool = False
    ) -> None:
        """parts: rows may have no tokens, and `attend_part` is called instead of `attend`."""
        super().__init__(plan, shape, device, max_rows)
        self.parts = parts
        self.allocate()

    def allocate(self) -> None:
        self.workspaces = {1: DecodeWorkspace.allocate(*self.sizes())}

    def prepare_graphs(self, batch_sizes: tuple[int, ...]) -> None:
        if batch_sizes[-1] > self.max_rows:
            self.max_rows = batch_sizes[-1]
            self.allocate()

    def build(self, rows: DecodeRows) -> TritonDecodeMetadata:
        return TritonDecodeMetadata(self, rows, self.plan(rows))

    def plan(self, rows: DecodeRows) -> DecodePlan:
        """Returns a new plan of the rows' split, made on the device."""
        plan = plan_decode(rows.seq_lens, self.workspaces[1], self.tile)
        if self.parts:
            keep_all_pieces(plan)
        return plan

    build_in_graph = build

    def refresh(self, rows: DecodeRows) -> None:
        raise AssertionError("nothing is planned on the host")


@dataclass(slots=True)
class TritonDecodeMetadata:
    """Implements DecodeMetadata and PartMetadata."""

    builder: TritonDecode
    rows: DecodeRows
    plan: DecodePlan

    def attend(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
    ) -> None:
        self.builder.fallbacks.run(lambda tile: self._launch(tile, q, layer, out, bias=bias, starts=starts))

    def attend_part(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Attends as `dcp.PartMetadata` says."""
        self.builder.fallbacks.run(lambda tile: self._launch(tile, q, layer, out, lse))

    def _launch(
        self,
        tile: Tile,
        q: torch.Tensor,
        layer: AttentionLayer,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
    ) -> None:
        builder, rows = self.builder, self.rows
        if tile is not self.plan.tile:
            self.plan = builder.step_down(tile, lambda: builder.plan(rows))
        sinks = layer.sinks if lse is None else None
        options = {} if starts is None else {"prefix_lens": starts}
        _decode(self.plan, q, layer, out, rows, rows.seq_lens, bias, sinks=sinks, lse=lse, **options)


def _decode(
    plan: DecodePlan,
    q: torch.Tensor,
    layer: AttentionLayer,
    out: torch.Tensor,
    rows: DecodeRows | ExtendRows,
    seq_lens: torch.Tensor,
    bias: torch.Tensor | None,
    **options: torch.Tensor | None,
) -> None:
    cache, scales = layer.cache, layer.cache.group_scales()
    attend: Callable[..., None] = decode_fp4_fwd if scales else decode_attention_fwd
    features: dict[str, Any] = {"chunked": layer.chunked, "logit_cap": layer.logit_cap, **options, **scales}
    if bias is not None:  # where there is none of the others
        attend, features = decode_biased_fwd, {"bias": bias, "prefix_lens": options.get("prefix_lens")}
    attend(
        q,
        out,
        cache.k,
        cache.v,
        rows.token_slots[cache.table].req_to_token,
        rows.req_pool_indices,
        seq_lens,
        plan,
        scale=layer.scale,
        tile=plan.tile,
        sliding_window=layer.sliding_window,
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
        **features,
    )


class TritonVerify(_SplitContexts):
    """Builds the metadata of draft tokens, whose keys and values are already in the cache. They use the decode kernels,
    which split a long context between programs; the prompt kernel would read it in one."""

    def __init__(self, plan: Plan, shape: AttentionShape, device: torch.device | str) -> None:
        super().__init__(plan, shape, device, max(plan.max_running_requests, *plan.cuda_graph_bs, 1))
        numbers = range(2, plan.verified_tokens + 1)
        self.batches = {tokens: plan.step_widths.max_batch(tokens, self.max_rows) for tokens in numbers}
        self.allocate()

    def allocate(self) -> None:
        self.workspaces = DecodeWorkspace.for_verify(self.batches, *self.sizes()[1:])

    def build(self, rows: ExtendRows, draft_tokens: VerifyRows) -> TritonVerifyMetadata:
        """Returns the metadata of a step's draft tokens."""
        return TritonVerifyMetadata(self, rows, draft_tokens, self.plan(draft_tokens))

    def plan(self, draft_tokens: VerifyRows) -> DecodePlan:
        """Returns a new plan of the split, made on the device."""
        return plan_decode(draft_tokens.ends, self.workspaces[draft_tokens.width], self.tile)


@dataclass(slots=True)
class TritonVerifyMetadata:
    """Implements ExtendMetadata."""

    builder: TritonVerify
    rows: ExtendRows
    draft_tokens: VerifyRows
    plan: DecodePlan

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        self.builder.fallbacks.run(lambda tile: self._launch(tile, q, layer, out, bias))

    def _launch(
        self, tile: Tile, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        builder, rows, draft_tokens = self.builder, self.rows, self.draft_tokens
        if tile is not self.plan.tile:
            self.plan = builder.step_down(tile, lambda: builder.plan(draft_tokens))
        options = {"sinks": layer.sinks, "prefix_lens": rows.prefix_lens}
        _decode(self.plan, q, layer, out, rows, draft_tokens.ends, bias, **options)


class TritonExtend:
    """Builds metadata of prompts and draft tokens. Implements ExtendBuilder. The kernels read all lengths on the
    device."""

    plans_on_host = False
    in_graphs = True

    def __init__(self, plan: Plan, shape: AttentionShape, whole: bool, device: torch.device | str) -> None:
        """whole: the cache holds all tokens on this rank; otherwise `dcp` attends to draft tokens itself."""
        self.shape, self.num_sms = shape, plan.arch.num_sms
        self.fallbacks = plan.fallbacks(plan.attention_op("extend_attention", shape))
        has_registers = (shape.head_dim, shape.v_head_dim) not in WHOLE
        self.shares_prefixes = whole and has_registers and not plan.kv_cache_dtype.startswith("fp4")
        self.draft_tokens: TritonVerify | None = None
        if whole and plan.verified_tokens > 1 and plan.choices["decode_attention"].name == "triton":
            self.draft_tokens = TritonVerify(plan, shape, device)

    def build(self, rows: ExtendRows, causal: bool = True) -> TritonExtendMetadata | TritonVerifyMetadata:
        if rows.draft_tokens is not None and self.draft_tokens is not None:
            return self.draft_tokens.build(rows, rows.draft_tokens)
        metadata = TritonExtendMetadata(self.fallbacks, rows, any(rows.prefix_lens_cpu), causal)
        if causal and rows.seq_lens_cpu is not None:
            count = self.num_parts(rows.new_lens_cpu, rows.prefix_lens_cpu)
            if count > 1:
                num_tokens, heads = len(rows.token_slots[0].out_cache_loc), self.shape
                metadata.parts = PrefixParts.allocate(
                    count, num_tokens, rows.start_loc[:1], heads.num_heads, heads.v_head_dim
                )
        return metadata

    def num_parts(self, new_lens: Sequence[int], prefix_lens: Sequence[int]) -> int:
        """Counts by the planned tile, also where a smaller one is in use: whether a step runs in a graph depends on the
        count, and all ranks must agree on it."""
        if not self.shares_prefixes:
            return 1
        shape = self.shape
        heads = shape.num_heads, shape.num_kv_heads, shape.v_head_dim
        return count_parts(new_lens, prefix_lens, *heads, self.num_sms, self.fallbacks.tiles[0])


@dataclass(slots=True)
class TritonExtendMetadata:
    """Implements ExtendMetadata for prompts. `parts`: buffers if several programs share a cached prefix."""

    fallbacks: FallbackTiles
    rows: ExtendRows
    has_prefix: bool
    causal: bool
    parts: PrefixParts | None = None

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        rows, cache, scales = self.rows, layer.cache, layer.cache.group_scales()
        attend: Callable[..., None] = extend_fp4_fwd if scales else extend_attention_fwd
        features: dict[str, Any] = {"chunked": layer.chunked, "logit_cap": layer.logit_cap, "sinks": layer.sinks}
        features |= {"causal": self.causal, **scales}
        if bias is not None:  # where there is none of the others
            attend, features = extend_biased_fwd, {"bias": bias}
        if self.parts is not None and not layer.sliding_window:
            attend = partial(attend, parts=self.parts)
        self.fallbacks.run(
            lambda tile: attend(
                q,
                k,
                v,
                out,
                cache.k,
                cache.v,
                rows.token_slots[cache.table].req_to_token,
                rows.req_pool_indices,
                rows.prefix_lens,
                rows.start_loc,
                scale=layer.scale,
                tile=tile,
                sliding_window=layer.sliding_window,
                k_scale=cache.k_scale,
                v_scale=cache.v_scale,
                has_prefix=self.has_prefix,
                **features,
            )
        )
