"""`/v1/score` and `/v1/rerank`: probabilities of tokens after a text, and relevance of documents to a query."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.configs.labels import Labels
from sglang.srt.entrypoints.embeddings.protocol import RerankRequest, ScoreRequest
from sglang.srt.entrypoints.embeddings.serving_classes import labels_of, pairs, scores_of
from sglang.srt.entrypoints.embeddings.serving_embeddings import normalized, refuse_incomplete, usage
from sglang.srt.entrypoints.http_errors import bad_request, json_response
from sglang.srt.entrypoints.http_stream import until_disconnect
from sglang.srt.entrypoints.long_json import LongJSON
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving import OpenAIService, answered, off_event_loop
from sglang.srt.managers.front.generate_request import GenerateOutput, GenerateRequest
from sglang.srt.managers.front.generation_stream import GenerationStream
from sglang.srt.managers.front.native_output import request_info
from sglang.srt.managers.front.request_preparation import MAX_CALL_TOKENS
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.json_list import JSONList

_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
"""The question that Qwen3-Reranker was trained on."""
_INSTRUCT = "Given a web search query, retrieve relevant passages that answer the query"
_ANSWERS = ("yes", "no")

RENDERED_AT_ONCE = 16
"""Documents whose prompts are rendered in one job of the chat template's process."""
MAX_PROMPT_CHARS = 1 << 26
"""Characters of all prompts of a call together. Each prompt repeats the query, so a small request could otherwise grow
thousandfold. Of prompts that are token ids, a call may have MAX_CALL_TOKENS in any case."""


async def score(service: OpenAIService, body: ScoreRequest, request: Request) -> Response:
    """Answers `/v1/score`."""
    items, labels = body.item_list(), service.manager.model_config.labels
    size = _bounded_size(len(body.query), items, MAX_PROMPT_CHARS if isinstance(body.query, str) else MAX_CALL_TOKENS)
    if labels is not None:
        call = _scored_pairs(body, items)
    elif body.label_token_ids is None:
        raise bad_request("label_token_ids is missing: the model is no classifier", param="label_token_ids")
    else:
        prompts = await off_event_loop(service, size, _joined, body.query, items, bool(body.item_first))
        call = _next_tokens(prompts, body.label_token_ids)
        del prompts
    among_labels, model = bool(body.apply_softmax), body.model or service.model_name
    del body, items  # the answer needs no more of it

    def answer(_: GenerationStream, outputs: list[GenerateOutput]) -> Response:
        refuse_incomplete(outputs)
        scores, long = JSONList(), LongJSON()
        for output in outputs:
            if labels is None:
                scores.extend([_probabilities(output, among_labels)])
            else:
                scores.extend([labels.probabilities(scores_of(output))])
        part = long.part([b"[", *scores.pieces, b"]"])
        return long.response({"object": "scoring", "scores": part, "model": model, "usage": usage(outputs)})

    return await answered(service, request, call, answer)


def _scored_pairs(body: ScoreRequest, items: list[str | list[int]]) -> GenerateRequest:
    """Returns the call of a classifier for the items beside the query. Raises ApiError 400 for what it cannot do."""
    if body.label_token_ids is not None:
        raise bad_request("this model is a classifier: it scores its own labels", param="label_token_ids")
    texts = [item for item in items if isinstance(item, str)]
    if not isinstance(body.query, str) or len(texts) != len(items):
        raise bad_request("a classifier takes query and items as texts; send joined token ids to /classify")
    return pairs(body.query, texts, bool(body.item_first))


def _joined(query: Any, items: Sequence[Any], item_first: bool) -> list[Any]:
    """Returns the prompts, each an item and the query, all texts or all token ids."""
    return [item + query if item_first else query + item for item in items]


