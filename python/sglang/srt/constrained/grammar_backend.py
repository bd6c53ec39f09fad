"""Compiles grammars with xgrammar."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.constrained.grammar import ANY_JSON, Grammar, GrammarError, GrammarKey, GrammarKind
from sglang.srt.constrained.schema_keywords import answer_schemas, check_keywords, repair_limited_texts

if TYPE_CHECKING:
    import xgrammar
    from transformers import PreTrainedTokenizerBase

LIBRARY_PREFIX = re.compile(r"^\[[\d:]+\] \S+:\d+: (?:Check failed: .*? is false: )?")


MAX_WHITESPACE = 64
"""Characters between two elements of JSON: room for deep indentation, but a model cannot fill its answer with them."""


def write_vocabulary(path: Path, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_ids: Collection[int]) -> None:
    """Writes what grammars need of a tokenizer; the file appears when it is complete.

    vocab_size: columns of the logits, which may be more than the tokenizer has. eos_ids: tokens that end the output
    where the grammar is complete.
    """
    import xgrammar

    stop_ids = sorted(i for i in eos_ids if i < vocab_size)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=stop_ids)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(info.serialize_json())
    partial.rename(path)


class GrammarBackend:
    """Compiles for the vocabulary in a file that `write_vocabulary` made. The file is read with the first grammar: most
    servers never see one."""

    def __init__(self, vocabulary: Path, compile_threads: int = 1) -> None:
        self._vocabulary = vocabulary
        self._compile_threads = compile_threads
        self._compiler: xgrammar.GrammarCompiler | None = None

    def load(self) -> None:
        """Reads the vocabulary. Called before compile, from one thread at a time."""
        import xgrammar

        if self._compiler is None:
            info = xgrammar.TokenizerInfo.deserialize_json(self._vocabulary.read_text())
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=self._compile_threads, cache_enabled=False)

    def compile(self, key: GrammarKey) -> Grammar:
        """A grammar at its start. May take seconds, with the interpreter's lock released; any thread. GrammarError if
        the grammar is not valid, MemoryError if there is not enough."""
        assert self._compiler is not None, "load() comes first"
        try:
            return Grammar(COMPILE[key.kind](self._compiler, key.source))
        except (RuntimeError, ValueError, TypeError) as error:  # what the library raises for bad input
            if "bad_alloc" in str(error):
                raise MemoryError from error
            reason = LIBRARY_PREFIX.sub("", str(error)).strip()
            raise GrammarError(f"invalid {key.kind}: {reason}") from error


def _compile_json(compiler: xgrammar.GrammarCompiler, source: str) -> xgrammar.CompiledGrammar:
    if source == ANY_JSON:
        return compiler.compile_json_schema('{"type": "object"}', strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE)
    import xgrammar

    grammar = xgrammar.Grammar.from_json_schema(source, max_whitespace_cnt=MAX_WHITESPACE)
    check_keywords(json.loads(source))
    return compiler.compile_grammar(_repaired(grammar) or grammar)


def _repaired(grammar: xgrammar.Grammar) -> str | None:
    """The grammar without the library's mistakes; None if there are none in it."""
    printed = str(grammar)
    repaired = repair_limited_texts(printed)
    return None if repaired == printed else repaired


def _compile_structural_tag(compiler: xgrammar.GrammarCompiler, source: str) -> xgrammar.CompiledGrammar:
    tag = json.loads(source)
    if not isinstance(tag, dict):
        raise ValueError("expected a JSON object")
    tag = _as_format(tag) if "structures" in tag else tag
    for schema in answer_schemas(tag):
        check_keywords(schema)
    import xgrammar

    try:
        repaired = _repaired(xgrammar.Grammar.from_structural_tag(tag))
    except RuntimeError:  # tokens are named, which only the compiler knows, or something is wrong, which it says
        repaired = None
    return compiler.compile_structural_tag(tag) if repaired is None else compiler.compile_grammar(repaired)


def _as_format(tag: dict[str, Any]) -> dict[str, Any]:
    """The older form, `structures` and `triggers`, in terms of the present one."""
    try:
        tags = [
            {
                "type": "tag",
                "begin": s["begin"],
                "content": {"type": "json_schema", "json_schema": s["schema"]},
                "end": s["end"],
            }
            for s in tag["structures"]
        ]
        triggers = tag["triggers"]
    except KeyError as error:
        raise ValueError(f"missing key {error}") from None
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": triggers, "tags": tags}}


COMPILE: dict[GrammarKind, Callable[[xgrammar.GrammarCompiler, str], xgrammar.CompiledGrammar]] = {
    "json_schema": _compile_json,
    "regex": lambda compiler, source: compiler.compile_regex(source),
    "ebnf": lambda compiler, source: compiler.compile_grammar(source),
    "structural_tag": _compile_structural_tag,
}
