"""Compiles grammars with llguidance."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.constrained.completion import lark_rules, schema_rules, unfinishable_rule
from sglang.srt.constrained.grammar import (
    ANY_JSON,
    MAX_WHITESPACE,
    FillMasks,
    Grammar,
    GrammarError,
    GrammarKey,
    GrammarKind,
)
from sglang.srt.constrained.llguidance_tags import Subgrammar, TagWriter, regex_literal
from sglang.srt.constrained.schema_keywords import for_llguidance, is_unknown_to_llguidance
from sglang.srt.constrained.schema_places import ROOT
from sglang.srt.constrained.schema_rewriting import rewritten
from sglang.srt.constrained.structural_tags import as_format
from sglang.srt.constrained.vocabulary import Vocabulary, read_vocabulary
from sglang.srt.sampling.grammar_names import client_name

if TYPE_CHECKING:
    import llguidance
    import numpy as np
    import numpy.typing as npt

FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
"""Text formats that the library enforces. It refuses others, but a format is an annotation, so others are left out."""
MAX_LEXER_STATES = 10_000
"""Limit for one output, about 2 KiB a state: the library makes them on demand, and ends the output beyond it."""
_BASE_BYTES, _BYTES_A_CHARACTER = 128 << 10, 64
"""Estimate of a grammar's memory from measurements, as the library does not report it."""
_SCHEMA_OPTIONS = {
    "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
}
"""Options of the library for JSON schemas. Clients may not choose them by writing `x-guidance` into a schema."""
_INEXPRESSIBLE = re.compile(r"^(Unimplemented keys: |oneOf constraints )")


_OPTIONS = '%llguidance {"no_forcing": true}\n'
"""Options of the whole grammar: every token that fits is allowed, also where the text is certain. Otherwise the library
would allow only tokens of its own choice, for which it would ask the tokenizer."""


