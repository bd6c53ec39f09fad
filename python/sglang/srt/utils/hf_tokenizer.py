"""The model's tokenizer. Uses the `tokenizers` library alone if tokenizer.json is complete, because importing
transformers (and with it torch) costs every process seconds; otherwise loads it with transformers."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import tokenizers

from sglang.srt.configs.gguf.tensors import WHY_UNREAD
from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.errors import UserError
from sglang.srt.utils.text_stream import REPLACEMENT, ByteLevelDecoder, TextDecoder, WindowDecoder
from sglang.srt.utils.tokenizer_files import TokenizerFiles, read_tokenizer_files

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_PANIC = "PanicException"
_WORD_START = "\u2581"
"""Mark for a space in SentencePiece vocabularies."""


class Tokenizer:
    """Converts text to token ids and back. Decoding never "cleans up" spaces: the text is exactly what the tokens
    spell."""

    def __init__(self, files: TokenizerFiles, rust: tokenizers.Tokenizer | None, hf: Any | None) -> None:
        """`rust`: the `tokenizers` object; None for a tokenizer written in Python, for which `hf` is given."""
        self._files = files
        self._rust = rust
        self._hf = hf
        self._hf_lock = threading.Lock()
        self._hf_of_loop: Any | None = None
        """A copy of `hf` for the event loop."""
        self._byte_level: ByteLevelDecoder | None = None
        if rust is not None and _is_byte_level(rust):
            self._byte_level = ByteLevelDecoder(rust.id_to_token, _special_ids(rust))
        self._texts: dict[int, str] = {}
        self.special_tokens = files.special_tokens
        """bos_token, eos_token, ... -> text."""
        self.chat_template = files.chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of `text`; special tokens that are spelled out in it count as such. Thread-safe, and other
        threads go on meanwhile. Raises TokenizerError for a text on which the tokenizer fails."""
        if self._rust is not None:  # `encode` would keep Python's lock, and locate every token in the text
            with _panics_as_errors():
                (encoding,) = self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = encoding.ids
            return ids
        with self._own_hf() as hf:
            return list(hf.encode(text, add_special_tokens=add_special_tokens))

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Returns the ids of two texts with the special tokens that separate them, and where those of the second kind
        begin; 0: the tokenizer does not tell the two apart. Thread-safe. Raises TokenizerError as `encode` does."""
        if self._rust is not None:
            with _panics_as_errors():
                (encoding,) = self._rust.encode_batch_fast([(first, second)])
            ids, kinds = encoding.ids, encoding.type_ids
        else:
            with self._own_hf() as hf:
                encoding = hf(first, second, return_token_type_ids=True)
            ids, kinds = encoding["input_ids"], encoding["token_type_ids"]
        return list(ids), kinds.index(1) if 1 in kinds else 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of `ids`; ids outside of the vocabulary print nothing, those on which the tokenizer fails
        print U+FFFD."""
        if self._rust is not None:
            try:
                with _panics_as_errors():
                    text: str = self._rust.decode(list(ids), skip_special_tokens=skip_special_tokens)
            except TokenizerError:
                return REPLACEMENT
            return text
        with self._own_hf() as hf:
            known = [i for i in ids if 0 <= i < len(hf)]
            return str(hf.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))

    def copy_for_event_loop(self) -> None:
        """Copies a tokenizer written in Python, which one thread at a time may use, so that this process's event loop
        never waits for a thread that tokenizes a long text."""
        if self._rust is not None:
            return
        try:
            self._hf_of_loop = copy.deepcopy(self.hf)
        except Exception:  # the model's own code may hold what cannot be copied
            logger.warning("The tokenizer cannot be copied: long texts hold up all others", exc_info=True)

    @contextmanager
    def _own_hf(self) -> Iterator[Any]:
        """Yields the transformers tokenizer for the caller alone."""
        if self._hf_of_loop is not None and _is_on_event_loop():
            yield self._hf_of_loop
        else:
            with self._hf_lock:
                yield self.hf

    def text_decoder(self) -> TextDecoder:
        """Returns a decoder for growing sequences."""
        if self._byte_level is not None:
            return self._byte_level
        special_ids = _special_ids(self._rust) if self._rust is not None else frozenset(self.hf.all_special_ids)
        return WindowDecoder(self.decode, special_ids)

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token, special tokens included; U+FFFD for parts of characters."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.token_bytes(token_id).decode("utf-8", "replace")
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that one token stands for; empty for an unknown id."""
        if self._byte_level is not None:
            return self._byte_level.token_bytes(token_id)
        if self._rust is None:
            return self.decode([token_id], skip_special_tokens=False).encode()
        token = self._rust.id_to_token(token_id)
        if token is None:
            return b""
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(_WORD_START, " ").encode()

    @property
    def spells_tokens(self) -> bool:
        """Returns whether `token_bytes` is exact, according to the decoder in tokenizer.json."""
        if self._hf is not None or self._rust is None:  # transformers may have changed or left out something
            return False
        return self._byte_level is not None or _has_byte_tokens(self._rust)

    @property
    def vocab_size(self) -> int:
        """Returns the number of ids with a meaning, added tokens included. The model's vocabulary may be padded
        beyond."""
        return self._rust.get_vocab_size(with_added_tokens=True) if self._rust is not None else len(self.hf)

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token of the vocabulary, added ones included; None: there is no such token."""
        if self._rust is not None:
            return self._rust.token_to_id(token)
        return self.hf.get_vocab().get(token)

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        if text is None:
            return None
        token_id = self._rust.token_to_id(text) if self._rust is not None else self.hf.convert_tokens_to_ids(text)
        return None if token_id is None else int(token_id)

    @property
    def added_tokens(self) -> dict[int, Any]:
        """Returns the tokens outside of the vocabulary's rules, by id, as the library describes them."""
        return {} if self._rust is None else self._rust.get_added_tokens_decoder()

    def encode_each(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text by itself, without BOS and the like. Raises TokenizerError."""
        if self._rust is None:
            return [self.encode(text, add_special_tokens=False) for text in texts]
        with _panics_as_errors():
            return [each.ids for each in self._rust.encode_batch_fast(list(texts), add_special_tokens=False)]

    @property
    def rust(self) -> tokenizers.Tokenizer | None:
        """Returns the underlying `tokenizers` object, None if there is none."""
        return self._rust

    @property
    def hf(self) -> Any:
        """Returns the transformers tokenizer; the first use imports transformers and torch (seconds)."""
        if self._hf is None:
            self._hf = _load_with_transformers(self._files, trust_remote_code=False)
        return self._hf


class TokenizerError(ValueError):
    """Raised when a tokenizer's own rules fail on a text, for example when a pattern exceeds its limits."""


def _is_on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Converts the library's bare Exceptions and panics to TokenizerError. A panic is not an Exception and would end
    its thread or process."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != _PANIC:
            raise
        raise TokenizerError(str(error)) from None


def load_tokenizer(args: ServerArgs) -> Tokenizer | None:
    """Returns the tokenizer of `--tokenizer-path`; None with --skip-tokenizer-init. Raises UserError."""
    if args.skip_tokenizer_init:
        return None
    assert args.tokenizer_path is not None
    directory = resolve_model_path(args.tokenizer_path, args.revision, args.download_dir, weights=False)
    files = read_tokenizer_files(directory)
    if WHY_UNREAD in files.config:
        raise UserError(str(files.config[WHY_UNREAD]))
    if files.json_path.is_file() and not files.has_own_code:
        rust = _read_tokenizer_json(files)
        mismatch = _mismatch(files, rust)
        if mismatch is None:
            return Tokenizer(files, rust, None)
        logger.debug("loading the tokenizer with transformers: %s", mismatch)
    hf = _load_with_transformers(files, args.trust_remote_code)
    return Tokenizer(files, hf.backend_tokenizer if hf.is_fast else None, hf)


def _read_tokenizer_json(files: TokenizerFiles) -> tokenizers.Tokenizer:
    try:
        with _panics_as_errors():
            rust = tokenizers.Tokenizer.from_file(str(files.json_path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{files.json_path} is not a tokenizer that `tokenizers` can read: {error}") from None
    rust.no_truncation()
    rust.no_padding()
    return rust


def _mismatch(files: TokenizerFiles, rust: tokenizers.Tokenizer) -> str | None:
    """Returns how tokenizer.json alone differs from tokenizer_config.json's description; None if it does not."""
    added = rust.get_added_tokens_decoder()
    for number, described in files.added_tokens:
        token, special = added.get(number), described.get("special", False)
        if token is None or token.content != described.get("content") or token.special != special:
            return f"added token {number} is not in tokenizer.json"
    with _panics_as_errors():
        ids = rust.encode("a").ids
    for flag, name, position in (("add_bos_token", "bos_token", 0), ("add_eos_token", "eos_token", -1)):
        text, wanted = files.special_tokens.get(name), files.config.get(flag)
        present = text is not None and bool(ids) and ids[position] == rust.token_to_id(text)
        if wanted is not None and bool(wanted) != present and text is not None:
            return f"{flag} is {wanted}, tokenizer.json does otherwise"
    return None


def _load_with_transformers(files: TokenizerFiles, trust_remote_code: bool) -> Any:
    if files.has_own_code and not trust_remote_code:
        raise UserError(
            f"The tokenizer in {files.directory} brings its own Python code. If you trust it, pass --trust-remote-code."
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(files.directory), trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises all kinds
        raise UserError(
            f"No tokenizer could be loaded from {files.directory} ({type(error).__name__}: {error}). Give another "
            "directory with --tokenizer-path, or serve token ids with --skip-tokenizer-init."
        ) from error


def _special_ids(rust: tokenizers.Tokenizer) -> frozenset[int]:
    return frozenset(i for i, token in rust.get_added_tokens_decoder().items() if token.special)


def _is_byte_level(rust: tokenizers.Tokenizer) -> bool:
    """Returns whether decoding only joins the tokens' bytes."""
    return [part["type"] for part in _decoders(rust)] == ["ByteLevel"]


def _has_byte_tokens(rust: tokenizers.Tokenizer) -> bool:
    """Returns whether the vocabulary is SentencePiece's kind: texts with a mark for spaces, and tokens for single
    bytes."""
    steps = {part["type"]: part for part in _decoders(rust)}
    marks = {steps["Replace"]["pattern"].get("String")} if "Replace" in steps else {_WORD_START}
    known = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    return "ByteFallback" in steps and steps.keys() <= known and marks == {_WORD_START}


def _decoders(rust: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if rust.decoder is None:
        return []
    decoder = json.loads(rust.decoder.__getstate__())
    parts: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return parts
