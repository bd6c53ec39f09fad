"""Draft tokens of what follows, looked up where the last tokens stood before. Reference: `native_ngram.ngram_drafts`.

    longest_match_kernel   (request, split)  the best earlier place in blocks of the request's own tokens
    corpus_match_kernel    (request)         the best place in sorted external texts
    copy_drafts_kernel    (request)         the better of them, and the tokens that stand behind it

A place is an int64: the number of tokens that agree in the upper half, its position in the lower one, so that the
largest is the longest match and, of several, the latest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LAUNCH = {"BLOCK": 1024, "num_warps": 4}
ONE_WARP = {"num_warps": 1}
MAX_SPLITS = 64
"""Programs that share a request's tokens."""
MAX_DRAFT_TOKENS = 64
"""The most draft tokens of a request."""
MAX_COMPARED = 64
"""The most tokens that are compared."""


@triton.jit(do_not_specialize=["context_len", "longest"])
def longest_match_kernel(
    history, slots, lens, tokens, places, context_len, longest, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """history [rows, context_len] int32; slots, tokens [R] int64; lens [R] int32; places [R, SPLITS] int64: of blocks
    split, split + SPLITS, ..."""
    request = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    history += tl.load(slots + request) * context_len
    length = tl.minimum(tl.load(lens + request), context_len - 1)
    token = tl.load(tokens + request).to(tl.int32)
    best = tl.zeros((BLOCK,), tl.int64)
    for block in range(split, tl.cdiv(length, BLOCK), SPLITS):
        position = block * BLOCK + tl.arange(0, BLOCK)
        alive = (tl.load(history + position, mask=position < length, other=-1) == token) & (position < length)
        count = alive.to(tl.int64)
        back = tl.full((), 1, tl.int32)
        while (back < tl.minimum(longest, length)) & (tl.max(alive.to(tl.int32)) > 0):
            wanted = tl.load(history + length - back)
            alive = alive & (position >= back)
            alive = alive & (tl.load(history + position - back, mask=alive, other=-1) == wanted)
            count += alive.to(tl.int64)
            back += 1
        best = tl.maximum(best, tl.where(count > 0, (count << 32) | position.to(tl.int64), 0))
    tl.store(places + request * SPLITS + split, tl.max(best))


@triton.jit
def _agreement(corpus, end, history, length, token, longest, LONGEST: tl.constexpr):
    """How many tokens up to `end` of the corpus are the last tokens of the request, and whether the first ones that are
    not make the corpus' text the smaller one, read backwards."""
    back = tl.arange(0, LONGEST)
    theirs = tl.load(corpus + end - back, mask=(back < longest) & (end >= back), other=-1)
    ours = tl.load(history + length - back, mask=(back > 0) & (back < longest) & (length >= back), other=-2)
    ours = tl.where(back == 0, token, ours)
    differs = (theirs != ours) | (back >= longest)
    count = tl.min(tl.where(differs, back, LONGEST))
    at = back == count
    smaller = tl.sum(tl.where(at, theirs, 0)) < tl.sum(tl.where(at, ours, 0))
    return count, smaller & (count < longest)


@triton.jit(do_not_specialize=["context_len", "longest"])
def corpus_match_kernel(
    corpus, order, size, history, slots, lens, tokens, places, context_len, longest, LONGEST: tl.constexpr
):  # fmt: skip
    """corpus [N] int32; order [N] int32: its positions, sorted by the text that ends there, read backwards; size [1]
    int32: how many of them there are; places [R] int64."""
    request = tl.program_id(0).to(tl.int64)
    history += tl.load(slots + request) * context_len
    length = tl.minimum(tl.load(lens + request), context_len - 1)
    token = tl.load(tokens + request).to(tl.int32)
    count = tl.load(size)
    low = tl.zeros((), tl.int32)
    high = count
    while low < high:
        middle = (low + high) // 2
        _, smaller = _agreement(corpus, tl.load(order + middle), history, length, token, longest, LONGEST)
        low = tl.where(smaller, middle + 1, low)
        high = tl.where(smaller, high, middle)
    best = tl.zeros((), tl.int64)
    for neighbour in tl.static_range(2):  # the two texts between which the request's would stand
        rank = low - neighbour
        if (rank >= 0) & (rank < count):
            end = tl.load(order + rank)
            agree, _ = _agreement(corpus, end, history, length, token, longest, LONGEST)
            if agree > 0:
                best = tl.maximum(best, (agree.to(tl.int64) << 32) | end.to(tl.int64))
    tl.store(places + request, best)


@triton.jit(do_not_specialize=["context_len", "num_speculative_tokens", "corpus_size"])
def copy_drafts_kernel(
    history, slots, lens, tokens, places, corpus, corpus_places, draft_tokens, context_len,
    num_speculative_tokens, corpus_size, CORPUS: tl.constexpr, SPLITS: tl.constexpr, MAX_DRAFT_TOKENS: tl.constexpr,
):  # fmt: skip
    """Writes the token and its draft tokens into `history`, and draft tokens [R, num_speculative_tokens] int64. Behind
    the last token of the request its draft tokens go on with themselves; behind a corpus' end with token 0."""
    request = tl.program_id(0).to(tl.int64)
    history += tl.load(slots + request) * context_len
    length = tl.minimum(tl.load(lens + request), context_len - 1)
    token = tl.load(tokens + request).to(tl.int32)
    place = tl.max(tl.load(places + request * SPLITS + tl.arange(0, SPLITS)))
    index = tl.arange(0, MAX_DRAFT_TOKENS)
    wanted = index < num_speculative_tokens
    position = (place & 0xFFFFFFFF).to(tl.int32)
    source = position + 1 + index % tl.maximum(length - position, 1)
    draft_token = tl.load(history + source, mask=wanted & (source < length), other=0)
    draft_token = tl.where((source >= length) | (place == 0), token, draft_token)
    if CORPUS:
        other = tl.load(corpus_places + request)
        if (other >> 32) > (place >> 32):
            source = (other & 0xFFFFFFFF).to(tl.int32) + 1 + index
            draft_token = tl.load(corpus + source, mask=wanted & (source < corpus_size), other=0)
            draft_token = tl.maximum(draft_token, 0)
    tl.store(draft_tokens + request * num_speculative_tokens + index, draft_token.to(tl.int64), mask=wanted)
    tl.store(history + length, token)
    tl.store(history + length + 1 + index, draft_token, mask=wanted & (length + 1 + index < context_len))


def ngram_drafts(
    history: torch.Tensor,
    slots: torch.Tensor,
    lens: torch.Tensor,
    tokens: torch.Tensor,
    longest: int,
    num_speculative_tokens: int,
    corpus: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """history [rows, context_len] int32, contiguous; slots, tokens [R] int64; lens [R] int32: the positions of
    `tokens`, which are entered in the history with the draft tokens -> [R, num_speculative_tokens] int64: what followed
    where at most `longest` of the last tokens stood before. corpus: tokens [N], order [N] and size [1] int32 of
    external texts."""
    num_reqs, context_len = len(slots), history.shape[1]
    splits = min(triton.next_power_of_2(triton.cdiv(context_len, LAUNCH["BLOCK"])), MAX_SPLITS)
    draft_tokens = torch.empty((num_reqs, num_speculative_tokens), dtype=torch.int64, device=slots.device)
    places = torch.empty((num_reqs, splits), dtype=torch.int64, device=slots.device)
    if not num_reqs:
        return draft_tokens
    longest_match_kernel[(num_reqs, splits)](
        history, slots, lens, tokens, places, context_len, longest, SPLITS=splits, **LAUNCH
    )  # fmt: skip
    texts, corpus_places = history, places
    if corpus is not None:
        texts, order, size = corpus
        corpus_places = torch.empty(num_reqs, dtype=torch.int64, device=slots.device)
        corpus_match_kernel[(num_reqs,)](
            texts, order, size, history, slots, lens, tokens, corpus_places, context_len, longest,
            LONGEST=triton.next_power_of_2(longest), **ONE_WARP,
        )  # fmt: skip
    copy_drafts_kernel[(num_reqs,)](
        history, slots, lens, tokens, places, texts, corpus_places, draft_tokens, context_len,
        num_speculative_tokens, texts.numel(), CORPUS=corpus is not None, SPLITS=splits,
        MAX_DRAFT_TOKENS=MAX_DRAFT_TOKENS, **ONE_WARP,
    )  # fmt: skip
    return draft_tokens
