"""`/v1/score` and `/v1/rerank`: how probable tokens are after a text, and how well documents fit a query."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.embeddings.protocol import RerankRequest, ScoreRequest
from sglang.srt.entrypoints.embeddings.serving_embeddings import collect_complete, normalized, usage
from sglang.srt.entrypoints.http_errors import bad_request, json_response
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving import OpenAIService
from sglang.srt.managers.front.generate_request import GenerateOutput, GenerateRequest
from sglang.srt.managers.front.generation_stream import GenerationStream
from sglang.srt.managers.front.native_output import request_info
from sglang.srt.sampling.sampling_params import SamplingParams

_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
"""The question that Qwen3-Reranker was trained on."""
_INSTRUCT = "Given a web search query, retrieve relevant passages that answer the query"
_ANSWERS = ("yes", "no")

RENDERED_AT_ONCE = 16
"""Documents whose prompts are made by one job of the chat template's process."""
MAX_PROMPT_LENGTHS = 1 << 26
"""Characters, or tokens, of all prompts of a call together. Each has the query: what a client sends once would be
copied thousands of times."""


async def score(service: OpenAIService, body: ScoreRequest, request: Request) -> Response:
    items = body.item_list()
    _refuse_many_long(len(body.query), items)
    prompts: list[Any] = [
        item + body.query if body.item_first else body.query + item  # type: ignore[operator]
        for item in items
    ]
    _, outputs = await _next_tokens(service, request, prompts, body.label_token_ids)
    scores = [_probabilities(output, bool(body.apply_softmax)) for output in outputs]
    model = body.model or service.model_name
    return json_response({"object": "scoring", "scores": scores, "model": model, "usage": usage(outputs)})


def _refuse_many_long(repeated: int, parts: Sequence[str | list[int]]) -> None:
    """Refuses prompts that are too long together, before they are built. `repeated`: length of the beginning or end
    that all prompts share. Raises ApiError 400."""
    length = repeated * len(parts) + sum(map(len, parts))
    if length > MAX_PROMPT_LENGTHS:
        raise bad_request(
            f"the {len(parts)} prompts, each of which has the query, are {length} characters or tokens long, at most "
            f"{MAX_PROMPT_LENGTHS} are allowed; send several calls",
            param="query",
        )


async def _next_tokens(
    service: OpenAIService, request: Request, prompts: list[Any], labels: list[int], rendered: bool = False
) -> tuple[GenerationStream, list[GenerateOutput]]:
    """An output a prompt, with the log probabilities of `labels` as its next token."""
    is_text = isinstance(prompts[0], str)
    call = GenerateRequest(
        text=prompts if is_text else None,
        input_ids=None if is_text else prompts,
        sampling_params=SamplingParams(max_new_tokens=1),
        return_logprob=True,
        token_ids_logprob=labels,
        add_special_tokens=not rendered,
    )
    return await collect_complete(service, request, call)


def _probabilities(output: GenerateOutput, among_labels: bool) -> list[float]:
    assert output.logprobs is not None
    logprobs = [logprob for logprob, _ in output.logprobs.output_token_ids[0]]
    if not among_labels:
        return [math.exp(logprob) for logprob in logprobs]
    largest = max(logprobs)
    weights = [math.exp(logprob - largest) for logprob in logprobs]
    total = sum(weights)
    return [weight / total for weight in weights]


async def rerank(service: OpenAIService, body: RerankRequest, request: Request) -> Response:
    """SGLang's form of an answer: a list, the best document first."""
    ranked = await _ranked(service, body, request)
    if not body.return_documents:
        for entry in ranked:
            entry["document"] = None
    return json_response(ranked[: body.top_n])


async def rerank_results(service: OpenAIService, body: RerankRequest, request: Request) -> Response:
    """The form of an answer that Jina and Cohere have in common."""
    ranked = await _ranked(service, body, request)
    results = []
    for entry in ranked[: body.top_n]:
        result: dict[str, Any] = {"index": entry["index"], "relevance_score": entry["score"]}
        if body.return_documents:
            result["document"] = {"text": entry["document"]}
        results.append(result)
    count = sum(entry["meta_info"]["prompt_tokens"] for entry in ranked)
    return json_response(
        {
            "id": f"rerank-{uuid.uuid4().hex}",
            "object": "list",
            "model": body.model or service.model_name,
            "usage": {"prompt_tokens": count, "total_tokens": count},
            "results": results,
        }
    )


async def _ranked(service: OpenAIService, body: RerankRequest, request: Request) -> list[dict[str, Any]]:
    """An entry for each document, the best first. A server of embeddings compares them; others ask the model for yes or
    no."""
    by_embedding = service.manager.args.is_embedding
    ranked = await (_similarities if by_embedding else _judgements)(service, body, request, body.texts())
    ranked.sort(key=lambda entry: -entry["score"])
    return ranked


def _entry(
    texts: list[str], index: int, rank: float, stream: GenerationStream, output: GenerateOutput
) -> dict[str, Any]:
    info = request_info(stream.requests[output.index].rid, output.meta, output.finish)
    return {"score": rank, "document": texts[index], "index": index, "meta_info": info}


async def _similarities(
    service: OpenAIService, body: RerankRequest, request: Request, texts: list[str]
) -> list[dict[str, Any]]:
    """Cosines between the embeddings of the query and of the documents."""
    query = f"Instruct: {body.instruct}\nQuery:{body.query}" if body.instruct else body.query
    call = GenerateRequest(text=[query, *texts], embed=True)
    stream, outputs = await collect_complete(service, request, call)
    query_vector = normalized(outputs[0])
    return [
        _entry(texts, index, float(np.dot(query_vector, normalized(output))), stream, output)
        for index, output in enumerate(outputs[1:])
    ]


async def _judgements(
    service: OpenAIService, body: RerankRequest, request: Request, texts: list[str]
) -> list[dict[str, Any]]:
    """Returns an entry for each document, scored by the probability of yes relative to yes and no together."""
    _refuse_many_long(len(body.query) + len(body.instruct or _INSTRUCT), texts)
    prompts: list[str] = []
    for start in range(0, len(texts), RENDERED_AT_ONCE):
        some = [_question(body, text) for text in texts[start : start + RENDERED_AT_ONCE]]
        prompts += await service.chat_template.render(some, is_long=True)
    stream, outputs = await _next_tokens(service, request, prompts, _answer_ids(service), rendered=True)
    return [
        _entry(texts, index, _probabilities(output, True)[0], stream, output) for index, output in enumerate(outputs)
    ]


def _question(body: RerankRequest, document: str) -> ChatCompletionRequest:
    asked = f"<Instruct>: {body.instruct or _INSTRUCT}\n<Query>: {body.query}\n<Document>: {document}"
    messages = [{"role": "system", "content": _JUDGE}, {"role": "user", "content": asked}]
    quiet = {"enable_thinking": False, "thinking": False}
    return ChatCompletionRequest(messages=messages, chat_template_kwargs=quiet)


def _answer_ids(service: OpenAIService) -> list[int]:
    """Raises ApiError 400 for a vocabulary in which the answers are not single tokens."""
    ids = [service.tokenizer.encode(answer, add_special_tokens=False) for answer in _ANSWERS]
    if any(len(answer) != 1 for answer in ids):
        raise bad_request("this model has no single tokens for yes and no: rank by embeddings, with --is-embedding")
    return [answer[0] for answer in ids]
