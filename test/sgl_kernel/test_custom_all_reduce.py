"""CustomAllReduce among processes, over the collectives compiled for the CPU and memory that the processes share."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from srt.distributed.test_quantized_sums import partial_sum, reference, shape_of

from sgl_kernel.conftest import PACKAGE, load_file
from sglang.srt.distributed.custom_all_reduce import (
    TWO_SHOT_E4M3,
    CustomAllReduce,
    IpcWorkspaces,
    PeerMemoryError,
    StalledPeer,
    data_vectors_for,
    exchange,
)
from sglang.srt.distributed.quantized_sums import QuantizedSums, TorchCodec
from sglang.srt.kernels.all_reduce_table import KIB, ExchangeRange, SizeRange
from sglang.srt.layers import native_ops

SIZE_RANGES = tuple(
    SizeRange(frozenset(), frozenset(), algorithm, max_bytes, "")
    for algorithm, max_bytes in (("packed", 2 * KIB), ("one_shot", 8 * KIB), ("two_shot", 64 * KIB))
)
PARTS = ExchangeRange(frozenset(), frozenset(), KIB, KIB, "")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def collectives(library: str):
    return load_file(PACKAGE / "sm120_sgl_kernel" / "collectives.py").Collectives(Path(library))


def joined(rank: int, ranks: int, folder: str) -> dist.ProcessGroup:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def values(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def summed(seed: int, ranks: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    total = torch.zeros(shape)
    for rank in range(ranks):
        total += values(seed + rank, shape, dtype).float()
    return total.to(dtype)


def serve(rank: int, ranks: int, folder: str, library: str) -> None:
    group = joined(rank, ranks, folder)
    assert exchange(group, bytes([rank]) * rank) == [bytes([r]) * r for r in range(ranks)]
    loaded = collectives(library)
    workspaces = IpcWorkspaces(loaded, group, rank, data_vectors_for(SIZE_RANGES, ranks, loaded.ROW_VECTORS))
    reduce = CustomAllReduce(loaded, workspaces, SIZE_RANGES, deadline=60)
    assert not reduce.can_serve(64 * KIB + 16) and not reduce.can_serve(0) and not reduce.can_serve(40)
    assert reduce.algorithm_for(2 * KIB) == "packed" and reduce.algorithm_for(64 * KIB) == "two_shot"
    rng = random.Random(3)
    for number in range(24):
        dtype, seed = rng.choice(DTYPES), 100 * number
        shape = (rng.randrange(1, 6), 16 * rng.randrange(1, 60))
        x = values(seed + rank, shape, dtype)
        wanted = summed(seed, ranks, shape, dtype)
        if rng.random() < 0.5:
            assert reduce.can_serve_tensor(x) and reduce.all_reduce(x) is x
            assert torch.equal(x, wanted)
            continue
        assert reduce.can_norm(x)
        weight = values(seed + 50, shape[1:], rng.choice((dtype, torch.float32)))
        residual = values(seed + 51, shape, dtype) if rng.random() < 0.7 else None
        if residual is not None:
            wanted = (wanted.float() + residual.float()).to(dtype)
        normed, total = reduce.all_reduce_add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(total, wanted) and (residual is None or total is residual)
        torch.testing.assert_close(normed, native_ops.rmsnorm(wanted, weight, 1e-5), rtol=1e-2, atol=1e-3)
    refused = (x.new_zeros(4, 17), x.to(torch.float64), x.new_zeros(32, 32)[:, :16], x.new_zeros(1 << 20))
    assert not any(reduce.can_serve_tensor(each) for each in refused)
    too_long, too_many = torch.zeros(1, 2056, dtype=torch.bfloat16), torch.zeros(65, 8, dtype=torch.bfloat16)
    assert not any(reduce.can_norm(each) for each in (x.new_zeros(64), too_long, too_many))
    assert reduce.can_serve_tensor(too_long) and reduce.can_norm(too_long[:, :2048].contiguous())
    reduce.raise_if_stalled()
    reduce.close()
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_and_norms(ranks: int, tmp_path: Path, cpu_collectives: Path) -> None:
    before = set(Path("/dev/shm").glob("all_reduce_on_cpu*"))
    run_ranks(serve, (ranks, str(tmp_path), str(cpu_collectives)), ranks)
    assert set(Path("/dev/shm").glob("all_reduce_on_cpu*")) == before


def serve_exchanges(rank: int, ranks: int, folder: str, library: str) -> None:
    """Between sums, of every type, packed and by flags, from memory that lies anywhere."""
    group = joined(rank, ranks, folder)
    loaded, max_bytes = collectives(library), 16 * KIB
    parts = ExchangeRange(frozenset(), frozenset(), 2 * KIB, max_bytes, "")
    workspaces = IpcWorkspaces(loaded, group, rank, data_vectors_for(SIZE_RANGES, ranks, loaded.ROW_VECTORS, parts))
    peers = CustomAllReduce(loaded, workspaces, SIZE_RANGES, deadline=60, parts=parts)
    rng = random.Random(5)
    for number in range(24):
        dtype, seed = rng.choice((*DTYPES, torch.int32, torch.uint8)), 100 * number
        shape = (rng.randrange(1, 5), 16 * rng.randrange(1, 60))
        every = [(100 * values(seed + r, (ranks, *shape), torch.float32)).to(dtype) for r in range(ranks)]
        assert peers.can_exchange(every[0][0]) and torch.equal(
            peers.exchange(every[rank].clone()), torch.stack([each[rank] for each in every])
        )
        moved = torch.empty(ranks * shape[0] * shape[1] + 3, dtype=dtype)[3:].view(ranks, *shape).copy_(every[rank])
        assert torch.equal(peers.gather(moved[0].T), torch.stack([each[0].T for each in every]))
        x = values(seed + rank, (2, 16), torch.bfloat16)
        assert torch.equal(peers.all_reduce(x), summed(seed, ranks, (2, 16), torch.bfloat16))
    largest = torch.full((max_bytes,), rank, dtype=torch.uint8)
    assert torch.equal(peers.gather(largest), torch.arange(ranks, dtype=torch.uint8)[:, None].expand(-1, max_bytes))
    refused = (largest[:17], torch.zeros(0), torch.zeros(max_bytes + 16, dtype=torch.uint8))
    assert not any(peers.can_exchange(each) for each in refused)
    peers.raise_if_stalled()
    peers.close()
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_arrive_as_they_are(ranks: int, tmp_path: Path, cpu_collectives: Path) -> None:
    run_ranks(serve_exchanges, (ranks, str(tmp_path), str(cpu_collectives)), ranks)


def serve_in_e4m3(rank: int, ranks: int, folder: str, library: str) -> None:
    """The kernel's bits are those of the reference, in place, in one piece and in several."""
    group = joined(rank, ranks, folder)
    loaded, max_bytes = collectives(library), 8 * KIB
    rows = [*SIZE_RANGES, SizeRange(frozenset(), frozenset(), TWO_SHOT_E4M3, max_bytes, "")]
    workspaces = IpcWorkspaces(loaded, group, rank, data_vectors_for(rows, ranks, loaded.ROW_VECTORS))
    reduce = CustomAllReduce(loaded, workspaces, SIZE_RANGES, deadline=60, e4m3_bytes=max_bytes)
    sums = QuantizedSums(group, TorchCodec(), 0, 1, max_bytes, reduce)
    for seed in range(5):
        dtype, (rows, hidden) = DTYPES[seed % 2], shape_of(seed)
        every = [partial_sum(seed, other, (3 * rows, hidden), dtype) for other in range(ranks)]
        if seed == 4:
            every[-1][0, 5] = torch.inf
        x = every[rank].clone()
        assert reduce.can_sum_in_e4m3(x) and sums.all_reduce(x) is x
        torch.testing.assert_close(x, reference(every), rtol=0, atol=0, equal_nan=True)
        first = [each[:1].nan_to_num(0.0, 0.0) for each in every]
        assert torch.equal(reduce.all_reduce(first[rank].clone()), sum_of(first)), "exact sums in between"
    refused = (x.float(), x[:, : hidden // 2], torch.zeros(20, dtype=dtype))
    assert not any(reduce.can_sum_in_e4m3(each) for each in refused)
    without = CustomAllReduce(loaded, workspaces, SIZE_RANGES, deadline=60)
    assert not without.can_sum_in_e4m3(x)
    reduce.raise_if_stalled()
    reduce.close()
    dist.destroy_process_group()


def sum_of(every: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(every[0].shape)
    for x in every:
        total += x.float()
    return total.to(every[0].dtype)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_sums_in_e4m3(ranks: int, tmp_path: Path, cpu_collectives: Path) -> None:
    run_ranks(serve_in_e4m3, (ranks, str(tmp_path), str(cpu_collectives)), ranks)


def stay_away(rank: int, ranks: int, folder: str, library: str, gathers: bool) -> None:
    group = joined(rank, ranks, folder)
    loaded = collectives(library)
    workspaces = IpcWorkspaces(loaded, group, rank, data_vectors_for(SIZE_RANGES, ranks, loaded.ROW_VECTORS))
    reduce = CustomAllReduce(loaded, workspaces, SIZE_RANGES, deadline=0.2, parts=PARTS)
    if rank != 1:
        x = reduce.gather(torch.ones(64)) if gathers else reduce.all_reduce(torch.ones(64))
        assert x[1 if gathers else slice(None)].isnan().all()
        with pytest.raises(StalledPeer, match=f"rank {rank} waited for rank 1 in a collective"):
            reduce.raise_if_stalled()
    dist.barrier()
    reduce.close()


@pytest.mark.parametrize("gathers", [False, True])
def test_a_rank_that_stays_away_is_named(tmp_path: Path, cpu_collectives: Path, gathers: bool) -> None:
    run_ranks(stay_away, (3, str(tmp_path), str(cpu_collectives), gathers), 3)


def refuse(rank: int, ranks: int, folder: str, library: str, what: str) -> None:
    group = joined(rank, ranks, folder)
    loaded = collectives(library)
    if rank == 1:

        def fail(*args: object) -> None:
            raise RuntimeError("no peer access")

        setattr(loaded, what, fail)
    with pytest.raises(PeerMemoryError, match="rank 1: .*no peer access"):
        IpcWorkspaces(loaded, group, rank, 64)
    time.sleep(0.1)
    dist.barrier()


@pytest.mark.parametrize("what", ["allocate", "open"])
def test_all_ranks_learn_that_memory_cannot_be_shared(what: str, tmp_path: Path, cpu_collectives: Path) -> None:
    before = set(Path("/dev/shm").glob("all_reduce_on_cpu*"))
    run_ranks(refuse, (2, str(tmp_path), str(cpu_collectives), what), 2)
    assert set(Path("/dev/shm").glob("all_reduce_on_cpu*")) == before
