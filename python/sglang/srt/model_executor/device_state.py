"""The model with the tables its steps read and write on the device, and the building of a step's batch from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from sglang.srt.distributed.groups import ALONE, Group
from sglang.srt.layers.attention.sites import AttentionSites
from sglang.srt.layers.attention.token_shares import own_slots
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.input_rows import EmbeddingRows
from sglang.srt.layers.native_draft_rows import DraftInputs
from sglang.srt.layers.rotary_embedding import SectionPositions
from sglang.srt.layers.step_rows import DecodeRows, ExtendRows, ImageRuns, TokenSlots, VerifyRows, requests_of_tokens
from sglang.srt.mem_cache.kv_table import TableUpdate
from sglang.srt.mem_cache.memory_pool import CachePools
from sglang.srt.model_executor.input_ops import InputOps
from sglang.srt.model_executor.media_features import MediaFeatures
from sglang.srt.model_executor.step import MediaRuns, MediaTokens, PromptTokens, StepInput
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.plan.pool_sizes import PoolSizes
from sglang.srt.utils.device_arrays import DeviceArrays, send


class StepShape(NamedTuple):
    """The shape by which a batch is built and a CUDA graph is looked up: T tokens, of which each of the D decoding
    requests brings `width`. The rest belong to prompts; a graph with prompts may also run without any prompt token."""

    num_tokens: int
    num_decodes: int
    width: int = 1
    has_prompts: bool = False
    adapters: bool = False
    """True if tokens may have LoRA adapters."""


def shape_of(step: StepInput, adapters: bool = False) -> StepShape:
    """Returns the shape of a step without padding. adapters: whether a request of it has a LoRA adapter."""
    if step.prompts is None:
        return StepShape(len(step.slots) * step.width, len(step.slots), step.width, adapters=adapters)
    return StepShape(len(step.out_cache_loc), step.num_decodes, has_prompts=True, adapters=adapters)


class AdapterSlots:
    """The slot of each request slot's LoRA adapter, counted from 1; 0: none. On the device and on the host."""

    def __init__(self, max_requests: int, device: torch.device | str) -> None:
        self.of_slot = torch.zeros(max_requests + 1, dtype=torch.int32, device=device)
        self.host = np.zeros(max_requests + 1, np.int32)

    def set(self, slot: int, adapter: int) -> None:
        """Sets the adapter of a request slot, for the steps that are launched from now on."""
        if self.host[slot] != adapter:
            self.host[slot] = adapter
            self.of_slot[slot] = adapter

    def used_by(self, step: StepInput) -> bool:
        """Returns whether a request of the step has an adapter."""
        return bool(self.host[step.slots].any())


