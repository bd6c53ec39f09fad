"""Attention with FlashInfer's paged wrappers (flashinfer-python 0.6 and 0.7). Imported only when the plan chooses it.

The wrappers plan on the host: page counts come from `seq_lens_cpu`, so nothing is read back from the GPU; page indices
are gathered on the device. A planned wrapper is bound to head counts and a window, so each attention group has wrappers
of its own, and all are planned before a step runs. With a sliding window a wrapper gets only the pages that the new
tokens see. Layers must have neither logit caps nor sinks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

from sglang.srt.layers.attention.page_table import Pages, gather_pages
from sglang.srt.layers.attention.workspaces import zero_workspace
from sglang.srt.mem_cache.memory_pool import storage_dtype
from sglang.srt.plan.caches import row_tables

if TYPE_CHECKING:
    from sglang.srt.hardware.arch import ArchTraits
    from sglang.srt.layers.attention.attention_layer import AttentionLayer
    from sglang.srt.layers.step_rows import DecodeRows, ExtendRows
    from sglang.srt.plan.layer_spec import AttentionSite
    from sglang.srt.plan.plan import Plan

WORKSPACE_BYTES = 256 << 20
PLAN_BYTES = 8 << 20
"""Bytes of the lists that a planner writes; each wrapper has pinned memory of the same size."""
CHECKED_TOKENS = 200
CHECK_BOUND = 0.02
"""Largest relative error of a correct result: probabilities are rounded to the queries' dtype, in some kernels to
float8."""
PLANS_AT_ONCE = 3
"""Plans of each kind alive at once: with two-batch overlap both microbatches are planned before either attends, and
before them the whole step, over whose rows a draft model attends afterwards."""
TENSOR_CORE_GROUP = 4
"""Query heads per KV head from which decoding on tensor cores is faster than plain FMA."""


def library_kernels(arch: ArchTraits, cache_dtype: torch.dtype = torch.bfloat16) -> str:
    """Returns FlashInfer's name of its kernels for prompts and latents. FA3 needs wgmma, which only Hopper has, and
    reads only 16-bit keys for 16-bit queries; FA2 runs everywhere."""
    return "fa3" if "wgmma" in arch.features and cache_dtype.itemsize == 2 else "fa2"


class PlannedWrapper:
    """A FlashInfer wrapper whose planner never overwrites lists that are still to be copied.

    `plan` writes its lists into pinned memory of the wrapper and starts their copy, which the stream runs after earlier
    steps. The next `plan` writes the same memory, so it waits for that copy first. That wait is short: when a step is
    launched at most the previous one is still running.
    """

    def __init__(self, wrapper: Any, copied: torch.cuda.Event | None) -> None:
        self._wrapper = wrapper
        self._copied = copied
        self._num_plans = 0

    def plan(self, *args: Any, **options: Any) -> WrapperPlan:
        """Plans the wrapper with the arguments of FlashInfer's `plan`, and returns the plan."""
        if self._copied is not None:
            self._copied.synchronize()  # at once if it was never recorded
        self._wrapper.plan(*args, **options)
        if self._copied is not None:
            self._copied.record()
        self._num_plans += 1
        return self.current()

    def current(self) -> WrapperPlan:
        """Returns the latest plan."""
        return WrapperPlan(self, self._num_plans)

    def run(self, number: int, *args: Any, **options: Any) -> None:
        """Runs the wrapper. Asserts that plan `number` is the latest."""
        assert number == self._num_plans, "the wrapper was planned for another step meanwhile"
        self._wrapper.run(*args, **options)


@dataclass(frozen=True, slots=True)
class WrapperPlan:
    """One plan of a wrapper, owned by one step's metadata. Running it after the wrapper was planned again fails with
    AssertionError instead of giving a wrong result."""

    wrapper: PlannedWrapper
    number: int

    def run(self, *args: Any, **options: Any) -> None:
        """Runs the wrapper with this plan."""
        self.wrapper.run(self.number, *args, **options)


class FlashInferAttnBackend:
    """Implements AttentionBackend. All wrappers share one workspace, since they run one after the other."""

    def __init__(self, plan: Plan, device: torch.device | str) -> None:
        self._plan = plan
        self._workspace = zero_workspace(WORKSPACE_BYTES, device)

    def decode_builder(self, site: AttentionSite) -> FlashInferDecode:
        return FlashInferDecode(_SiteOptions(self._plan, site), self._workspace)

    def extend_builder(self, site: AttentionSite) -> FlashInferExtend:
        return FlashInferExtend(_SiteOptions(self._plan, site), self._workspace)

    def long_prompt_builder(self, site: AttentionSite) -> FlashInferExtend:
        """Returns a prompt builder that has passed `check`. Implements LongPromptBackend."""
        builder = self.extend_builder(site)
        builder.check()
        return builder


