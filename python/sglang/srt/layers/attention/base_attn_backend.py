"""What an attention backend provides. Keys and values of the new tokens are already in the pool when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class AttentionBackend(Protocol):
    """Built once per model runner; state between calls is the metadata of the current batch only."""

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Prepare one eager step (index arrays, split counts, wrapper plans). Where an EXTEND batch has `decodes`, both
        are prepared, one after the other; neither may spoil the other."""

    def init_cuda_graph_state(self, max_batch_size: int) -> None:
        """Allocate everything that captured decode graphs will read, for batches up to `max_batch_size`."""

    def init_forward_metadata_capture(self, batch: ForwardBatch) -> None:
        """Point the metadata at the static buffers before a DECODE graph is captured. `batch` holds static tensors."""

    def init_forward_metadata_replay(self, batch: ForwardBatch, num_reqs: int) -> None:
        """Refresh the static buffers before a replay; rows from `num_reqs` on are padding. Must not synchronize."""

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        """q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] of the new tokens (already stored) -> the rows of out
        [T, Hq, Dv] from extend_start_loc[0] on; the rows before it belong to requests that decode."""

    def forward_decode(self, q: torch.Tensor, layer: RadixAttention, batch: ForwardBatch, out: torch.Tensor) -> None:
        """q [B, Hq, D] -> out [B, Hq, Dv]."""
