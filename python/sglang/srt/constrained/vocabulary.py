"""Facts about a tokenizer that grammars need, in a file that every compiling process reads."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import msgspec

from sglang.srt.utils.hf_tokenizer import Tokenizer


class Vocabulary(msgspec.Struct, array_like=True):
    """The tokens of a model as grammar libraries need them."""

    tokens: list[bytes]
    """The text of the token of each column of the logits; empty if there is no such token, or it has no text."""
    stop_ids: list[int]
    """Tokens that end the output where the grammar is complete, ascending; at least one."""


def write_vocabulary(path: Path, tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int]) -> None:
    """Writes the file, which appears when it is complete. vocab_size: columns of the logits, which may exceed the
    tokenizer's tokens. Raises ValueError if none of `eos_ids` is one of them."""
    stop_ids = sorted(i for i in eos_ids if i < vocab_size)
    if not stop_ids:
        raise ValueError("no token ends the output")
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_bytes(msgspec.msgpack.encode(Vocabulary(_spelled(tokenizer, vocab_size), stop_ids)))
    partial.rename(path)


def _spelled(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    if tokenizer.spells_tokens:
        return [tokenizer.token_bytes(i) for i in range(vocab_size)]
    import xgrammar  # finds out how the tokenizer spells bytes, with transformers' help

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer.hf, vocab_size=vocab_size, stop_token_ids=[0])
    return [bytes(text) for text in info.decoded_vocab]


def read_vocabulary(path: Path) -> Vocabulary:
    """Reads what `write_vocabulary` wrote."""
    return msgspec.msgpack.decode(path.read_bytes(), type=Vocabulary)
