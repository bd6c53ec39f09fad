"""Rows of steps that verify draft tokens and of drafts: the kernels' results are those of plain torch."""

from __future__ import annotations

import interpreter
import pytest
import torch

from sglang.srt.layers import native_draft_rows
from sglang.srt.layers.triton_ops import draft_rows

DEVICE = interpreter.DEVICE
REQUESTS, CONTEXT, DEPTH = 140, 64, 5


class Tables:
    """Requests in `count` slots, and two rows of padding behind them."""

    def __init__(self, count: int, tables: int = 1) -> None:
        generator = torch.Generator().manual_seed(count)
        slots = torch.randperm(REQUESTS - 1, generator=generator)[:count] + 1
        self.slots = torch.cat((slots, torch.zeros(2, dtype=torch.int64))).to(DEVICE)
        lens = torch.randint(1, CONTEXT - DEPTH, (REQUESTS,), generator=generator, dtype=torch.int32)
        lens[0] = 0
        self.lens = lens.to(DEVICE)
        next_tokens = torch.randint(0, 3, (REQUESTS, DEPTH), generator=generator)
        next_tokens[0] = 0
        self.next_tokens = next_tokens.to(DEVICE)
        table = torch.randint(1, 1 << 30, (tables, REQUESTS, CONTEXT), generator=generator, dtype=torch.int32)
        table[:, 0] = 0
        self.req_to_token = table.to(DEVICE)
        self.generator = generator

    def numbers(self, low: int, high: int) -> torch.Tensor:
        """One a request, 0 in the rows of padding; int32."""
        numbers = torch.randint(low, high, (len(self.slots),), generator=self.generator, dtype=torch.int32)
        numbers[-2:] = 0
        return numbers.to(DEVICE)


def assert_same(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


@interpreter.kernel_test
@pytest.mark.parametrize("tables", [1, 3])
@pytest.mark.parametrize(("count", "width"), [(1, 1), (5, 4), (131, 3), (3, DEPTH)])
def test_verify_inputs(count: int, width: int, tables: int) -> None:
    given = Tables(count, tables)
    widths = given.numbers(1, width + 1)
    arrays = given.slots, widths, given.lens, given.next_tokens, given.req_to_token, width
    expected = native_draft_rows.verify_inputs(*arrays)
    assert_same(draft_rows.verify_inputs(*arrays), expected)
    own = expected.rows.view(-1, width)[:, 0] > 0
    assert own[:count].all() and not own[count:].any() and (expected.locs[0].view(-1, width)[:count, 0] > 0).all()


@interpreter.kernel_test
@pytest.mark.parametrize("tables", [1, 3])
@pytest.mark.parametrize(("count", "width"), [(1, 1), (131, 1), (5, 4), (3, 8)])
def test_draft_inputs(count: int, width: int, tables: int) -> None:
    """Of requests that have all positions left, some and none."""
    given = Tables(count, tables)
    first = given.lens[given.slots]
    ends = (first + given.numbers(-1, width + 2)).clamp(min=0, max=CONTEXT)
    arrays = given.slots, first, ends, given.req_to_token, width
    expected = native_draft_rows.draft_inputs(*arrays)
    assert_same(draft_rows.draft_inputs(*arrays), expected)
    assert (expected.seq_lens >= 1).all() and (expected.slots[ends <= first] == 0).all()


@interpreter.kernel_test
@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize(("count", "width"), [(1, 1), (5, 4), (131, DEPTH)])
def test_settle_draft_tokens(count: int, width: int, forced: bool) -> None:
    """Of three tokens in all many a draft token is right; some requests have a row without a token."""
    given = Tables(count)
    tokens = torch.randint(0, 3, (count + 2, width), generator=given.generator)
    tokens[::4, width // 2] = -1
    tokens, widths = tokens.to(DEVICE), given.numbers(1, width + 1)
    counts = torch.minimum(given.numbers(1, width + 1), widths).clamp(min=1) if forced else None
    by_torch, by_kernel = given.lens.clone(), given.lens.clone()
    expected = native_draft_rows.accept_drafts(tokens, given.slots, widths, given.next_tokens, by_torch, counts)
    actual = draft_rows.accept_drafts(tokens, given.slots, widths, given.next_tokens, by_kernel, counts)
    assert_same(actual, expected)
    assert torch.equal(by_kernel, by_torch) and by_kernel[0] == 0
    assert width == 1 or count < 5 or len(expected.counts.unique()) > 1


@interpreter.kernel_test
def test_of_no_requests() -> None:
    """As of the chunk of a prompt that does not end in the step."""
    given = Tables(1)
    none, lens = given.slots[:0], given.lens[:0]
    for ops in (native_draft_rows, draft_rows):
        verify = ops.verify_inputs(none, lens, given.lens, given.next_tokens, given.req_to_token, 3)
        assert verify.start_loc.tolist() == [0] and not len(verify.input_ids)
        assert not len(ops.draft_inputs(none, lens, lens, given.req_to_token, 1).slots)
        rows = none.view(0, 3)
        assert not len(ops.accept_drafts(rows, none, lens, given.next_tokens, given.lens).counts)


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
