"""Expert routing: which experts a token goes to, and with what weights. References: the functions of `native_ops` with
the same names.

Common to all: `scale` multiplies the weights. `with_shared` appends one more choice, expert number E with weight 1: a
shared expert that is kept behind the routed ones. `num_valid` [1] int32 is how many of the tokens are no padding (of a
CUDA graph); the others get ids of -1, which name no expert, and weights 0. `expert_map` [E] int32 renames the chosen
experts: to their numbers on this rank, or -1.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sglang.srt.blocks.moe.reference import ImageCorrection
from sglang.srt.layers.triton_ops import pdl

LAUNCH = {"ROWS": 1, "num_warps": 1}
"""A token is one warp: choosing is a chain of reductions, which within a warp wait for no barrier, and of integers are
one instruction each (`redux.sync`) where those of floats are five shuffles."""
HASH_LAUNCH = {"ROWS": 4, "num_warps": 1}
LEAST: tl.constexpr = tl.constexpr(-(2**31))
"""Below `_ordered` of -inf."""


@triton.jit
def _softplus(x):
    """log(1 + exp(x)) to fp32's precision, for large negative x too, where it is exp(x)."""
    u = tl.exp(-tl.abs(x))
    w = 1.0 + u
    # What rounding w lost is put back by u / (w - 1).
    rest = tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
    return tl.maximum(x, 0.0) + rest


@triton.jit
def _score(x, SCORE: tl.constexpr):
    """The score of one expert alone; softmax is not among them."""
    if SCORE == "sigmoid":
        return tl.sigmoid(x)
    else:
        tl.static_assert(SCORE == "sqrtsoftplus")
        return tl.sqrt(_softplus(x))


@triton.jit
def _group_scores(choice, in_group):
    """choice [ROWS, GROUPS, MEMBERS] -> [ROWS, GROUPS]: the sum of each group's two largest."""
    first = tl.max(choice, axis=2)
    first_at = tl.min(tl.where(choice == first[:, :, None], in_group, 1 << 30), axis=2)
    second = tl.max(tl.where(in_group == first_at[:, :, None], -float("inf"), choice), axis=2)
    return first + second


@triton.jit
def _ordered(values):
    """fp32 -> int32 in the same order; no value is NaN or -0."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _best(values, numbers):
    """values [ROWS, N] int32, numbers [1, N] -> the number of each row's largest, the lowest among equals."""
    return tl.min(tl.where(values == tl.max(values, axis=1)[:, None], numbers, 1 << 30), axis=1)


@triton.jit
def _store_choices(weights, ids, chosen_weights, chosen_ids, row, valid, inside, COLUMNS, K, K_BLOCK, SHARED_ID):
    """chosen [ROWS, K_BLOCK] -> columns 0 to K - 1, and the shared expert in column K where there is one."""
    column = tl.arange(0, K_BLOCK)[None, :]
    target = row[:, None] * COLUMNS + column
    wanted = inside[:, None] & (column < K)
    tl.store(weights + target, tl.where(valid[:, None], chosen_weights, 0.0), mask=wanted)
    tl.store(ids + target, tl.where(valid[:, None], chosen_ids, -1), mask=wanted)
    if COLUMNS > K:
        tl.store(weights + row * COLUMNS + K, tl.where(valid, 1.0, 0.0), mask=inside)
        tl.store(ids + row * COLUMNS + K, tl.where(valid, SHARED_ID, -1), mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "image_token"])
