"""Guesses by n-grams against a plain search, and the kernels against the torch form, interpreted and on a GPU."""

from __future__ import annotations

import interpreter
import numpy as np
import pytest
import torch

from sglang.srt.layers import native_ngram
from sglang.srt.layers.triton_ops import ngram
from sglang.srt.utils.suffix_order import suffix_order

DEVICE = interpreter.DEVICE
CONTEXT = 2500
LENGTHS = [0, 1, 5, 1023, 1024, 1025, 2400, CONTEXT - 1]


def searched(own: list[int], longest: int, count: int, texts: list[int]) -> tuple[int, list[int]]:
    """The number of tokens that stood before and the draft tokens, by looking at every place. Of the corpus' places of
    one length any will do, so there the draft tokens are only those of the request's own tokens."""

    def agreement(text: list[int], end: int) -> int:
        most = min(longest, end + 1, len(own))
        return next((i for i in range(most) if text[end - i] != own[-1 - i]), most)

    best, place = max(((agreement(own, end), end) for end in range(len(own) - 1)), default=(0, 0))
    theirs = max((agreement(texts, end) for end in range(len(texts))), default=0)
    if not best:
        return theirs, [own[-1]] * count
    following = list(own)
    for i in range(count):
        following.append(following[place + 1 + i])
    return max(best, theirs), following[len(own) :]


def requests(vocab: int, lengths: list[int]) -> tuple[torch.Tensor, list[list[int]]]:
    """A history with garbage behind what is known, and the tokens of each request with its last one."""
    history = torch.randint(0, vocab, (len(lengths) + 1, CONTEXT), dtype=torch.int32)
    tokens = [[*history[slot + 1, :length].tolist(), slot % vocab] for slot, length in enumerate(lengths)]
    return history, tokens


def external(vocab: int, capacity: int, sizes: list[int], longest: int) -> tuple[list[int], list[torch.Tensor]]:
    """Texts with -1 between them, and what the device has of them."""
    texts = np.concatenate([np.array([*np.random.randint(0, vocab, size), -1], np.int32) for size in sizes])
    order = suffix_order(texts, longest)
    arrays = torch.full((capacity,), -1, dtype=torch.int32), torch.zeros(capacity, dtype=torch.int32)
    arrays[0][: len(texts)] = torch.from_numpy(texts)
    arrays[1][: len(order)] = torch.from_numpy(order)
    return texts.tolist(), [*arrays, torch.tensor([len(order)], dtype=torch.int32)]


@pytest.mark.pairs
@pytest.mark.parametrize("longest", [1, 3, 18])
@pytest.mark.parametrize("vocab", [2, 30, 100_000])
@pytest.mark.parametrize("sizes", [[], [0], [1], [40, 0, 700]])
def test_reference(longest: int, vocab: int, sizes: list[int]) -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    lengths = [0, 1, 5, 300]
    history, tokens = requests(vocab, lengths)
    texts, corpus = external(vocab, 1000, sizes, longest) if sizes else ([], None)
    count = 7
    slots, lens = torch.arange(1, len(lengths) + 1), torch.tensor(lengths, dtype=torch.int32)
    last = torch.tensor([own[-1] for own in tokens])
    given = None if corpus is None else (corpus[0], corpus[1], corpus[2])
    draft_tokens = native_ngram.ngram_drafts(history, slots, lens, last, longest, count, given)
    for own, slot, draft_token in zip(tokens, slots.tolist(), draft_tokens.tolist(), strict=True):
        best, expected = searched(own, longest, count, texts)
        alone, _ = searched(own, longest, count, [])
        if best == alone:
            assert draft_token == expected
        else:  # it stands in the corpus behind as many of the last tokens
            place = texts + [-1] * count
            ends = [e for e in range(len(texts)) if texts[max(0, e - best + 1) : e + 1] == own[len(own) - best :]]
            assert draft_token in [[max(0, token) for token in place[e + 1 : e + 1 + count]] for e in ends]
        assert history[slot, : len(own)].tolist() == own
        assert history[slot, len(own) : len(own) + count].tolist() == draft_token


def test_draft_tokens_go_on_with_themselves() -> None:
    history = torch.zeros(2, 20, dtype=torch.int32)
    history[1, :5] = torch.tensor([9, 4, 5, 6, 4])
    made = native_ngram.ngram_drafts(history, torch.tensor([1]), torch.tensor([5]), torch.tensor([5]), 4, 7)
    assert made.tolist() == [[6, 4, 5, 6, 4, 5, 6]]


@interpreter.kernel_test
@pytest.mark.pairs
@pytest.mark.parametrize("corpus", [False, True])
@pytest.mark.parametrize("vocab", [2, 300])
@pytest.mark.parametrize(("longest", "count"), [(1, 0), (5, 3), (18, 63)])
def test_kernel(longest: int, count: int, vocab: int, corpus: bool) -> None:
    torch.manual_seed(longest)
    np.random.seed(longest)
    history, tokens = requests(vocab, LENGTHS)
    slots = torch.tensor([*range(1, len(LENGTHS) + 1), 0, 0])
    lens = torch.tensor([*LENGTHS, 0, 3], dtype=torch.int32)
    last = torch.tensor([*(own[-1] for own in tokens), 0, 0])
    given = external(vocab, 3000, [600, 1, 900], longest)[1] if corpus else None
    by_torch, by_kernel = history.to(DEVICE), history.to(DEVICE).clone()
    arrays = [x.to(DEVICE) for x in (slots, lens, last)]
    texts = None if given is None else tuple(x.to(DEVICE) for x in given)
    expected = native_ngram.ngram_drafts(by_torch, *arrays, longest, count, texts)  # type: ignore[arg-type]
    actual = ngram.ngram_drafts(by_kernel, *arrays, longest, count, texts)  # type: ignore[arg-type]
    real = len(LENGTHS)
    assert torch.equal(actual[:real], expected[:real])
    assert torch.equal(by_kernel[1:], by_torch[1:])  # row 0 is padding


@interpreter.kernel_test
def test_no_requests() -> None:
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    history = torch.zeros(2, 20, dtype=torch.int32, device=DEVICE)
    for form in (ngram, native_ngram):
        assert form.ngram_drafts(history, none, none.int(), none, 4, 7).shape == (0, 7)


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
