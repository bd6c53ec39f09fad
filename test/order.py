"""The order of the files: those that take long first, so that no worker of xdist is alone with one at the end.

`make test` hands out whole files, in the order of collection (`--dist loadfile --no-loadscope-reorder`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent

SECONDS = {
    "srt/kernels/test_census.py": 105,
    "fuzz/test_hostile_bodies.py": 75,
    "fuzz/test_openapi.py": 60,
    "http/test_tool_calls.py": 50,
    "http/test_sleep.py": 45,
    "srt/speculative/test_draft_matrix.py": 45,
    "http/test_lifecycle.py": 40,
    "srt/managers/test_parallel_schedules.py": 40,
    "srt/models/test_media.py": 40,
    "docs/test_commands.py": 35,
    "e2e/test_weight_updates.py": 35,
    "srt/managers/test_adapters_in_stages.py": 35,
    "srt/model_executor/test_backend_matrix.py": 35,
    "e2e/test_rank_failure.py": 30,
    "e2e/test_tensor_parallel.py": 30,
    "plan/test_plan_command.py": 30,
    "srt/constrained/test_compile_process.py": 30,
    "srt/models/test_tensor_parallel.py": 30,
    "srt/models/test_towers.py": 30,
    "srt/transformers_backend/test_checkpoints.py": 30,
    "srt/transformers_backend/test_image_classes.py": 30,
    "e2e/test_nodes.py": 25,
    "http/test_always_ends.py": 25,
    "http/test_several_models.py": 25,
    "srt/kernels/test_ledger.py": 25,
    "srt/layers/attention/test_attention_kernels.py": 25,
    "srt/managers/test_scheduler_parity.py": 25,
    "srt/managers/test_shared_tokens.py": 25,
    "srt/models/test_exl3.py": 25,
    "srt/models/test_parity.py": 25,
    "srt/models/test_quantized.py": 25,
    "srt/speculative/test_autoregressive_draft.py": 25,
    "srt/speculative/test_draft_block.py": 25,
    "srt/speculative/test_kv_sharing_assistant.py": 25,
    "srt/transformers_backend/test_text_forms.py": 25,
    "doctor/test_doctor.py": 20,
    "http/test_adapters.py": 20,
    "http/test_class_images.py": 20,
    "http/test_hostile_patterns.py": 20,
    "http/test_speculation.py": 20,
    "http/test_text_classes.py": 20,
    "media/test_answers.py": 20,
    "media/test_families.py": 20,
    "media/test_processors.py": 20,
    "sgl_kernel/test_all_reduce_protocol.py": 20,
    "sgl_kernel/test_custom_all_reduce.py": 20,
    "srt/entrypoints/test_bodies_let_go.py": 20,
    "srt/kernels/test_explain.py": 20,
    "srt/kernels/test_published.py": 20,
    "srt/layers/moe/test_expert_slots.py": 20,
    "srt/layers/moe/test_fused_moe.py": 20,
    "srt/layers/quantization/test_quant_linear.py": 20,
    "srt/managers/test_adapters.py": 20,
    "srt/managers/test_attention_groups.py": 20,
    "srt/managers/test_expert_slot_schedules.py": 20,
    "srt/managers/test_families_in_the_scheduler.py": 20,
    "srt/managers/test_host_tier.py": 20,
    "srt/managers/test_launch.py": 20,
    "srt/managers/test_quantized_schedules.py": 20,
    "srt/managers/test_random_schedules.py": 20,
    "srt/managers/test_storage_tier.py": 20,
    "srt/managers/test_two_batch_schedules.py": 20,
    "srt/model_executor/test_two_batch_orders.py": 20,
    "srt/model_loader/test_compressed_scales.py": 20,
    "srt/models/test_format_matrix.py": 20,
    "srt/models/test_latent_models.py": 20,
    "srt/speculative/test_ngram_drafter.py": 20,
    "srt/transformers_backend/test_choice.py": 20,
    "srt/transformers_backend/test_every_class.py": 20,
    "test_cli.py": 20,
    "test_interpreter_processes.py": 20,
}
"""Of one processor, about, by path below test/: files of 20 or more, when they were last measured."""


def long_files_first(items: list[pytest.Item]) -> None:
    """Sorts in place. Files that are not in the table follow in the order that they have, as do tests of a file."""
    seconds = {str(HERE / name): number for name, number in SECONDS.items()}
    items.sort(key=lambda item: -seconds.get(str(item.path), 0))
