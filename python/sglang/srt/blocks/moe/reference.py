"""The ops of MoE routers in plain torch: the CPU kernels, and the reference for tests. Math is done in fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sglang.srt.kernels.op import Op

Routing = tuple[torch.Tensor, torch.Tensor]
"""Weights [T, k] fp32 and expert ids [T, k] int32."""


@dataclass(frozen=True, slots=True)
class ImageCorrection:
    """Score corrections of image tokens that replace the router's bias: `bias` [E] fp32 applies to the step's
    `token_ids` [T] int64 that equal `token`."""

    bias: torch.Tensor
    token_ids: torch.Tensor
    token: int


def topk_softmax(
    router_logits: torch.Tensor,
    top_k: int,
    renormalize: bool,
    scale: float = 1.0,
    with_shared: bool = False,
    num_valid: torch.Tensor | None = None,
    groups: tuple[int, int] = (1, 1),
    expert_map: torch.Tensor | None = None,
) -> Routing:
    """Returns weights [T, k] fp32 (of the softmax over all experts; summing to 1 if `renormalize`) and expert ids [T,
    k] int32, largest first, for router_logits [T, E]. With `renormalize` the weights equal a softmax over the chosen
    logits (GPT-OSS). `groups` (number, best): only experts of the best groups of neighbours are eligible; a group's
    score is that of its best expert. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.3.

    For all routings: `scale` multiplies the weights; `with_shared` appends expert E with weight 1 to every token's;
    from token `num_valid` [1] int32 on, ids are -1 and weights 0.
    """
    scores = torch.softmax(router_logits.float(), dim=-1)
    num_groups, top_groups = groups
    if top_groups < num_groups:
        by_group = scores.unflatten(1, (num_groups, -1))
        best = by_group.amax(-1).topk(top_groups, dim=-1).indices
        taken = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter_(1, best, True)
        scores = by_group.masked_fill(~taken[..., None], -torch.inf).flatten(1)
    weights, ids = scores.topk(top_k, dim=-1)
    return _routed(weights, ids, renormalize, scale, router_logits.shape[1], with_shared, num_valid, expert_map)


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
) -> Routing:
    """Returns weights [T, k] fp32, the sigmoids of the experts with the largest sigmoid plus bias [E] among the best
    `groups[1]` of `groups[0]` groups of neighbours, and ids [T, k] int32 in that order, for router_logits [T, E].
    `of_images`: replaces the bias for image tokens.

    A group's score is the sum of its two largest. Source: DeepSeek-V3 technical report, section 2.1.2.
    """
    scores = router_logits.float().sigmoid()
    bias = _correction(bias, of_images)
    return _choose(scores, bias, top_k, renormalize, groups, scale, with_shared, num_valid, expert_map)


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
) -> Routing:
    """Selects experts as `topk_sigmoid` does, with scores sqrt(softplus(logits)) (DeepSeek-V4)."""
    scores = F.softplus(router_logits.float()).sqrt()
    bias = _correction(bias, of_images)
    return _choose(scores, bias, top_k, renormalize, groups, scale, with_shared, num_valid, expert_map)


def topk_hash(
    router_logits: torch.Tensor,
    token_ids: torch.Tensor,
    table: torch.Tensor,
    score: str,
    scale: float = 1.0,
    with_shared: bool = False,
    num_valid: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> Routing:
    """Returns weights [T, k] fp32 and ids [T, k] int32 of the experts that table [V, k] int32 lists for each of
    token_ids [T], weighted by their normalized scores ("sigmoid" or "sqrtsoftplus" of router_logits [T, E])."""
    logits = router_logits.float()
    scores = logits.sigmoid() if score == "sigmoid" else F.softplus(logits).sqrt()
    ids = table[token_ids].long()
    return _routed(scores.gather(1, ids), ids, True, scale, router_logits.shape[1], with_shared, num_valid, expert_map)


def _correction(bias: torch.Tensor | None, of_images: ImageCorrection | None) -> torch.Tensor | None:
    """Returns the score corrections [E], or [T, E] with images."""
    if of_images is None:
        return bias
    assert bias is not None, "tokens of text have one, too"
    return torch.where((of_images.token_ids == of_images.token)[:, None], of_images.bias, bias.float())


def _choose(
    scores: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    renormalize: bool,
    groups: tuple[int, int],
    scale: float,
    with_shared: bool,
    num_valid: torch.Tensor | None,
    expert_map: torch.Tensor | None,
) -> Routing:
    choice = scores if bias is None else scores + bias.float()
    num_groups, top_groups = groups
    if top_groups < num_groups:
        by_group = choice.unflatten(1, (num_groups, -1))
        best = by_group.topk(2, dim=-1).values.sum(-1).topk(top_groups, dim=-1).indices
        taken = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter_(1, best, True)
        choice = by_group.masked_fill(~taken[..., None], -torch.inf).flatten(1)
    ids = choice.topk(top_k, dim=-1).indices
    return _routed(scores.gather(1, ids), ids, renormalize, scale, scores.shape[1], with_shared, num_valid, expert_map)


def _routed(
    weights: torch.Tensor,
    ids: torch.Tensor,
    renormalize: bool,
    scale: float,
    num_experts: int,
    with_shared: bool,
    num_valid: torch.Tensor | None,
    expert_map: torch.Tensor | None,
) -> Routing:
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights, ids = weights * scale, ids.to(torch.int32) if expert_map is None else expert_map[ids]
    if with_shared:
        weights, ids = F.pad(weights, (0, 1), value=1.0), F.pad(ids, (0, 1), value=num_experts)
    if num_valid is not None:
        padding = torch.arange(len(ids), device=ids.device)[:, None] >= num_valid
        weights, ids = weights.masked_fill(padding, 0.0), ids.masked_fill(padding, -1)
    return weights, ids


TOPK_SOFTMAX = Op("topk_softmax", topk_softmax)
TOPK_SIGMOID = Op("topk_sigmoid", topk_sigmoid)
TOPK_SQRTSOFTPLUS = Op("topk_sqrtsoftplus", topk_sqrtsoftplus)
TOPK_HASH = Op("topk_hash", topk_hash)
