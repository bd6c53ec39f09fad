"""Inputs of a step that are no tokens: features of images in place of the embeddings of placeholders.

A step that is launched kernel by kernel names the tokens that have some. A step in a graph has a row for each of its
tokens, and a mask: which tokens are placeholders changes from one replay to the next, and shapes must not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class InputRows(Protocol):
    """Rows of width H for some of the T tokens of a step, and for the same tokens what is added to the stream behind
    the first `num_levels` layers."""

    @property
    def width(self) -> int:
        """H."""

    @property
    def num_levels(self) -> int: ...

    def put(self, embedded: torch.Tensor) -> torch.Tensor:
        """embedded [T, H] -> the same with these rows in place of the embeddings of their tokens. May write to
        `embedded`."""

    def put_ids(self, ids: torch.Tensor, token: int) -> torch.Tensor:
        """ids [T] -> the same with `token` in place of these tokens."""

    def add_behind(self, layer: int, stream: torch.Tensor) -> None:
        """Adds to the stream [T, H] behind a layer what the rows bring for it, in place."""

    def following(self, first_tokens: torch.Tensor, num_tokens: int) -> MaskedRows:
        """Returns the rows that stand for the tokens behind those of a step of T = num_tokens: those of token i + 1 for
        row i. No row has those of the prompts' `first_tokens` [P], which may name T, too. Nothing is added behind
        layers."""


class _Sizes:
    """What both kinds of rows have."""

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
    """Implements InputRows: rows [N, H] in place of the embeddings of the tokens `index` [N], and [N, H] for each
    level."""

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
        """The number of rows that first tokens have is known to the device alone: they go to a row behind all."""
        is_first = _chosen(first_tokens, num_tokens + 1)
        index = torch.where(is_first[self.index], num_tokens, self.index - 1)
        rows = self.rows.new_zeros((num_tokens + 1, self.width)).index_copy_(0, index, self.rows)
        return MaskedRows(_chosen(index, num_tokens + 1)[:-1], rows[:-1])


@dataclass(frozen=True, slots=True)
class MaskedRows(_Sizes):
    """Implements InputRows: a row for each token, rows [T, H], which stands in place of its embedding where `mask` [T]
    says so; and [T, H] for each level, zeros where it does not, so that these are added without looking."""

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
        """The first token of a step decodes or begins a prompt: what comes round to the last row is no image's."""
        is_first = _chosen(first_tokens, num_tokens + 1)
        return MaskedRows((self.mask & ~is_first[:-1]).roll(-1), self.rows.roll(-1, 0))

    def at(self, tokens: torch.Tensor) -> MaskedRows:
        """Returns the rows of these tokens, [N] of T. Nothing is added behind layers."""
        return MaskedRows(self.mask[tokens], self.rows[tokens])


def _chosen(index: torch.Tensor, count: int) -> torch.Tensor:
    """Returns [count] bool, true at `index` [N]."""
    return torch.zeros(count, dtype=torch.bool, device=index.device).index_fill_(0, index.long(), True)
