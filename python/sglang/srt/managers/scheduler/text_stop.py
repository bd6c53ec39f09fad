"""Stop strings and patterns, checked by the scheduler."""

from __future__ import annotations

from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.allowance import Allowance
from sglang.srt.utils.stop_strings import StopSearch
from sglang.srt.utils.text_stream import SpelledStream, TextDecoder


class TextStop:
    """Searches the growing text of one request for its stop strings."""

    def __init__(self, decoder: TextDecoder, params: SamplingParams, shared: Allowance) -> None:
        """shared: time for the patterns of all requests. Raises ValueError for a pattern that cannot be compiled."""
        self._stream = SpelledStream(decoder, params.skip_special_tokens)
        self._search = StopSearch(params.stop, params.stop_regex, shared=shared)

    def push(self, token: int) -> str | None:
        """Returns the stop string or pattern that the text contains after this token. Raises TimeoutError."""
        return self._search.push("".join(piece.text for piece in self._stream.push([token])))
