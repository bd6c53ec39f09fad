"""Log probabilities come from the raw distribution, whatever the request samples with."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling import logprobs
from sglang.srt.sampling.logprobs import LogprobRequest, LogprobResult, prompt_logprobs
from sglang.srt.sampling.output_logprobs import OutputLogprobs
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.sampling.sampling_table import SamplingTable

VOCAB = 50
TOP_NUMS = [0, 3, 1]
TOKEN_IDS: list[list[int]] = [[4, 9], [], [7]]


def request() -> LogprobRequest:
    return LogprobRequest(TOP_NUMS, TOKEN_IDS)


def of_prompts(request: LogprobRequest, targets: list[int], of_request: list[int]) -> LogprobRequest:
    """Of all rows of a step, one after the other."""
    return replace(
        request, rows=np.arange(len(targets)), targets=np.array(targets, np.int64),
        row_requests=np.array(of_request, np.int64),
    )  # fmt: skip


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 2


def test_output_logprobs_ignore_what_sampling_does_to_the_logits() -> None:
    table = SamplingTable(4, VOCAB, "cpu")
    table.set(1, SamplingParams(temperature=0.0, logit_bias={"3": 50.0}), 0, [], [], ())
    table.set(2, SamplingParams(temperature=3.0, presence_penalty=2.0), 1, [1], [2], ())
    table.set(3, SamplingParams(top_k=4), 2, [], [], ())
    logits, slots = randn(3, VOCAB), torch.tensor([1, 2, 3])
    mask = torch.full((3, 2), -1, dtype=torch.int32)
    raw = torch.log_softmax(logits, dim=-1)
    out = Sampler(use_triton=False)(
        logits.clone(), table.view(slots.numpy(), slots), torch.full((3,), 5), mask, request()
    )
    assert out.logprobs is not None
    host = LogprobResult(out.logprobs, request())
    tokens = out.next_token_ids.tolist()
    assert tokens[0] == 3
    for row, token in enumerate(tokens):
        result = OutputLogprobs()
        host.add_output(result, row, row, token)
        [(value, named)] = result.output
        assert named == token and value == pytest.approx(raw[row, token].item(), abs=1e-5)
        assert len(result.output_top) == (1 if TOP_NUMS[row] else 0)
        for top in result.output_top:
            best = raw[row].topk(TOP_NUMS[row])
            assert [t for _, t in top] == best.indices.tolist()
            assert [v for v, _ in top] == pytest.approx(best.values.tolist(), abs=1e-5)
        ids = TOKEN_IDS[row]
        assert len(result.output_token_ids) == (1 if ids else 0)
        for entries in result.output_token_ids:
            assert [t for _, t in entries] == ids
            assert [v for v, _ in entries] == pytest.approx(raw[row, ids].tolist(), abs=1e-5)


def test_prompt_logprobs_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head = randn(11, 8), randn(8, VOCAB)
    targets = torch.arange(11) * 3
    wanted = of_prompts(request(), targets.tolist(), [0] * 4 + [2] * 7)
    largest = 0

    def project(h: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, h.shape[0])
        return h @ head

    whole = prompt_logprobs(hidden, project, wanted, VOCAB)
    assert largest == 11
    largest = 0
    monkeypatch.setattr(logprobs, "MAX_CHUNK_ELEMENTS", 3 * VOCAB)
    pieces = prompt_logprobs(hidden, project, wanted, VOCAB)
    assert largest == 3
    raw = torch.log_softmax(hidden @ head, dim=-1)
    for packed in (whole, pieces):
        host = LogprobResult(packed, request())
        out = OutputLogprobs(input=[(None, 17)], input_top=[None], input_token_ids=[None])
        host.add_input(out, 2, range(4, 11), targets[4:].tolist())
        assert out.input is not None and out.input_top is not None and out.input_token_ids is not None
        assert [len(out.input), len(out.input_top), len(out.input_token_ids)] == [8, 8, 8]
        for i in range(7):
            row = 4 + i
            assert out.input[i + 1] == (pytest.approx(raw[row, targets[row]].item(), abs=1e-5), int(targets[row]))
            assert out.input_top[i + 1] == [(pytest.approx(raw[row].max().item(), abs=1e-5), int(raw[row].argmax()))]
            assert out.input_token_ids[i + 1] == [(pytest.approx(raw[row, 7].item(), abs=1e-5), 7)]


def test_the_device_holds_the_results_of_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a step take 200 MB if one of its requests wants thousands of log probabilities."""
    alive: list[weakref.ref[torch.Tensor]] = []
    computed = logprobs.token_logprobs

    def watched(*args: Any) -> torch.Tensor:
        found = computed(*args)
        alive.append(weakref.ref(found))
        assert sum(ref() is not None for ref in alive) <= 2
        return found

    monkeypatch.setattr(logprobs, "MAX_CHUNK_ELEMENTS", VOCAB)
    monkeypatch.setattr(logprobs, "token_logprobs", watched)
    wanted = of_prompts(request(), list(range(11)), [0] * 10 + [1])
    packed = prompt_logprobs(randn(11, 8), lambda h: h @ randn(8, VOCAB), wanted, VOCAB)
    assert packed.shape == (11, wanted.width(VOCAB)) and len(alive) == 11


