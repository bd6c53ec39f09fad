"""Sampling of the next token of each request from logits, on the device and without waiting for it.

Order of steps: raw log probabilities (if asked for), logit bias and the stop-token mask of `min_new_tokens`,
repetition, frequency and presence penalties, grammar mask, temperature, top_k, top_p, min_p, draw.

top_k keeps the k largest logits; top_p then keeps the smallest set of largest tokens that holds at least top_p of the
probability that is left; min_p drops tokens less likely than min_p x the likeliest. Each of them is a lower bound on
the logit, so a row is filtered by one threshold, and tokens tied with the last kept one are kept too.

A row with a NaN, or without any logit above -inf, gives NO_TOKEN, which the host sees when it reads the tokens. What
stays on the device takes token 0 instead, so that every index is within bounds until then.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from sglang.srt.sampling.logprobs import LogprobRequest, token_logprobs
from sglang.srt.sampling.noise import gumbel_noise
from sglang.srt.sampling.penalties import apply_penalties, count_draft_tokens
from sglang.srt.sampling.sampling_params import NO_TOKEN, TOP_K_ALL, SamplingParams
from sglang.srt.sampling.sampling_table import Column, SamplingBatch, SamplingTable

BITS = 32
TOPK_LIMIT = 1024
"""Largest k for which `torch.topk` beats a full sort."""


@dataclass(slots=True)
class SamplerOutput:
    """The sampled tokens, and their packed log probabilities if asked for."""

    next_token_ids: torch.Tensor
    """[B] int64, NO_TOKEN for invalid rows (NaN). With `on_host` it may lie in pinned memory that the stream writes
    later: keep it until then."""
    logprobs: torch.Tensor | None  # packed [B, W] int32, see sampling.logprobs


class Sampler:
    """Samples tokens. `use_triton` (CUDA only) selects the fused kernels; results are the same up to rounding of
    near-ties."""

    def __init__(self, use_triton: bool) -> None:
        self.use_triton = use_triton

    def __call__(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        positions: torch.Tensor,
        vocab_mask: torch.Tensor | None = None,
        logprobs: LogprobRequest | None = None,
        next_token: torch.Tensor | None = None,
        on_host: bool = False,
        draft_tokens: torch.Tensor | None = None,
        counts: bool = True,
    ) -> SamplerOutput:
        """logits [B, V] fp32, overwritten; positions [B] (int32 or int64): sequence length before the new token;
        draft tokens [D, k - 1] int64 where the rows are k of each of D requests: row j follows the first j draft
        tokens, which count for its penalties, and what is drawn is not counted (`PenaltyState.add_tokens` by who knows
        what stands); vocab_mask [B, ceil(V / 32)] int32, bit v % 32 of word v // 32 allows token v. With `next_token`
        [num_slots] int64, the tokens are also written to the rows of the batch's request slots. on_host: nothing behind
        this reads the tokens on the device, so that a kernel may write them where the host reads them, without a copy.
        counts: what is drawn counts for the penalties of later tokens, unless there are draft tokens.
        """
        logits = logits.contiguous()
        raw = logits
        edited = batch.sparse is not None or batch.penalties is not None or vocab_mask is not None
        if logprobs is not None and edited:
            raw = logits.clone()
        if batch.sparse is not None:
            _add_sparse(logits, batch.sparse.packed, positions)
        if self.use_triton:
            on_host = on_host and batch.penalties is None and logprobs is None
            tokens = _sample_triton(logits, batch, positions, vocab_mask, next_token, on_host, draft_tokens)
        else:
            tokens = _sample_torch(logits, batch, positions, vocab_mask, draft_tokens)
            if next_token is not None:
                next_token[batch.slots] = tokens.clamp(min=0)
        if counts and draft_tokens is None:
            batch.count(tokens)
        packed = None
        if logprobs is not None:
            packed = token_logprobs(raw, tokens.clamp(min=0), logprobs)
        return SamplerOutput(tokens, packed)

    def draw(
        self, logits: torch.Tensor, table: SamplingTable, slots: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Draws draft tokens [R] int64 from logits [R, V] fp32 for request slots [R] at positions [R] as `__call__`
        would: with the temperature, filters and noise of each request, but without its penalties, biases and grammar.
        The launches do not depend on the requests, so it may be captured."""
        assert slots.is_contiguous() and positions.is_contiguous(), "kernels read them without strides"
        everything = SamplingBatch(
            slots, table.table, all_greedy=False, any_top_k=True, any_top_p=True, any_min_p=True, max_top_k=TOP_K_ALL,
            penalties=None, sparse=None,
        )  # fmt: skip
        if self.use_triton:
            return _sample_triton(logits.contiguous(), everything, positions, None)
        if not everything.rows()[:, Column.TEMPERATURE].any():  # on a CPU looking costs nothing, and sorting much
            return _largest(logits)
        return _sample_torch(logits, everything, positions, None)

    def warm_up(self, table: SamplingTable, next_token: torch.Tensor | None) -> None:
        """Compiles the kernels that requests will need, on the padding slot of `table`, which is restored. next_token
        [num_slots] int64: the table that draws write to; None: none, as with speculative decoding."""
        slots = np.zeros(1, dtype=np.int64)
        device, vocab_size = table.device, table.vocab_size
        slots_dev, positions = torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, dtype=torch.int64)
        mask = torch.full((1, -(-vocab_size // BITS)), -1, dtype=torch.int32, device=device)
        kinds = (
            SamplingParams(temperature=0.0),
            SamplingParams(),
            SamplingParams(top_k=20, top_p=0.9, logit_bias={"0": 0.0}),
            SamplingParams(presence_penalty=1.0),
        )
        for params in kinds:
            table.set(0, params, 0, [], [], ())
            for vocab_mask in (None, mask):
                logits = torch.zeros((1, vocab_size), dtype=torch.float32, device=device)
                batch = table.view(slots, slots_dev)
                self(logits, batch, positions.to(device), vocab_mask, next_token=next_token)
        table.clear(0)
        if next_token is not None:
            next_token[0] = 0


def _add_sparse(logits: torch.Tensor, packed: torch.Tensor, positions: torch.Tensor) -> None:
    row, token, amount, limit = packed.unbind(0)
    row = row.long()
    amount = torch.where(positions[row] < limit, amount.view(torch.float32), 0.0)
    logits.view(-1).scatter_add_(0, row * logits.shape[1] + token, amount)


def apply_vocab_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """Sets the tokens whose bit is 0 to -inf, in place; shapes as in `Sampler.__call__`."""
    octets = vocab_mask.contiguous().view(torch.uint8).flatten().int()
    bias = _octet_bias(logits.device).index_select(0, octets).view(len(logits), -1)
    logits.add_(bias[:, : logits.shape[1]])


@functools.cache
def _octet_bias(device: torch.device) -> torch.Tensor:
    """Returns [256, 8] fp32: the bias of eight tokens per mask byte. On a CPU a look-up and an addition take a fifth of
    the time of selecting by bits or flags."""
    octet = torch.arange(256, device=device)
    allowed = (octet[:, None] >> torch.arange(8, device=device)) & 1
    return torch.where(allowed == 1, 0.0, -torch.inf)


def filter_thresholds(logits: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor) -> torch.Tensor:
    """Returns the smallest logit that each row keeps, [B] fp32. Greedy rows keep everything."""
    floats = rows.view(torch.float32)
    temperature = torch.where(floats[:, Column.TEMPERATURE] == 0, 1.0, floats[:, Column.TEMPERATURE])
    limit = min(batch.max_top_k, logits.shape[1])
    if limit <= TOPK_LIMIT:
        ordered = logits.topk(limit, dim=-1).values
    else:
        ordered = logits.sort(dim=-1, descending=True).values
    top_k = rows[:, Column.TOP_K].clamp(max=ordered.shape[1]).long()
    kth = ordered.gather(1, top_k[:, None] - 1)
    # The sums are in double precision so that a row's cut does not move with the width that its batch mates ask for.
    weights = torch.exp((ordered - ordered[:, :1]).double() / temperature[:, None])
    weights *= torch.arange(ordered.shape[1], device=logits.device)[None, :] < top_k[:, None]
    mass = weights.cumsum(dim=-1)
    # Logits tied with the k-th one are kept, so they count, also where the list was cut before them.
    num_tied = (logits >= kth).sum(dim=-1, keepdim=True) - top_k[:, None]
    total = mass[:, -1:] + num_tied * weights.gather(1, top_k[:, None] - 1)
    target = floats[:, Column.TOP_P, None].double() * total
    last = ((mass - weights) < target).logical_and_(weights > 0).sum(dim=-1, keepdim=True).clamp_(min=1) - 1
    threshold = torch.maximum(kth, ordered.gather(1, last))[:, 0]
    keeps_all = (rows[:, Column.TOP_K] == TOP_K_ALL) & (floats[:, Column.TOP_P] >= 1.0)
    threshold = torch.where(keeps_all, -torch.inf, threshold)
    min_p = torch.log(floats[:, Column.MIN_P]) * temperature + ordered[:, 0]
    return torch.maximum(threshold, min_p)


PENALTIES = (Column.REPETITION, Column.FREQUENCY, Column.PRESENCE)


@dataclass(frozen=True, slots=True)
class PenalizedDrafts:
    """Penalized logits of draft tokens, each counted once more, since later rows follow them."""

    index: torch.Tensor  # [B, k - 1] int64, tokens
    logits: torch.Tensor  # [B, k - 1] fp32

    def write(self, logits: torch.Tensor) -> None:
        """Writes them into logits [B, V], which have the penalties of all tokens before the draft tokens; forbidden
        tokens stay forbidden."""
        allowed = logits.gather(1, self.index) > -torch.inf
        logits.scatter_(1, self.index, torch.where(allowed, self.logits, -torch.inf))


def penalized_drafts(logits: torch.Tensor, batch: SamplingBatch, draft_tokens: torch.Tensor) -> PenalizedDrafts:
    """Computes the penalized logits of the draft tokens [D, k - 1], for the rows of `Sampler.__call__` with draft
    tokens, whose logits have no penalties yet."""
    assert batch.penalties is not None
    rows, width = batch.rows(), draft_tokens.shape[1] + 1
    index = draft_tokens.repeat_interleave(width, dim=0)
    state = batch.penalties.state[rows[:, Column.PENALTY_ROW, None].long(), index]
    state = torch.where(
        rows[:, Column.PENALTY_ROW, None] > 0, state + count_draft_tokens(draft_tokens).flatten(0, 1), 0
    )
    values = logits.gather(1, index)
    apply_penalties(values, state, *(rows.view(torch.float32)[:, column] for column in PENALTIES))
    return PenalizedDrafts(index, values)


def _sample_torch(
    logits: torch.Tensor,
    batch: SamplingBatch,
    positions: torch.Tensor,
    vocab_mask: torch.Tensor | None,
    draft_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    if batch.all_greedy and batch.penalties is None and vocab_mask is None:
        return _largest(logits)
    rows = batch.rows()
    floats = rows.view(torch.float32)
    if batch.penalties is not None:
        drafted = None if draft_tokens is None else penalized_drafts(logits, batch, draft_tokens)
        state = batch.penalties.state[rows[:, Column.PENALTY_ROW].long()]
        apply_penalties(logits, state, *(floats[:, column] for column in PENALTIES))
        if drafted is not None:
            drafted.write(logits)
    if vocab_mask is not None:
        apply_vocab_mask(logits, vocab_mask)
    if batch.all_greedy:
        return _largest(logits)
    greedy = floats[:, Column.TEMPERATURE, None] == 0
    noise = gumbel_noise(rows[:, Column.SEED_LO], rows[:, Column.SEED_HI], positions, logits.shape[1])
    scores = torch.where(greedy, logits, logits / floats[:, Column.TEMPERATURE, None] + noise)
    if batch.any_filter:
        scores.masked_fill_(logits < filter_thresholds(logits, batch, rows)[:, None], -torch.inf)
    return _largest(scores)


def _largest(scores: torch.Tensor) -> torch.Tensor:
    """Returns the index of each row's first largest score, [B] int64, or NO_TOKEN."""
    tokens = scores.argmax(dim=-1)  # of a NaN, if there is one
    return torch.where(scores.gather(1, tokens[:, None])[:, 0] > -torch.inf, tokens, NO_TOKEN)


def _sample_triton(
    logits: torch.Tensor,
    batch: SamplingBatch,
    positions: torch.Tensor,
    vocab_mask: torch.Tensor | None,
    next_token: torch.Tensor | None = None,
    on_host: bool = False,
    draft_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    from sglang.srt.layers.triton_ops import sampling as ops

    if batch.penalties is not None or vocab_mask is not None:
        state = None if batch.penalties is None else batch.penalties.state
        drafted = None if draft_tokens is None or state is None else penalized_drafts(logits, batch, draft_tokens)
        ops.adjust_logits(logits, batch.table, batch.slots, state, vocab_mask)
        if drafted is not None:
            drafted.write(logits)
    thresholds = None
    if not batch.all_greedy and batch.any_filter:
        thresholds = ops.filter_thresholds(logits, batch.table, batch.slots)
    drawn = batch.table, batch.slots, positions, thresholds, batch.all_greedy, next_token
    return ops.draw_tokens(logits, *drawn, on_host)
