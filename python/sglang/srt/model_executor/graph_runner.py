"""Steps as CUDA graphs, found by their shape: tokens, decoding requests, and tokens of each of these.

A graph holds everything from the request slots to the logits: the batch, attention metadata that lives on the device,
and the model. A replay needs one small copy of the step's arrays, what attention plans on the host, and one launch.
Three kinds of steps have graphs, each with arrays of its own at fixed addresses:

    decode      one token of each request; the graph also writes the new cache slots into the tables
    verify      k tokens of each request, with a drafter
    prompts     a short prompt computes faster than the host can launch a model's kernels one by one; with and without
                requests that decode in the same step

A step runs in the next larger graph. Rows that are missing are padding: decoding requests that own request slot 0 and
cache slot 0, and tokens at the end that belong to one more prompt of that slot. In a graph with prompts the decoding
rows that are missing lie over the first prompt tokens, which are computed after them; so every row holds finite
numbers, and the tokens that count lie together at the front.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from sglang.srt.layers.step_rows import DecodeRows, StateRecord
from sglang.srt.model_executor.device_state import DeviceState, StepShape
from sglang.srt.model_executor.graph_capture import StageInGraph, StaticOutput, capture
from sglang.srt.model_executor.step import StepInput, step_arrays
from sglang.srt.utils.device_arrays import DeviceArrays, Field

MAX_PROMPTS = 16
SMALL_BYTES = 2 << 20
"""Of logits that a decode graph keeps for itself: those of a row or two, whose copy would be one launch more."""


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Ascending. batch_sizes: requests of steps without prompts. prompt_tokens: tokens of steps with prompts.
    mixed_decodes: requests that decode in these, with 0 for none. Steps of a kind without sizes have no graphs."""

    batch_sizes: tuple[int, ...] = ()
    prompt_tokens: tuple[int, ...] = ()
    mixed_decodes: tuple[int, ...] = (0,)

    @property
    def any(self) -> bool:
        return bool(self.batch_sizes or self.prompt_tokens)


@dataclass(slots=True)
class CapturedStep:
    """What one graph leaves behind, and what must be refreshed before its replay."""

    decode: DecodeRows | None
    positions: torch.Tensor  # [T] int64
    hidden: torch.Tensor | None
    """[T, H] of a step with prompts, of a stage that sends, or where all are kept; of others the graph uses the memory
    again."""
    logits: torch.Tensor
    """As `CausalLM.step_logits` has them, of every row that may be sampled."""
    state_records: Sequence[StateRecord] = ()
    """Of a step whose tokens may be taken back; held, so that no graph uses their memory again."""


