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
    """S runs of placeholders whose tokens attend both ways: of which of the P prompts each is, its first position, and
    its length. All of a run that is not cached is in the step."""

    prompts: np.ndarray  # [S] int64
    starts: np.ndarray  # [S] int32
    lens: np.ndarray  # [S] int32


@dataclass(slots=True)
class MediaTokens:
    """Images among the N prompt tokens of a step."""

    positions: (
        np.ndarray | None
    )  # [sections, N] int64, as `ForwardBatch.mrope_positions`; None: positions have no sections
    tokens: np.ndarray  # [M] int64, of the N tokens: those whose inputs are features
    sources: list[tuple[MediaItem, np.ndarray]]  # items, and which of their rows [m] int64, together M
    runs: MediaRuns | None = None  # of the M tokens, in their order; None: images attend as text does


@dataclass(slots=True)
class PromptTokens:
    """The rows of a step whose tokens the host knows: P requests with a run of new tokens each."""

    input_ids: np.ndarray  # [sum of extend_lens] int64
    prefix_lens: np.ndarray  # [P] int32
    extend_lens: np.ndarray  # [P] int32
    sample_rows: np.ndarray  # [R] int64, the requests (of all B of the step) whose next token is wanted, in order
    prompt_logprobs: LogprobRequest | None = None
    next_ids: np.ndarray | None = None
    """[P] int64, the token behind each run, 0 where the step samples it. Only where steps bring draft tokens."""
    media: MediaTokens | None = None
    """None: no prompt has a token at or before its last placeholder in this step."""


@dataclass(slots=True)
class StepInput:
    """The rows of one step: B requests with T new tokens, those that decode first.

        request           new tokens                         their ids
        0 .. D - 1        1, or with `widths` up to `width`  on the device: the last one sampled, then draft tokens
        D .. B - 1        prompts.extend_lens[i - D]         on the host: prompts.input_ids

    Where steps bring draft tokens, lengths of decoding requests are upper bounds: the device knows better. Their new
    cache slots come with `table_update` then, and `out_cache_loc` has zeros for them, or without prompts nothing."""

    slots: np.ndarray  # [B] int64, request slots
    seq_lens: np.ndarray  # [B] int32, lengths including the new tokens
    out_cache_loc: np.ndarray  # [T] int32
    prompts: PromptTokens | None = None
    table_update: TableUpdate | None = None
    widths: np.ndarray | None = None
    """[B] int32, 1 to `width`: tokens that each request brings to verify, the last sampled one included. Only without
    prompts, and only where steps bring draft tokens."""
    width: int = 1
    """Rows of each request that decodes; without prompts also one more than the draft tokens that are made behind
    it."""
    reserved_lens: np.ndarray | None = None
    """[B] int32, positions of each request that have a cache slot. Only where steps bring draft tokens."""
    reads_draft_tokens: bool = False
    """True if the host wants to know the draft tokens that are made behind the step."""
    logprobs: LogprobRequest | None = None  # of the sampled rows
    groups: GroupSteps | None = None
    """The steps of all attention groups, of which this is one; None: all have this one, or there are none."""
    loads: Sequence[LayerwiseLoad] = ()
    """Loads of cached prefixes that are under way and that the step may read. It has no graph then."""
    hidden_rows: np.ndarray | None = None
    """[N] int64, tokens (of T, or of B * width with `widths`) whose final hidden states are wanted."""

    @property
    def num_decodes(self) -> int:
        return len(self.slots) - (0 if self.prompts is None else len(self.prompts.extend_lens))

    @property
    def has_runs(self) -> bool:
        """True if images in it see themselves both ways."""
        return self.prompts is not None and self.prompts.media is not None and self.prompts.media.runs is not None

    @property
    def sampled_slots(self) -> np.ndarray:
        return self.slots if self.prompts is None else self.slots[self.prompts.sample_rows]


