"""Compiles grammars with xgrammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from sglang.srt.constrained.grammar import ANY_JSON, Grammar, GrammarError, GrammarKey, GrammarKind

if TYPE_CHECKING:
    import xgrammar
    from transformers import PreTrainedTokenizerBase

LIBRARY_PREFIX = re.compile(r"^\[[\d:]+\] \S+:\d+: (?:Check failed: .*? is false: )?")


MAX_WHITESPACE = 64
"""Characters between two elements of JSON: room for deep indentation, but a model cannot fill its answer with them."""


class GrammarBackend:
    """The tokenizer is loaded with the first grammar: most servers never see one."""

    def __init__(
        self,
        load_tokenizer: Callable[[], PreTrainedTokenizerBase],
        vocab_size: int,
        eos_ids: Collection[int],
        compile_threads: int = 2,
    ) -> None:
        """vocab_size: columns of the logits, which may be more than the tokenizer has. eos_ids: tokens that end the
        output where the grammar is complete."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(i for i in eos_ids if i < vocab_size)
        self._compile_threads = compile_threads
        self._compiler: xgrammar.GrammarCompiler | None = None

    def load(self) -> None:
        """Prepares the vocabulary. Called before compile, from one thread only."""
        import xgrammar

        if self._compiler is None:
            info = xgrammar.TokenizerInfo.from_huggingface(
                self._load_tokenizer(), vocab_size=self._vocab_size, stop_token_ids=self._eos_ids
            )
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=self._compile_threads, cache_enabled=False)

    def compile(self, key: GrammarKey) -> Grammar:
        """A grammar at its start. May take seconds; any thread. GrammarError if the grammar is not valid."""
        assert self._compiler is not None, "load() comes first"
        try:
            return Grammar(COMPILE[key.kind](self._compiler, key.source))
        except (RuntimeError, ValueError, TypeError) as error:  # what the library raises for bad input
            reason = LIBRARY_PREFIX.sub("", str(error)).strip()
            raise GrammarError(f"invalid {key.kind}: {reason}") from error


def _compile_json(compiler: xgrammar.GrammarCompiler, source: str) -> xgrammar.CompiledGrammar:
    if source == ANY_JSON:
        return compiler.compile_json_schema('{"type": "object"}', strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE)
    return compiler.compile_json_schema(source, max_whitespace_cnt=MAX_WHITESPACE)


def _compile_structural_tag(compiler: xgrammar.GrammarCompiler, source: str) -> xgrammar.CompiledGrammar:
    tag = json.loads(source)
    if not isinstance(tag, dict):
        raise ValueError("expected a JSON object")
    return compiler.compile_structural_tag(_as_format(tag) if "structures" in tag else tag)


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
