"""`/classify` and `/v1/classify`, and the pairs of texts of which a classifier scores the second beside the first."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.configs.labels import Labels
from sglang.srt.entrypoints.embeddings.protocol import ClassifyBody
from sglang.srt.entrypoints.embeddings.serving_embeddings import collect_complete, usage
from sglang.srt.entrypoints.http_errors import bad_request, json_response
from sglang.srt.entrypoints.openai.serving import OpenAIService
from sglang.srt.managers.front.generate_request import GenerateOutput, GenerateRequest, TextPair
from sglang.srt.managers.front.native_output import request_info


def labels_of(service: OpenAIService) -> Labels:
    """Returns the labels of the model. Raises ApiError 400 if it has none."""
    labels = service.manager.model_config.labels
    if labels is None:
        raise bad_request(
            "this model has no classification head: send /v1/score the token ids of the labels, or serve a"
            " classifier, with --is-embedding"
        )
    return labels


def scores_of(output: GenerateOutput) -> list[float]:
    """Returns the score of each label, as the head computes it."""
    scores: list[float] = np.frombuffer(output.hidden, np.float32).tolist()
    return scores


def pairs(first: str, others: Sequence[str], reverse: bool = False) -> GenerateRequest:
    """Returns a call that scores the second text of each pair of `first` and another one; reverse: the other is the
    first."""
    texts = [TextPair(other, first) if reverse else TextPair(first, other) for other in others]
    return GenerateRequest(text=texts, embed=True)


async def classify(service: OpenAIService, body: ClassifyBody, request: Request) -> Response:
    """Answers a body with `input` as OpenAI's endpoints do, with the probability of each label, and one with `text` or
    `input_ids` as `/encode` does, with the scores as they are."""
    labels = labels_of(service)
    given: Any = body.input
    ids: Any = body.input_ids
    of_openai, text = given is not None, body.text
    if given is not None:
        is_text = isinstance(given, str) or isinstance(given[0], str)
        text, ids = (given, None) if is_text else (None, given)
    call = GenerateRequest(text=text, input_ids=ids, embed=True, rid=body.rid, priority=body.priority)
    model = body.model or service.model_name
    del body, given, text, ids  # the answer needs no more of it
    stream, outputs = await collect_complete(service, request, call)
    if of_openai:
        return json_response(_answer(labels, model, outputs))
    results = [
        {
            "embedding": scores_of(output),
            "meta_info": request_info(stream.requests[output.index].rid, output.meta, output.finish),
        }
        for output in outputs
    ]
    return json_response(results if stream.is_batch else results[0])


def _answer(labels: Labels, model: str, outputs: list[GenerateOutput]) -> dict[str, Any]:
    data = []
    for index, output in enumerate(outputs):
        probabilities = labels.probabilities(scores_of(output))
        best = labels.names[int(np.argmax(probabilities))]
        entry = {"index": index, "label": best, "probs": probabilities, "num_classes": len(probabilities)}
        data.append(entry)
    return {
        "id": f"classify-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": {**usage(outputs), "completion_tokens": 0},
    }
