"""The model with what its steps read and write on the device, and the batches that lead from one to the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from sglang.srt.layers.forward_batch import AttentionBackend, ForwardBatch, ForwardMode, TokenSlots
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.plan.caches import PoolSizes
from sglang.srt.utils.device_arrays import DeviceArrays


@dataclass(slots=True)
class DeviceState:
    """Tables by request slot, and the batches of a step from tensors that lie on the device already."""

    model: CausalLM
    attn_backend: AttentionBackend
    num_tables: int
    sizes: PoolSizes
    device: torch.device | str
    req_to_token: torch.Tensor = field(init=False)
    """[tables, max_reqs + 1, context_len] int32, the cache slot of each position of each request slot; a table for each
    lifetime of caches (`plan.caches.row_tables`). Row 0 is padding and stays zero, which is the padding slot."""
    next_token: torch.Tensor = field(init=False)
    """[max_reqs + 1] int64, the token that each request computes next: the last one sampled."""

    def __post_init__(self) -> None:
        rows = self.sizes.max_requests + 1
        shape = (self.num_tables, rows, self.sizes.context_len)
        self.req_to_token = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.next_token = torch.zeros(rows, dtype=torch.int64, device=self.device)

    def _token_slots(
        self, out_cache_loc: torch.Tensor, rows: torch.Tensor | None, positions: torch.Tensor
    ) -> tuple[TokenSlots, ...]:
        """Of T tokens that lie at `positions` of the request slots `rows`. The tables of windows have their new slots
        before the step."""
        windows = self.req_to_token[1:]
        return (
            TokenSlots(self.req_to_token[0], out_cache_loc),
            *(TokenSlots(table, table[rows, positions].to(torch.int64)) for table in windows),
        )

    def decode_batch(
        self,
        slots: torch.Tensor,
        seq_lens: torch.Tensor,
        out_cache_loc: torch.Tensor,
        num_valid_tokens: torch.Tensor | None = None,
    ) -> ForwardBatch:
        """A DECODE batch from device tensors only, so that it can be captured; enters the new slots in the table."""
        positions = seq_lens.to(torch.int64) - 1
        self.req_to_token[0][slots, positions] = out_cache_loc.to(torch.int32)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(slots),
            input_ids=self.next_token[slots],
            positions=positions,
            req_pool_indices=slots,
            seq_lens=seq_lens,
            token_slots=self._token_slots(out_cache_loc, slots, positions),
            attn_backend=self.attn_backend,
            num_valid_tokens=num_valid_tokens,
        )

    def extend_batch(
        self,
        arrays: DeviceArrays | Mapping[str, torch.Tensor],
        input_ids: torch.Tensor,
        decodes: ForwardBatch | None,
        extend_lens: list[int],
        prefix_lens: list[int],
    ) -> ForwardBatch:
        """An EXTEND batch of T `input_ids` from the other arrays of `step.extend_arrays`. The lengths on the host are
        what a backend may plan with."""
        positions = arrays["positions"][: len(input_ids)]
        rows = _rows(arrays["start_loc"], arrays["slots"], decodes, len(positions)) if self.num_tables > 1 else None
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(arrays["slots"]),
            input_ids=input_ids,
            positions=positions,
            req_pool_indices=arrays["slots"],
            seq_lens=arrays["seq_lens"],
            token_slots=self._token_slots(arrays["out_cache_loc"][: len(input_ids)], rows, positions),
            attn_backend=self.attn_backend,
            decodes=decodes,
            extend_prefix_lens=arrays["prefix_lens"],
            extend_start_loc=arrays["start_loc"],
            extend_seq_lens_cpu=extend_lens,
            extend_prefix_lens_cpu=prefix_lens,
        )


def _rows(start_loc: torch.Tensor, slots: torch.Tensor, decodes: ForwardBatch | None, num_tokens: int) -> torch.Tensor:
    """[num_tokens] int64, the request slot of each token of an EXTEND step. Those before the first prompt are of
    requests that decode."""
    token = torch.arange(num_tokens, dtype=torch.int32, device=slots.device)
    prompt = torch.searchsorted(start_loc, token, right=True) - 1
    rows = slots[prompt.clamp(min=0)]
    if decodes is not None:
        count = decodes.batch_size
        rows[:count] = torch.where(prompt[:count] < 0, decodes.req_pool_indices, rows[:count])
    return rows
