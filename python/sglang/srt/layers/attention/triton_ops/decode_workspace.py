"""Buffers that the decode kernels share: the table of pieces, and what `combine_kernel` gets of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton

SHORT_PIECE = 512
"""A piece shorter than this many tokens is only made to occupy idle SMs, not to even out the last wave."""


def head_tiles(num_heads: int, num_kv_heads: int, block_h: int) -> int:
    """Programs that share one piece: a tile holds at most block_h query heads of one KV head."""
    return num_kv_heads * triton.cdiv(num_heads // num_kv_heads, block_h)


def slots_of(num_heads: int, num_kv_heads: int, num_sms: int, tile: Mapping[str, int]) -> int:
    """Pieces that the GPU runs at once."""
    return max(1, num_sms * tile["ctas_per_sm"] // head_tiles(num_heads, num_kv_heads, tile["BLOCK_H"]))


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Static buffers of the decode kernels for batches up to `max_batch`; one serves all layers of one shape."""

    max_batch: int
    num_slots: int
    """Pieces that the GPU runs at once."""
    waves: int
    max_context: int
    """Tokens of the longest sequence."""
    work: torch.Tensor  # [max_batch + num_slots * waves, 4] int32
    pieces: torch.Tensor  # [max_batch, 2] int32
    part_o: torch.Tensor  # [pieces, Hq, Dv] fp32
    part_lse: torch.Tensor  # [pieces, Hq] fp32

    @staticmethod
    def allocate(
        max_batch: int,
        num_heads: int,
        num_kv_heads: int,
        v_head_dim: int,
        num_sms: int,
        tile: Mapping[str, int],
        device: torch.device | str,
        max_context: int = 1 << 30,
    ) -> DecodeWorkspace:
        num_slots = slots_of(num_heads, num_kv_heads, num_sms, tile)
        pieces = max_batch + num_slots * tile["waves"]
        return DecodeWorkspace(
            max_batch,
            num_slots,
            tile["waves"],
            max_context,
            torch.empty((pieces, 4), dtype=torch.int32, device=device),
            torch.empty((max_batch, 2), dtype=torch.int32, device=device),
            torch.empty((pieces, num_heads, v_head_dim), dtype=torch.float32, device=device),
            torch.empty((pieces, num_heads), dtype=torch.float32, device=device),
        )

    @staticmethod
    def for_guesses(
        most: int,
        max_batch: int,
        num_heads: int,
        num_kv_heads: int,
        v_head_dim: int,
        num_sms: int,
        tile: Mapping[str, int],
        device: torch.device | str,
        max_context: int,
    ) -> dict[int, DecodeWorkspace]:
        """Workspaces of steps that bring 2 to `most` tokens of each sequence, by that number, which are further heads.
        They share their buffers, because a step has one number."""
        slots = {tokens: slots_of(tokens * num_heads, num_kv_heads, num_sms, tile) for tokens in range(2, most + 1)}
        pieces = {tokens: max_batch + num_slots * tile["waves"] for tokens, num_slots in slots.items()}
        rows = max(count * tokens * num_heads for tokens, count in pieces.items())
        work = torch.empty((max(pieces.values()), 4), dtype=torch.int32, device=device)
        of_sequence = torch.empty((max_batch, 2), dtype=torch.int32, device=device)
        part_o = torch.empty((rows, v_head_dim), dtype=torch.float32, device=device)
        part_lse = torch.empty(rows, dtype=torch.float32, device=device)
        return {
            tokens: DecodeWorkspace(
                max_batch, num_slots, tile["waves"], max_context, work, of_sequence, part_o, part_lse
            )
            for tokens, num_slots in slots.items()
        }

    def num_pieces(self, batch_size: int) -> int:
        """Upper bound, whatever the lengths: programs beyond the pieces that there are still have to start and end.
        Rounding up adds at most one piece a sequence to as many as run at once; more than those are not short."""
        short = batch_size * triton.cdiv(self.max_context, SHORT_PIECE)
        return batch_size + min(self.num_slots * self.waves, max(self.num_slots, short))
