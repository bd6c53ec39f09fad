"""Routes of the external texts in which n-gram drafts are looked up."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.http_body import Body, body_schema, read_body
from sglang.srt.entrypoints.http_errors import bad_request, json_response
from sglang.srt.entrypoints.http_state import engine_of
from sglang.srt.managers.front.corpora import ExternalCorpora

router = APIRouter(tags=["native"])

MAX_DOCUMENTS = 100_000


class AddCorpusBody(Body, kw_only=True):
    documents: Annotated[list[str], Meta(max_length=MAX_DOCUMENTS)] | None = None
    corpus_id: str | None = None
    """A new name if it is left out."""
    file_path: str | None = None
    """Refused: clients read no files of the server."""


class RemoveCorpusBody(Body, kw_only=True):
    corpus_id: str


BODIES = (AddCorpusBody, RemoveCorpusBody)


def _corpora(request: Request) -> ExternalCorpora:
    corpora = engine_of(request).manager.corpora
    if corpora is None:
        raise bad_request("nothing looks in external texts; start the server with --speculative-algorithm NGRAM")
    return corpora


@router.post("/add_external_corpus", openapi_extra=body_schema(AddCorpusBody))
async def add_external_corpus(request: Request) -> Response:
    """Draft tokens are looked up in these texts, too, until they are removed. Answers stay the same."""
    corpora = _corpora(request)
    body = await read_body(request, AddCorpusBody)
    if body.file_path is not None:
        raise bad_request(
            "file_path is not read for clients; send the texts as documents, or start the server with"
            " --speculative-ngram-external-corpus-path",
            param="file_path",
        )
    if not body.documents:
        raise bad_request("documents must be a list of texts", param="documents")
    corpus_id, count = await corpora.add(body.corpus_id, body.documents)
    message = f"Loaded corpus {corpus_id!r} with {count} tokens."
    return json_response({"success": True, "corpus_id": corpus_id, "message": message, "loaded_token_count": count})


@router.post("/remove_external_corpus", openapi_extra=body_schema(RemoveCorpusBody))
async def remove_external_corpus(request: Request) -> Response:
    corpora = _corpora(request)
    corpus_id = (await read_body(request, RemoveCorpusBody)).corpus_id
    await corpora.remove(corpus_id)
    return json_response({"success": True, "message": f"Removed corpus {corpus_id!r}."})


@router.get("/list_external_corpora")
async def list_external_corpora(request: Request) -> Response:
    return json_response({"success": True, "corpus_token_counts": _corpora(request).token_counts, "message": ""})
