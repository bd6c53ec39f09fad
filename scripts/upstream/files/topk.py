# SPDX-License-Identifier: Apache-2.0
"""The top-k of sparse-attention indexers for SM12x: sgl_kernel's needs 128 KiB of shared memory.

Same names, arguments and results; the order of the chosen positions is not specified. Scores that begin at their row
are looked through by a kernel that holds them in registers and does not sort; others by torch, which does. Shapes
decide everything, so CUDA graphs can capture it.
"""

import torch

from sglang.srt.sm120.select_entries import select_entries
from sglang.srt.sm120.selection import EntryRows


def fast_topk_v2(
    score: torch.Tensor, lengths: torch.Tensor, topk: int, row_starts: torch.Tensor | None = None
) -> torch.Tensor:
    """Positions of the `topk` largest of score[row, start : start + length], from `start` on, -1 where there are fewer.

    score [rows, columns] float32, lengths and row_starts [rows] int32 -> [rows, topk] int32
    """
    if has_kernel(score, row_starts):
        positions = torch.arange(score.shape[1], dtype=torch.int32, device=score.device)[None]
        return slots_of_largest(score, lengths, topk, positions, torch.zeros_like(lengths))
    columns = torch.arange(score.shape[1], device=score.device)
    starts = torch.zeros_like(lengths) if row_starts is None else row_starts
    ends = (starts + lengths).unsqueeze(1)
    starts = starts.unsqueeze(1)
    usable = score.masked_fill((columns < starts) | (columns >= ends), float("-inf"))
    values, positions = usable.topk(min(topk, score.shape[1]), dim=-1, sorted=False)
    chosen = torch.where(torch.isneginf(values), -1, positions - starts).to(torch.int32)
    return torch.nn.functional.pad(chosen, (0, topk - chosen.shape[1]), value=-1)


def has_kernel(score: torch.Tensor, row_starts: torch.Tensor | None) -> bool:
    """Whether `slots_of_largest` can read the scores: float32 rows on a GPU, a multiple of 16 apart."""
    readable = score.dtype == torch.float32 and score.stride(1) == 1 and score.stride(0) % 16 == 0
    return row_starts is None and readable and score.device.type != "cpu"


def slots_of_largest(
    score: torch.Tensor, lengths: torch.Tensor, topk: int, table: torch.Tensor, sequences: torch.Tensor
) -> torch.Tensor:
    """table[sequences[row], position] of the `topk` largest of score[row, :length], -1 behind the last.

    table [sequences, positions] int32, sequences [rows] integers -> [rows, topk] int32
    """
    counts = lengths.clamp(max=score.shape[1]).to(torch.int32)
    slots = torch.empty((len(score), topk), dtype=torch.int32, device=score.device)
    rows = EntryRows(table, sequences.long(), counts, score.shape[1])
    select_entries(score, rows, topk, slots, torch.empty_like(counts))
    return slots


def fast_topk_transform_fused(
    score: torch.Tensor,
    lengths: torch.Tensor,
    page_table_size_1: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    topk: int,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """As fast_topk_v2, as cache slots: page_table_size_1 [sequences, positions], rows of a sequence by cu_seqlens_q."""
    rows = torch.arange(score.shape[0], device=score.device)
    if cu_seqlens_q is not None and page_table_size_1.shape[0] != score.shape[0]:
        rows = torch.searchsorted(cu_seqlens_q[1:].contiguous(), rows.to(cu_seqlens_q.dtype), right=True)
        rows = rows.clamp(max=page_table_size_1.shape[0] - 1)
    if has_kernel(score, row_starts) and page_table_size_1.dtype == torch.int32:
        return slots_of_largest(score, lengths, topk, page_table_size_1, rows)
    chosen = fast_topk_v2(score, lengths, topk, row_starts)
    slots = page_table_size_1[rows.unsqueeze(1), chosen.clamp(min=0).long()]
    return torch.where(chosen < 0, -1, slots).to(torch.int32)


def fast_topk_transform_ragged_fused(
    score: torch.Tensor,
    lengths: torch.Tensor,
    topk_indices_offset: torch.Tensor,
    topk: int,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """As fast_topk_v2, plus an offset for each row."""
    chosen = fast_topk_v2(score, lengths, topk, row_starts)
    return torch.where(chosen < 0, -1, chosen + topk_indices_offset.unsqueeze(1)).to(torch.int32)
