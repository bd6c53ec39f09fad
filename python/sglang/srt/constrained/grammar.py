"""What constrains one request: the state of its grammar, token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import xgrammar

    from sglang.srt.sampling.sampling_params import SamplingParams

MaskRow = npt.NDArray[np.int32]
"""[ceil(vocab / 32)] int32: bit (v % 32) of word v // 32 says whether token v may come next."""

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]
KINDS: tuple[GrammarKind, ...] = ("json_schema", "regex", "ebnf", "structural_tag")

ANY_JSON = "$$ANY$$"
"""The `json_schema` of requests that want any JSON object (`response_format: json_object`)."""


class GrammarError(Exception):
    """The request's grammar cannot be used. The text goes to the client, with status 400."""


class GrammarKey(NamedTuple):
    kind: GrammarKind
    source: str


def grammar_key(params: SamplingParams) -> GrammarKey | None:
    """The grammar that the request asks for, or None."""
    sources: dict[GrammarKind, str | None] = {
        "json_schema": params.json_schema,
        "regex": params.regex,
        "ebnf": params.ebnf,
        "structural_tag": params.structural_tag,
    }
    given = [GrammarKey(kind, source) for kind, source in sources.items() if source is not None]
    if len(given) > 1:
        raise GrammarError(f"only one of {', '.join(KINDS)} may be given, got {', '.join(k.kind for k in given)}.")
    return given[0] if given else None


class Grammar:
    """A matcher over a compiled grammar. End-of-sequence tokens are allowed where the grammar may end; taking one
    terminates it."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, matcher: xgrammar.GrammarMatcher | None = None) -> None:
        import xgrammar

        self._compiled = compiled
        self._matcher = matcher if matcher is not None else xgrammar.GrammarMatcher(compiled)

    def fill_mask(self, row: MaskRow) -> None:
        """Writes the tokens that may come next. All of them once the grammar has terminated: what a step in flight
        samples after the end is thrown away."""
        if self._matcher.is_terminated():
            row.fill(-1)
        else:
            self._matcher.fill_next_token_bitmask(row.reshape(1, -1))

    def accept(self, token_id: int) -> bool:
        """Advances by a token. False, and nothing changes, if the grammar forbids it or has terminated."""
        return not self._matcher.is_terminated() and bool(self._matcher.accept_token(token_id))

    def is_terminated(self) -> bool:
        return bool(self._matcher.is_terminated())

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last accepted tokens."""
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def copy(self) -> Grammar:
        """An independent grammar in the same state."""
        return Grammar(self._compiled, self._matcher.fork())

    def fresh(self) -> Grammar:
        """The same grammar at its start."""
        return Grammar(self._compiled)
