"""Image features that replace the embeddings of placeholder tokens.

A step launched kernel by kernel has an index of the placeholder tokens. A step in a graph has a row for every token and
a mask, because the placeholders change from replay to replay while shapes must not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class InputRows(Protocol):
    """Feature rows of width H for some of a step's T tokens, and for the same tokens the deepstack rows that are added
    to the residual stream after each of the first `num_levels` layers."""

    @property
    def width(self) -> int:
        """Returns H."""

    @property
    def num_levels(self) -> int:
        """Returns the number of leading layers after which deepstack rows are added."""

    def put(self, embedded: torch.Tensor) -> torch.Tensor:
        """Returns embedded [T, H] with the features in place of their tokens' embeddings. May overwrite `embedded`."""

    def put_ids(self, ids: torch.Tensor, token: int) -> torch.Tensor:
        """Returns ids [T] with `token` in place of these tokens."""

    def add_behind(self, layer: int, stream: torch.Tensor) -> None:
        """Adds the layer's deepstack rows to the stream [T, H] in place."""

    def following(self, first_tokens: torch.Tensor, num_tokens: int) -> MaskedRows:
        """Returns the features of the next tokens: row i holds those of token i + 1, for a step of T = num_tokens.
        Those of the prompts' `first_tokens` [P], which may include T, are dropped. Has no deepstack rows."""


class _Sizes:
    """The sizes of both kinds of rows."""

    __slots__ = ()
    rows: torch.Tensor
    behind_layers: tuple[torch.Tensor, ...]

    @property
    def width(self) -> int:
        return self.rows.shape[1]

    @property
    def num_levels(self) -> int:
        return len(self.behind_layers)


@dataclass(frozen=True, slots=True)
class EmbeddingRows(_Sizes):
    """Implements InputRows with an index: rows [N, H] for the tokens `index` [N], and [N, H] per deepstack level."""

    index: torch.Tensor
    rows: torch.Tensor
    behind_layers: tuple[torch.Tensor, ...] = ()

    def put(self, embedded: torch.Tensor) -> torch.Tensor:
        embedded[self.index] = self.rows.to(embedded.dtype)
        return embedded

    def put_ids(self, ids: torch.Tensor, token: int) -> torch.Tensor:
        return ids.index_fill(0, self.index, token)

    def add_behind(self, layer: int, stream: torch.Tensor) -> None:
        stream.index_add_(0, self.index, self.behind_layers[layer])

    def following(self, first_tokens: torch.Tensor, num_tokens: int) -> MaskedRows:
        """Does as `InputRows.following`. Only the device knows how many rows are dropped, so these go to an extra last
        row."""
        is_first = _chosen(first_tokens, num_tokens + 1)
        index = torch.where(is_first[self.index], num_tokens, self.index - 1)
        rows = self.rows.new_zeros((num_tokens + 1, self.width)).index_copy_(0, index, self.rows)
        return MaskedRows(_chosen(index, num_tokens + 1)[:-1], rows[:-1])


@dataclass(frozen=True, slots=True)
class MaskedRows(_Sizes):
    """Implements InputRows with a mask: rows [T, H] that replace embeddings where `mask` [T] is true; and [T, H] per
    deepstack level, zero elsewhere so that they can be added unconditionally."""

    mask: torch.Tensor
    rows: torch.Tensor
    behind_layers: tuple[torch.Tensor, ...] = ()

    def put(self, embedded: torch.Tensor) -> torch.Tensor:
        return torch.where(self.mask[:, None], self.rows.to(embedded.dtype), embedded)

    def put_ids(self, ids: torch.Tensor, token: int) -> torch.Tensor:
        return ids.masked_fill(self.mask, token)

    def add_behind(self, layer: int, stream: torch.Tensor) -> None:
        stream.add_(self.behind_layers[layer])

    def following(self, first_tokens: torch.Tensor, num_tokens: int) -> MaskedRows:
        """Does as `InputRows.following`. A step's first token decodes or begins a prompt, so the row that wraps around
        to the end is masked out."""
        is_first = _chosen(first_tokens, num_tokens + 1)
        return MaskedRows((self.mask & ~is_first[:-1]).roll(-1), self.rows.roll(-1, 0))

    def at(self, tokens: torch.Tensor) -> MaskedRows:
        """Returns the rows of the tokens [N], without deepstack rows."""
        return MaskedRows(self.mask[tokens], self.rows[tokens])


def _chosen(index: torch.Tensor, count: int) -> torch.Tensor:
    """Returns [count] bool, true at `index` [N]."""
    return torch.zeros(count, dtype=torch.bool, device=index.device).index_fill_(0, index.long(), True)
