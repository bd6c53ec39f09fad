"""How byte-level tokenizers cut a text into words before they merge bytes, by `tokenizer.ggml.pre`. No torch.

The patterns are those of the models' tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WordRule:
    """A rule for words. Each of `patterns` cuts the pieces that those before it left.

    composes: characters are composed first (NFC)
    adds_bos: BOS comes before a text unless the file says otherwise
    ignores_merges: a word that is a token is not merged
    """

    patterns: tuple[str, ...]
    composes: bool = False
    adds_bos: bool = False
    ignores_merges: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    return rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{_REST}"


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(endings: str, digits: str) -> str:
    begin = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{begin}{_UPPER}*{_LOWER}+{endings}|{begin}{_UPPER}+{_LOWER}*{endings}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_LLAMA3 = WordRule((_words(r"\p{N}{1,3}"),), adds_bos=True, ignores_merges=True)
_QWEN2 = WordRule((_words(r"\p{N}"),), composes=True)
_GLM4 = WordRule((_words(r"\p{N}{1,3}"),))
_SMOLLM = WordRule((r"\p{N}", _GPT2))
_DEEPSEEK3 = WordRule(
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)

WORD_RULES: Mapping[str, WordRule] = {
    "gpt-2": WordRule((_GPT2,)),
    "smollm": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "glm4": _GLM4,
    "chatglm-bpe": _GLM4,
    "gpt-4o": WordRule((_cased(f"{_ENDINGS}?", r"\p{N}{1,3}"),)),
    "tekken": WordRule((_cased("", r"\p{N}"),), adds_bos=True, ignores_merges=True),
    "deepseek-v3": _DEEPSEEK3,
}
"""The rules by name. Others have patterns that are not known here; a wrong one would answer with worse tokens."""