def topk_kernel(
    logits,  # [T, E]
    bias,  # [E] or None
    image_bias,  # [E] fp32 in place of bias for tokens that are `image_token`, or None
    token_ids,  # [T] int64 with image_bias, or None
    weights,  # [T, COLUMNS] fp32
    ids,  # [T, COLUMNS] int32
    num_valid,  # [1] int32 or None
    expert_map,  # [E] int32 or None
    num_tokens,
    image_token,
    row_stride,
    scale,
    SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    MEMBER_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The K experts with the largest score plus bias, in descending order (lower id first among equals), of the
    TOP_GROUPS best of GROUPS groups of MEMBERS experts. The weight is the score alone. Blocks are powers of two."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = row < num_tokens
    slot = tl.arange(0, GROUP_BLOCK * MEMBER_BLOCK)[None, :]
    group, member = slot // MEMBER_BLOCK, slot % MEMBER_BLOCK
    exists = (group < GROUPS) & (member < MEMBERS)
    expert = group * MEMBERS + member
    # Only logits come from the layer, and of all kernels before only the one directly ahead may still run.
    if bias is not None:
        correction = tl.load(bias + expert, mask=exists, other=0.0).to(tl.float32)
        if image_bias is not None:
            token = tl.load(token_ids + row, mask=inside, other=0)  # those of the step, written before its layers
            of_images = tl.load(image_bias + expert, mask=exists, other=0.0)
            correction = tl.where((token == image_token)[:, None], of_images, correction)
    valid = inside
    if num_valid is not None:
        valid = row < tl.load(num_valid)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(logits + row[:, None] * row_stride + expert, mask=inside[:, None] & exists, other=-float("inf"))
    x = x.to(tl.float32)
    if SCORE == "softmax":
        score = tl.exp(x - tl.where(inside, tl.max(x, axis=1), 0.0)[:, None])
    else:
        score = _score(tl.where(exists, x, 0.0), SCORE)
    total = tl.sum(score, axis=1)  # softmax's
    choice = score
    if bias is not None:
        choice += correction
    # NaN is no number's equal: as the least of all it names experts that exist, where -inf names what does not.
    choice = tl.where(exists, tl.where(choice > -1e38, choice, -1e38), -float("inf"))
    if TOP_GROUPS < GROUPS:
        in_group = tl.arange(0, MEMBER_BLOCK)[None, None, :]
        by_group = tl.reshape(choice, (ROWS, GROUP_BLOCK, MEMBER_BLOCK))
        if SCORE == "softmax":
            group_score = tl.max(by_group, axis=2)
        else:
            group_score = _group_scores(by_group, in_group)
        number = tl.arange(0, GROUP_BLOCK)[None, :]
        group_score = _ordered(tl.where(number < GROUPS, group_score, -float("inf")))
        taken = tl.zeros((ROWS, GROUP_BLOCK * MEMBER_BLOCK), tl.int1)
        for _ in range(TOP_GROUPS):
            best = _best(group_score, number)
            taken = taken | (group == best[:, None])
            group_score = tl.where(number == best[:, None], LEAST, group_score)
        choice = tl.where(taken, choice, -float("inf"))

    column = tl.arange(0, K_BLOCK)[None, :]
    score_bits = score.to(tl.int32, bitcast=True)
    weight_bits = tl.zeros((ROWS, K_BLOCK), tl.int32)
    chosen_ids = tl.zeros((ROWS, K_BLOCK), tl.int32)
    order = _ordered(choice)
    for k in range(K):
        best = _best(order, slot)
        hit = slot == best[:, None]
        weight_bits = tl.where(column == k, tl.sum(tl.where(hit, score_bits, 0), axis=1)[:, None], weight_bits)
        best_id = best // MEMBER_BLOCK * MEMBERS + best % MEMBER_BLOCK
        chosen_ids = tl.where(column == k, best_id[:, None], chosen_ids)
        order = tl.where(hit, LEAST, order)
    chosen_weights = weight_bits.to(tl.float32, bitcast=True)
    if RENORMALIZE:
        chosen_weights = chosen_weights / (tl.sum(chosen_weights, axis=1) + 1e-20)[:, None]
    elif SCORE == "softmax":
        chosen_weights = chosen_weights / total[:, None]
    if expert_map is not None:
        chosen_ids = tl.load(expert_map + chosen_ids)
    _store_choices(
        weights, ids, chosen_weights * scale, chosen_ids, row, valid, inside, COLUMNS, K, K_BLOCK, GROUPS * MEMBERS
    )


@triton.jit(do_not_specialize=["num_tokens"])
def topk_hash_kernel(
    logits,  # [T, E]
    token_ids,  # [T] int64
    table,  # [V, K] int32
    weights,  # [T, COLUMNS] fp32
    ids,  # [T, COLUMNS] int32
    num_valid,  # [1] int32 or None
    expert_map,  # [E] int32 or None
    num_tokens,
    row_stride,
    num_experts,
    scale,
    SCORE: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The experts that the table names for each token; their scores, normalized, are the weights."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = row < num_tokens
    column = tl.arange(0, K_BLOCK)[None, :]
    wanted = inside[:, None] & (column < K)
    # As `topk_kernel`: the tokens are those of the step, written before its layers.
    token = tl.load(token_ids + row, mask=inside, other=0)
    expert = tl.load(table + token[:, None] * K + column, mask=wanted, other=0)
    chosen_id = expert
    if expert_map is not None:
        chosen_id = tl.load(expert_map + expert, mask=wanted, other=-1)
    valid = inside
    if num_valid is not None:
        valid = row < tl.load(num_valid)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(logits + row[:, None] * row_stride + expert, mask=wanted, other=0.0).to(tl.float32)
    score = tl.where(column < K, _score(x, SCORE), 0.0)
    chosen = score / (tl.sum(score, axis=1) + 1e-20)[:, None] * scale
    _store_choices(weights, ids, chosen, chosen_id, row, valid, inside, COLUMNS, K, K_BLOCK, num_experts)


def topk_softmax(
    router_logits: torch.Tensor,
    top_k: int,
    renormalize: bool,
    scale: float = 1.0,
    with_shared: bool = False,
    num_valid: torch.Tensor | None = None,
    groups: tuple[int, int] = (1, 1),
    expert_map: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weights [T, k] fp32 and expert ids [T, k] int32, largest first, for router_logits [T, E]. A group's score
    is that of its best expert."""
    return _topk("softmax", router_logits, None, top_k, renormalize, groups, scale, with_shared, num_valid, expert_map)


def topk_sigmoid(
    router_logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    renormalize: bool,
    groups: tuple[int, int] = (1, 1),
    scale: float = 1.0,
    with_shared: bool = False,
    num_valid: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    of_images: ImageCorrection | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weights [T, k] fp32 and ids [T, k] int32 of the largest sigmoid plus bias [E] among the best `groups[1]`
    of `groups[0]` groups, for router_logits [T, E]. `of_images`: replaces the bias for image tokens."""
    arguments = (router_logits, bias, top_k, renormalize, groups, scale, with_shared, num_valid, expert_map)
    return _topk("sigmoid", *arguments, of_images)


def topk_sqrtsoftplus(
    router_logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    renormalize: bool,
    groups: tuple[int, int] = (1, 1),
    scale: float = 1.0,
    with_shared: bool = False,
    num_valid: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    of_images: ImageCorrection | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Does as `topk_sigmoid` with scores sqrt(softplus(logits)) (DeepSeek-V4)."""
    arguments = (router_logits, bias, top_k, renormalize, groups, scale, with_shared, num_valid, expert_map)
    return _topk("sqrtsoftplus", *arguments, of_images)


def topk_hash(
    router_logits: torch.Tensor,
    token_ids: torch.Tensor,
    table: torch.Tensor,
    score: str,
    scale: float = 1.0,
    with_shared: bool = False,
    num_valid: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """router_logits [T, E], token_ids [T] int64, table [V, k] int32 contiguous -> weights [T, k] fp32 (scores "sigmoid"
    or "sqrtsoftplus" of the named experts, summing to `scale`), ids [T, k] int32 in the table's order."""
    num_tokens, num_experts = router_logits.shape
    top_k = table.shape[1]
    weights, ids = _outputs(router_logits, top_k + with_shared)
    if num_tokens:
        topk_hash_kernel[(triton.cdiv(num_tokens, HASH_LAUNCH["ROWS"]),)](
            router_logits, token_ids, table, weights, ids, num_valid, expert_map,
            num_tokens, router_logits.stride(0), num_experts, scale,
            SCORE=score, **choice_constants(top_k, with_shared), **HASH_LAUNCH, **pdl.options(),
        )  # fmt: skip
    return weights, ids


def _topk(
    score: str,
    router_logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    renormalize: bool,
    groups: tuple[int, int],
    scale: float,
    with_shared: bool,
    num_valid: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    of_images: ImageCorrection | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_experts = router_logits.shape
    image_bias, token_ids, image_token = None, None, 0
    if of_images is not None:
        assert bias is not None, "tokens of text have one, too"
        image_bias, token_ids, image_token = of_images.bias, of_images.token_ids, of_images.token
    weights, ids = _outputs(router_logits, top_k + with_shared)
    if num_tokens:
        topk_kernel[(triton.cdiv(num_tokens, LAUNCH["ROWS"]),)](
            router_logits, bias, image_bias, token_ids, weights, ids, num_valid, expert_map, num_tokens, image_token,
            router_logits.stride(0), scale,
            SCORE=score, RENORMALIZE=renormalize, **topk_constants(num_experts, top_k, groups, with_shared), **LAUNCH,
            **pdl.options(),
        )  # fmt: skip
    return weights, ids


def topk_constants(num_experts: int, top_k: int, groups: tuple[int, int], with_shared: bool) -> dict[str, Any]:
    """Returns the constants for which a launch of `topk_kernel` is specialized."""
    num_groups, top_groups = groups
    # One group of everything and all groups of everything are the same.
    num_groups = num_groups if top_groups < num_groups else 1
    members = num_experts // num_groups
    return {
        "GROUPS": num_groups,
        "TOP_GROUPS": min(top_groups, num_groups),
        "MEMBERS": members,
        "GROUP_BLOCK": triton.next_power_of_2(num_groups),
        "MEMBER_BLOCK": triton.next_power_of_2(members),
        **choice_constants(top_k, with_shared),
    }


def choice_constants(top_k: int, with_shared: bool) -> dict[str, Any]:
    """Returns the constants of kernels that choose `top_k` experts. with_shared: a column follows for the shared
    expert."""
    return {"K": top_k, "K_BLOCK": triton.next_power_of_2(top_k), "COLUMNS": top_k + with_shared}


def _outputs(router_logits: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape, device = (router_logits.shape[0], columns), router_logits.device
    return torch.empty(shape, dtype=torch.float32, device=device), torch.empty(shape, dtype=torch.int32, device=device)
