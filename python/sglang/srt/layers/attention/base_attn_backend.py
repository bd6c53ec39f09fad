"""What an attention backend provides, and what it may do when.

A step without a graph: the new tokens' slots enter `req_to_token`, then `init_forward_metadata`, then the model, which
stores keys and values of the new tokens before it calls `forward_*`.

A decode step as a CUDA graph has three moments, each with a method of its own:

| moment | method | on the host | on the device |
|---|---|---|---|
| once, before any capture | `init_cuda_graph_state` | allocate, plan, wait | anything |
| inside the capture | `init_forward_metadata_capture` | choose among what exists | work that each replay repeats |
| before each replay | `init_forward_metadata_replay` | plan; never wait for the step in flight | copies and kernels |

The graph itself enters the new tokens' slots in the table. So inside a capture the table is complete, and before a
replay it is not: a backend that reads pages there takes the last one of each request from `out_cache_loc`.

Before a capture the third is called once, for a batch of padding: what backends share between sizes is then this one's.

Prefill graphs exist only for backends whose KernelSpec says `graph_prefill`; their `init_forward_metadata` is then
called inside the capture, with the host lengths of the widest case, and not before replays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from sglang.srt.layers.attention.call_site import Attention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class AttentionBackend(Protocol):
    """Built once per model runner; state between calls is the metadata of the current batch only."""

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Prepare one step that is not replayed (index arrays, split counts, wrapper plans). Where an EXTEND batch has
        `decodes`, both are prepared, one after the other; neither may spoil the other."""

    def init_cuda_graph_state(self, batch_sizes: tuple[int, ...]) -> None:
        """Everything that captured decode graphs of these batch sizes (ascending) will read, at its final address."""

    def init_forward_metadata_capture(self, batch: ForwardBatch) -> None:
        """Metadata of a DECODE batch of static tensors, as part of the graph; also called in the runs that precede the
        capture. Reads no host lengths and neither plans nor waits."""

    def init_forward_metadata_replay(self, batch: ForwardBatch, num_reqs: int) -> None:
        """Refresh what the graph reads besides the static inputs, which are loaded. `batch.seq_lens_cpu` is that of the
        step; rows from `num_reqs` on are padding."""

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Attention,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        """q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] of the new tokens (already stored) -> the rows of out
        [T, Hq, Dv] from extend_start_loc[0] on; the rows before it belong to requests that decode."""

    def forward_decode(self, q: torch.Tensor, layer: Attention, batch: ForwardBatch, out: torch.Tensor) -> None:
        """q [B, Hq, D] -> out [B, Hq, Dv]."""
