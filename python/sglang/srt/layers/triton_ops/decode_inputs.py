"""The inputs of a decode step from the tables by request slot, and its writes. Reference:
`native_ops.decode_inputs`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops import pdl

LAUNCH = {"BLOCK": 128, "num_warps": 4}


@triton.jit(do_not_specialize=["num_reqs", "num_rows", "context_len"])
def decode_inputs_kernel(
    slots, seq_lens, out_cache_loc, next_tokens, req_to_token, input_ids, positions, window_locs,
    num_reqs, num_rows, context_len, window_stride, WINDOWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """req_to_token [1 + WINDOWS, num_rows, context_len] int32, window_locs [WINDOWS, window_stride], the rest as in
    `decode_inputs`; BLOCK requests a program."""
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = request < num_reqs
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots + request, mask=inside, other=0)
    position = tl.load(seq_lens + request, mask=inside, other=1).to(tl.int64) - 1
    loc = tl.load(out_cache_loc + request, mask=inside, other=0)
    tl.store(input_ids + request, tl.load(next_tokens + slot, mask=inside, other=0), mask=inside)
    tl.store(positions + request, position, mask=inside)
    entry = slot * context_len + position
    tl.store(req_to_token + entry, loc.to(tl.int32), mask=inside)
    for _ in tl.static_range(WINDOWS):
        entry += num_rows.to(tl.int64) * context_len
        tl.store(window_locs + request, tl.load(req_to_token + entry, mask=inside, other=0).to(tl.int64), mask=inside)
        window_locs += window_stride


def decode_inputs(
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    next_tokens: torch.Tensor,
    req_to_token: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Writes the new tokens' slots into the first table; returns input ids and positions [B], and the slots in the
    other tables [W, B], int64. slots, out_cache_loc [B] int64; seq_lens [B] int32; next_tokens [R] int64; req_to_token
    [1 + W, R, context] int32; all contiguous."""
    num_reqs = len(slots)
    num_tables, num_rows, context_len = req_to_token.shape
    input_ids, positions = torch.empty_like(slots), torch.empty_like(slots)
    # Each row begins where kernels expect indices to begin: at a multiple of 16 bytes.
    stride = triton.cdiv(num_reqs, 16) * 16
    window_locs = torch.empty((num_tables - 1, stride), dtype=torch.int64, device=slots.device)
    if num_reqs:
        decode_inputs_kernel[(triton.cdiv(num_reqs, LAUNCH["BLOCK"]),)](
            slots, seq_lens, out_cache_loc, next_tokens, req_to_token, input_ids, positions, window_locs,
            num_reqs, num_rows, context_len, stride, WINDOWS=num_tables - 1, **LAUNCH,
            **pdl.options(),
        )  # fmt: skip
    return input_ids, positions, window_locs[:, :num_reqs]
