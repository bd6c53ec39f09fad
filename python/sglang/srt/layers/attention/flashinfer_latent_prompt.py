"""Long prompts of latent attention over expanded keys and values, with FlashInfer's ragged wrappers (flashinfer-python
0.6). Imported only when the plan chooses it.

The new tokens and each chunk of cached prefixes are attended to by a wrapper of their own, and what these make is
merged by the logarithms of their sums, so that together they are one softmax. All wrappers of a step are planned on the
host once, before any layer runs; layers run one after the other, in the same memory.

Wrappers write the model's type, and FlashInfer merges nothing else: 32 chunks would round the result as often. So what
is merged stays in fp32, and `out` takes each part in turn. That is 4 bytes for each token, head and value dim, as the
other kernel carries from chunk to chunk: 64 MiB for 8,192 tokens of 16 heads of 128 (2 more than a second part in 16
bits would take). Beside them are the logarithms, two of 4 bytes for each token and head, and three while they are
merged. A merge reads and writes 18 bytes a value, in two launches, and has five short ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

from sglang.srt.layers import native_ops
from sglang.srt.layers.attention.flashinfer_backend import (
    CHECK_BOUND,
    PLANS_AT_ONCE,
    PlannedWrapper,
    WrapperPlan,
    library_kernels,
)
from sglang.srt.layers.attention.latent_chunks import LatentChunk, cut_prefixes
from sglang.srt.layers.attention.triton_ops.latent_prompt import expand_cached, expand_new

if TYPE_CHECKING:
    from sglang.srt.plan.mixers import MLA
    from sglang.srt.plan.plan import Plan

WORKSPACE_BYTES = 32 << 20
"""Of parts of one launch that share a prompt: at most as many tiles of 128 queries as two programs for each SM."""
MOST_CHUNKS = 32
"""Of a step; with more of them it is left to the other kernel."""
LIST_BYTES = 256 << 10
"""Size in bytes of the lists of one wrapper, on the GPU and in pinned memory. FA2: 13 bytes for each tile of 16 queries
or more, and 4 for each request and, where tiles are few, for each token. FA3: WORK_BYTES for each tile of FA3_TILE
queries of a request and each head, and 4 for each SM; steps that need more are left to the other kernel."""
WORK_BYTES, FA3_TILE, SM_LIST_BYTES = 28, 128, 2048
CHECKED = ([24, 5, 40], [100, 0, 60], 64)
"""New tokens, cached tokens, and those of a chunk, the second one of which has keys on both sides of a request without
any."""


class FlashInferLatentPrompt:
    """Implements LongLatentsBuilder. Wrappers take turns, as many as PLANS_AT_ONCE steps have."""

    def __init__(self, plan: Plan, spec: MLA, device: torch.device | str) -> None:
        self.spec, self.dtype, self.kernels = spec, getattr(torch, plan.dtype), library_kernels(plan.arch)
        self.heads = spec.shares(plan.ranks.attn_tp_size).padded_heads
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.device = workspace.device
        lists = torch.empty((PLANS_AT_ONCE * (1 + MOST_CHUNKS), LIST_BYTES), dtype=torch.uint8, device=device)
        self._wrappers = itertools.cycle([_planned(workspace, each, self.kernels) for each in lists])

    def build(self, new_lens: Sequence[int], chunks: Sequence[LatentChunk]) -> FlashInferLatents | None:
        if len(chunks) > MOST_CHUNKS or not self._lists_fit(new_lens):
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
        """Plans a chunk for the requests from the first to the last one that have keys in it."""
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
        """Attends to random tokens, for which FlashInfer may have to compile. Raises whatever goes wrong, and
        RuntimeError if the result is not that of plain torch."""
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
        native_ops.expanded_latent_attention(q, entries, w_uk, w_uv, wanted, *given, scale=spec.softmax_scale)
        error = float((out.float() - wanted.float()).norm() / wanted.float().norm())
        if not error < CHECK_BOUND:
            raise RuntimeError(f"its attention over latents is wrong by {error:.3f} of the result")


def _planned(workspace: torch.Tensor, lists: torch.Tensor, kernels: str) -> PlannedWrapper:
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=kernels)
    wrapper.reset_workspace_buffer(workspace, lists)
    return PlannedWrapper(wrapper, torch.cuda.Event() if workspace.is_cuda else None)


@dataclass(frozen=True, slots=True)
class _Part:
    """A planned wrapper, and the prompt tokens that it attends for: from `first` to before `end`."""

    plan: WrapperPlan
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class FlashInferLatents:
    """Implements LatentPromptOp for the layers of one step: `causal` is planned for the new tokens, `cached` for each
    chunk."""

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
            k, v = expand_cached(q, chunk, cache, w_uk, w_uv, cache_scale)
            rows = slice(part.first, part.end)
            part.plan.run(q[rows], k, v, out=out[rows], lse=part_lse[rows], return_lse=True)
            _merge(merged[rows], lse[rows], out[rows], part_lse[rows])
        out.copy_(merged)


def _merge(merged: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Makes of merged [T, H, Dv] and lse [T, H] (both fp32; base 2) the attention over the keys of both. part
    [T, H, Dv] is in the model's type; part_lse is overwritten."""
    both = torch.logaddexp2(lse, part_lse)
    merged.mul_(lse.sub_(both).exp2_()[..., None])
    merged.addcmul_(part, part_lse.sub_(both).exp2_()[..., None])
    lse.copy_(both)
