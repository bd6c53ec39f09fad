"""Backends for decoding and for prompts, mixed in every way that the tables accept, in every kind of step."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import covering

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.tables import TABLES
from sglang.srt.layers.attention import sites
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.step_rows import ExtendRows
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.model_executor.graph_runner import GraphSizes
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.two_batch_overlap import TwoBatchOverlap
from sglang.srt.plan.kernel_choice import long_prompt_need
from sglang.srt.plan.layer_spec import AttentionSite
from sglang.srt.plan.model_planner import describe_served_model, parallel_config_of
from sglang.srt.plan.needs import needs_of
from sglang.srt.plan.rank_weights import rank_weights
from sglang.srt.server_args import ServerArgs
from srt.layers.attention.decode_steps import reexecuting_capture
from srt.layers.attention.fake_flashinfer import fake_flashinfer
from srt.managers.fake_runner import Collector, add, assert_clean, request, run_to_end
from srt.model_executor.graph_stand_ins import DeviceLengths, in_graphs, with_attention
from srt.models.harness import VOCAB

KERNELS = ("triton", "flashinfer", "torch_native")
GRAPHS = {
    "eager": None,
    "decode": GraphSizes((1, 4)),
    "prompts": GraphSizes((1, 4), (8, 20), (0,)),
    "mixed": GraphSizes((1, 4), (8, 20), (0, 2, 4)),
    "halves": None,
}
"""Sizes of graphs. None: no graphs; with halves, steps with prompts run as two."""
LONG_PROMPTS = "flashinfer"
"""Serves prompts of so many tokens and more, where Triton's kernel serves others."""
LONG = 9
MODULES = ("flashinfer_backend", "flashinfer_mla_backend")


@dataclass(frozen=True)
class Case:
    decode: str
    extend: str
    graphs: str
    long_prompts: str | None = None

    @property
    def differs(self) -> bool:
        return self.decode != self.extend and self.graphs == "eager"

    def __str__(self) -> str:
        long = f", long ones {self.long_prompts}" if self.long_prompts else ""
        return f"{self.decode} decodes, {self.extend} prompts{long}, {self.graphs}"


def cases(args: ServerArgs) -> list[Case]:
    """What the tables accept for the model on SM120, but for what makes it tiny: its head dims and its dtype."""
    model = ModelConfig.from_server_args(args)
    description = describe_served_model(args, model)
    serving = parallel_config_of(args, "bfloat16", description)
    needs = needs_of(rank_weights(description, serving.ranks), serving)
    arch, packages = arch_by_name("rtx-pro-6000-server"), frozenset({"triton", "flashinfer"})

    def accepted(op: str, name: str) -> bool:
        mine = [need for need in needs if need.op == op.replace("long_prompt", "extend")]
        if op == "long_prompt_attention":
            mine = [long_prompt_need(need) for need in mine]
        wide = [
            replace(need, head_dim=576, v_head_dim=512) if "mla" in need.traits
            else replace(need, head_dim=128, v_head_dim=128)
            for need in mine
        ]  # fmt: skip
        specs = [spec for spec in TABLES[op] if name in (spec.name, spec.asked_as)]
        return all(any(not spec.why_not(need, arch, packages) for spec in specs) for need in wide)

    if not any(need.op == "decode_attention" for need in needs):  # what it attends with reads no lengths of the host
        return [Case("triton", "triton", graphs) for graphs in GRAPHS]
    latents = any("mla" in need.traits for need in needs)
    some_see_all = any(getattr(layer.mixer, "window", 0) == 0 for layer in description.layers)  # in long prompts
    found = []
    for decode, extend, graphs in itertools.product(KERNELS, KERNELS, GRAPHS):
        if graphs == "halves" and latents and "flashinfer" in (decode, extend):
            continue  # refused: it has one plan at a time
        in_graphs = GRAPHS[graphs] is None or (decode != "torch_native" and (graphs == "decode" or extend == "triton"))
        if in_graphs and accepted("decode_attention", decode) and accepted("extend_attention", extend):
            found.append(Case(decode, extend, graphs))
            if extend == "triton" and some_see_all and accepted("long_prompt_attention", LONG_PROMPTS):
                found.append(Case(decode, extend, graphs, LONG_PROMPTS))
    return found


@contextmanager
def faked_flashinfer() -> Iterator[list[str]]:
    """The backends' modules over stand-ins of the package's wrappers; yields their log."""
    log: list[str] = []
    names = [f"sglang.srt.layers.attention.{name}" for name in MODULES]
    with pytest.MonkeyPatch.context() as patch:
        fake = fake_flashinfer(log)
        patch.setitem(sys.modules, "flashinfer", fake)
        patch.setitem(sys.modules, "flashinfer.mla", fake.mla)
        for name in names:
            patch.delitem(sys.modules, name, raising=False)
        patch.setattr(sites, "LONG_PROMPTS", LONG)
        for name in names:
            module = importlib.import_module(name)
            patch.setattr(module, "WORKSPACE_BYTES", 16)
            patch.setattr(module, "PLAN_BYTES", 16)
        yield log
    for name in names:
        sys.modules.pop(name, None)


