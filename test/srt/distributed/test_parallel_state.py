from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sglang.srt.distributed import parallel_state

PAYLOADS = [b"", b"x", bytes(range(256)) * 1000]


def _rank(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    parallel_state.init(rank, size, "gloo", f"file://{folder}/rendezvous")
    assert (parallel_state.tp_rank(), parallel_state.tp_size()) == (rank, size)
    with pytest.raises(RuntimeError, match="initialized already"):
        parallel_state.init(rank, size, "gloo", f"file://{folder}/rendezvous")

    x = torch.full((3, 2), float(rank + 1))
    assert torch.equal(parallel_state.all_reduce(x), torch.full((3, 2), float(sum(range(1, size + 1)))))

    mine = torch.arange(6.0).view(2, 3) + 10 * rank
    every = [torch.arange(6.0).view(2, 3) + 10 * r for r in range(size)]
    for dim in (0, 1, -1):
        assert torch.equal(parallel_state.all_gather(mine, dim), torch.cat(every, dim))
    assert torch.equal(parallel_state.all_gather(mine.T, 0), torch.cat([t.T for t in every], 0))

    for data in PAYLOADS:
        assert parallel_state.broadcast_bytes(data if rank == 0 else None) == data
    assert parallel_state.least(5 - rank) == 5 - (size - 1)
    assert parallel_state.least_each([rank, -rank, 7]) == [0, 1 - size, 7] and parallel_state.least_each([]) == []
    parallel_state.shutdown()
    assert parallel_state.tp_size() == 1


def test_collectives(tmp_path: Path) -> None:
    mp.spawn(_rank, (2, str(tmp_path)), nprocs=2)


def _nccl_rank(rank: int, size: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    parallel_state.init(rank, size, "nccl", f"file://{folder}/rendezvous")
    x = torch.zeros(1024, device="cuda", dtype=torch.bfloat16)
    out = parallel_state.all_reduce(x + 1)  # the first call of a communicator may not be captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = parallel_state.all_reduce(x + rank)
        gathered = parallel_state.all_gather(x[:4].view(2, 2) + rank)
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
    mp.spawn(_nccl_rank, (2, str(tmp_path)), nprocs=2)


def test_one_rank_creates_no_group_and_copies_nothing() -> None:
    parallel_state.init(0, 1, "nccl", "tcp://nowhere:1")
    assert not dist.is_initialized()
    x = torch.ones(2)
    assert parallel_state.all_reduce(x) is x
    assert parallel_state.all_gather(x) is x
    assert parallel_state.broadcast_bytes(b"abc") == b"abc"
    parallel_state.shutdown()


def test_a_rank_outside_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tp_rank 2 is not in 0\.\.1"):
        parallel_state.init(2, 2, "gloo", "tcp://127.0.0.1:1")
