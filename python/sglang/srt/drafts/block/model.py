"""Block draft models (DFlash, DSpark), which propose several tokens per request in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.drafts.block.convolution import ConvolvedBlock
from sglang.srt.drafts.block.heads import BlockHead, build_block_head, build_confidence
from sglang.srt.drafts.block.mask_vector import MaskVector
from sglang.srt.drafts.block.spec import Block
from sglang.srt.drafts.model import PartsDraft
from sglang.srt.layers.quantization.activations import values_of
from sglang.srt.layers.residual import MIXER, SumJoin

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch
    from sglang.srt.models.causal_lm import CausalLM
    from sglang.srt.plan.plan import Plan


class BlockDraft(PartsDraft[Block]):
    """A draft of DFlash or DSpark (`drafts.block.spec.Block`). Implements DraftModel: its rows are those of
    blocks, [R * B]; `keep` stores its keys and values of the target's tokens."""

    shifted = False

    def __init__(self, plan: Plan, target: CausalLM) -> None:
        super().__init__(plan, target)
        assert plan.draft is not None
        parts, form = self.parts, self.form
        self.fc = parts.unpacked(form.num_aux_layers * form.aux_size, "fc")
        self.hidden_norm = parts.norm("hidden_norm")
        counted = range(form.num_aux_layers if form.aux_norms else 0)
        self.aux_norms = [parts.norm(f"aux_hidden_norms.{i}", form.aux_size) for i in counted]
        self.layers = [parts.layer(i, partial(self._convolved, i)) for i in range(len(parts.model.layers))]
        self.ending = parts.ending()
        self.head: BlockHead | None = build_block_head(parts, form)
        self.confidence = build_confidence(parts, form, self.head)
        self.mask_vector = MaskVector(parts, form, plan.draft.config.dummy) if form.mask_vector else None

    def _convolved(self, i: int, name: str, block: Any) -> Any:
        """Returns a layer's block, between convolutions if the draft has them."""
        spec = self.form.convolution
        if spec is None:
            return block
        scope = self.parts.layer_scope(i).sub("attn_conv" if name == MIXER else "mlp_conv")
        return ConvolvedBlock(scope, spec, block, self.parts.model.hidden_size, self.form.size)

    def features(self, hidden: torch.Tensor, aux_hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
        rows = list(aux_hidden_states)
        if self.aux_norms:
            rows = [norm(each, None)[0] for norm, each in zip(self.aux_norms, rows, strict=True)]
        return self.hidden_norm(self.fc(torch.cat(rows, dim=-1)), None)[0]

    def keep(self, batch: ForwardBatch, features: torch.Tensor) -> None:
        """Stores every layer's keys and values of the batch's tokens, computed from the features [T, H]."""
        for layer in self.layers:
            (join, attention), *_ = layer.blocks
            rows = features
            if self.form.input_norms:
                assert isinstance(join, SumJoin) and join.norm is not None
                rows = values_of(join.norm(features, None)[0])
            attention.keep(rows, batch)

    def __call__(self, batch: ForwardBatch, features: torch.Tensor | None) -> torch.Tensor:
        embedded = self.parts.embedding(batch.input_ids)
        if self.mask_vector is not None:
            self.mask_vector.put(embedded)
        stream = self.parts.residual.begin(embedded)
        for layer in self.layers:
            layer(stream, batch)
        return self.ending(stream)
