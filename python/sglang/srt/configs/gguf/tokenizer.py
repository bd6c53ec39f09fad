"""Makes tokenizer.json and tokenizer_config.json of a GGUF file's vocabulary. No torch.

Two kinds of vocabularies are read: byte-level BPE ("gpt2"), whose rule for words `tokenizer.ggml.pre` names, and
SentencePiece's BPE ("llama"), whose merges follow from the scores.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.configs.gguf.metadata import Metadata
from sglang.srt.configs.gguf.word_rules import WORD_RULES, WordRule
from sglang.srt.errors import UserError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPECIAL = (_UNKNOWN, _CONTROL)
_SPACE = "\u2581"
_KEY = "tokenizer.ggml."
_IDS: Mapping[str, str] = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # as the format spells it
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|user|>",
        "<|observation|>",
        "<end_of_turn>",
        "<turn|>",
        "<｜end▁of▁sentence｜>",
    }
)
"""Texts of control tokens that end an answer in some family, whatever the file's ids say: published configs list them,
and a GGUF file has room for one or two."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of the file, and the type of each."""

    tokens: Sequence[str]
    types: Sequence[int]
    meta: Metadata

    def of_type(self, *types: int) -> list[int]:
        """Returns the ids of tokens of these types."""
        return [i for i, kind in enumerate(self.types) if kind in types]

    def token_id(self, key: str) -> int | None:
        """Returns the id at a key, None if the file does not state it. Raises UserError for one that is no token."""
        if _KEY + key not in self.meta.values:
            return None
        value = self.meta.general(_KEY + key, int)
        if not 0 <= value < len(self.tokens):
            raise UserError(f"{self.meta.path}: {_KEY}{key} is {value}, but there are {len(self.tokens):,} tokens.")
        return value


def vocabulary(meta: Metadata, rows: int) -> Vocabulary | None:
    """Returns the vocabulary; None: the file has none. `rows`: those of the embedding. Raises UserError."""
    if _KEY + "tokens" not in meta.values:
        return None
    tokens = _strings(meta, "tokens")
    types = meta.general(_KEY + "token_type", list, [_NORMAL] * len(tokens))
    if len(types) != len(tokens) or not all(type(kind) is int for kind in types):
        raise UserError(f"{meta.path}: {_KEY}token_type must be a type for each of {len(tokens):,} tokens.")
    if not tokens or len(tokens) > rows:
        raise UserError(f"{meta.path}: {len(tokens):,} tokens, but the embedding has {rows:,} rows.")
    return Vocabulary(tokens, types, meta)


def _strings(meta: Metadata, key: str) -> list[str]:
    values: list[str] = meta.general(_KEY + key, list)
    if not all(type(value) is str for value in values):
        raise UserError(f"{meta.path}: {_KEY}{key} must be texts.")
    return values


def end_ids(vocab: Vocabulary) -> list[int]:
    """Returns the ids of the tokens that end an answer."""
    ids = [vocab.token_id(key) for key in _ENDS]
    named = [i for i in vocab.of_type(_CONTROL) if vocab.tokens[i] in _END_TEXTS]
    return sorted({i for i in (*ids, *named) if i is not None})


def tokenizer_json(vocab: Vocabulary) -> dict[str, Any]:
    """Returns the content of tokenizer.json. Raises UserError for a kind that is not read."""
    model = vocab.meta.general(_KEY + "model", str)
    makers = {"gpt2": _byte_level, "llama": _sentence_piece}
    if model not in makers:
        raise UnreadTokenizerError(vocab, f"{_KEY}model {model!r} is not read (has {', '.join(makers)})")
    parts = makers[model](vocab)
    usual = {"version": "1.0", "truncation": None, "padding": None, "normalizer": None}
    return {**usual, "added_tokens": _added(vocab), "post_processor": None, **parts}


class UnreadTokenizerError(UserError):
    """Raised for a tokenizer that is not read. The model may be served with another one, or without."""

    def __init__(self, vocab: Vocabulary, reason: str) -> None:
        super().__init__(
            f"{vocab.meta.path}: {reason}. Give the directory of the model's tokenizer with --tokenizer-path, or serve"
            " token ids with --skip-tokenizer-init."
        )


