"""With several ranks, what a clock decides rank 0 decides and sends (`scheduler/leader`). Each place in a scheduler's
process that reads one is on this list, with why the ranks stay together."""

from __future__ import annotations

import ast
from pathlib import Path

import sglang.srt

ROOT = Path(sglang.srt.__file__).parent
READ_CLOCKS = {
    "managers/scheduler/adapter_table.py": "rank 0 decides which adapter drains, and sends it",
    "managers/scheduler/request_timeouts.py": "rank 0 alone asks it, and sends aborts",
    "managers/scheduler/profiler.py": "names a file",
    "managers/scheduler/scheduler.py": "marks requests for rank 0's time-outs",
    "managers/scheduler/schedule_batch.py": "marks requests for rank 0's time-outs",
    "managers/scheduler/scheduler_stats.py": "measures",
    "managers/scheduler/prompt_choice.py": "marks requests for rank 0's time-outs",
    "mem_cache/copies_under_way.py": "measures",
    "mem_cache/host_tier.py": "measures",
    "mem_cache/copy_engine.py": "in threads: paces copies, whose ends all ranks agree on",
    "mem_cache/storage/tier.py": "all ranks agree on which waits are over",
    "mem_cache/storage/engine.py": "in threads, whose results all ranks agree on",
    "mem_cache/storage/file_sizes.py": "in threads: ages of temporary files and of what is known of a directory",
    "mem_cache/storage/mooncake_store.py": "in threads: how long a full store is tried again",
    "mem_cache/storage/nixl_files.py": "in threads: how long a transfer may take",
    "mem_cache/storage/file_store.py": "in threads: times of use of files",
    "constrained/compile_process.py": "in the child that verifies for rank 0",
    "constrained/mask_filler.py": "chooses a number of threads, which changes no mask",
    "constrained/grammar_manager.py": "deadlines count where there is a verifier, which is rank 0's",
}
DIRECTORIES = ("managers/scheduler", "constrained", "sampling", "mem_cache")
CLOCKS = {"monotonic", "perf_counter", "time", "time_ns", "process_time"}


def reads_clock(path: Path) -> bool:
    return any(
        isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time"
        and node.attr in CLOCKS
        for node in ast.walk(ast.parse(path.read_text()))
    )  # fmt: skip


def test_every_reader_of_a_clock_is_known() -> None:
    readers = {
        str(path.relative_to(ROOT))
        for directory in DIRECTORIES
        for path in (ROOT / directory).rglob("*.py")
        if reads_clock(path)
    }
    assert readers == set(READ_CLOCKS), "who else reads a clock, and who decides by it?"
