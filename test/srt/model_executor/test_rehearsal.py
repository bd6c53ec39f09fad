"""A rehearsal launches what the start itself does, whose tensors have memory and numbers: here a start on CPU tensors,
which passes for one on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

import sglang
from sglang.ledger.launch_form import Form, Launches, recording
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.managers.scheduler.scheduler_setup import runner_options
from sglang.srt.model_executor import canary, graph_runner
from sglang.srt.model_executor.canary import check_steps
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.rehearsal import RehearsedRunner, rehearsed, unread_numbers
from sglang.srt.plan.plan import Plan, make_plan
from sglang.srt.server_args import ServerArgs

TINY = Path(sglang.__file__).parent / "embedded" / "tiny"
SMALL = {
    "load_format": "dummy",
    "cuda_graph_bs": [1, 4],
    "max_running_requests": 6,
    "max_total_tokens": 4096,
    "chunked_prefill_size": 128,
    "context_length": 512,
    "random_seed": 1,
}


def planned(folder: Path, card: str = "rtx-pro-6000-server", **flags: Any) -> tuple[ServerArgs, Plan]:
    args = ServerArgs.from_kwargs(**{"model_path": str(folder), **SMALL, **flags})
    config = ModelConfig.from_server_args(args)
    return args, make_plan(args, config, arch_by_name(card), 90 << 30, frozenset({"triton"}))


def forms_of_rehearsal(args: ServerArgs, plan: Plan) -> Launches:
    assert plan.arch.capability is not None
    with recording("sm_{}{}".format(*plan.arch.capability)) as launches, unread_numbers():
        small = rehearsed(plan)
        check_steps(RehearsedRunner(small, **runner_options(args, small)))
    return launches


class _OnCpu(str):
    """A device that is no "cpu" for the code, and one for torch."""

    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


class _Numbers(TorchDispatchMode):
    """Memory that nothing has written holds zeros, as kernels are not run. Products, some of which no CPU has, are
    zeros too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, aten = kwargs or {}, torch.ops.aten
        if func.overloadpacket in (aten.mm, aten.addmm, aten.bmm):
            shapes = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in (*args, *kwargs.values())]
            result = func(*shapes[: len(args)], **dict(zip(kwargs, shapes[len(args) :], strict=True)))
            return torch.zeros(result.shape, dtype=result.dtype)
        result = func(*args, **kwargs)
        return result.zero_() if "empty" in str(func) else result


class _Again:
    """A graph whose replay computes the step once more."""

    def __init__(self, step: Callable[[], object], pool: Any = None, producer: Any = None) -> None:
        self.replay = step
        step()

    def pool(self) -> None: ...


def forms_of_start(args: ServerArgs, plan: Plan) -> Launches:
    """Of a start of the whole model, with memory."""
    assert plan.arch.capability is not None
    with ExitStack() as stack:
        launches = stack.enter_context(recording("sm_{}{}".format(*plan.arch.capability)))
        stack.enter_context(patch.object(graph_runner, "capture", _Again))
        stack.enter_context(patch.object(canary, "_cosine", lambda *rows: 1.0))
        stack.enter_context(torch.inference_mode())
        stack.enter_context(_Numbers())
        check_steps(ModelRunner(replace(plan, device=_OnCpu("cpu")), **runner_options(args, plan)))
    return launches


def named(forms: set[Form]) -> str:
    return "\n".join(sorted(map(str, forms)))


def test_it_launches_what_a_start_does() -> None:
    """The embedded model: attention, a dense layer and experts."""
    args, plan = planned(TINY)
    of_start, of_rehearsal = set(forms_of_start(args, plan)), set(forms_of_rehearsal(args, plan))
    assert len(of_start) > 30
    assert not of_start - of_rehearsal, named(of_start - of_rehearsal)
    assert not of_rehearsal - of_start, named(of_rehearsal - of_start)
