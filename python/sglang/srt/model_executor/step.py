"""One step as the scheduler hands it to the model runner (host arrays), and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang.srt.mem_cache.kv_table import TableUpdate
from sglang.srt.sampling.logprobs import LogprobRequest, LogprobResult

if TYPE_CHECKING:
    from sglang.srt.layers.step_rows import StateRecord


@dataclass(slots=True)
class PromptTokens:
    """The rows of a step whose tokens the host knows: P requests with a run of new tokens each."""

    input_ids: np.ndarray  # [sum of extend_lens] int64
    prefix_lens: np.ndarray  # [P] int32
    extend_lens: np.ndarray  # [P] int32
    sample_rows: np.ndarray  # [R] int64, the requests (of all B of the step) whose next token is wanted, in order
    prompt_logprobs: LogprobRequest | None = None


@dataclass(slots=True)
class StepInput:
    """The rows of one step: B requests with T new tokens, those that decode first.

        request           new tokens                         their ids
        0 .. D - 1        1, or with `widths` up to k        on the device: the last one sampled, then guesses
        D .. B - 1        prompts.extend_lens[i - D]         on the host: prompts.input_ids

    Where the device has a drafter, lengths of decoding requests are upper bounds: it knows better. Their new cache
    slots come with `table_update` then, and `out_cache_loc` has no entries of theirs."""

    slots: np.ndarray  # [B] int64, request slots
    seq_lens: np.ndarray  # [B] int32, lengths including the new tokens
    out_cache_loc: np.ndarray  # [T] int32
    prompts: PromptTokens | None = None
    table_update: TableUpdate | None = None
    widths: np.ndarray | None = None
    """[B] int32, 1 to k: tokens that each request brings to verify, the last sampled one included. Only without
    prompts."""
    logprobs: LogprobRequest | None = None  # of the sampled rows
    hidden_rows: np.ndarray | None = None
    """[N] int64, tokens (of T, or of B k with `widths`) whose final hidden states are wanted."""

    @property
    def num_decodes(self) -> int:
        return len(self.slots) - (0 if self.prompts is None else len(self.prompts.extend_lens))

    @property
    def sampled_slots(self) -> np.ndarray:
        return self.slots if self.prompts is None else self.slots[self.prompts.sample_rows]


def step_arrays(step: StepInput) -> dict[str, np.ndarray]:
    """What the device needs of a step of T tokens: those of D decoding requests first, then P prompts one after the
    other.

    Of the decoding requests decode_slots, decode_lens [D], and decode_loc [D] or, where they bring guesses, widths [D].
    With prompts also input_ids (0 where the device knows), positions, out_cache_loc [T]; of the prompts slots,
    seq_lens, prefix_lens [P] and start_loc [P + 1], the first token of each, and T; last_rows (the last token of each
    of R sampled requests), sampled_slots, sampled_lens [R].
    """
    count, prompts = step.num_decodes, step.prompts
    arrays = {"decode_slots": step.slots[:count], "decode_lens": step.seq_lens[:count]}
    if step.widths is not None:
        return {**arrays, "widths": step.widths}
    out_cache_loc = step.out_cache_loc.astype(np.int64)
    arrays["decode_loc"] = out_cache_loc[:count]
    if prompts is None:
        return arrays
    start_loc = count + np.concatenate(([0], np.cumsum(prompts.extend_lens))).astype(np.int32)
    of_prompt = np.repeat(np.arange(len(prompts.extend_lens)), prompts.extend_lens)
    in_prompt = np.arange(count, start_loc[-1], dtype=np.int64) - start_loc[of_prompt]
    positions = np.concatenate((step.seq_lens[:count] - 1, in_prompt + prompts.prefix_lens[of_prompt]))
    last_rows = np.concatenate((np.arange(count), start_loc[1:] - 1))[prompts.sample_rows]
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
        "sampled_lens": step.seq_lens[prompts.sample_rows],
    }


@dataclass(slots=True)
class LaunchedForward:
    """A step whose R rows of logits are on their way and whose tokens are not sampled yet; valid until the next one."""

    step: StepInput
    logits: torch.Tensor  # [R, V] fp32, or this rank's columns of them
    slots: torch.Tensor  # [R] int64, of each row on the device, and
    host_slots: np.ndarray  # on the host
    positions: torch.Tensor  # [R] int32 or int64, length of the sequence before the new token
    widths: torch.Tensor | None = None  # [B] int32, of a step that verifies: R = B k
    state_records: Sequence[StateRecord] = ()  # of such a step: what its states go on from
    prompt_logprobs: LogprobResult | None = None
    hidden: torch.Tensor | None = None  # [N, H] fp32, on its way to host memory


@dataclass(slots=True)
class StepResult:
    """What a step sends back to the host; nothing here may be read before `wait`."""

    next_token_ids: torch.Tensor  # [R, k] int64, host memory
    ready: torch.cuda.Event | None
    counts: torch.Tensor | None = None
    """[R] int32, host memory: how many tokens of each request stand. None: one of each."""
    logprobs: LogprobResult | None = None
    prompt_logprobs: LogprobResult | None = None
    hidden: torch.Tensor | None = None  # [N, H] fp32, host memory

    def wait(self) -> None:
        if self.ready is not None:
            self.ready.synchronize()
