"""Which texts are tokenized on the event loop, and which in threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.text_encoder import TextEncoder
from sglang.srt.utils.hf_tokenizer import TokenizerError


class Tokenizer:
    """A character is a token. Notes whether the event loop's thread tokenizes."""

    chat_template = None

    def __init__(self) -> None:
        self.added_tokens: dict[int, Any] = {}
        self.special_tokens: dict[str, int] = {}
        self.on_event_loop: list[bool] = []

    def copy_for_event_loop(self) -> None:
        pass

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def encode_each(self, texts: Sequence[str]) -> list[list[int]]:
        self.on_event_loop.append(threading.current_thread() is threading.main_thread())
        if "!" in texts:
            raise TokenizerError("no")
        return [self.encode(text) for text in texts]


@pytest.mark.asyncio
@pytest.mark.parametrize(("number", "on_event_loop"), [(4, True), (2000, False)])
async def test_many_short_texts_are_tokenized_in_one_thread(number: int, on_event_loop: bool) -> None:
    tokenizer: Any = Tokenizer()
    encoder = TextEncoder(tokenizer, 1)
    try:
        assert await encoder.encode_each(["ab", "c"] * number) == [[97, 98], [99]] * number
        with pytest.raises(RequestError, match="tokenizer fails on this text: no"):
            await encoder.encode_each(["!"] * number)
    finally:
        encoder.close()
    assert tokenizer.on_event_loop == [on_event_loop] * 2
