"""Rehearses a rank's start: the model runner does all that it does then, on tensors without memory (`meta`), so that
what it launches is known without a GPU and without weights.

    with noted_launches("sm_120", note), unread_numbers():
        RehearsedRunner(rehearsed(plan), load_format="dummy")      # takes seconds
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from sglang.srt.kernels.ledger_file import Ledger
from sglang.srt.kernels.resolve import resolve
from sglang.srt.kernels.spec import Choice, NoKernel
from sglang.srt.model_executor.draft_runner import DraftRunner
from sglang.srt.model_executor.graph_runner import GraphRunner, GraphSizes
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plan.kernel_choice import LONG_OPS
from sglang.srt.plan.layer_spec import ABSENT, LayerSpec
from sglang.srt.plan.plan import Plan
from sglang.srt.plan.stages import uncut_runs
from sglang.srt.plan.tile_configs import make_tile_configs
from sglang.srt.plan.weight_spec import Matrix


def rehearsed(plan: Plan) -> Plan:
    """Returns the plan on the device `meta`, without those layers that launch what others do, and without libraries,
    whose kernels are compiled already."""
    model = plan.description
    kept = {layer for run in _runs_that_differ(plan) for layer in run}
    kept |= {layer + 1 for layer in plan.aux_layers}  # whose input a draft reads
    layers = (layer if i in kept else LayerSpec(ABSENT, ABSENT, layer.residual) for i, layer in enumerate(model.layers))
    draft = plan.draft
    if draft is not None:
        draft = replace(draft, config=replace(draft.config, dummy=True))
    choices = dict(_without_libraries(plan))
    others = (choice for key, choice in choices.items() if choice is not plan.choices[key])
    tile_configs = {**plan.tile_configs, **make_tile_configs(others, plan.arch)}
    description = replace(model, layers=tuple(layers))
    return replace(
        plan,
        device="meta",
        description=description,
        draft=draft,
        choices=choices,
        tile_configs=tile_configs,
        quantized_sums=None,  # which need the other ranks
        host_cache=None,  # which has memory
    )


def _without_libraries(plan: Plan) -> Iterator[tuple[str, Choice]]:
    """Yields the kernels by need: in the place of a library's the first one that serves without it, if there is one.
    Long prompts have a kernel of their own only with a library."""
    ledger = Ledger.load()
    for key, choice in plan.choices.items():
        if choice.spec.package in (None, "triton"):
            yield key, choice
        elif choice.need.op not in LONG_OPS.values():
            try:
                yield key, resolve(choice.need, plan.arch, ledger, frozenset({"triton"}))
            except NoKernel:
                yield key, choice


def _runs_that_differ(plan: Plan) -> Iterator[range]:
    """Yields the layers of each kind behind each other kind, as what a norm computes depends on the layer before. A
    class of transformers has them all: its code is not ours to cut."""
    model, seen = plan.description, set[object]()
    before: object = None
    for run in uncut_runs(model):
        kind = tuple(
            (model.layers[i], *(model.quant_of(i, part) for part in plan.weights.layers[i] if isinstance(part, Matrix)))
            for i in run
        )
        if (before, kind) not in seen or model.transformers_class is not None:
            yield run
        seen.add((before, kind))
        before = kind


class RehearsedRunner(ModelRunner):
    """A model runner whose graphs are computed once and not captured."""

    def _captured(
        self, sizes: GraphSizes, keeps_hidden: bool, drafts: DraftRunner | None, graphs_prompts: bool
    ) -> GraphRunner:
        return GraphRunner(self.state, sizes, keeps_hidden, drafts, graphs_prompts, capture_step=_Computed)


class _Computed:
    """Stands for the graph of a step."""

    def __init__(self, step: Callable[[], object], pool: Any = None, producer: Callable[[], object] | None = None):
        step()

    def pool(self) -> Any:
        return None

    def replay(self) -> None: ...


@contextmanager
def unread_numbers() -> Iterator[None]:
    """Gives 1 for each number that is read back in the block from a tensor without memory. Where a start compares
    results, they are then equal, finite and true. Nothing is found by `nonzero`."""
    with torch.inference_mode(), _Ones():
        yield


class _Ones(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, aten = kwargs or {}, torch.ops.aten
        if func.overloadpacket in (aten.item, aten.is_nonzero, aten.to):  # which inference mode does not take apart
            with self:
                return func.decompose(*args, **kwargs)
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype).item()
        if func is aten._to_copy.default and args[0].is_meta and kwargs.get("device") == torch.device("cpu"):
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func is aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            return args[0].fill_(1)
        if func is aten.nonzero.default and args[0].is_meta:  # a start looks for exceptions, which are rare
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        try:
            return func(*args, **kwargs)
        except NotImplementedError:  # the numbers decide about the shape of the result
            args, kwargs = tree_map_only(torch.Tensor, lambda x: torch.ones_like(x, device="cpu"), (args, kwargs))
            return tree_map_only(torch.Tensor, lambda x: x.to("meta"), func(*args, **kwargs))
