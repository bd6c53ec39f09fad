"""What constrains one request: the state of its grammar, token by token."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Literal, NamedTuple

from sglang.srt.utils.allowance import Allowance

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import xgrammar

    from sglang.srt.sampling.sampling_params import SamplingParams

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]
KINDS: tuple[GrammarKind, ...] = ("json_schema", "regex", "ebnf", "structural_tag")

ANY_JSON = "$$ANY$$"
"""The `json_schema` of requests that want any JSON object (`response_format: json_object`)."""

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


class Grammar:
    """A matcher over a compiled grammar. End-of-sequence tokens are allowed where the grammar may end; taking one
    terminates it."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, matcher: xgrammar.GrammarMatcher | None = None) -> None:
        import xgrammar

        self.allowance = Allowance(FOLLOW_BURST_S, FOLLOW_REFILL_S)
        self._compiled = compiled
        self._matcher = matcher if matcher is not None else xgrammar.GrammarMatcher(compiled)

    def fill_mask(self, row: npt.NDArray[np.int32]) -> None:
        """Writes the tokens that may come next into row [ceil(vocab / 32)]: bit v % 32 of word v // 32 for token v. All
        of them once the grammar has terminated: what a step in flight samples after the end is thrown away."""
        if self._matcher.is_terminated():
            row.fill(-1)
        else:
            with self.allowance:
                self._matcher.fill_next_token_bitmask(row.reshape(1, -1))

    def accept(self, token_id: int) -> bool:
        """Advances by a token. False, and nothing changes, if the grammar forbids it or has terminated."""
        self.allowance.refill()
        with self.allowance:
            return not self._matcher.is_terminated() and bool(self._matcher.accept_token(token_id))

    @property
    def compiled(self) -> xgrammar.CompiledGrammar:
        """What all copies share."""
        return self._compiled

    @property
    def size_bytes(self) -> int:
        """Memory of the compiled grammar."""
        return int(self._compiled.memory_size_bytes)

    @property
    def text(self) -> str:
        """Its rules in the library's EBNF."""
        return str(self._compiled.grammar)

    def is_terminated(self) -> bool:
        return bool(self._matcher.is_terminated())

    def is_stuck(self) -> bool:
        """Whether no token may come next, although the grammar has not terminated."""
        if self._matcher.is_terminated():
            return False
        import numpy as np  # the front needs this module's names only

        row = np.zeros((1, -(-self._compiled.tokenizer_info.vocab_size // 32)), np.int32)
        self._matcher.fill_next_token_bitmask(row)
        return not row.any()

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
