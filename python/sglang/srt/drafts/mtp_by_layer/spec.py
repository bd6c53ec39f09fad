"""Layers for multi-token prediction of which each makes the draft token of one depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang.srt.drafts.form import Form
from sglang.srt.plan.weight_spec import Elements, Matrix, Weights


@dataclass(frozen=True, slots=True)
class MTPByLayer(Form):
    """A draft of several layers for multi-token prediction (arXiv 2412.19437, section 2.2), each with its own
    projection and norms. The layer of depth d drafts the token d + 2 positions behind a row, from the token before that
    and features of the row. Features are the target's residual stream behind its last layer.

        final_features: features are the target's final hidden states instead
        chained: features of later depths are the stream behind the previous depth's layer
        hidden_first: as in Projected
        depth_norms: each depth has a norm before the output head
        wide_norms: weights of norms are kept in fp32
        keeps_states: a request has states, which include the features from which it continues
    """

    depths: int
    chained: bool = False
    final_features: bool = False
    hidden_first: bool = False
    depth_norms: bool = True
    wide_norms: bool = False
    keeps_states: bool = False

    final_norm = False
    computed_by = "sglang.srt.drafts.mtp_by_layer.model:MTPByLayerDraft"
    proposed_by = "sglang.srt.drafts.mtp_by_layer.drafter:MultiLayerMTP"

    @property
    def next_tokens_read(self) -> int:
        return self.depths

    @property
    def tails(self) -> int:
        return 0 if self.keeps_states else self.depths - 1

    def passes(self, i: int) -> Sequence[tuple[int, bool]]:
        return ((i, i == 0),)  # depths from i on process the previous draft token

    def weights(self, hidden_size: int) -> Weights:
        norms = Elements((2 + self.depth_norms) * hidden_size, "float32" if self.wide_norms else None)
        one = (Matrix("fc", ("",), hidden_size, 2 * hidden_size, quantized=False), norms)
        return one * self.depths
