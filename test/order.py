"""The order of the files: those that take long first, so that no worker of xdist is alone with one at the end.

`make test` hands out whole files, in the order of collection (`--dist loadfile --no-loadscope-reorder`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent

SECONDS = {
    "srt/managers/test_families_in_the_scheduler.py": 225,
    "srt/speculative/test_draft_matrix.py": 195,
    "srt/managers/test_scheduler_parity.py": 175,
    "fuzz/test_hostile_bodies.py": 130,
    "srt/models/test_media.py": 110,
    "fuzz/test_openapi.py": 105,
    "http/test_tool_calls.py": 105,
    "e2e/test_nodes.py": 95,
    "benchmark/evals/test_embedded_scores.py": 85,
    "srt/speculative/test_draft_block.py": 85,
    "docs/test_commands.py": 75,
    "e2e/test_tensor_parallel.py": 75,
    "srt/models/test_quantized.py": 75,
    "srt/layers/attention/test_attention_kernels.py": 70,
    "srt/models/test_parity.py": 70,
    "srt/kernels/test_explain.py": 65,
    "srt/kernels/test_published.py": 65,
    "srt/layers/moe/test_fused_moe.py": 65,
    "e2e/test_rank_failure.py": 55,
    "http/test_speculation.py": 55,
    "srt/model_executor/test_verify_steps.py": 55,
    "e2e/test_replicas.py": 50,
    "srt/layers/test_dependent_launches.py": 45,
    "http/test_native_api.py": 40,
    "plan/test_plan_command.py": 40,
    "srt/managers/test_host_tier.py": 40,
    "srt/models/test_towers.py": 40,
    "srt/kernels/test_explain_hybrids.py": 35,
    "e2e/test_engine.py": 30,
    "scripts/tiny_model/test_training.py": 30,
    "scripts/upstream/test_rebase.py": 30,
    "srt/constrained/test_compile_process.py": 30,
    "srt/mem_cache/test_page_copies.py": 30,
    "http/test_messages.py": 25,
    "http/test_responses.py": 25,
    "scripts/upstream/test_changes.py": 25,
    "srt/kernels/test_ledger.py": 25,
    "srt/layers/attention/test_guesses.py": 25,
    "srt/layers/moe/test_expert_kernels.py": 25,
    "srt/layers/quantization/test_quant_linear.py": 25,
    "srt/layers/recurrent/test_channel_kernels.py": 25,
    "srt/layers/test_fp4_cache.py": 25,
    "srt/managers/test_launch.py": 25,
    "srt/managers/test_storage_tier.py": 25,
    "bench/test_sweep.py": 20,
    "clients/test_structured_output.py": 20,
    "commands/test_published_commands.py": 20,
    "http/test_bad_input.py": 20,
    "srt/function_call/test_chunking.py": 20,
    "srt/layers/attention/test_latent_attention.py": 20,
    "srt/layers/compressed/test_compressor_kernels.py": 20,
    "srt/layers/test_triton_ops.py": 20,
    "srt/managers/test_scheduler.py": 20,
    "srt/plan/test_plan.py": 20,
}
"""Of one processor, about, by path below test/: files of 20 or more, when they were last measured."""


def long_files_first(items: list[pytest.Item]) -> None:
    """Sorts in place. Files that are not in the table follow in the order that they have, as do tests of a file."""
    seconds = {str(HERE / name): number for name, number in SECONDS.items()}
    items.sort(key=lambda item: -seconds.get(str(item.path), 0))
