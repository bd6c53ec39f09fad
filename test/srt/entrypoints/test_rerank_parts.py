"""Ranking by the model's judgement, with an engine that knows what it shall answer."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from inline_template import InlineTemplate

from sglang.srt.entrypoints.embeddings import serving_scores
from sglang.srt.entrypoints.embeddings.protocol import RerankRequest
from sglang.srt.entrypoints.http_errors import ApiError
from sglang.srt.managers.front.generate_request import GenerateOutput, GenerateRequest
from sglang.srt.managers.wire.io_struct import FinishReason, TokenMeta
from srt.sampling.packed_logprobs import packed

LINE = '{{ "\\n" }}'
"""A line break that is not trimmed."""
TEMPLATE = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>" + LINE + "{%- endfor %}"
    "<|im_start|>assistant" + LINE + "{%- if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>" + LINE * 2 + "{%- endif %}"
)
IDS = {"yes": [9], "no": [4]}
YES = {"red": 0.25, "blue": 0.5, "green": 0.125}
"""Of each document; no has 0.25."""


class Service:
    """The parts of the service that ranking uses."""

    def __init__(self, ids: dict[str, list[int]]) -> None:
        self.manager = SimpleNamespace(
            args=SimpleNamespace(is_embedding=False), model_config=SimpleNamespace(labels=None)
        )
        self.chat_template = InlineTemplate(TEMPLATE)
        self.tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: ids[text])


def rank(monkeypatch: pytest.MonkeyPatch, service: Service, **fields: Any) -> tuple[list[Any], GenerateRequest]:
    calls = []

    async def answered(_service: Any, _request: Any, call: GenerateRequest, write: Any, num_more: Any) -> Any:
        calls.append(call)
        assert isinstance(call.text, list)
        outputs = []
        for index, text in enumerate(call.text):
            yes = next(value for word, value in YES.items() if f"<Document>: {word}<" in text)
            logprobs = packed([(-1.0, 9)], named=[[(math.log(yes), 9), (math.log(0.25), 4)]])
            outputs.append(GenerateOutput(index, "", [9], FinishReason("length"), TokenMeta(3, 1), logprobs))
        return write(SimpleNamespace(requests=[SimpleNamespace(rid=str(i)) for i in range(len(outputs))]), outputs)

    monkeypatch.setattr(serving_scores, "answered", answered)
    body = RerankRequest(query="colour?", documents=list(YES), **fields)
    client = SimpleNamespace(receive=asyncio.Event().wait)  # stays
    reply = asyncio.run(serving_scores.rerank(service, body, client))  # type: ignore[arg-type]
    return msgspec.json.decode(reply.body), calls[0]


def test_order_and_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    ranked, call = rank(monkeypatch, Service(IDS))
    assert [(entry["document"], entry["index"]) for entry in ranked] == [("blue", 1), ("red", 0), ("green", 2)]
    assert [entry["score"] for entry in ranked] == pytest.approx([2 / 3, 1 / 2, 1 / 3])
    assert call.token_ids_logprob == [9, 4] and call.return_logprob and not call.add_special_tokens


def test_the_best_without_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    ranked, _ = rank(monkeypatch, Service(IDS), top_n=2, return_documents=False)
    assert [(entry["document"], entry["index"]) for entry in ranked] == [(None, 1), (None, 0)]


def test_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Qwen3-Reranker's model card writes it."""
    _, call = rank(monkeypatch, Service(IDS), instruct="Be strict")
    assert isinstance(call.text, list)
    assert call.text[0] == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: Be strict\n<Query>: colour?\n<Document>: red<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_answers_that_are_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ApiError, match="yes and no"):
        rank(monkeypatch, Service({"yes": [1, 2], "no": [4]}))