@dataclass(slots=True)
class PromptLaunches:
    """Steps with prompts that were launched so far, and the seconds of the host up to their logits; of these steps
    those that ran as two microbatches, and their tokens."""

    prompt_steps: int = 0
    prompt_launch_seconds: float = 0.0
    halved_steps: int = 0
    halved_tokens: int = 0

    def timed(self, launch: Callable[[StepInput], LaunchedForward], step: StepInput) -> LaunchedForward:
        """Launches a step with prompts, and counts it."""
        started = time.perf_counter()
        launched = launch(step)
        self.prompt_steps += 1
        self.prompt_launch_seconds += time.perf_counter() - started
        return launched

    def count_halved(self, step: StepInput) -> None:
        self.halved_steps += 1
        self.halved_tokens += len(step.out_cache_loc)


@dataclass(frozen=True, slots=True)
class GroupSteps:
    """The steps that A groups compute together, one of each. A group without work has that of one padding row, of which
    no row is sampled."""

    steps: tuple[StepInput, ...]
    idle: tuple[bool, ...]
    only_largest: bool
    """True if all that is wanted of every row of logits is its largest entry."""

    @classmethod
    def of(cls, steps: Sequence[StepInput | None], only_largest: bool = False) -> GroupSteps:
        """None: the group has no work."""
        only_largest = only_largest and not any(step is not None and step.logprobs is not None for step in steps)
        idle = tuple(step is None for step in steps)
        waiting = padding_decodes(
            1, next((step.width for step in steps if step is not None and step.widths is not None), 0)
        )
        return cls(tuple(waiting if step is None else step for step in steps), idle, only_largest)

    @property
    def num_tokens(self) -> list[int]:
        """Rows of each group."""
        return [
            len(step.slots) * step.width if step.prompts is None else len(step.out_cache_loc) for step in self.steps
        ]

    @property
    def num_sampled(self) -> list[int]:
        """Sampled rows of each group."""
        return [count * step.width for count, step in zip(self.num_requests, self.steps, strict=True)]

    @property
    def num_requests(self) -> list[int]:
        """Sampled requests of each group."""
        return [0 if idle else len(step.sampled_slots) for step, idle in zip(self.steps, self.idle, strict=True)]

    @property
    def width(self) -> int:
        """Most rows of a request of any group."""
        return max(step.width for step in self.steps)

    @property
    def has_media(self) -> bool:
        return any(step.prompts is not None and step.prompts.media is not None for step in self.steps)

    @property
    def has_runs(self) -> bool:
        """True if a group has images that see themselves both ways."""
        return any(step.has_runs for step in self.steps)

    @property
    def verify_beside_prompts(self) -> bool:
        """True if a group verifies draft tokens while another computes prompts."""
        verify = any(step.widths is not None and not idle for step, idle in zip(self.steps, self.idle, strict=True))
        return verify and self.has_prompts

    @property
    def num_decodes(self) -> int:
        """Most requests of a group that decode."""
        return max(step.num_decodes for step in self.steps)

    @property
    def num_prompts(self) -> int:
        """Most prompts of a group; 0 if no group has one."""
        return max(0 if step.prompts is None else len(step.prompts.extend_lens) for step in self.steps)

    @property
    def has_prompts(self) -> bool:
        return any(step.prompts is not None for step in self.steps)

    def padded_sampled(self, multiple: int) -> int:
        """Rows of logits of a group with padding: a multiple, and at least one row."""
        return -(-max(*self.num_sampled, 1) // multiple) * multiple

    @property
    def logprobs(self) -> LogprobRequest | None:
        """Returns what is asked of the sampled requests of all groups, one group behind the other."""
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
    """Returns a step in which the padding slot decodes `num` times. width: rows of each request of a step that verifies
    draft tokens; 0: it does not."""
    step = StepInput(np.zeros(num, np.int64), np.ones(num, np.int32), np.zeros(num, np.int32))
    if width:
        step.widths, step.width, step.reserved_lens = np.ones(num, np.int32), width, np.zeros(num, np.int32)
    return step


def padding_prompt(num: int, prefix: int, draft_tokens: bool) -> StepInput:
    """Returns a prompt of `num` tokens behind `prefix` cached ones on the padding slot. draft tokens: whether steps of
    this server bring any."""
    lens, zero = np.array([num], np.int32), np.zeros(1, np.int64)
    prompts = PromptTokens(np.zeros(num, np.int64), np.array([prefix], np.int32), lens, zero, next_ids=zero)
    step = StepInput(zero, lens + prefix, np.zeros(num, np.int32), prompts)
    step.reserved_lens = np.zeros(1, np.int32) if draft_tokens else None
    return step


def no_prompts(idle: bool, num_decodes: int) -> PromptTokens:
    """Returns the prompts of a step that has none, for a graph with prompts."""
    empty = np.empty(0, np.int32)
    sampled = np.arange(0 if idle else num_decodes, dtype=np.int64)
    return PromptTokens(np.empty(0, np.int64), empty, empty, sampled)


def step_arrays(step: StepInput) -> dict[str, np.ndarray]:
    """Returns the arrays that the device needs of a step of T tokens: those of D decoding requests first, then P
    prompts one after the other.

    Of the decoding requests decode_slots, decode_lens [D], and decode_loc [D] or, where they bring draft tokens, widths
    [D]. Where steps bring draft tokens also ends [R], positions of the sampled requests that have a cache slot, and
    next_ids [T], the tokens behind those of prompts, 0 where the step samples them.
    With prompts also input_ids (0 where the device knows), positions, out_cache_loc [T]; of the prompts slots,
    seq_lens, prefix_lens [P] and start_loc [P + 1], the first token of each, and T; last_rows (the last token of each
    of R sampled requests) and sampled_slots [R]. With images also media_tokens and feature_rows [M], and sections
    [3, N] of the N tokens of prompts, as in `MediaTokens`; of their runs run_slots, run_ends, run_starts [S] and
    run_locs [S + 1], the first of M of each, and M.
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
    if prompts.media is not None:
        rows = [rows for _, rows in prompts.media.sources]
        arrays["media_tokens"] = prompts.media.tokens
        arrays["feature_rows"] = np.concatenate(rows) if rows else np.empty(0, np.int64)
        if prompts.media.positions is not None:
            arrays["sections"] = prompts.media.positions
        if prompts.media.runs is not None:
            runs = prompts.media.runs
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
    """Output of a launched model for a step, all of it possibly longer by padding: the arrays at fixed addresses are
    those of a graph."""

    batch: ForwardBatch
    arrays: DeviceArrays  # `step_arrays`
    hidden: torch.Tensor | None
    """[T, H] final hidden states. Graphs of steps without prompts keep them only where somebody reads them."""
    logits: torch.Tensor  # as `CausalLM.step_logits` has them, of the rows that may be sampled
    accept: Callable[[torch.Tensor], AcceptResult] | None = None
    """Settles the sampled tokens as `DraftRunner.accept` does, where that is in a graph, too."""


@dataclass(slots=True)
class AcceptResult:
    """Outcome of a sampled step, for each of its R sampled requests."""

    counts: torch.Tensor  # [R] int32: of the tokens that were sampled for it the first so many stand
    draft_tokens: torch.Tensor  # [R, k - 1] int64; those that were not made are 0
    confidence: torch.Tensor | None = None  # [R, k - 1] fp32: how likely each draft token stands if those before it do


@dataclass(slots=True)
class LaunchedForward:
    """A step whose R rows of logits are on their way and whose tokens are not sampled yet; valid until the next one."""

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
    """Results that a step sends back to the host; nothing here may be read before `wait`."""

    next_token_ids: torch.Tensor  # [R, k] int64, host memory
    ready: torch.cuda.Event | None
    counts: torch.Tensor | None = None
    """[R] int32, host memory: how many tokens of each request stand. None: one of each."""
    logprobs: LogprobResult | None = None
    prompt_logprobs: LogprobResult | None = None
    hidden: torch.Tensor | None = None  # [N, H] fp32, host memory
    draft_tokens: torch.Tensor | None = None  # [R, k - 1] int64, host memory: what the next step verifies
    confidence: torch.Tensor | None = None  # [R, k - 1] fp32, host memory, as in Settled

    def wait(self) -> None:
        if self.ready is not None:
            self.ready.synchronize()
