"""Long prompts of latent attention over expanded keys and values, with FlashInfer's ragged wrappers (flashinfer-python
0.6 and 0.7). Imported only when the plan chooses it.

One wrapper attends to the new tokens and one to each chunk of cached prefixes; their results are merged by log-sum-exp
into one softmax. All wrappers of a step are planned on the host once, before any layer runs; layers run one after the
other in the same memory.

Wrappers write the model's dtype, and FlashInfer's merge does too, which would round the result once per chunk, up to 32
times. So the merged result is kept in fp32 here, and `out` receives the chunks' results in turn. It takes 4 bytes per
token, head and value dim, as in the Triton kernel: 64 MiB for 8,192 tokens of 16 heads of 128. The log-sum-exps take
8 bytes per token and head, 12 during a merge. A merge moves 18 bytes per value in two launches, and has five short
ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

from sglang.srt.blocks.mla import reference
from sglang.srt.blocks.mla.kernels.latent_prompt import expand_cached, expand_new
from sglang.srt.layers.attention.flashinfer_backend import (
    CHECK_BOUND,
    PLANS_AT_ONCE,
    PlannedWrapper,
    WrapperPlan,
    library_kernels,
)
from sglang.srt.layers.attention.latent_chunks import LatentChunk, cut_prefixes
from sglang.srt.layers.attention.workspaces import zero_workspace

if TYPE_CHECKING:
    from sglang.srt.blocks.mla.spec import MLA
    from sglang.srt.plan.latent_record import LatentRecord
    from sglang.srt.plan.plan import Plan

WORKSPACE_BYTES = 32 << 20
"""Workspace bytes for a launch that splits a prompt's keys: at most two programs per SM, of 128 queries each, do so."""
MAX_CHUNKS = 32
"""Most chunks of a step; steps with more use the Triton kernel."""
LIST_BYTES = 256 << 10
"""Bytes of one wrapper's lists, on the GPU and in pinned memory. FA2 needs 13 bytes per tile of at least 16 queries,
and 4 per request and, if tiles are few, per token. FA3 needs WORK_BYTES per tile of FA3_TILE queries of a request and
per head, and 4 per SM; steps that need more use the Triton kernel."""
WORK_BYTES, FA3_TILE, SM_LIST_BYTES = 28, 128, 2048
CHECKED = ([24, 5, 40], [100, 0, 60], 64)
"""New tokens, cached tokens and chunk size of `check`; the second chunk has keys of the requests before and after one
without any."""


class FlashInferLatentPrompt:
    """Implements LongLatentsBuilder with wrappers used in rotation, enough for PLANS_AT_ONCE steps."""

    def __init__(self, plan: Plan, spec: MLA, device: torch.device | str) -> None:
        self.spec, self.dtype, self.kernels = spec, getattr(torch, plan.dtype), library_kernels(plan.arch)
        self.heads = spec.shares(plan.ranks.attn_tp_size).padded_heads
        workspace = zero_workspace(WORKSPACE_BYTES, device)
        self.device = workspace.device
        lists = torch.empty((PLANS_AT_ONCE * (1 + MAX_CHUNKS), LIST_BYTES), dtype=torch.uint8, device=device)
        self._wrappers = itertools.cycle([_planned(workspace, each, self.kernels) for each in lists])

    def build(self, new_lens: Sequence[int], chunks: Sequence[LatentChunk]) -> FlashInferLatents | None:
        if len(chunks) > MAX_CHUNKS or not self._lists_fit(new_lens):
            return None
        starts = (0, *itertools.accumulate(new_lens))
        causal = self._part(starts, starts, causal=True)
        return FlashInferLatents(self.spec.softmax_scale, causal, tuple(self._of(starts, chunk) for chunk in chunks))

    def _lists_fit(self, new_lens: Sequence[int]) -> bool:
        if self.kernels != "fa3":
            return True
        works = self.heads * sum(-(-count // FA3_TILE) for count in new_lens)
        return WORK_BYTES * works + SM_LIST_BYTES <= LIST_BYTES

    def _of(self, starts: tuple[int, ...], chunk: LatentChunk) -> _Part:
        """Plans a chunk, for the requests from the first to the last with keys in it."""
        keys = chunk.key_start_cpu
        first = max(i for i, start in enumerate(keys[:-1]) if start == 0)
        end = keys.index(keys[-1])
        return self._part(starts[first : end + 1], keys[first : end + 1], causal=False)

    def _part(self, starts: tuple[int, ...], keys: tuple[int, ...], causal: bool) -> _Part:
        plan = next(self._wrappers).plan(
            torch.tensor(starts, dtype=torch.int32) - starts[0],
            torch.tensor(keys, dtype=torch.int32),
            self.heads,
            self.heads,
            self.spec.qk_dim,
            self.spec.v_dim,
            causal=causal,
            sm_scale=self.spec.softmax_scale,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
        )
        return _Part(plan, starts[0], starts[-1])

    def check(self) -> None:
        """Attends to random tokens, which may make FlashInfer compile. Raises any error, and RuntimeError if the result
        differs from plain torch."""
        new_lens, prefix_lens, chunk_tokens = CHECKED
        spec, total, cached = self.spec, sum(new_lens), sum(prefix_lens)
        generator = torch.Generator(self.device).manual_seed(0)

        def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=generator, device=self.device) * scale).to(self.dtype)

        table = torch.arange(len(prefix_lens) * max(prefix_lens), device=self.device).flip(0)
        rows = torch.arange(len(prefix_lens), device=self.device)
        chunks = cut_prefixes(table.view(len(prefix_lens), -1), rows, prefix_lens, chunk_tokens)
        rank = spec.kv_lora_rank
        q, entries = randn(total, self.heads, spec.qk_dim), randn(total, spec.latent_dim)
        w_uk = randn(self.heads, spec.nope_dim, rank, scale=rank**-0.5)
        w_uv = randn(self.heads, rank, spec.v_dim, scale=rank**-0.5)
        cache = randn(len(table), 1, spec.latent_dim)
        starts = torch.tensor((0, *itertools.accumulate(new_lens)), dtype=torch.int32, device=self.device)
        out, wanted = (q.new_empty((total, self.heads, spec.v_dim)) for _ in range(2))
        attend = self.build(new_lens, chunks)
        assert attend is not None and cached > chunk_tokens
        given = (starts, cache, chunks)
        attend(q, entries, w_uk, w_uv, out, *given, scale=spec.softmax_scale)
        reference.expanded_latent_attention(q, entries, w_uk, w_uv, wanted, *given, scale=spec.softmax_scale)
        error = float((out.float() - wanted.float()).norm() / wanted.float().norm())
        if not error < CHECK_BOUND:
            raise RuntimeError(f"its attention over latents is wrong by {error:.3f} of the result")


