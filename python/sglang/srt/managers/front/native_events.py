"""Writes outputs as the JSON of `/generate`: the same as the dicts of `native_output`, without making them.

An event of a stream contains everything so far. Text, ids and log probabilities of earlier events are kept as JSON, so
an event costs a copy of their bytes, not their encoding.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sglang.srt.managers.front.generate_request import GenerateOutput, GenerateRequest
from sglang.srt.managers.front.generation_stream import GenerationStream
from sglang.srt.managers.front.native_output import ResultWriter, is_list
from sglang.srt.managers.front.tokenizer_manager import TokenizerManager

_encode = msgspec.json.encode
ROWS_AT_ONCE = 64
"""Tokens whose log probabilities are encoded in one call, during which no other thread runs."""


class _SoFar:
    """The output of one sequence so far: the inside of the JSON string of its text and of the other JSON lists."""

    __slots__ = ("ids", "logprobs", "text")

    def __init__(self) -> None:
        self.text = bytearray()
        self.ids = bytearray()
        self.logprobs: dict[str, bytearray] = {}

    def add(self, output: GenerateOutput, writer: ResultWriter) -> None:
        if output.text:
            self.text += _encode(output.text)[1:-1]
        if output.new_ids:
            _extend(self.ids, output.new_ids)
        if output.logprobs is not None:
            for name, rows in writer.logprob_info(output.logprobs).items():
                if name not in self.logprobs or name.startswith("input"):  # log probabilities of the prompt come once
                    self.logprobs[name] = bytearray()
                for first in range(0, len(rows), ROWS_AT_ONCE):
                    _extend(self.logprobs[name], rows[first : first + ROWS_AT_ONCE])


def _extend(inside: bytearray, values: list[Any]) -> None:
    if inside:
        inside += b","
    inside += _encode(values)[1:-1]


class NativeEvents:
    """Writes the outputs of one call. `incremental`: events contain only what is new."""

    def __init__(
        self, manager: TokenizerManager, req: GenerateRequest, stream: GenerationStream, incremental: bool
    ) -> None:
        self._writer = ResultWriter(manager, req, stream)
        self._so_far = None if incremental else [_SoFar() for _ in stream.requests]
        many = is_list(stream)
        self._ends = [b',"index":%d}\n\n' % index if many else b"}\n\n" for index in range(len(stream.requests))]
        self._head = b'{"text":"' if self._writer.has_text else b'{"output_ids":['
        self._middle = b'","output_ids":[' if self._writer.has_text else b""

    def write(self, output: GenerateOutput) -> bytes:
        """Returns the event of an output."""
        return self._written(output, b"data: ", self._ends[output.index])

    def num_held(self, index: int) -> int:
        return 0

    def end(self) -> bytes:
        return b""

    def result(self, output: GenerateOutput) -> bytes:
        """Returns the JSON object of a whole output."""
        return self._written(output, b"", b"}")

    def _written(self, output: GenerateOutput, before: bytes, end: bytes) -> bytes:
        so_far = _SoFar() if self._so_far is None else self._so_far[output.index]
        so_far.add(output, self._writer)
        parts: list[bytes | bytearray] = [before, self._head]
        if self._middle:
            parts += [so_far.text, self._middle]
        parts += [so_far.ids, b'],"meta_info":', _encode(self._writer.info(output, None))[:-1]]
        for name, inside in so_far.logprobs.items():
            parts += [b',"%b":[' % name.encode(), inside, b"]"]
        return b"".join((*parts, b"}", end))


def results_json(writer: NativeEvents, outputs: list[GenerateOutput], many: bool) -> bytes:
    """Returns the whole answer: an object, or with `many` a list."""
    results = [writer.result(output) for output in outputs]
    return b"[" + b",".join(results) + b"]" if many else results[0]
