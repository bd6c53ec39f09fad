"""Numbers of token texts for DeepSeek-V4.1's n-grams: texts that differ only in case, accents and spaces have the same
number.

Source: the rules in the inference code beside the checkpoint, as others describe them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers

from sglang.srt.errors import UserError

_LONE_SPACE = "\ue000"
"""Stands for a token of only spaces while spaces around texts are stripped."""
_UNDECODED = "\ufffd"


def text_numbers(tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    """Returns the number of each token's text, int64 [vocab_size], numbered by first occurrence in the order of token
    ids. A token that is not a whole character has its own name as text; ids beyond the tokenizer's last one get the
    number of the first token."""
    alike = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )
    numbers: dict[str, int] = {}
    result = np.zeros(vocab_size, dtype=np.int64)
    for token in range(min(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = tokenizer.id_to_token(token) or "" if _UNDECODED in text else alike.normalize_str(text) or text
        result[token] = numbers.setdefault(key, len(numbers))
    return result


def read_text_numbers(directory: str, vocab_size: int, num_texts: int) -> np.ndarray:
    """Returns `text_numbers` of a checkpoint's tokenizer.json. Raises UserError if it is missing, or has another number
    of texts than the checkpoint's hashes were made for. For a config.json without weights, which gets dummy ones, any
    texts are accepted."""
    file = Path(directory) / "tokenizer.json"
    if not file.is_file() and not any(Path(directory).glob("*.safetensors")):
        return np.arange(vocab_size, dtype=np.int64) % num_texts
    if not file.is_file():
        raise UserError(f"{file} is missing: the model's tables of n-grams are looked up by the texts of tokens.")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{file} is not a tokenizer that `tokenizers` can read: {error}") from None
    numbers = text_numbers(tokenizer, vocab_size)
    if int(numbers.max()) + 1 != num_texts:
        raise UserError(
            f"{file}: its tokens have {int(numbers.max()) + 1} texts, not {num_texts} ('engram_compressed_vocab_size'):"
            " the tables of n-grams were made with another tokenizer."
        )
    return numbers