def _bounded_size(repeated: int, parts: Sequence[str | list[int]], maximum: int) -> int:
    """Returns the length of all prompts together, in characters or tokens. Raises ApiError 400 for more than `maximum`,
    before they are built. `repeated`: length of the part that all prompts share."""
    length = repeated * len(parts) + sum(map(len, parts))
    if length > maximum:
        raise bad_request(
            f"the {len(parts)} prompts, each of which has the query, are {length} characters or tokens long, at most "
            f"{maximum} are allowed; send several calls",
            param="query",
        )
    return length


def _next_tokens(prompts: list[Any], labels: list[int], rendered: bool = False) -> GenerateRequest:
    """Returns a call that gives the log probabilities of `labels` as the next token of each prompt."""
    is_text = isinstance(prompts[0], str)
    return GenerateRequest(
        text=prompts if is_text else None,
        input_ids=None if is_text else prompts,
        sampling_params=SamplingParams(max_new_tokens=1),
        return_logprob=True,
        token_ids_logprob=labels,
        add_special_tokens=not rendered,
    )


def _probabilities(output: GenerateOutput, among_labels: bool) -> list[float]:
    assert output.logprobs is not None
    block = next(output.logprobs.output_blocks())
    logprobs = [logprob for logprob, _ in block.named[0] or ()]
    if not among_labels:
        return [math.exp(logprob) for logprob in logprobs]
    largest = max(logprobs)
    weights = [math.exp(logprob - largest) for logprob in logprobs]
    total = sum(weights)
    return [weight / total for weight in weights]


async def rerank(service: OpenAIService, body: RerankRequest, request: Request) -> Response:
    """Answers in SGLang's form: a list, the best document first."""
    ranking = await until_disconnect(request, _ranking(service, body))
    del body  # the answer needs no more of it
    return await _answered(service, ranking, request, lambda ranked: ranked[: ranking.top_n])


async def rerank_results(service: OpenAIService, body: RerankRequest, request: Request) -> Response:
    """Answers in the form that Jina and Cohere share."""
    ranking = await until_disconnect(request, _ranking(service, body))
    del body  # the answer needs no more of it

    def answer(ranked: list[dict[str, Any]]) -> dict[str, Any]:
        results = []
        for entry in ranked[: ranking.top_n]:
            result: dict[str, Any] = {"index": entry["index"], "relevance_score": entry["score"]}
            if ranking.documents is not None:
                result["document"] = {"text": entry["document"]}
            results.append(result)
        count = sum(entry["meta_info"]["prompt_tokens"] for entry in ranked)
        return {
            "id": f"rerank-{uuid.uuid4().hex}",
            "object": "list",
            "model": ranking.model or service.model_name,
            "usage": {"prompt_tokens": count, "total_tokens": count},
            "results": results,
        }

    return await _answered(service, ranking, request, answer)


class _Ranking(NamedTuple):
    """The call of a ranking, and the fields of the request for its answer. `documents`: None if the answer leaves them
    out."""

    call: GenerateRequest
    documents: list[str] | None
    top_n: int | None
    model: str | None


async def _ranking(service: OpenAIService, body: RerankRequest) -> _Ranking:
    """Returns the ranking. A classifier with one label scores each document beside the query, a server of embeddings
    compares embeddings of query and documents, and others ask the model yes or no."""
    texts = body.texts()
    if service.manager.model_config.labels is not None:
        call = _relevances(service, body, texts)
    elif service.manager.args.is_embedding:
        call = _similarities(body, texts)
    else:
        call = await _judgements(service, body, texts)
    documents = texts if body.return_documents else None
    call.kept_bytes = sum(map(len, documents or ()))
    return _Ranking(call, documents, body.top_n, body.model)


