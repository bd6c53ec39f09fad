"""Undoes what the converter to GGUF changed in the values of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from sglang.srt.configs.gguf.tensors import Index

Change = Callable[[Sequence[torch.Tensor]], torch.Tensor]


def rows_of_halves(num_rows: int, num_heads: int) -> torch.Tensor:
    """Returns for each row of a query or key projection of Llama the row of the file that holds it, [num_rows].

    Files have the two dims of a head that rotate together as neighbours (2i and 2i + 1), checkpoints half a head apart.
    """
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).reshape(-1)


def row_orders(index: Index) -> Mapping[str, int]:
    """Returns the changes that only reorder rows, with the number of heads of each: these apply to codes, too."""
    return {"pairs_to_halves": index.num_heads, "pairs_to_halves_kv": index.num_kv_heads}


def minus_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Takes 1 from the weight of a norm: checkpoints store it minus 1, files whole."""
    return tensors[0].float() - 1


def as_row(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns a vector as a matrix of one row."""
    return tensors[0].reshape(1, -1)


def alternating_rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns gate and up of all experts, [E, N, ...] each, as [E, 2 N, ...] with gate's rows at even places."""
    return torch.stack(list(tensors), 2).flatten(1, 2)


def joined_kv_b(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns kv_b_proj [heads * (nope + v), rank] of the keys' part [heads, rank, nope] and the values' part
    [heads, v, rank]."""
    keys, values = tensors
    return torch.cat([keys.transpose(1, 2), values.to(keys.dtype)], 1).flatten(0, 1)


CHANGES: Mapping[str, Change] = {
    "minus_one": minus_one,
    "as_row": as_row,
    "alternating_rows": alternating_rows,
    "joined_kv_b": joined_kv_b,
}
"""The other changes by name: functions of the sources' values."""
WHOLE_CHANGES = frozenset({"minus_one", "as_row", "joined_kv_b"})
"""Those that need whole tensors: of the others the rows of the result are those of the sources."""
