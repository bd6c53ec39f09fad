"""The norm of each expert's output, before outputs are weighted and added up."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class OutputNorm:
    """Norms an expert's output times `weight` [H] fp32, which all experts of a layer share."""

    weight: torch.Tensor
    eps: float

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the norms [..., H] of outputs, in plain torch."""
        scaled = (rows.float() * self.weight).to(rows.dtype).float()
        return (scaled * torch.rsqrt(scaled.square().mean(-1, keepdim=True) + self.eps)).to(rows.dtype)


def normed_outputs(rows: torch.Tensor, norm: OutputNorm | None) -> torch.Tensor:
    """Returns the outputs [..., H], or their norms where there is a norm."""
    return rows if norm is None else norm.of(rows)
