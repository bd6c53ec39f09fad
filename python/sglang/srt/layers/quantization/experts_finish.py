"""Merges checkpoint scales, stored per matrix, into the scales of the two products."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from sglang.srt.configs.quant_scheme import SCHEMES, Scheme
from sglang.srt.layers.moe.expert_weights import ExpertWeights
from sglang.srt.layers.quantization.stored import largest_usable
from sglang.srt.layers.quantization.zero_points import pack_scales

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StoredProduct:
    """A product as the checkpoint stores it. Matrix i begins at row `at[i]` of `data` [E, rows, ...]. `scale`: [E,
    matrices] fp32 for a scale per matrix, otherwise as in the scheme; `factor` (NVFP4's) and `inputs` (static
    activation scales) [E, matrices] fp32; `shift`, of the scale's shape: 8 minus the zero points of int4 groups."""

    name: str
    scheme: Scheme
    at: tuple[int, ...]
    data: torch.Tensor
    scale: torch.Tensor
    factor: torch.Tensor | None
    inputs: torch.Tensor | None
    shift: torch.Tensor | None = None

    @property
    def matrix_scales(self) -> torch.Tensor | None:
        """Returns the numbers per matrix that gate and up must share, or None."""
        if self.scheme.group == (0, 0):
            return None if self.inputs is None else self.scale
        return self.factor


def finish_pair(up: StoredProduct, down: StoredProduct, linear_in_up: bool) -> tuple[ExpertWeights, ExpertWeights]:
    """Returns w13 and w2. Changes the tensors in place. Raises UserError for invalid numbers.

    If the numbers of gate and up differ, gate's is used for both and the ratio is multiplied into the down
    projection's, which is exact if the gated activation is linear in up (`linear_in_up`). Otherwise the larger is used
    for both, and the values of the smaller are rounded again.
    """
    numbers, target = up.matrix_scales, down.matrix_scales
    if linear_in_up and numbers is not None and target is not None:
        gate, other = numbers[:, 0], numbers[:, 1]
        # What gate or up turn to zero stays zero.
        ratio = torch.where(gate > 0, other / gate, 1.0)
        other.copy_(gate)
        target *= ratio[:, None]
        if down.inputs is not None:
            down.inputs /= ratio[:, None]
    return _finish(up), _finish(down)


def _finish(product: StoredProduct) -> ExpertWeights:
    """Returns the weights. Activations are quantized once for all experts, so the largest static scale is used for all,
    which costs float formats no precision."""
    data, scale, scheme = product.data, product.scale, product.scheme
    if product.shift is not None:
        return ExpertWeights(data, scheme, _words(product.name, scale, product.shift))
    input_scale = None if product.inputs is None else largest_usable(product.name, product.inputs)
    if scheme.group == (0, 0):
        if input_scale is None:
            # A dynamic scale of all tokens would let them change each other's results: one a token, and scales a row.
            by_row = SCHEMES["fp8_channel" if scheme.activation else "fp8_channel_a16"]
            return ExpertWeights(data, by_row, _by_rows(scale, product.at, data.shape[1]))
        scale = _one_number(product, scale, data)
    global_scale = None if product.factor is None else _one_number(product, product.factor, scale)
    return ExpertWeights(data, scheme, scale, global_scale, input_scale)


def _words(name: str, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Returns words of scales and zero points, written over the scales [E, rows, groups]."""
    words = scale.view(torch.int16)
    for one, expert, shifts in zip(words, scale, shift, strict=True):  # all at once would need several times their size
        one.copy_(pack_scales(name, expert, 8 - shifts))
    return words


def _by_rows(scale: torch.Tensor, at: tuple[int, ...], rows: int) -> torch.Tensor:
    """Returns [E, rows] from [E, matrices]."""
    lengths = torch.tensor([*at[1:], rows], device=scale.device) - torch.tensor(at, device=scale.device)
    return scale.repeat_interleave(lengths, dim=1).contiguous()


def _one_number(product: StoredProduct, numbers: torch.Tensor, scaled: torch.Tensor) -> torch.Tensor:
    """Returns the largest numbers [E] of [E, matrices]. Rows of `scaled` [E, rows, ...] that had a smaller one are
    rescaled by the ratio and rounded again."""
    largest = numbers.max(dim=1).values
    smaller = (numbers < largest[:, None]).nonzero().tolist()
    for expert, matrix in smaller:
        end = product.at[matrix + 1] if matrix + 1 < len(product.at) else None
        values = scaled[expert, product.at[matrix] : end]
        values.copy_((values.float() * (numbers[expert, matrix] / largest[expert])).to(values.dtype))
    if smaller:
        what = "weights" if scaled is product.data else "block scales"
        logger.warning(
            "%s: scales of gate and up differ in %d of %d experts; the larger serves both, and the other's %s were"
            " rounded again", product.name, len(smaller), len(numbers), what,
        )  # fmt: skip
    return largest
