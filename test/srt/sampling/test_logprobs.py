"""Log probabilities come from the raw distribution, whatever the request samples with."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling import logprobs, output_logprobs
from sglang.srt.sampling.logprobs import LogprobRequest, LogprobResult, prompt_logprobs
from sglang.srt.sampling.output_logprobs import TOKEN_COLUMNS, OutputLogprobs
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.sampling.sampling_table import SamplingTable
from srt.sampling.packed_logprobs import Unpacked, packed, unpacked

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


def of(result: LogprobResult, request: int, rows: slice, is_input: bool = False) -> Unpacked:
    """What a request gets of these rows."""
    asked = result.request
    named = np.array(asked.token_ids[request], np.int32).tobytes()
    logprobs = OutputLogprobs(asked.top_nums[request], named, 17 if is_input else None)
    result.add(logprobs.input if is_input else logprobs.output, request, rows)
    return unpacked(logprobs)


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
        result = of(host, row, slice(row, row + 1))
        [(value, named)] = result.output
        assert named == token and value == pytest.approx(raw[row, token].item(), abs=1e-5)
        assert len(result.top) == (1 if TOP_NUMS[row] else 0)
        for top in result.top:
            best = raw[row].topk(TOP_NUMS[row])
            assert [t for _, t in top] == best.indices.tolist()
            assert [v for v, _ in top] == pytest.approx(best.values.tolist(), abs=1e-5)
        ids = TOKEN_IDS[row]
        assert len(result.named) == (1 if ids else 0)
        for entries in result.named:
            assert [t for _, t in entries] == ids
            assert [v for v, _ in entries] == pytest.approx(raw[row, ids].tolist(), abs=1e-5)


def test_prompt_logprobs_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head = randn(11, 8), randn(8, VOCAB)
    targets = torch.arange(11) * 3
    wanted = of_prompts(request(), targets.tolist(), [0] * 4 + [2] * 7)
    largest = 0

    def project(h: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, h.shape[0])
        assert torch.equal(h, hidden[rows])
        return h @ head

    whole = prompt_logprobs(hidden, project, wanted, VOCAB)
    assert largest == 11
    largest = 0
    monkeypatch.setattr(logprobs, "MAX_CHUNK_ELEMENTS", 3 * VOCAB)
    pieces = prompt_logprobs(hidden, project, wanted, VOCAB)
    assert largest == 3
    raw = torch.log_softmax(hidden @ head, dim=-1)
    for rows in (whole, pieces):
        out = of(LogprobResult(rows, request()), 2, slice(4, 11), is_input=True)
        assert [len(out.input), len(out.input_top), len(out.input_named)] == [8, 8, 8]
        assert (out.input[0], out.input_top[0], out.input_named[0]) == ((None, 17), None, None)
        for i in range(7):
            row = 4 + i
            assert out.input[i + 1] == (pytest.approx(raw[row, targets[row]].item(), abs=1e-5), int(targets[row]))
            assert out.input_top[i + 1] == [(pytest.approx(raw[row].max().item(), abs=1e-5), int(raw[row].argmax()))]
            assert out.input_named[i + 1] == [(pytest.approx(raw[row, 7].item(), abs=1e-5), 7)]


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
    packed = prompt_logprobs(randn(11, 8), lambda h, rows: h @ randn(8, VOCAB), wanted, VOCAB)
    assert packed.shape == (11, wanted.width(VOCAB)) and len(alive) == 11


def test_a_request_without_top_or_ids_has_no_such_lists() -> None:
    built = of_prompts(LogprobRequest([0], [[]]), [5, 6], [0, 0])
    rows = prompt_logprobs(randn(2, 4), lambda h, rows: h @ randn(4, VOCAB), built, VOCAB)
    out = of(LogprobResult(rows, built), 0, slice(0, 2), is_input=True)
    assert [token for _, token in out.input] == [17, 5, 6]
    assert not out.input_top and not out.input_named


def test_more_top_tokens_than_the_vocabulary_has() -> None:
    built, smaller = LogprobRequest([VOCAB + 5], [[1]]), LogprobRequest([VOCAB], [[1]])
    rows = logprobs.token_logprobs(randn(1, VOCAB), torch.tensor([0]), built)
    assert rows.shape == (1, TOKEN_COLUMNS + 2 * VOCAB + 1)
    [[(value, _)]] = of(LogprobResult(rows, smaller), 0, slice(0, 1)).named
    assert value == pytest.approx(torch.log_softmax(randn(1, VOCAB), -1)[0, 1].item(), abs=1e-5)


def test_several_rows_of_one_request() -> None:
    """A step that verifies drafts samples several rows a request."""
    logits, wanted = randn(4, VOCAB), LogprobRequest([0, 1], [[3], [8, 9]], row_requests=np.array([0, 0, 1, 1]))
    raw = torch.log_softmax(logits, dim=-1)
    host = LogprobResult(logprobs.token_logprobs(logits, torch.arange(4), wanted), wanted)
    for row, of_request in enumerate([0, 0, 1, 1]):
        out = of(host, of_request, slice(row, row + 1))
        assert out.output == [(pytest.approx(raw[row, row].item(), abs=1e-5), row)]
        ids = wanted.token_ids[of_request]
        assert out.named == [[(pytest.approx(raw[row, i].item(), abs=1e-5), i) for i in ids]]
        assert len(out.top) == of_request


def test_no_rows() -> None:
    nothing = prompt_logprobs(randn(0, 4), lambda h, rows: h, of_prompts(request(), [], []), VOCAB)
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
        got = of(host, row, slice(row, row + 1))
        assert got.output == [(pytest.approx(raw[row, row].item(), abs=1e-5), row)]
        best = [topk(raw[row], count)] if count else []
        assert [[t for _, t in top] for top in got.top] == [each.indices.tolist() for each in best]
        assert [v for top in got.top for v, _ in top] == pytest.approx(
            [v for each in best for v in each.values.tolist()], abs=1e-5
        )
        values = [v for named in got.named for v, _ in named]
        assert values == pytest.approx(raw[row, wanted.token_ids[row]].tolist(), abs=1e-5)


@pytest.mark.parametrize("num_top", [0, 3])
@pytest.mark.parametrize("ids", [[], [4, 9]])
@pytest.mark.parametrize("begins", [False, True])
def test_blocks_are_all_rows_in_order(
    num_top: int, ids: list[int], begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few at a time, whatever their number, and each float the one that was packed."""
    values, tokens = np.random.default_rng(0).standard_normal((20, 6)).astype(np.float32), range(100, 120)
    own = list(zip(values[:, 0].tolist(), tokens, strict=True))
    top = [[(value, i) for i, value in enumerate(row[1 : 1 + num_top])] for row in values.tolist()] if num_top else []
    named = [list(zip(row[4:], ids, strict=True)) for row in values.tolist()] if ids else []
    first: Any = [(None, 7)] if begins else []
    nothing: Any = [None] if begins else []
    more = {"input": first + own, "input_top": nothing * bool(top) + top, "input_named": nothing * bool(named) + named}
    logprobs = packed(own, top, named, **more)
    assert logprobs.num_values == 40 * (1 + num_top + len(ids)) + begins
    for at_once, count in ((1, 1), (14, 14 // (1 + num_top + len(ids))), (1 << 20, 20)):
        monkeypatch.setattr(output_logprobs, "VALUES_AT_ONCE", at_once)
        assert unpacked(logprobs) == Unpacked(own, top, named, **more)
        blocks = list(logprobs.output_blocks())
        assert max(len(block.tokens) for block in blocks) == count and len(blocks) == -(-20 // count)


def test_a_row_costs_no_object_for_each_value() -> None:
    """Neither the rows of running requests nor those of prompts."""

    class Row(bytearray):
        num_parts = 0

        def __iadd__(self, part: Any) -> Any:
            assert isinstance(part, bytes)
            Row.num_parts += 1
            return super().__iadd__(part)

    wanted = LogprobRequest([1000, 10], [[], [1, 2]])
    result = LogprobResult(torch.zeros((8, 2 + 2000 + 2), dtype=torch.int32), wanted)
    for request, columns in enumerate((2002, 24)):
        for rows in (slice(3, 4), slice(2, 8)):
            row, Row.num_parts = Row(), 0
            result.add(row, request, rows)
            assert Row.num_parts == 1 and len(row) == 4 * columns * (rows.stop - rows.start)
