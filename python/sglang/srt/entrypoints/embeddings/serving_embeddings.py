"""`/v1/embeddings` and `/encode`: final hidden states of the last token, or what the model makes of all."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.embeddings.protocol import EmbeddingRequest, EncodeBody
from sglang.srt.entrypoints.http_errors import bad_request
from sglang.srt.entrypoints.long_json import LongJSON
from sglang.srt.entrypoints.openai.serving import OpenAIService, collect
from sglang.srt.managers.front.generate_request import GenerateOutput, GenerateRequest, refuse_aborted
from sglang.srt.managers.front.generation_stream import GenerationStream
from sglang.srt.managers.front.native_output import request_info

MAX_FLOATS = 1 << 23
"""Values of one response that are written as decimal numbers."""


async def embeddings(service: OpenAIService, body: EmbeddingRequest, request: Request) -> Response:
    """Answers `/v1/embeddings`."""
    refuse_classifier(service)
    given: Any = body.input
    is_text = isinstance(given, str) or isinstance(given[0], str)
    call = GenerateRequest(
        text=given if is_text else None,
        input_ids=None if is_text else given,
        embed=True,
        rid=body.rid,
        priority=body.priority,
    )
    as_text, dimensions, model = body.encoding_format == "base64", body.dimensions, body.model or service.model_name
    del body, given  # the answer needs no more of it
    _, outputs = await collect_complete(service, request, call)
    entries = await encoded_embeddings(service, outputs, dimensions, as_text)
    long = LongJSON()
    data = [
        {"object": "embedding", "index": index, "embedding": long.part([entry])} for index, entry in enumerate(entries)
    ]
    return long.response({"object": "list", "data": data, "model": model, "usage": usage(outputs)})


def refuse_classifier(service: OpenAIService) -> None:
    """Raises ApiError 400 if the model scores labels."""
    if service.manager.model_config.labels is not None:
        raise bad_request("this model scores labels and makes no embeddings: use /classify, /v1/score or /v1/rerank")


async def collect_complete(
    service: OpenAIService, request: Request, call: GenerateRequest
) -> tuple[GenerationStream, list[GenerateOutput]]:
    """Collects outputs like `collect`, for callers that cannot use incomplete ones. Raises RequestError 503 if one was
    aborted."""
    stream, outputs = await collect(service, request, call)
    refuse_incomplete(outputs)
    return stream, outputs


def refuse_incomplete(outputs: list[GenerateOutput]) -> None:
    """Raises RequestError 503 if an output was aborted."""
    for output in outputs:
        assert output.finish is not None
        refuse_aborted(output.finish)


async def encoded_embeddings(
    service: OpenAIService, outputs: list[GenerateOutput], dimensions: int | None, as_base64: bool
) -> list[bytes]:
    """Returns the embeddings for JSON, letting the event loop run between them."""
    normalizes = service.manager.model_config.sentence_modules.normalizes
    entries = []
    num_floats = 0
    for output in outputs:
        vector = embedding_of(output, normalizes, dimensions)
        if as_base64:
            entries.append(b'"%s"' % base64.b64encode(vector.astype("<f4").tobytes()))
        else:
            num_floats += len(vector)
            if num_floats > MAX_FLOATS:
                text = f"the answer has more than {MAX_FLOATS} numbers: send fewer inputs, or encoding_format base64"
                raise bad_request(text, param="input")
            entries.append(msgspec.json.encode(vector.tolist()))
        await asyncio.sleep(0)
    return entries


def embedding_of(output: GenerateOutput, normalizes: bool, dimensions: int | None = None) -> np.ndarray:
    """Returns the embedding as the repository makes it: with length 1 or, without `normalizes`, as it is. Raises
    ApiError as `normalized` does."""
    if normalizes:
        return normalized(output, dimensions)
    return _first(output, dimensions)


def normalized(output: GenerateOutput, dimensions: int | None = None) -> np.ndarray:
    """Returns the embedding [H] float32 with length 1, or its first `dimensions` values, normalized again. Raises
    ApiError 400 for more dimensions than it has."""
    vector = _first(output, dimensions)
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return vector / np.float32(length) if length else vector


def _first(output: GenerateOutput, dimensions: int | None) -> np.ndarray:
    vector = np.frombuffer(output.hidden, np.float32)
    if dimensions is not None and dimensions > len(vector):
        raise bad_request(f"dimensions must be in [1, {len(vector)}] for this model", param="dimensions")
    return vector[:dimensions]


def usage(outputs: list[GenerateOutput]) -> dict[str, int]:
    """Returns the token counts of a call without output."""
    count = sum(output.meta.prompt_tokens for output in outputs)
    return {"prompt_tokens": count, "total_tokens": count}


async def encode(service: OpenAIService, body: EncodeBody, request: Request) -> Response:
    """Answers `/encode`: one dict, or a list for a batch."""
    refuse_classifier(service)
    ids: Any = body.input_ids
    call = GenerateRequest(text=body.text, input_ids=ids, embed=True, rid=body.rid, priority=body.priority)
    del body, ids  # the answer needs no more of it
    stream, outputs = await collect_complete(service, request, call)
    entries = await encoded_embeddings(service, outputs, None, as_base64=False)
    long = LongJSON()
    results = [
        {
            "embedding": long.part([entry]),
            "meta_info": request_info(stream.requests[output.index].rid, output.meta, output.finish),
        }
        for entry, output in zip(entries, outputs, strict=True)
    ]
    return long.response(results if stream.is_batch else results[0])
