"""Keeps the last rows of each request for the next step.

Reference: `last_rows.keep_last`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.compressed_step import TokenRequests
from sglang.srt.layers.triton_ops import pdl

LAUNCH = {"BLOCK": 1024, "num_warps": 4}
ONE_VALUE = {"BLOCK": 1, "num_warps": 1}
"""Launch for token ids."""


@triton.jit
def keep_last_kernel(
    new,  # [T, width]
    kept,  # [requests, SIZE, width]
    slots,  # [T]
    positions,  # [T]
    stops,  # [T]
    width,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, channels). Slot 0 is padding."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots + token).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    stop = tl.load(stops + token).to(tl.int64)
    if (slot != 0) & (position < stop) & (position >= stop - SIZE):
        values = tl.load(new + token * width + cols, mask=cols < width, other=0)
        at = kept + (slot * SIZE + position % SIZE) * width + cols
        tl.store(at, values.to(kept.dtype.element_ty), mask=cols < width)


def keep_last(new: torch.Tensor, kept: torch.Tensor, requests: TokenRequests) -> None:
    """Does as the reference. All contiguous; tokens of slot 0 are padding and write nothing."""
    num_tokens, width = len(new), kept[0, 0].numel()
    if num_tokens:
        launch = ONE_VALUE if width == 1 else LAUNCH
        keep_last_kernel[(num_tokens, triton.cdiv(width, launch["BLOCK"]))](
            new, kept, requests.slots, requests.positions, requests.stops, width, SIZE=kept.shape[1], **launch,
            **pdl.options(),
        )  # fmt: skip
