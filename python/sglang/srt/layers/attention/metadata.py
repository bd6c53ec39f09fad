"""Attention metadata of a step, by attention site.

A site (attention group) is the set of layers that share one attention plan per step (`plan.layer_spec.AttentionSite`).
Each site has a builder for decoding requests and one for prompts, possibly of different backends. A builder makes a
step's metadata, and the metadata computes attention:

    metadata = batch.metadata[layer.site]
    metadata.decode.attend(q[:D], layer, out[:D])
    metadata.extend.attend(q, k, v, layer, out)

For causal blocks of drafts, `decode.attend` also takes `starts` [D] int32: q and out then have as many rows for each
request, at the positions from its start on, and each sees the tokens up to itself. Backends that serve blocks have it.

For layers with biases by distance, `attend` also takes `bias` [rows of q, Hq, bias_extent]; backends that serve
"relative_bias" have it.

Metadata reads a layer's cache through that cache's row table, so layers of one site may have caches of different
lifetimes (with and without a window). New keys and values are stored before anything attends.

A step in a CUDA graph has three moments:

- once, before any capture: `prepare_graphs` may allocate, plan and wait;
- inside the capture: `build_in_graph` of decoding rows and `build` of prompts choose among what exists, and launch what
  each replay repeats;
- before each replay: `refresh`, of builders that plan on the host, plans and launches copies and kernels; it never
  waits for the step in flight.

The graph itself writes the new tokens' slots into the table of caches that keep all tokens. So inside a capture that
table is complete, but before a replay it is not: a builder that reads pages then takes each request's last one from
`out_cache_loc`. Sliding-window tables are complete before each replay if a builder plans on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from sglang.srt.layers.attention.attention_layer import AttentionLayer
    from sglang.srt.layers.attention.latent_chunks import LatentChunk
    from sglang.srt.layers.step_rows import DecodeRows, ExtendRows
    from sglang.srt.plan.layer_spec import AttentionSite


class DecodeMetadata(Protocol):
    """Attention of a step's decoding requests."""

    def attend(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        """Computes out [D, Hq, Dv] for q [D, Hq, D]."""


class ExtendMetadata(Protocol):
    """Attention of a step's prompts or draft tokens."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, out: torch.Tensor
    ) -> None:
        """Computes the rows of out [T, Hq, Dv] from start_loc[0] on; rows before belong to decoding requests. q [T, Hq,
        D]; k [T, Hkv, D], v [T, Hkv, Dv] of the new tokens, which are already in the cache."""


class DecodeBuilder(Protocol):
    """Builds the metadata of decoding requests."""

    plans_on_host: bool
    """True if the metadata depends on lengths on the host: then `refresh` is called before every replay."""
    in_graphs: bool
    """True if a CUDA graph may contain the attention kernels of this builder."""

    def build(self, rows: DecodeRows) -> DecodeMetadata:
        """Builds the metadata of a step outside of graphs. Must not invalidate prompt metadata of the same step."""

    def prepare_graphs(self, batch_sizes: tuple[int, ...]) -> None:
        """Allocates everything that graphs with these numbers of decoding rows (ascending) will read, at its final
        address."""

    def build_in_graph(self, rows: DecodeRows) -> DecodeMetadata:
        """Builds metadata from static tensors as part of a graph; also called in the warm-up runs before capture. Reads
        no lengths on the host, and neither plans nor waits."""

    def refresh(self, rows: DecodeRows) -> None:
        """Updates what the graph reads besides its input arrays, which are already loaded. `rows.seq_lens_cpu` is the
        step's, with 1 for padding rows."""


class ExtendBuilder(Protocol):
    """Builds the metadata of prompts and draft tokens."""

    plans_on_host: bool
    in_graphs: bool

    def build(self, rows: ExtendRows, causal: bool = True) -> ExtendMetadata:
        """Builds the metadata of any step. In a graph the lengths on the host are those of the widest case. causal
        False: new tokens of a request see all of its new tokens; used only for images that attend in both
        directions."""

    def num_parts(self, new_lens: Sequence[int], prefix_lens: Sequence[int]) -> int:
        """Returns how many programs share a cached prefix in a step with prompts of these lengths, [P] each. With more
        than 1 the step has no graph, since a graph must serve prefixes of every length."""


class AttentionBackend(Protocol):
    """Creates builders. Built once per model runner with (plan, device). Sites that can share a step's computations get
    the same builder."""

    def decode_builder(self, site: AttentionSite) -> DecodeBuilder:
        """Returns the builder of a site's metadata for requests that decode."""

    def extend_builder(self, site: AttentionSite) -> ExtendBuilder:
        """Returns the builder of a site's metadata for prompts."""


class LongPromptBackend(Protocol):
    """A backend with builders for long prompts. Built like an AttentionBackend."""

    def long_prompt_builder(self, site: AttentionSite) -> ExtendBuilder:
        """Returns a builder that has attended once as a check. Raises any error of that."""


LatentPrompt = Callable[..., None]
"""Attends with the parameters of `blocks.mla.reference.expanded_latent_attention`."""


class LongLatentsBuilder(Protocol):
    """Plans long prompts of latent attention. Built with (plan, latent description, device)."""

    def build(self, new_lens: Sequence[int], chunks: Sequence[LatentChunk]) -> LatentPrompt | None:
        """Plans a step of prompts with these numbers of new tokens behind cached prefixes in chunks. Returns the op
        that attends in every layer of the step; None if the step is too large to plan."""

    def check(self) -> None:
        """Attends once. Raises any error."""


@dataclass(slots=True)
class WithImages:
    """Implements ExtendMetadata for a site with a sliding window where images attend in both directions: after the
    causal pass they attend once more, each as a request of its own, over what lies before it in the cache."""

    text: ExtendMetadata
    images: ExtendMetadata
    tokens: torch.Tensor

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, out: torch.Tensor
    ) -> None:
        self.text.attend(q, k, v, layer, out)
        seen = out[self.tokens]
        self.images.attend(q[self.tokens], k[self.tokens], v[self.tokens], layer, seen)
        out[self.tokens] = seen


@dataclass(slots=True)
class SiteMetadata:
    """Metadata of one site in one step."""

    decode: DecodeMetadata | None = None
    extend: ExtendMetadata | None = None
    latent_chunks: tuple[LatentChunk, ...] | None = None
    """Cached prefixes of a latent site that the prompts of the step attend to over expanded keys and values; None: the
    prompts attend with absorbed queries over latents."""
    latent_prompt: LatentPrompt | None = None
    """Op that replaces the plan's kernel when the prompts of the step are long."""
    sparse: Any = None
    """A `sparse_rows.SparseRows` (typed Any, because that module imports this one): the tokens that attend to an
    indexer's selection. `decode` and `extend` are None if their tokens are among these."""
    keys_values: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Keys and values of the new tokens that later layers of the site reuse, by layer id."""

    @property
    def decodes_sparsely(self) -> bool:
        """Returns whether decoding rows attend to selected entries only."""
        return self.sparse is not None and self.sparse.with_decodes

    @property
    def extends_sparsely(self) -> bool:
        """Returns whether rows of prompts attend to selected entries only."""
        return self.sparse is not None and self.sparse.with_prompts
