"""Incremental decoding gives the tokenizer's own decoding, however the ids are cut."""

from __future__ import annotations

from functools import cache
from itertools import chain
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from sglang.srt.utils.hf_tokenizer import Tokenizer
from sglang.srt.utils.text_stream import ByteLevelDecoder, SpelledStream, TextDecoder, WindowDecoder
from sglang.srt.utils.tokenizer_files import TokenizerFiles

TEXT = "Hello world, naïve café. 你好，世界！ 😀👩‍👩‍👧 здравствуй мир \n\t  spaces   and 1234567890 <tag> e\u0301"
SPECIAL = "<|end|>"


def _wrap(rust: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(TokenizerFiles(None, {}, {}, None), rust, None)  # type: ignore[arg-type]


@cache
def byte_level() -> Tokenizer:
    rust = tokenizers.Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=[SPECIAL], show_progress=False
    )
    rust.train_from_iterator([TEXT] * 3, trainer)
    rust.add_tokens(["<tool call>", "é x"])  # outside of the byte alphabet, and inside of it but not UTF-8
    return _wrap(rust)


@cache
def sentencepiece() -> Tokenizer:
    """The layout of Llama-2 tokenizers: byte fallback, and the space in front of the text is not printed."""
    words = ["▁Hello", "▁world", "▁", "na", "ï", "ve", "é", "你", "好", "😀", "▁a", "b", ",", "\n"]
    tokens = ["<unk>", SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    rust = tokenizers.Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    rust.add_special_tokens([SPECIAL])
    return _wrap(rust)


def decode_in_pieces(decoder: TextDecoder, ids: list[int], sizes: list[int], skip_special_tokens: bool) -> list[str]:
    """The pieces for chunks of the given sizes, the rest one by one, and the end."""
    stream, pieces, at = decoder.stream(skip_special_tokens), [], 0
    for size in sizes:
        pieces.append(stream.push(ids[at : at + size]))
        at += size
    pieces.extend(stream.push([i]) for i in ids[at:])
    return [*pieces, stream.finish()]


CHUNKS = st.lists(st.integers(1, 5), max_size=10)


@settings(deadline=None, max_examples=300)
@given(ids=st.lists(st.integers(0, 340), max_size=60), sizes=CHUNKS, skip=st.booleans())
def test_byte_level_equals_decode_for_any_ids(ids: list[int], sizes: list[int], skip: bool) -> None:
    """Any ids: broken UTF-8, special tokens, ids beyond the vocabulary."""
    tokenizer = byte_level()
    decoder = tokenizer.text_decoder()
    assert isinstance(decoder, ByteLevelDecoder)
    assert "".join(decode_in_pieces(decoder, ids, sizes, skip)) == tokenizer.decode(ids, skip)


@settings(deadline=None, max_examples=300)
@given(
    text=st.text(st.sampled_from(TEXT), max_size=40), sizes=CHUNKS, kind=st.sampled_from([byte_level, sentencepiece])
)
def test_no_piece_shows_half_a_character(text: str, sizes: list[int], kind: type) -> None:
    tokenizer: Tokenizer = kind()
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = decode_in_pieces(tokenizer.text_decoder(), ids, sizes, True)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == tokenizer.decode(ids)


def _sentencepiece_ids() -> st.SearchStrategy[list[int]]:
    """Tokens in any order, with bytes only as whole characters: a run of bytes that is not UTF-8 as a whole turns into
    replacement characters from its beginning in this kind of tokenizer, which no incremental decoder can know."""
    rust = sentencepiece().rust
    assert rust is not None
    words: list[Any] = [rust.token_to_id(t) for t in ("▁Hello", "▁world", "▁", "na", "ï", "b", "\n", SPECIAL)]
    characters = st.sampled_from("aé你😀").map(lambda c: [2 + byte for byte in c.encode()])
    return st.lists(st.sampled_from(words).map(lambda i: [i]) | characters, max_size=30).map(lambda x: [*chain(*x)])


@settings(deadline=None, max_examples=300)
@given(ids=_sentencepiece_ids(), sizes=CHUNKS, skip=st.booleans())
def test_window_equals_decode(ids: list[int], sizes: list[int], skip: bool) -> None:
    tokenizer = sentencepiece()
    decoder = tokenizer.text_decoder()
    assert isinstance(decoder, WindowDecoder)
    assert "".join(decode_in_pieces(decoder, ids, sizes, skip)) == tokenizer.decode(ids, skip)


def test_a_character_appears_with_its_last_token() -> None:
    for tokenizer, ids in (
        (byte_level(), _byte_ids(byte_level(), "😀")),
        (sentencepiece(), [2 + b for b in "😀".encode()]),
    ):
        stream = tokenizer.text_decoder().stream(True)
        assert [stream.push([i]) for i in ids] == ["", "", "", "😀"]


def _byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    alphabet = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [alphabet[bytes([byte])] for byte in text.encode()]


def test_incomplete_bytes_show_at_the_end_only() -> None:
    for tokenizer, ids in (
        (byte_level(), _byte_ids(byte_level(), "😀")),
        (sentencepiece(), [2 + b for b in "😀".encode()]),
    ):
        stream = tokenizer.text_decoder().stream(True)
        assert stream.push(ids[:3]) == ""
        assert stream.finish() == tokenizer.decode(ids[:3])
        assert "\ufffd" in tokenizer.decode(ids[:3])


def test_invalid_text_does_not_stall_a_window() -> None:
    stream = sentencepiece().text_decoder().stream(True)
    assert any(stream.push([2 + 0xFF]) for _ in range(40))


def test_special_tokens_do_not_grow_a_window() -> None:
    tokenizer = sentencepiece()
    (special,) = tokenizer.encode(SPECIAL)[-1:]
    sizes: list[int] = []

    def decode(ids: list[int], skip: bool) -> str:
        sizes.append(len(ids))
        return tokenizer.decode(ids, skip)

    stream = WindowDecoder(decode).stream(True)
    for _ in range(500):
        stream.push([special])
    assert max(sizes) <= 64


@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
def test_token_bytes(kind: type) -> None:
    tokenizer: Tokenizer = kind()
    text = "na你好😀 b"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().strip() == text
    assert tokenizer.token_bytes(100_000) == b""


@settings(deadline=None, max_examples=200)
@given(ids=_sentencepiece_ids(), sizes=CHUNKS, skip=st.booleans(), kind=st.sampled_from([byte_level, sentencepiece]))
def test_special_tokens_are_spelled_and_the_rest_prints(
    ids: list[int], sizes: list[int], skip: bool, kind: type
) -> None:
    tokenizer: Tokenizer = kind()
    assert tokenizer.rust is not None
    special = tokenizer.rust.token_to_id(SPECIAL)
    stream, pieces, at = SpelledStream(tokenizer.text_decoder(), skip), [], 0
    for size in [*sizes, len(ids)]:
        pieces += stream.push(ids[at : at + size])
        at += size
    pieces += stream.finish()
    assert "".join(piece.text for piece in pieces if piece.prints) == tokenizer.decode(ids, skip)
    assert "".join(piece.text for piece in pieces).count(SPECIAL) == ids.count(special)
