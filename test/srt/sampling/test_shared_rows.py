"""Ranks that sample a share of the rows each draw the tokens of one rank, and these are distributed as the reference
says: 100,000 draws of every filter, and of what they are combined with."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_table import Column, SamplingBatch, SamplingTable
from srt.layers.test_logit_shards import ColumnsOf, Threads
from srt.sampling.reference import adjusted_logits, distribution
from srt.sampling.test_sampler import PROMPT, STOPS, VARIANTS, VOCAB, assert_drawn_from, rows_of_logits, table_of

REQUESTS, ROUNDS = 2000, 50
RANKS = 4
OUTPUT = [7, 7, 9]


def sampled_by_shares(logits: torch.Tensor, batch: SamplingBatch, positions: torch.Tensor) -> torch.Tensor:
    """logits [B, V] -> tokens [B], of which each rank draws some from the columns of all."""
    barrier, given = Barrier(RANKS), [None] * RANKS

    def tokens_of(rank: int) -> torch.Tensor:
        head = ColumnsOf(VOCAB, Threads(rank, barrier, given), padded=False)
        share = head.whole_share(head.of_step(logits), 1)
        rows = share.rows
        drawn = Sampler(use_triton=False)(share.logits, batch.part(rows), positions[rows], counts=False)
        return share.gather(drawn.next_token_ids)

    with ThreadPoolExecutor(RANKS) as pool:
        of_ranks = list(pool.map(tokens_of, range(RANKS)))
    assert all(torch.equal(tokens, of_ranks[0]) for tokens in of_ranks)
    return of_ranks[0]


def with_seeds_of(table: SamplingTable, number: int) -> SamplingBatch:
    """All requests, with seeds that no other number gives them."""
    slots = torch.arange(1, REQUESTS + 1)
    batch = table.view(slots.numpy(), slots)
    table.table[:, Column.SEED_HI] = number
    return batch


@pytest.mark.parametrize("name", VARIANTS)
def test_shares_draw_what_one_rank_draws_from_the_reference_distribution(name: str) -> None:
    params = VARIANTS[name]
    row = rows_of_logits(1, seed=len(name))
    expected = distribution(adjusted_logits(row[0].numpy(), params, PROMPT, OUTPUT, STOPS), params)
    table = table_of([params] * REQUESTS, OUTPUT, seeds=[7919 * i for i in range(REQUESTS)])
    logits, positions = row.repeat(REQUESTS, 1), torch.full((REQUESTS,), len(PROMPT) + len(OUTPUT))
    drawn: list[int] = []
    for number in range(ROUNDS):
        batch = with_seeds_of(table, number)
        tokens = Sampler(use_triton=False)(logits.clone(), batch, positions, counts=False).next_token_ids
        if number % 10 == 0:
            assert torch.equal(sampled_by_shares(logits, batch, positions), tokens)
        drawn += tokens.tolist()
    assert len(drawn) == 100_000
    assert_drawn_from(drawn, expected)
