"""Keys that a family's function did not read: refused by name, unless they are known not to change answers.

A key that a family reads may mean something else to another one, so what counts is whether this family's function
looked at it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from sglang.srt.errors import UserError
from sglang.srt.plan.families.config import Config

LAYERS: Mapping[str, str] = {
    "hybrid_override_pattern": "Mamba-2 layers",
    "layers_block_type": "Mamba-2 layers",
    "block_configs": "layers of several widths",
    "linear_attn_config": "Kimi delta attention",
    "sparse_attention_config": "block-sparse attention",
}
"""Keys of layers that are not described, with their meaning: a plan that ignored them would be wrong."""
FACTORS = (
    "embedding_multiplier",
    "logit_scale",
    "logits_scaling",
    "output_multiplier",
    "pretraining_tp",
    "repetition_penalty",
    "residual_multiplier",
)
"""Keys with a factor, of which 1 changes nothing."""
CHANGING = (
    *FACTORS,
    "attention_multiplier",
    "attn_logit_softcapping",
    "clip_qkv",
    "final_logit_softcapping",
    "qk_scale_factor",
    "query_pre_attn_scalar",
)
"""Keys of some families that would change any model's result. In a draft's config no others are looked for: its keys
are those of its kind, which the reader of that kind checks, or those of the model, which has more layers."""
HARMLESS = re.compile(
    "|".join(
        (
            # What the file and its parts are.
            r"_.*|architectures|auto_map|dtype|torch_dtype|model_type|transformers_.*|.*_version|unsloth_.*|task_.*",
            r"id2label|label2id|num_labels|problem_type|return_dict.*|torchscript|tf_legacy_loss|use_cache",
            # Sizes that follow from others, or that no layer of this model has.
            r"max_position_embeddings|max_window_layers|model_max_length|initial_context_length|intermediate_size.*",
            r"unpadded_vocab_size|qk_head_dim|head_dim|num_key_value_heads|num_experts.*|experts_per_token",
            r"sliding_window.*|first_k_dense_replace|dense_intermediate_size|vocab_size_per_layer_input|attn_type_list",
            r"num_hidden_layers|n_shared_experts|norm_eps|rope_theta|partial_rotary_factor|yarn_only_types|chunk_size",
            r"full_attention_interval|index_skip_topk_offset|index_topk_freq|interleave_moe_layer_step|expand",
            r"linear_(num|key|value|conv|head|lower)_.*|num_global_key_value_heads",
            r"index_(n_heads|head_dim|block_size|local_blocks|topk_blocks)",
            # Settings of experts, states, tables and drafts, in a model cut to layers that have none of them.
            r"moe_intermediate_size|n_group|topk_group|topk_method|scoring_func|norm_topk_prob|routed_scaling_factor",
            r"n_routed_experts|num_local_experts|shared_expert_intermediate_size|share_expert_dims?|moe_latent_size",
            r"moe_shared_expert_intermediate_size|mamba_.*|n_groups|ssm_state_size|conv_kernel|use_conv_bias|use_bias",
            r"time_step_limit|candidate_.*|engram_.*|ngram_.*|heads_per_ngram|split_ngram_parts|make_ngram_.*|ple_.*",
            r"num_mtp_layers|chain_hidden_post_norm|local_layer_ids|num_hash_layers|index_topk|index_kpool.*",
            # Training: losses, dropout, initial values.
            r".*(dropout|loss|loss_coef|loss_alpha|initializer_range|init_std)|router_jitter_noise|seq_aux",
            r"gradient_checkpointing.*|rescale_prenorm_residual|time_step_(floor|min|max|rank)|num_reward_heads",
            # Sampling, as old configs have it beside the model.
            r"do_sample|early_stopping|min_length|max_length|num_beams|num_beam_groups|length_penalty|typical_p",
            r"temperature|top_k|top_p|num_return_sequences|num_logits_to_keep|chunk_size_feed_forward",
            # Other parts of the server read them: tokens, formats, images, drafts.
            r".*_token_(id|index)|.*_placeholder|quantization_config|expert_dtype|tie_encoder_decoder|vision_.*|image_.*",
            r"out_hidden_size|projector_.*|multimodal_projector_bias|ignore_index|process_image_mode",
            r"img_token_compression_config",
            r"language_model_only|use_unified_vision_chunk|mm_.*|audio_.*|video_.*|mtp_.*|num_mtp_modules|use_mtp",
            r"num_nextn_predict_layers|dspark_.*|index_share_for_mtp_iteration|indexer_rope_interleave",
            # How others compute it, which changes no exact result.
            r"attn_implementation|ep_size|number_of_conv_states|moe_shared_expert_overlap",
            r"use_(bfloat16|mamba_kernels|grouped_topk)",
            r"(enable|need)_.*fp32.*",
        )
    )
)
"""Keys that do not change answers where the family does not read them."""


def check_layers(c: Config) -> None:
    """Raises UserError for layers that the config describes and the family's function did not read."""
    for key, what in LAYERS.items():
        if key not in c.recorded.read and c.values.get(key) is not None:
            model_type = str(c.values.get("model_type") or "")
            raise UserError(f"{c.source}: {key!r} ({what}, model_type {model_type!r}) is not described here yet.")


def check_unread(c: Config, keys: Collection[str]) -> None:
    """Notes a problem for each of `keys` that the family's function did not read and that may change answers. Values
    that switch something off (false, 0, empty) change none."""
    for key in sorted((set(c.values) & set(keys)) - c.recorded.read):  # `in c.values` would count as reading
        value = c.recorded.peek(key)
        if not value or (key in FACTORS and value == 1) or HARMLESS.fullmatch(key):
            continue
        c.problem(
            f"{key} = {value!r} is not supported for {c.architecture}: no layer here reads it. If answers do not depend"
            f" on it, pass --json-model-override-args '{{\"{key}\": null}}'."
        )
