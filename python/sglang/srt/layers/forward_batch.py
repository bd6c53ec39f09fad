"""The device's view of one step: the tokens it computes, their requests, and their cache slots.

A step has up to two kinds of rows. Decoding requests with one token each come first; then come requests with a run of
new tokens over a cached prefix: prompts, chunks of prompts, or draft tokens to verify.

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
    """The T new tokens of one step's requests; device tensors unless the name ends in `_cpu`."""

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, of each token in its sequence
    token_slots: tuple[TokenSlots, ...]
    """Slots per row table; a block uses those of its cache's table (`slots_of`)."""
    decode: DecodeRows | None = None
    extend: ExtendRows | None = None
    metadata: Mapping[AttentionSite, SiteMetadata] = field(default_factory=dict)
    """Attention metadata of this step by attention site (`AttentionSites.metadata`)."""

    segments: torch.Tensor | None = None
    """[T] int64, number of the text of a pair, 0 or 1, that a token belongs to. None: no request is a pair."""

    num_valid_tokens: torch.Tensor | None = None
    """[1] int32: tokens from here on are padding, which experts need not compute. None: all are valid."""

    adapter_slots: torch.Tensor | None = None
    """[T] int32, the slot of each token's LoRA adapter, counted from 1; 0: none. None: no token has one."""

    exchange: RowExchange | None = None
    """Gathers the tokens of all attention groups, with data-parallel attention."""

    embedding_rows: InputRows | None = None

    mrope_positions: torch.Tensor | SectionPositions | None = None
    """RoPE positions of models whose images make them differ from `positions`: [T] int64, or one per section for
    M-RoPE."""

    state_records: list[StateRecord] | None = None
    """Records of a step with draft tokens, which may be rejected; otherwise None. Layers then leave their recurrent
    states unchanged, and record here what is needed to advance them by the accepted tokens."""

    aux_hidden_states: list[torch.Tensor] = field(default_factory=list)
    """Residual streams [T, H] after the layers that a draft reads (`Drafter.aux_layers`), in their order."""

    layer_outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    """Residual streams [T, H] by layer number, until they become `aux_hidden_states`."""

    step_cache: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that several layers read and the first one of them computes, by name."""

    shared_selection: Any = None
    """A `shared_selection.SharedSelection` (typed Any, because that module imports this one), if the passes of a draft
    share an indexer's selection."""

    compressed: Any = None
    """A `compressed_step.CompressedStep` (typed Any for the same reason) for layers of compressed attention."""

    loads: LayerWaits | None = None
    """Pages that are still being loaded: each layer waits for its own. None: the step reads no such pages."""

    @property
    def num_decodes(self) -> int:
        """Returns the number of requests that decode or verify."""
        return 0 if self.decode is None else len(self.decode)

    @property
    def rotary_positions(self) -> torch.Tensor | SectionPositions:
        """Returns the positions for RoPE."""
        return self.positions if self.mrope_positions is None else self.mrope_positions

    def slots_of(self, cache: CacheStore) -> TokenSlots:
        """Returns the tokens' slots in a cache."""
        return self.token_slots[cache.table]
