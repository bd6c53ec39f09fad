"""The attention sites of a model on one rank, each with its metadata builders."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.blocks.mla.spec import MLA
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.groups import ALONE
from sglang.srt.layers.attention.dcp import builders_of
from sglang.srt.layers.attention.latent_chunks import cut_prefixes
from sglang.srt.layers.attention.metadata import (
    AttentionBackend,
    DecodeBuilder,
    ExtendBuilder,
    LatentPrompt,
    LongLatentsBuilder,
    LongPromptBackend,
    SiteMetadata,
    WithImages,
)
from sglang.srt.layers.attention.sparse_rows import BlockSite, LatentSite, SparseSite
from sglang.srt.plan.cache_spec import FULL, Full, Window
from sglang.srt.plan.caches import row_tables
from sglang.srt.plan.layer_spec import AttentionSite, LayerSpec

if TYPE_CHECKING:
    import torch

    from sglang.srt.layers.attention.latent_chunks import LatentChunk
    from sglang.srt.layers.forward_batch import ForwardBatch
    from sglang.srt.layers.step_rows import DecodeRows, ExtendRows, ImageRuns
    from sglang.srt.plan.plan import Plan

logger = logging.getLogger(__name__)

LONG_PROMPTS = 2048
"""Prompt tokens of a step from which the `long_prompts` builders pay, since the step waits for their planning on the
host. Measured with Qwen3-8B on an H100: no gain for one prompt of 1,024 tokens, 5 of 378 ms for 16 at once."""

LONG_PREFIX = 16384
"""Cached prefix of the start-up prompt that compiles the kernels sharing a prefix between programs: four times the
smallest part of a program (`prefix_parts.MIN_PART`)."""


class AttentionSites:
    """Builds `ForwardBatch.metadata`, and answers all questions that steps have about their attention backends."""

    def __init__(
        self,
        decode: Mapping[AttentionSite, DecodeBuilder],
        extend: Mapping[AttentionSite, ExtendBuilder],
        latent: Mapping[AttentionSite, MLA] | None = None,
        chunk_tokens: int = 0,
        sparse: Mapping[AttentionSite, SparseSite] | None = None,
        long_prompts: Mapping[AttentionSite, ExtendBuilder] | None = None,
        long_latents: Mapping[AttentionSite, LongLatentsBuilder] | None = None,
        tables: Sequence[Full | Window] = (FULL,),
    ) -> None:
        """latent: descriptions of the latent (MLA) sites; chunk_tokens: of a cached prefix expanded at once; sparse:
        sites whose layers attend to an indexer's selection; long_prompts, long_latents: separate builders for long
        prompts, of latent sites in the latter; tables: the lifetimes of the row tables."""
        self.decode, self.extend, self.sparse = decode, extend, sparse or {}
        self.long_prompts, self.long_latents = dict(long_prompts or {}), dict(long_latents or {})
        self._latent, self._chunk_tokens, self._tables = latent or {}, chunk_tokens, tables
        self._decode_builders = tuple(dict.fromkeys(decode.values()))
        self._extend_builders = tuple(dict.fromkeys(extend.values()))
        self.decode_plans_on_host = any(builder.plans_on_host for builder in self._decode_builders)
        self.extend_plans_on_host = any(builder.plans_on_host for builder in self._extend_builders)
        self.decode_in_graphs = all(builder.in_graphs for builder in self._decode_builders)
        self.extend_in_graphs = all(builder.in_graphs for builder in self._extend_builders)

    def prepare_graphs(self, batch_sizes: tuple[int, ...]) -> None:
        """Prepares the backends for graphs with these numbers of decoding rows (ascending)."""
        for builder in self._decode_builders:
            builder.prepare_graphs(batch_sizes)

    def shares_prefixes(self, new_lens: Sequence[int], prefix_lens: Sequence[int]) -> bool:
        """Returns whether several programs share a cached prefix in a step with such prompts, which then has no
        graph."""
        return any(builder.num_parts(new_lens, prefix_lens) > 1 for builder in self._extend_builders)

    @property
    def longest_dense(self) -> int:
        """Returns the most tokens that a prompt behind one cached token has if no site selects entries for it; 0 if no
        site ever does."""
        return min((site.top_k for site in self.sparse.values()), default=1) - 1

    def prefixes(self, num_tokens: int, context_len: int) -> list[int]:
        """Returns prefix lengths that run different kernels with prompts of `num_tokens`, as far as the context allows:
        none, a short one, one shared by several programs, and one whose latents are expanded in several chunks."""
        most = context_len - 1 - num_tokens
        long = min(LONG_PREFIX, most)
        lengths = [0, 1, *([long] if self.shares_prefixes([num_tokens], [long]) else [])]
        return [*lengths, *([self._chunk_tokens + 1] if self._latent and self._chunk_tokens < most else [])]

    def metadata(
        self, batch: ForwardBatch, in_graph: bool = False, in_blocks: bool = False, absorbs: bool = False
    ) -> dict[AttentionSite, SiteMetadata]:
        """Builds the metadata of a complete batch. Decoding requests are planned before prompts; neither runs before
        both are planned. in_blocks: each decoding row stands for a draft's block, whose layers use no indexer; absorbs:
        prompts attend to latents as they are, also where expanding pays, because LoRA adapters change what is
        made of them."""
        sites = {site: SiteMetadata() for site in self.decode}
        for site, sparse in self.sparse.items() if not in_blocks else ():
            sites[site].sparse = sparse.rows(batch, in_graph)
        if batch.decode is not None:
            self._build_decode(batch.decode, sites, in_graph)
        if batch.extend is not None:
            self._build_extend(batch.extend, sites, absorbs)
        return sites

    def _build_decode(self, rows: DecodeRows, sites: dict[AttentionSite, SiteMetadata], in_graph: bool) -> None:
        dense = {site: builder for site, builder in self.decode.items() if not sites[site].decodes_sparsely}
        built = {
            builder: builder.build_in_graph(rows) if in_graph else builder.build(rows)
            for builder in dict.fromkeys(dense.values())
        }
        for site, builder in dense.items():
            sites[site].decode = built[builder]

    def _build_extend(self, rows: ExtendRows, sites: dict[AttentionSite, SiteMetadata], absorbs: bool = False) -> None:
        long = _is_long(rows)
        shared = long and self.shares_prefixes(rows.new_lens_cpu, rows.prefix_lens_cpu)
        builders = {**self.extend, **(self.long_prompts if long and not shared else {})}
        dense = {site: builder for site, builder in builders.items() if not sites[site].extends_sparsely}
        built = {builder: builder.build(rows) for builder in dict.fromkeys(dense.values())}
        for site, builder in dense.items():
            sites[site].extend = built[builder]
        if rows.images is not None:
            self._add_images(rows.images, {site: builder for site, builder in dense.items() if site.window}, sites)
        for site, spec in self._latent.items() if not absorbs else ():
            if site in dense:
                sites[site].latent_chunks = self._cut(spec, site, rows)
        if long:
            self._build_long_latents(rows, sites)

    def _build_long_latents(self, rows: ExtendRows, sites: dict[AttentionSite, SiteMetadata]) -> None:
        """Plans once per builder, since prompts and prefix chunks have equal lengths at all its sites."""
        built: dict[LongLatentsBuilder, LatentPrompt | None] = {}
        for site, builder in self.long_latents.items():
            chunks = sites[site].latent_chunks
            if chunks is not None:
                if builder not in built:
                    built[builder] = builder.build(rows.new_lens_cpu, chunks)
                sites[site].latent_prompt = built[builder]

    def _add_images(
        self,
        images: ImageRuns,
        windows: Mapping[AttentionSite, ExtendBuilder],
        sites: dict[AttentionSite, SiteMetadata],
    ) -> None:
        built = {builder: builder.build(images.rows, causal=False) for builder in dict.fromkeys(windows.values())}
        for site, builder in windows.items():
            text = sites[site].extend
            assert text is not None
            sites[site].extend = WithImages(text, built[builder], images.tokens)

    def _cut(self, spec: MLA, site: AttentionSite, rows: ExtendRows) -> tuple[LatentChunk, ...] | None:
        """Returns the chunks of cached prefixes to expand; None if expanding does not pay, or in a graph, which must
        serve prefixes of every length. What windows see of prefixes is one chunk, or not expanded."""
        if rows.seq_lens_cpu is None or not spec.expanding_pays(rows.prefix_lens_cpu, rows.new_lens_cpu):
            return None
        lens = spec.expanded_lens(rows.prefix_lens_cpu)
        if site.window and sum(lens) > self._chunk_tokens:
            return None
        table = rows.token_slots[self._tables.index(site.lifetime)].req_to_token
        context = parallel_state.groups().context if site.dcp_size > 1 else ALONE
        begins = [prefix - length for prefix, length in zip(rows.prefix_lens_cpu, lens, strict=True)]
        return cut_prefixes(table, rows.req_pool_indices, lens, self._chunk_tokens, context, begins)

    def refresh(self, rows: DecodeRows | None) -> None:
        """Updates, before every replay of a graph, what its decoding rows need from the host."""
        if rows is None:
            return
        for builder in self._decode_builders:
            if builder.plans_on_host:
                builder.refresh(rows)


def _is_long(rows: ExtendRows) -> bool:
    """Returns whether the step has long prompts and no graph; its lengths are then known on the host."""
    known = rows.seq_lens_cpu is not None and rows.draft_tokens is None and rows.images is None
    return known and sum(rows.new_lens_cpu) >= LONG_PROMPTS


def create_attention_sites(plan: Plan, device: torch.device | str) -> AttentionSites:
    """Creates the attention sites with the backends that the plan chose, one object per backend even if it serves both
    prompts and decoding. A model without attention layers of this kind has no sites."""
    if not plan.attention_sites:
        return AttentionSites({}, {})
    choices = {op: plan.choices[op] for op in ("decode_attention", "extend_attention")}
    backends: dict[str, AttentionBackend] = {}
    for choice in choices.values():
        if choice.name not in backends:
            backends[choice.name] = choice.load()(plan, device)
    decode, extend = (backends[choice.name] for choice in choices.values())
    layers = plan.description.layers + (plan.draft.description.model.layers if plan.draft is not None else ())
    latent = latent_sites(layers, plan.ranks.attn_tp_size, plan.ranks.dcp_size)
    return AttentionSites(
        *builders_of(plan.attention_sites, decode, extend, plan),
        latent,
        plan.tokens_per_step,
        sparse_sites(layers, plan),
        _long_prompts(plan, device, backends),
        _long_latents(plan, device, layers),
        row_tables(plan.caches),
    )


def _long_prompts(
    plan: Plan, device: torch.device | str, backends: Mapping[str, Any]
) -> dict[AttentionSite, ExtendBuilder]:
    """Creates builders for long prompts of sites without windows, with the backends chosen for their heads. A backend
    that fails its trial only costs speed: a library may have to compile its kernels here."""
    builders: dict[AttentionSite, ExtendBuilder] = {}
    for site in plan.attention_sites:
        choice = plan.choices.get(plan.attention_op("long_prompt_attention", site.shape))
        if choice is None or choice.need.head_dim != site.shape.head_dim or site.window:
            continue
        try:
            backend: LongPromptBackend = backends.get(choice.name) or choice.load()(plan, device)
            builders[site] = backend.long_prompt_builder(site)
        except Exception as error:
            logger.warning("%s does not work here; long prompts are attended to as others: %s", choice.name, error)
            return {}
    return builders


def _long_latents(
    plan: Plan, device: torch.device | str, layers: Sequence[LayerSpec]
) -> dict[AttentionSite, LongLatentsBuilder]:
    """Creates the builder for long prompts of the first latent layer's site, used for all sites that it can plan as
    well. As with `_long_prompts`, failure only costs speed."""
    choice = next((each for op, each in plan.choices.items() if op.startswith("long_latent_prompt")), None)
    if choice is None:
        return {}
    dims = (choice.need.head_dim, choice.need.v_head_dim)
    mixers = [mixer for layer in layers if (mixer := layer.mixer.latents) and not mixer.window]
    first = next((mixer for mixer in mixers if (mixer.qk_dim, mixer.v_dim) == dims), None)
    if first is None:  # a stage of a hybrid may have no such layer
        return {}
    sites: dict[AttentionSite, set[tuple[float, ...]]] = {}
    for mixer in mixers:
        site = mixer.attention_site(plan.ranks.attn_tp_size, plan.ranks.dcp_size)
        sites.setdefault(site, set()).add(_planned_with(mixer))
    try:
        builder: LongLatentsBuilder = choice.load()(plan, first, device)
        builder.check()
    except Exception as error:
        logger.warning("%s does not work here; long prompts over latents keep their kernel: %s", choice.name, error)
        return {}
    return {site: builder for site, numbers in sites.items() if numbers == {_planned_with(first)}}


def _planned_with(mixer: MLA) -> tuple[float, ...]:
    """Returns the numbers on which a step's plan depends."""
    return mixer.num_heads, mixer.qk_dim, mixer.v_dim, mixer.softmax_scale


def latent_sites(layers: Iterable[LayerSpec], tp_size: int, dcp_size: int = 1) -> dict[AttentionSite, MLA]:
    """Returns the layer description of each latent site."""
    mixers = (mixer for layer in layers if (mixer := layer.mixer.latents))
    return {mixer.attention_site(tp_size, dcp_size): mixer for mixer in mixers}


def sparse_sites(layers: Iterable[LayerSpec], plan: Plan) -> dict[AttentionSite, SparseSite]:
    """Returns the sites whose layers attend to an indexer's selection, or to packed latents."""
    sites: dict[AttentionSite, SparseSite] = {}
    for mixer in dict.fromkeys(layer.mixer for layer in layers):
        site = mixer.attention_site(plan.ranks.attn_tp_size, plan.ranks.dcp_size)
        packed = mixer.latents is not None and mixer.latents.packed(plan.kv_cache_dtype)
        if site is None or not (site.top_k or packed):
            continue
        if mixer.latents is not None:
            sites.setdefault(site, LatentSite(mixer.latents, plan))
        elif mixer.block_indexer is not None:
            sites.setdefault(site, BlockSite(mixer.block_indexer, site.shape.num_kv_heads, plan))
    return sites
