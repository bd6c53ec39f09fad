"""The constraint of one request: the state of its grammar, token by token."""

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
"""Characters between two elements of JSON: room for deep indentation, but a model cannot fill its answer with them."""

FOLLOW_BURST_S = 0.25
FOLLOW_REFILL_S = 0.005
"""Time that a request may take of the step loop for masks and for advancing its grammar. Ordinary grammars take tens of
microseconds a token; ambiguous ones take more with every token, without bound."""


class GrammarError(Exception):
    """The request's grammar cannot be used. The text goes to the client, with status 400."""


class GrammarKey(NamedTuple):
    kind: GrammarKind
    source: str

    def digest(self) -> bytes:
        """Stands for the key in caches, which then do not keep the sources."""
        return hashlib.blake2b(f"{self.kind}:{self.source}".encode(), digest_size=16).digest()


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


class Matcher(Protocol):
    """The position of one output in its grammar; each library has a class for it."""

    def fill_mask(self, row: npt.NDArray[np.int32]) -> None:
        """Fills a row of the mask like Grammar.fill_mask; not called once the grammar has terminated."""

    def accept(self, token_id: int) -> bool:
        """Moves on by a token; returns False if the grammar forbids it. Not called once the grammar has terminated."""

    def is_terminated(self) -> bool: ...

    def rollback(self, num_tokens: int) -> None: ...

    def copy(self) -> Matcher: ...


FillMasks = Callable[[list[Any], "npt.NDArray[np.int32]", list[int], int], None]
"""A library's form of Matcher.fill_mask for several of its matchers in one call; the other arguments are the mask
[rows, ceil(vocab / 32)], contiguous, the row of each matcher, and over how many threads the work is spread."""


class CompiledGrammar(Protocol):
    """The part of a grammar that all its outputs share. size_bytes: its memory."""

    fill_masks: FillMasks

    vocab_size: int
    size_bytes: int

    def matcher(self) -> Matcher:
        """A matcher at the grammar's start."""

    def unfinishable_rule(self) -> str | None:
        """Name of a rule that no finite text satisfies and that the grammar may come to."""


class Grammar:
    """A matcher over a compiled grammar. End-of-sequence tokens are allowed where the grammar may end; taking one
    terminates it."""

    def __init__(self, compiled: CompiledGrammar, matcher: Matcher | None = None) -> None:
        self.allowance = Allowance(FOLLOW_BURST_S, FOLLOW_REFILL_S)
        self.compiled = compiled
        self._matcher = compiled.matcher() if matcher is None else matcher

    def fill_mask(self, row: npt.NDArray[np.int32]) -> None:
        """Writes the tokens that may come next into row [ceil(vocab / 32)]: bit v % 32 of word v // 32 for token v. All
        of them once the grammar has terminated: what a step in flight samples after the end is thrown away."""
        if self._matcher.is_terminated():
            row.fill(-1)
        else:
            with self.allowance:
                self._matcher.fill_mask(row)

    def accept(self, token_id: int) -> bool:
        """Advances by a token. False, and nothing changes, if the grammar forbids it or has terminated."""
        self.allowance.refill()
        with self.allowance:
            return not self._matcher.is_terminated() and self._matcher.accept(token_id)

    @property
    def matcher(self) -> Matcher:
        return self._matcher

    @property
    def size_bytes(self) -> int:
        """Memory of the compiled grammar."""
        return self.compiled.size_bytes

    def is_terminated(self) -> bool:
        return self._matcher.is_terminated()

    def is_stuck(self) -> bool:
        """Returns whether no token may come next, although the grammar has not terminated."""
        if self._matcher.is_terminated():
            return False
        import numpy as np  # the front needs this module's names only

        row = np.zeros(-(-self.compiled.vocab_size // 32), np.int32)
        self._matcher.fill_mask(row)
        return not row.any()

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last accepted tokens."""
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def copy(self) -> Grammar:
        """An independent grammar in the same state."""
        return Grammar(self.compiled, self._matcher.copy())

    def fresh(self) -> Grammar:
        """The same grammar at its start."""
        return Grammar(self.compiled)
