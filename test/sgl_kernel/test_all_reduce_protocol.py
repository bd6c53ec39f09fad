"""The protocol of csrc/all_reduce.cuh and exchange.cuh with real threads for the GPUs' threads: random calls by ranks
that drift, under the thread sanitizer; and the same with one thing broken, which must be noticed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from pairs import some

CSRC = Path(__file__).resolve().parents[2] / "sgl-kernel" / "csrc"
ON_CPU = Path(__file__).parent / "on_cpu"


def build(to: Path, csrc: Path = CSRC) -> Path:
    """Skips where there is no compiler with a thread sanitizer."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    options = ["-std=c++17", "-O1", "-g1", "-Wall", "-Wno-unknown-pragmas", "-fsanitize=thread", "-pthread"]
    includes = [f"-I{csrc}", f"-I{ON_CPU / 'threads'}"]
    command = [compiler, *options, *includes, str(ON_CPU / "all_reduce.cpp"), "-o", str(to)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "tsan" in done.stderr:
        pytest.skip("needs libtsan")
    assert done.returncode == 0, done.stderr
    return to


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("all_reduce") / "all_reduce")


def run(program: Path, *arguments: object, races: str = "report") -> subprocess.CompletedProcess[str]:
    env = os.environ | {"TSAN_OPTIONS": f"report_bugs={int(races == 'report')}"}
    command = [program, *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=200)


@pytest.mark.parametrize(("ranks", "rounds"), [(2, 100), (3, 60), (4, 60), (8, 30)])
def test_sums_are_exact_and_nothing_races(program: Path, ranks: int, rounds: int) -> None:
    """The count of calls goes over its end on the way."""
    done = run(program, ranks, rounds, 11 * ranks)
    assert done.returncode == 0, (done.stdout + done.stderr)[:4000]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_stays_away_is_named(program: Path, ranks: int) -> None:
    """The others end at their deadline with results that are no numbers. From then on nothing orders them."""
    done = run(program, ranks, 4, 5, "absent", races="expected")
    assert done.returncode == 0, (done.stdout + done.stderr)[:4000]


BROKEN_SUMS = {
    "encoded sums that nobody waits for": ("valid = wait(call, 1, TWO_SHOT_E4M3) && valid", "valid = block_all(valid)"),
    "scales of other rows": ("scale_of(args, to, i), static_cast", "scale_of(args, to, 0), static_cast"),
    "half of a group": ("largest[0] > largest[1] ? largest[0] : largest[1]", "largest[0]"),
}
BROKEN_EXCHANGES = {
    "parts of the wrong rank": ("int peer = args.rank - steps;", "int peer = args.rank + steps - args.ranks;"),
    "half of a packed vector": ("of_epoch(low, call.epoch) && of_epoch(high, call.epoch)", "of_epoch(low, call.epoch)"),
    "parts that nobody waits for": ("valid = wait(call, 0, ONE_SHOT)", "valid = block_all(true)"),
    "what one block sends for another": (
        "block_index()) * block_threads() + thread_index(); j",
        "0) + thread_index(); j",
    ),
}
BROKEN = {
    "one half for all calls": ("places{arguments, epoch & 1}", "places{arguments, epoch & 0}"),
    "a flag before the data": ("  block_barrier();\n  const int peer", "  const int peer"),
    "a flag without order": ("store_release(call.places.flag", "store_relaxed(call.places.flag"),
    "a wait without order": ("load_acquire(flag) != call.epoch", "load_relaxed(flag) != call.epoch"),
    "sums that nobody waits for": ("valid = wait(call, 1, TWO_SHOT) && valid", "valid = block_all(valid)"),
    "words that are not looked at": ("&& of_epoch(high[from], call.epoch)", ""),
    "an epoch that is used twice": ("control()->epochs[i] = epoch;", "if (i % 2) control()->epochs[i] = epoch;"),
}


FILES = {"all_reduce.cuh": BROKEN, "quantized_sum.cuh": BROKEN_SUMS, "exchange.cuh": BROKEN_EXCHANGES}
QUICK = ("a flag before the data", "words that are not looked at", "half of a group")
"""What `make test` breaks: order, what is read, and what is encoded. Each takes a build; `make thorough` breaks all."""


@pytest.mark.parametrize("change", some([change for changes in FILES.values() for change in changes], QUICK))
def test_a_broken_protocol_is_noticed(change: str, tmp_path: Path) -> None:
    name = next(name for name, changes in FILES.items() if change in changes)
    before, after = FILES[name][change]
    for file in ("peer_memory.cuh", *FILES):
        shutil.copy(CSRC / file, tmp_path)
    source = (CSRC / name).read_text()
    assert source.count(before) == 1 or (name == "quantized_sum.cuh" and before in source)
    (tmp_path / name).write_text(source.replace(before, after))
    broken = build(tmp_path / "all_reduce", tmp_path)
    assert any(run(broken, ranks, 60, 3).returncode for ranks in (3, 2))
