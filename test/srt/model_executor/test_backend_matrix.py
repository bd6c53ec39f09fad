"""Whatever computes decoding requests and prompts, in graphs and without, on one rank, two and two stages: the tokens
are those of torch_native without graphs.

`make test` has each backend and kind of graphs of a kind of model on one rank, but that every second kind has graphs of
decoding alone and the others graphs of prompts: "mixed" ones have both; and of cases that mix each on several. `make
thorough` has each case.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from matrix import KINDS, flags_of, save_kind, smallest_kinds
from rank_processes import run_ranks

from sglang.srt.distributed import parallel_state
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.server_args import ServerArgs
from srt.model_executor.backend_matrix import cases, play, server_args, some_of, that_mix, wrong_cases

NAMES = smallest_kinds()
SEVERAL = ("TP2", "PP2")
FEWER = {"sinks": 8, "relative biases": 8, "chunks": 14}
FEWER |= dict.fromkeys(("compressed", "pooled latents", "pooled blocks"), 4)
"""Combinations that the tables accept, where there are fewer than 17, by attention."""
LONG_PROMPTS = ("full", "windows", "chunks", "selected blocks", "gated delta", "Mamba-2")
"""Attention with heads that the kernel of long prompts takes."""


def args_of(name: str, folder: Path, layout: str = "one rank") -> ServerArgs:
    """With pages so small that windows have room for requests that decode beside prompts."""
    page = {"page_size": KINDS[name].page} if KINDS[name].attention == "compressed" else {}
    return server_args(folder, **flags_of(layout), **page)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name in NAMES:
        folders[name] = save_kind(name, tmp_path_factory.mktemp("model"))
    return folders


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["some", "every"])
@pytest.mark.parametrize("name", NAMES)
def test_backends_mixed_in_every_way(name: str, every: bool, models: dict[str, Path]) -> None:
    args, attention = args_of(name, models[name]), KINDS[name].attention
    runner = create_runner(args)
    tried = cases(args)
    assert len(tried) >= FEWER.get(attention, 17), tried
    assert any(case.long_prompts for case in tried) == (attention in LONG_PROMPTS), tried
    left_out = ("decode", "prompts")[NAMES.index(name) % 2]
    wrong = wrong_cases(name, runner, args, play(runner, args), tried if every else some_of(tried, left_out))
    assert not wrong, wrong


Tokens = dict[str, list[int]]


def _rank(
    rank: int, layout: str, every: bool, folders: dict[str, Path], expected: dict[str, Tokens], out: Path
) -> None:
    torch.set_num_threads(1)
    wrong = []
    for i, (name, folder) in enumerate(folders.items()):
        args = args_of(name, folder, layout)
        runner = create_runner(args, rank, f"file://{out}/rendezvous{i}")
        tried = cases(args)
        wrong += wrong_cases(name, runner, args, expected[name], tried if every else some_of(that_mix(tried)))
        parallel_state.shutdown()
    (out / f"{rank}.json").write_text(json.dumps(wrong))


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["mixed", "every"])
@pytest.mark.parametrize("layout", SEVERAL)
def test_backends_of_several_ranks(layout: str, every: bool, models: dict[str, Path], tmp_path: Path) -> None:
    """Backends mixed, each once: every second kind, in one of the layouts. Every pair of backends: each in all."""
    if not every:
        models = dict([*models.items()][SEVERAL.index(layout) :: 2 * len(SEVERAL)])
    expected = {}
    for name, folder in models.items():
        args = args_of(name, folder)
        expected[name] = play(create_runner(args), args)
    run_ranks(_rank, (layout, every, models, expected, tmp_path), 2)
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [[], []]
