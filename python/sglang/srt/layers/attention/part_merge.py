"""Attention of several ranks to tokens that they share out, each with the heads of all of them, as one softmax.

Every rank attends with all heads to its own tokens: parts, and the logarithms of the sums of their exponentials. The
part of a head that has no tokens on a rank has the logarithm -inf. Then each rank gets the parts of its own heads:

    a2a      parts and sums in one exchange, added up where they arrive
    ag_rs    sums to all ranks, each of which weights its parts; a reduce-scatter adds them up
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang.srt.configs.merge_methods import ALL_TO_ALL
from sglang.srt.distributed.parallel_state import Group

LSE_BYTES = 16
"""Bytes that a part's sum takes behind its columns: rows stay aligned."""


AttendPart = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""q [T, H, D] of all heads -> parts [T, H, Dv] and the logarithms of their sums [T, H]."""


class PartMerge:
    """[T, heads of all, Dv] of each rank -> [T, own heads, Dv]. Launches alone, so that a graph may hold it."""

    def __init__(self, context: Group, method: str = ALL_TO_ALL) -> None:
        self.context = context
        self._exchange = self._all_to_all if method == ALL_TO_ALL else self._gather_scatter

    def all_heads(self, q: torch.Tensor) -> torch.Tensor:
        """Queries of this rank's heads [T, H, D] -> those of all ranks [T, size * H, D]."""
        return self.context.all_gather(q, dim=1)

    def attend(
        self, q: torch.Tensor, attend_part: AttendPart, out: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> None:
        """q [T, H, D] -> out [T, H, Dv], over the tokens of all ranks; sinks as in `merge`."""
        heads = self.all_heads(q)
        parts = heads.new_empty((*heads.shape[:2], out.shape[2]))
        lse = torch.empty(heads.shape[:2], dtype=torch.float32, device=q.device)
        attend_part(heads, parts, lse)
        self.merge(parts, lse, out, sinks)

    def merge(
        self, parts: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> None:
        """parts [T, size * H, Dv] and lse [T, size * H] fp32, natural logarithms -> out [T, H, Dv]. sinks [H]: one more
        logit a head, without a value."""
        num_tokens, num_heads, _ = out.shape
        by_rank = (num_tokens, self.context.size, num_heads)
        out.copy_(self._exchange(parts.view(*by_rank, -1).transpose(0, 1), lse.view(by_rank).transpose(0, 1), sinks))

    def _all_to_all(self, parts: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """parts [size, T, H, Dv], lse [size, T, H] -> [T, H, Dv]."""
        dims, extra = parts.shape[-1], LSE_BYTES // parts.element_size()
        packed = parts.new_empty((*parts.shape[:-1], dims + extra))
        packed[..., :dims] = parts
        packed[..., dims:].view(torch.float32)[..., 0] = lse
        packed = self.context.exchange(packed)
        weights = _weights(packed[..., dims:].view(torch.float32)[..., 0], sinks)
        return (packed[..., :dims] * weights[..., None]).sum(0)

    def _gather_scatter(self, parts: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        if sinks is not None:
            sinks = self.context.all_gather(sinks, dim=0).view(self.context.size, 1, -1)
        all_lse = self.context.all_gather(lse[None], dim=0)  # [ranks, size, T, H]
        weights = _weights(all_lse, sinks)[self.context.rank]
        return self.context.reduce_scatter((parts * weights[..., None]).to(parts.dtype))


def _weights(lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """lse [ranks, ..., H] -> the share of each rank in the softmax; 0 where nobody has a token. sinks [..., H]."""
    if sinks is not None:
        lse = torch.cat((lse, sinks.to(lse.dtype).expand(lse.shape[1:])[None]))
    weights = lse.softmax(0).nan_to_num(0.0)
    return weights if sinks is None else weights[:-1]
