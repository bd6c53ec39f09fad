"""FlashInfer's fused all-reduce, residual addition and norm, in front of the sums that a group has otherwise.

Served only where the user asks for it: over PCIe nobody has measured that it wins, and its writes into peers' memory
have neither a deadline nor a name for a rank that does not come. So the start-up probe must have found nothing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from typing import Any

import torch
import torch.distributed as dist

from sglang.srt.distributed.custom_all_reduce import exchange
from sglang.srt.distributed.parallel_state import Reducer

FIRST_VERSION = (0, 6, 18)
"""Earlier ones compile the kernel for other GPUs than SM12x, and fail at the first call."""
MOST_TOKENS = 2048
"""Rows of a call; the workspace grows with them, and larger messages are bandwidth."""


class FlashInferFusion:
    """A reducer of norms with a residual; `others` (None: the library) sums what is none. Raises what FlashInfer raises
    when its workspace cannot be made. Collective."""

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
            backend="trtllm",  # the other one needs multicast, which no PCIe link has
            world_size=dist.get_world_size(group), rank=dist.get_rank(group),
            max_token_num=MOST_TOKENS, hidden_dim=hidden_size, dtype=dtype, group=group,
        )  # fmt: skip

    def can_serve_tensor(self, x: torch.Tensor) -> bool:
        return self._others is not None and self._others.can_serve_tensor(x)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        assert self._others is not None
        return self._others.all_reduce(x)

    def can_norm(self, x: torch.Tensor) -> bool:
        fits = x.dim() == 2 and x.shape[1] == self._hidden_size and 0 < len(x) <= MOST_TOKENS
        return (fits and x.dtype == self._dtype and x.is_contiguous()) or self._leaves_norms(x)

    def _leaves_norms(self, x: torch.Tensor) -> bool:
        return self._others is not None and self._others.can_norm(x)

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """None: nothing was done, because there is no residual or the weight has another type than `x`."""
        if residual is None or weight.dtype != x.dtype or len(x) > MOST_TOKENS:
            return self._others.all_reduce_add_rms_norm(x, residual, weight, eps) if self._leaves_norms(x) else None  # type: ignore[union-attr]
        normed, total = torch.empty_like(x), torch.empty_like(x)
        self._comm.allreduce_fusion(
            input=x, workspace=self._workspace, pattern=self._comm.AllReduceFusionPattern.kARResidualRMSNorm,
            residual_in=residual, residual_out=total, norm_out=normed, rms_gamma=weight, rms_eps=eps,
            fp32_acc=True,  # as every other way of adding up here
        )  # fmt: skip
        return normed, total

    def raise_if_stalled(self) -> None:
        if self._others is not None:
            self._others.raise_if_stalled()


def create_fusion(
    group: dist.ProcessGroup,
    host_group: dist.ProcessGroup,
    hidden_size: int,
    dtype: torch.dtype,
    others: Reducer | None,
) -> tuple[FlashInferFusion | None, str]:
    """The reducer, or why some rank has none: the same on every rank. `group` sends tensors, `host_group` bytes.
    Collective."""
    problem = next(filter(None, (answer.decode() for answer in exchange(host_group, _missing().encode()))), "")
    if problem:
        return None, problem
    fusion = None
    try:
        fusion = FlashInferFusion(group, hidden_size, dtype, others)
    except Exception as error:
        problem = f"flashinfer makes no workspace: {type(error).__name__}: {error}"
    problem = next(filter(None, (answer.decode() for answer in exchange(host_group, problem.encode()))), "")
    return (None, problem) if problem else (fusion, "")


def _missing() -> str:
    """Returns why the installed FlashInfer has no such kernel for all GPUs; "" if it has."""
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
