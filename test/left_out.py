"""The cases that `make test` leaves to `make thorough` for their time alone: other cases or tests show their kind.

Tests are named by their path below test/, cases by what is in brackets; EVERY stands for all cases.
A new case is in `make test` until it is listed here. A name that no test has is an error of a run of all tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

EVERY = "every case"
WHOLE_RUN = 10_000
"""Runs of fewer tests collect some files alone, and say nothing about names."""

LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    # How good the embedded model is changes with the model alone.
    "benchmark/evals/test_embedded_scores.py::test_held_out_problems_and_the_questions_of_the_readme": (EVERY,),
    "media/test_eyes.py::test_answers_about_held_out_pictures": (EVERY,),
    # A release of somebody else, and what its wheels bring.
    "scripts/upstream/test_fresh_environment.py::test_a_package_that_a_release_requires_and_nobody_knows_is_named": (
        EVERY,
    ),
    "scripts/upstream/test_fresh_environment.py::test_what_happens_to_be_installed_changes_nothing": (EVERY,),
    "scripts/upstream/test_verify.py::test_the_tile_is_the_one_that_upstream_picks_on_sm120": (EVERY,),
    "tuning/test_config_search.py::test_the_best_pair_shares_block_m_and_is_the_best": (EVERY,),
    # One way to end a server's process is in `make test`; `make failures` has all.
    "e2e/test_rank_failure.py::test_all_end_with_one": (
        "--tp-size 2-server-killed-True",
        "--tp-size 2-detokenizer-killed-True",
        "--tp-size 2 --ep-size 2-TP1-killed-True",
    ),
    # One broken protocol shows that the test notices.
    "sgl_kernel/test_all_reduce_protocol.py::test_a_broken_protocol_is_noticed": (
        "a flag before the data",
        "words that are not looked at",
    ),
    # The other value of a flag, or of a format of weights, takes the same way through the code.
    "http/test_client_fields.py::test_an_answer_that_fills_the_context": ("False",),
    "srt/layers/test_dependent_launches.py::test_what_is_read_before_the_wait": (
        "decode_attention-576x512/bfloat16/bfloat16/plain",
        "linear-few/fp8_block",
        "fused_moe-down_sum/fp8_block",
    ),
    "srt/entrypoints/test_bodies_let_go.py::test_nothing_holds_the_body_of_a_call_that_was_submitted": (
        "/api/embeddings-False",
        "/api/generate raw-True",
        "/generate batch-True",
        "/generate session-False",
        "/v1/completions batch-True",
        "/v2/rerank-False",
        "/api/chat-False",
        "/api/generate raw-False",
        "/api/generate-False",
        "/generate batch-False",
        "/generate hidden-False",
        "/generate-False",
        "/v1/chat/completions tools-False",
        "/v1/chat/completions-False",
        "/v1/completions batch-False",
        "/v1/completions-False",
        "/v1/messages-False",
        "/v1/responses kept-False",
        "/v1/responses-False",
    ),
    # Families whose kinds of layers others have (`test/matrix.py`); `test_parity.py` has all of them.
    "srt/managers/test_families_in_the_scheduler.py::test_alone_and_among_others_with_little_memory": (
        "deepseek_v2",
        "gemma3",
        "laguna",
        "llama",
        "smollm3",
        "smollm3_windows",
        "step3p7",
        "deepseek_v3",
        "gemma4",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "hy_v3",
        "mimo_v2",
        "minimax_m2",
        "ministral3",
        "mistral4",
        "mistral_windows",
        "mixtral",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_5",
        "qwen3_moe",
        "qwen3_next",
    ),
    "srt/models/test_towers.py::test_the_start_can_time_its_layers": (
        "glm4v",
        "muse_glimmer",
        "qwen3_vl_moe",
        "gemma4_per_layer",
        "glm46v",
        "glm4v_moe",
        "glm5_next",
        "minimax_m3_vl",
        "qwen2_5_vl",
        "qwen3_5",
        "qwen3_vl",
        "qwen4_exp",
        "step3p7",
    ),
    # Each drafter is in other cases of these files. Kinds of layers that are in none of them take draft tokens in
    # test_compressed_steps.py and test_kv_sharing_assistant.py; windows, gated states and several ranks in
    # test_parallel_schedules.py.
    "srt/speculative/test_draft_matrix.py::test_drafts_change_nothing": (
        "DFLASH-gated delta and experts-eager",
        "EAGLE-windows-eager",
        "NGRAM-sinks-graphs",
        "DFLASH-sinks of windows-graphs",
        "DSPARK-pooled latents-graphs",
        "EAGLE3-two head dims-eager",
        "NGRAM-chunks-eager",
        "DSPARK-dense-TP2",
        "NEXTN-compressed-eager",
        "NGRAM-dense and routed-eager",
        "NGRAM-gated heads-eager",
        "NGRAM-norms over heads-eager",
        "NGRAM-shared KV layers-eager",
        "STANDALONE-n-grams-eager",
    ),
    "srt/speculative/test_autoregressive_draft.py::test_draft_tokens_are_those_of_the_reference": (
        "dflash_plain-options8",
        "mimo_v2-options2",
        "v41_dspark-options27",
    ),
    "srt/speculative/test_chains.py::test_a_target_that_drafts_for_itself": (
        "deepseek_v3-params2",
        "qwen3-params1",
        "qwen3_windows-params5",
    ),
    "srt/speculative/test_draft_block.py::test_tokens_are_those_of_the_plain_run": (
        "deepseek_v3-DFLASH-sampled",
        "glm_moe_dsa-DFLASH-greedy",
        "minimax_m3-DFLASH-greedy",
        "qwen3_windows-DSPARK-sampled",
    ),
    "srt/speculative/test_kv_sharing_assistant.py::test_tokens_are_those_of_the_plain_run": (
        "gemma4_small-sampled",
        "gemma4_moe-sampled",
    ),
    "srt/model_executor/test_backend_matrix.py::test_backends_of_several_ranks": ("PP2-mixed",),
    "srt/model_executor/test_verify_steps.py::test_states_are_taken_back": (
        "qwen3_next-right",
        "qwen3_5-half-right",
        "qwen3_next-wrong",
    ),
    "srt/managers/test_fp4_schedules.py::test_random_schedules": (
        "dense-half-right-1",
        "sinks-none-4",
    ),
    # The same family or the same format of weights is in other cases; goldens have both.
    "commands/test_advice.py::test_advice_works_when_it_is_followed": (
        "DeepSeek-V4-Pro-FP8-rtx-pro-6000-server-4",
        "GLM-5.2-FP8-rtx-pro-6000-server-2",
        "Hy3-rtx-pro-6000-server-4",
        "Meta-Llama-3.1-405B-rtx-pro-6000-server-8",
        "deepseek_v32-rtx-pro-6000-server-1",
        "deepseek_v4-rtx-5090-4",
        "minimax_m2-rtx-pro-6000-server-2",
    ),
    "srt/kernels/test_published.py::test_every_op_of_a_published_model_has_a_kernel": (
        "DeepSeek-V4-Flash-FP8",
        "GLM-5.1-FP8",
        "GLM-5.3-Flash-NVFP4",
        "Inkling",
        "Kimi-K2-Instruct",
        "Kimi-K2.7-Code-NVFP4",
        "MiniMax-M2.5",
        "Qwen3-235B-A22B",
        "Qwen3-235B-A22B-NVFP4",
        "Qwen3.5-122B-A10B",
        "Qwen3.5-122B-A10B-NVFP4",
        "Qwen3.6-27B-NVFP4",
        "Step-3.5-Flash",
        "Step-3.5-Flash-FP8",
        "Step-3.7-Flash",
        "deepseek_v31_nvfp4",
        "kimi_k25_nvfp4",
        "minimax_m3_nvfp4",
    ),
    # One way to hang, number of ranks or size stands for the others.
    "http/test_always_ends.py::test_an_end_that_hangs": (
        "thread",
        "executor",
        "shutdown",
    ),
    "sgl_kernel/test_all_reduce_protocol.py::test_a_rank_that_stays_away_is_named": ("4",),
    "sgl_kernel/test_all_reduce_protocol.py::test_sums_are_exact_and_nothing_races": (
        "2-100",
        "3-60",
        "4-60",
    ),
    "sgl_kernel/test_custom_all_reduce.py::test_parts_arrive_as_they_are": ("3",),
    "sgl_kernel/test_custom_all_reduce.py::test_sums_and_norms": ("3",),
    "srt/kernels/test_step_launches.py::test_launches_of_a_decode_step": (
        "GLM-4.7-FP8-8-1",
        "Qwen3-30B-A3B FP8-2-1",
    ),
    "srt/layers/test_dependent_launches.py::test_weights_are_on_their_way_before_the_wait": (
        "fused_moe-down_sum/fp8_block",
    ),
    # The draft matrix has these parameters in its schedule, over schedulers of this process.
    "http/test_speculation.py::test_the_same_tokens": (
        "bias",
        "least length",
        "penalties",
        "regex",
        "schema",
        "several",
        "stop token",
    ),
    # test_sampler.py draws each of these on one rank; the others take each branch of the shares.
    "srt/sampling/test_shared_rows.py::test_shares_draw_what_one_rank_draws_from_the_reference_distribution": (
        "cold",
        "frequency",
        "greedy_penalties",
        "min_p_1",
        "presence",
        "repetition_reward",
        "top_k_1",
        "top_k_beyond",
        "top_p_tiny",
    ),
    # Two kinds of models show what is done with images; encoders and their families are in test_towers.py.
    "srt/models/test_media.py::test_an_image_is_encoded_once_and_not_for_a_cached_prefix": (
        "kimi_k25",
        "qwen3_5",
    ),
    "srt/models/test_media.py::test_chunks_with_images_are_short_beside_others": ("qwen3_5-16",),
    "srt/models/test_media.py::test_cuts_at_every_offset": (
        "kimi_k25",
        "qwen3_5",
    ),
    "srt/models/test_media.py::test_equal_placeholders_of_other_images_are_no_prefix": (
        "gemma4",
        "kimi_k25",
    ),
    "srt/models/test_media.py::test_images_of_several_sizes_and_a_video": ("kimi_k25", "qwen3_5"),
    "srt/models/test_media.py::test_in_graphs": ("kimi_k25",),
    "srt/models/test_media.py::test_short_memory": (
        "kimi_k25-1-160",
        "qwen3_vl-1-160",
    ),
    "srt/models/test_media.py::test_slices_of_an_encoder_step": ("kimi_k25-shares of patches",),
    "srt/models/test_media_drafts.py::test_answers_are_those_of_transformers": ("qwen3_vl_moe-ngram",),
    # Encoders and texts that others of the file have with another name.
    "srt/models/test_towers.py::test_an_encoder_that_stops_behind_every_piece": (
        "gemma4_per_layer",
        "glm5_next",
        "qwen3_5",
    ),
    "srt/models/test_towers.py::test_an_encoder_whose_heads_and_widths_ranks_share": (
        "gemma4_per_layer",
        "glm5_next",
        "qwen3_5",
    ),
    "srt/models/test_towers.py::test_answers_are_those_of_transformers": (
        "glm46v",
        "glm4v_moe",
        "qwen3_vl_moe",
        "qwen4_exp",
    ),
    # Group sizes and names of one number format; test_expert_loading.py loads each.
    "srt/models/test_quantized.py::test_dummy_weights_are_sane": (
        "awq_g32",
        "compressed_fp8_channel",
        "compressed_int8",
        "fp8_tensor_static",
        "mxfp8",
    ),
    "srt/models/test_moe_forms.py::test_every_form_computes_what_it_stands_for": (
        "awq_g128",
        "awq_g64",
        "compressed_fp8_tensor",
        "gptq_g128",
        "gptq_g64",
        "modelopt_mxfp8",
    ),
    # Attention whose backends and graphs another kind here has.
    "srt/managers/test_storage_tier.py::test_a_server_that_starts_again_finds_the_same_bytes": (
        "Mamba-2-None",
        "chunks-None",
        "n-grams, 2 layers-None",
        "windows, query scale-None",
    ),
    "srt/model_executor/test_backend_matrix.py::test_backends_mixed_in_every_way": (
        "Mamba-2-some",
        "chunks-some",
        "n-grams, 2 layers-some",
        "pooled latents, 2 layers-some",
        "windows, query scale-some",
    ),
    "srt/speculative/test_autoregressive_draft.py::test_a_confidence_head_says_how_likely_draft_tokens_stand": (
        "dspark_rnn",
    ),
    # Replicas do not know who computes the model; test_replicas.py has them with a family.
    "http/test_class_replicas.py::test_replicas_of_a_class_answer_as_it_does": (EVERY,),
    # Another test with the same kinds stands for each: host copies and drafts in the schedules of the storage tier,
    # pipelines in test_parallel_schedules.py, windows and chunks of models whose layers another case has.
    "srt/managers/test_host_tier.py::test_random_schedules": ("gated delta-half-right-4-write_back",),
    "srt/managers/test_storage_tier.py::test_random_schedules": ("windows alone-none-4-wait_complete",),
    "srt/managers/test_host_matrix.py::test_a_cell": (*("latents", "dense in fp4", "compressed, 3 layers in fp4"),),
    "srt/speculative/test_kv_sharing_assistant.py::test_two_ranks_give_the_tokens_of_one": ("pp2",),
    "srt/managers/test_families_in_the_scheduler.py::test_windows_and_chunks_of_every_relative_size": (
        "gemma4_moe-300-1-1",
        "muse_glimmer-40-1-1",
        "llama4-16-1-1",
        "cohere2-300-16-4",
    ),
    "srt/layers/attention/test_flashinfer_parts.py::test_parts_in_a_graph_follow_the_lengths": (
        "2-4",
        "2-16",
        "4-4",
    ),
    "media/test_families.py::test_tokens_are_those_of_transformers": ("gemma4",),
    # Numbers below the range of float16 and above it are scaled in one way.
    "srt/layers/attention/test_latent_attention.py::test_queries_beyond_what_float16_holds_meet_float8_latents": (
        "1073741824.0",
    ),
    # `make fuzz` soaks a server for longer.
    "fuzz/test_soak.py::test_soak": (EVERY,),
    # A script that asks servers on a GPU, and tools of those who carry changes onto another release.
    "scripts/test_first_hour.py::test_a_server_is_started_asked_and_ended": (EVERY,),
    "scripts/upstream/test_verify.py::test_a_tree_that_overflows_fails_and_says_where": (EVERY,),
    "scripts/upstream/test_verify.py::test_the_triton_that_compiles_is_the_one_that_was_asked_for": (EVERY,),
    "scripts/upstream/test_gpu.py::test_servers_that_differ_or_do_not_start": (EVERY,),
    "scripts/upstream/test_rebase.py::test_moved_changes_are_in_the_report_and_in_the_exit_code": (EVERY,),
    # Another layout of ranks has a server of its own; test_attention_groups.py has groups, test_parallel_schedules.py
    # pipelines.
    "e2e/test_tensor_parallel.py::test_groups_with_requests_of_their_own_answer_like_one": ("2-2-1-2-False",),
    "e2e/test_tensor_parallel.py::test_ranks_answer_like_one": ("1-1-2",),
    "srt/models/test_tensor_parallel.py::test_ranks_agree_with_one_rank": ("TP3", "TP4"),
    "http/test_embedded_adapters.py::test_each_answers_in_its_manner": ("two ranks",),
    # Schedules with drafts have what plain ones have; the host tier has schedules of its own.
    "srt/managers/test_adapter_schedules.py::test_each_gets_the_tokens_of_its_adapter": ("plain-6", "host tier-6"),
    "srt/managers/test_adapters.py::test_keys_and_values_of_latents": ("glm4_moe_lite",),
    "srt/managers/test_adapters_in_stages.py::test_two_batch_overlap": ("gemma4",),
    "srt/managers/test_expert_slot_random_schedules.py::test_random_schedules": ("sinks",),
    "srt/speculative/test_ling3_schedules.py::test_drafts_change_nothing": ("DFLASH-eager", "DSPARK-PP2"),
    # One mode, or what else stands beside it, is enough for the endpoint; schedulers are asked in all of them.
    "http/test_sleep.py::test_requests_that_run": ("wait",),
    "http/test_sleep.py::test_all_ranks_sleep": ("a draft", "two replicas"),
    "http/test_several_models.py::test_swaps_leave_nothing_behind": ("20",),
    "srt/managers/test_sleep_matrix.py::test_ranks_sleep_together": ("DCP2 x PP2-latents",),
    # Codebooks, families and ranks that others of the file have.
    "srt/models/test_exl3.py::test_two_ranks": ("2",),
    "srt/models/test_exl3.py::test_a_dense_model": ("mcg",),
    "srt/models/test_exl3.py::test_families": ("glm_moe_dsa_wide", "mimo_v2_wide", "minimax_m2_wide"),
}


def mark_left_out(items: Iterable[pytest.Item]) -> None:
    """Marks them `thorough`. Raises UsageError for a name that no test of a whole run has."""
    missing = {(test, case) for test, cases in LEFT_OUT.items() for case in cases}
    count = 0
    for item in items:
        count += 1
        test, _, case = item.nodeid.removeprefix("test/").partition("[")
        for name in (case.removesuffix("]"), EVERY):
            if name in LEFT_OUT.get(test, ()):
                item.add_marker(pytest.mark.thorough)
                missing.discard((test, name))
    if missing and count > WHOLE_RUN:
        raise pytest.UsageError(f"test/left_out.py has names that no test has: {sorted(missing)}")
