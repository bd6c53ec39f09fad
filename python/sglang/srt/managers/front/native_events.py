"""Writes outputs as the JSON of `/generate`: the same as the dicts of `native_output`, without making them.

An event of a stream contains everything so far. Text, ids and log probabilities of earlier events are kept as JSON, so
an event costs a copy of their bytes, not their encoding.
"""

from __future__ import annotations

import msgspec
import numpy as np

from sglang.srt.managers.front.generate_request import GenerateOutput, GenerateRequest
from sglang.srt.managers.front.generation_stream import GenerationStream
from sglang.srt.managers.front.native_output import LOGPROB_FIELDS, ResultWriter, is_list
from sglang.srt.managers.front.tokenizer_manager import TokenizerManager
from sglang.srt.utils.json_list import JSONList, Pieces

_encode = msgspec.json.encode


class _SoFar:
    """The output of one sequence so far: the inside of the JSON string of its text and of the other JSON lists."""

    __slots__ = ("ids", "logprobs", "text")

    def __init__(self) -> None:
        self.text = bytearray()
        self.ids = bytearray()
        self.logprobs: dict[str, JSONList] = {}

    def add(self, output: GenerateOutput, writer: ResultWriter) -> None:
        if output.text:
            self.text += _encode(output.text)[1:-1]
        if output.new_ids:
            self.ids += (b"," if self.ids else b"") + _encode(output.new_ids)[1:-1]
        if output.logprobs is not None:
            for name, entries in writer.logprob_parts(output.logprobs):
                self.logprobs.setdefault(name, JSONList()).extend(entries)


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

    def write(self, output: GenerateOutput) -> Pieces:
        """Returns the event of an output."""
        return [b"data: ", *self._written(output), self._ends[output.index]]

    def num_held(self, index: int) -> int:
        return 0

    def end(self) -> bytes:
        return b""

    def result(self, output: GenerateOutput) -> Pieces:
        """Returns the JSON object of a whole output."""
        return [*self._written(output), b"}"]

    def _written(self, output: GenerateOutput) -> Pieces:
        """Returns the JSON object of an output, without its end."""
        so_far = _SoFar() if self._so_far is None else self._so_far[output.index]
        so_far.add(output, self._writer)
        pieces: Pieces = [self._head]
        if self._middle:
            pieces += [so_far.text, self._middle]
        pieces += [so_far.ids, b'],"meta_info":', _encode(self._writer.info(output))[:-1]]
        for name in LOGPROB_FIELDS:
            if name in so_far.logprobs:
                pieces += [b',"%b":[' % name.encode(), *so_far.logprobs[name].pieces, b"]"]
        states = self._writer.hidden_states(output)
        if states is not None:
            pieces += [b',"hidden_states":[', *_hidden_pieces(*states), b"]"]
        return [*pieces, b"}"]


def _hidden_pieces(prompt: np.ndarray, outputs: np.ndarray) -> Pieces:
    """Returns the inside of the list with the states of the prompt, one entry, and those of each output token."""
    if not len(prompt):
        return []
    first, others = JSONList(), JSONList()
    first.extend_rows(prompt)
    others.extend_rows(outputs)
    return [b"[", *first.pieces, b"]", b"," if others.pieces else b"", *others.pieces]


def results_json(writer: NativeEvents, outputs: list[GenerateOutput], many: bool) -> Pieces:
    """Returns the whole answer: an object, or with `many` a list."""
    if not many:
        return writer.result(outputs[0])
    pieces: Pieces = []
    for output in outputs:
        pieces += [b"," if pieces else b"[", *writer.result(output)]
    return [*pieces, b"]"]
