"""A rehearsal launches what the start itself does, whose tensors have memory and numbers: here a start on CPU tensors,
which passes for one on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
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
from sglang.srt.distributed import parallel_state
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.layers.parameter import Param
from sglang.srt.layers.triton_ops import pdl
from sglang.srt.managers.scheduler.scheduler_setup import runner_options
from sglang.srt.model_executor import canary, graph_runner
from sglang.srt.model_executor.canary import check_steps
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.rehearsal import RehearsedRunner, rehearsed, unread_numbers
from sglang.srt.model_loader import loader
from sglang.srt.plan.plan import Plan, make_plan
from sglang.srt.server_args import ServerArgs
from srt.kernels.published import config_files

TINY = Path(sglang.__file__).parent / "embedded" / "tiny"
SLOW = "gpt-oss-20b"
"""Its experts are reordered, which takes seconds."""
WEIGHT = 1 << 24
"""Elements of the smallest tensor that is a large weight."""
BLOCKS_OF_128 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
MODELS = {
    "Qwen3-8B": ({}, 3),
    "Qwen3-30B-A3B": ({"quantization_config": BLOCKS_OF_128}, 3),
    "gpt-oss-20b": ({"num_local_experts": 4}, 3),
    "DeepSeek-V2-Lite": ({}, 3),
    "GLM-4.7-Flash": ({}, 3),
}
"""Models of published sizes: keys beside those of the config, and how many of its layers start."""
SMALL = {
    "load_format": "dummy",
    "cuda_graph_bs": [1, 4],
    "max_running_requests": 6,
    "max_total_tokens": 4096,
    "chunked_prefill_size": 128,
    "context_length": 512,
    "random_seed": 1,
}


@pytest.fixture(autouse=True)
def launches_of_other_tests() -> Iterator[None]:
    """Whether kernels start early is a state of the process, which a model runner sets."""
    before = pdl.options()
    yield
    pdl.enable("launch_pdl" in before)


def planned(folder: Path, packages: Sequence[str] = (), **flags: Any) -> tuple[ServerArgs, Plan]:
    """The plan for an SM120 with Triton and other packages."""
    args = ServerArgs.from_kwargs(**{"model_path": str(folder), **SMALL, **flags})
    config = ModelConfig.from_server_args(args)
    arch = arch_by_name("rtx-pro-6000-server")
    return args, make_plan(args, config, arch, 90 << 30, frozenset({"triton", *packages}))


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
        if func.overloadpacket in (aten.mm, aten.addmm, aten.bmm, aten.linear, aten.matmul):
            shapes = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in (*args, *kwargs.values())]
            result = func(*shapes[: len(args)], **dict(zip(kwargs, shapes[len(args) :], strict=True)))
            return torch.zeros(result.shape, dtype=result.dtype)
        result = func(*args, **kwargs)
        # Weights are left untouched: they take no memory then.
        return result.zero_() if "empty" in str(func) and result.numel() < WEIGHT else result


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
        stack.enter_context(patch.object(loader, "fill_random", lambda *call: None))
        stack.enter_context(patch.object(canary, "_cosine", lambda *rows: 1.0))
        stack.enter_context(torch.inference_mode())
        stack.enter_context(_Numbers())
        check_steps(ModelRunner(replace(plan, device=_OnCpu("cpu")), **runner_options(args, plan)))
    return launches


def named(forms: set[Form]) -> str:
    return "\n".join(sorted(map(str, forms)))


@pytest.mark.parametrize(
    "name",
    [
        "embedded",
        *(name for name in MODELS if name != SLOW),
        pytest.param(SLOW, marks=pytest.mark.thorough),
    ],
)
def test_it_launches_what_a_start_does(name: str, tmp_path: Path) -> None:
    folder = TINY
    if name != "embedded":
        keys, layers = MODELS[name]
        config = json.loads(config_files()[name].read_text()) | keys | {"num_hidden_layers": layers}
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:layers]
        (tmp_path / "config.json").write_text(json.dumps(config))
        folder = tmp_path
    args, plan = planned(folder)
    of_start, of_rehearsal = set(forms_of_start(args, plan)), set(forms_of_rehearsal(args, plan))
    assert len(of_start) > 20
    assert not of_start - of_rehearsal, named(of_start - of_rehearsal)
    assert not of_rehearsal - of_start, named(of_rehearsal - of_start)


@pytest.mark.parametrize(
    ("flags", "op"),
    [({"attention_backend": "flashinfer"}, "extend_attention"), ({"context_length": 8192}, "long_prompt_attention")],
    ids=["all attention", "long prompts"],
)
def test_libraries_are_left_out(flags: dict[str, Any], op: str) -> None:
    """Their kernels need a GPU to be set up; those of Triton beside them are known nevertheless."""
    folder = config_files()["Qwen3-0.6B"].parent
    args, plan = planned(folder, ("flashinfer",), **flags)
    assert any(choice.spec.package == "flashinfer" for choice in plan.choices.values() if choice.need.op == op)
    found = {form.kernel for form in forms_of_rehearsal(args, plan)}
    assert {"extend_attention.extend_kernel", "decode_attention.decode_kernel", "norm.rmsnorm_kernel"} <= found


def test_equal_layers_are_computed_once() -> None:
    """A layer of each kind, and one behind each kind; those that a draft reads stay."""
    _, plan = planned(TINY)
    assert [i for i, layer in enumerate(rehearsed(plan).description.layers) if not layer.on_other_stage] == [0, 1, 2]
    read = replace(plan, aux_layers=(3,))
    assert [i for i, layer in enumerate(rehearsed(read).description.layers) if not layer.on_other_stage] == [0, 1, 2, 4]


def test_kernels_are_waited_for_before_the_first_launch() -> None:
    args, plan = planned(TINY)
    small, launched = rehearsed(plan), []
    with recording("sm_120") as launches, unread_numbers():
        options = runner_options(args, small)
        RehearsedRunner(small, **options, before_launches=lambda: launched.append(len(launches)))
    assert launched == [0] and launches


def test_a_rank_of_several_is_rehearsed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives of ranks that do not exist give what has the right shape."""
    monkeypatch.setattr(parallel_state, "_state", parallel_state._state)  # put back afterwards
    args, plan = planned(TINY, tp_size=2, attn_dp_size=2, enable_quantized_all_reduce="prefill")
    parallel_state.rehearse(plan.ranks, 1)
    assert parallel_state.num_ranks() == 1 and parallel_state.groups().dp.size == 2
    assert len(forms_of_rehearsal(args, plan)) > 30


def test_numbers_that_decide_about_shapes_are_ones() -> None:
    with unread_numbers():
        x = torch.empty(3, 4, dtype=torch.int64, device="meta")
        assert x.nonzero().tolist() == [] and x.nonzero().shape == (0, 2)
        assert x.flatten().unique_consecutive().shape == (1,)
        assert int(x.sum()) == 1 and x[0].tolist() == [1, 1, 1, 1] and bool((x == 0).all())


def test_adapters_are_rehearsed() -> None:
    args, plan = planned(TINY, enable_lora=True, max_lora_rank=16, lora_target_modules=["all"])
    found = {form.kernel for form in forms_of_rehearsal(args, plan)}
    assert any(kernel.startswith("adapters.") for kernel in found), found


def test_it_takes_no_memory_for_prefixes_and_fills_no_parameters() -> None:
    _, plan = planned(TINY, enable_hierarchical_cache=True, hicache_size=1)
    assert plan.host_cache is not None and rehearsed(plan).host_cache is None
    on_host = Param("layers.0.weight", torch.zeros(4), {}, filled_on=torch.device("meta"))
    loader.fill_random({on_host.name: on_host}, 1)
    assert not on_host.tensor.any()
