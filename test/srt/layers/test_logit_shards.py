"""The largest logits of several ranks' columns are those of the whole rows: with ties, NaN, infinities, and columns
that do not divide. What is sampled of whole rows does not depend on which ranks have them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import torch

from sglang.srt.distributed.groups import Group
from sglang.srt.layers.embedding import LMHead, _vocab_rows
from sglang.srt.layers.sampler import Sampler, _largest
from sglang.srt.sampling.logprobs import LogprobRequest
from sglang.srt.sampling.sampling_params import NO_TOKEN, SamplingParams
from sglang.srt.sampling.sampling_table import SamplingTable

VOCABULARIES = (5, 64, 97)
"""Of five tokens the last of four ranks has none."""


class Threads(Group):
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, barrier: Barrier, given: list[torch.Tensor | None]) -> None:
        super().__init__(rank, barrier.parties)
        self.barrier, self.given = barrier, given

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        self.given[self.rank] = x
        self.barrier.wait(300)
        gathered = torch.cat([each for each in self.given if each is not None], dim)
        self.barrier.wait(300)
        return gathered

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        assert len(x) == self.size
        self.given[self.rank] = x
        self.barrier.wait(300)
        received = torch.stack([each[self.rank] for each in self.given if each is not None])
        self.barrier.wait(300)
        return received


class ColumnsOf(LMHead):
    """A head whose hidden states are the whole logits."""

    def __init__(self, vocab_size: int, group: Group, padded: bool) -> None:
        self.vocab_size, self.cap, self.scale, self.group = vocab_size, 0.0, 1.0, group
        self.rows = rows = _vocab_rows(group, vocab_size)
        missing = rows.padded_count - rows.count if padded else 0
        self.product = lambda hidden: torch.nn.functional.pad(hidden[:, rows.run], (0, missing), value=1e9)


def rows_of(vocab_size: int) -> torch.Tensor:
    """[R, V] of everything that can go wrong."""
    generator = torch.Generator().manual_seed(vocab_size)
    rows = torch.randn(40, vocab_size, generator=generator)
    rows[:10] = torch.randint(0, 3, (10, vocab_size), generator=generator).float()  # ties within and between ranks
    rows[10] = 1.5
    rows[11] = -torch.inf
    for i in range(12, 20):
        rows[i, torch.randint(vocab_size, (1,), generator=generator)] = torch.nan
    rows[20:24] = -torch.inf
    for i in range(21, 24):
        rows[i, (i * 31) % vocab_size] = -3.0
    rows[24, :: max(1, vocab_size // 3)] = torch.inf
    rows[25, -1], rows[25, 0] = torch.nan, torch.inf
    return rows


def check(group: Threads) -> None:
    for vocab_size in VOCABULARIES:
        rows = rows_of(vocab_size)
        wanted = _largest(rows)
        assert (wanted == NO_TOKEN).sum() > 8 and wanted[10] == 0 and wanted[12] == NO_TOKEN
        for padded in (True, False):
            head = ColumnsOf(vocab_size, group, padded)
            shard = head.of_step(rows)
            assert head.is_shard(shard) and not head.is_shard(head.of_step(rows[:3]))
            assert torch.equal(head.first_largest(shard), wanted), (vocab_size, padded)
            for whole, few in ((head.whole(shard), rows), (head(rows), rows), (head.of_step(rows[:3]), rows[:3])):
                assert torch.equal(whole.nan_to_num(7.0), few.nan_to_num(7.0))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_the_first_of_the_largest(size: int) -> None:
    barrier, given = Barrier(size), [None] * size
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(check, [Threads(rank, barrier, given) for rank in range(size)]))


def check_rows(group: Threads) -> None:
    """Shares of rows are the rows of the whole, in order; those of one request stay together."""
    for vocab_size in VOCABULARIES:
        rows = rows_of(vocab_size)
        head = ColumnsOf(vocab_size, group, padded=False)
        for width, count in ((1, 40), (1, 17), (4, 40), (5, 40), (20, 40)):
            shard = head.of_step(rows[:count])
            share = head.whole_share(shard, width)
            assert share.rows.start % width == 0 and share.rows.stop - share.rows.start == len(share.logits)
            assert torch.equal(share.logits.nan_to_num(7.0), rows[:count][share.rows].nan_to_num(7.0))
            assert torch.equal(share.gather(torch.arange(count)[share.rows]), torch.arange(count))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_shares_of_rows(size: int) -> None:
    barrier, given = Barrier(size), [None] * size
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(check_rows, [Threads(rank, barrier, given) for rank in range(size)]))


def test_rows_are_sampled_alike_whoever_has_them() -> None:
    """Filters, biases, penalties, masks and log probabilities of some rows of a batch."""
    vocab_size, count = 64, 24
    table = SamplingTable(count + 1, vocab_size, "cpu")
    for i in range(count):
        params = SamplingParams(
            temperature=(0.0, 0.7, 1.3)[i % 3],
            top_k=(-1, 5)[i % 2],
            top_p=(1.0, 0.8)[i // 2 % 2],
            min_p=(0.0, 0.1)[i // 4 % 2],
            frequency_penalty=(0.0, 1.5)[i // 3 % 2],
            logit_bias={str(i): 3.0} if i % 5 == 0 else {},
            sampling_seed=i,
        )
        table.set(i + 1, params, i, [1, 2, 2], [3], ())
    slots = np.arange(1, count + 1)
    logits, positions = torch.randn(count, vocab_size) * 3, torch.arange(count)
    mask = torch.randint(-(2**31), 2**31 - 1, (count, 2), dtype=torch.int32)
    sampler = Sampler(use_triton=False)
    batch = table.view(slots, torch.from_numpy(slots))
    asked = LogprobRequest([i % 4 for i in range(count)], [[i, 5][: i % 3] for i in range(count)])
    of_drafts = LogprobRequest([2, 0, 3], [[], [1], [4, 4]], row_requests=np.arange(count) // 8)
    for request in (asked, of_drafts):
        whole = sampler(logits.clone(), batch, positions, mask, request, counts=False)
        parts = [range(7), range(7, 8), range(8, 24)]
        shares = []
        for part in parts:
            rows = slice(part.start, part.stop)
            of_rows = batch.part(rows), positions[rows], mask[rows], request.part(part)
            shares.append(sampler(logits[rows].clone(), *of_rows, counts=False))
        assert torch.equal(torch.cat([share.next_token_ids for share in shares]), whole.next_token_ids)
        packed = [share.logprobs for share in shares if share.logprobs is not None]
        assert whole.logprobs is not None and len(packed) == len(parts)
        assert torch.equal(torch.cat([*packed, request.no_rows(vocab_size, "cpu")]), whole.logprobs)
    tokens = whole.next_token_ids
    batch.count(tokens)
    changed = sampler(logits.clone(), batch, positions, mask, counts=False).next_token_ids
    assert not torch.equal(changed, tokens), "what was drawn counts"
