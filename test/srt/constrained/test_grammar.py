"""Grammars over a byte-level tokenizer built here: what the masks allow must be what the grammar says."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sglang.srt.constrained.grammar import (
    ANY_JSON,
    Grammar,
    GrammarError,
    GrammarKey,
    grammar_key,
)
from sglang.srt.constrained.grammar_backend import MAX_WHITESPACE, GrammarBackend
from sglang.srt.constrained.grammar_manager import GrammarManager
from sglang.srt.sampling.sampling_params import SamplingParams

VOCAB_SIZE = 320  # columns of the logits: a few more than the tokenizer has
PIECES = ['{"', '":', '"}', "true", "hello", ", "]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for piece in PIECES:
        chars = "".join("Ġ" if c == " " else c for c in piece)
        for end in range(2, len(chars) + 1):
            if chars[:end] not in vocab:
                vocab[chars[:end]] = len(vocab)
                merges.append((chars[: end - 1], chars[end - 1]))
    raw = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>")


TOKENIZER = make_tokenizer()
EOS = TOKENIZER.eos_token_id


@pytest.fixture(scope="module")
def backend() -> GrammarBackend:
    backend = GrammarBackend(lambda: TOKENIZER, VOCAB_SIZE, {EOS, 100_000})
    backend.load()
    return backend


@pytest.fixture
def manager(backend: GrammarBackend) -> Iterator[GrammarManager]:
    manager = GrammarManager(backend)
    yield manager
    manager.shutdown()


def allowed(grammar: Grammar) -> list[int]:
    row = np.zeros(-(-VOCAB_SIZE // 32), np.int32)
    grammar.fill_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:VOCAB_SIZE]).tolist()


def sample(grammar: Grammar, rng: np.random.Generator, limit: int = 400) -> str:
    """A random walk through the masks, as a model would take it."""
    out: list[int] = []
    while not grammar.is_terminated() and len(out) < limit:
        options = allowed(grammar)
        # Ends as soon as it may, and avoids endless strings and white space.
        closing = [t for t in options if t == EOS or TOKENIZER.decode([t]) in ('"', "}")]
        token = closing[0] if closing and rng.random() < 0.5 else int(rng.choice(options))
        assert grammar.accept(token)
        out.append(token)
    assert grammar.is_terminated() and out[-1] == EOS
    return str(TOKENIZER.decode(out[:-1]))


def test_json_schema_output_is_valid(manager: GrammarManager) -> None:
    pending = manager.request(GrammarKey("json_schema", SCHEMA))
    for seed in range(5):
        text = sample(pending.result(), np.random.default_rng(seed))
        value = json.loads(text, strict=False)  # xgrammar's bounded strings admit raw control characters
        assert set(value) == {"name", "age"} and isinstance(value["name"], str) and isinstance(value["age"], int)


@pytest.mark.parametrize("source", [SCHEMA, ANY_JSON])
def test_whitespace_in_json_ends(manager: GrammarManager, source: str) -> None:
    grammar = manager.request(GrammarKey("json_schema", source)).result()
    assert feed(grammar, "{" + "\n" * MAX_WHITESPACE)
    assert not feed(grammar, " ") and feed(grammar, '"')


def test_regex_output_matches(manager: GrammarManager) -> None:
    pattern = r"[a-c]{2,5}-(true|hello)\d"
    pending = manager.request(GrammarKey("regex", pattern))
    for seed in range(5):
        assert re.fullmatch(pattern, sample(pending.result(), np.random.default_rng(seed)))


def test_ebnf_output_matches(manager: GrammarManager) -> None:
    source = 'root ::= "(" root ")" | [xy]'
    text = sample(manager.request(GrammarKey("ebnf", source)).result(), np.random.default_rng(1))
    assert re.fullmatch(r"(\()*[xy](\))*", text) and text.count("(") == text.count(")")


def feed(grammar: Grammar, text: str) -> bool:
    return all(grammar.accept(t) for t in TOKENIZER.encode(text))


def test_any_json_is_any_object(manager: GrammarManager) -> None:
    pending = manager.request(GrammarKey("json_schema", ANY_JSON))
    assert feed(pending.result(), '{"a": [1, {"b": null}], "hello": true}')
    assert feed(pending.result(), "{}")
    assert not feed(pending.result(), "[1]")


OLD_TAG = {
    "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f>"],
}
NEW_TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f>"],
        "tags": [
            {"begin": "<f>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}}, "end": "</f>"}
        ],
    },
}


@pytest.mark.parametrize("tag", [OLD_TAG, NEW_TAG], ids=["old", "new"])
def test_structural_tag_constrains_after_its_trigger(manager: GrammarManager, tag: dict[str, object]) -> None:
    grammar = manager.request(GrammarKey("structural_tag", json.dumps(tag))).result()
    assert feed(grammar, "any text, then <f>12")
    assert not feed(grammar.copy(), "x")
    assert feed(grammar, "</f> and more")


def test_state_can_be_copied_and_taken_back(manager: GrammarManager) -> None:
    grammar = manager.request(GrammarKey("regex", "hello(a|b)c")).result()
    start = allowed(grammar)
    assert feed(grammar, "hello")
    other = grammar.copy()
    assert feed(other, "a") and allowed(other) == TOKENIZER.encode("c")
    assert sorted(allowed(grammar)) == sorted(TOKENIZER.encode("a") + TOKENIZER.encode("b"))
    assert allowed(grammar.fresh()) == start
    assert feed(grammar, "b")
    grammar.rollback(1)
    assert feed(grammar, "ac")
    grammar.rollback(0)
    assert allowed(grammar) == [EOS]
    assert not grammar.accept(TOKENIZER.encode("a")[0]) and allowed(grammar) == [EOS]


def test_after_the_end_everything_is_allowed_and_nothing_accepted(manager: GrammarManager) -> None:
    grammar = manager.request(GrammarKey("regex", "a")).result()
    assert feed(grammar, "a") and not grammar.is_terminated()
    assert grammar.accept(EOS) and grammar.is_terminated()
    assert not grammar.accept(EOS)
    assert len(allowed(grammar)) == VOCAB_SIZE
    grammar.rollback(1)
    assert not grammar.is_terminated() and allowed(grammar) == [EOS]


@pytest.mark.parametrize(
    ("kind", "source", "text"),
    [
        ("json_schema", '{"type": 3}', "invalid json_schema: Type should be a string"),
        ("json_schema", '{"type"', "invalid json_schema: Failed to parse JSON"),
        ("regex", "(ab", "invalid regex: .*parenthesis"),
        ("regex", "(?=a)b", "invalid regex: .*Lookahead"),
        ("ebnf", "root ::= foo", 'invalid ebnf: .*"foo" is not defined'),
        ("structural_tag", "[]", "invalid structural_tag: expected a JSON object"),
        ("structural_tag", "{", "invalid structural_tag: "),
        ("structural_tag", '{"structures": [{}], "triggers": []}', "invalid structural_tag: missing key 'begin'"),
        ("structural_tag", '{"type": "structural_tag"}', "invalid structural_tag: "),
    ],
)
def test_invalid_grammars_are_explained(manager: GrammarManager, kind: str, source: str, text: str) -> None:
    with pytest.raises(GrammarError, match=text) as error:
        manager.request(GrammarKey(kind, source)).result()  # type: ignore[arg-type]
    assert "/project/" not in str(error.value)


def test_the_key_of_a_request() -> None:
    assert grammar_key(SamplingParams()) is None
    assert grammar_key(SamplingParams(regex="a")) == ("regex", "a")
    with pytest.raises(GrammarError, match="got json_schema, ebnf"):
        grammar_key(SamplingParams(json_schema="{}", ebnf="root ::= [a]"))


class SlowCompiler:
    """Compiles when told to."""

    def __init__(self, backend: GrammarBackend) -> None:
        self.backend = backend
        self.go = threading.Event()
        self.compiled: list[GrammarKey] = []

    def load(self) -> None:
        pass

    def compile(self, key: GrammarKey) -> Grammar:
        self.go.wait(10)
        self.compiled.append(key)
        return self.backend.compile(key)


def test_requests_do_not_block_and_share_a_compilation(backend: GrammarBackend) -> None:
    compiler = SlowCompiler(backend)
    manager = GrammarManager(compiler, max_cached=2)
    first, second = (manager.request(GrammarKey("regex", "ab")) for _ in range(2))
    assert not first.done() and not second.done()
    compiler.go.set()
    one, two = first.result(), second.result()
    assert first.done() and compiler.compiled == [("regex", "ab")]
    assert feed(one, "a") and feed(two, "ab") and feed(one, "b")  # they share nothing but the compilation
    for pattern in ("b", "c", "d"):
        manager.request(GrammarKey("regex", pattern)).result()
    assert manager.num_cached() == 2
    manager.request(GrammarKey("regex", "ab")).result()
    assert compiler.compiled.count(GrammarKey("regex", "ab")) == 2
    manager.shutdown()


def test_a_compilation_that_takes_too_long_fails_its_request(backend: GrammarBackend) -> None:
    compiler = SlowCompiler(backend)
    now = [0.0]
    manager = GrammarManager(compiler, timeout_s=5, clock=lambda: now[0])
    pending = manager.request(GrammarKey("regex", "a"))
    assert not pending.done()
    now[0] = 6.0
    assert pending.done()
    with pytest.raises(GrammarError, match="too long"):
        pending.result()
    compiler.go.set()
    assert feed(manager.request(GrammarKey("regex", "a")).result(), "a")
    manager.shutdown()


def test_without_a_backend_requests_fail_politely() -> None:
    manager = GrammarManager(None)
    with pytest.raises(GrammarError, match="--grammar-backend none"):
        manager.request(GrammarKey("regex", "a")).result()
    manager.shutdown()


def test_a_tokenizer_that_cannot_be_loaded_fails_the_request_only() -> None:
    def broken() -> PreTrainedTokenizerFast:
        raise OSError("no tokenizer.json")

    manager = GrammarManager(GrammarBackend(broken, 10, [1]))
    with pytest.raises(GrammarError, match=r"no tokenizer\.json"):
        manager.request(GrammarKey("regex", "a")).result()
    manager.shutdown()
