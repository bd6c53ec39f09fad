"""The tokenizer with which a benchmark makes its prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.utils.hf_tokenizer import Tokenizer


class PromptTokenizer:
    """Converts plain text to ids and back: no BOS, special tokens kept."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        rust = tokenizer.rust
        added = rust.get_added_tokens_decoder() if rust is not None else {}
        self.special_ids = frozenset(added)

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def load_prompt_tokenizer(path: str, trust_remote_code: bool = False) -> PromptTokenizer:
    """Loads the tokenizer. `path`: a directory or a Hugging Face id. Raises UserError."""
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.hf_tokenizer import load_tokenizer

    args = ServerArgs(model_path=path, tokenizer_path=path, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(args)
    assert tokenizer is not None
    return PromptTokenizer(tokenizer)