class GraphRunner:
    """Owns the captured graphs, and the arrays and results at fixed addresses."""

    def __init__(self, state: DeviceState, sizes: GraphSizes, keeps_hidden: bool = False) -> None:
        """keeps_hidden: steps without prompts leave their hidden states, too."""
        self.state, self.sizes = state, sizes
        self.width, self.num_windows = state.tokens_per_step, state.num_tables - 1
        shapes = list(self._shapes())
        self._arrays: dict[bool, DeviceArrays] = {}
        """Of steps with and without prompts."""
        for has_prompts, fields in ((True, self._prompt_fields()), (False, self._token_fields())):
            if fields:
                self._arrays[has_prompts] = DeviceArrays(fields, state.device)
                self._arrays[has_prompts].load()
        self.stage = StageInGraph(state.model, max(shape.num_tokens for shape in shapes))
        self.keeps_hidden = keeps_hidden or self.stage.sends
        self._logits = {has_prompts: StaticOutput() for has_prompts in (True, False)}
        self._hidden = {has_prompts: StaticOutput() for has_prompts in (True, False)}
        self.graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self.steps: dict[StepShape, CapturedStep] = {}
        state.attention.prepare_graphs(tuple(sorted({s.num_decodes for s in shapes if s.num_decodes})))
        pool: Any = None
        for shape in shapes:
            self._capture(shape, pool)
            pool = pool or self.graphs[shape].pool()

    # --- shapes and arrays --------------------------------------------------------------------------------------------

    def _shapes(self) -> Iterator[StepShape]:
        """Of all graphs, of each kind the largest first: smaller graphs then reuse its memory."""
        for tokens in reversed(self.sizes.prompt_tokens):
            for decodes in reversed([size for size in self.sizes.mixed_decodes if size <= tokens]):
                yield StepShape(tokens, decodes, has_prompts=True)
        for size in reversed(self.sizes.batch_sizes):
            yield StepShape(size * self.width, size, self.width)

    def shape_of(self, step: StepInput) -> StepShape | None:
        """Of the graph that the step runs in; None if it has none."""
        num_decodes = step.num_decodes
        if step.prompts is None:
            size = _at_least(self.sizes.batch_sizes, num_decodes)
            return None if size is None else StepShape(size * self.width, size, self.width)
        decodes = _at_least(self.sizes.mixed_decodes, num_decodes)
        if decodes is None or len(step.prompts.extend_lens) > MAX_PROMPTS:
            return None
        tokens = _at_least(self.sizes.prompt_tokens, max(len(step.out_cache_loc), decodes))
        return None if tokens is None else StepShape(tokens, decodes, has_prompts=True)

    def fits_decodes(self, num_reqs: int) -> bool:
        """Whether steps without prompts of so many requests have graphs."""
        return _at_least(self.sizes.batch_sizes, num_reqs) is not None

    def writes_tables(self, step: StepInput) -> bool:
        """Whether the graph of the step writes its `table_update`: new slots of windows, and nothing else. A builder
        that plans on the host reads them in the tables before the replay."""
        update = step.table_update
        if update is None or step.prompts is not None or step.widths is not None:
            return False
        few = len(update.index) <= self.num_windows * len(step.slots) and not len(update.state_targets)
        return few and not self.state.attention.decode_plans_on_host

    def _token_fields(self) -> dict[str, Field]:
        """Of steps without prompts."""
        if not self.sizes.batch_sizes:
            return {}
        largest = self.sizes.batch_sizes[-1]
        fields = {"decode_slots": Field((largest,), np.int64), "num_tokens": Field((1,), np.int32)}
        if self.state.drafter is not None:
            return {**fields, "widths": Field((largest,), np.int32)}
        fields["decode_loc"] = Field((largest,), np.int64)
        fields["decode_lens"] = Field((largest,), np.int32, 1)
        if self.num_windows:
            # What a step leaves of them writes once more that the padding row has the padding slot.
            most = (self.num_windows * largest,)
            fields |= {"table_index": Field(most, np.int64), "table_value": Field(most, np.int32)}
        return fields

    def _prompt_fields(self) -> dict[str, Field]:
        if not self.sizes.prompt_tokens:
            return {}
        tokens, prompts = (self.sizes.prompt_tokens[-1],), (MAX_PROMPTS + 1,)
        largest = self.sizes.mixed_decodes[-1]
        decodes, sampled = (largest,), (largest + MAX_PROMPTS,)
        return {
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
            "sampled_lens": Field(sampled, np.int32),
            "num_tokens": Field((1,), np.int32),
        }

    # --- capture and replay -------------------------------------------------------------------------------------------

    def _capture(self, shape: StepShape, pool: Any) -> None:
        arrays = self._arrays[shape.has_prompts]
        if shape.has_prompts:  # all tokens are of one prompt, which is padding
            ends = np.full(MAX_PROMPTS + 2, shape.num_tokens, np.int32)
            ends[0] = 0
            arrays.load(start_loc=ends, seq_lens=np.array([shape.num_tokens], np.int32))
        # What builders share between graphs is then this one's.
        self._refresh(self.state.batch(arrays, shape).decode, [])
        self.graphs[shape] = capture(partial(self._compute, shape), pool)

    def _compute(self, shape: StepShape) -> None:
        """To be captured."""
        arrays, model = self._arrays[shape.has_prompts], self.state.model
        if "table_index" in arrays:
            most = self.num_windows * shape.num_tokens
            self.state.req_to_token.view(-1)[arrays["table_index"][:most]] = arrays["table_value"][:most]
        batch = self.state.batch(arrays, shape, num_valid_tokens=arrays["num_tokens"])
        hidden = sampled = self.stage.compute(batch)
        kept = self._hidden[shape.has_prompts].keep(hidden) if shape.has_prompts or self.keeps_hidden else None
        if shape.has_prompts:
            sampled = hidden[arrays["last_rows"][: shape.num_decodes + MAX_PROMPTS]]
        logits = model.step_logits(sampled)
        if shape.has_prompts or logits.nbytes > SMALL_BYTES or not logits.is_contiguous():
            logits = self._logits[shape.has_prompts].keep(logits)
        self.steps[shape] = CapturedStep(batch.decode, batch.positions, kept, logits, batch.state_records or ())

    def _refresh(self, rows: DecodeRows | None, seq_lens: list[int]) -> None:
        """The one place where what attention plans on the host follows a step, before every replay of any graph.
        seq_lens: of the decoding requests; the rows behind them are padding."""
        if rows is not None:
            rows.seq_lens_cpu = seq_lens + [1] * (len(rows) - len(seq_lens))
            self.state.attention.refresh(rows)

    def replay(self, shape: StepShape, step: StepInput) -> tuple[DeviceArrays, CapturedStep]:
        """The step's arrays, and what the graph left of it; both have the padding of the graph behind what is the
        step's, and are valid until the next replay."""
        arrays, captured = self._arrays[shape.has_prompts], self.steps[shape]
        self._load(arrays, shape, step)
        self._refresh(captured.decode, step.seq_lens[: step.num_decodes].tolist())
        self.stage.replay(self.graphs[shape], shape.num_tokens, captured.hidden)
        return arrays, self.steps[shape]

    def _load(self, arrays: DeviceArrays, shape: StepShape, step: StepInput) -> None:
        values, num_tokens = step_arrays(step), len(step.slots) * shape.width
        if step.prompts is not None:
            num_tokens = len(step.out_cache_loc)
            start_loc = np.full(MAX_PROMPTS + 2, num_tokens, np.int32)
            start_loc[: len(values["start_loc"])] = values["start_loc"]
            start_loc[-1] = shape.num_tokens
            values |= {"start_loc": start_loc, "is_decode": np.ones(step.num_decodes, np.bool_)}
        elif step.table_update is not None and self.writes_tables(step):
            values |= {"table_index": step.table_update.index, "table_value": step.table_update.value}
        arrays.load(**values, num_tokens=np.array([num_tokens], np.int32))


def _at_least(ascending: tuple[int, ...], number: int) -> int | None:
    i = bisect.bisect_left(ascending, number)
    return ascending[i] if i < len(ascending) else None
