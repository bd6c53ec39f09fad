"""Runs steps as CUDA graphs, looked up by tokens, decoding requests and tokens per decoding request.

A graph holds everything from the request slots to the logits: the batch, the attention metadata on the device and the
model. A replay needs one small copy of the step's arrays, the parts of attention planned on the host, and one launch.
Three kinds of steps have graphs, in two sets of input arrays at fixed addresses (with and without prompts):

    decode      one token of each request; the graph also writes the new cache slots into the tables
    verify      2 to k tokens of each request, with speculative decoding
    prompts     short prompts, which compute faster than the host can launch a model's kernels one by one; with or
                without decoding requests in the same step, with or without images (`graph_media`). Two cases run
                without a graph: images that attend in both directions, which need a second attention pass, and prompts
                behind a cached prefix so long that several programs share it

With a drafter each graph is followed by a second one, after sampling: it accepts tokens and makes new draft tokens.

A step runs in the smallest graph that holds it, padded: with decoding requests of request slot 0 and cache slot 0, and
with tokens at the end that belong to one more prompt of that slot. In a graph with prompts the padding rows of decoding
requests overlap the first prompt tokens, which are computed after them; so every row holds finite numbers, and the real
tokens lie together at the front.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from sglang.srt.distributed import parallel_state
from sglang.srt.layers.row_exchange import RowExchange, padded_order
from sglang.srt.layers.step_rows import DecodeRows
from sglang.srt.model_executor.device_state import DeviceState, StepShape
from sglang.srt.model_executor.draft_runner import DraftRunner
from sglang.srt.model_executor.graph_capture import GraphedStage, StaticOutput, capture
from sglang.srt.model_executor.graph_media import GraphMedia
from sglang.srt.model_executor.step import AcceptResult, GroupSteps, ModelOutput, PromptTokens, StepInput, step_arrays
from sglang.srt.plan.defaults import mixed_decode_sizes
from sglang.srt.plan.plan import Plan
from sglang.srt.plan.step_widths import ONE_TOKEN, StepWidths
from sglang.srt.utils.device_arrays import DeviceArrays, Field

MAX_PROMPTS = 16
TIMED_REPLAYS = 5
SMALL_BYTES = 2 << 20
"""Largest logits in bytes that a decode graph keeps in memory of its own; larger ones are copied to a buffer that all
graphs share, which for a row or two would only cost a launch."""


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Sizes of the graphs, each tuple ascending. batch_sizes: requests of steps without prompts; widths: tokens per
    request in these. prompt_tokens: tokens of steps with prompts; mixed_decodes: decoding requests in these, with 0 for
    none. A kind of step without sizes has no graphs."""

    batch_sizes: tuple[int, ...] = ()
    prompt_tokens: tuple[int, ...] = ()
    mixed_decodes: tuple[int, ...] = (0,)
    widths: StepWidths = ONE_TOKEN

    @property
    def any(self) -> bool:
        """Returns whether any graph is captured."""
        return bool(self.batch_sizes or self.prompt_tokens)

    @property
    def decode_rows(self) -> int:
        """Returns the rows of the largest graph without prompts."""
        return max((size * width for size in self.batch_sizes for width in self.widths.of(size)), default=0)


def graph_sizes(plan: Plan, state: DeviceState, widths: StepWidths) -> GraphSizes:
    """Returns the sizes of the graphs that the model's attention can be captured in. widths: candidates for the tokens
    per request in steps without prompts."""
    attention, has_drafts = state.attention, state.has_drafts
    if not plan.cuda_graph_bs or not attention.decode_in_graphs:
        return GraphSizes()
    prompt_tokens = plan.cuda_graph_prefill_tokens if attention.extend_in_graphs else ()
    mixed = mixed_decode_sizes(plan.cuda_graph_bs)
    if has_drafts and attention.decode_plans_on_host:
        mixed = (0,)  # the lengths of requests that decode are known to the device alone
    verifies_in_graphs = attention.extend_in_graphs and bool(prompt_tokens)
    batch_sizes = plan.cuda_graph_bs if verifies_in_graphs or not has_drafts else ()
    if has_drafts and attention.decode_plans_on_host:
        widths = replace(widths, widths=tuple(width for width in widths.widths if width > 1))
    return GraphSizes(batch_sizes, prompt_tokens, mixed, widths)