class _Tokens:
    """The tokenizer in the interface that the library expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.eos_token_id = vocabulary.stop_ids[0]
        textless = (i for i, text in enumerate(vocabulary.tokens) if not text)
        self.special_token_ids = sorted({*textless, *vocabulary.stop_ids})

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError


class LLGuidance:
    """A compiled grammar. Its own matcher stays at the start; outputs use copies."""

    def __init__(self, start: llguidance.LLMatcher, backend: LLGuidanceBackend, size_bytes: int, dead_rule: str | None):
        self._start = start
        self._dead_rule = dead_rule
        self._eos_ids = backend.eos_ids
        self.fill_masks: FillMasks = fill_masks
        self.vocab_size = backend.vocab_size
        self.size_bytes = size_bytes

    def matcher(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._start.deep_copy(), self._eos_ids)

    def unfinishable_rule(self) -> str | None:
        return self._dead_rule


class LLGuidanceMatcher:
    """The position of one output in its grammar. The library takes the end as a token of the output only where more
    could follow; here it is always one."""

    def __init__(self, matcher: llguidance.LLMatcher, eos_ids: frozenset[int], ended: bool = False) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._ended = ended

    def fill_mask(self, row: npt.NDArray[np.int32]) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self.is_at_dead_end():
            row.fill(0)

    @property
    def library_matcher(self) -> llguidance.LLMatcher:
        return self._matcher

    def is_at_dead_end(self) -> bool:
        """Returns whether nothing can follow, because of the grammar or one of the library's limits. The library offers
        the end of the output there."""
        return bool(self._matcher.is_stopped() and not self._matcher.is_accepting())

    def accept(self, token_id: int) -> bool:
        if token_id in self._eos_ids:
            self._ended = self._matcher.is_accepting()
            return self._ended
        return self._matcher.try_consume_tokens([token_id]) == 1

    def is_terminated(self) -> bool:
        return self._ended

    def rollback(self, num_tokens: int) -> None:
        num_tokens -= self._ended
        self._ended = False
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def copy(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._matcher.deep_copy(), self._eos_ids, self._ended)


@functools.cache
def _executor(num_threads: int) -> llguidance.LLExecutor:
    import llguidance

    return llguidance.LLExecutor(num_threads=num_threads)


def fill_masks(
    matchers: list[LLGuidanceMatcher], mask: npt.NDArray[np.int32], rows: list[int], num_threads: int
) -> None:
    """Fills masks; see FillMasks."""
    start, num_bytes = mask.ctypes.data, mask.shape[1] * mask.itemsize
    if num_threads > 1:
        work = [(matcher.library_matcher, row) for matcher, row in zip(matchers, rows, strict=True)]
        _executor(num_threads).unsafe_compute_mask_ptr(work, start, num_bytes, len(mask))
    else:
        for matcher, row in zip(matchers, rows, strict=True):
            matcher.library_matcher.unsafe_compute_mask_ptr(start + row * num_bytes, num_bytes)
    for matcher, row in zip(matchers, rows, strict=True):
        if matcher.is_at_dead_end():
            mask[row] = 0


class LLGuidanceBackend:
    """Compiles for the vocabulary in a file that `write_vocabulary` made. The file is read with the first grammar."""

    def __init__(self, vocabulary: Path, compile_threads: int = 1) -> None:
        """compile_threads: ignored; the library compiles in microseconds to milliseconds."""
        self._vocabulary = vocabulary
        self._tokenizer: llguidance.LLTokenizer | None = None
        self.eos_ids: frozenset[int] = frozenset()
        self.vocab_size = 0

    def import_library(self, torch: bool = True) -> None:
        """See GrammarBackend."""
        import llguidance  # noqa: F401

    def load(self) -> None:
        """See GrammarBackend."""
        import llguidance

        if self._tokenizer is None:
            vocabulary = read_vocabulary(self._vocabulary)
            self.eos_ids, self.vocab_size = frozenset(vocabulary.stop_ids), len(vocabulary.tokens)
            self._tokenizer = llguidance.LLTokenizer(
                _Tokens(vocabulary),  # type: ignore[arg-type]  # the library's wrapper adds nothing that it needs
                n_vocab=self.vocab_size,
                eos_token=sorted(self.eos_ids),
            )

    def compile(self, key: GrammarKey) -> Grammar:
        """Returns a grammar at its start. Raises GrammarError for an invalid grammar. Callable from any thread."""
        import llguidance
        from llguidance import LLParserLimits

        assert self._tokenizer is not None, "load() comes first"
        try:
            whole, named, dead_rule = _GRAMMARS[key.kind](key.source)
        except (ValueError, TypeError, RecursionError) as error:
            raise _refusal(client_name(*key), str(error)) from error
        serialized = json.dumps({"grammars": [{"lark_grammar": _OPTIONS + whole}, *named]})
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        start = llguidance.LLMatcher(self._tokenizer, serialized, log_level=0, limits=limits)
        if start.is_error():
            raise _refusal(client_name(*key), start.get_error())
        size_bytes = _BASE_BYTES + _BYTES_A_CHARACTER * len(serialized)
        return Grammar(LLGuidance(start, self, size_bytes, dead_rule))


def _refusal(kind: str, reason: str) -> GrammarError:
    reason = reason.strip() or "it is not valid"
    if _INEXPRESSIBLE.match(reason):
        reason += " (cannot be enforced; leave it out and check the answer, or say it otherwise)"
    if "limits." in reason:  # the message names the library's own settings
        reason = "it is too complex for llguidance; simplify it"
    return GrammarError(f"invalid {kind}: {reason}")


_Grammars = tuple[str, list[Subgrammar], "str | None"]
"""The whole grammar in Lark, the grammars that it names, and a rule that no text satisfies, if there is one."""


def _schema(source: str) -> _Grammars:
    if source == ANY_JSON:
        return "start: @g0", [{"name": "g0", **_json_grammar({"type": "object"})}], None
    schema = json.loads(source)
    return "start: @g0", [{"name": "g0", **_json_grammar(schema)}], unfinishable_rule(schema_rules(schema), ROOT)


def _json_grammar(schema: Any, pass_over: bool = False) -> Subgrammar:
    """Returns a grammar of a JSON schema. pass_over: ignores keywords that cannot be enforced, instead of refusing
    them."""
    import llguidance

    if schema is False:
        raise ValueError("Unsatisfiable schema: false allows no value")
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise ValueError(f"a schema must be an object or a boolean, got {json.dumps(schema):.100}")
    if not pass_over:
        schema = rewritten(schema, is_unknown_to_llguidance)
    options: Any = {**_SCHEMA_OPTIONS, "lenient": pass_over, "coerce_one_of": pass_over}
    written = llguidance.LLMatcher.grammar_from_json_schema(for_llguidance(schema, FORMATS), overrides=options)
    grammar: Subgrammar = json.loads(written)["grammars"][0]
    return {"json_schema": grammar["json_schema"]}


def _regex(source: str) -> _Grammars:
    return f"start: {regex_literal(source)}", [], None


def _ebnf(source: str) -> _Grammars:
    """Converts Lark, or rules written with `::=`, to a grammar."""
    grammar = _lark_grammar(source)
    return grammar["lark_grammar"], [], unfinishable_rule(lark_rules(grammar["lark_grammar"]), "start")


def _lark_grammar(source: Any) -> Subgrammar:
    from llguidance.gbnf_to_lark import any_to_lark

    if not isinstance(source, str):
        raise ValueError("a grammar must be a string")
    try:
        return {"lark_grammar": any_to_lark(source)}
    except Exception as error:  # what the library raises for some mistakes
        raise ValueError(str(error)) from None


def _structural_tag(source: str) -> _Grammars:
    tag = as_format(source)
    if "format" not in tag:
        raise ValueError("missing key 'format'")
    dead_rules: list[str | None] = []

    def schema(value: Any, in_call: bool) -> Subgrammar:
        dead_rules.append(unfinishable_rule(schema_rules(value), ROOT))
        return _json_grammar(value, pass_over=in_call)

    def lark(value: str) -> Subgrammar:
        grammar = _lark_grammar(value)
        dead_rules.append(unfinishable_rule(lark_rules(grammar["lark_grammar"]), "start"))
        return grammar

    writer = TagWriter(schema, lark)
    writer.start(tag["format"])
    dead_rule = next((rule for rule in dead_rules if rule is not None), None)
    return "\n".join(writer.rules), writer.subgrammars, dead_rule


_GRAMMARS: dict[GrammarKind, Callable[[str], _Grammars]] = {
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _ebnf,
    "structural_tag": _structural_tag,
}
