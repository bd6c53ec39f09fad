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

    def update(self, index: int, meta: TokenMeta) -> None:
        """Notes the latest counts of a sequence."""
        self._meta[index] = meta

    def extension(self) -> dict[str, Any]:
        """Returns `sglext` of requests with `return_spec_tokens_details`: statistics of each choice's draft tokens, as
        a list for several choices; null without draft tokens."""
        metas = [meta for _, meta in sorted(self._meta.items())]
        details = [None if meta.drafts is None else draft_details(meta.drafts) for meta in metas]
        return {"spec_tokens_details": details[0] if len(details) == 1 else details}

    def as_dict(self) -> dict[str, Any]:
        """Returns the `usage` object of all sequences; each prompt counts once."""
        firsts = [meta for index, meta in self._meta.items() if index % self._num_choices == 0]
        prompt_tokens = sum(meta.prompt_tokens for meta in firsts)
        completion_tokens = sum(meta.completion_tokens for meta in self._meta.values())
        reasoning_tokens = sum(meta.reasoning_tokens for meta in self._meta.values())
        details = {"cached_tokens": sum(meta.cached_tokens for meta in firsts)} if self._report_cached else None
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "reasoning_tokens": reasoning_tokens,
            "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
            "prompt_tokens_details": details,
        }
