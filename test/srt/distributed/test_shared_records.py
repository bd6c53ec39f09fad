"""Ranks plan with one rank's measured times, whatever each of their caches has."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from rank_processes import run_ranks

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.shared_records import shared_choices
from sglang.srt.kernels.measured import store
from sglang.srt.kernels.measured.choices import NOT_MEASURED
from sglang.srt.kernels.measured.records import Question, Record, Setting
from sglang.srt.managers.scheduler import scheduler_setup
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.server_args import ServerArgs

SETTING = Setting("a GPU", "1", "3.9.0", "2.13.0", "0.2.0", "abc", "600", "3090")
QUESTION = Question("linear", "fp8_block", "4096x4096", 64)
LOWER = msgspec.structs.replace(SETTING, power_limit="400")


def _share(rank: int, folder: str) -> None:
    """One start after the other, each with other caches: both ranks' results are always the same."""
    caches = Path(folder)
    with pytest.MonkeyPatch.context() as patch:
        parallel_state.init(RankLayout(2), rank, "gloo", f"file://{folder}/rendezvous")
        patch.setenv("SGLANG_CACHE_DIR", str(caches / f"cache {rank}"))
        assert shared_choices(0, lambda gpu: SETTING) == NOT_MEASURED, "nothing was measured"
        # Each machine has a cache of its own, and only the first rank's counts.
        store.add(SETTING, [Record(QUESTION, f"of rank {rank}", (1e-5,) * 3)])
        shared = shared_choices(0, lambda gpu: SETTING)
        assert list(shared.by_question[QUESTION]) == ["of rank 0"]
        assert shared_choices(0, lambda gpu: SETTING if rank == 0 else LOWER) == NOT_MEASURED
        assert shared_choices(0, lambda gpu: SETTING if rank == 0 else None) == NOT_MEASURED
        assert shared_choices(0, lambda gpu: None) == NOT_MEASURED
        parallel_state.shutdown()


def test_all_ranks_have_the_first_ones_records(tmp_path: Path) -> None:
    run_ranks(_share, (str(tmp_path),), 2)


def test_one_rank_reads_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path))
    store.add(SETTING, [Record(QUESTION, "tiles", (1e-5,) * 3)])
    assert list(shared_choices(0, lambda gpu: SETTING).by_question) == [QUESTION]
    assert shared_choices(0, lambda gpu: LOWER) == NOT_MEASURED


@pytest.mark.parametrize(("flags", "forced"), [({}, ""), ({"no_measured_choices": True}, ""), ({}, "sm_120")])
def test_a_flag_and_a_forced_gpu_ignore_them(
    flags: dict[str, bool], forced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setenv("SGLANG_FORCE_ARCH", forced)
    monkeypatch.setattr(scheduler_setup, "shared_choices", lambda gpu: asked.append(gpu) or NOT_MEASURED)
    args = ServerArgs.from_kwargs(model_path=str(DEFAULT_MODEL_PATH), **flags)
    assert scheduler_setup.measured_choices(args, 3) == NOT_MEASURED
    assert asked == ([] if flags or forced else [3])
