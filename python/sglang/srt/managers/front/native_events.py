"""Outputs as the server-sent events of `/generate`: the dicts of `native_output`, written without making them.

An event has everything so far. Text and ids that were written before are kept as JSON, so that an event costs a copy of
its bytes, not their encoding.
"""

from __future__ import annotations

import msgspec

from sglang.srt.managers.front.generate_request import GenerateOutput, GenerateRequest, extend_logprobs
from sglang.srt.managers.front.generation_stream import GenerationStream
from sglang.srt.managers.front.native_output import ResultWriter, is_list
from sglang.srt.managers.front.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.output_logprobs import OutputLogprobs

_encode = msgspec.json.encode


class _SoFar:
    """What one sequence has put out: the inside of the JSON string of its text and of the list of its ids."""

    __slots__ = ("ids", "logprobs", "text")

    def __init__(self) -> None:
        self.text = bytearray()
        self.ids = bytearray()
        self.logprobs: OutputLogprobs | None = None

    def add(self, output: GenerateOutput) -> None:
        if output.text:
            self.text += _encode(output.text)[1:-1]
        if output.new_ids:
            self.ids += b"," + _encode(output.new_ids)[1:-1] if self.ids else _encode(output.new_ids)[1:-1]
        if self.logprobs is None:
            self.logprobs = output.logprobs
        elif output.logprobs is not None:
            extend_logprobs(self.logprobs, output.logprobs)


class NativeEvents:
    """Writes the events of one call. `incremental`: they have only what is new."""

    def __init__(
        self, manager: TokenizerManager, req: GenerateRequest, stream: GenerationStream, incremental: bool
    ) -> None:
        self._writer = ResultWriter(manager, req, stream)
        self._so_far = None if incremental else [_SoFar() for _ in stream.requests]
        many = is_list(req, stream)
        self._ends = [b',"index":%d}\n\n' % index if many else b"}\n\n" for index in range(len(stream.requests))]
        self._head = b'data: {"text":"' if self._writer.has_text else b'data: {"output_ids":['
        self._middle = b'","output_ids":[' if self._writer.has_text else b""

    def write(self, output: GenerateOutput) -> bytes:
        so_far = _SoFar() if self._so_far is None else self._so_far[output.index]
        so_far.add(output)
        text = so_far.text if self._middle else b""
        info = _encode(self._writer.info(output, so_far.logprobs))
        parts = (self._head, text, self._middle, so_far.ids, b'],"meta_info":', info, self._ends[output.index])
        return b"".join(parts)

    def end(self) -> bytes:
        return b""
