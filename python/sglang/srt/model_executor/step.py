"""One step as the scheduler hands it to the model runner (host arrays), and what comes back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sglang.srt.mem_cache.kv_table import TableUpdate
from sglang.srt.sampling.logprobs import LogprobRequest, LogprobResult


@dataclass(slots=True)
class ExtendInput:
    """What an EXTEND step has besides the fields of every step. Its first `num_decodes` requests decode: each brings
    the token that was sampled last, which only the device knows. The other P = B - num_decodes bring prompt tokens."""

    input_ids: np.ndarray  # [T - num_decodes] int64, of the prompts
    prefix_lens: np.ndarray  # [P] int32
    extend_lens: np.ndarray  # [P] int32
    sample_rows: np.ndarray  # [R] int64, the requests (of B) whose next token is wanted, in order
    num_decodes: int = 0
    prompt_logprobs: LogprobRequest | None = None
    embed_rows: np.ndarray | None = None  # [E] int64, sampled rows (of R) whose final hidden state is wanted


@dataclass(slots=True)
class StepInput:
    """B requests; T new tokens. DECODE when `extend` is None (then T == B).

    Where the device has a drafter, lengths of decoding requests are upper bounds: it knows better. Their new cache
    slots come with `table_update` then, and `out_cache_loc` has no entries of theirs."""

    slots: np.ndarray  # [B] int64, request slots
    seq_lens: np.ndarray  # [B] int32, lengths including the new tokens
    out_cache_loc: np.ndarray  # [T] int32
    extend: ExtendInput | None = None
    table_update: TableUpdate | None = None
    widths: np.ndarray | None = None
    """[B] int32, 1 to k: tokens that each request brings to verify, the last sampled one included."""
    logprobs: LogprobRequest | None = None  # of the sampled rows

    @property
    def is_decode(self) -> bool:
        """Each request brings the token that was sampled last, and nothing to verify."""
        return self.extend is None and self.widths is None

    @property
    def sampled_slots(self) -> np.ndarray:
        return self.slots if self.extend is None else self.slots[self.extend.sample_rows]


def extend_arrays(step: StepInput) -> dict[str, np.ndarray]:
    """What the device needs of an EXTEND step of T tokens: those of D decoding requests first, then P prompts one after
    the other; R requests are sampled.

    input_ids (0 where the device knows), positions, out_cache_loc [T]; of the prompts slots, seq_lens, prefix_lens [P]
    and start_loc [P + 1], the first token of each, and T; of the decoding requests decode_slots, decode_lens,
    decode_loc [D]; last_rows (the last token of each), sampled_slots, sampled_lens [R].
    """
    extend = step.extend
    assert extend is not None
    count = extend.num_decodes
    start_loc = count + np.concatenate(([0], np.cumsum(extend.extend_lens))).astype(np.int32)
    of_prompt = np.repeat(np.arange(len(extend.extend_lens)), extend.extend_lens)
    in_prompt = np.arange(count, start_loc[-1], dtype=np.int64) - start_loc[of_prompt]
    positions = np.concatenate((step.seq_lens[:count] - 1, in_prompt + extend.prefix_lens[of_prompt]))
    last_rows = np.concatenate((np.arange(count), start_loc[1:] - 1))[extend.sample_rows]
    out_cache_loc = step.out_cache_loc.astype(np.int64)
    return {
        "input_ids": np.concatenate((np.zeros(count, np.int64), extend.input_ids)),
        "positions": positions.astype(np.int64),
        "out_cache_loc": out_cache_loc,
        "slots": step.slots[count:],
        "seq_lens": step.seq_lens[count:],
        "prefix_lens": extend.prefix_lens,
        "start_loc": start_loc,
        "decode_slots": step.slots[:count],
        "decode_lens": step.seq_lens[:count],
        "decode_loc": out_cache_loc[:count],
        "last_rows": last_rows.astype(np.int64),
        "sampled_slots": step.sampled_slots,
        "sampled_lens": step.seq_lens[extend.sample_rows],
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
    prompt_logprobs: LogprobResult | None = None
    embeddings: torch.Tensor | None = None  # [E, H] fp32, on its way to host memory


@dataclass(slots=True)
class StepResult:
    """What a step sends back to the host; nothing here may be read before `wait`."""

    next_token_ids: torch.Tensor  # [R, k] int64, host memory
    ready: torch.cuda.Event | None
    counts: torch.Tensor | None = None
    """[R] int32, host memory: how many tokens of each request stand. None: one of each."""
    logprobs: LogprobResult | None = None
    prompt_logprobs: LogprobResult | None = None
    embeddings: torch.Tensor | None = None  # [E, H] fp32, host memory

    def wait(self) -> None:
        if self.ready is not None:
            self.ready.synchronize()
