"""Converts token ids to text, a few ids at a time, without printing incomplete characters.

A `TextDecoder` belongs to a tokenizer, a `TextStream` to one sequence. However the ids are cut into chunks, the pieces
that `push` and `finish` return concatenate to the tokenizer's decoding of all ids (without clean-up of spaces).
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

REPLACEMENT = "\ufffd"
MAX_HELD_IDS = 3
"""Ids that may wait for the rest of their character, which has at most 4 bytes; an id stands for at least one."""
MAX_CONTEXT_IDS = 32
"""Most printed ids that a window keeps."""


class TextStream(Protocol):
    """Decoding state of one sequence."""

    def push(self, ids: Sequence[int]) -> str:
        """Returns the text that these ids make certain."""

    def finish(self) -> str:
        """Returns the rest of the text: incomplete bytes show as U+FFFD."""


class TextDecoder(Protocol):
    """Makes text streams for one tokenizer."""

    def stream(self, skip_special_tokens: bool) -> TextStream:
        """Returns the decoder of a new sequence. skip_special_tokens: their texts are left out."""

    def special_text(self, token_id: int) -> str | None:
        """Returns the spelling of a special token; None for any other token."""


# --- text in which special tokens show --------------------------------------------------------------------------------


class TextDelta(NamedTuple):
    """A piece of text."""

    text: str
    prints: bool
    """False for a special token that the request does not want to see."""


class SpelledStream:
    """The text of one sequence with its special tokens spelled out, in which stop strings are searched."""

    __slots__ = ("_decoder", "_skip_special_tokens", "_stream")

    def __init__(self, decoder: TextDecoder, skip_special_tokens: bool) -> None:
        self._decoder = decoder
        self._stream = decoder.stream(skip_special_tokens)
        self._skip_special_tokens = skip_special_tokens

    def push(self, ids: Sequence[int]) -> list[TextDelta]:
        """Returns pieces; those that print are what `TextDecoder.stream` gives for these ids."""
        if not self._skip_special_tokens:
            return [TextDelta(self._stream.push(ids), True)]
        pieces, start = [], 0
        for i, token_id in enumerate(ids):
            spelling = self._decoder.special_text(token_id)
            if spelling is not None:
                pieces += [TextDelta(self._stream.push(ids[start:i]), True), TextDelta(spelling, False)]
                start = i + 1
        pieces.append(TextDelta(self._stream.push(ids[start:]), True))
        return pieces

    def finish(self) -> list[TextDelta]:
        """Returns the rest of the text, with incomplete characters replaced."""
        return [TextDelta(self._stream.finish(), True)]


# --- byte-level tokenizers: every token is a byte string --------------------------------------------------------------


def byte_level_alphabet() -> dict[str, int]:
    """Returns the printable stand-ins of byte-level BPE vocabularies, character -> byte: bytes that are printable in
    Latin-1 stand for themselves, the others are numbered from U+0100 in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(sorted(set(range(256)) - printable))})
    return alphabet


class ByteLevelDecoder:
    """Decodes vocabularies of byte strings with a table lookup a token and an incremental UTF-8 decoder."""

    def __init__(self, token_of: Callable[[int], str | None], special_ids: frozenset[int]) -> None:
        """`token_of` returns the vocabulary's spelling of an id, None if there is none (such ids print nothing)."""
        self._token_of = token_of
        self._special_ids = special_ids
        self._alphabet = byte_level_alphabet()
        self._bytes: dict[int, bytes] = {}
        self._bytes_without_special: dict[int, bytes] = {}

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token stands for; empty for an unknown id."""
        text = self._bytes.get(token_id)
        if text is None:
            text = self._bytes[token_id] = self._spell(token_id)
        return text

    def stream(self, skip_special_tokens: bool) -> ByteLevelStream:
        table = self._bytes_without_special if skip_special_tokens else self._bytes
        return ByteLevelStream(table, self._fill_without_special if skip_special_tokens else self.token_bytes)

    def special_text(self, token_id: int) -> str | None:
        return self.token_bytes(token_id).decode("utf-8", "replace") if token_id in self._special_ids else None

    def _fill_without_special(self, token_id: int) -> bytes:
        text = b"" if token_id in self._special_ids else self.token_bytes(token_id)
        self._bytes_without_special[token_id] = text
        return text

    def _spell(self, token_id: int) -> bytes:
        token = self._token_of(token_id)
        if token is None:
            return b""
        try:
            return bytes([self._alphabet[char] for char in token])
        except KeyError:  # an added token outside of the alphabet stands for its own text
            return token.encode()


class ByteLevelStream:
    """Decoding state of one sequence."""

    __slots__ = ("_decode", "_fill", "_table")

    def __init__(self, table: dict[int, bytes], fill: Callable[[int], bytes]) -> None:
        self._table = table
        self._fill = fill
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, ids: Sequence[int]) -> str:
        table = self._table
        if len(ids) == 1:
            piece = table.get(ids[0])
            return self._decode(self._fill(ids[0]) if piece is None else piece)
        try:
            return self._decode(b"".join([table[i] for i in ids]))
        except KeyError:
            return self._decode(b"".join([self._fill(i) for i in ids]))

    def finish(self) -> str:
        return self._decode(b"", True)


# --- any other tokenizer: decode a short window and print the difference ----------------------------------------------


class WindowDecoder:
    """Decodes with tokenizers that can only decode whole id lists. `decode(ids, skip_special_tokens)` is the
    tokenizer's."""

    def __init__(self, decode: Callable[[list[int], bool], str], special_ids: frozenset[int] = frozenset()) -> None:
        self._decode = decode
        self._special_ids = special_ids

    def stream(self, skip_special_tokens: bool) -> WindowStream:
        return WindowStream(self._decode, skip_special_tokens)

    def special_text(self, token_id: int) -> str | None:
        return self._decode([token_id], False) if token_id in self._special_ids else None


class WindowStream:
    """Decoding state of one sequence. Keeps the ids of the last printed piece as context: how a token prints may depend
    on the one before (a leading space, say), and is assumed not to depend on older ones."""

    __slots__ = ("_decode", "_num_printed", "_skip_special_tokens", "_window")

    def __init__(self, decode: Callable[[list[int], bool], str], skip_special_tokens: bool) -> None:
        self._decode = decode
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._num_printed = 0
        """Ids at the front of the window whose text is out."""

    def push(self, ids: Sequence[int]) -> str:
        self._window.extend(ids)
        return self._print(final=False)

    def finish(self) -> str:
        return self._print(final=True)

    def _print(self, final: bool) -> str:
        if len(self._window) == self._num_printed:
            return ""
        before = self._decode(self._window[: self._num_printed], self._skip_special_tokens)
        end, now = self._whole_characters(final)
        if end == self._num_printed:
            return ""
        # Ids that print nothing (special tokens) are no context for what follows: the ones before them stay.
        oldest = self._num_printed if len(now) > len(before) else max(0, end - MAX_CONTEXT_IDS)
        del self._window[:oldest]
        self._num_printed = end - oldest
        return now[len(before) :]

    def _whole_characters(self, final: bool) -> tuple[int, str]:
        """Returns the printable part of the window, at least what was printed already, and its text."""
        length = len(self._window)
        now = ""
        for end in range(length, max(self._num_printed, length - MAX_HELD_IDS - 1), -1):
            now = self._decode(self._window[:end], self._skip_special_tokens)
            if final or not now.endswith(REPLACEMENT):
                return end, now
        if length - self._num_printed > MAX_HELD_IDS:  # the text is invalid UTF-8, whatever follows
            return length - MAX_HELD_IDS, now
        return self._num_printed, now
