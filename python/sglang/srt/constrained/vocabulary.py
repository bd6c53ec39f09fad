"""The facts about a tokenizer that grammars need, in a file that every process that compiles them reads."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xgrammar
    from transformers import PreTrainedTokenizerBase


def write_vocabulary(path: Path, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_ids: Collection[int]) -> None:
    """The file appears when it is complete.

    vocab_size: columns of the logits, which may be more than the tokenizer has. eos_ids: tokens that end the output
    where the grammar is complete.
    """
    import xgrammar

    stop_ids = sorted(i for i in eos_ids if i < vocab_size)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=stop_ids)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(info.serialize_json())
    partial.rename(path)


def read_vocabulary(path: Path) -> xgrammar.TokenizerInfo:
    """Bytes of every token, and those that end the output; for any library."""
    import xgrammar

    return xgrammar.TokenizerInfo.deserialize_json(path.read_text())
