"""A model whose code is a class of transformers that generates no text: it makes embeddings, or scores labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from sglang.srt.blocks.transformers_layer.text_attention import TextAttention
from sglang.srt.configs.sentence_modules import FIRST, LAST, DenseModule
from sglang.srt.layers.parameter import Init, Param, TensorPart
from sglang.srt.models.transformers_backend.head import Classifier
from sglang.srt.models.transformers_backend.model import TransformersModel
from sglang.srt.plan.weight_names import PartKey, WeightMap

if TYPE_CHECKING:
    from sglang.srt.blocks.transformers_layer.spec import TransformersLayer
    from sglang.srt.layers.forward_batch import ForwardBatch
    from sglang.srt.layers.parameter import Scope
    from sglang.srt.layers.rotary_embedding import RotaryTables
    from sglang.srt.layers.row_exchange import RowExchange
    from sglang.srt.layers.step_rows import ExtendRows

_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
}


class TextModel(TransformersModel):
    """A model whose hidden state of the last token of a text is what is made of the whole text, so that requests get it
    as they get the state of a token from other models. Every text is in one step as a whole."""

    def _attention(self, scope: Scope, spec: TransformersLayer, number: int, rotary: RotaryTables) -> TextAttention:
        return TextAttention(scope, spec, self.step)

    def _split(self) -> None:
        pooling, text = self.description.pooling, self.facts.text
        assert pooling is not None and text is not None
        self.text, self.method = text, pooling.method
        self.decoder = self.model.base_model
        self.dense = [DenseLayer(layer, self.dtype, self.device) for layer in pooling.dense]
        self.beside = {layer.folder: layer for layer in self.dense}
        self.classifier = Classifier(self.model) if pooling.num_labels else None

    def compute(self, batch: ForwardBatch, received: torch.Tensor | None) -> torch.Tensor:
        """Returns [T, N] fp32: in the row of the last token of each text what is made of it, in the others nothing in
        particular. received: None, there are no stages."""
        assert batch.extend is not None
        hidden = self._hidden(batch)
        values = self._made_of(_pooled(hidden, batch.extend, self.method))
        rows = torch.zeros((len(hidden), values.shape[1]), dtype=torch.float32, device=hidden.device)
        return rows.index_copy_(0, batch.extend.start_loc[1:].long() - 1, values)

    def _hidden(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns the hidden states [T, H] of all tokens."""
        more = {}
        if self.text.has_segments:
            more["token_type_ids"] = (
                torch.zeros_like(batch.input_ids)[None] if batch.segments is None else batch.segments[None]
            )
        self.step.batch = batch
        try:
            out = self.decoder(
                input_ids=batch.input_ids[None],
                position_ids=batch.positions[None] + self.text.first_position,
                use_cache=False,
                **more,
            )
        finally:
            self.step.batch = None
        hidden: torch.Tensor = out[0][0]
        return hidden

    def _made_of(self, states: torch.Tensor) -> torch.Tensor:
        """Returns [P, N] fp32 of pooled states [P, H] fp32."""
        if self.classifier is not None:
            return self.classifier.scores(states[:, None].to(self.dtype)).float()
        for layer in self.dense:
            states = layer(states)
        return states

    def logits(self, hidden: torch.Tensor, adapter_slots: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the rows as they are: nothing is sampled of them, but the checks at start-up compare them."""
        return hidden

    def step_logits(
        self, hidden: torch.Tensor, exchange: RowExchange | None, adapter_slots: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns what `logits` does."""
        return hidden

    def ignored_weight(self, name: str) -> bool:
        """Returns whether this rank needs nothing of a checkpoint tensor: heads for other ends are not read."""
        return name.partition(".")[0] not in self.facts.parts or super().ignored_weight(name)


def _pooled(hidden: torch.Tensor, rows: ExtendRows, method: str) -> torch.Tensor:
    """Returns [P, H] fp32 of the hidden states [T, H] of P texts."""
    starts = rows.start_loc.long()
    if method == FIRST:
        return hidden[starts[:-1]].float()
    if method == LAST:
        return hidden[starts[1:] - 1].float()
    # A product, because it adds up in an order that does not change.
    token = torch.arange(len(hidden), device=hidden.device)
    inside = (token >= starts[:-1, None]) & (token < starts[1:, None])
    return (inside.float() @ hidden.float()) / (starts[1:] - starts[:-1])[:, None]


class DenseLayer:
    """A linear layer behind the pooling, with a checkpoint of its own."""

    base_prefix = ""

    def __init__(self, module: DenseModule, dtype: torch.dtype, device: torch.device) -> None:
        self.folder, self.activation = module.folder, module.activation
        self.weights, self.finish = WeightMap({"": "linear"}, {}), list[Callable[[], None]]()
        shapes = {"weight": (module.rows, module.cols), **({"bias": (module.rows,)} if module.bias else {})}
        self.params = {
            leaf: Param(
                leaf,
                torch.empty(shape, dtype=dtype, device=device),
                {PartKey(): TensorPart(shape)},
                Init.ZEROS if leaf == "bias" else Init.NORMAL,
            )
            for leaf, shape in shapes.items()
        }

    def ignored_weight(self, name: str) -> bool:
        """Returns False: all tensors of the file are read."""
        return False

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Returns [P, rows] fp32 of states [P, cols] fp32."""
        bias = self.params.get("bias")
        out = F.linear(states, self.params["weight"].tensor.float(), None if bias is None else bias.tensor.float())
        return _FUNCTIONS[self.activation](out) if self.activation else out
