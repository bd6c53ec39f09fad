"""DoRA: the lengths of the rows of W + B A, by which an adapter's own lengths m become factors g = m / ||W + B A||.

A layer with such an adapter returns g (W x) + g B A x + bias. g B is one matrix, and so takes the place of B; the
layer's own output is scaled before B A x is added (`AdapterMemory.scales`).

W is held in many forms, some of which only a kernel reads. So it is asked of the layer's own product, column by column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang.srt.distributed.groups import Group

Product = Callable[[torch.Tensor], torch.Tensor]

MOST_COLUMNS, MOST_OUTPUTS = 256, 1 << 22
"""Columns of W, and numbers of them, that are computed at once."""
SCALED_AT_ONCE = 1 << 21
"""Numbers of an output that are scaled at once: 16 MB of factors and shifts."""


def unscaled(slots: int, rows: int, device: torch.device) -> torch.Tensor:
    """Returns scales that leave a layer's own output as it is [1 + slots, 2, rows]."""
    return torch.tensor([1.0, 0.0], device=device)[None, :, None].repeat(1 + slots, 1, rows)


def scale_rows(out: torch.Tensor, slots: torch.Tensor, scales: torch.Tensor) -> None:
    """Scales a layer's own output [T, N] in place. slots [T]: of each token's adapter, counted from 1; 0: none."""
    step = max(1, SCALED_AT_ONCE // out.shape[1])
    for some, places in zip(out.split(step), slots.split(step), strict=True):
        factors = scales[places]
        some.copy_(torch.addcmul(factors[:, 1], some.float(), factors[:, 0]))


class Base(Protocol):
    """What a layer computes without adapters, whose rows DoRA may scale."""

    def longest_row(self, height: int, dtype: torch.dtype) -> float:
        """Returns how long rows may be, so that answers can hold what they give."""

    def bias(self, like: torch.Tensor) -> torch.Tensor:
        """Returns what the layer adds [N] fp32. like: [..., K], an input."""

    def lengths(self, a: torch.Tensor, b: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
        """Returns the lengths of the rows of W + B A [N] fp32. a [P, R, K], b [N, R], parts: as in `AdapterWeights`. A
        collective of the ranks that have the columns."""


@dataclass(frozen=True, slots=True)
class EmbeddingRows:
    """An embedding as such a layer: W is the transpose of the rows [K, N] of this rank's K tokens, and a row of W a
    column of these. `group`: the ranks that have the other tokens."""

    rows: torch.Tensor
    group: Group

    def longest_row(self, height: int, dtype: torch.dtype) -> float:
        """Returns it for inputs that are 1 in one place."""
        return _largest_number(height, dtype)

    def bias(self, like: torch.Tensor) -> torch.Tensor:
        """Returns zeros."""
        return torch.zeros(self.rows.shape[1], device=like.device)

    def lengths(self, a: torch.Tensor, b: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
        """Returns them as `Base` says, in shares of tokens: the rows may lie in main memory."""
        squares, begin = torch.zeros(len(b), dtype=torch.float32, device=b.device), 0
        for some in self.rows.split(max(16, MOST_OUTPUTS // len(b))):
            columns = a[0, :, begin : begin + len(some)].float().T @ b.float().T
            squares += (some.to(b.device).float() + columns).square().sum(0)
            begin += len(some)
        return self.group.all_reduce(squares, exact=True).sqrt()


def _largest_number(height: int, dtype: torch.dtype) -> float:
    """Returns the largest number of an output [T, height] that its type holds, and whose squares have a finite sum."""
    return min(torch.finfo(dtype).max, (torch.finfo(torch.float32).max / height) ** 0.5)


@dataclass(frozen=True, slots=True)
class BaseProduct:
    """A layer's own product, x [T, K] -> [T, N], of whose inputs this rank has the first `cols`. `group`: the ranks
    that have the others; None: this one has all."""

    product: Product
    cols: int
    group: Group | None

    def longest_row(self, height: int, dtype: torch.dtype) -> float:
        """Returns it for inputs whose numbers are about 1, as behind a norm."""
        cols = self.cols * (1 if self.group is None else self.group.size)
        return float(_largest_number(height, dtype) / cols**0.5)

    def bias(self, like: torch.Tensor) -> torch.Tensor:
        """Returns what the product adds."""
        return self.product(like.new_zeros((1, like.shape[-1])))[0].float()

    def lengths(self, a: torch.Tensor, b: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
        """Returns them as `Base` says."""
        bias, height = self.bias(a), len(b)
        squares = torch.zeros(height, dtype=torch.float32, device=b.device)
        of_parts = [torch.nonzero(parts == part).flatten() for part in range(len(a))]
        step = min(MOST_COLUMNS, max(16, MOST_OUTPUTS // height))
        rounded = 0.0
        for begin in range(0, self.cols, step):
            count = min(step, self.cols - begin)
            x = a.new_zeros((count, a.shape[2]))
            x[torch.arange(count), torch.arange(begin, begin + count)] = 1.0
            columns = self.product(x).float() - bias
            rounded = rounded or self._rounded(x, columns, bias)
            columns /= rounded or 1.0
            for part, rows in enumerate(of_parts):
                columns[:, rows] += a[part, :, begin : begin + count].float().T @ b[rows].float().T
            squares += columns.square().sum(0)
        return (squares if self.group is None else self.group.all_reduce(squares, exact=True)).sqrt()

    def _rounded(self, x: torch.Tensor, columns: torch.Tensor, bias: torch.Tensor) -> float:
        """Returns what a product of many rows makes of the number 1 where it rounds inputs by a scale that does not
        depend on them: the same for all columns. It is known from one row alone, which is multiplied in 16 bits; 0.0:
        these columns do not tell, because they are zeros."""
        longest = int(columns.square().sum(1).argmax())
        alone = (self.product(x[longest : longest + 1])[0].float() - bias).norm()
        return float(columns[longest].norm() / alone) if alone > 0 else 0.0
