"""Metadata that attention reads of a step, by site.

A site is what the layers that share one plan of a step have in common (`plan.layer_spec.AttentionSite`). For each site
there is a builder for the requests that decode and one for those with prompts; they may be of different backends. A
builder makes the metadata of a step, and metadata attends:

    metadata = batch.metadata[layer.site]
    metadata.decode.attend(q[:D], layer, out[:D])
    metadata.extend.attend(q, k, v, layer, out)

Where a layer has biases by distance, `attend` also takes `bias` [rows of q, Hq, bias_extent]: metadata of backends
that serve "relative_bias" does.

Metadata reads the layer's cache through the row table of that cache, so layers of one site may have caches of several
lifetimes. New keys and values are stored before anything attends.

A step in a CUDA graph has three moments:

- once, before any capture: `prepare_graphs` may allocate, plan and wait;
- inside the capture: `build_in_graph` of decoding rows and `build` of prompts choose among what exists, and launch what
  each replay repeats;
- before each replay: `refresh`, of builders that plan on the host, plans and launches copies and kernels; it never
  waits for the step in flight.

The graph itself enters the new tokens' slots in the table of caches that keep all tokens. So inside a capture that
table is complete, and before a replay it is not: a builder that reads pages there takes the last one of each request
from `out_cache_loc`. The tables of windows are complete before each replay of a graph whose builders plan on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from sglang.srt.layers.attention.attention_layer import AttentionLayer
    from sglang.srt.layers.attention.latent_chunks import LatentChunk
    from sglang.srt.layers.ops import LatentPromptOp
    from sglang.srt.layers.step_rows import DecodeRows, ExtendRows
    from sglang.srt.plan.layer_spec import AttentionSite


class DecodeMetadata(Protocol):
    def attend(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        """q [D, Hq, D] -> out [D, Hq, Dv]."""


class ExtendMetadata(Protocol):
    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, out: torch.Tensor
    ) -> None:
        """q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] of the new tokens (already stored) -> the rows of out
        [T, Hq, Dv] from start_loc[0] on; the rows before it belong to requests that decode."""


class DecodeBuilder(Protocol):
    plans_on_host: bool
    """True if the metadata depends on lengths on the host: then `refresh` is called before every replay."""
    in_graphs: bool
    """True if a CUDA graph may contain the attention kernels of this builder."""

    def build(self, rows: DecodeRows) -> DecodeMetadata:
        """Builds the metadata of a step that is not replayed. Must leave the metadata of a prompt builder of the same
        step whole."""

    def prepare_graphs(self, batch_sizes: tuple[int, ...]) -> None:
        """Everything that captured graphs with so many decoding rows (ascending) will read, at its final address."""

    def build_in_graph(self, rows: DecodeRows) -> DecodeMetadata:
        """Builds metadata of static tensors, as part of the graph; also called in the runs that precede the capture.
        Reads no host lengths and neither plans nor waits."""

    def refresh(self, rows: DecodeRows) -> None:
        """Update what the graph reads besides the static tensors, which are loaded. `rows.seq_lens_cpu` is that of the
        step, with 1 for rows of padding."""


class ExtendBuilder(Protocol):
    plans_on_host: bool
    in_graphs: bool

    def build(self, rows: ExtendRows, causal: bool = True) -> ExtendMetadata:
        """Builds the metadata of any step. In a graph the lengths on the host are those of the widest case. causal
        False: new tokens of a request see all of its new tokens; asked only of models with images that do so."""

    def num_parts(self, new_lens: Sequence[int], prefix_lens: Sequence[int]) -> int:
        """Returns the programs that share a cached prefix of a step with prompts of these lengths, [P] each. Where they
        are more than 1, the step has no graph: graphs serve prefixes of every length."""


class AttentionBackend(Protocol):
    """Built once for a model runner, with (plan, device). Sites that can share what a step computes get the same
    builder."""

    def decode_builder(self, site: AttentionSite) -> DecodeBuilder: ...

    def extend_builder(self, site: AttentionSite) -> ExtendBuilder: ...


class LongPromptBackend(Protocol):
    """Built as an AttentionBackend."""

    def long_prompt_builder(self, site: AttentionSite) -> ExtendBuilder:
        """Returns one that has attended. Raises whatever goes wrong where it is tried."""


class LongLatentsBuilder(Protocol):
    """Built with (plan, latent description, device)."""

    def build(self, new_lens: Sequence[int], chunks: Sequence[LatentChunk]) -> LatentPromptOp | None:
        """Plans a step of prompts with so many new tokens each, behind cached prefixes in chunks. Returns what attends
        in every layer of the step; None for steps that it has no room to plan."""

    def check(self) -> None:
        """Attends once. Raises whatever goes wrong."""


@dataclass(slots=True)
class WithImages:
    """Implements ExtendMetadata for a site with a window, where images see themselves both ways: they attend once more,
    each as a request of its own, over what lies before it in the cache."""

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
    latent_prompt: LatentPromptOp | None = None
    """What attends to them in the place of the plan's kernel, where the prompts of the step are long."""
    sparse: Any = None
    """A `sparse_rows.SparseRows`, whose module imports this one: tokens of the step that attend to what an indexer
    selects, at a site whose layers do so. `decode` and `extend` are None where their tokens are among these."""
    keys_values: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Keys and values of the new tokens that later layers of the site attend to as well, by layer id."""

    @property
    def decodes_sparsely(self) -> bool:
        return self.sparse is not None and self.sparse.with_decodes

    @property
    def extends_sparsely(self) -> bool:
        return self.sparse is not None and self.sparse.with_prompts
