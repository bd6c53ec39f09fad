"""The device's view of one step: which tokens it computes, for which requests, and where they lie in the caches.

A step has up to two kinds of rows. Requests that decode bring one token each and come first; behind them come requests
with a run of new tokens over a cached prefix: prompts, chunks of prompts, or draft tokens to verify.

    tokens    0 .. D-1                D .. T-1
    rows      decode: DecodeRows      extend: ExtendRows, ragged by start_loc
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.layers.input_rows import InputRows
from sglang.srt.layers.rotary_embedding import SectionPositions
from sglang.srt.layers.row_exchange import RowExchange
from sglang.srt.layers.step_rows import DecodeRows, ExtendRows, StateRecord, TokenSlots

if TYPE_CHECKING:
    from sglang.srt.layers.attention.metadata import SiteMetadata
    from sglang.srt.mem_cache.layerwise_load import LayerWaits
    from sglang.srt.mem_cache.memory_pool import CacheStore
    from sglang.srt.plan.layer_spec import AttentionSite


@dataclass(slots=True)
class ForwardBatch:
    """T new tokens of the requests of one step; device tensors unless the name ends in `_cpu`."""

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, of each token in its sequence
    token_slots: tuple[TokenSlots, ...]
    """One for each row table; a block takes that of its cache: `slots_of`."""
    decode: DecodeRows | None = None
    extend: ExtendRows | None = None
    metadata: Mapping[AttentionSite, SiteMetadata] = field(default_factory=dict)
    """Metadata that the kernels of each attention site read of this step (`AttentionSites.metadata`)."""

    num_valid_tokens: torch.Tensor | None = None
    """[1] int32: tokens from here on are padding, which experts need not compute. None: all are valid."""

    exchange: RowExchange | None = None
    """Of the tokens of all attention groups, where each has requests of its own."""

    embedding_rows: InputRows | None = None

    mrope_positions: torch.Tensor | SectionPositions | None = None
    """Positions that turn heads, where images make them others than `positions`: [T] int64, or one for each section
    where the frequencies of rotary embeddings have sections."""

    state_records: list[StateRecord] | None = None
    """Records of a step whose tokens may be taken back, otherwise None. Layers with recurrent states then leave these
    as they are and record here what is needed to advance them by a part of the tokens."""

    aux_hidden_states: list[torch.Tensor] = field(default_factory=list)
    """Residual streams [T, H] behind the layers that a draft reads (`Drafter.aux_layers`), in their order."""

    layer_outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    """Residual streams [T, H] behind some layers, by the layer's number, until they become `aux_hidden_states`."""

    step_cache: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that several layers read and the first one of them computes, by name."""

    shared_selection: Any = None
    """Where passes of a draft read one selection: what layers with an indexer leave for later passes, or take, as a
    `shared_selection.SharedSelection`, whose module imports this one; else None."""

    compressed: Any = None
    """Data that layers of compressed attention read of the step: a `compressed.step.CompressedStep`, whose module
    imports this one."""

    loads: LayerWaits | None = None
    """Pages that are still being loaded: each layer waits for its own. None: the step reads no such pages."""

    @property
    def num_decodes(self) -> int:
        return 0 if self.decode is None else len(self.decode)

    @property
    def rotary_positions(self) -> torch.Tensor | SectionPositions:
        return self.positions if self.mrope_positions is None else self.mrope_positions

    def slots_of(self, cache: CacheStore) -> TokenSlots:
        return self.token_slots[cache.table]
