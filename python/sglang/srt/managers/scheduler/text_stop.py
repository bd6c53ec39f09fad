"""Stop strings and patterns, on the side that generates."""

from __future__ import annotations

from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.stop_strings import StopSearch
from sglang.srt.utils.text_stream import SpelledStream, TextDecoder


class TextStop:
    """Looks for the stop strings of one request in its text as it grows."""

    def __init__(self, decoder: TextDecoder, params: SamplingParams) -> None:
        """Raises ValueError for a pattern that cannot be compiled."""
        self._stream = SpelledStream(decoder, params.skip_special_tokens)
        self._search = StopSearch(params.stop, params.stop_regex)

    def push(self, token: int) -> str | None:
        """The stop string or pattern that the text contains with this token. Raises TimeoutError."""
        return self._search.push("".join(piece.text for piece in self._stream.push([token])))
