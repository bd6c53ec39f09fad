"""The ways in which ranks exchange parts of a softmax, over gloo: messages, and weighted parts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rank_processes import run_ranks

from sglang.srt.configs.merge_methods import MERGE_METHODS
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.attention.part_merge import PartMerge
from sglang.srt.plan.ranks import RankLayout
from srt.distributed.library_exchanges import LibraryExchanges

TOKENS, HEADS, DIMS = 3, 4, 16
COUNTS = {"a2a": 4, "ag_rs": 7}
"""Exchanges of two steps, one of them with sinks: queries and parts; or queries, sums, parts, and once sinks."""


def _rank(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    group = parallel_state.init(RankLayout(size, dcp_size=size), rank, "gloo", f"file://{folder}/meeting").context
    generator = torch.Generator().manual_seed(7)
    keys = torch.randn((size, TOKENS, 5, DIMS), generator=generator)
    queries = torch.randn((size, TOKENS, HEADS, DIMS), generator=generator)
    sinks = torch.randn((size, HEADS), generator=generator)

    def attend(q: torch.Tensor, parts: torch.Tensor, lse: torch.Tensor) -> None:
        scores = q @ keys[rank].transpose(1, 2)
        if rank == 0:
            scores[1] = float("-inf")  # of this token the first rank has none
        lse.copy_(scores.logsumexp(-1))
        parts.copy_(scores.softmax(-1) @ keys[rank])  # no numbers where there is no token

    everything = keys.transpose(0, 1).flatten(1, 2)
    scores = queries[rank] @ everything.transpose(1, 2)
    scores[1, :, :5] = float("-inf")
    for method in MERGE_METHODS:
        for most in (0, 1 << 20):
            peers = LibraryExchanges(group, most)
            group.exchange_with(peers)
            merge = PartMerge(SimpleNamespace(merge_method=method, entry=lambda op: op.reference))
            for extra in (None, sinks[rank]):
                out = torch.full((TOKENS, HEADS, DIMS), float("nan"))
                merge.attend(queries[rank].clone(), attend, out, extra)
                logits = scores if extra is None else torch.cat((scores, extra.expand(TOKENS, -1)[..., None]), -1)
                wanted = logits.softmax(-1)[..., : everything.shape[1]] @ everything
                torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
            assert peers.count == (COUNTS[method] if most else 0), f"{method}: what is small goes by peers' memory"
    parallel_state.shutdown()


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_exchange_parts(size: int, tmp_path: Path) -> None:
    run_ranks(_rank, (size, str(tmp_path)), size)
