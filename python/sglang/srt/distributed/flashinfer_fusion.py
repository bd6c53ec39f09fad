"""FlashInfer's fused all-reduce, residual addition and RMS norm, in front of a group's other reducers.

Used only on request: nobody has measured a gain over PCIe, and its writes to peers' memory neither have a deadline nor
name a rank that does not come. So it also requires that the start-up probe found no problem.
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
"""Earlier versions compile the kernel for other GPUs than SM12x and fail at the first call."""
MAX_TOKENS = 2048
"""Most rows of a call. The workspace grows with them, and larger messages are bound by bandwidth anyway."""


class FlashInferFusion:
    """A reducer for all-reduces followed by residual addition and norm; `others` serves all other all-reduces (None:
    the library does). Construction is collective and raises what FlashInfer raises if it cannot create its
    workspace."""

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
            max_token_num=MAX_TOKENS, hidden_dim=hidden_size, dtype=dtype, group=group,
        )  # fmt: skip

    def can_serve_tensor(self, x: torch.Tensor) -> bool:
        """Returns whether `all_reduce` may be called with `x`."""
        return self._others is not None and self._others.can_serve_tensor(x)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks with `others`."""
        assert self._others is not None
        return self._others.all_reduce(x)

    def can_norm(self, x: torch.Tensor) -> bool:
        """Returns whether `all_reduce_add_rms_norm` may be called with `x` [T, H]."""
        fits = x.dim() == 2 and x.shape[1] == self._hidden_size and 0 < len(x) <= MAX_TOKENS
        return (fits and x.dtype == self._dtype and x.is_contiguous()) or self._leaves_norms(x)

    def _leaves_norms(self, x: torch.Tensor) -> bool:
        return self._others is not None and self._others.can_norm(x)

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns (norm of the total, the total) as `Reducer` describes; None, with nothing done, if this kernel needs
        a residual or a weight of x's dtype that it does not get and `others` does not serve `x`."""
        if residual is None or weight.dtype != x.dtype or len(x) > MAX_TOKENS:
            return self._others.all_reduce_add_rms_norm(x, residual, weight, eps) if self._leaves_norms(x) else None  # type: ignore[union-attr]
        normed, total = torch.empty_like(x), torch.empty_like(x)
        self._comm.allreduce_fusion(
            input=x, workspace=self._workspace, pattern=self._comm.AllReduceFusionPattern.kARResidualRMSNorm,
            residual_in=residual, residual_out=total, norm_out=normed, rms_gamma=weight, rms_eps=eps,
            fp32_acc=True,  # as every other way of adding up here
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
    """Returns (the reducer, ""), or (None, why some rank has none), alike on every rank. `group` carries tensors,
    `host_group` bytes. Collective."""
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
    """Returns why the installed FlashInfer lacks the kernel; "" if it has it."""
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
