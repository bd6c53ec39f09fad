"""Whatever computes decoding requests and prompts, in graphs and without, on one rank, two and two stages: the tokens
are those of torch_native without graphs.

`make test` has each backend and kind of graphs of a family on one rank, but that every second family has graphs of
decoding alone and the others graphs of prompts: "mixed" ones have both; and of cases that mix each on several. `make
thorough` has each case.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks

from sglang.srt.distributed import parallel_state
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from srt.model_executor.backend_matrix import FAMILIES, cases, play, server_args, some_of, that_mix, wrong_cases
from srt.models.harness import save_tiny

LAYOUTS = {"TP2": {"tp_size": 2}, "PP2": {"pp_size": 2}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for family, name in FAMILIES.items():
        folders[family] = tmp_path_factory.mktemp(name)
        save_tiny(name, folders[family])
    return folders


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["some", "every"])
@pytest.mark.parametrize("family", FAMILIES)
def test_backends_mixed_in_every_way(family: str, every: bool, models: dict[str, Path]) -> None:
    args = server_args(models[family])
    runner = create_runner(args)
    tried = cases(args)
    fewer = {"sinks": 8, "biases by distance": 8, "chunks": 14, "compressed": 4, "pooled latents": 4}
    assert len(tried) >= fewer.get(family, 17), tried
    with_heads_of_their_own = family in ("full", "window", "chunks", "blocks", "gated delta", "Mamba-2")
    assert any(case.long_prompts for case in tried) == with_heads_of_their_own, tried
    left_out = ("decode", "prompts")[[*FAMILIES].index(family) % 2]
    wrong = wrong_cases(family, runner, args, play(runner, args), tried if every else some_of(tried, left_out))
    assert not wrong, wrong


Tokens = dict[str, list[int]]


def _rank(
    rank: int, layout: str, every: bool, folders: dict[str, Path], expected: dict[str, Tokens], out: Path
) -> None:
    torch.set_num_threads(1)
    wrong = []
    for i, (family, folder) in enumerate(folders.items()):
        args = server_args(folder, **LAYOUTS[layout])
        runner = create_runner(args, rank, f"file://{out}/rendezvous{i}")
        tried = cases(args)
        wrong += wrong_cases(family, runner, args, expected[family], tried if every else some_of(that_mix(tried)))
        parallel_state.shutdown()
    (out / f"{rank}.json").write_text(json.dumps(wrong))


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["mixed", "every"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_backends_of_several_ranks(layout: str, every: bool, models: dict[str, Path], tmp_path: Path) -> None:
    """Backends mixed, each once: every second family, in one of the layouts. Every pair of backends: each in all."""
    if not every:
        models = dict([*models.items()][[*LAYOUTS].index(layout) :: 2 * len(LAYOUTS)])
    expected = {}
    for family, folder in models.items():
        args = server_args(folder)
        expected[family] = play(create_runner(args), args)
    run_ranks(_rank, (layout, every, models, expected, tmp_path), 2)
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [[], []]