@dataclass(slots=True)
class DeviceState:
    """The device tables indexed by request slot, and the builder of the steps' batches."""

    model: CausalLM
    attention: AttentionSites
    num_tables: int
    sizes: PoolSizes
    device: torch.device | str
    tokens_per_step: int = 1
    """k, the most tokens that a decoding request brings to a step: the last sampled one and its draft tokens."""
    ops: InputOps = field(default_factory=InputOps)
    position_deltas: torch.Tensor | None = None
    """[max_reqs + 1] int64, RoPE position minus token index for the tokens after a request's images. None: the model
    has no images whose positions differ from the index."""
    host_deltas: list[int] = field(default_factory=list)
    """The host's copy of `position_deltas`."""
    adapters: AdapterSlots | None = None
    """The adapters of requests; None: the server takes none."""
    features: MediaFeatures | None = None
    context: Group = ALONE
    """The decode context parallel (DCP) ranks, which shard the tokens of some caches."""
    req_to_token: torch.Tensor = field(init=False)
    """[tables, max_reqs + 1, context_len] int32, the cache slot of each position of each request slot; a table for each
    lifetime of caches (`plan.caches.row_tables`). Row 0 is padding and stays zero, which is the padding slot."""
    next_tokens: torch.Tensor = field(init=False)
    """[max_reqs + 1, k] int64, the tokens that each request computes next: the last one sampled, then draft tokens."""
    lens: torch.Tensor = field(init=False)
    """[max_reqs + 1] int32, computed tokens of each request. Only kept with speculative decoding: otherwise a decode
    step brings one token and the host knows the length."""

    def __post_init__(self) -> None:
        rows = self.sizes.max_requests + 1
        shape = (self.num_tables, rows, self.sizes.context_len)
        self.req_to_token = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.next_tokens = torch.zeros((rows, self.tokens_per_step), dtype=torch.int64, device=self.device)
        self.lens = torch.zeros(rows, dtype=torch.int32, device=self.device)

    def has_adapters(self, step: StepInput) -> bool:
        """Returns whether a request of the step has a LoRA adapter."""
        return self.adapters is not None and self.adapters.used_by(step)

    @property
    def has_drafts(self) -> bool:
        """Returns whether steps bring draft tokens, so that only the device knows the lengths of decoding requests."""
        return self.tokens_per_step > 1

    def keep_position_deltas(self) -> None:
        """Creates `position_deltas`, of zeros."""
        rows = self.sizes.max_requests + 1
        self.position_deltas = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.host_deltas = [0] * rows

    def set_position_delta(self, slot: int, delta: int) -> None:
        """Sets the RoPE position offset of a request slot; does nothing without `position_deltas`."""
        if self.position_deltas is not None and self.host_deltas[slot] != delta:
            self.host_deltas[slot] = delta
            self.position_deltas[slot] = delta

    def update_tables(self, update: TableUpdate, pools: CachePools) -> None:
        """Writes new entries of `req_to_token` and copies recurrent states between the pools' rows."""
        sent = send(
            self.device,
            index=update.index,
            value=update.value,
            state_sources=update.state_sources,
            state_targets=update.state_targets,
        )
        self.req_to_token.view(-1)[sent["index"]] = sent["value"]
        if len(update.state_targets):
            pools.copy_states(sent["state_sources"], sent["state_targets"])

    def count_prompts(self, arrays: DeviceArrays, num_decodes: int) -> None:
        """Updates `lens` after a step with prompts (speculative decoding only): a prompt's length becomes its
        `seq_lens`, and a decoding request's grows by one. Padding rows are of request slot 0, whose length stays 0."""
        decodes = arrays["decode_slots"][:num_decodes]
        self.lens[decodes] += 1
        self.lens[arrays["slots"]] = arrays["seq_lens"]
        self.lens[:1].zero_()

    # --- the batch of a step ------------------------------------------------------------------------------------------

    def batch(
        self,
        arrays: DeviceArrays,
        shape: StepShape,
        step: StepInput | None = None,
        num_valid_tokens: torch.Tensor | None = None,
        attends: bool = True,
    ) -> ForwardBatch:
        """Builds the model's batch from `step_arrays`. Without a `step` everything comes from device tensors, so that
        it can be captured; array entries beyond the step's own are padding, which begins at `num_valid_tokens` [1].
        attends False: the batch is not passed to layers and gets no attention metadata."""
        if shape.has_prompts:
            batch = self._extend_batch(arrays, shape, step)
        elif shape.width > 1:
            batch = self._verify_batch(arrays, shape, step)
        else:
            batch = self._decode_batch(arrays, shape, step)
        if shape.adapters:
            batch.adapter_slots = self._adapter_slots(batch, arrays, shape)
        if step is not None and step.prompts is not None and step.prompts.media is not None:
            self._add_media(batch, arrays, step.prompts.media, shape.num_decodes)
        batch.num_valid_tokens = num_valid_tokens
        if attends:
            absorbs = step is not None and self.adapters is not None and self._absorbs(step)
            batch.metadata = self.attention.metadata(batch, in_graph=step is None, absorbs=absorbs)
        return batch

    def _absorbs(self, step: StepInput) -> bool:
        """Returns whether an adapter of the step changes what is made of latents."""
        assert self.adapters is not None and self.model.adapters is not None
        absorbing = self.model.adapters.absorbing
        return bool(absorbing) and not absorbing.isdisjoint(self.adapters.host[step.slots].tolist())

    def _adapter_slots(self, batch: ForwardBatch, arrays: DeviceArrays, shape: StepShape) -> torch.Tensor:
        """Returns the slot of each token's adapter [T] int32."""
        assert self.adapters is not None
        if shape.has_prompts:
            rows = requests_of_tokens(arrays["start_loc"], arrays["slots"], batch.decode, shape.num_tokens)
        else:
            rows = arrays["decode_slots"][: shape.num_decodes].repeat_interleave(shape.width)
        return self.adapters.of_slot[rows]

    def _mrope_positions(self, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
        """Returns `ForwardBatch.mrope_positions` of tokens behind all images, at `positions` [T] of request slots
        `rows` [T]."""
        return None if self.position_deltas is None else positions + self.position_deltas[rows]

    def _add_media(self, batch: ForwardBatch, arrays: DeviceArrays, media: MediaTokens, num_decodes: int) -> None:
        """Puts the positions of prompts with images, which come from the host, behind those of requests that decode,
        and the features in place of the placeholders."""
        if media.positions is not None:
            assert isinstance(batch.mrope_positions, torch.Tensor)
            decodes = batch.mrope_positions[:num_decodes].expand(len(media.positions), -1)
            batch.mrope_positions = SectionPositions(torch.cat((decodes, arrays["sections"]), dim=1))
        if media.runs is not None and batch.extend is not None:
            batch.extend.images = _image_runs(batch.extend, arrays, media.runs, num_decodes)
        if media.sources and self.features is not None and self.features.encoder is not None:
            rows, *added = self.features.split(self.features.gather_features(media.sources, arrays["feature_rows"]))
            batch.embedding_rows = EmbeddingRows(arrays["media_tokens"] + num_decodes, rows, tuple(added))

    def _token_slots(
        self, out_cache_loc: torch.Tensor, rows: torch.Tensor | None, positions: torch.Tensor
    ) -> tuple[TokenSlots, ...]:
        """Returns, per row table, the slots of T tokens at `positions` of the request slots `rows`. Tables of sliding
        windows got their new slots before the step."""
        windows = self.req_to_token[1:]
        return self._with_dcp_slots(
            TokenSlots(self.req_to_token[0], out_cache_loc),
            *(TokenSlots(table, table[rows, positions].to(torch.int64)) for table in windows),
        )

    def _slots_by_table(self, locs: Sequence[torch.Tensor] | torch.Tensor) -> tuple[TokenSlots, ...]:
        """Returns the token slots per row table from `locs` [tables, T] int64."""
        return self._with_dcp_slots(*(TokenSlots(self.req_to_token[i], locs[i]) for i in range(self.num_tables)))

    def _with_dcp_slots(self, *token_slots: TokenSlots) -> tuple[TokenSlots, ...]:
        """Appends, with DCP, this rank's slots of the tokens in sharded caches."""
        if self.context.size == 1:
            return token_slots
        table, slots = token_slots[0].req_to_token, token_slots[0].out_cache_loc
        return (*token_slots, TokenSlots(table, own_slots(slots, self.context)))

    def _decode_batch(self, arrays: DeviceArrays, shape: StepShape, step: StepInput | None) -> ForwardBatch:
        """Builds the decode batch and writes its new slots into the table. With speculative decoding the slots are
        already there and the lengths are the device's."""
        slots = arrays["decode_slots"][: shape.num_decodes]
        if self.has_drafts:
            input_ids, positions = self.next_tokens[slots, 0], self.lens[slots].to(torch.int64)
            return self._single_rows(input_ids, slots, positions, None if step is None else step.seq_lens)
        seq_lens, out_cache_loc = (arrays[name][: shape.num_decodes] for name in ("decode_lens", "decode_loc"))
        input_ids, positions, window_locs = self.ops.decode_inputs(
            slots, seq_lens, out_cache_loc, self.next_tokens[:, 0], self.req_to_token
        )
        windows = (window_locs[i] for i in range(self.num_tables - 1))
        token_slots = self._slots_by_table((out_cache_loc, *windows))
        rows = DecodeRows(slots, seq_lens, token_slots)
        if step is not None:
            rows.seq_lens_cpu = step.seq_lens[: shape.num_decodes].tolist()
        return ForwardBatch(
            input_ids, positions, token_slots, decode=rows, mrope_positions=self._mrope_positions(positions, slots)
        )

    def _single_rows(
        self,
        input_ids: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        host_lens: np.ndarray | None,
    ) -> ForwardBatch:
        """Builds a batch with one token per request at positions that only the device knows, whose cache slots are in
        the tables. host_lens [>= R]: upper bounds of the lengths; None inside a graph."""
        out_cache_loc = self.req_to_token[0][slots, positions].to(torch.int64)
        token_slots = self._token_slots(out_cache_loc, slots, positions)
        seq_lens = (positions + 1).to(torch.int32)
        decode = DecodeRows(slots, seq_lens, token_slots)
        if host_lens is not None:
            exact = self.attention.decode_plans_on_host
            decode.seq_lens_cpu = seq_lens.tolist() if exact else host_lens[: len(slots)].tolist()
        mrope_positions = self._mrope_positions(positions, slots)
        return ForwardBatch(input_ids, positions, token_slots, decode=decode, mrope_positions=mrope_positions)

    def draft_batch(
        self, ids: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, ends: torch.Tensor, in_graph: bool
    ) -> ForwardBatch:
        """Builds a batch for a drafter, as `drafts.drafter.BuildBatch` describes."""
        inputs = self.ops.draft_inputs(slots, positions, ends, self.req_to_token, 1)
        batch = self._drafting(ids, inputs, in_graph)
        batch.mrope_positions = self._mrope_positions(inputs.positions, inputs.rows)
        batch.metadata = self.attention.metadata(batch, in_graph)
        return batch

    def block_batch(
        self, ids: torch.Tensor, slots: torch.Tensor, lens: torch.Tensor, ends: torch.Tensor, in_graph: bool
    ) -> ForwardBatch:
        """Builds a batch for a drafter, as `drafts.drafter.BuildBlock` describes."""
        batch = self._drafting(ids, self.ops.draft_inputs(slots, lens, ends, self.req_to_token, ids.shape[1]), in_graph)
        batch.metadata = self.attention.metadata(batch, in_graph, in_blocks=True)
        return batch

    def _drafting(self, ids: torch.Tensor, inputs: DraftInputs, in_graph: bool) -> ForwardBatch:
        """Builds rows of requests whose further positions a draft model computes; ids [R] or [R, W]."""
        token_slots = self._slots_by_table(inputs.locs)
        decode = DecodeRows(inputs.slots, inputs.seq_lens, token_slots)
        if not in_graph:
            exact = self.attention.decode_plans_on_host
            decode.seq_lens_cpu = decode.seq_lens.tolist() if exact else [self.sizes.context_len] * len(decode)
        return ForwardBatch(ids.flatten(), inputs.positions, token_slots, decode=decode)

    def query_batch(self, ids: torch.Tensor, slots: torch.Tensor, lens: torch.Tensor, in_graph: bool) -> ForwardBatch:
        """Builds a batch for a drafter, as `drafts.drafter.BuildQueries` describes."""
        unwritten = torch.zeros_like(slots)
        token_slots = self._with_dcp_slots(*(TokenSlots(table, unwritten) for table in self.req_to_token))
        decode = DecodeRows(slots, lens.clamp(min=1), token_slots)
        if not in_graph:
            exact = self.attention.decode_plans_on_host
            decode.seq_lens_cpu = decode.seq_lens.tolist() if exact else [self.sizes.context_len] * len(slots)
        positions = lens.to(torch.int64).clamp(max=self.sizes.context_len - 1)
        batch = ForwardBatch(
            ids, positions, token_slots, decode=decode, mrope_positions=self._mrope_positions(positions, slots)
        )
        batch.metadata = self.attention.metadata(batch, in_graph)
        return batch

    def lagging_batch(
        self, batch: ForwardBatch, ids: torch.Tensor, row_slots: torch.Tensor, lag: torch.Tensor, in_graph: bool
    ) -> ForwardBatch:
        """Builds a batch for a drafter, as `drafts.drafter.BuildLagging` describes, of the step's `batch`."""
        positions = (batch.positions - lag[row_slots]).clamp(min=0)
        out_cache_loc = self.req_to_token[0][row_slots, positions].to(torch.int64)
        token_slots = self._token_slots(out_cache_loc, row_slots, positions)
        lagging = ForwardBatch(ids, positions, token_slots, num_valid_tokens=batch.num_valid_tokens)
        if batch.decode is not None:
            rows = batch.decode
            decode_slots = tuple(TokenSlots(part.req_to_token, part.out_cache_loc[: len(rows)]) for part in token_slots)
            seq_lens = (rows.seq_lens - lag[rows.req_pool_indices]).clamp(min=1)
            lagging.decode = DecodeRows(rows.req_pool_indices, seq_lens, decode_slots, rows.seq_lens_cpu)
            if not in_graph and self.attention.decode_plans_on_host:
                lagging.decode.seq_lens_cpu = seq_lens.tolist()
        if batch.extend is not None:
            lagging.extend = self._lagging_rows(batch.extend, lag, token_slots, in_graph)
        lagging.metadata = self.attention.metadata(lagging, in_graph)
        return lagging

    def _lagging_rows(
        self, rows: ExtendRows, lag: torch.Tensor, token_slots: tuple[TokenSlots, ...], in_graph: bool
    ) -> ExtendRows:
        """Returns the prompt rows moved back by `lag`. Lengths on the host stay as upper bounds, unless attention plans
        with them."""
        back = lag[rows.req_pool_indices]
        lagging = replace(
            rows,
            seq_lens=rows.seq_lens - back,
            prefix_lens=(rows.prefix_lens - back).clamp(min=0),
            token_slots=token_slots,
            images=None,
            draft_tokens=rows.draft_tokens
            and replace(rows.draft_tokens, ends=(rows.draft_tokens.ends - back).clamp(min=1)),
        )
        if not in_graph and self.attention.extend_plans_on_host:
            lagging.prefix_lens_cpu, lagging.seq_lens_cpu = lagging.prefix_lens.tolist(), lagging.seq_lens.tolist()
        return lagging

    def _extend_batch(self, arrays: DeviceArrays, shape: StepShape, step: StepInput | None) -> ForwardBatch:
        """Builds a batch with the decoding requests first and the prompts behind them."""
        input_ids, positions, out_cache_loc = (
            arrays[name][: shape.num_tokens] for name in ("input_ids", "positions", "out_cache_loc")
        )
        decodes = self._decode_batch(arrays, shape, step) if shape.num_decodes else None
        if decodes is not None:
            is_decode = arrays["is_decode"][: shape.num_decodes] if step is None else None
            input_ids = _decodes_first(decodes.input_ids, input_ids, is_decode)
            if self.has_drafts:
                positions = _decodes_first(decodes.positions, positions, is_decode)
                out_cache_loc = _decodes_first(decodes.token_slots[0].out_cache_loc, out_cache_loc, is_decode)
        decode_rows = None if decodes is None else decodes.decode
        start_loc, slots = arrays["start_loc"], arrays["slots"]
        rows = None
        if self.num_tables > 1 or self.position_deltas is not None:
            rows = requests_of_tokens(start_loc, slots, decode_rows, shape.num_tokens)
        token_slots = self._token_slots(out_cache_loc, rows, positions)
        extend = ExtendRows(
            slots,
            arrays["seq_lens"],
            arrays["prefix_lens"],
            start_loc,
            token_slots,
            # In a graph the widest case: a replay may have cached prefixes.
            [shape.num_tokens] if step is None else _prompts(step).extend_lens.tolist(),
            [1] if step is None else _prompts(step).prefix_lens.tolist(),
            None if step is None else step.seq_lens[step.num_decodes :].tolist(),
        )
        mrope_positions = None if rows is None else self._mrope_positions(positions, rows)
        return ForwardBatch(
            input_ids,
            positions,
            token_slots,
            decode_rows,
            extend,
            mrope_positions=mrope_positions,
            segments=arrays.get("segments"),
        )

    def _verify_batch(self, arrays: DeviceArrays, shape: StepShape, step: StepInput | None) -> ForwardBatch:
        """Builds the verify batch of k tokens per request, T = D k. A request's rows beyond its width are padding in
        cache slot 0, which no request owns."""
        width = shape.width
        slots, widths = arrays["decode_slots"][: shape.num_decodes], arrays["widths"][: shape.num_decodes]
        inputs = self.ops.verify_inputs(slots, widths, self.lens, self.next_tokens, self.req_to_token, width)
        token_slots = self._slots_by_table(inputs.locs)
        extend = ExtendRows(
            slots,
            inputs.seq_lens,
            inputs.prefix_lens,
            inputs.start_loc,
            token_slots,
            [width] * len(slots),
            [1] * len(slots),
            draft_tokens=VerifyRows(width, inputs.ends),
        )
        if step is not None and self.attention.extend_plans_on_host:
            extend.prefix_lens_cpu, extend.seq_lens_cpu = extend.prefix_lens.tolist(), extend.seq_lens.tolist()
        mrope_positions = self._mrope_positions(inputs.positions, inputs.rows)
        return ForwardBatch(
            inputs.input_ids,
            inputs.positions,
            token_slots,
            extend=extend,
            state_records=[],
            mrope_positions=mrope_positions,
        )


def _image_runs(extend: ExtendRows, arrays: DeviceArrays, runs: MediaRuns, num_decodes: int) -> ImageRuns:
    rows = ExtendRows(
        arrays["run_slots"],
        arrays["run_ends"],
        arrays["run_starts"],
        arrays["run_locs"],
        extend.token_slots,
        runs.lens.tolist(),
        runs.starts.tolist(),
        (runs.starts + runs.lens).tolist(),
    )
    return ImageRuns(arrays["run_tokens"] + num_decodes, rows)


def _prompts(step: StepInput) -> PromptTokens:
    assert step.prompts is not None
    return step.prompts


def _decodes_first(decodes: torch.Tensor, others: torch.Tensor, is_decode: torch.Tensor | None) -> torch.Tensor:
    """Returns [T] entries with the decoding requests' [D] in front; where `is_decode` is False the token's own entry
    stays."""
    count = len(decodes)
    front = decodes if is_decode is None else torch.where(is_decode, decodes, others[:count])
    return torch.cat((front, others[count:]))
