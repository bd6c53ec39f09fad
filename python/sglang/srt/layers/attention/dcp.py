"""Decode context parallelism (DCP): builders of attention groups whose tokens are sharded over ranks (`token_shares`).
They wrap the builders of a backend.

requests that decode        attend with the heads of all ranks to this rank's tokens; the parts are merged
prompts, draft tokens            each token as if it decoded, where only the device knows the lengths, as in CUDA
graphs;
                            else the tokens before them come together on every rank, and each attends to them with
                            its own heads
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, cast

import torch

from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.groups import Group
from sglang.srt.layers.attention.metadata import AttentionBackend, DecodeBuilder, ExtendBuilder, ExtendMetadata
from sglang.srt.layers.attention.part_merge import PartMerge
from sglang.srt.layers.attention.token_shares import (
    GatheredTokens,
    Tokens,
    own_count,
    own_lengths,
    own_rows,
    own_rows_before_replay,
    own_table,
    with_own_table,
)
from sglang.srt.layers.step_rows import DecodeRows, ExtendRows

if TYPE_CHECKING:
    from sglang.srt.layers.attention.attention_layer import AttentionLayer
    from sglang.srt.plan.layer_spec import AttentionShape, AttentionSite
    from sglang.srt.plan.plan import Plan


class PartMetadata(Protocol):
    """Metadata that attends to this rank's tokens and returns the log-sum-exp, so that ranks' results can be merged."""

    def attend_part(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Writes the attention of q [D, H, D] over this rank's tokens to out [D, H, Dv], and the natural log-sum-exp to
        lse [D, H] fp32. A row without tokens gets -inf, and its `out` is not read. Sinks are left out."""


class PartBuilder(Protocol):
    """A `DecodeBuilder` for rows that may have no tokens, whose metadata is `PartMetadata`."""

    plans_on_host: bool
    in_graphs: bool

    def build(self, rows: DecodeRows) -> PartMetadata:
        """Returns the metadata of a step that is launched kernel by kernel."""

    def prepare_graphs(self, batch_sizes: tuple[int, ...]) -> None:
        """Allocates what graphs of these batch sizes need."""

    def build_in_graph(self, rows: DecodeRows) -> PartMetadata:
        """Builds metadata inside a graph. Builders that plan on the host get no table of this rank's tokens here."""

    def refresh(self, rows: DecodeRows) -> None:
        """Plans a step again on the host before its graph is replayed."""


class PartBackend(AttentionBackend, Protocol):
    """A backend that serves attention groups with DCP-sharded caches."""

    reads_new_tokens: bool
    """True if attention of prompts reads the new tokens from the cache as well."""

    def part_builder(self, shape: AttentionShape, max_rows: int) -> PartBuilder:
        """Returns a new builder for batches of up to `max_rows` rows, whose heads are those of all ranks."""


class DcpDecode:
    """Builds decode metadata that attends with all ranks' heads to this rank's tokens and merges the results.
    Implements DecodeBuilder."""

    def __init__(self, parts: PartBuilder, merge: PartMerge) -> None:
        self.parts, self.merge = parts, merge
        self.plans_on_host, self.in_graphs = parts.plans_on_host, parts.in_graphs

    def build(self, rows: DecodeRows) -> DcpDecodeMetadata:
        return DcpDecodeMetadata(self.parts.build(own_rows(rows, self.merge.context)), self.merge)

    def prepare_graphs(self, batch_sizes: tuple[int, ...]) -> None:
        self.parts.prepare_graphs(batch_sizes)

    def build_in_graph(self, rows: DecodeRows) -> DcpDecodeMetadata:
        local_part = own_lengths if self.plans_on_host else own_rows
        return DcpDecodeMetadata(self.parts.build_in_graph(local_part(rows, self.merge.context)), self.merge)

    def refresh(self, rows: DecodeRows) -> None:
        self.parts.refresh(own_rows_before_replay(rows, self.merge.context))


