"""Scores of many items and labels, with an engine that knows what it shall answer."""

from __future__ import annotations

import asyncio
import math
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglang.srt.entrypoints.embeddings import serving_scores
from sglang.srt.entrypoints.embeddings.protocol import RerankRequest, ScoreRequest
from sglang.srt.entrypoints.http_errors import ApiError
from sglang.srt.entrypoints.long_outputs import FEW_OUTPUTS, written
from sglang.srt.managers.front.generate_request import GenerateOutput, GenerateRequest
from sglang.srt.managers.front.request_preparation import MAX_CALL_TOKENS
from sglang.srt.managers.front.text_encoder import TextEncoder
from sglang.srt.managers.wire.io_struct import FinishReason, TokenMeta
from srt.sampling.packed_logprobs import packed

LABELS = [7, 8]


class Engine:
    """Gives every prompt the same probabilities, and notes where its answers are read and prompts are joined."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_embedding: bool = False) -> None:
        self.calls: list[GenerateRequest] = []
        self.on_event_loop: list[str] = []
        self.text = TextEncoder(None, 1)
        self.service: Any = SimpleNamespace(
            model_name="m",
            manager=SimpleNamespace(
                text=self.text,
                args=SimpleNamespace(is_embedding=is_embedding),
                model_config=SimpleNamespace(labels=None),
            ),
        )
        monkeypatch.setattr(serving_scores, "answered", self.answered)
        for name in ("_probabilities", "normalized", "_joined", "json_response"):
            monkeypatch.setattr(serving_scores, name, self._noted(name, getattr(serving_scores, name)))

    def _noted(self, name: str, work: Any) -> Any:
        def noted(*args: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                self.on_event_loop.append(name)
            return work(*args)

        return noted

    async def answered(
        self, _service: Any, _request: Any, call: GenerateRequest, write: Any, num_more: Any = lambda _: 0
    ) -> Any:
        self.calls.append(call)
        prompts: Any = call.text or call.input_ids
        row = [(math.log(0.25), LABELS[0]), (math.log(0.75), LABELS[1])]
        outputs = [
            GenerateOutput(
                i, "", [9], FinishReason("length"), TokenMeta(3, 1), packed([(-1.0, 9)], named=[row]), b"\0" * 16
            )
            for i in range(len(prompts))
        ]
        stream = SimpleNamespace(requests=[SimpleNamespace(rid=str(i)) for i in range(len(prompts))])
        return await written(outputs, lambda: write(stream, outputs), num_more(stream))

    def score(self, **fields: Any) -> Any:
        body = ScoreRequest(label_token_ids=LABELS, **fields)
        return msgspec.json.decode(asyncio.run(serving_scores.score(self.service, body, None)).body)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_items", [1, FEW_OUTPUTS + 1])
def test_many_scores_are_written_in_a_thread(num_items: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,048 items with 4,096 labels each are eight million numbers."""
    engine = Engine(monkeypatch)
    answer = engine.score(query="a", items=["b"] * num_items)
    assert answer["scores"] == [pytest.approx([0.25, 0.75])] * num_items
    assert set(engine.on_event_loop) - {"_joined"} == ({"_probabilities"} if num_items == 1 else set())


@pytest.mark.parametrize(
    ("query", "item"), [("a" * 1_000_000, "b"), ([1] * 1_000_000, [2])], ids=["texts", "token ids"]
)
def test_long_prompts_are_joined_in_a_thread(query: Any, item: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    engine.score(query=query, items=[item], item_first=True)
    prompts: Any = engine.calls[0].text or engine.calls[0].input_ids
    assert prompts == [item + query] and "_joined" not in engine.on_event_loop


def test_no_more_token_ids_are_joined_than_a_call_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    with pytest.raises(ApiError, match=f"at most {MAX_CALL_TOKENS} are allowed"):
        engine.score(query=[1] * 10_000, items=[[2]] * 2048)
    assert not engine.calls
    engine.score(query="a" * 10_000, items=["b"] * 2048)


@pytest.mark.parametrize("answer", [serving_scores.rerank, serving_scores.rerank_results])
def test_many_documents_are_ranked_in_a_thread(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, is_embedding=True)
    client = SimpleNamespace(receive=asyncio.Event().wait)  # stays
    body = RerankRequest(query="a", documents=["b"] * FEW_OUTPUTS)
    reply = asyncio.run(answer(engine.service, body, client))
    ranked = msgspec.json.decode(reply.body)
    assert len(ranked if isinstance(ranked, list) else ranked["results"]) == FEW_OUTPUTS
    assert not engine.on_event_loop
