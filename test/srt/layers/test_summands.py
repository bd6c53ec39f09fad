"""Sums over the ranks that wait for the next norm: the same stream as with sums in the blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks

from sglang.srt.distributed.groups import Group
from sglang.srt.layers import native_ops
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.residual import SumJoin, SumStream

EPS = 1e-5


class Block:
    """Adds the rank's number to its input; the sum over the ranks is its own or left."""

    def __init__(self, group: Group) -> None:
        self.group, self.sums = group, True

    def __call__(self, x: torch.Tensor, batch: object = None) -> torch.Tensor:
        out = x * (self.group.rank + 1.0)
        return self.group.all_reduce(out) if self.sums else out

    def defer_all_reduce(self) -> Group | None:
        self.sums = False
        return self.group


class Reducer:
    """Serves rows of 8 or fewer; counts what it did."""

    def __init__(self, group: Group) -> None:
        self.group, self.sums, self.norms = group, 0, 0

    def can_serve_tensor(self, x: torch.Tensor) -> bool:
        return len(x) <= 8

    def can_norm(self, x: torch.Tensor) -> bool:
        return len(x) <= 8

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        return self.group.library_all_reduce(x)

    def all_reduce_add_rms_norm(self, x, residual, weight, eps):
        self.norms += 1
        x = self.group.library_all_reduce(x)
        return native_ops.fused_add_rmsnorm(x, residual, weight, eps)

    def raise_if_stalled(self) -> None:
        raise RuntimeError("rank 1 has not come")


def norm(size: int) -> RMSNorm:
    made = RMSNorm.__new__(RMSNorm)
    made.weight = torch.linspace(0.5, 1.5, size)
    made.eps, made._norm, made._add_norm = EPS, native_ops.rmsnorm, native_ops.fused_add_rmsnorm
    return made


def stream_after(x: torch.Tensor, group: Group, waits: bool, joins: list[tuple[bool, bool]]) -> torch.Tensor:
    """Behind blocks whose joins have (a norm before, a norm after)."""
    stream, size = SumStream(x.clone()), x.shape[1]
    for before, after in joins:
        block, join = Block(group), SumJoin(norm(size) if before else None, norm(size) if after else None)
        if waits:
            join.attach(block)
            assert block.sums == after
        join.after(stream, block(join.before(stream)))
    return stream.normed(norm(size))


def compare(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    group = Group(rank, ranks, dist.group.WORLD)
    group.raise_if_stalled()
    reducer = Reducer(group)
    for joins in ([(True, False)] * 4, [(True, False), (False, False), (True, True), (True, False)]):
        for rows in (3, 9):
            x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows))
            wanted = stream_after(x, group, False, joins)
            torch.testing.assert_close(stream_after(x, group, True, joins), wanted)
            group.reduce_with(reducer)
            sums, norms = reducer.sums, reducer.norms
            torch.testing.assert_close(stream_after(x, group, True, joins), wanted)
            done = reducer.sums - sums, reducer.norms - norms
            assert done == ((0, 0) if rows == 9 else (0, 4) if all(before for before, _ in joins) else (2, 2)), done
            group = Group(rank, ranks, dist.group.WORLD)
            reducer.group = group
    group.reduce_with(reducer)
    with pytest.raises(RuntimeError, match="has not come"):
        group.raise_if_stalled()
    dist.destroy_process_group()


def test_sums_that_wait_give_the_same_stream(tmp_path: Path) -> None:
    run_ranks(compare, (2, str(tmp_path)), 2)


def test_one_rank_has_nothing_to_leave() -> None:
    group = Group()
    assert torch.equal(group.all_reduce(torch.ones(2)), torch.ones(2))
    assert group.all_reduce_add_rms_norm(torch.ones(1, 2), None, torch.ones(2), EPS) is None
