"""A problem whose tokens ranks share out, computed rank by rank in one process."""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.distributed.groups import Group
from sglang.srt.layers.attention.call_site import Attention
from sglang.srt.layers.attention.part_merge import _weighted, _weights
from sglang.srt.layers.attention.token_shares import own_rows
from sglang.srt.layers.step_rows import DecodeRows, TokenSlots
from sglang.srt.plan.ranks import RankLayout
from srt.layers.attention.backend_harness import FakeArch, layer_of, plan_of
from srt.layers.attention.reference import Problem


def own_layer(p: Problem, rank: int, size: int) -> Attention:
    """The layer with the rank's caches."""
    layer = layer_of(p, dcp_size=size)
    keys = p.k_cache[rank::size].contiguous()
    values = keys[..., : p.v_head_dim] if p.v_in_k else p.v_cache[rank::size].contiguous()
    layer.cache.bind({"k": keys, "v": values}, table=1)
    return layer


def whole_rows(p: Problem) -> DecodeRows:
    """Of requests whose new tokens are in the table and in the caches."""
    nowhere = torch.zeros(len(p.prefix_lens), dtype=torch.int64, device=p.device)
    lens = [length + 1 for length in p.prefix_lens]
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=p.device)
    return DecodeRows(p.req_pool_indices, seq_lens, (TokenSlots(p.req_to_token, nowhere),) * 2, lens)


def merged(p: Problem, size: int, backend: Any, **options: Any) -> torch.Tensor:
    """`options`: of the plan."""
    parts, sums = [], []
    for rank in range(size):
        layer = own_layer(p, rank, size)
        options = {"arch": FakeArch(2), **options}
        plan = plan_of(p, max_running_requests=len(p.prefix_lens), ranks=RankLayout(size, dcp_size=size), **options)
        builder = backend(plan, p.device).part_builder(layer.site.shape, len(p.prefix_lens))
        out = torch.full((len(p.prefix_lens), p.num_heads, p.v_head_dim), float("nan"), device=p.device, dtype=p.dtype)
        lse = torch.full((len(p.prefix_lens), p.num_heads), float("nan"), device=p.device)
        metadata = builder.build(own_rows(whole_rows(p), Group(rank, size)))
        for workspace in getattr(builder, "workspaces", {}).values():
            workspace.part_o.fill_(float("nan"))
            workspace.part_lse.fill_(float("nan"))
        metadata.attend_part(p.q, layer, out, lse)
        check_without(lse, torch.tensor(p.prefix_lens, device=p.device) < rank)
        parts.append(out)
        sums.append(lse)
    return weighted(parts, sums)


def check_without(lse: torch.Tensor, without: torch.Tensor) -> None:
    """without [D]: the rows that have no tokens."""
    assert (lse[without] == float("-inf")).all() and lse[~without].isfinite().all()


def weighted(parts: list[torch.Tensor], sums: list[torch.Tensor]) -> torch.Tensor:
    return _weighted(torch.stack(parts).float(), _weights(torch.stack(sums), None)[..., None]).sum(0)