@dataclass(slots=True)
class DcpDecodeMetadata:
    """Implements DecodeMetadata."""

    rows: PartMetadata
    merge: PartMerge

    def attend(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        self.merge.attend(
            q, lambda heads, parts, lse: self.rows.attend_part(heads, layer, parts, lse), out, layer.sinks
        )


class DcpExtend:
    """Builds metadata of prompts over DCP-sharded caches. Implements ExtendBuilder."""

    def __init__(
        self, whole: ExtendBuilder, tokens: PartBuilder, merge: PartMerge, reads_new_tokens: bool, max_tokens: int
    ) -> None:
        """whole: builder for prompts over a cache with all their tokens. tokens: builder for one row per token.
        max_tokens: most tokens gathered on every rank at once, unless a single request has more."""
        self.whole, self.tokens, self.merge = whole, tokens, merge
        self.reads_new_tokens, self.max_tokens = reads_new_tokens, max_tokens
        self.plans_on_host = whole.plans_on_host
        self.in_graphs = whole.in_graphs and tokens.in_graphs and not tokens.plans_on_host

    def build(self, rows: ExtendRows, causal: bool = True) -> ExtendMetadata:
        assert causal, "images see each other in windows, whose tokens are not shared out"
        if rows.seq_lens_cpu is None:
            return self._one_by_one(rows)
        lens = rows.seq_lens_cpu if self.reads_new_tokens else rows.prefix_lens_cpu
        if not any(lens):
            return self.whole.build(rows)
        runs = _runs(lens, self.max_tokens)
        return GatheredMetadata([self._gathered(rows, run, lens[run]) for run in runs])

    def num_parts(self, new_lens: Sequence[int], prefix_lens: Sequence[int]) -> int:
        return 1

    def _one_by_one(self, rows: ExtendRows) -> TokenRowsMetadata:
        """Builds metadata with one decode row per token. Tokens before the first request's belong to other rows and see
        nothing."""
        count, begins = len(rows.token_slots[0].out_cache_loc), rows.start_loc
        token = torch.arange(count, dtype=torch.int32, device=begins.device)
        request = torch.searchsorted(begins, token, right=True) - 1
        counts = (request >= 0) & (request < len(rows))
        request = request.clamp(min=0, max=len(rows) - 1)
        context_len = rows.token_slots[0].req_to_token.shape[1]
        seen = (rows.prefix_lens[request] + token - begins[request] + 1).clamp(max=context_len)
        context = self.merge.context
        lens = own_count(torch.where(counts, seen, 0).to(torch.int32), context)
        each = DecodeRows(request, lens, own_table(rows.token_slots, rows.req_pool_indices, context))
        if self.tokens.plans_on_host:
            each.seq_lens_cpu = each.seq_lens.tolist()
        return TokenRowsMetadata(DcpDecodeMetadata(self.tokens.build(each), self.merge), counts)

    def _gathered(self, rows: ExtendRows, run: slice, lens: list[int]) -> GatheredRange:
        table = rows.token_slots[0].req_to_token
        tokens = Tokens.of(lens, table.device)
        slots = table[rows.req_pool_indices[run][tokens.rows], tokens.positions]
        gathered = GatheredTokens.of(slots, tokens.positions, len(lens), self.merge.context)
        own_table = torch.zeros((len(lens), max(lens)), dtype=torch.int32, device=table.device)
        own_table[tokens.rows, tokens.positions] = gathered.index.to(torch.int32)
        part = ExtendRows(
            torch.arange(len(lens), device=table.device),
            rows.seq_lens[run],
            rows.prefix_lens[run],
            rows.start_loc[run.start : run.stop + 1],
            with_own_table(rows.token_slots, own_table),
            rows.new_lens_cpu[run],
            rows.prefix_lens_cpu[run],
            None if rows.seq_lens_cpu is None else rows.seq_lens_cpu[run],
        )
        return GatheredRange(self.whole.build(part), gathered, sum(rows.new_lens_cpu[run.stop :]))


def _runs(lens: list[int], most: int) -> list[slice]:
    """Returns runs of requests with at most `most` tokens together, or a single request."""
    runs, begin, total = [], 0, 0
    for i, length in enumerate(lens):
        if i > begin and total + length > most:
            runs.append(slice(begin, i))
            begin, total = i, 0
        total += length
    return [*runs, slice(begin, len(lens))]


@dataclass(slots=True)
class GatheredRange:
    """A run of requests whose tokens are gathered on every rank together."""

    rows: ExtendMetadata
    tokens: GatheredTokens
    num_behind: int
    """New tokens of the requests after this run."""


@dataclass(slots=True)
class GatheredMetadata:
    """Attends to gathered tokens with this rank's own heads, run by run. Implements ExtendMetadata."""

    runs: list[GatheredRange]

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, out: torch.Tensor
    ) -> None:
        for run in self.runs:
            end = len(q) - run.num_behind
            run.rows.attend(q[:end], k[:end], v[:end], replace(layer, cache=run.tokens.store(layer.cache)), out[:end])


@dataclass(slots=True)
class TokenRowsMetadata:
    """Attends token by token, as in decoding. Implements ExtendMetadata."""

    rows: DcpDecodeMetadata
    counts: torch.Tensor  # [T] bool, tokens of the requests

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, out: torch.Tensor
    ) -> None:
        local = torch.empty_like(out)
        self.rows.attend(q, layer, local)
        out.copy_(torch.where(self.counts[:, None, None], local, out))


def builders_of(
    sites: Iterable[AttentionSite], decode: AttentionBackend, extend: AttentionBackend, plan: Plan
) -> tuple[Mapping[AttentionSite, DecodeBuilder], Mapping[AttentionSite, ExtendBuilder]]:
    """Returns the decode and prompt builders of each attention group, from the backends `decode` and `extend`."""
    context = parallel_state.groups().context
    decodes: dict[AttentionSite, DecodeBuilder] = {}
    extends: dict[AttentionSite, ExtendBuilder] = {}
    shared: dict[AttentionShape, tuple[DcpDecode, DcpExtend]] = {}
    for site in sites:
        if site.dcp_size == 1:
            decodes[site], extends[site] = decode.decode_builder(site), extend.extend_builder(site)
            continue
        if site.shape not in shared:
            shared[site.shape] = _shared(site, decode, extend, plan, context)
        decodes[site], extends[site] = shared[site.shape]
    return decodes, extends


def _shared(
    site: AttentionSite, decode: AttentionBackend, extend: AttentionBackend, plan: Plan, context: Group
) -> tuple[DcpDecode, DcpExtend]:
    merge = PartMerge(plan)
    parts, prompts = _part_backend(decode), _part_backend(extend)
    return (
        DcpDecode(parts.part_builder(site.gathered, plan.max_running_requests), merge),
        DcpExtend(
            extend.extend_builder(site),
            parts.part_builder(site.gathered, plan.token_rows),
            merge,
            prompts.reads_new_tokens,
            plan.context_len,
        ),
    )


def _part_backend(backend: AttentionBackend) -> PartBackend:
    assert hasattr(backend, "part_builder"), "the tables refuse other backends where tokens are shared out"
    return cast(PartBackend, backend)
