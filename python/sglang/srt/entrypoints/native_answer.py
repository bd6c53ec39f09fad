"""The whole answer of `/generate`."""

from __future__ import annotations

from collections.abc import Callable

from starlette.responses import Response

from sglang.srt.entrypoints.long_json import answer_call, response_of
from sglang.srt.entrypoints.long_outputs import written
from sglang.srt.managers.front.generate_request import GenerateOutput, GenerateRequest
from sglang.srt.managers.front.generation_stream import GenerationStream
from sglang.srt.managers.front.native_events import NativeEvents, results_json
from sglang.srt.managers.front.native_output import is_list
from sglang.srt.managers.front.tokenizer_manager import TokenizerManager

Keep = Callable[[GenerationStream, GenerateOutput, list[int]], None]
"""Gets each output of a session's request, with all of its token ids so far. Raises RequestError."""


async def whole_answer(manager: TokenizerManager, call: GenerateRequest, keep: Keep | None = None) -> Response:
    """Returns the response with all outputs of a call. keep: the session's, if the call has one. Raises
    RequestError."""

    async def write(stream: GenerationStream) -> Response:
        outputs = await stream.collect()
        if keep is not None:
            keep(stream, outputs[0], outputs[0].new_ids)
        writer = NativeEvents(manager, call, stream, incremental=True)
        return await written(outputs, lambda: response_of(results_json(writer, outputs, is_list(stream))))

    return await answer_call(await manager.submit(call), write)
