"""Log probabilities come from the raw distribution, whatever the request samples with."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.wire.io_struct import OutputLogprobs
from sglang.srt.sampling import logprobs
from sglang.srt.sampling.logprobs import HostLogprobs, LogprobRequest, add_unpredicted_input, prompt_logprobs
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.sampling.sampling_table import SamplingTable

VOCAB = 50
TOP_NUMS = [0, 3, 1]
TOKEN_IDS: list[list[int] | None] = [[4, 9], None, [7]]


def request() -> LogprobRequest:
    built = LogprobRequest.build([True, True, True], TOP_NUMS, TOKEN_IDS, "cpu")
    assert built is not None
    return built


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
    host = HostLogprobs.unpack(out.logprobs.numpy(), request())
    tokens = out.next_token_ids.tolist()
    assert tokens[0] == 3
    for row, token in enumerate(tokens):
        result = OutputLogprobs()
        host.add_output(result, row, token)
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
    rows = torch.tensor([0] * 4 + [2] * 7)
    largest = 0

    def project(h: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, h.shape[0])
        return h @ head

    whole = prompt_logprobs(hidden, project, targets, rows, request(), VOCAB)
    assert largest == 11
    largest = 0
    monkeypatch.setattr(logprobs, "MAX_CHUNK_ELEMENTS", 3 * VOCAB)
    pieces = prompt_logprobs(hidden, project, targets, rows, request(), VOCAB)
    assert largest == 3
    raw = torch.log_softmax(hidden @ head, dim=-1)
    for packed in (whole, pieces):
        host = HostLogprobs.unpack(packed.numpy(), request())
        out = OutputLogprobs()
        add_unpredicted_input(out, request(), 2, 17)
        host.add_input(out, 2, range(4, 11), targets[4:].tolist())
        assert out.input is not None and out.input_top is not None and out.input_token_ids is not None
        assert [len(out.input), len(out.input_top), len(out.input_token_ids)] == [8, 8, 8]
        assert out.input[0] == (None, 17) and out.input_top[0] is None and out.input_token_ids[0] is None
        for i in range(7):
            row = 4 + i
            assert out.input[i + 1] == (pytest.approx(raw[row, targets[row]].item(), abs=1e-5), int(targets[row]))
            assert out.input_top[i + 1] == [(pytest.approx(raw[row].max().item(), abs=1e-5), int(raw[row].argmax()))]
            assert out.input_token_ids[i + 1] == [(pytest.approx(raw[row, 7].item(), abs=1e-5), 7)]


def test_a_request_without_top_or_ids_has_no_such_lists() -> None:
    built = LogprobRequest.build([True], [0], [None], "cpu")
    assert built is not None
    out = OutputLogprobs()
    add_unpredicted_input(out, built, 0, 1)
    packed = prompt_logprobs(
        randn(2, 4), lambda h: h @ randn(4, VOCAB), torch.tensor([5, 6]), torch.zeros(2).long(), built, VOCAB
    )
    HostLogprobs.unpack(packed.numpy(), built).add_input(out, 0, range(2), [5, 6])
    assert out.input is not None and len(out.input) == 3
    assert out.input_top is None and out.input_token_ids is None


def test_more_top_tokens_than_the_vocabulary_has() -> None:
    built = LogprobRequest.build([True], [VOCAB + 5], [[1]], "cpu")
    assert built is not None
    packed = logprobs.token_logprobs(randn(1, VOCAB), torch.tensor([0]), built.num_top, built.ids_dev)
    host = HostLogprobs.unpack(packed.numpy(), built)
    assert len(host.top(0, VOCAB + 5)) == VOCAB
    assert host.requested(0, [1])[0][0] == pytest.approx(torch.log_softmax(randn(1, VOCAB), -1)[0, 1].item(), abs=1e-5)


def test_nothing_wanted_is_no_request() -> None:
    assert LogprobRequest.build([False, False], [0, 0], [None, None], "cpu") is None
    assert np.prod(prompt_shape()) == 0


def prompt_shape() -> torch.Size:
    return prompt_logprobs(
        randn(0, 4), lambda h: h, torch.zeros(0).long(), torch.zeros(0).long(), request(), VOCAB
    ).shape
