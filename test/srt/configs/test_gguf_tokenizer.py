"""Tokenizers of GGUF files: the tokens of the tokenizer that the file was made of, or of SentencePiece's algorithm."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.configs.gguf.metadata import Metadata
from sglang.srt.configs.gguf.tokenizer import Vocabulary, end_ids, tokenizer_json
from sglang.srt.configs.gguf.word_rules import WORD_RULES
from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.errors import UserError
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import load_tokenizer

from .gguf_files import BYTE, CONTROL, NORMAL, TEXTS, UNKNOWN, USER_DEFINED, add_byte_level, trained, write


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))


def _args(path: Path, **more: Any) -> ServerArgs:
    return ServerArgs(model_path=str(path), **more)


@pytest.mark.parametrize("pre", WORD_RULES)
def test_byte_level_tokens_are_those_of_the_tokenizer(pre: str, tmp_path: Path) -> None:
    source = trained(pre)
    made = load_tokenizer(_args(write(tmp_path / "m.gguf", lambda writer: add_byte_level(writer, source, pre))))
    assert made is not None
    begin = [source.token_to_id("<|im_start|>")] if WORD_RULES[pre].adds_bos else []
    for text in TEXTS:
        ids = source.encode(text).ids
        assert made.encode(text) == begin + ids, text
        assert made.decode(ids, skip_special_tokens=False) == source.decode(ids, skip_special_tokens=False)
    assert made.spells_tokens
    assert (made.bos_token_id, made.eos_token_id) == tuple(map(source.token_to_id, ("<|im_start|>", "<|im_end|>")))


def test_a_byte_level_file_may_say_whether_texts_begin_with_bos(tmp_path: Path) -> None:
    source = trained("qwen2")

    def add(writer: Any) -> None:
        add_byte_level(writer, source, "qwen2")
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(True)

    made = load_tokenizer(_args(write(tmp_path / "m.gguf", add)))
    assert made is not None
    ids = made.encode("a")
    assert ids[0] == source.token_to_id("<|im_start|>") and ids[-1] == source.token_to_id("<|im_end|>")
    assert made.encode("a", add_special_tokens=False) == ids[1:-1]


# --- SentencePiece ---------------------------------------------------------------------------------------------------

SPACE = "\u2581"


def pieces() -> tuple[list[str], list[int], list[float]]:
    """A vocabulary in which pieces of one letter are joined in an order that differs from that of their ids."""
    rng = random.Random(3)
    letters = [SPACE, *"abcd"]
    made = set(letters)
    while len(made) < 60:
        left, right = rng.choice(sorted(made)), rng.choice(sorted(made))
        if len(left + right) <= 6:
            made.add(left + right)
    words = sorted(made - set(letters))
    rng.shuffle(words)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\n\n", *words, *letters]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, USER_DEFINED, *[NORMAL] * (len(words) + len(letters))]
    return tokens, types, [-float(i) for i in range(len(tokens))]


def sentence_piece(text: str, tokens: list[str], types: list[int], scores: list[float]) -> list[int]:
    """SentencePiece's BPE as its paper has it: of all neighbours that make a piece, those with the highest score are
    joined first, from the left."""
    ids = {token: i for i, token in enumerate(tokens) if types[i] == NORMAL}
    symbols = list(text)
    while True:
        pairs = enumerate(a + b for a, b in itertools.pairwise(symbols))
        joined = [(scores[ids[piece]], -i) for i, piece in pairs if piece in ids]
        if not joined:
            break
        at = -max(joined)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    result: list[int] = []
    for symbol in symbols:
        result += [ids[symbol]] if symbol in ids else [tokens.index(f"<0x{byte:02X}>") for byte in symbol.encode()]
    return result


TOKENS, TYPES, SCORES = pieces()


def _vocab(**more: Any) -> Vocabulary:
    values: Mapping[str, Any] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": SCORES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    keys = {f"tokenizer.ggml.{key}": value for key, value in more.items()}
    return Vocabulary(TOKENS, TYPES, Metadata({**values, **keys}, Path("m.gguf")))


def _rust(vocab: Vocabulary) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(vocab)))


PLAIN = _rust(_vocab(add_space_prefix=False, add_bos_token=False))


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="abcd é", max_size=24))
def test_sentence_piece_tokens_are_those_of_its_algorithm(text: str) -> None:
    assert PLAIN.encode(text).ids == sentence_piece(text.replace(" ", SPACE), TOKENS, TYPES, SCORES)
    assert PLAIN.decode(PLAIN.encode(text).ids) == text


def test_sentence_piece_begins_with_bos_and_a_space_unless_the_file_says_otherwise() -> None:
    usual = _rust(_vocab())
    assert usual.encode("ab").ids == [1, *sentence_piece(f"{SPACE}ab", TOKENS, TYPES, SCORES)]
    assert usual.decode(usual.encode("ab d").ids) == "ab d"


def test_user_defined_tokens_are_found_in_a_text() -> None:
    assert PLAIN.encode("\n\n").ids == [TOKENS.index("\n\n")]
    assert PLAIN.encode("a\n\nb").tokens == ["a", "\n\n", "b"]


def test_control_tokens_that_end_an_answer_are_end_tokens() -> None:
    tokens = ["<eos>", "<end_of_turn>", "a", "<|im_end|>", "b", "c"]
    types = [CONTROL, CONTROL, NORMAL, NORMAL, NORMAL, CONTROL]
    values = {"general.architecture": "llama", "tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 5}
    assert end_ids(Vocabulary(tokens, types, Metadata(values, Path("m.gguf")))) == [0, 1, 5]


def _unknown(model: str, pre: str) -> Callable[[Any], None]:
    def add(writer: Any) -> None:
        writer.add_tokenizer_model(model)
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(["a", "b"])
        writer.add_token_merges(["a b"])

    return add


@pytest.mark.parametrize(
    ("model", "pre", "message"),
    [("rwkv", "default", "model 'rwkv' is not read"), ("gpt2", "viking", "pre 'viking' names no rule for words")],
)
def test_a_model_whose_tokenizer_is_not_read_may_have_another(
    model: str, pre: str, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "m.gguf", _unknown(model, pre))
    with pytest.raises(UserError, match=f"{message}.*--tokenizer-path"):
        load_tokenizer(_args(path))
    assert load_tokenizer(_args(path, skip_tokenizer_init=True)) is None
    source = trained("qwen2")
    other = write(tmp_path / "other.gguf", lambda writer: add_byte_level(writer, source, "qwen2"))
    assert load_tokenizer(_args(path, tokenizer_path=str(other))) is not None


def test_chat_templates_come_with_the_file(tmp_path: Path) -> None:
    source = trained("qwen2")

    def add(writer: Any) -> None:
        add_byte_level(writer, source, "qwen2")
        writer.add_chat_template("{{ messages[0].content }}")

    made = load_tokenizer(_args(write(tmp_path / "one.gguf", add)))
    assert made is not None and made.chat_template == "{{ messages[0].content }}"

    def add_two(writer: Any) -> None:
        add_byte_level(writer, source, "qwen2")
        writer.add_chat_template([{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}])

    made = load_tokenizer(_args(write(tmp_path / "two.gguf", add_two)))
    assert made is not None and made.chat_template == {"default": "A", "tool_use": "B"}


def test_the_directory_is_made_once(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", _unknown("gpt2", "qwen2"))
    folder = resolve_model_path(str(path))
    times = {file.name: file.stat().st_mtime_ns for file in folder.iterdir() if not file.is_symlink()}
    assert resolve_model_path(str(path)) == folder
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir() if not file.is_symlink()} == times
    assert not [file for file in folder.parent.iterdir() if file.name.startswith(".")]
