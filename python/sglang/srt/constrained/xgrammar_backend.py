"""Compiles grammars with xgrammar, after repairing what it would enforce wrongly."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.constrained.completion import printed_rules, unfinishable_rule
from sglang.srt.constrained.grammar import (
    ANY_JSON,
    MAX_WHITESPACE,
    FillMasks,
    Grammar,
    GrammarError,
    GrammarKey,
    GrammarKind,
)
from sglang.srt.constrained.lean_xgrammar import import_xgrammar
from sglang.srt.constrained.schema_keywords import (
    InexpressibleSchema,
    answer_schemas,
    check_keywords,
    is_inexpressible,
    repair_limited_texts,
)
from sglang.srt.constrained.schema_rewriting import rewritten
from sglang.srt.constrained.structural_tags import as_format
from sglang.srt.constrained.vocabulary import read_vocabulary
from sglang.srt.sampling.grammar_names import client_name

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import xgrammar

LIBRARY_PREFIX = re.compile(r"^\[[\d:]+\] \S+:\d+: (?:Check failed: .*? is false: )?")
"""Time and source line before the library's error messages, which clients do not get."""


class XGrammar:
    """A grammar that xgrammar has compiled; see CompiledGrammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        self._compiled = compiled
        self.fill_masks: FillMasks = fill_masks
        self.vocab_size: int = compiled.tokenizer_info.vocab_size
        self.size_bytes = int(compiled.memory_size_bytes)

    def matcher(self) -> XGrammarMatcher:
        import xgrammar

        return XGrammarMatcher(xgrammar.GrammarMatcher(self._compiled))

    def unfinishable_rule(self) -> str | None:
        return unfinishable_rule(printed_rules(str(self._compiled.grammar)), "root")


class XGrammarMatcher:
    """The position of one output in its grammar; see Matcher."""

    def __init__(self, matcher: xgrammar.GrammarMatcher) -> None:
        self._matcher = matcher
        self._ended = bool(matcher.is_terminated())

    @property
    def library_matcher(self) -> xgrammar.GrammarMatcher:
        return self._matcher

    def fill_mask(self, row: npt.NDArray[np.int32]) -> None:
        self._matcher.fill_next_token_bitmask(row.reshape(1, -1))

    def accept(self, token_id: int) -> bool:
        accepted = bool(self._matcher.accept_token(token_id))
        self._ended = bool(self._matcher.is_terminated())
        return accepted

    def is_terminated(self) -> bool:
        return self._ended

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)
        self._ended = bool(self._matcher.is_terminated())

    def copy(self) -> XGrammarMatcher:
        return XGrammarMatcher(self._matcher.fork())


@functools.cache
def _batch_matcher(num_threads: int) -> xgrammar.BatchGrammarMatcher:
    import xgrammar

    return xgrammar.BatchGrammarMatcher(max_threads=num_threads)


def fill_masks(matchers: list[XGrammarMatcher], mask: npt.NDArray[np.int32], rows: list[int], num_threads: int) -> None:
    """Fills masks; see FillMasks."""
    _batch_matcher(num_threads).batch_fill_next_token_bitmask(
        [matcher.library_matcher for matcher in matchers], mask, rows
    )


class XGrammarBackend:
    """Compiles grammars for the vocabulary in a file that `write_vocabulary` wrote. `load` reads the file; it is called
    for the first grammar, since most servers never get one."""

    def __init__(self, vocabulary: Path, compile_threads: int = 1) -> None:
        self._vocabulary = vocabulary
        self._compile_threads = compile_threads
        self._compiler: xgrammar.GrammarCompiler | None = None

    def import_library(self, torch: bool = True) -> None:
        """See GrammarBackend."""
        import_xgrammar(torch)

    def load(self) -> None:
        """See GrammarBackend."""
        self.import_library()
        import xgrammar

        if self._compiler is None:
            vocabulary = read_vocabulary(self._vocabulary)
            info = xgrammar.TokenizerInfo(vocabulary.tokens, xgrammar.VocabType.RAW, stop_token_ids=vocabulary.stop_ids)
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=self._compile_threads, cache_enabled=False)

    def compile(self, key: GrammarKey) -> Grammar:
        """Returns a grammar at its start. `load` must have been called. May take seconds, in which the GIL is released;
        callable from any thread. Raises GrammarError for an invalid grammar, MemoryError if memory runs out."""
        assert self._compiler is not None, "load() comes first"
        try:
            return Grammar(XGrammar(COMPILE[key.kind](self._compiler, key.source)))
        except (RuntimeError, ValueError, TypeError) as error:  # what the library raises for bad input
            if "bad_alloc" in str(error):
                raise MemoryError from error
            reason = LIBRARY_PREFIX.sub("", str(error)).strip()
            raise GrammarError(f"invalid {client_name(*key)}: {reason}") from error


def _compile_json(compiler: xgrammar.GrammarCompiler, source: str) -> xgrammar.CompiledGrammar:
    """Compiles a JSON schema, rewritten where the library would not enforce it, or ANY_JSON: any object."""
    if source == ANY_JSON:
        return compiler.compile_json_schema('{"type": "object"}', strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE)
    import xgrammar

    grammar = xgrammar.Grammar.from_json_schema(source, max_whitespace_cnt=MAX_WHITESPACE)
    schema = json.loads(source)
    if (enforceable := _enforceable(schema)) != schema:
        grammar = xgrammar.Grammar.from_json_schema(json.dumps(enforceable), max_whitespace_cnt=MAX_WHITESPACE)
    return compiler.compile_grammar(_repaired(grammar) or grammar)


def _enforceable(schema: Any) -> Any:
    """Returns an equivalent schema that the library enforces completely. Raises InexpressibleSchema if there is none;
    its message names keywords of `schema`, not of the rewritten one, where it can."""
    result = rewritten(schema, is_inexpressible)
    try:
        check_keywords(result)
    except InexpressibleSchema:
        check_keywords(schema)
        raise
    return result


def _repaired(grammar: xgrammar.Grammar) -> str | None:
    """Returns the grammar as EBNF with the library's rules for texts of limited length corrected
    (`repair_limited_texts`); None if it has no such rules."""
    printed = str(grammar)
    repaired = repair_limited_texts(printed)
    return None if repaired == printed else repaired


def _compile_structural_tag(compiler: xgrammar.GrammarCompiler, source: str) -> xgrammar.CompiledGrammar:
    """Compiles a structural tag, with each of its schemas made enforceable."""
    tag = as_format(source)
    for part in answer_schemas(tag):
        part["json_schema"] = _enforceable(part.get("json_schema"))
    import xgrammar

    try:
        repaired = _repaired(xgrammar.Grammar.from_structural_tag(tag))
    except RuntimeError:  # a tag with token names needs the compiler, and the compiler reports an invalid one
        repaired = None
    return compiler.compile_structural_tag(tag) if repaired is None else compiler.compile_grammar(repaired)


COMPILE: dict[GrammarKind, Callable[[xgrammar.GrammarCompiler, str], xgrammar.CompiledGrammar]] = {
    "json_schema": _compile_json,
    "regex": lambda compiler, source: compiler.compile_regex(source),
    "ebnf": lambda compiler, source: compiler.compile_grammar(source),
    "structural_tag": _compile_structural_tag,
}
