"""CUDA graphs on a CPU: a graph is its step, computed once more from what the static inputs hold by then, and attention
reads lengths from the device's tensors, as kernels do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang.srt.layers.attention.dcp import builders_of
from sglang.srt.layers.attention.sites import AttentionSites
from sglang.srt.layers.attention.torch_native_backend import NativeDecodeMetadata, NativeExtendMetadata
from sglang.srt.layers.step_rows import DecodeRows, ExtendRows
from sglang.srt.model_executor import graph_runner
from sglang.srt.model_executor.graph_runner import GraphRunner, GraphSizes
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.step import StepInput

POISON_INDEX = -(1 << 20)


class StepInPlaceOfGraph:
    """A replay computes the captured step once more."""

    def __init__(self, step: Callable[[], object], pool: Any, producer: Callable[[], object] | None = None) -> None:
        self.replay = step
        step()

    def pool(self) -> None:
        return None


class PoisonedGraph(StepInPlaceOfGraph):
    """What the capture itself gives is poisoned: on a GPU nothing has computed it before the first replay. Takes twice
    as long."""

    def __init__(self, step: Callable[[], object], pool: Any, producer: Callable[[], object] | None = None) -> None:
        self.replay = step
        if producer is not None:
            producer()
        with Poisoned():
            step()


class Poisoned(TorchDispatchMode):
    """Fills the memory that the block allocates, at its end: with NaN, or with numbers that are no index."""

    def __init__(self) -> None:
        super().__init__()
        self._known: set[int] = set()
        self._made: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in self._tensors((args, kwargs)):
            self._known.add(tensor.untyped_storage().data_ptr())
        result = func(*args, **(kwargs or {}))
        for tensor in self._tensors(result):
            if tensor.untyped_storage().data_ptr() not in self._known:
                self._known.add(tensor.untyped_storage().data_ptr())
                self._made.append(tensor)  # held, so that no later tensor has its address
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for tensor in self._made:
            tensor.fill_(float("nan") if tensor.is_floating_point() else tensor.dtype != torch.bool and POISON_INDEX)

    @staticmethod
    def _tensors(tree: object) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class DeviceLengths:
    """Implements AttentionBackend and both builders: the CPU's attention, which plans nothing on the host."""

    plans_on_host = False
    in_graphs = True
    reads_new_tokens = True

    def decode_builder(self, site: object) -> DeviceLengths:
        return self

    def extend_builder(self, site: object) -> DeviceLengths:
        return self

    def part_builder(self, shape: object, max_rows: int) -> DeviceLengths:
        return self

    def prepare_graphs(self, batch_sizes: tuple[int, ...]) -> None:
        pass

    def build(self, rows: DecodeRows | ExtendRows, causal: bool = True) -> Any:
        return DeviceDecode(rows) if isinstance(rows, DecodeRows) else DeviceExtend(rows, causal)

    build_in_graph = build

    def num_parts(self, new_lens: Sequence[int], prefix_lens: Sequence[int]) -> int:
        return 1

    def refresh(self, rows: DecodeRows) -> None:
        raise AssertionError("nothing is planned on the host")


@dataclass
class DeviceDecode:
    rows: DecodeRows

    def attend(self, q: torch.Tensor, layer: Any, out: torch.Tensor, **features: torch.Tensor) -> None:
        NativeDecodeMetadata(self.rows, self.rows.seq_lens.tolist()).attend(q, layer, out, **features)

    def attend_part(self, q: torch.Tensor, layer: Any, out: torch.Tensor, lse: torch.Tensor) -> None:
        NativeDecodeMetadata(self.rows, self.rows.seq_lens.tolist()).attend_part(q, layer, out, lse)


@dataclass
class DeviceExtend:
    rows: ExtendRows
    causal: bool

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        rows = self.rows
        lens = rows.start_loc.diff()
        used = lens.nonzero().flatten()
        requests = ExtendRows(
            rows.req_pool_indices[used], rows.seq_lens[used], rows.prefix_lens[used], rows.start_loc,
            rows.token_slots, lens[used].tolist(), rows.prefix_lens[used].tolist(),
        )  # fmt: skip
        NativeExtendMetadata(requests, self.causal).attend(q, k, v, layer, out, bias)


def with_attention(runner: ModelRunner, decode: Any, extend: Any, long_prompts: Any = None) -> AttentionSites:
    """From now on these backends attend. long_prompts: to prompts that are long, at sites without windows."""
    sites = runner.state.attention
    runner.state.attention = AttentionSites(
        *builders_of(sites.decode, decode, extend, runner.plan),
        sites._latent,
        sites._chunk_tokens,
        sites.sparse,
        {
            site: long_prompts.long_prompt_builder(site)
            for site in (() if long_prompts is None else sites.extend)
            if not site.window
        },
        tables=sites._tables,
    )
    return runner.state.attention


@contextmanager
def in_graphs(
    runner: ModelRunner,
    sizes: GraphSizes,
    capture: Callable[..., Any] = StepInPlaceOfGraph,
    keeps_hidden: bool = False,
) -> Iterator[list[StepInput]]:
    """Steps run in stand-ins of graphs of these sizes; those that did so far."""
    replays: list[StepInput] = []
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(graph_runner, "capture", capture)
        drafts, drafts_in_graphs = runner.output.drafts, not runner.state.attention.decode_plans_on_host
        sizes = replace(sizes, widths=runner.widths)
        runner.graphs = graphs = GraphRunner(runner.state, sizes, keeps_hidden, drafts, drafts_in_graphs)
        replay = graphs.replay
        patch.setattr(graphs, "replay", lambda shape, step: (replays.append(step), replay(shape, step))[1])
        yield replays