class _SiteOptions:
    """Options for planning the wrappers of one attention group."""

    def __init__(self, plan: Plan, site: AttentionSite) -> None:
        shape = site.shape
        self.table, self.window = row_tables(plan.caches).index(site.lifetime), site.window
        self.page_size, self.head_dim = plan.page_size, shape.head_dim
        self.shape = (shape.num_heads, shape.num_kv_heads, shape.head_dim, plan.page_size)
        self.cache_dtype = storage_dtype(plan.kv_cache_dtype)
        self.prompt_kernels = library_kernels(plan.arch, self.cache_dtype)
        self.options = {
            "q_data_type": getattr(torch, plan.dtype),
            "kv_data_type": self.cache_dtype,
            "window_left": site.window - 1,  # -1: all tokens
        }
        max_tokens = min(plan.context_len, site.window + plan.page_size - 1) if site.window else plan.context_len
        self.max_pages_each = -(-max_tokens // plan.page_size)
        self.tensor_cores = shape.num_heads // shape.num_kv_heads >= TENSOR_CORE_GROUP
        # Named, because 0.7 may choose others, such as cuDNN's, which it does not capture in graphs.
        self.decode_kernels = self.prompt_kernels if self.tensor_cores else "fa2"

    def pages(self, rows: DecodeRows | ExtendRows) -> Pages:
        """Returns the pages that the rows attend to."""
        return gather_pages(rows, self.table, self.page_size, self.window)

    def run(self, plan: WrapperPlan, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        """Runs a plan for a layer. Raises NotImplementedError for logit caps and sinks."""
        if layer.logit_cap > 0 or layer.sinks is not None:
            raise NotImplementedError(
                "the flashinfer backend here has neither logit caps nor sinks; use --attention-backend triton"
            )
        cache = layer.cache
        k_cache, v_cache = (c.unflatten(0, (-1, self.page_size)) for c in (cache.k, cache.v))
        # The wrapper was planned for head_dim ** -0.5; a layer's other factor goes into the scale of the keys.
        k_scale = cache.k_scale * layer.scale * self.head_dim**0.5
        plan.run(q, (k_cache, v_cache), k_scale=k_scale, v_scale=cache.v_scale, out=out)


def _planned(wrapper: Any, workspace: torch.Tensor, lists: torch.Tensor) -> PlannedWrapper:
    wrapper.reset_workspace_buffer(workspace, lists)
    return PlannedWrapper(wrapper, torch.cuda.Event() if workspace.is_cuda else None)


def _plan_lists(device: torch.device) -> torch.Tensor:
    """Returns a buffer for plan lists. Wrappers that are never planned in the same step share one, because every plan
    fills it again and steps run in order."""
    return torch.empty(PLAN_BYTES, dtype=torch.uint8, device=device)


class FlashInferExtend:
    """Implements ExtendBuilder with PLANS_AT_ONCE wrappers used in rotation."""

    plans_on_host = True
    in_graphs = False

    def __init__(self, site: _SiteOptions, workspace: torch.Tensor) -> None:
        self.site, self.device = site, workspace.device
        new_wrapper = partial(BatchPrefillWithPagedKVCacheWrapper, workspace, "NHD", backend=site.prompt_kernels)
        self._wrappers = itertools.cycle(
            [_planned(new_wrapper(), workspace, _plan_lists(self.device)) for _ in range(PLANS_AT_ONCE)]
        )

    def build(self, rows: ExtendRows, causal: bool = True) -> FlashInferExtendMetadata:
        assert causal, "plan.needs asks for no other"
        plan = self._plan_next(rows.new_lens_cpu, self.site.pages(rows))
        return FlashInferExtendMetadata(self.site, plan, sum(rows.new_lens_cpu))

    def _plan_next(self, new_lens: Sequence[int], pages: Pages) -> WrapperPlan:
        qo_indptr = np.concatenate(([0], np.cumsum(new_lens))).astype(np.int32)
        return next(self._wrappers).plan(
            torch.from_numpy(qo_indptr),
            pages.indptr,
            pages.indices,
            pages.last_len,
            *self.site.shape,
            causal=True,
            **self.site.options,
        )

    def check(self) -> None:
        """Attends to random tokens, which may make FlashInfer compile. Raises any error, and RuntimeError if the result
        differs from plain torch."""
        num_heads, num_kv_heads, head_dim, page_size = self.site.shape
        dtype, device = self.site.options["q_data_type"], self.device
        new, num_pages = 24, 1 + -(-CHECKED_TOKENS // page_size)
        count = num_pages * page_size - page_size + 1  # one on the last page
        last, ends = torch.ones(1, dtype=torch.int32), torch.tensor([0, num_pages], dtype=torch.int32)
        plan = self._plan_next([new], Pages(ends, last, torch.arange(num_pages, dtype=torch.int32, device=device)))
        generator = torch.Generator(device).manual_seed(0)
        shape = (num_pages, page_size, num_kv_heads, head_dim)
        k, v = (torch.randn(shape, generator=generator, device=device).to(self.site.cache_dtype) for _ in range(2))
        q = torch.randn((new, num_heads, head_dim), generator=generator, device=device).to(dtype)
        out = torch.empty_like(q)
        plan.run(q, (k, v), k_scale=1.0, v_scale=1.0, out=out)
        group = num_heads // num_kv_heads
        keys, values = (x.flatten(0, 1)[:count].float().repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("thd,shd->hts", q.float(), keys) * head_dim**-0.5
        unseen = torch.arange(count, device=device) > torch.arange(count - new, count, device=device)[:, None]
        wanted = torch.einsum("hts,shd->thd", scores.masked_fill(unseen, -torch.inf).softmax(-1), values)
        error = float((out.float() - wanted).norm() / wanted.norm())
        if not error < CHECK_BOUND:
            raise RuntimeError(f"its attention is wrong by {error:.3f} of the result")

    def num_parts(self, new_lens: Sequence[int], prefix_lens: Sequence[int]) -> int:
        return 1


@dataclass(slots=True)
class FlashInferExtendMetadata:
    """Implements ExtendMetadata with a planned wrapper."""

    site: _SiteOptions
    plan: WrapperPlan
    num_tokens: int

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, out: torch.Tensor
    ) -> None:
        first = len(q) - self.num_tokens
        self.site.run(self.plan, q[first:], layer, out[first:])


class FlashInferDecode:
    """Implements DecodeBuilder. Outside of graphs PLANS_AT_ONCE wrappers are used in rotation. Graphs' wrappers are
    planned directly before each replay and share the lists of the first of these."""

    plans_on_host = True
    in_graphs = True

    def __init__(self, site: _SiteOptions, workspace: torch.Tensor) -> None:
        self.site, self._workspace = site, workspace
        lists = [_plan_lists(workspace.device) for _ in range(PLANS_AT_ONCE)]
        self._lists_of_graphs = lists[0]
        self._eager = itertools.cycle([self._wrapper(each) for each in lists])
        self._in_graphs: dict[int, PlannedWrapper] = {}

    def _wrapper(self, lists: torch.Tensor, **buffers: Any) -> PlannedWrapper:
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_tensor_cores=self.site.tensor_cores,
            backend=self.site.decode_kernels,
            **buffers,
        )
        return _planned(wrapper, self._workspace, lists)

    def _plan(self, wrapper: PlannedWrapper, pages: Pages) -> WrapperPlan:
        return wrapper.plan(pages.indptr, pages.indices, pages.last_len, *self.site.shape, **self.site.options)

    def build(self, rows: DecodeRows) -> FlashInferDecodeMetadata:
        return FlashInferDecodeMetadata(self.site, self._plan(next(self._eager), self.site.pages(rows)))

    def prepare_graphs(self, batch_sizes: tuple[int, ...]) -> None:
        """Creates one wrapper per batch size, planned for one page per request, because a graph's launches depend on
        the batch size alone. All share buffers, of which smaller ones use the front."""
        largest, device = batch_sizes[-1], self._workspace.device
        indptr = torch.zeros(largest + 1, dtype=torch.int32, device=device)
        last_len = torch.ones(largest, dtype=torch.int32, device=device)
        indices = torch.zeros(largest * self.site.max_pages_each, dtype=torch.int32, device=device)
        for size in batch_sizes:
            wrapper = self._in_graphs[size] = self._wrapper(
                self._lists_of_graphs,
                use_cuda_graph=True,
                paged_kv_indptr_buffer=indptr[: size + 1],
                paged_kv_indices_buffer=indices,
                paged_kv_last_page_len_buffer=last_len[:size],
            )
            one_page_each = Pages(
                torch.arange(size + 1, dtype=torch.int32),
                torch.ones(size, dtype=torch.int32),
                torch.zeros(size, dtype=torch.int32, device=device),
            )
            self._plan(wrapper, one_page_each)

    def build_in_graph(self, rows: DecodeRows) -> FlashInferDecodeMetadata:
        return FlashInferDecodeMetadata(self.site, self._in_graphs[len(rows)].current())

    def refresh(self, rows: DecodeRows) -> None:
        self._plan(self._in_graphs[len(rows)], self.site.pages(rows))


@dataclass(slots=True)
class FlashInferDecodeMetadata:
    """Implements DecodeMetadata with a planned wrapper."""

    site: _SiteOptions
    plan: WrapperPlan

    def attend(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        self.site.run(self.plan, q, layer, out)
