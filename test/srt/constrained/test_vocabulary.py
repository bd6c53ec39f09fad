"""The texts of tokens that grammars go by."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models

from sglang.srt.constrained.vocabulary import read_vocabulary, write_vocabulary
from sglang.srt.utils.hf_tokenizer import Tokenizer
from sglang.srt.utils.tokenizer_files import TokenizerFiles
from srt.constrained.byte_tokenizer import EOS, TOKENIZER, VOCAB_SIZE


def sentencepiece_tokenizer() -> Tokenizer:
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581the", "a\u2581b", "é"]
    raw = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    strip = decoders.Strip(content=" ", left=1, right=0)
    raw.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    raw.add_special_tokens(["</s>"])
    raw.add_tokens(["<|im\u2581end|>"])
    return Tokenizer(TokenizerFiles(Path(), {}, {}, None), raw, None)


def tokens_of(tokenizer: Tokenizer, vocab_size: int, path: Path) -> list[bytes]:
    write_vocabulary(path / "vocabulary", tokenizer, vocab_size, {1})
    return read_vocabulary(path / "vocabulary").tokens


def test_bytes_that_unicode_stands_for(tmp_path: Path) -> None:
    tokens = tokens_of(TOKENIZER, VOCAB_SIZE, tmp_path)
    assert {b" ", b"\n", b"\xff", b", ", b'{"', b"<eos>"} <= set(tokens)
    assert len(tokens) == VOCAB_SIZE and not any(tokens[TOKENIZER.vocab_size :])


def test_pieces_and_tokens_for_bytes(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer()
    tokens = tokens_of(tokenizer, tokenizer.vocab_size + 3, tmp_path)
    assert tokens[2:258] == [bytes([byte]) for byte in range(256)]
    assert tokens[258:] == [b" ", b" the", b"a b", "é".encode(), b"<|im end|>", b"", b"", b""]


def test_only_columns_of_the_logits_end_the_output(tmp_path: Path) -> None:
    write_vocabulary(tmp_path / "vocabulary", TOKENIZER, VOCAB_SIZE, {100_000, EOS, 3})
    assert read_vocabulary(tmp_path / "vocabulary").stop_ids == [3, EOS]
    with pytest.raises(ValueError, match="no token ends the output"):
        write_vocabulary(tmp_path / "none", TOKENIZER, VOCAB_SIZE, {100_000})


def test_what_is_not_known_to_be_exact_is_left_to_transformers() -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    for decoder in (None, decoders.WordPiece(), decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])):
        words.decoder = decoder
        assert not Tokenizer(TokenizerFiles(Path(), {}, {}, None), words, None).spells_tokens
    assert not Tokenizer(TokenizerFiles(Path(), {}, {}, None), TOKENIZER.rust, object()).spells_tokens
    assert TOKENIZER.spells_tokens and sentencepiece_tokenizer().spells_tokens


@pytest.mark.thorough
@pytest.mark.parametrize("tokenizer", [TOKENIZER, sentencepiece_tokenizer()], ids=["bytes", "pieces"])
def test_the_texts_are_those_that_xgrammar_finds(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """It finds them in the tokenizer as transformers loads it, as it does for tokenizers that we do not know."""
    from transformers import PreTrainedTokenizerFast

    known = Tokenizer(
        TokenizerFiles(Path(), {}, {}, None), None, PreTrainedTokenizerFast(tokenizer_object=tokenizer.rust)
    )
    size = tokenizer.vocab_size + 5
    assert tokens_of(tokenizer, size, tmp_path) == tokens_of(known, size, tmp_path)
