"""The call interface of the tokenizer manager: what a caller asks for and what comes back, piece by piece.

Used by the HTTP endpoints and by the in-process engine; nothing here knows about either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sglang.srt.managers.front.media.media_source import MediaSource
from sglang.srt.managers.wire.io_struct import FinishReason, MediaItem, TokenMeta
from sglang.srt.managers.wire.token_ids import Ids
from sglang.srt.sampling.output_logprobs import OutputLogprobs
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.sampling.thinking_budget import ThinkingBudget


class RequestError(ValueError):
    """Raised when a request is refused or fails. `status_code` is the HTTP status: 400 the caller's mistake, 503 queue
    full or shutting down, 500 the engine's fault. `retry_after`: seconds after which the same request may succeed."""

    def __init__(self, message: str, status_code: int = 400, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status_code = status_code
        self.retry_after = retry_after


def refuse_aborted(finish: FinishReason) -> None:
    """Raises RequestError 503 for an aborted answer, for APIs that have no other way to report it."""
    if finish.type == "abort":
        raise RequestError("the answer was aborted at the server; send the request again", 503)


class TextPair(NamedTuple):
    """Two texts of which a model reads the second beside the first, such as a query and a document."""

    first: str
    second: str


@dataclass(slots=True, kw_only=True)
class GenerateRequest:
    """One call: a single prompt or a batch of prompts, each with `n` samples.

    Exactly one of `text` and `input_ids` is given. A list of strings (or of id lists) is a batch, also with one entry.
    Per-prompt values (`sampling_params`, `rid`, `return_hidden_states`, the logprob options, `cache_salt`, `extra_key`)
    are either one value for all prompts or a list with an entry for each. Keys of `sampling_params` that the request
    does not set come from the server's preferred ones, then generation_config.json, then the defaults of
    SamplingParams; `max_new_tokens=None` given explicitly means "until the context is full".
    """

    text: str | list[str] | list[TextPair] | None = None
    input_ids: list[int] | list[list[int]] | Ids | None = None
    sampling_params: SamplingParams | dict[str, Any] | list[dict[str, Any]] | None = None
    stream: bool = False
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1
    top_logprobs_num: int | list[int] = 0
    token_ids_logprob: list[int] | list[list[int]] | None = None
    return_text_in_logprobs: bool = False
    return_hidden_states: bool | list[bool] = False
    """Final hidden states of the prompt and of every output token but the last come with the last output."""
    embed: bool = False
    """Final hidden states are returned instead of text; `sampling_params` must not be given then."""
    rid: str | list[str] | None = None
    priority: int | None = None
    thinking: ThinkingBudget | None = None
    thinking_share: float = 1.0
    """Largest share of the longest output that thoughts may take; `thinking` gives their marks."""
    counts_thoughts: bool = False
    """True if `reasoning_tokens` are counted, by the marks of `thinking`."""
    cache_salt: str | list[str | None] | None = None
    extra_key: str | list[str | None] | None = None
    """Prompts share cached prefixes only where both are equal; an empty one counts as None."""
    lora_path: str | list[str | None] | None = None
    """The names of LoRA adapters, one for all prompts or one for each; None or an empty one: none."""
    media: list[list[MediaSource]] | None = None
    """Images and videos of each prompt, in the order of their placeholders."""
    media_items: list[MediaItem] = field(default_factory=list)
    """Items of a single prompt of `input_ids` whose placeholders are in place already; given instead of `media`."""
    keep_s: float = 0.0
    """Seconds for which the prompt stays in the prefix cache before others; 0: like any prompt."""
    repeats_output: bool = False
    """True if each event of a stream contains everything so far, so that fewer log probabilities are allowed."""
    replica: int | None = None
    """Index of the replica that computes it; None: --load-balance-method decides."""
    add_special_tokens: bool = True
    """True if tokenizing `text` adds BOS and the like; off for text that a chat template rendered."""
    cuts_length: bool = False
    """True if `max_new_tokens` is cut to what fits the context; otherwise a call with more is refused."""
    keeps_texts: bool = False
    """True if the stream should keep the texts of the prompts."""
    kept_bytes: int = 0
    """Approximate bytes of the client's request that the caller keeps until the answer has ended."""
    on_submitted: Callable[[int], None] | None = None
    """Called when the sequences were sent and the call has released its prompts, with the approximate bytes of the
    client's request that are still held; None: the call keeps its prompts."""

    @property
    def is_batch(self) -> bool:
        """Returns whether the caller gave a list of prompts (and gets a list of results)."""
        if self.text is not None:
            return not isinstance(self.text, str)
        return isinstance(self.input_ids, list) and bool(self.input_ids) and not isinstance(self.input_ids[0], int)

    def release_inputs(self) -> None:
        """Releases what the sequences hold themselves by now, or no longer need."""
        self.text = self.input_ids = self.media = self.sampling_params = self.token_ids_logprob = None
        self.media_items = []

    @property
    def num_prompts(self) -> int:
        """Returns the number of prompts in the call."""
        prompts: Any = self.text if self.text is not None else self.input_ids
        return len(prompts) if self.is_batch else 1


@dataclass(slots=True)
class GenerateOutput:
    """New part of one sequence since its previous output. Outputs that wait for a slow reader are merged."""

    index: int
    """Sequence number within the call: prompt_index * n + sample_index."""
    text: str
    """New text; empty when the tokens end in an incomplete character or might begin a stop string."""
    new_ids: list[int]
    finish: FinishReason | None
    """Set on the last output of a sequence."""
    meta: TokenMeta
    logprobs: OutputLogprobs | None
    hidden: bytes = b""
    """Final hidden states that were requested, [N, H] float32, on the last output; with `embed` only that of the
    prompt's last token."""

    def merge(self, later: GenerateOutput) -> None:
        """Appends the next output of the same sequence, but for its text: appending each to a long one would copy all
        of it."""
        self.new_ids.extend(later.new_ids)
        self.finish = later.finish
        self.meta = later.meta
        self.hidden = later.hidden
        if self.logprobs is None:
            self.logprobs = later.logprobs
        elif later.logprobs is not None:
            self.logprobs.append(later.logprobs)
