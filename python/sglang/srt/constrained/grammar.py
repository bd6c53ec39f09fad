"""Grammar constraint of one request, and its state as tokens are accepted."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from sglang.srt.utils.allowance import Allowance

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from sglang.srt.sampling.sampling_params import SamplingParams

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]
KINDS: tuple[GrammarKind, ...] = ("json_schema", "regex", "ebnf", "structural_tag")

ANY_JSON = "$$ANY$$"
"""The `json_schema` of requests that want any JSON object (`response_format: json_object`)."""

MAX_WHITESPACE = 64
"""Whitespace characters between two JSON elements: enough for deep indentation, but a model cannot fill its answer with
them."""

FOLLOW_BURST_S = 0.25
FOLLOW_REFILL_S = 0.005
"""Seconds of the step loop that a request may take for masks and for advancing its grammar. Ordinary grammars take tens
of microseconds a token; ambiguous ones take more with every token, without bound."""


class GrammarError(Exception):
    """Raised when a request's grammar cannot be used. The client gets the text with status 400."""


class GrammarKey(NamedTuple):
    """Kind and source of a grammar."""

    kind: GrammarKind
    source: str

    def digest(self) -> bytes:
        """Returns a hash that identifies the key, so that caches need not keep sources."""
        return hashlib.blake2b(f"{self.kind}:{self.source}".encode(), digest_size=16).digest()


def grammar_key(params: SamplingParams) -> GrammarKey | None:
    """Returns the grammar that the request asks for, or None."""
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


class Matcher(Protocol):
    """The position of one output in its grammar; each library has a class for it."""

    def fill_mask(self, row: npt.NDArray[np.int32]) -> None:
        """Fills a row of the mask like Grammar.fill_mask; not called once the grammar has terminated."""

    def accept(self, token_id: int) -> bool:
        """Moves on by a token; returns False if the grammar forbids it. Not called once the grammar has terminated."""

    def is_terminated(self) -> bool:
        """Returns whether the grammar has ended, so that no token may follow."""

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last `num_tokens` accepted tokens."""

    def copy(self) -> Matcher:
        """Returns an independent matcher with the same state."""


FillMasks = Callable[[list[Any], "npt.NDArray[np.int32]", list[int], int], None]
"""A library's function that does `Matcher.fill_mask` for several of its matchers in one call. Further arguments: the
mask [rows, ceil(vocab / 32)], contiguous, the row of each matcher, and the number of threads."""


class CompiledGrammar(Protocol):
    """The part of a grammar that all its outputs share. `size_bytes` is its memory."""

    fill_masks: FillMasks

    vocab_size: int
    size_bytes: int

    def matcher(self) -> Matcher:
        """Returns a matcher at the grammar's start."""

    def unfinishable_rule(self) -> str | None:
        """Returns the name of a reachable rule that no finite text satisfies, or None."""


class Grammar:
    """A matcher over a compiled grammar. End-of-sequence tokens are allowed where the grammar may end; taking one
    terminates it."""

    def __init__(self, compiled: CompiledGrammar, matcher: Matcher | None = None) -> None:
        self.allowance = Allowance(FOLLOW_BURST_S, FOLLOW_REFILL_S)
        self._fill_s = self._accept_s = 0.0
        self.compiled = compiled
        self._matcher = compiled.matcher() if matcher is None else matcher

    def fill_mask(self, row: npt.NDArray[np.int32]) -> None:
        """Writes the allowed next tokens into row [ceil(vocab / 32)]: bit v % 32 of word v // 32 for token v. Allows
        all of them once the grammar has terminated: a token that a step in flight samples after the end is thrown
        away."""
        if self._matcher.is_terminated():
            row.fill(-1)
        else:
            left_s = self.allowance.left_s
            with self.allowance:
                self._matcher.fill_mask(row)
            self._fill_s = left_s - self.allowance.left_s

    def note_mask_time(self, seconds: float) -> None:
        """Notes how long its mask took, where it was filled with those of others or by another process."""
        self._fill_s = seconds

    def accept(self, token_id: int) -> bool:
        """Advances by a token. Returns False, and changes nothing, if the grammar forbids it or has terminated."""
        self.allowance.refill()
        left_s = self.allowance.left_s
        with self.allowance:
            accepted = not self._matcher.is_terminated() and self._matcher.accept(token_id)
        self._accept_s = left_s - self.allowance.left_s
        return accepted

    @property
    def token_s(self) -> float:
        """Returns the processor time of its latest token: of the mask, and of accepting."""
        return self._fill_s + self._accept_s

    @property
    def mask_s(self) -> float:
        """Returns the processor time of its latest mask."""
        return self._fill_s

    @property
    def matcher(self) -> Matcher:
        """Returns the matcher of the compiled grammar, for copies."""
        return self._matcher

    @property
    def size_bytes(self) -> int:
        """Returns the memory of the compiled grammar."""
        return self.compiled.size_bytes

    def is_terminated(self) -> bool:
        """Returns whether the grammar has ended, so that no token may follow."""
        return self._matcher.is_terminated()

    def is_stuck(self) -> bool:
        """Returns whether no token may come next, although the grammar has not terminated."""
        if self._matcher.is_terminated():
            return False
        import numpy as np  # imported here, because the front needs only this module's names

        row = np.zeros(-(-self.compiled.vocab_size // 32), np.int32)
        self._matcher.fill_mask(row)
        return not row.any()

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last accepted tokens."""
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def copy(self) -> Grammar:
        """Returns an independent grammar in the same state."""
        return Grammar(self.compiled, self._matcher.copy())

    def fresh(self) -> Grammar:
        """Returns the same grammar at its start."""
        return Grammar(self.compiled)
