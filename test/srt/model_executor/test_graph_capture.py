from __future__ import annotations

import gc

import pytest
import torch

from sglang.srt.model_executor.graph_capture import capture

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class Garbage:
    """Goes with the next collection, not before."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self.graph = graph
        self.itself = self


def test_an_older_graph_that_has_become_garbage() -> None:
    x = torch.zeros(8, device="cuda")
    older = [capture(lambda: x.add_(1))]
    x.zero_()

    def step() -> None:
        if torch.cuda.is_current_stream_capturing():
            Garbage(older.pop())
            _ = [[i] for i in range(100_000)]  # as many new objects as start a collection
        x.add_(1)

    graph = capture(step)
    assert not older and gc.isenabled()
    graph.replay()
    assert x.tolist() == [3.0] * 8  # twice before the capture, once since


def test_a_step_that_fails() -> None:
    def step() -> None:
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("during the capture")

    with pytest.raises(ValueError, match="during the capture"):
        capture(step)
    assert gc.isenabled()
