"""FlashInfer's fused kernel for all-reduce, residual addition and RMS norm. A group tries it before its other reducer.

Used only on request, because no gain over PCIe was measured, and only if the start-up probe of the links found no
problem, because the kernel waits for its peers without a deadline and cannot tell which rank does not come.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from typing import Any

import torch
import torch.distributed as dist

from sglang.srt.distributed.custom_all_reduce import exchange
from sglang.srt.distributed.groups import Reducer

FIRST_VERSION = (0, 6, 18)
"""First version of FlashInfer whose kernel is compiled for SM12x; earlier ones fail at the first call there."""
MAX_TOKENS = 2048
"""Most rows of a call. The workspace grows with this number, and more rows are bound by bandwidth anyway."""


class FlashInferFusion:
    """A reducer that computes all-reduce, residual addition and RMS norm in one kernel. `others` serves all other
    all-reduces; if it is None, NCCL serves them. The constructor is a collective, and raises what FlashInfer raises if
    it cannot create its workspace."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_size: int,
        dtype: torch.dtype,
        others: Reducer | None,
    ) -> None:
        self._comm: Any = importlib.import_module("flashinfer.comm")
        self._others, self._hidden_size, self._dtype = others, hidden_size, dtype
        self._workspace = self._comm.create_allreduce_fusion_workspace(
            backend="trtllm",  # FlashInfer's other backend needs multicast, which no PCIe link has
            world_size=dist.get_world_size(group), rank=dist.get_rank(group),
            max_token_num=MAX_TOKENS, hidden_dim=hidden_size, dtype=dtype, group=group,
        )  # fmt: skip

    def can_serve_tensor(self, x: torch.Tensor) -> bool:
        """Returns whether `all_reduce` may be called with `x`."""
        return self._others is not None and self._others.can_serve_tensor(x)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum over the ranks by `others`, which must serve `x` (`can_serve_tensor`)."""
        assert self._others is not None
        return self._others.all_reduce(x)

    def can_norm(self, x: torch.Tensor) -> bool:
        """Returns whether `all_reduce_add_rms_norm` may be called with `x` [T, H]."""
        fits = x.dim() == 2 and x.shape[1] == self._hidden_size and 0 < len(x) <= MAX_TOKENS
        return (fits and x.dtype == self._dtype and x.is_contiguous()) or self._others_can_norm(x)

    def _others_can_norm(self, x: torch.Tensor) -> bool:
        return self._others is not None and self._others.can_norm(x)

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns (norm of the total, the total) as `Reducer` describes. Without a residual, with a weight of another
        dtype than x, or with more than MAX_TOKENS rows, `others` computes them; if it cannot, returns None and has done
        nothing."""
        if residual is None or weight.dtype != x.dtype or len(x) > MAX_TOKENS:
            return self._others.all_reduce_add_rms_norm(x, residual, weight, eps) if self._others_can_norm(x) else None  # type: ignore[union-attr]
        normed, total = torch.empty_like(x), torch.empty_like(x)
        self._comm.allreduce_fusion(
            input=x, workspace=self._workspace, pattern=self._comm.AllReduceFusionPattern.kARResidualRMSNorm,
            residual_in=residual, residual_out=total, norm_out=normed, rms_gamma=weight, rms_eps=eps,
            fp32_acc=True,  # as all reducers here
        )  # fmt: skip
        return normed, total

    def raise_if_stalled(self) -> None:
        """Raises if a past all-reduce of `others` missed its deadline."""
        if self._others is not None:
            self._others.raise_if_stalled()


def create_fusion(
    group: dist.ProcessGroup,
    host_group: dist.ProcessGroup,
    hidden_size: int,
    dtype: torch.dtype,
    others: Reducer | None,
) -> tuple[FlashInferFusion | None, str]:
    """Returns (the reducer, ""), or (None, the reason why a rank cannot create one), with the same outcome on every
    rank. A collective. group: the ranks that sum; host_group: the same ranks, for messages between the hosts."""
    problem = next(filter(None, (answer.decode() for answer in exchange(host_group, _why_missing().encode()))), "")
    if problem:
        return None, problem
    fusion = None
    try:
        fusion = FlashInferFusion(group, hidden_size, dtype, others)
    except Exception as error:
        problem = f"flashinfer makes no workspace: {type(error).__name__}: {error}"
    problem = next(filter(None, (answer.decode() for answer in exchange(host_group, problem.encode()))), "")
    return (None, problem) if problem else (fusion, "")


def _why_missing() -> str:
    """Returns why the kernel is not available: no FlashInfer, or one too old; "" if it is."""
    for name in ("flashinfer-python", "flashinfer_python"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if tuple(map(int, re.findall(r"\d+", version)[:3])) >= FIRST_VERSION:
            return ""
        return (
            f"flashinfer {version} has no such kernel for SM12x; install {'.'.join(map(str, FIRST_VERSION))} or newer"
        )
    return "flashinfer is not installed"
