"""Request bodies of embeddings, scores and reranking."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from sglang.srt.entrypoints.http_body import Body
from sglang.srt.entrypoints.http_errors import bad_request
from sglang.srt.entrypoints.openai.protocol import Int, Name, Positive
from sglang.srt.entrypoints.unsupported_fields import EMBEDDINGS, NATIVE
from sglang.srt.managers.front.result_limits import MAX_TOKEN_IDS_LOGPROB

MAX_INPUTS = 2_048
"""Texts, items or documents of one call."""
MAX_LABELS = MAX_TOKEN_IDS_LOGPROB

Inputs = str | Annotated[list[str | Int | list[Int]], Meta(min_length=1)]
"""A text, a list of texts, a list of token ids, or a list of such lists."""


def _check_inputs(name: str, inputs: Inputs) -> None:
    """Raises ApiError 400 for lists of mixed kinds, and for too many inputs."""
    if isinstance(inputs, str) or (isinstance(inputs[0], int) and all(isinstance(entry, int) for entry in inputs)):
        return
    if len(set(map(type, inputs))) > 1:
        raise bad_request(f"{name} must hold texts only, token ids only, or lists of token ids only", param=name)
    if len(inputs) > MAX_INPUTS:
        raise bad_request(f"{name} may have at most {MAX_INPUTS} entries, got {len(inputs)}; send several", param=name)


class EmbeddingRequest(Body, kw_only=True):
    """`dimensions`: the first values of each embedding, normalized again."""

    unsupported: ClassVar = EMBEDDINGS

    model: Name | None = None
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    user: str | None = None
    rid: str | list[str] | None = None
    priority: Int | None = None

    def __post_init__(self) -> None:
        _check_inputs("input", self.input)


class EncodeBody(Body, kw_only=True):
    """Body of `/encode`: `text` or `input_ids`, one or a batch."""

    unsupported: ClassVar = NATIVE

    text: str | list[str] | None = None
    input_ids: list[Int | list[Int]] | None = None
    rid: str | list[str] | None = None
    priority: Int | None = None


class ClassifyBody(Body, kw_only=True):
    """Body of `/classify`: `input`, or `text` or `input_ids` as those of `/encode`."""

    unsupported: ClassVar = EMBEDDINGS

    model: Name | None = None
    input: Inputs | None = None
    text: str | list[str] | None = None
    input_ids: list[Int | list[Int]] | None = None
    user: str | None = None
    rid: str | list[str] | None = None
    priority: Int | None = None

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.input, self.text, self.input_ids)) != 1:
            raise bad_request("give one of input, text and input_ids")
        if self.input is not None:
            _check_inputs("input", self.input)


class ScoreRequest(Body, kw_only=True):
    """Asks for the probability of each label as the token that follows query and item, or of a classifier for those of
    all its labels."""

    unsupported: ClassVar = EMBEDDINGS

    model: Name | None = None
    query: str | list[Int]
    items: str | Annotated[list[str | list[Int]], Meta(min_length=1, max_length=MAX_INPUTS)]
    label_token_ids: Annotated[list[Int], Meta(min_length=1, max_length=MAX_LABELS)] | None = None
    apply_softmax: bool | None = False
    """Probabilities among the labels, which add up to 1, instead of those among all tokens."""
    item_first: bool | None = False

    def __post_init__(self) -> None:
        kind = str if isinstance(self.query, str) else list
        if any(not isinstance(item, kind) for item in self.item_list()):
            raise bad_request("query and items must be texts, or all of them lists of token ids", param="items")

    def item_list(self) -> list[str | list[int]]:
        """Returns the items as a list."""
        return [self.items] if isinstance(self.items, str) else self.items


class DocumentText(msgspec.Struct):
    text: Annotated[str, Meta(min_length=1)]


class RerankRequest(Body, kw_only=True):
    unsupported: ClassVar = EMBEDDINGS

    model: Name | None = None
    query: Annotated[str, Meta(min_length=1)]
    documents: Annotated[
        list[Annotated[str, Meta(min_length=1)] | DocumentText], Meta(min_length=1, max_length=MAX_INPUTS)
    ]
    instruct: str | None = None
    """Instruction that says what makes a document relevant."""
    top_n: Positive | None = None
    return_documents: bool | None = True

    def texts(self) -> list[str]:
        """Returns the texts of the documents."""
        return [document if isinstance(document, str) else document.text for document in self.documents]


BODIES = (EmbeddingRequest, EncodeBody, ClassifyBody, ScoreRequest, RerankRequest)
"""Request bodies that `/openapi.json` describes."""
