"""A stage of a pipeline in CUDA graphs: what it takes and what it gives travels outside of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.model_executor.graph_capture import StaticOutput

if TYPE_CHECKING:
    from sglang.srt.models.causal_lm import CausalLM


class StageInGraph:
    """The model between fixed addresses, for all graphs of a runner. All stages have graphs of the same sizes, so what
    travels has the rows of the graph, padding included, which hold what they do in one process."""

    def __init__(self, model: CausalLM, most_tokens: int, keeps_hidden: bool = False) -> None:
        """keeps_hidden: also where nothing is sent."""
        self.model = model
        self.received = model.input_buffer(most_tokens)
        if self.received is not None:
            self.received.zero_()  # what is no number would stay in the padding's cache slot
        self.sends = not model.description.last_stage
        self.output = StaticOutput() if self.sends or keeps_hidden else None
        self.hidden: dict[int, torch.Tensor] = {}  # by number of tokens

    def compute(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, H]. To be captured."""
        received = None if self.received is None else self.received[: len(batch.input_ids)]
        hidden = self.model.compute(batch, received)
        if self.output is not None:
            self.hidden[len(hidden)] = self.output.keep(hidden)
        return hidden

    def replay(self, graph: torch.cuda.CUDAGraph, num_tokens: int) -> None:
        """A graph of `num_tokens`, with the rows that come before it and go on behind it."""
        if self.received is not None:
            self.model.pp.receive_from_previous(self.received[:num_tokens])
        graph.replay()
        if self.sends:
            # A copy: the next replay writes there while these are on their way.
            self.model.pp.send_to_next(self.hidden[num_tokens].clone())
