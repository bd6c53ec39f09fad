"""Expert routing. Reference: `native_ops.topk_softmax`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 4
"""Tokens a program."""


@triton.jit(do_not_specialize=["num_tokens"])
def topk_softmax_kernel(
    logits,  # [T, E]
    weights,  # [T, K] fp32
    ids,  # [T, K] int32
    num_tokens,
    row_stride,
    num_experts,
    RENORMALIZE: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Softmax over all experts, the K largest in descending order (lower id first among equals)."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    expert = tl.arange(0, EXPERTS)[None, :]
    inside = (row[:, None] < num_tokens) & (expert < num_experts)
    x = tl.load(logits + row[:, None] * row_stride + expert, mask=inside, other=-float("inf")).to(tl.float32)
    peak = tl.where(row < num_tokens, tl.max(x, axis=1), 0.0)
    exponentials = tl.exp(x - peak[:, None])
    total = tl.sum(exponentials, axis=1)

    column = tl.arange(0, K_BLOCK)[None, :]
    chosen_weights = tl.zeros((ROWS, K_BLOCK), tl.float32)
    chosen_ids = tl.zeros((ROWS, K_BLOCK), tl.int32)
    for k in range(K):
        best = tl.max(exponentials, axis=1)
        best_id = tl.min(tl.where(exponentials == best[:, None], expert, EXPERTS), axis=1)
        chosen_weights = tl.where(column == k, best[:, None], chosen_weights)
        chosen_ids = tl.where(column == k, best_id[:, None], chosen_ids)
        exponentials = tl.where(expert == best_id[:, None], -1.0, exponentials)
    divisor = total
    if RENORMALIZE:
        divisor = tl.sum(chosen_weights, axis=1)
    chosen_weights = chosen_weights / divisor[:, None]
    target = row[:, None] * K + column
    wanted = (row[:, None] < num_tokens) & (column < K)
    tl.store(weights + target, chosen_weights, mask=wanted)
    tl.store(ids + target, chosen_ids, mask=wanted)


def topk_softmax(router_logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """router_logits [T, E] -> weights [T, k] fp32, expert ids [T, k] int32, largest first."""
    num_tokens, num_experts = router_logits.shape
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=router_logits.device)
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=router_logits.device)
    if num_tokens:
        topk_softmax_kernel[(triton.cdiv(num_tokens, ROWS),)](
            router_logits,
            weights,
            ids,
            num_tokens,
            router_logits.stride(0),
            num_experts,
            RENORMALIZE=renormalize,
            K=top_k,
            K_BLOCK=triton.next_power_of_2(top_k),
            EXPERTS=triton.next_power_of_2(num_experts),
            ROWS=ROWS,
            num_warps=4,
        )
    return weights, ids
