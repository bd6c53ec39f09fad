"""Memory of the decode kernels: the plan, one per step, and the partial results, which steps share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton

SHORT_PIECE = 512
"""A piece shorter than this many tokens is only made to occupy idle SMs, not to even out the last wave."""


def head_tiles(num_heads: int, num_kv_heads: int, block_h: int) -> int:
    """Returns the number of programs per piece: a tile holds at most block_h query heads of one KV head."""
    return num_kv_heads * triton.cdiv(num_heads // num_kv_heads, block_h)


def slots_of(num_heads: int, num_kv_heads: int, num_sms: int, tile: Mapping[str, int]) -> int:
    """Returns the number of pieces that the GPU runs at once."""
    return max(1, num_sms * tile["ctas_per_sm"] // head_tiles(num_heads, num_kv_heads, tile["BLOCK_H"]))


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The pieces into which the sequences of one step are cut, made by `decode_attention.plan_decode`.

    `work` and `pieces` belong to one metadata alone, so other steps, microbatches and graphs may be planned before the
    last layer has read them. `part_o` and `part_lse` are the workspace's and valid only until the merge that follows
    the attention kernel."""

    num_seqs: int
    tile: Mapping[str, int]
    """Launch configuration of the kernels that read the plan."""
    work: torch.Tensor  # [pieces, 4] int32: sequence (-1: none), first and last token, pieces of the sequence
    pieces: torch.Tensor  # [num_seqs, 2] int32: first piece of each sequence, and how many there are
    part_o: torch.Tensor  # as in DecodeWorkspace
    part_lse: torch.Tensor

    @property
    def num_pieces(self) -> int:
        """Returns the number of rows of `work`, an upper bound of the pieces."""
        return len(self.work)

    def check_rows(self, req_pool_indices: torch.Tensor) -> None:
        """Asserts that the plan has as many sequences as a kernel is given request slots."""
        assert len(req_pool_indices) == self.num_seqs, "this plan is another step's"


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Partial results of the decode kernels for up to `max_batch` sequences; one serves all layers of a shape."""

    max_batch: int
    num_slots: int
    """Pieces that the GPU runs at once."""
    waves: int
    max_context: int
    """Tokens of the longest sequence."""
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
        """Allocates a workspace for these head counts and this tile; it fits any lengths up to `max_context`."""
        num_slots = slots_of(num_heads, num_kv_heads, num_sms, tile)
        pieces = max_batch + num_slots * tile["waves"]
        return DecodeWorkspace(
            max_batch,
            num_slots,
            tile["waves"],
            max_context,
            torch.empty((pieces, num_heads, v_head_dim), dtype=torch.float32, device=device),
            torch.empty((pieces, num_heads), dtype=torch.float32, device=device),
        )

    @staticmethod
    def for_verify(
        batches: Mapping[int, int],
        num_heads: int,
        num_kv_heads: int,
        v_head_dim: int,
        num_sms: int,
        tile: Mapping[str, int],
        device: torch.device | str,
        max_context: int,
    ) -> dict[int, DecodeWorkspace]:
        """Returns workspaces for verify steps, by the number of tokens per sequence, which act as further heads. They
        share buffers, because all sequences of a step have the same number. batches: most sequences of a step, by
        their number of tokens."""
        slots = {tokens: slots_of(tokens * num_heads, num_kv_heads, num_sms, tile) for tokens in batches}
        pieces = {tokens: batches[tokens] + num_slots * tile["waves"] for tokens, num_slots in slots.items()}
        rows = max(count * tokens * num_heads for tokens, count in pieces.items())
        part_o = torch.empty((rows, v_head_dim), dtype=torch.float32, device=device)
        part_lse = torch.empty(rows, dtype=torch.float32, device=device)
        return {
            tokens: DecodeWorkspace(batches[tokens], num_slots, tile["waves"], max_context, part_o, part_lse)
            for tokens, num_slots in slots.items()
        }

    def num_pieces(self, batch_size: int) -> int:
        """Returns an upper bound of the pieces of a batch, for any lengths; it is kept tight because surplus programs
        still have to start and end. Every sequence may have one piece more than its share by rounding up. Beyond these,
        pieces number at most `num_slots * waves`, or, if contexts are too short for that, the larger of `num_slots` and
        the pieces of SHORT_PIECE tokens."""
        short = batch_size * triton.cdiv(self.max_context, SHORT_PIECE)
        return batch_size + min(self.num_slots * self.waves, max(self.num_slots, short))