def test_a_request_without_top_or_ids_has_no_such_lists() -> None:
    built = of_prompts(LogprobRequest([0], [[]]), [5, 6], [0, 0])
    out = OutputLogprobs(input=[(None, 1)])
    packed = prompt_logprobs(randn(2, 4), lambda h: h @ randn(4, VOCAB), built, VOCAB)
    LogprobResult(packed, built).add_input(out, 0, range(2), [5, 6])
    assert out.input is not None and len(out.input) == 3
    assert out.input_top is None and out.input_token_ids is None


def test_more_top_tokens_than_the_vocabulary_has() -> None:
    built = LogprobRequest([VOCAB + 5], [[1]])
    host = LogprobResult(logprobs.token_logprobs(randn(1, VOCAB), torch.tensor([0]), built), built)
    assert len(host.top(0, VOCAB + 5)) == VOCAB
    assert host.named(0, [1])[0][0] == pytest.approx(torch.log_softmax(randn(1, VOCAB), -1)[0, 1].item(), abs=1e-5)


def test_several_rows_of_one_request() -> None:
    """A step that verifies drafts samples several rows a request."""
    logits, wanted = randn(4, VOCAB), LogprobRequest([0, 1], [[3], [8, 9]], row_requests=np.array([0, 0, 1, 1]))
    raw = torch.log_softmax(logits, dim=-1)
    host = LogprobResult(logprobs.token_logprobs(logits, torch.arange(4), wanted), wanted)
    for row, of_request in enumerate([0, 0, 1, 1]):
        out = OutputLogprobs()
        host.add_output(out, of_request, row, row)
        assert out.output == [(pytest.approx(raw[row, row].item(), abs=1e-5), row)]
        ids = wanted.token_ids[of_request]
        assert out.output_token_ids == [[(pytest.approx(raw[row, i].item(), abs=1e-5), i) for i in ids]]
        assert len(out.output_top) == of_request


def test_no_rows() -> None:
    nothing = prompt_logprobs(randn(0, 4), lambda h: h, of_prompts(request(), [], []), VOCAB)
    assert nothing.shape == (0, request().width(VOCAB))


def test_one_request_for_many_top_tokens_is_not_computed_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each row at most twice as many as its request asks for, and none where it asks for none."""
    top_nums = [0] * 20 + [1, 3, 4, 40, 45] + [0] * 20
    wanted = LogprobRequest(top_nums, [[] if i % 7 else [i, 5] for i in range(len(top_nums))])
    computed: list[tuple[int, int]] = []
    topk = torch.Tensor.topk

    def counted(logits: torch.Tensor, count: int, dim: int) -> Any:
        computed.append((len(logits), count))
        return topk(logits, count, dim=dim)

    monkeypatch.setattr(torch.Tensor, "topk", counted)
    logits = randn(len(top_nums), VOCAB)
    tokens = torch.arange(len(top_nums))
    host = LogprobResult(logprobs.token_logprobs(logits, tokens, wanted), wanted)
    assert sum(rows for rows, _ in computed) == 5
    assert sum(rows * count for rows, count in computed) <= 2 * sum(top_nums)
    raw = torch.log_softmax(logits, dim=-1)
    for row, count in enumerate(top_nums):
        assert host.token(row) == pytest.approx(raw[row, row].item(), abs=1e-5)
        best = topk(raw[row], count) if count else None
        assert [t for _, t in host.top(row, count)] == ([] if best is None else best.indices.tolist())
        assert [v for v, _ in host.top(row, count)] == pytest.approx(
            [] if best is None else best.values.tolist(), abs=1e-5
        )
        named = host.named(row, wanted.token_ids[row])
        assert [v for v, _ in named] == pytest.approx(raw[row, wanted.token_ids[row]].tolist(), abs=1e-5)
