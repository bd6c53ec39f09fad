"""Token counts of one response."""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang.srt.entrypoints.openai.protocol import SamplingFields
from sglang.srt.managers.front.draft_details import draft_details
from sglang.srt.managers.wire.io_struct import TokenMeta


class UsageOptions(NamedTuple):
    """Which counts the client gets: in each chunk, after the last one, and those of draft tokens."""

    continuous: bool
    final: bool
    extension: bool

    @classmethod
    def of(cls, body: SamplingFields) -> UsageOptions:
        """Returns the options of a request."""
        return cls(body.continuous_usage, body.include_usage, bool(body.return_spec_tokens_details))


class UsageCounter:
    """Keeps the newest counts of every sequence. A prompt counts once for its `num_choices` samples."""

    def __init__(self, num_choices: int, report_cached: bool) -> None:
        self._num_choices = num_choices
        self._report_cached = report_cached
        self._meta: dict[int, TokenMeta] = {}
        self._changed: set[int] = set()
        """Sequences with newer counts than those that were added up."""
        self._counts: dict[int, _Counts] = {}
        self._totals = _NOTHING
        """Sums of `_counts`: each chunk of a stream may tell them, and a call may have thousands of sequences."""

    def update(self, index: int, meta: TokenMeta) -> None:
        """Notes the latest counts of a sequence."""
        self._meta[index] = meta
        self._changed.add(index)

    def extension(self) -> dict[str, Any]:
        """Returns `sglext` of requests with `return_spec_tokens_details`: statistics of each choice's draft tokens, as
        a list for several choices; null without draft tokens."""
        metas = [meta for _, meta in sorted(self._meta.items())]
        details = [None if meta.drafts is None else draft_details(meta.drafts) for meta in metas]
        return {"spec_tokens_details": details[0] if len(details) == 1 else details}

    def as_dict(self) -> dict[str, Any]:
        """Returns the `usage` object of all sequences; each prompt counts once."""
        for index in self._changed:
            self._add_up(index, self._meta[index])
        self._changed.clear()
        totals = self._totals
        return {
            "prompt_tokens": totals.prompt,
            "completion_tokens": totals.completion,
            "total_tokens": totals.prompt + totals.completion,
            "reasoning_tokens": totals.reasoning,
            "completion_tokens_details": {"reasoning_tokens": totals.reasoning},
            "prompt_tokens_details": {"cached_tokens": totals.cached} if self._report_cached else None,
        }

    def _add_up(self, index: int, meta: TokenMeta) -> None:
        has_prompt = index % self._num_choices == 0
        counts = _Counts(
            meta.prompt_tokens if has_prompt else 0,
            meta.cached_tokens if has_prompt else 0,
            meta.completion_tokens,
            meta.reasoning_tokens,
        )
        changes = zip(self._totals, self._counts.get(index, _NOTHING), counts, strict=True)
        self._totals = _Counts(*(total - old + new for total, old, new in changes))
        self._counts[index] = counts


class _Counts(NamedTuple):
    """Tokens of one sequence, or of all. Only the first sample of a prompt has those of the prompt."""

    prompt: int
    cached: int
    completion: int
    reasoning: int


_NOTHING = _Counts(0, 0, 0, 0)
