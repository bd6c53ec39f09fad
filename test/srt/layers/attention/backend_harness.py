"""A stand-in plan, cache and batch for attention backends."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from sglang.srt.hardware.arch import current_arch
from sglang.srt.kernels.launch import FallbackTiles
from sglang.srt.kernels.tiles import attention_tiles
from sglang.srt.layers.attention.call_site import Attention
from sglang.srt.layers.attention.sites import AttentionSites
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.step_rows import DecodeRows, ExtendRows, TokenSlots
from sglang.srt.mem_cache.memory_pool import STORAGE_DTYPES, CacheStore
from sglang.srt.plan.caches import CacheGroup
from sglang.srt.plan.layer_spec import AttentionShape, AttentionSite
from sglang.srt.plan.ranks import ONE_RANK, RankLayout
from sglang.srt.plan.step_widths import ONE_TOKEN, StepWidths
from srt.layers.attention.reference import Problem


@dataclass
class FakeArch:
    num_sms: int = 8
    features: frozenset[str] = field(default_factory=lambda: current_arch().features)


@dataclass
class FakePlan:
    """The part of Plan that backends read."""

    shape: AttentionShape
    window: int = 0
    kv_cache_dtype: str = "bfloat16"
    max_running_requests: int = 2
    verified_tokens: int = 1
    step_widths: StepWidths = ONE_TOKEN
    cuda_graph_bs: tuple[int, ...] = ()
    ranks: RankLayout = ONE_RANK
    tokens_per_step: int = 64
    page_size: int = 1
    context_len: int = 512
    draft: None = None
    dtype: str = "bfloat16"
    device: str = "cpu"
    arch: FakeArch = field(default_factory=FakeArch)
    choices: dict[str, Any] = field(default_factory=dict)
    description: Any = None
    caches: tuple[CacheGroup, ...] = ()
    attention_sites: tuple[AttentionSite, ...] = ()

    def __post_init__(self) -> None:
        self.attention_sites = self.attention_sites or (AttentionSite(self.shape, self.window),)

    def fallbacks(self, op: str) -> FallbackTiles:
        tiles = attention_tiles(op, self.shape.head_dim, self.shape.v_head_dim, "bfloat16", ())
        return FallbackTiles(op, tiles, __name__)

    @property
    def attention_shapes(self) -> tuple[AttentionShape, ...]:
        return (self.shape,)

    def attention_op(self, op: str, shape: AttentionShape) -> str:
        return op


def cache_of(p: Problem) -> CacheStore:
    cache = CacheStore(0, "kv")
    cache.bind({"k": p.k_cache, "v": p.v_cache}, table=0)
    cache.k_scale, cache.v_scale = p.k_scale, p.v_scale
    return cache


def share_cache(first: Problem, second: Problem) -> None:
    """Put the entries of both in one cache."""
    second.req_to_token += len(first.k_cache)
    first.k_cache = second.k_cache = torch.cat((first.k_cache, second.k_cache))
    first.v_cache = second.v_cache = torch.cat((first.v_cache, second.v_cache))


def plan_of(p: Problem, **kwargs: Any) -> FakePlan:
    dtype = next(name for name, dtype in STORAGE_DTYPES.items() if dtype == p.k_cache.dtype)
    return FakePlan(layer_of(p).site.shape, kv_cache_dtype=dtype, page_size=p.page_size, device=p.device, **kwargs)


def layer_of(p: Problem, **kwargs: Any) -> Attention:
    return Attention(cache_of(p), p.num_heads, p.num_kv_heads, p.head_dim, p.head_dim**-0.5, p.v_head_dim, **kwargs)


def new_slots(p: Problem) -> torch.Tensor:
    """[T] int64, the cache slots of the new tokens."""
    rows = zip(p.req_pool_indices.tolist(), p.prefix_lens, p.new_lens, strict=True)
    return torch.cat([p.req_to_token[row, old : old + new] for row, old, new in rows]).long()


def store_new_tokens(p: Problem) -> None:
    """What a layer does before it attends."""
    for cache, new, scale in ((p.k_cache, p.k, p.k_scale), (p.v_cache, p.v, p.v_scale)):
        stored = (new / scale).to(cache.dtype)
        # Indexing is not implemented for float8 on every device.
        bits = torch.uint8 if cache.element_size() == 1 else cache.dtype
        cache.view(bits)[new_slots(p)] = stored.view(bits)


class Mode(Enum):
    EXTEND = "extend"
    DECODE = "decode"


def sites_of(plan: FakePlan, backend: Any, extend: Any = None) -> AttentionSites:
    """Of the plan's sites; another backend may compute prompts."""
    sites = plan.attention_sites
    return AttentionSites(
        {site: backend.decode_builder(site) for site in sites},
        {site: (extend or backend).extend_builder(site) for site in sites},
    )


def decode_rows(p: Problem) -> DecodeRows:
    new = torch.tensor(p.new_lens, dtype=torch.int32, device=p.device)
    slots = (TokenSlots(p.req_to_token, new_slots(p)),)
    return DecodeRows(p.req_pool_indices, p.prefix + new, slots, [n + 1 for n in p.prefix_lens])


def extend_rows(p: Problem) -> ExtendRows:
    new = torch.tensor(p.new_lens, dtype=torch.int32, device=p.device)
    lens = [a + b for a, b in zip(p.prefix_lens, p.new_lens, strict=True)]
    slots = (TokenSlots(p.req_to_token, new_slots(p)),)
    return ExtendRows(p.req_pool_indices, p.prefix + new, p.prefix, p.start_loc, slots, p.new_lens, p.prefix_lens, lens)


def batch_of(p: Problem, mode: Mode, sites: AttentionSites | None = None) -> ForwardBatch:
    """Ready for a layer, if there are `sites`."""
    tokens = torch.zeros(sum(p.new_lens), dtype=torch.int64, device=p.device)  # backends do not read the ids
    batch = ForwardBatch(tokens, tokens, (TokenSlots(p.req_to_token, new_slots(p)),))
    if mode is Mode.DECODE:
        batch.decode = decode_rows(p)
    else:
        batch.extend = extend_rows(p)
    if sites is not None:
        batch.metadata = sites.metadata(batch)
    return batch


def mixed_batch_of(d: Problem, e: Problem, sites: AttentionSites, num_decodes: int | None = None) -> ForwardBatch:
    """The requests of d decode, in front of the prompts of e. With `num_decodes` the others are padding, which lies
    over the first tokens of the prompts."""
    batch = batch_of(e, Mode.EXTEND)
    batch.decode = decode_rows(d)
    assert batch.extend is not None
    batch.extend.start_loc = e.start_loc + (len(d.new_lens) if num_decodes is None else num_decodes)
    batch.metadata = sites.metadata(batch)
    return batch