class GraphRunner:
    """Captures the graphs, and owns them with their input arrays and results at fixed addresses."""

    def __init__(
        self,
        state: DeviceState,
        sizes: GraphSizes,
        keeps_hidden: bool = False,
        drafts: DraftRunner | None = None,
        drafts_in_graphs: bool = True,
        pool: Any = None,
        capture_step: Callable[..., Any] | None = None,
    ) -> None:
        """keeps_hidden: steps without prompts also return their hidden states. drafts_in_graphs False: the work after
        sampling is launched kernel by kernel, on the padded rows of the graph. pool: the memory pool of the graphs, one
        of their own for None. capture_step: what takes the place of `capture` in a rehearsal."""
        self._capture_step = capture_step or capture
        self.state, self.sizes, self.drafts = state, sizes, drafts
        self.num_windows = state.num_tables - 1
        self.groups = parallel_state.groups()
        shapes = list(self._shapes())
        self.media = GraphMedia(state, max(sizes.prompt_tokens, default=0))
        self._arrays: dict[bool, DeviceArrays] = {}
        """Input arrays of steps with (True) and without (False) prompts."""
        for has_prompts, fields in ((True, self._prompt_fields()), (False, self._token_fields())):
            if fields:
                self._arrays[has_prompts] = DeviceArrays(fields, state.device)
                self._arrays[has_prompts].load()
        self.stage = GraphedStage(state.model, max(shape.num_tokens for shape in shapes))
        self.keeps_hidden = keeps_hidden or self.stage.sends
        self._logits = {has_prompts: StaticOutput() for has_prompts in (True, False)}
        self._hidden = {has_prompts: StaticOutput() for has_prompts in (True, False)}
        self.graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self.outputs: dict[StepShape, ModelOutput] = {}
        """Output of each graph; held, so that no other graph uses the memory."""
        self._tokens = torch.zeros(max(self._num_sampled(s) for s in shapes), dtype=torch.int64, device=state.device)
        """Sampled tokens, the input of the graphs that accept them; `_accepted` holds the outputs."""
        self._accepted: dict[StepShape, AcceptResult] = {}
        self._accept: dict[StepShape, Callable[[torch.Tensor], AcceptResult]] = {}
        state.attention.prepare_graphs(tuple(sorted({s.num_decodes for s in shapes if s.num_decodes})))
        for shape in shapes:
            self._capture(shape, pool)
            pool = pool or self.graphs[shape].pool()
            if drafts is not None:
                self._accept[shape] = self._accept_of(drafts, shape, drafts_in_graphs, pool)

    # --- shapes and arrays --------------------------------------------------------------------------------------------

    def _shapes(self) -> Iterator[StepShape]:
        """Yields the shapes of all graphs, per kind those with the most tokens first: smaller graphs then reuse their
        memory, and static outputs are large enough for all that follow. Where there are LoRA adapters, each exists with
        their kernels and without."""
        for shape in self._plain_shapes():
            yield shape
            if self.state.adapters is not None:
                yield shape._replace(adapters=True)

    def _plain_shapes(self) -> Iterator[StepShape]:
        for tokens in reversed(self.sizes.prompt_tokens):
            for decodes in reversed([size for size in self.sizes.mixed_decodes if size <= tokens]):
                yield StepShape(tokens, decodes, has_prompts=True)
        sizes, widths = self.sizes.batch_sizes, self.sizes.widths
        without_prompts = [StepShape(size * width, size, width) for size in sizes for width in widths.of(size)]
        yield from sorted(without_prompts, reverse=True)

    def shape_of(self, step: StepInput) -> StepShape | None:
        """Returns the shape of the graph that the step runs in; None if no graph fits."""
        if step.groups is not None:
            return self._shape_of_groups(step.groups)
        shape = self._plain_shape_of(step)
        return shape and shape._replace(adapters=self.state.has_adapters(step))

    def _plain_shape_of(self, step: StepInput) -> StepShape | None:
        num_decodes = step.num_decodes
        if step.prompts is None:
            size = _at_least(self.sizes.batch_sizes, num_decodes)
            if size is None or step.width not in self.sizes.widths.of(size):
                return None
            return StepShape(size * step.width, size, step.width)
        decodes = _at_least(self.sizes.mixed_decodes, num_decodes)
        if decodes is None or len(step.prompts.extend_lens) > MAX_PROMPTS or step.has_bidirectional_runs:
            return None
        tokens = _at_least(self.sizes.prompt_tokens, max(len(step.out_cache_loc), decodes))
        if tokens is None or self._shares_prefixes(step.prompts):
            return None
        return StepShape(tokens, decodes, has_prompts=True)

    def _shares_prefixes(self, prompts: PromptTokens) -> bool:
        return self.state.attention.shares_prefixes(prompts.extend_lens.tolist(), prompts.prefix_lens.tolist())

    def _shape_of_groups(self, steps: GroupSteps) -> StepShape | None:
        """Returns the common shape of all attention groups' steps; None if no graph fits."""
        if not steps.has_prompts:
            size = _at_least(self.sizes.batch_sizes, steps.num_decodes)
            if size is None or steps.width not in self.sizes.widths.of(size):
                return None
            return StepShape(size * steps.width, size, steps.width)
        if steps.verifies_during_prefill or steps.has_bidirectional_runs:
            return None
        decodes = _at_least(self.sizes.mixed_decodes, steps.num_decodes)
        if decodes is None or steps.num_prompts > MAX_PROMPTS:
            return None
        tokens = _at_least(self.sizes.prompt_tokens, max(*steps.num_tokens, decodes))
        if tokens is None or any(step.prompts and self._shares_prefixes(step.prompts) for step in steps.steps):
            return None
        return StepShape(tokens, decodes, has_prompts=True)

    def fits_decodes(self, num_reqs: int) -> bool:
        """Returns whether steps without prompts with `num_reqs` requests have graphs."""
        return _at_least(self.sizes.batch_sizes, num_reqs) is not None

    def writes_tables(self, step: StepInput) -> bool:
        """Returns whether the step's graph itself writes `table_update`, which then holds only new slots of sliding
        windows. An attention builder that plans on the host reads the tables before the replay, so the graph cannot
        write them."""
        update = step.table_update
        if update is None or step.prompts is not None or step.widths is not None:
            return False
        few = len(update.index) <= self.num_windows * len(step.slots) and not len(update.state_targets)
        return few and not self.state.attention.decode_plans_on_host

    def _token_fields(self) -> dict[str, Field]:
        """Returns the input fields of steps without prompts."""
        if not self.sizes.batch_sizes:
            return {}
        largest = self.sizes.batch_sizes[-1]
        fields = {"decode_slots": Field((largest,), np.int64), "num_tokens": Field((1,), np.int32)}
        fields |= self._exchange_fields(self.sizes.decode_rows)
        if self.state.has_drafts:
            return {**fields, "widths": Field((largest,), np.int32), "ends": Field((largest,), np.int32)}
        fields["decode_loc"] = Field((largest,), np.int64)
        fields["decode_lens"] = Field((largest,), np.int32, 1)
        if self.num_windows:
            # Entries that a step does not use write the padding slot to the padding row again.
            maximum = (self.num_windows * largest,)
            fields |= {"table_index": Field(maximum, np.int64), "table_value": Field(maximum, np.int32)}
        return fields

    def _exchange_fields(self, max_tokens: int) -> dict[str, Field]:
        """Returns the input fields for the rows of all attention groups; empty with one group."""
        if self.groups.dp.size == 1:
            return {}
        order = (self.groups.dp.size * max_tokens,)
        return {"row_order": Field(order, np.int64), "num_rows": Field((1,), np.int32)}

    def _all_rows(self, shape: StepShape) -> dict[str, np.ndarray]:
        """Returns the arrays of a step in which no row of an attention group is padding."""
        if self.groups.dp.size == 1:
            return {}
        count = self.groups.dp.size * shape.num_tokens
        return {"row_order": np.arange(count), "num_rows": np.array([count], np.int32)}

    def _prompt_fields(self) -> dict[str, Field]:
        if not self.sizes.prompt_tokens:
            return {}
        tokens, prompts = (self.sizes.prompt_tokens[-1],), (MAX_PROMPTS + 1,)
        largest = self.sizes.mixed_decodes[-1]
        decodes, sampled = (largest,), (largest + MAX_PROMPTS,)
        fields = (
            {"next_ids": Field(tokens, np.int64), "ends": Field(sampled, np.int32)} if self.state.has_drafts else {}
        )
        return {
            **fields,
            **self.media.fields(),
            **self._exchange_fields(tokens[0]),
            "input_ids": Field(tokens, np.int64),
            "positions": Field(tokens, np.int64),
            "out_cache_loc": Field(tokens, np.int64),
            "slots": Field(prompts, np.int64),
            "seq_lens": Field(prompts, np.int32),
            "prefix_lens": Field(prompts, np.int32),
            "start_loc": Field((MAX_PROMPTS + 2,), np.int32),
            "decode_slots": Field(decodes, np.int64),
            "decode_lens": Field(decodes, np.int32, 1),
            "decode_loc": Field(decodes, np.int64),
            "is_decode": Field(decodes, np.bool_),
            "last_rows": Field(sampled, np.int64),
            "sampled_slots": Field(sampled, np.int64),
            "num_tokens": Field((1,), np.int32),
        }

    # --- capture and replay -------------------------------------------------------------------------------------------

    def _capture(self, shape: StepShape, pool: Any) -> None:
        arrays = self._arrays[shape.has_prompts]
        arrays.load(**self._all_rows(shape), **(_one_prompt(shape) if shape.has_prompts else {}))
        # Attention builders share buffers between graphs: fill them for this shape.
        self._refresh(self.state.batch(arrays, shape).decode, np.empty(0, np.int32))
        self.graphs[shape] = self._capture_step(partial(self._compute, shape), pool)

    def _compute(self, shape: StepShape) -> None:
        """Computes a step into static outputs, under capture."""
        arrays, model = self._arrays[shape.has_prompts], self.state.model
        if "table_index" in arrays:
            maximum = self.num_windows * shape.num_tokens
            self.state.req_to_token.view(-1)[arrays["table_index"][:maximum]] = arrays["table_value"][:maximum]
        batch = self.state.batch(arrays, shape, num_valid_tokens=arrays["num_tokens"])
        if shape.has_prompts:
            self.media.add_to(batch, arrays)
        sampled_rows = None
        if self.groups.dp.size > 1:
            order = arrays["row_order"][: self.groups.dp.size * shape.num_tokens]
            batch.exchange = RowExchange(self.groups, shape.num_tokens, order, arrays["num_rows"])
            ranks = self.groups.attention.size
            sampled_rows = RowExchange(self.groups, -(-self._num_sampled(shape) // ranks) * ranks, exact=True)
        hidden = sampled = self.stage.compute(batch)
        rows = None
        kept = None
        if self.drafts is not None:
            kept = hidden  # the graph behind this one reads it
        elif shape.has_prompts or self.keeps_hidden:
            kept = self._hidden[shape.has_prompts].keep(hidden)
        if shape.has_prompts:
            rows = arrays["last_rows"][: self._num_sampled(shape)]
            sampled = hidden[rows]
        logits = model.step_logits(sampled, sampled_rows, model.slots_of_rows(batch, rows))
        if shape.has_prompts or logits.nbytes > SMALL_BYTES or not logits.is_contiguous():
            logits = self._logits[shape.has_prompts].keep(logits)
        self.outputs[shape] = ModelOutput(batch, arrays, kept, logits)

    def _num_sampled(self, shape: StepShape) -> int:
        """Returns the rows of logits of a shape; at most one per request slot in graphs with prompts."""
        if not shape.has_prompts:
            return shape.num_tokens
        return min(shape.num_decodes + MAX_PROMPTS, self.state.sizes.max_requests)

    def _accept_of(
        self, drafts: DraftRunner, shape: StepShape, in_graph: bool, pool: Any
    ) -> Callable[[torch.Tensor], AcceptResult]:
        """Returns a function that accepts a step's tokens, given those sampled for its own rows."""
        tokens = self._tokens[: self._num_sampled(shape)]

        def compute() -> None:
            self._accepted[shape] = drafts.accept(shape, self.outputs[shape], tokens, in_graph)

        launch = self._capture_step(compute, pool, self.graphs[shape].replay).replay if in_graph else compute

        def accept(sampled: torch.Tensor) -> AcceptResult:
            tokens[: len(sampled)] = sampled
            launch()
            return self._accepted[shape]

        return accept

    def _refresh(self, rows: DecodeRows | None, seq_lens: np.ndarray) -> None:
        """Updates what attention plans on the host for a step; called before every replay of any graph. seq_lens:
        lengths of the decoding requests; rows behind them are padding."""
        if rows is not None and self.state.attention.decode_plans_on_host:
            rows.seq_lens_cpu = seq_lens.tolist() + [1] * (len(rows) - len(seq_lens))
            self.state.attention.refresh(rows)

    def replay(self, shape: StepShape, step: StepInput) -> ModelOutput:
        """Replays the graph of `shape`. The output has the graph's padding behind the step's own rows and is valid
        until the next replay."""
        output = self.outputs[shape]
        self._load(output.arrays, shape, step)
        self._refresh(output.batch.decode, step.seq_lens[: step.num_decodes])
        self.stage.replay(self.graphs[shape], shape.num_tokens, output.hidden)
        return replace(self.outputs[shape], accept=self._accept.get(shape))

    @torch.inference_mode()
    def step_times(self) -> dict[tuple[int, int], float]:
        """Measures steps without prompts: {(requests, tokens per request): milliseconds} of a graph with its accept
        graph, i.e. reading weights and states, launches, accepting and drafting, with short caches. Sizes: every power
        of two and the largest of each width. Must run before the first request; each row is a request slot with
        different tokens, because MoE routing depends on them."""
        shapes = sorted(shape for shape in self.graphs if not (shape.has_prompts or shape.adapters))
        largest = {shape.width: shape.num_decodes for shape in shapes}
        state, times = self.state, {}
        tokens = torch.arange(state.next_tokens.numel(), device=state.device).view_as(state.next_tokens)
        tokens = tokens % state.model.description.vocab_size
        rows = state.req_to_token[0, 1:, : state.tokens_per_step]  # cache slots that nobody has yet
        rows.copy_(torch.arange(1, rows.numel() + 1, device=state.device).view_as(rows) % state.sizes.tokens)
        for shape in shapes:
            size, width = shape.num_decodes, shape.width
            if not size & (size - 1) or size == largest[width]:
                self._arrays[False].load(**self._rows_of_slots(shape))
                self._refresh(self.outputs[shape].batch.decode, np.empty(0, np.int32))
                times[size, width] = self._milliseconds(shape, tokens)
        state.next_tokens.zero_()
        state.lens.zero_()
        rows.zero_()
        return times

    def _rows_of_slots(self, shape: StepShape) -> dict[str, np.ndarray]:
        """Returns the arrays of a decode or verify step over the first request slots."""
        slots = np.arange(1, shape.num_decodes + 1)
        values = {
            **self._all_rows(shape),
            "decode_slots": np.where(slots <= self.state.sizes.max_requests, slots, 0),
            "num_tokens": np.array([shape.num_tokens], np.int32),
        }
        if self.state.has_drafts:
            values["widths"] = np.full(len(slots), shape.width, np.int32)
            values["ends"] = np.full(len(slots), self.state.sizes.context_len, np.int32)
        else:
            values["decode_loc"] = slots % self.state.sizes.tokens
        return values

    @torch.inference_mode()
    def prompt_times(self) -> dict[int, float]:
        """Measures graphs with prompts: {tokens: milliseconds}, each with its most decoding requests. The prompt is
        padding without a cached prefix, with different tokens, because MoE routing depends on them."""
        vocabulary, times = self.state.model.description.vocab_size, {}
        for shape in (shape for shape in self.graphs if shape.has_prompts and not shape.adapters):
            if shape.num_tokens not in times:  # the shape with the most requests comes first
                ids = np.arange(shape.num_tokens, dtype=np.int64) % vocabulary
                self._arrays[True].load(**self._all_rows(shape), **_one_prompt(shape), input_ids=ids)
                self._refresh(self.outputs[shape].batch.decode, np.empty(0, np.int32))
                times[shape.num_tokens] = self._milliseconds(shape)
        return times

    def _milliseconds(self, shape: StepShape, tokens: torch.Tensor | None = None) -> float:
        """Returns the mean time of a replay. tokens [max_reqs + 1, k] int64: next tokens per request slot, reset before
        each one."""

        def replay() -> None:
            if tokens is not None:
                self.state.next_tokens.copy_(tokens)
                self.state.lens.zero_()
            self.graphs[shape].replay()
            if shape in self._accept:
                self._accept[shape](self._tokens[:0])

        replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(TIMED_REPLAYS):
            replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / TIMED_REPLAYS

    def _load(self, arrays: DeviceArrays, shape: StepShape, step: StepInput) -> None:
        values, num_tokens = step_arrays(step), len(step.slots) * shape.width
        if step.prompts is not None:
            num_tokens = len(step.out_cache_loc)
            start_loc = np.full(MAX_PROMPTS + 2, num_tokens, np.int32)
            start_loc[: len(values["start_loc"])] = values["start_loc"]
            start_loc[-1] = shape.num_tokens
            values |= {"start_loc": start_loc, "is_decode": np.ones(step.num_decodes, np.bool_)}
            values |= self.media.load(step)
        elif step.table_update is not None and self.writes_tables(step):
            values |= {"table_index": step.table_update.index, "table_value": step.table_update.value}
        if step.groups is not None:
            counts = step.groups.num_tokens
            values |= {
                "row_order": padded_order(counts, shape.num_tokens),
                "num_rows": np.array([sum(counts)], np.int32),
            }
        arrays.load(**values, num_tokens=np.array([num_tokens], np.int32))


def _one_prompt(shape: StepShape) -> dict[str, np.ndarray]:
    """Returns the arrays of a step whose tokens all belong to one prompt of the padding slot."""
    ends = np.full(MAX_PROMPTS + 2, shape.num_tokens, np.int32)
    ends[0] = 0
    count = np.array([shape.num_tokens], np.int32)
    return {"start_loc": ends, "seq_lens": count, "num_tokens": count}


def _at_least(ascending: tuple[int, ...], number: int) -> int | None:
    i = bisect.bisect_left(ascending, number)
    return ascending[i] if i < len(ascending) else None
