"""A byte-level tokenizer with a few longer tokens, for grammars."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from sglang.srt.utils.hf_tokenizer import Tokenizer
from sglang.srt.utils.tokenizer_files import TokenizerFiles

VOCAB_SIZE = 320  # columns of the logits: a few more than the tokenizer has
PIECES = ['{"', '":', '"}', "true", "hello", ", "]


def make_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for piece in PIECES:
        chars = "".join("Ġ" if c == " " else c for c in piece)
        for end in range(2, len(chars) + 1):
            if chars[:end] not in vocab:
                vocab[chars[:end]] = len(vocab)
                merges.append((chars[: end - 1], chars[end - 1]))
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<eos>"])
    return Tokenizer(TokenizerFiles(Path(), {}, {"eos_token": "<eos>"}, None), raw, None)


TOKENIZER = make_tokenizer()
EOS = TOKENIZER.eos_token_id
