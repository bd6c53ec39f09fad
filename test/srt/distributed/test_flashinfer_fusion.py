"""FlashInfer's fused sums behind the interface of a reducer: gloo ranks, with a module in FlashInfer's place."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks

from sglang.srt.distributed import flashinfer_fusion
from sglang.srt.distributed.groups import Group
from sglang.srt.distributed.peer_setup import fused_by_flashinfer
from sglang.srt.layers import native_ops

HIDDEN, EPS = 64, 1e-6


def fake_module(calls: list[dict], broken: bool = False) -> types.ModuleType:
    """What of `flashinfer.comm` is called, with its parameters' names."""
    module = types.ModuleType("flashinfer.comm")

    class Patterns:
        kAllReduce, kARResidualRMSNorm = 0, 1

    def create(*, backend, world_size, rank, max_token_num, hidden_dim, dtype, group):
        if broken:
            raise RuntimeError("no peer access")
        assert (backend, hidden_dim) == ("trtllm", HIDDEN) and (rank, world_size) == (group.rank(), group.size())
        return types.SimpleNamespace(group=group, rows=max_token_num, dtype=dtype)

    def fuse(*, input, workspace, pattern, residual_in, residual_out, norm_out, rms_gamma, rms_eps, fp32_acc):
        assert pattern == Patterns.kARResidualRMSNorm and fp32_acc and len(input) <= workspace.rows
        assert {input.dtype, residual_in.dtype, rms_gamma.dtype} == {workspace.dtype}
        total = input.float()
        dist.all_reduce(total, group=workspace.group)
        residual_out.copy_((total.to(input.dtype).float() + residual_in.float()).to(input.dtype))
        norm_out.copy_(native_ops.rmsnorm(residual_out, rms_gamma, rms_eps))
        calls.append({"rows": len(input)})

    module.AllReduceFusionPattern = Patterns  # type: ignore[attr-defined]
    module.create_allreduce_fusion_workspace = create  # type: ignore[attr-defined]
    module.allreduce_fusion = fuse  # type: ignore[attr-defined]
    return module


def install(module: types.ModuleType, version: str) -> None:
    sys.modules["flashinfer"], sys.modules["flashinfer.comm"] = types.ModuleType("flashinfer"), module
    importlib.metadata.version = lambda name: version  # type: ignore[assignment]


class Others:
    """Sums of the library, and norms of one row."""

    normed = 0

    def can_serve_tensor(self, x: torch.Tensor) -> bool:
        return x.dtype == torch.float32

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    def can_norm(self, x: torch.Tensor) -> bool:
        return len(x) == 1

    def all_reduce_add_rms_norm(self, x, residual, weight, eps):
        self.normed += 1
        return x, x

    def raise_if_stalled(self) -> None:
        raise RuntimeError("rank 1 did not come")


def fuse(rank: int, ranks: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    world, calls, others = dist.group.WORLD, list[dict](), Others()
    assert world is not None
    group = Group(rank, ranks, world)

    def connected(version: str, broken: bool = False) -> str:
        install(fake_module(calls, broken), version)
        return fused_by_flashinfer(group, world, HIDDEN, "bfloat16", others)

    assert "0.6.17 has no such kernel for SM12x; install 0.6.18" in connected("0.6.17")
    assert connected("0.6.18", broken=rank == 1) == "flashinfer makes no workspace: RuntimeError: no peer access"
    assert group._reducer is None
    assert connected("0.6.18") == ""

    pools = [torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(ranks)]
    residual, weight = torch.linspace(-2, 2, 5 * HIDDEN).view(5, HIDDEN).bfloat16(), torch.ones(HIDDEN).bfloat16()
    found = group.all_reduce_add_rms_norm(pools[rank].clone(), residual.clone(), weight, EPS)
    assert found is not None and calls == [{"rows": 5}]
    wanted = (sum(pool.float() for pool in pools).bfloat16().float() + residual.float()).bfloat16()
    assert torch.equal(found[1], wanted) and torch.equal(found[0], native_ops.rmsnorm(wanted, weight, EPS))

    # What it has no kernel for is the others', or nobody's.
    x = pools[rank]
    assert group.all_reduce_add_rms_norm(x, None, weight, EPS) is None
    assert group.all_reduce_add_rms_norm(x, residual, weight.float(), EPS) is None
    assert group.all_reduce_add_rms_norm(x, residual.double(), weight, EPS) is None
    assert group.all_reduce_add_rms_norm(x[:, :32], residual[:, :32], weight[:32], EPS) is None
    assert group.all_reduce_add_rms_norm(x[:1], None, weight, EPS) is not None and others.normed == 1
    rows = torch.zeros(flashinfer_fusion.MAX_TOKENS + 1, HIDDEN, dtype=torch.bfloat16)
    assert group.all_reduce_add_rms_norm(rows, rows, weight, EPS) is None
    assert len(calls) == 1
    assert torch.equal(group.all_reduce(torch.ones(3)), torch.full((3,), float(ranks)))
    with pytest.raises(RuntimeError, match="did not come"):
        group.raise_if_stalled()
    dist.destroy_process_group()


def test_two_ranks_add_up_and_norm_in_one_call(tmp_path: Path) -> None:
    run_ranks(fuse, (2, str(tmp_path)), 2)
