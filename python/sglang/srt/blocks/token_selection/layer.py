"""The selection of tokens in front of grouped-query attention, of which a token is a block of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.blocks.mla.indexer import LightningIndexer
from sglang.srt.blocks.token_selection.spec import TokenIndexer
from sglang.srt.layers.block import Site
from sglang.srt.layers.parameter import Scope
from sglang.srt.layers.quantization.activations import Activations, values_of

if TYPE_CHECKING:
    from sglang.srt.layers.attention.sparse_rows import SparseRows
    from sglang.srt.layers.forward_batch import ForwardBatch


class TokenSelector:
    """Stores the index keys of a step's tokens, and puts the selection for its sparse tokens into `SparseRows`."""

    def __init__(self, scope: Scope, spec: GQA, site: Site) -> None:
        assert isinstance(spec.indexer, TokenIndexer)
        self.indexer = LightningIndexer(scope, spec.indexer.scores, site)
        self.rotary = site.rotary.of(spec.rope)

    def __call__(self, x: Activations, batch: ForwardBatch, rows: SparseRows | None) -> None:
        """Stores the keys of all T tokens of x [T, H], and selects for those in `rows`, if any."""
        hidden = values_of(x)
        self.indexer(hidden, hidden, self.rotary.at(batch.rotary_positions), batch, rows)
