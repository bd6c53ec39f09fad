"""Which tests may notice a change, and in which order they are tried."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutation.changes import ROOT, Change

TESTS = (
    "test/srt/mem_cache/**/test_*.py",
    "test/srt/model_executor/test_*.py",
    "test/srt/layers/attention/test_*.py",
    "test/srt/layers/recurrent/test_*.py",
    "test/srt/layers/test_*.py",
    "test/srt/plan/test_*.py",
    "test/srt/speculative/test_*.py",
    "test/srt/managers/test_*.py",
    "test/srt/models/test_*.py",
    "test/srt/kernels/test_explain*.py",
    "test/srt/kernels/test_resolve.py",
)
"""Those of CI that run the core within their own process and need nothing but the tree."""

FIRST_TESTS: dict[str, tuple[str, ...]] = {
    "step": (
        "managers/test_request_counters.py",
        "managers/test_scheduler.py",
        "managers/test_turns.py",
        "model_executor/test_two_batch_overlap.py",
        "managers/test_steps_of_several_tokens.py",
        "managers/test_hidden_states.py",
        "managers/test_scheduler_parity.py",
        "managers/test_attention_groups.py",
        "model_executor/test_verify_steps.py",
        "models/test_media.py",
    ),
    "metadata": (
        "layers/attention/test_flashinfer.py",
        "layers/attention/test_torch_native.py",
        "layers/attention/test_index_rows.py",
        "layers/attention/test_long_prompts.py",
        "layers/attention/test_latent_long_prompts.py",
        "layers/attention/test_flashinfer_mla.py",
        "models/test_sparse_models.py",
        "model_executor/test_windows_in_batches.py",
        "model_executor/test_verify_steps.py",
        "models/test_media.py",
        "managers/test_shared_tokens.py",
        "model_executor/test_backend_matrix.py",
    ),
    "graphs": (
        "model_executor/test_graph_runner.py",
        "model_executor/test_graph_capture.py",
        "model_executor/test_media_pace.py",
        "model_executor/test_canary.py",
        "speculative/test_autoregressive_draft.py",
        "managers/test_hidden_states.py",
        "managers/test_scheduler_parity.py",
        "model_executor/test_verify_steps.py",
        "managers/test_attention_groups.py",
    ),
    "cache tables": (
        "mem_cache/test_allocator.py",
        "mem_cache/test_kv_table.py",
        "mem_cache/test_radix_cache.py",
        "mem_cache/test_pools.py",
        "mem_cache/test_kv_table_random.py",
        "managers/test_host_tier.py",
        "managers/test_scheduler.py",
        "managers/test_storage_tier.py",
        "mem_cache/test_page_copies.py",
    ),
    "states": (
        "mem_cache/test_kv_table_random.py",
        "models/test_hybrid.py",
        "models/test_kimi_linear.py",
        "layers/recurrent/test_conv_and_norm_kernels.py",
        "models/test_tensor_parallel.py",
        "model_executor/test_verify_steps.py",
        "layers/recurrent/test_recurrence_kernels.py",
    ),
    "memory plan": (
        "plan/test_pool_sizes.py",
        "plan/test_state_rows.py",
        "plan/test_attention_groups.py",
        "plan/test_plan.py",
        "kernels/test_explain_hybrids.py",
        "plan/test_host_cache.py",
        "kernels/test_explain.py",
        "plan/test_compressed_plan.py",
        "plan/test_stages.py",
    ),
}
"""Files that notice most, by part of the core; for runs in which nothing is measured."""
UNMEASURED_S = 15.0
"""Seconds of a file of which nothing is known."""

BATCHES_S = (12.0, 45.0, 120.0)
"""A change meets the tests that run it in so many batches of about so many seconds, the shortest tests first."""
FILES_OF_FIRST = 6
"""Files of the first batch at most: each is imported."""


def test_files(patterns: Iterable[str] = TESTS, root: Path = ROOT) -> list[str]:
    """Long files first."""
    paths = {path for pattern in patterns for path in root.glob(pattern) if not path.stem.endswith("_gpu")}
    return [str(path.relative_to(root)) for path in sorted(paths, key=lambda path: (-path.stat().st_size, path))]


@dataclass
class Measured:
    """What ran without a change."""

    seconds: dict[str, float] = field(default_factory=dict)
    """By node id."""
    runs: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    """Module -> line -> node ids; of what ran outside of tests the file's name instead."""
    with_processes: set[str] = field(default_factory=set)
    """Files whose tests start processes of ranks, in which nothing is recorded."""
    failed: set[str] = field(default_factory=set)
    """Tests that fail without a change too, if only now and then."""

    def add(self, file: str, record: dict[str, Any]) -> None:
        if record["processes"]:
            self.with_processes.add(file)
        names = list(record["seconds"])
        self.failed |= set(record["failed"])
        self.seconds |= record["seconds"]
        for module, lines in record["lines"].items():
            for line, tests in lines.items():
                run_by = self.runs.setdefault(module, {}).setdefault(int(line), [])
                run_by += [file if number < 0 else names[number] for number in tests]

    def unmeasured(self) -> None:
        """Whole files in place of tests."""
        files = {f"test/srt/{file}" for names in FIRST_TESTS.values() for file in names}
        self.seconds = dict.fromkeys(files, UNMEASURED_S)

    def tests_of(self, change: Change) -> list[str]:
        """Node ids: first the tests that run it, the short ones first; then those that start processes of ranks, which
        may run it, too; then the others of the first ones' files, which may share what one of them set up. If only
        imports run it, all tests of the files of that import."""
        if not self.runs:
            return [f"test/srt/{file}" for file in FIRST_TESTS[change.room]]
        first, last = change.statement
        lines = self.runs.get(change.module, {})
        running = {test for line in range(first, last + 1) for test in lines.get(line, [])}
        inside = {test for test in running if "::" in test}
        files = {test.partition("::")[0] for test in inside or running}

        def order(test: str) -> tuple[bool, bool, float]:
            return test not in inside, test.partition("::")[0] not in self.with_processes, self.seconds[test]

        passing = self.seconds.keys() - self.failed
        return sorted((test for test in passing if test.partition("::")[0] in files | self.with_processes), key=order)


def batches(tests: list[str], seconds: dict[str, float]) -> Iterator[list[str]]:
    """The tests in their order, in as many batches as BATCHES_S has limits; what is beyond the last limit is left."""
    left = tests
    for number, limit_s in enumerate(BATCHES_S):
        batch: list[str] = []
        later: list[str] = []
        files: set[str] = set()
        spent_s = 0.0
        for test in left:
            file = test.partition("::")[0]
            fits = spent_s + seconds[test] <= limit_s or not batch
            if fits and (number or file in files or len(files) < FILES_OF_FIRST):
                batch.append(test)
                files.add(file)
                spent_s += seconds[test]
            else:
                later.append(test)
        if batch:
            yield batch
        left = later