def backend(name: str, runner: ModelRunner) -> Any:
    if name == "triton":
        return DeviceLengths()
    if name == "torch_native":
        return TorchNativeAttnBackend(runner.plan, "cpu")
    latent = any(shape.head_dim != shape.v_head_dim for shape in runner.plan.attention_shapes)
    module = importlib.import_module(f"sglang.srt.layers.attention.{MODULES[latent]}")
    return (module.FlashInferMLABackend if latent else module.FlashInferAttnBackend)(runner.plan, "cpu")


class Recorded:
    """A backend of long prompts, and the steps that it planned."""

    def __init__(self, backend: Any) -> None:
        self.backend, self.builds = backend, list[ExtendRows]()

    def long_prompt_builder(self, site: AttentionSite) -> Any:
        builder = self.backend.long_prompt_builder(site)
        build = builder.build
        builder.build = lambda rows: (self.builds.append(rows), build(rows))[1]
        return builder


def server_args(folder: Path, **options: Any) -> ServerArgs:
    return ServerArgs.from_kwargs(
        model_path=str(folder), device="cpu", skip_tokenizer_init=True, skip_server_warmup=True, max_total_tokens=256,
        max_running_requests=4, chunked_prefill_size=32, random_seed=3, **options,
    )  # fmt: skip


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def play(runner: ModelRunner, args: ServerArgs) -> dict[str, list[int]]:
    """Prompts of several lengths, some with a cached prefix, that come while others decode: steps of every kind, beyond
    the tiny models' windows."""
    scheduler, collector, trunk = Scheduler(args, runner, StopChecker(None)), Collector(), prompt(1, 18)
    for i, ids in enumerate((trunk, prompt(2, 3), prompt(3, 9), [*trunk, 7, 8], prompt(4, 21), prompt(5, 1))):
        add(scheduler, request(f"r{i}", ids, 5 + 3 * (i % 3), temperature=0.0, ignore_eos=True))
        for _ in range(2):
            scheduler.step()
            collector.take(scheduler)
    run_to_end(scheduler, collector)
    assert_clean(scheduler)
    return collector.tokens


def run(case: Case, runner: ModelRunner, args: ServerArgs, log: list[str]) -> dict[str, list[int]]:
    long = None if case.long_prompts is None else Recorded(backend(case.long_prompts, runner))
    with_attention(runner, backend(case.decode, runner), backend(case.extend, runner), long)
    tokens = played(case, runner, args, log)
    assert long is None or long.builds, f"{case}: no prompt was long"
    return tokens


def played(case: Case, runner: ModelRunner, args: ServerArgs, log: list[str]) -> dict[str, list[int]]:
    sizes = GRAPHS[case.graphs]
    if case.graphs == "halves":
        runner.two_batch_overlap = TwoBatchOverlap(runner.state, runner.groups, 2)
    if sizes is None:
        try:
            return play(runner, args)
        finally:
            runner.two_batch_overlap = None
    try:
        with in_graphs(runner, sizes, reexecuting_capture(log)) as replays:
            tokens = play(runner, args)
            kinds = {(step.prompts is not None, step.num_decodes > 0) for step in replays}
    finally:
        runner.graphs = None
    wanted = {"decode": {(False, True)}, "prompts": {(False, True), (True, False)}}
    assert kinds >= wanted.get(case.graphs, {(False, True), (True, True)}), f"{case}: steps that ran in graphs: {kinds}"
    return tokens


def some_of(tried: list[Case], left_out: str = "") -> list[Case]:
    """With each of what decodes, what computes prompts, long ones, and graphs that occurs in all. left_out: a kind of
    graphs."""
    tried = [case for case in tried if case.graphs != left_out]
    chosen = covering([(case.decode, case.extend, case.graphs, str(case.long_prompts)) for case in tried], 1)
    return [tried[i] for i in sorted(chosen)]


def that_mix(tried: list[Case]) -> list[Case]:
    """But for one backend without graphs, and graphs that hold less than mixed steps."""
    return [case for case in tried if case.graphs == "mixed" or case.differs]


def wrong_cases(
    family: str, runner: ModelRunner, args: ServerArgs, expected: dict[str, list[int]], tried: list[Case]
) -> list[str]:
    with faked_flashinfer() as log:
        return [f"{family}: {case}" for case in tried if run(case, runner, args, log) != expected]
