from __future__ import annotations

import os
from collections import deque
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks

from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.groups import Group, groups_of
from sglang.srt.plan.ranks import RankLayout, even_slice
from srt.distributed.library_exchanges import LibraryExchanges

PAYLOADS = [b"", b"x", *((bytes(range(256)) * 4)[: 1015 + i] for i in range(3)), bytes(range(256)) * 1000]


class _OfVectors:
    """Serves four values."""

    def can_serve_tensor(self, x: torch.Tensor) -> bool:
        return x.numel() == 4

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x * 100


def _rank(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    groups = parallel_state.init(RankLayout(size), rank, "gloo", f"file://{folder}/rendezvous")
    assert groups is parallel_state.groups()
    assert (parallel_state.tp_rank(), parallel_state.tp_size()) == (rank, size)
    with pytest.raises(RuntimeError, match="initialized already"):
        parallel_state.init(RankLayout(size), rank, "gloo", f"file://{folder}/rendezvous")

    for group in (groups.tp, groups.attention, groups.experts):
        x = torch.full((3, 2), float(rank + 1))
        assert torch.equal(group.all_reduce(x), torch.full((3, 2), float(sum(range(1, size + 1)))))

    mine = torch.arange(6.0).view(2, 3) + 10 * rank
    every = [torch.arange(6.0).view(2, 3) + 10 * r for r in range(size)]
    for dim in (0, 1, -1):
        assert torch.equal(groups.tp.all_gather(mine, dim), torch.cat(every, dim))
    assert torch.equal(groups.tp.all_gather(mine.T, 0), torch.cat([t.T for t in every], 0))
    parts = torch.arange(size * 3).view(size, 3)
    expected = torch.stack([parts[rank] + 100 * other for other in range(size)])
    assert torch.equal(groups.tp.exchange(parts + 100 * rank), expected)
    assert torch.equal(groups.tp.exchange((parts + 100 * rank).T.contiguous().T), expected)

    for_each = torch.arange(4.0 * size).view(size, 2, 2) + 100 * rank
    expected_share = torch.arange(4.0 * size).view(size, 2, 2)[rank] * size + 100 * sum(range(size))
    assert torch.equal(groups.tp.reduce_scatter(for_each), expected_share)

    peers = LibraryExchanges(groups.tp, 64)
    groups.tp.exchange_with(peers)
    values = torch.arange(8.0).view(2, 4) - 10 * rank
    everyones = [torch.arange(8.0).view(2, 4) - 10 * r for r in range(size)]
    for dim in (0, 1, -1):
        assert torch.equal(groups.tp.all_gather(values.clone(), dim), torch.cat(everyones, dim))
        assert torch.equal(groups.tp.all_gather(values.T, dim), torch.cat([t.T for t in everyones], dim))
        assert torch.equal(groups.tp.all_gather_rows(values.long()), torch.cat(everyones).long())
    assert peers.count == 9
    assert torch.equal(groups.tp.reduce_scatter(for_each.clone()), expected_share) and peers.count == 10
    for_me = torch.stack([values[rank % 2] - 10 * (r - rank) for r in range(size)])
    assert torch.equal(groups.tp.exchange(values[:size].clone()), for_me) and peers.count == 11
    assert torch.equal(groups.tp.all_gather(values.repeat(4, 1), 0), torch.cat([t.repeat(4, 1) for t in everyones]))
    assert torch.equal(groups.tp.all_gather(values[0, :3], 0), torch.cat([t[0, :3] for t in everyones]))
    assert peers.count == 11, "many bytes, and what is no vector, are the library's"

    groups.experts.reduce_with(_OfVectors())
    assert groups.tp.all_reduce(torch.ones(4)).tolist() == [100] * 4, "one group by another name"
    assert groups.tp.all_reduce(torch.ones(3)).tolist() == [size] * 3, "what it does not serve is the library's"

    sent: list[int] = []
    broadcast = dist.broadcast
    dist.broadcast = lambda tensor, **more: (sent.append(tensor.numel()), broadcast(tensor, **more))
    for data in PAYLOADS:
        assert parallel_state.broadcast_bytes(data if rank == 0 else None) == data
    dist.broadcast = broadcast
    assert sent == [1024, 1024, 1024, 1024, 1024, 1, 1024, 256_000 - 1016], "what is short is one message"
    assert parallel_state.min_over_ranks(5 - rank) == 5 - (size - 1)
    assert (
        parallel_state.all_reduce_min([rank, -rank, 7]) == [0, 1 - size, 7] and parallel_state.all_reduce_min([]) == []
    )
    parallel_state.shutdown()
    assert parallel_state.tp_size() == 1


def test_collectives(tmp_path: Path) -> None:
    run_ranks(_rank, (2, str(tmp_path)), 2)


def _listening_rank(rank: int, size: int, folder: str) -> None:
    parallel_state.init(RankLayout(size), rank, "gloo", f"file://{folder}/rendezvous")
    # What the host's name stands for is the machine's business: here it may be the loopback address anyway.
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    listening = [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert listening and set(listening) <= {"127.0.0.1", "::1"}
    parallel_state.broadcast_bytes(b"" if rank == 0 else None)  # none leaves before the other has looked
    parallel_state.shutdown()


def test_ranks_listen_on_no_address_that_others_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    run_ranks(_listening_rank, (2, str(tmp_path)), 2)


def _nccl_rank(rank: int, size: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    group = parallel_state.init(RankLayout(size), rank, "nccl", f"file://{folder}/rendezvous").tp
    x = torch.zeros(1024, device="cuda", dtype=torch.bfloat16)
    out = group.all_reduce(x + 1)  # the first call of a communicator may not be captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = group.all_reduce(x + rank)
        gathered = group.all_gather(x[:4].view(2, 2) + rank)
    for step in (1.0, 2.0):
        x.fill_(step)
        graph.replay()
        assert (out == size * step + sum(range(size))).all()
        assert gathered[0].tolist() == [step + r for r in range(size) for _ in range(2)]
    assert parallel_state.broadcast_bytes(b"host" if rank == 0 else None) == b"host"
    del graph
    parallel_state.shutdown()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_collectives_in_a_cuda_graph(tmp_path: Path) -> None:
    run_ranks(_nccl_rank, (2, str(tmp_path)), 2)


def test_one_rank_creates_no_group_and_copies_nothing() -> None:
    groups = parallel_state.init(RankLayout(), 0, "nccl", "tcp://nowhere:1")
    assert not dist.is_initialized()
    x = torch.ones(2)
    assert groups.tp.all_reduce(x) is x
    assert groups.tp.all_gather(x) is x
    assert parallel_state.broadcast_bytes(b"abc") == b"abc"
    parallel_state.shutdown()


def test_a_rank_outside_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 2 is not in 0\.\.1"):
        parallel_state.init(RankLayout(2), 2, "gloo", "tcp://127.0.0.1:1")


def test_neighbours_share_the_dims_of_their_experts() -> None:
    groups = [groups_of(RankLayout(8, 4), rank) for rank in range(8)]
    assert [(g.ep.rank, g.expert_tp.rank) for g in groups] == [(r // 2, r % 2) for r in range(8)]
    assert {(g.ep.size, g.expert_tp.size, g.tp.size) for g in groups} == {(4, 2, 8)}
    assert all(g.experts is g.tp and g.attention is g.tp and g.tp.rank == r for r, g in enumerate(groups))


def test_stages_have_groups_of_their_own() -> None:
    """TP 2 x PP 3: ranks 0 and 1 are the first stage; rank 4, the first of the last one, answers."""
    layout = RankLayout(2, 2, 3)
    groups = [groups_of(layout, rank) for rank in range(layout.world_size)]
    assert [(g.tp.rank, g.tp.size, g.pp.rank, g.pp.size) for g in groups] == [(r % 2, 2, r // 2, 3) for r in range(6)]
    assert [(g.ep.rank, g.expert_tp.size) for g in groups] == [(r % 2, 1) for r in range(6)]
    assert layout.leader == 4 and layout.name(4) == "PP2 TP0" and RankLayout(2).name(1) == "TP1"


def test_ranks_that_share_out_tokens_are_neighbours() -> None:
    """TP 4 x DCP 2 in two stages."""
    layout = RankLayout(4, pp_size=2, dcp_size=2)
    groups = [groups_of(layout, rank) for rank in range(layout.world_size)]
    assert [(g.context.rank, g.context.size) for g in groups] == [(rank % 2, 2) for rank in range(8)]
    assert layout.flags == "--tp-size 4 --pp-size 2 --dcp-size 2" and groups_of(RankLayout(4), 3).context.size == 1


def _stage_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    layout = RankLayout(pp_size=3)
    groups = parallel_state.init(layout, rank, "gloo", f"file://{folder}/rendezvous")
    pp = groups.pp
    assert parallel_state.is_leader() == (rank == 2) and (parallel_state.tp_size(), parallel_state.num_ranks()) == (
        1,
        3,
    )
    x = torch.full((2, 3), 1.0) if pp.rank == 0 else pp.receive_from_previous(torch.empty(2, 3))
    if pp.rank < 2:
        pp.send_to_next(x + 1)
    assert pp.from_last(x).tolist() == [[3.0] * 3] * 2
    _steps_one_behind_the_other(pp, groups.pp_tokens)
    assert parallel_state.broadcast_bytes(b"said" if rank == 2 else None) == b"said", "by the leader"
    assert parallel_state.min_over_ranks(5 - rank) == 3
    parallel_state.shutdown()


def _steps_one_behind_the_other(pp: Group, tokens: Group) -> None:
    """The first stage is two steps ahead when it takes what the last one made of a step."""
    late = deque()
    for step in range(20):
        x = torch.full((50, 1000), float(step)) if pp.rank == 0 else pp.receive_from_previous(torch.empty(50, 1000))
        if pp.rank < 2:
            pp.send_to_next(x + 1)
            late.append(step)
        else:
            tokens.from_last(x[:3].clone())
        while len(late) > 2 or (late and step == 19):
            assert tokens.from_last(torch.empty(3, 1000)).eq(late.popleft() + 2).all()


def test_what_is_handed_from_stage_to_stage(tmp_path: Path) -> None:
    run_ranks(_stage_rank, (str(tmp_path),), 3)


def test_runs_that_do_not_divide_cover_everything_once() -> None:
    for total in (1, 5, 8, 160):
        for size in (1, 2, 3, 6):
            runs = [even_slice(total, rank, size) for rank in range(size)]
            assert [i for run in runs for i in range(run.start, run.stop)] == list(range(total))
            lengths = {run.stop - run.start for run in runs}
            assert max(lengths) == RankLayout(size, size).padded_experts(total) and max(lengths) - min(lengths) <= 1