def _added(vocab: Vocabulary) -> list[dict[str, Any]]:
    """Returns the tokens that count as such wherever they are spelled out in a text."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": i, "content": vocab.tokens[i], **flags, "special": vocab.types[i] in _SPECIAL}
        for i in vocab.of_type(*_SPECIAL, _USER_DEFINED)
        if vocab.tokens[i]
    ]


def _ids(vocab: Vocabulary) -> dict[str, int]:
    """Returns token -> id. Of tokens with the same text the first counts; the others get texts of their own, since no
    text may spell them."""
    ids: dict[str, int] = {}
    for i, token in enumerate(vocab.tokens):
        ids[token if token not in ids else f"{token}<|duplicate {i}|>"] = i
    return ids


def _adds(vocab: Vocabulary, what: str, default: bool) -> bool:
    return vocab.meta.general(f"{_KEY}add_{what}_token", bool, default)


def _template(vocab: Vocabulary, adds_bos: bool) -> dict[str, Any] | None:
    """Returns the post-processor that puts BOS before a text and EOS behind it; None: neither."""
    bos, eos = vocab.token_id("bos_token_id"), vocab.token_id("eos_token_id")
    before = bos if _adds(vocab, "bos", adds_bos) else None
    behind = eos if _adds(vocab, "eos", False) else None
    if before is None and behind is None:
        return None

    def special(token: int | None, number: int) -> list[dict[str, Any]]:
        return [] if token is None else [{"SpecialToken": {"id": vocab.tokens[token], "type_id": number}}]

    def sequence(name: str, number: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": name, "type_id": number}}
        return [*special(before, number), text, *special(behind, number)]

    used = {vocab.tokens[i]: i for i in (before, behind) if i is not None}
    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": [*sequence("A", 0), *sequence("B", 1)],
        "special_tokens": {text: {"id": text, "ids": [i], "tokens": [text]} for text, i in used.items()},
    }


def _bpe(vocab: Vocabulary, merges: Sequence[str | list[str]], **facts: Any) -> dict[str, Any]:
    usual = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {**usual, **facts, "vocab": _ids(vocab), "merges": merges}


def _byte_level(vocab: Vocabulary) -> dict[str, Any]:
    pre = vocab.meta.general(_KEY + "pre", str, "")
    rule = WORD_RULES.get(pre)
    if rule is None:
        raise UnreadTokenizerError(
            vocab, f"{_KEY}pre {pre!r} names no rule for words that is known (has {', '.join(WORD_RULES)})"
        )
    merges = [merge.split(" ") for merge in _strings(vocab.meta, "merges")]
    if not all(len(merge) == 2 for merge in merges):
        raise UserError(f"{vocab.meta.path}: {_KEY}merges must be pairs of tokens.")
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if rule.composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*_splits(rule), level]},
        "post_processor": _template(vocab, rule.adds_bos),
        "decoder": {**level, "use_regex": True},
        "model": _bpe(vocab, merges, ignore_merges=rule.ignores_merges),
    }


def _splits(rule: WordRule) -> list[dict[str, Any]]:
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in rule.patterns
    ]


def _sentence_piece(vocab: Vocabulary) -> dict[str, Any]:
    prefix = vocab.meta.general(_KEY + "add_space_prefix", bool, True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    before = {"type": "Prepend", "prepend": _SPACE}
    unknown = vocab.token_id("unknown_token_id")
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": [before, spaces]} if prefix else spaces,
        "pre_tokenizer": None,
        "post_processor": _template(vocab, True),
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": _bpe(
            vocab,
            merges_of_scores(vocab),
            unk_token=None if unknown is None else vocab.tokens[unknown],
            fuse_unk=True,
            byte_fallback=bool(vocab.of_type(_BYTE)),
        ),
    }


def merges_of_scores(vocab: Vocabulary) -> list[list[str]]:
    """Returns the pairs of pieces that SentencePiece's BPE merges, in the order of the scores of what they become: all
    pairs of pieces of the vocabulary that spell a piece. Raises UserError without scores."""
    scores = vocab.meta.general(_KEY + "scores", list)
    if len(scores) != len(vocab.tokens) or not all(type(score) is float and score == score for score in scores):
        raise UserError(f"{vocab.meta.path}: {_KEY}scores must be a number for each token.")
    ids = {vocab.tokens[i]: i for i in reversed(vocab.of_type(_NORMAL, _UNUSED))}
    longest = max(map(len, ids), default=0)
    if longest > _LONGEST_PIECE:
        raise UserError(f"{vocab.meta.path}: a token has {longest} characters, more than {_LONGEST_PIECE}.")
    if sum(map(len, ids)) > _MOST_CHARACTERS:
        raise UserError(f"{vocab.meta.path}: the tokens have more than {_MOST_CHARACTERS:,} characters.")
    merges = itertools.chain.from_iterable(_pairs(piece, ids) for piece in sorted(ids, key=lambda p: -scores[ids[p]]))
    return list(merges)


_MOST_CHARACTERS = 1 << 24
"""Characters of all pieces; Gemma's 262,144 have 1.8 million."""
_LONGEST_PIECE = 512
"""Characters of a piece: all its splits are tried. Published ones have up to 96 (runs of spaces)."""


def _pairs(piece: str, ids: Mapping[str, int]) -> list[list[str]]:
    cuts = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
    return [[left, right] for left, right in cuts if left in ids and right in ids]


def tokenizer_config(vocab: Vocabulary) -> dict[str, Any]:
    """Returns the content of tokenizer_config.json: special tokens and chat templates."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in _IDS.items():
        token = vocab.token_id(key)
        if token is not None:
            config[name] = vocab.tokens[token]
    template = _templates(vocab.meta)
    return config if template is None else {**config, "chat_template": template}


def _templates(meta: Metadata) -> str | list[dict[str, str]] | None:
    """Returns the chat template; several with their names where the file has more than one."""
    key = "tokenizer.chat_template"
    single = meta.general(key, str, "")
    named = {
        name.removeprefix(f"{key}."): meta.general(name, str) for name in meta.values if name.startswith(f"{key}.")
    }
    if not named:
        return single or None
    every = {**({"default": single} if single else {}), **named}
    return [{"name": name, "template": template} for name, template in every.items()]
