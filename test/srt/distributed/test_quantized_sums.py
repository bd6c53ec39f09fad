"""Sums that travel as e4m3: the error stays within the bound, all ranks have the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks

from sglang.srt.distributed.quantized_sums import GROUP, WIRE, QuantizedSums, TorchCodec, error_bound

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of values on their way through GPUs, and of those on CPUs."""


def partial_sum(seed: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Groups of very different sizes, in every third case with outliers, zeros and groups of zeros."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(shape, generator=generator)
    reach = (-4, 3) if dtype == torch.float16 else (-5, 4)
    sizes = torch.randint(*reach, (x.numel() // GROUP,), generator=generator)
    x *= (10.0**sizes).repeat_interleave(GROUP).view(shape)
    if seed % 3 == 0:
        flat = x.view(-1)
        flat[torch.randint(0, flat.numel(), (5,), generator=generator)] *= 50.0
        flat[torch.randint(0, flat.numel(), (9,), generator=generator)] = 0.0
        flat[: GROUP * (seed % 2)] = 0.0
    return x.clamp(-30_000, 30_000).to(dtype)


def shape_of(seed: int) -> tuple[int, int]:
    generator = torch.Generator().manual_seed(seed)
    return int(torch.randint(1, 20, (), generator=generator)), GROUP * int(torch.randint(1, 9, (), generator=generator))


def reference(every: list[torch.Tensor]) -> torch.Tensor:
    """The sum without ranks and shares: every value encoded, decoded, added in order, encoded, decoded."""
    codec, total = TorchCodec(), torch.zeros(every[0].numel())
    for x in every:
        total += through(codec, x.flatten(), torch.float32)
    return through(codec, total, every[0].dtype).view(every[0].shape)


def through(codec: TorchCodec, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    message = torch.empty((1, x.numel() // GROUP * WIRE), dtype=torch.uint8)
    codec.encode(x, message)
    out = torch.empty(x.shape, dtype=dtype)
    codec.decode(message, out)
    return out


def check_round(sums: QuantizedSums, rank: int, ranks: int, seed: int) -> None:
    dtype, shape = DTYPES[seed // 2 % 3], shape_of(seed)
    every = [partial_sum(seed, other, shape, dtype) for other in range(ranks)]
    x = every[rank].clone()
    total = sums.all_reduce(x)
    assert total.data_ptr() == x.data_ptr(), "written over the summand"
    assert torch.equal(total, reference(every)), f"round {seed}: other bits than without shares"
    exact = torch.stack(every).double().flatten(1)
    error = (total.double().flatten() - exact.sum(0)).abs()
    assert bool((error <= error_bound(exact)).all()), f"round {seed}: {float(error.max())}"


def check_parts(sums: QuantizedSums, rank: int, ranks: int, seed: int) -> None:
    """Reduce-scatter and all-gather: half of an all-reduce each."""
    shape = (3, 2 * GROUP)
    for_each = [
        torch.stack([partial_sum(seed, 8 * other + to, shape, torch.bfloat16) for to in range(ranks)])
        for other in range(ranks)
    ]
    part = sums.reduce_scatter(for_each[rank])
    exact = torch.stack([x[rank] for x in for_each]).double().flatten(1)
    error = (part.double().flatten() - exact.sum(0)).abs()
    assert bool((error <= error_bound(exact)).all())
    mine = [partial_sum(seed, 80 + other, shape, torch.bfloat16) for other in range(ranks)]
    gathered = sums.all_gather(mine[rank])
    assert torch.equal(gathered, torch.cat([through(TorchCodec(), x.flatten(), x.dtype).view(shape) for x in mine]))


def check_no_numbers(sums: QuantizedSums, rank: int, ranks: int) -> None:
    for value in (torch.inf, -torch.inf, torch.nan):
        x = torch.ones(2, 2 * GROUP, dtype=torch.bfloat16)
        if rank == ranks - 1:
            x[1, GROUP + 3] = value
        total = sums.all_reduce(x)
        assert total[1, GROUP:].isnan().all(), "the group of what is no number"
        assert torch.equal(total.flatten()[: 3 * GROUP], torch.full((3 * GROUP,), float(ranks), dtype=torch.bfloat16))


def serve(rank: int, ranks: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    assert dist.group.WORLD is not None
    sums = QuantizedSums(dist.group.WORLD, TorchCodec(), 0, 1, piece_bytes=512)
    for seed in range(rounds):
        check_round(sums, rank, ranks, seed)
        if seed % 10 == 7:
            check_parts(sums, rank, ranks, seed)
    check_no_numbers(sums, rank, ranks)
    dist.destroy_process_group()


def test_errors_stay_within_the_bound(tmp_path: Path) -> None:
    run_ranks(serve, (2, str(tmp_path), 60), 2)


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_errors_of_many_sums_stay_within_the_bound(ranks: int, tmp_path: Path) -> None:
    run_ranks(serve, (ranks, str(tmp_path), 10_000), ranks)


def test_the_bound_is_not_loose() -> None:
    """Some errors are more than seven tenths of it; a typical one is less than a twenty-fifth of the sum."""
    worst, typical = 0.0, []
    for seed in range(60):
        every = [partial_sum(seed, rank, (8, 256), torch.bfloat16) for rank in range(2)]
        exact = torch.stack(every).double().flatten(1)
        error = (reference(every).double().flatten() - exact.sum(0)).abs()
        worst = max(worst, float((error / error_bound(exact)).max()))
        typical.append(float(error.norm() / exact.sum(0).norm()))
    assert worst > 0.7
    assert sum(typical) / len(typical) < 0.04


@pytest.mark.parametrize(
    ("change", "covered"),
    [
        (lambda x: x, True),
        (lambda x: x.half(), True),
        (lambda x: x.unflatten(0, (2, 10)), True),
        (lambda x: x.float(), True),
        (lambda x: x.double(), False),
        (lambda x: x.to(torch.int32), False),
        (lambda x: x[:9].repeat(1, 4), False),
        (lambda x: x[:10, :32], False),
        (lambda x: x[:, :40], False),
        (lambda x: x.flatten(), False),
    ],
)
def test_what_is_quantized(change: Callable[[torch.Tensor], torch.Tensor], covered: bool) -> None:
    """Two bytes a value, at least ten rows and 2,000 bytes, whole groups."""
    x = torch.zeros(20, 64, dtype=torch.bfloat16)
    sums = QuantizedSums(None, TorchCodec(), 2000, 10, 512)  # type: ignore[arg-type]
    assert sums.covers(change(x)) is covered