def _planned(workspace: torch.Tensor, lists: torch.Tensor, kernels: str) -> PlannedWrapper:
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=kernels)
    wrapper.reset_workspace_buffer(workspace, lists)
    return PlannedWrapper(wrapper, torch.cuda.Event() if workspace.is_cuda else None)


@dataclass(frozen=True, slots=True)
class _Part:
    """A planned wrapper with the range of prompt tokens, `first` to `end`, that it attends for."""

    plan: WrapperPlan
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class FlashInferLatents:
    """Implements `reference.expanded_latent_attention` for the layers of one step: `causal` is planned for the new
    tokens, each of `cached` for a chunk."""

    scale: float
    causal: _Part
    cached: tuple[_Part, ...]

    def __call__(
        self,
        q: torch.Tensor,
        entries: torch.Tensor,
        w_uk: torch.Tensor,
        w_uv: torch.Tensor,
        out: torch.Tensor,
        start_loc: torch.Tensor,
        cache: torch.Tensor,
        chunks: Sequence[LatentChunk],
        *,
        scale: float,
        cache_scale: float = 1.0,
        record: LatentRecord | None = None,
        window: int = 0,
    ) -> None:
        assert scale == self.scale, "one plan of a step serves all layers"
        first = len(q) - self.causal.end
        q, entries, out = q[first:], entries[first:], out[first:]
        k, v = expand_new(q, entries, w_uk, w_uv)
        if not chunks:
            self.causal.plan.run(q, k, v, out=out)
            return
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        self.causal.plan.run(q, k, v, out=out, lse=lse, return_lse=True)
        merged, part_lse = out.to(torch.float32, copy=True), torch.empty_like(lse)
        for part, chunk in zip(self.cached, chunks, strict=True):
            k, v = expand_cached(q, chunk, cache, w_uk, w_uv, cache_scale, record)
            rows = slice(part.first, part.end)
            part.plan.run(q[rows], k, v, out=out[rows], lse=part_lse[rows], return_lse=True)
            _merge(merged[rows], lse[rows], out[rows], part_lse[rows])
        out.copy_(merged)


def _merge(merged: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merges the attention over two sets of keys in place. merged [T, H, Dv] and lse [T, H] fp32 (base 2) become those
    of both; part [T, H, Dv] is in the model's dtype; part_lse is overwritten."""
    both = torch.logaddexp2(lse, part_lse)
    merged.mul_(lse.sub_(both).exp2_()[..., None])
    merged.addcmul_(part, part_lse.sub_(both).exp2_()[..., None])
    lse.copy_(both)
