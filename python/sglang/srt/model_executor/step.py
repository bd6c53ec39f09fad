"""One step as the scheduler hands it to the model runner (host arrays), and what comes back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang.srt.mem_cache.kv_table import TableUpdate
from sglang.srt.sampling.logprobs import LogprobRequest, LogprobResult

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch
    from sglang.srt.mem_cache.layerwise_load import LayerwiseLoad
    from sglang.srt.utils.device_arrays import DeviceArrays
    from sglang.srt.utils.media_item import MediaItem


@dataclass(slots=True)
class MediaRuns:
    """S runs of placeholder tokens that attend in both directions. Per run: the index of its prompt (among P), its
    first position and its length. A run that is not cached lies in the step as a whole. `tokens`: those of all runs, of
    the step's N prompt tokens."""

    prompts: np.ndarray  # [S] int64
    starts: np.ndarray  # [S] int32
    lens: np.ndarray  # [S] int32
    tokens: np.ndarray  # [sum of lens] int64


@dataclass(slots=True)
class MediaTokens:
    """The placeholder tokens of images among the N prompt tokens of a step, and the features that replace them."""

    positions: (
        np.ndarray | None
    )  # [sections, N] int64, as `ForwardBatch.mrope_positions`; None: positions have no sections
    tokens: np.ndarray  # [M] int64, of the N tokens: those whose inputs are features
    sources: list[tuple[MediaItem, np.ndarray]]  # items, and which of their rows [m] int64, together M
    runs: MediaRuns | None = None  # of some of the M tokens, in order; None: images attend as text does


@dataclass(slots=True)
class PromptTokens:
    """The rows of a step whose token ids the host knows: P requests, each with a run of new tokens."""

    input_ids: np.ndarray  # [sum of extend_lens] int64
    prefix_lens: np.ndarray  # [P] int32
    extend_lens: np.ndarray  # [P] int32
    sample_rows: np.ndarray  # [R] int64, the requests (of all B of the step) whose next token is wanted, in order
    prompt_logprobs: LogprobRequest | None = None
    next_ids: np.ndarray | None = None
    """[P] int64, the token that follows each run, 0 where the step samples it. Only set with speculative decoding."""
    media: MediaTokens | None = None
    """None: no prompt has a token at or before its last placeholder in this step."""
    segments: np.ndarray | None = None
    """[sum of extend_lens] int64, number of the text of a pair, 0 or 1. None: no prompt is a pair."""


@dataclass(slots=True)
class StepInput:
    """The rows of one step: B requests with T new tokens, decoding requests first.

        request           new tokens                         their ids
        0 .. D - 1        1, or with `widths` up to `width`  on the device: the last one sampled, then draft tokens
        D .. B - 1        prompts.extend_lens[i - D]         on the host: prompts.input_ids

    With speculative decoding the lengths of decoding requests are upper bounds, since only the device knows how many
    tokens were accepted. Their new cache slots then come with `table_update`, and `out_cache_loc` has zeros for them,
    or is empty in a step without prompts."""

    slots: np.ndarray  # [B] int64, request slots
    seq_lens: np.ndarray  # [B] int32, lengths including the new tokens
    out_cache_loc: np.ndarray  # [T] int32
    prompts: PromptTokens | None = None
    table_update: TableUpdate | None = None
    widths: np.ndarray | None = None
    """[B] int32, 1 to `width`: tokens that each request brings to verify, the last sampled one included. Only set with
    speculative decoding, in steps without prompts."""
    width: int = 1
    """Rows of each decoding request; without prompts also 1 + the number of draft tokens made after the step."""
    reserved_lens: np.ndarray | None = None
    """[B] int32, positions of each request that have a cache slot. Only where steps bring draft tokens."""
    reads_draft_tokens: bool = False
    """True if the host reads the draft tokens that are made after the step."""
    logprobs: LogprobRequest | None = None  # of the sampled rows
    groups: GroupSteps | None = None
    """The steps of all attention groups, this one among them; None: there is one group only."""
    loads: Sequence[LayerwiseLoad] = ()
    """Layerwise loads of cached prefixes still in progress that the step may read; such a step runs without a graph."""
    hidden_rows: np.ndarray | None = None
    """[N] int64, tokens (of T, or of B * width with `widths`) whose final hidden states are wanted."""

    @property
    def num_decodes(self) -> int:
        """Returns the number of requests that decode; they come before the prompts."""
        return len(self.slots) - (0 if self.prompts is None else len(self.prompts.extend_lens))

    @property
    def has_bidirectional_runs(self) -> bool:
        """Returns whether the step has images whose tokens attend in both directions."""
        return self.prompts is not None and self.prompts.media is not None and self.prompts.media.runs is not None

    @property
    def sampled_slots(self) -> np.ndarray:
        """Returns the request slots [R] whose next token is sampled."""
        return self.slots if self.prompts is None else self.slots[self.prompts.sample_rows]