async def _answered(
    service: OpenAIService, ranking: _Ranking, request: Request, answer: Callable[[list[dict[str, Any]]], Any]
) -> Response:
    """Returns the response with the JSON of `answer(entries)`: an entry for each document, the best first."""
    labels = service.manager.model_config.labels
    by_embeddings = service.manager.args.is_embedding and labels is None

    def write(stream: GenerationStream, outputs: list[GenerateOutput]) -> Response:
        refuse_incomplete(outputs)
        return json_response(answer(_ranked(ranking, stream, outputs, by_embeddings, labels)))

    return await answered(service, request, ranking.call, write, lambda _: ranking.call.kept_bytes)


def _ranked(
    ranking: _Ranking,
    stream: GenerationStream,
    outputs: list[GenerateOutput],
    by_embeddings: bool,
    labels: Labels | None,
) -> list[dict[str, Any]]:
    """Returns an entry for each document, the best first. by_embeddings: the first output is the query's. labels: of a
    classifier."""
    if by_embeddings:
        query, *outputs = outputs
        query_vector = normalized(query)
        scores = [float(np.dot(query_vector, normalized(output))) for output in outputs]
    elif labels is not None:
        scores = [labels.probabilities(scores_of(output))[0] for output in outputs]
    else:
        scores = [_probabilities(output, True)[0] for output in outputs]
    ranked: list[dict[str, Any]] = [
        {
            "score": rank,
            "document": None if ranking.documents is None else ranking.documents[index],
            "index": index,
            "meta_info": request_info(stream.requests[output.index].rid, output.meta, output.finish),
        }
        for index, (rank, output) in enumerate(zip(scores, outputs, strict=True))
    ]
    ranked.sort(key=lambda entry: -entry["score"])
    return ranked


def _relevances(service: OpenAIService, body: RerankRequest, texts: list[str]) -> GenerateRequest:
    """Returns the call whose outputs score the documents beside the query. Raises ApiError 400 for a classifier of
    several labels."""
    if len(labels_of(service).names) > 1:
        raise bad_request("this model scores several labels, of which none is relevance: use /v1/score or /classify")
    query = f"{body.instruct} {body.query}" if body.instruct else body.query
    _bounded_size(len(query), texts, MAX_PROMPT_CHARS)
    return pairs(query, texts)


def _similarities(body: RerankRequest, texts: list[str]) -> GenerateRequest:
    """Returns the call for embeddings of the query and the documents, whose cosines are the scores."""
    query = f"Instruct: {body.instruct}\nQuery:{body.query}" if body.instruct else body.query
    return GenerateRequest(text=[query, *texts], embed=True)


async def _judgements(service: OpenAIService, body: RerankRequest, texts: list[str]) -> GenerateRequest:
    """Returns the call whose outputs score the documents by P(yes) / (P(yes) + P(no))."""
    _bounded_size(len(body.query) + len(body.instruct or _INSTRUCT), texts, MAX_PROMPT_CHARS)
    prompts: list[str] = []
    for start in range(0, len(texts), RENDERED_AT_ONCE):
        some = [_question(body, text) for text in texts[start : start + RENDERED_AT_ONCE]]
        prompts += await service.chat_template.render(some, is_long=True)
    return _next_tokens(prompts, _answer_ids(service), rendered=True)


def _question(body: RerankRequest, document: str) -> ChatCompletionRequest:
    asked = f"<Instruct>: {body.instruct or _INSTRUCT}\n<Query>: {body.query}\n<Document>: {document}"
    messages = [{"role": "system", "content": _JUDGE}, {"role": "user", "content": asked}]
    quiet = {"enable_thinking": False, "thinking": False}
    return ChatCompletionRequest(messages=messages, chat_template_kwargs=quiet)


def _answer_ids(service: OpenAIService) -> list[int]:
    """Returns the token ids of yes and no. Raises ApiError 400 if they are not single tokens."""
    ids = [service.tokenizer.encode(answer, add_special_tokens=False) for answer in _ANSWERS]
    if any(len(answer) != 1 for answer in ids):
        raise bad_request("this model has no single tokens for yes and no: rank by embeddings, with --is-embedding")
    return [answer[0] for answer in ids]
