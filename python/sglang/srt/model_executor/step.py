"""One step as the scheduler hands it to the model runner (host arrays), and what comes back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sglang.srt.mem_cache.kv_table import TableUpdate
from sglang.srt.sampling.logprobs import HostLogprobs, LogprobRequest


@dataclass(slots=True)
class LogprobSpec:
    """Which log probabilities to return, one entry a request."""

    wanted: list[bool]
    top_nums: list[int]
    token_ids: list[list[int] | None]


@dataclass(slots=True)
class PromptLogprobs:
    """P rows of an EXTEND step whose prediction of the next prompt token is wanted, for the requests of `spec`."""

    spec: LogprobSpec
    rows: np.ndarray  # [P] int64, rows of the step's [T] tokens
    targets: np.ndarray  # [P] int64, the token after each of these
    request: np.ndarray  # [P] int64, entry of `spec`


@dataclass(slots=True)
class ExtendInput:
    """What an EXTEND step has besides the fields of every step. Its first `num_decodes` requests decode: each brings
    the token that was sampled last, which only the device knows. The other P = B - num_decodes bring prompt tokens."""

    input_ids: np.ndarray  # [T - num_decodes] int64, of the prompts
    prefix_lens: np.ndarray  # [P] int32
    extend_lens: np.ndarray  # [P] int32
    sample_rows: np.ndarray  # [R] int64, the requests (of B) whose next token is wanted, in order
    num_decodes: int = 0
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(slots=True)
class StepInput:
    """B requests; T new tokens. DECODE when `extend` is None (then T == B)."""

    slots: np.ndarray  # [B] int64, request slots
    seq_lens: np.ndarray  # [B] int32, lengths including the new tokens
    out_cache_loc: np.ndarray  # [T] int32
    extend: ExtendInput | None = None
    table_update: TableUpdate | None = None
    vocab_mask: np.ndarray | None = None  # [R, ceil(V / 32)] int32, allowed tokens of the sampled rows
    logprobs: LogprobSpec | None = None  # of the sampled rows

    @property
    def sampled_slots(self) -> np.ndarray:
        return self.slots if self.extend is None else self.slots[self.extend.sample_rows]


@dataclass(frozen=True, slots=True)
class ExtendLayout:
    """Where the T new tokens of an EXTEND step lie: those of the decoding requests first, then prompt after prompt."""

    positions: np.ndarray  # [T] int64, of each token in its request
    start_loc: np.ndarray  # [P + 1] int32, first token of each prompt, and T
    last_rows: np.ndarray  # [R] int64, the last token of each request whose next token is wanted


def extend_layout(step: StepInput) -> ExtendLayout:
    """Derived from the lengths of an EXTEND step."""
    extend = step.extend
    assert extend is not None
    count = extend.num_decodes
    start_loc = count + np.concatenate(([0], np.cumsum(extend.extend_lens))).astype(np.int32)
    of_prompt = np.repeat(np.arange(len(extend.extend_lens)), extend.extend_lens)
    in_prompt = np.arange(count, start_loc[-1], dtype=np.int64) - start_loc[of_prompt]
    positions = np.concatenate((step.seq_lens[:count] - 1, in_prompt + extend.prefix_lens[of_prompt]))
    last_rows = np.concatenate((np.arange(count), start_loc[1:] - 1))[extend.sample_rows]
    return ExtendLayout(positions.astype(np.int64), start_loc, last_rows.astype(np.int64))


@dataclass(slots=True)
class PendingLogprobs:
    """Packed log probabilities on their way to the host."""

    packed: torch.Tensor  # [R, W] int32, host memory
    request: LogprobRequest

    def unpack(self) -> HostLogprobs:
        return HostLogprobs.unpack(self.packed.numpy(), self.request)


@dataclass(slots=True)
class StepResult:
    """What a step sends back to the host; nothing here may be read before `wait`."""

    next_token_ids: torch.Tensor  # [R] int64, host memory
    ready: torch.cuda.Event | None
    logprobs: PendingLogprobs | None = None
    prompt_logprobs: PendingLogprobs | None = None

    def wait(self) -> None:
        if self.ready is not None:
            self.ready.synchronize()