@dataclass(slots=True)
class PromptLaunches:
    """Counts the steps with prompts launched so far and the host seconds until their logits were launched, and, of
    these steps, those that ran as two microbatches with their tokens."""

    prompt_steps: int = 0
    prompt_launch_seconds: float = 0.0
    two_batch_steps: int = 0
    two_batch_tokens: int = 0

    def timed(self, launch: Callable[[StepInput], LaunchedForward], step: StepInput) -> LaunchedForward:
        """Runs `launch` on a step with prompts, counts and times it, and returns its result."""
        started = time.perf_counter()
        launched = launch(step)
        self.prompt_steps += 1
        self.prompt_launch_seconds += time.perf_counter() - started
        return launched

    def count_two_batch(self, step: StepInput) -> None:
        """Counts a step that ran as two microbatches."""
        self.two_batch_steps += 1
        self.two_batch_tokens += len(step.out_cache_loc)


@dataclass(frozen=True, slots=True)
class GroupSteps:
    """The steps that A attention groups compute together, one per group. A group without work takes part with one
    padding row that is not sampled."""

    steps: tuple[StepInput, ...]
    idle: tuple[bool, ...]
    only_largest: bool
    """True if every sampled row is greedy, so that only the index of its largest logit is needed."""

    @classmethod
    def of(cls, steps: Sequence[StepInput | None], only_largest: bool = False) -> GroupSteps:
        """Builds the groups' steps from one step per group; None stands for a group without work."""
        only_largest = only_largest and not any(step is not None and step.logprobs is not None for step in steps)
        idle = tuple(step is None for step in steps)
        waiting = padding_decodes(
            1, next((step.width for step in steps if step is not None and step.widths is not None), 0)
        )
        return cls(tuple(waiting if step is None else step for step in steps), idle, only_largest)

    @property
    def num_tokens(self) -> list[int]:
        """Returns the number of rows of each group."""
        return [
            len(step.slots) * step.width if step.prompts is None else len(step.out_cache_loc) for step in self.steps
        ]

    @property
    def num_sampled(self) -> list[int]:
        """Returns the number of sampled rows of each group."""
        return [count * step.width for count, step in zip(self.num_requests, self.steps, strict=True)]

    @property
    def num_requests(self) -> list[int]:
        """Returns the number of sampled requests of each group."""
        return [0 if idle else len(step.sampled_slots) for step, idle in zip(self.steps, self.idle, strict=True)]

    @property
    def width(self) -> int:
        """Returns the largest number of rows per request over all groups."""
        return max(step.width for step in self.steps)

    @property
    def has_media(self) -> bool:
        """Returns whether a group's prompts have images."""
        return any(step.prompts is not None and step.prompts.media is not None for step in self.steps)

    @property
    def has_bidirectional_runs(self) -> bool:
        """Returns whether a group has images whose tokens attend in both directions."""
        return any(step.has_bidirectional_runs for step in self.steps)

    @property
    def verifies_during_prefill(self) -> bool:
        """Returns whether a group verifies draft tokens while another computes prompts."""
        verify = any(step.widths is not None and not idle for step, idle in zip(self.steps, self.idle, strict=True))
        return verify and self.has_prompts

    @property
    def num_decodes(self) -> int:
        """Returns the largest number of decoding requests of a group."""
        return max(step.num_decodes for step in self.steps)

    @property
    def num_prompts(self) -> int:
        """Returns the largest number of prompts of a group; 0 if no group has one."""
        return max(0 if step.prompts is None else len(step.prompts.extend_lens) for step in self.steps)

    @property
    def has_prompts(self) -> bool:
        """Returns whether a group computes prompts."""
        return any(step.prompts is not None for step in self.steps)

    def padded_sampled(self, multiple: int) -> int:
        """Returns the number of rows of logits per group with padding: the largest group's, at least 1, rounded up to
        `multiple`."""
        return -(-max(*self.num_sampled, 1) // multiple) * multiple

    @property
    def logprobs(self) -> LogprobRequest | None:
        """Returns the log probabilities asked for the sampled requests of all groups, group after group; None if none
        are."""
        if all(step.logprobs is None for step in self.steps):
            return None
        top_nums: list[int] = []
        token_ids: list[list[int]] = []
        for step, count in zip(self.steps, self.num_requests, strict=True):
            asked = step.logprobs
            top_nums += [0] * count if asked is None else asked.top_nums
            token_ids += [[] for _ in range(count)] if asked is None else asked.token_ids
        return LogprobRequest(top_nums, token_ids)


def padding_decodes(num: int, width: int) -> StepInput:
    """Returns a step in which the padding slot decodes `num` times. width: rows per request of a step that verifies
    draft tokens; 0 for a step that verifies none."""
    step = StepInput(np.zeros(num, np.int64), np.ones(num, np.int32), np.zeros(num, np.int32))
    if width:
        step.widths, step.width, step.reserved_lens = np.ones(num, np.int32), width, np.zeros(num, np.int32)
    return step


def padding_prompt(num: int, prefix: int, draft_tokens: bool) -> StepInput:
    """Returns a step with one prompt of `num` tokens behind `prefix` cached ones on the padding slot. draft_tokens:
    whether steps of this server bring draft tokens."""
    lens, zero = np.array([num], np.int32), np.zeros(1, np.int64)
    prompts = PromptTokens(np.zeros(num, np.int64), np.array([prefix], np.int32), lens, zero, next_ids=zero)
    step = StepInput(zero, lens + prefix, np.zeros(num, np.int32), prompts)
    step.reserved_lens = np.zeros(1, np.int32) if draft_tokens else None
    return step


def no_prompts(idle: bool, num_decodes: int) -> PromptTokens:
    """Returns the empty prompts of a step without any that runs in a graph with prompts. idle: nothing is sampled."""
    empty = np.empty(0, np.int32)
    sampled = np.arange(0 if idle else num_decodes, dtype=np.int64)
    return PromptTokens(np.empty(0, np.int64), empty, empty, sampled)


def step_arrays(step: StepInput) -> dict[str, np.ndarray]:
    """Returns the arrays of a step that the device needs. Its T tokens are those of the D decoding requests, then those
    of the P prompts in order; R requests are sampled.

    Always: decode_slots, decode_lens [D]. Decoding requests have decode_loc [D], or widths [D] when they bring draft
    tokens. With speculative decoding also ends [R], the positions of sampled requests that have a cache slot, and
    next_ids [T], the token that follows each prompt token (0 where the step samples it).

    With prompts also input_ids (0 where only the device knows it), positions, out_cache_loc [T]; per prompt slots,
    seq_lens, prefix_lens [P] and start_loc [P + 1] (each prompt's first token, then T); last_rows (the last token of
    each sampled request) and sampled_slots [R].

    With pairs of texts also segments [T], as in `PromptTokens`.

    With images also media_tokens and feature_rows [M], and sections [3, N] for the N prompt tokens, as in
    `MediaTokens`; for their runs run_tokens [K], run_slots, run_ends, run_starts [S] and run_locs [S + 1] (each run's
    first of the K tokens, then K).
    """
    count, prompts = step.num_decodes, step.prompts
    arrays = {"decode_slots": step.slots[:count], "decode_lens": step.seq_lens[:count]}
    if step.widths is not None:
        assert step.reserved_lens is not None
        return {**arrays, "widths": step.widths, "ends": step.reserved_lens}
    out_cache_loc = step.out_cache_loc.astype(np.int64)
    arrays["decode_loc"] = out_cache_loc[:count]
    if prompts is None:
        return arrays
    start_loc = count + np.concatenate(([0], np.cumsum(prompts.extend_lens))).astype(np.int32)
    of_prompt = np.repeat(np.arange(len(prompts.extend_lens)), prompts.extend_lens)
    in_prompt = np.arange(count, start_loc[-1], dtype=np.int64) - start_loc[of_prompt]
    positions = np.concatenate((step.seq_lens[:count] - 1, in_prompt + prompts.prefix_lens[of_prompt]))
    ends = np.concatenate((np.arange(count), start_loc[1:] - 1))
    last_rows = ends[prompts.sample_rows]
    if step.reserved_lens is not None:
        assert prompts.next_ids is not None
        arrays["ends"] = step.reserved_lens[prompts.sample_rows]
        arrays["next_ids"] = np.zeros(start_loc[-1], np.int64)
        arrays["next_ids"][count:-1] = prompts.input_ids[1:]
        arrays["next_ids"][start_loc[1:] - 1] = prompts.next_ids
    if prompts.segments is not None:
        arrays["segments"] = np.concatenate((np.zeros(count, np.int64), prompts.segments))
    if prompts.media is not None:
        rows = [rows for _, rows in prompts.media.sources]
        arrays["media_tokens"] = prompts.media.tokens
        arrays["feature_rows"] = np.concatenate(rows) if rows else np.empty(0, np.int64)
        if prompts.media.positions is not None:
            arrays["sections"] = prompts.media.positions
        if prompts.media.runs is not None:
            runs = prompts.media.runs
            arrays["run_tokens"] = runs.tokens
            arrays["run_slots"] = step.slots[count:][runs.prompts]
            arrays["run_starts"], arrays["run_ends"] = runs.starts, runs.starts + runs.lens
            arrays["run_locs"] = np.concatenate(([0], np.cumsum(runs.lens))).astype(np.int32)
    return {
        **arrays,
        "input_ids": np.concatenate((np.zeros(count, np.int64), prompts.input_ids)),
        "positions": positions.astype(np.int64),
        "out_cache_loc": out_cache_loc,
        "slots": step.slots[count:],
        "seq_lens": step.seq_lens[count:],
        "prefix_lens": prompts.prefix_lens,
        "start_loc": start_loc,
        "last_rows": last_rows.astype(np.int64),
        "sampled_slots": step.sampled_slots,
    }


@dataclass(slots=True)
class ModelOutput:
    """Output of a launched model for a step. Every tensor may be longer than the step because of padding. After a graph
    replay the tensors are the graph's own, at fixed addresses."""

    batch: ForwardBatch
    arrays: DeviceArrays  # `step_arrays`
    hidden: torch.Tensor | None
    """[T, H] final hidden states. Graphs of steps without prompts keep them only if a later stage or a client needs
    them."""
    logits: torch.Tensor  # as `CausalLM.step_logits` has them, of the rows that may be sampled
    accept: Callable[[torch.Tensor], AcceptResult] | None = None
    """Accepts or rejects the sampled tokens as `DraftRunner.accept` does, from a graph; None: call that one."""


@dataclass(slots=True)
class AcceptResult:
    """Result of verification for each of a step's R sampled requests."""

    counts: torch.Tensor  # [R] int32, accepted tokens: the first `counts` of the request's sampled tokens
    draft_tokens: torch.Tensor  # [R, k - 1] int64, new draft tokens; 0 where none was made
    confidence: torch.Tensor | None = None  # [R, k - 1] fp32, P(draft token is accepted | those before it are)


@dataclass(slots=True)
class LaunchedForward:
    """A step whose R rows of logits are being computed and whose tokens are not sampled yet; valid until the next
    step."""

    step: StepInput
    logits: torch.Tensor  # [R, V] fp32, or this rank's columns of them
    slots: torch.Tensor  # [R] int64, of each row on the device, and
    host_slots: np.ndarray  # on the host
    positions: torch.Tensor  # [R] int32 or int64, length of the sequence before the new token
    output: ModelOutput
    prompt_logprobs: LogprobResult | None = None
    hidden: torch.Tensor | None = None  # [N, H] fp32, on its way to host memory


@dataclass(slots=True)
class StepResult:
    """Results that a step copies to host memory; call `wait` before reading any."""

    next_token_ids: torch.Tensor  # [R, k] int64, host memory
    ready: torch.cuda.Event | None
    counts: torch.Tensor | None = None
    """[R] int32, host memory: accepted tokens of each request. None: one of each."""
    logprobs: LogprobResult | None = None
    prompt_logprobs: LogprobResult | None = None
    hidden: torch.Tensor | None = None  # [N, H] fp32, host memory
    draft_tokens: torch.Tensor | None = None  # [R, k - 1] int64, host memory: what the next step verifies
    confidence: torch.Tensor | None = None  # [R, k - 1] fp32, host memory, as in `AcceptResult`

    def wait(self) -> None:
        """Blocks until the results have arrived in host memory."""
        if self.ready is not None:
            self.ready.synchronize()
