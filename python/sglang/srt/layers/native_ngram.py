"""N-gram draft tokens in plain torch, continuing the place where the last tokens occurred before: the CPU kernel, and
the reference for `triton_ops.ngram`."""

from __future__ import annotations

import torch

Corpus = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Tokens [N], order [N] and size [1] int32 of external texts, of which the first `size` entries of the order count: the
positions of the tokens, sorted by the text that ends there, read backwards. -1 stands between texts."""


def ngram_drafts(
    history: torch.Tensor,
    slots: torch.Tensor,
    lens: torch.Tensor,
    tokens: torch.Tensor,
    longest: int,
    num_speculative_tokens: int,
    corpus: Corpus | None = None,
) -> torch.Tensor:
    """Returns draft tokens [R, num_speculative_tokens] int64, and writes them and `tokens` into the history. history
    [rows, context_len] int32; slots, tokens [R] int64; lens [R] int32: the positions of `tokens`.

    Finds the longest suffix of a request, of up to `longest` tokens, that occurred earlier in the request or in the
    corpus; the latest place wins, and the corpus only with a longer match. The draft tokens are those that followed
    there; past the request's last token they continue with the draft tokens themselves. Without any match they repeat
    the last token.
    """
    if not len(slots):
        return tokens.new_empty((0, num_speculative_tokens))
    lens = lens.to(torch.int64).clamp(max=history.shape[1] - 1)
    # Sizes that are on the device are not asked for: the op may run in a graph.
    width = history.shape[1] if history.is_cuda else int(lens.max()) + 1
    sequences = history[slots, :width].to(torch.int64)
    index = torch.arange(width, device=slots.device)
    sequences = torch.where(index == lens[:, None], tokens[:, None], sequences)
    last = _last_tokens(sequences, lens, longest)
    counts, places = _longest_match(sequences, last, lens)
    ahead = torch.arange(num_speculative_tokens, device=slots.device)
    source = places[:, None] + 1 + ahead % (lens - places).clamp(min=1)[:, None]
    draft_tokens = torch.where(counts[:, None] > 0, sequences.gather(1, source.clamp(max=width - 1)), tokens[:, None])
    if corpus is not None and (corpus[2].is_cuda or int(corpus[2])):
        texts = corpus[0]
        their_counts, their_places = _corpus_match(texts, corpus[1], corpus[2], last)
        source = their_places[:, None] + 1 + ahead
        following = texts[source.clamp(max=len(texts) - 1)].to(torch.int64)
        theirs = torch.where(source < len(texts), following, 0).clamp(min=0)
        draft_tokens = torch.where((their_counts > counts)[:, None], theirs, draft_tokens)
    written = torch.cat((tokens[:, None], draft_tokens), 1).to(torch.int32)
    position = lens[:, None] + torch.arange(num_speculative_tokens + 1, device=slots.device)
    # What is behind the context goes to the padding slot.
    inside = position < history.shape[1]
    history[torch.where(inside, slots[:, None], 0), torch.where(inside, position, 0)] = written
    return draft_tokens


def _last_tokens(sequences: torch.Tensor, lens: torch.Tensor, longest: int) -> torch.Tensor:
    """Returns [R, longest]: the last token, the one before it, ...; -2 before the first."""
    position = lens[:, None] - torch.arange(longest, device=sequences.device)
    return torch.where(position >= 0, sequences.gather(1, position.clamp(min=0)), -2)


def _longest_match(
    sequences: torch.Tensor, last: torch.Tensor, lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns for each request the length of the longest matching suffix, and the latest position where it ended."""
    width = sequences.shape[1]
    index = torch.arange(width, device=sequences.device)
    alive = index < lens[:, None]
    counts = torch.zeros_like(sequences)
    for back in range(last.shape[1]):
        earlier = torch.nn.functional.pad(sequences, (back, 0), value=-1)[:, :width]
        alive = alive & (earlier == last[:, back, None])
        counts += alive
    best = (counts * width + index).where(counts > 0, torch.zeros_like(counts)).amax(1)
    return best // width, best % width


def _corpus_match(
    texts: torch.Tensor, order: torch.Tensor, size: torch.Tensor, last: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the same for the corpus, by binary search."""
    low = torch.zeros(len(last), dtype=torch.int64, device=texts.device)
    high = low + size
    for _ in range(len(order).bit_length()):
        middle = (low + high) // 2
        _, smaller = _agreement(texts, order[middle.clamp(max=len(order) - 1)].to(torch.int64), last)
        searching = low < high
        low = torch.where(searching & smaller, middle + 1, low)
        high = torch.where(searching & ~smaller, middle, high)
    counts, places = torch.zeros_like(low), torch.zeros_like(low)
    for rank in (low - 1, low):  # the two texts between which the request's would stand
        end = order[rank.clamp(min=0, max=len(order) - 1)].to(torch.int64)
        agree = torch.where((rank >= 0) & (rank < size), _agreement(texts, end, last)[0], 0)
        better = agree * len(texts) + end > counts * len(texts) + places
        counts, places = torch.where(better, agree, counts), torch.where(better, end, places)
    return counts, places


def _agreement(texts: torch.Tensor, end: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the length of the suffix that texts ending at `end` [R] share with the requests, and whether the texts,
    read backwards, sort before them."""
    longest = last.shape[1]
    position = end[:, None] - torch.arange(longest, device=texts.device)
    theirs = torch.where(position >= 0, texts[position.clamp(min=0)].to(torch.int64), -1)
    counts = (theirs == last).cumprod(1).sum(1)
    at = counts.clamp(max=longest - 1)[:, None]
    return counts, (theirs.gather(1, at) < last.gather(1, at))[:, 0]
