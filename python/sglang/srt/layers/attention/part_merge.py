"""Merging of DCP attention: ranks attend with all heads to their own tokens, and the results become one softmax.

Every rank has partial outputs and their log-sum-exps for all heads. Without tokens on a rank the log-sum-exp is -inf,
and the partial output may be NaN. Then each rank gets the partial results of its own heads:

    a2a      parts and sums in one exchange (`pack_parts`), merged where they arrive (`merge_parts`)
    ag_rs    sums to all ranks, each of which weights its parts; a reduce-scatter adds them up
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sglang.srt.configs.merge_methods import ALL_TO_ALL
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.groups import Group
from sglang.srt.layers.ops import MERGE_PARTS, PACK_PARTS

if TYPE_CHECKING:
    from sglang.srt.plan.plan import Plan

AttendPart = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Attends with q [T, H, D] of all ranks' heads; fills partial outputs [T, H, Dv] and log-sum-exps [T, H]."""


class PartMerge:
    """Merges each rank's partial outputs [T, all heads, Dv] into [T, own heads, Dv]. Only launches work, so it may be
    captured."""

    def __init__(self, plan: Plan) -> None:
        self.context: Group = parallel_state.groups().context
        self.method = plan.merge_method
        if self.context.size > 1:
            self.pack = plan.entry(PACK_PARTS)
            self.merge_received = plan.entry(MERGE_PARTS)

    def all_heads(self, q: torch.Tensor) -> torch.Tensor:
        """Gathers the ranks' queries [T, H, D] into [T, size * H, D]."""
        return self.context.all_gather(q, dim=1)

    def attend(
        self, q: torch.Tensor, attend_part: AttendPart, out: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> None:
        """Fills out [T, H, Dv] with the attention of q [T, H, D] over the tokens of all ranks; sinks as in `merge`."""
        heads = self.all_heads(q)
        parts = heads.new_empty((*heads.shape[:2], out.shape[2]))
        lse = torch.empty(heads.shape[:2], dtype=torch.float32, device=q.device)
        attend_part(heads, parts, lse)
        self.merge(parts, lse, out, sinks)

    def merge(
        self, parts: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> None:
        """Fills out [T, H, Dv] from parts [T, size * H, Dv] and natural log-sum-exps lse [T, size * H] fp32. sinks [H]:
        one more logit per head, without a value."""
        if self.method == ALL_TO_ALL:
            self.merge_received(self.context.exchange(self.pack(parts, lse, self.context.size)), sinks, out)
        else:
            by_rank = (out.shape[0], self.context.size, out.shape[1])
            out.copy_(
                self._gather_scatter(parts.view(*by_rank, -1).transpose(0, 1), lse.view(by_rank).transpose(0, 1), sinks)
            )

    def _gather_scatter(self, parts: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """Returns [T, H, Dv] from parts [size, T, H, Dv] and lse [size, T, H]."""
        if sinks is not None:
            sinks = self.context.all_gather(sinks, dim=0).view(self.context.size, 1, -1)
        all_lse = self.context.all_gather(lse[None], dim=0)  # [ranks, size, T, H]
        weights = _weights(all_lse, sinks)[self.context.rank]
        return self.context.reduce_scatter(_weighted(parts, weights[..., None]).to(parts.dtype))


def _weighted(parts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the weighted parts; zeros for weight 0, even if the part is NaN."""
    return torch.where(weights > 0, parts * weights, 0)


def _weights(lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Returns each rank's weight in the softmax from lse [ranks, ..., H]; 0 if no rank has a token. sinks [..., H]."""
    if sinks is not None:
        lse = torch.cat((lse, sinks.to(lse.dtype).expand(lse.shape[1:])[None]))
    weights = lse.softmax(0).nan_to_num(0.0)
    return weights if sinks is None else weights[:-1]
