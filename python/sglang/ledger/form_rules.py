"""Rules by which a row of the ledger covers more than launches of its own form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class FormRule:
    """The rule by which forms of launches of one kernel are reduced to those that cost as much as a row
    (`coverage.py`).

    A row covers a launch with the same types, constants, alignments and tile. Beyond that:
    """

    free: frozenset[str] = frozenset()
    """Constants that are numbers in the code and no more: any value."""
    at_most: frozenset[str] = frozenset()
    """Constants of which a row covers its own value and lower ones; False is less than True."""
    at_least: frozenset[str] = frozenset()
    """The opposite: EVEN_K False (with masks) covers True."""
    counts: frozenset[str] = frozenset()
    """Run-time numbers that bound loops and masks, or that place what is loaded alone: whether they are 1 or multiples
    of 16 does not matter."""
    counts_where: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """ "NAME=value" -> what else are counts where that constant has that value."""
    absent: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """ "FLAG" -> the parameters that are not read where it is false, or 1 (split); "NAME=value" as above."""
    optional: frozenset[str] = frozenset()
    """Tensors that may be None: a row with one covers launches without."""


def _rule(
    free: str = "",
    at_most: str = "",
    at_least: str = "",
    counts: str = "",
    counts_where: Mapping[str, str] | None = None,
    absent: Mapping[str, str] | None = None,
    optional: str = "",
) -> FormRule:
    """Returns a rule from the names of parameters, with spaces between them."""

    def by_condition(names: Mapping[str, str] | None) -> dict[str, tuple[str, ...]]:
        return {condition: tuple(of.split()) for condition, of in (names or {}).items()}

    return FormRule(
        frozenset(free.split()),
        frozenset(at_most.split()),
        frozenset(at_least.split()),
        frozenset(counts.split()),
        by_condition(counts_where),
        by_condition(absent),
        frozenset(optional.split()),
    )


# Attention. Slots are loaded one by one: it does not matter how rows of the table lie (stride_rt).
_SINKS, _LSE, _WINDOW = {"HAS_SINKS": "sinks_ptr"}, {"HAS_LSE": "lse_ptr"}, {"HAS_WINDOW": "window"}
_PARTS = {"HAS_PARTS": "part_o_ptr part_lse_ptr num_parts"}
_GUESSES = {"HAS_GUESSES": "prefix_lens_ptr num_tokens"}
_PREFIX = {
    "HAS_PREFIX": "k_cache_ptr v_cache_ptr req_to_token_ptr req_pool_indices_ptr prefix_lens_ptr k_scale v_scale"
    " stride_kcs stride_kch stride_vcs stride_vch stride_rt"
}
_EXTEND_COUNTS = "num_seqs num_blocks num_kv_heads window stride_rt"
_DECODE_COUNTS = "num_heads num_head_tiles num_tokens stride_rt"
_DECODE = _rule(
    free="GROUP",
    at_most="HAS_CAP HAS_SINKS HAS_GUESSES",
    counts=f"{_DECODE_COUNTS} window",
    absent=_SINKS | _WINDOW | _GUESSES,
)
_ATTENTION = {
    "extend_attention.extend_kernel": _rule(
        free="GROUP",
        at_most="HAS_PREFIX HAS_CAP HAS_SINKS HAS_PARTS",
        counts=f"{_EXTEND_COUNTS} num_parts",
        absent=_PREFIX | _PARTS | _SINKS | {"HAS_MASK": "mask_ptr mask_offsets_ptr"} | _WINDOW,
    ),
    "extend_biased.extend_biased_kernel": _rule(
        free="GROUP",
        at_most="HAS_PREFIX HAS_PARTS",
        counts=f"{_EXTEND_COUNTS} num_parts extent",
        absent=_PREFIX | _PARTS | _WINDOW,
    ),
    "extend_fp4.extend_fp4_kernel": _rule(
        free="GROUP", at_most="HAS_CAP HAS_SINKS", counts=_EXTEND_COUNTS, absent=_SINKS | _WINDOW
    ),
    "decode_attention.decode_kernel": _DECODE,
    "decode_fp4.decode_fp4_kernel": _DECODE,
    "decode_biased.decode_biased_kernel": _rule(
        free="GROUP", at_most="HAS_GUESSES", counts=f"{_DECODE_COUNTS} window extent", absent=_WINDOW | _GUESSES
    ),
    "latent_decode.latent_decode_kernel": _rule(
        at_most="HAS_GUESSES HAS_SINKS",
        counts=f"{_DECODE_COUNTS} window",
        absent=_SINKS | _GUESSES | {"HAS_WINDOW": "window seq_lens_ptr"},
    ),
    "decode_attention.combine_kernel": _rule(
        # Rows have a head dim that their columns do not divide, so that columns are masked.
        free="V_HEAD_DIM",
        at_most="HAS_SINKS HAS_LSE",
        counts="num_heads num_sinks stride_ob stride_oh",
        absent={"HAS_SINKS": "sinks_ptr num_sinks"} | _LSE,
    ),
    "decode_attention.plan_kernel": _rule(counts="num_seqs num_slots num_pieces"),
    "latent_prompt.latent_prompt_kernel": _rule(
        at_most="CARRY_OUT",
        counts="num_seqs num_blocks num_heads window",
        absent={"CARRY_OUT": "part_o_ptr part_lse_ptr"} | _SINKS | _WINDOW,
    ),
    "latent_prompt.gather_latents_kernel": _rule(free="NOPE", counts="num_heads"),
    "latent_prompt.gather_records_kernel": _rule(free="NOPE", counts="num_heads"),
}

# Attention to selected tokens or blocks, and what selects them.
_OPTIONS = "HAS_MORE HAS_SINKS HAS_LSE"
_PLACES = "num_heads num_head_tiles num_splits"
_SLOTS = f"{_PLACES} stride_slots stride_more_slots counts_ptr"
_SELECTED = {
    "sparse_attention.sparse_attention_kernel": _rule(
        at_most=_OPTIONS,
        counts=f"{_SLOTS} more_counts_ptr",
        absent=_SINKS
        | _LSE
        | {"HAS_MORE": "more_cache_ptr more_slots_ptr more_counts_ptr stride_more_cs stride_more_slots"},
    ),
    "sparse_records.record_attention_kernel": _rule(
        at_most=f"{_OPTIONS} HAS_ROWS",
        counts=f"{_SLOTS} more_counts_ptr rows_ptr",
        absent=_SINKS
        | _LSE
        | {
            "HAS_ROWS": "rows_ptr",
            "HAS_MORE": "more_numbers_ptr more_rope_ptr more_scales_ptr more_slots_ptr more_counts_ptr"
            " stride_more_slots",
        },
    ),
    "latent_records.latent_record_store_kernel": _rule(counts="entry_stride out_cache_loc"),
    "sparse_packed.packed_attention_kernel": _rule(at_most=_OPTIONS, counts=_SLOTS, absent=_SINKS | _LSE),
    "sparse_steps.merge_shares_kernel": _rule(
        at_most=f"{_OPTIONS} SHARES", counts="num_splits num_heads", absent=_SINKS | _LSE
    ),
    "index_logits.index_logits_kernel": _rule(
        at_most="ROWS",
        counts="num_rows num_parts top_k rate stride_rt stride_logits stride_scales req_pool_indices_ptr counts_ptr",
        absent={"QUANTIZED": "scales_ptr"},
    ),
    "select_entries.select_entries_kernel": _rule(
        counts="num_parts top_k rate stride_rt stride_kept stride_out counts_ptr req_pool_indices_ptr chosen_ptr"
    ),
    "index_rope.index_norm_rope_kernel": _rule(
        free="QUERY_HEADS", at_most="INTERLEAVED", counts="first_query query_tokens key_stride"
    ),
    "index_store.index_key_store_kernel": _rule(
        counts="num_rows scale_stride out_cache_loc_ptr", absent={"QUANTIZED": "scales_ptr"}
    ),
    "index_store.index_queries_kernel": _rule(free="HEADS", counts="num_rows weight_stride"),
    "latent_pack.latent_pack_store_kernel": _rule(counts="entry_stride"),
    "block_scores.block_scores_kernel": _rule(
        at_most="ROWS",
        counts="num_rows num_heads num_parts top_blocks local_blocks stride_rt stride_token req_pool_indices_ptr"
        " counts_ptr lens_ptr",
    ),
    "block_attention.block_attention_kernel": _rule(
        at_most="PER_GROUP", counts=f"{_PLACES} group stride_slots req_pool_indices_ptr counts_ptr lens_ptr"
    ),
    "selected_blocks.selected_block_kernel": _rule(
        counts=f"{_PLACES} group num_kv_heads stride_blocks blocks_ptr counts_ptr tails_ptr tail_counts_ptr"
    ),
}

# What comes before and behind attention, and the rows of a step.
_NORMS = {"NORM_Q": "q_weight", "NORM_K": "k_weight"}
_ROPE_STORE = _rule(free="Q_HEADS KV_HEADS", at_most="NORM_Q NORM_K", absent=_NORMS)
_LOGITS_COUNTS = "vocab_size mask_stride"
_ELEMENTWISE = {
    "decode_inputs.decode_inputs_kernel": _rule(at_most="WINDOWS"),
    "draft_rows.verify_inputs_kernel": _rule(at_most="TABLES"),
    "draft_rows.draft_inputs_kernel": _rule(at_most="TABLES"),
    "draft_rows.accept_drafts_kernel": _rule(at_most="FORCED"),
    "ngram.longest_match_kernel": _rule(free="SPLITS"),
    "ngram.corpus_match_kernel": _rule(at_most="LONGEST"),
    "ngram.copy_drafts_kernel": _rule(at_most="SPLITS CORPUS"),
    "activation.activation_kernel": _rule(at_most="LIMIT"),
    "rope_store.qk_norm_rope_store_kernel": _ROPE_STORE,
    "rope_store.qk_norm_rope_store_fp4_kernel": _ROPE_STORE,
    "latent_store.latent_norm_rope_store_kernel": _rule(
        free="Q_HEADS NOPE", at_most="INTERLEAVED", counts="num_absorbed", absent={"KEY_NORM": "key_weight"}
    ),
    "tail_rotation.shared_kv_store_kernel": _rule(free="Q_HEADS"),
    "tail_rotation.tail_rotation_kernel": _rule(free="NUM_HEADS", at_most="INVERSE", counts="dim"),
    "part_rows.pack_parts_kernel": _rule(counts="num_tokens num_heads num_ranks"),
    "part_rows.merge_parts_kernel": _rule(
        at_most="HAS_SINKS", counts="num_heads num_ranks", absent={"HAS_SINKS": "sinks"}
    ),
    "topk.topk_kernel": _rule(
        free="K COLUMNS MEMBERS", at_most="K_BLOCK", optional="bias image_bias token_ids num_valid expert_map"
    ),
    "topk.topk_hash_kernel": _rule(
        free="K COLUMNS", at_most="K_BLOCK", counts="num_experts", optional="num_valid expert_map"
    ),
    "sampling.draw_tokens_kernel": _rule(
        at_most="WRITE_NEXT MAX_SPLITS",
        counts=_LOGITS_COUNTS,
        absent={"FILTER": "thresholds", "WRITE_NEXT": "next_token"},
    ),
    "sampling.threshold_kernel": _rule(counts=_LOGITS_COUNTS),
    "sampling.adjust_logits_kernel": _rule(
        at_most="PENALTIES MASK",
        counts=_LOGITS_COUNTS,
        absent={"PENALTIES": "state", "MASK": "vocab_mask mask_stride"},
    ),
    "quantized_sums.encode_kernel": _rule(counts="num_groups ranks"),
    "quantized_sums.decode_kernel": _rule(counts="num_groups"),
    "quantized_sums.add_kernel": _rule(counts="num_groups ranks"),
    "norm_quantize.add_rmsnorm_quantize_kernel": _rule(counts="num_groups"),
    "quantize.group_kernel": _rule(
        counts="num_groups num_pairs", absent={"KIND=group128": "factor", "KIND=mxfp8": "factor"}
    ),
}

# Products. Most load each scale by itself; "mx" loads rows of them, and through shared memory where they lie well.
_BIAS = {"HAS_BIAS": "bias"}
_GEMV = _rule(at_most="HAS_BIAS", at_least="EVEN_K", counts="N", absent=_BIAS)
_SCALE_STRIDES = "xs_stride ws_stride ws_expert_stride"
_LONE_SCALES = ("KIND=scaled", "KIND=group128", "KIND=planes")
_PRODUCT = _BIAS | {
    "KIND=plain": "x_scale xs_stride w_scale ws_stride ws_expert_stride",
    "KIND=planes": "x_scale xs_stride",
    "HAS_FACTOR": "w_factor",
}
_GATE_NUMBERS = "ALPHA CUBIC OFFSET LIMIT"
_GROUPED = _rule(
    # GROUP_M orders programs. What an activation computes it does when the operands of the products are no longer held.
    free=f"GROUP_M {_GATE_NUMBERS}",
    at_most="HAS_GATE",
    at_least="EVEN_K",
    counts="num_pairs top_k",
    # Scales of whole rows lie side by side: their addresses are computed at once, which takes more registers.
    counts_where=dict.fromkeys(("KIND=group128", "KIND=planes"), _SCALE_STRIDES),
    absent=_PRODUCT | {"X_FACTOR": "x_factor"},
)
_PAIRS = _rule(
    free=f"TOP_K STEPS {_GATE_NUMBERS}",
    at_most="HAS_GATE EARLY",
    counts=f"top_k {_SCALE_STRIDES}",
    absent=_PRODUCT,
)
# Up to four scales of a row are loaded at once, and nothing is arranged by where they lie.
_WIDENED_COUNTS = frozenset(f"{_SCALE_STRIDES} N".split())
_TILES = _rule(
    free="GROUP_M",
    at_most="SPLITS HAS_BIAS",
    at_least="EVEN_K",
    counts="T K",
    # With the scales of "mx" the compiler also arranges what it stores by N's alignment, through shared memory.
    # Lone scales: compiled with strides of 1, no tile of fp8_channel takes more than two registers more or spills.
    counts_where=dict.fromkeys(_LONE_SCALES, f"{_SCALE_STRIDES} N"),
    absent=_PRODUCT | {"SPLITS": "parts arrivals", "HAS_X_FACTOR": "x_factor"},
)
_PRODUCTS = {
    "gemv.gemv_kernel": _GEMV,
    "skinny_gemm.skinny_gemm_kernel": _GEMV,
    "quant_linear.tiles_kernel": _TILES,
    "quant_linear_dequantized.tiles_kernel": replace(_TILES, counts=_TILES.counts | _WIDENED_COUNTS),
    "quant_linear.few_rows_kernel": _rule(at_most="HAS_BIAS EARLY", counts="N K ws_stride", absent=_PRODUCT),
    "kernels.gate_up_kernel": _GROUPED,
    "kernels.down_kernel": _GROUPED,
    "kernels_few.gate_up_pairs_kernel": _PAIRS,
    "kernels_few.down_sum_kernel": _PAIRS,
    "kernels_dequantized.gate_up_kernel": replace(_GROUPED, counts=_GROUPED.counts | _WIDENED_COUNTS),
    "kernels_dequantized.down_kernel": replace(_GROUPED, counts=_GROUPED.counts | _WIDENED_COUNTS),
    "kernels_zero_points.gate_up_kernel": _GROUPED,
    "kernels_zero_points.down_kernel": _GROUPED,
    "kernels_zero_points.gate_up_pairs_kernel": _PAIRS,
    "kernels_zero_points.down_sum_kernel": _PAIRS,
    "kernels.combine_kernel": _rule(at_most="TOP_K"),
    "kernels.combine_normed_kernel": _rule(free="TOP_K"),
    "align.align_small_kernel": _rule(free="BLOCK_M", at_most="EXPERTS"),
    "align.align_count_kernel": _rule(at_most="EXPERTS"),
    "align.align_offsets_kernel": _rule(free="BLOCK_M", at_most="EXPERTS"),
}

# Recurrent layers, streams and n-grams.
_CONVOLUTION = _rule(free="HEAD_DIM", at_most="HAS_BIAS", absent=_BIAS)
_SKIP = {"HAS_SKIP": "skip"}
_SCAN = _rule(at_most="HAS_SKIP", counts="heads group", absent=_SKIP)
_STATE_STEP = _rule(at_most="HAS_SKIP", counts="heads group ab_stride a b", absent=_SKIP | {"DELTA": "b"})
_CHANNEL_STEP = _rule(counts="heads b b_stride", absent={"BOUNDED": "lower_bound"})
_RECURRENT = {
    "causal_conv.conv_extend_kernel": _CONVOLUTION,
    "causal_conv.conv_decode_kernel": _CONVOLUTION,
    "causal_conv.conv_verify_kernel": _CONVOLUTION,
    "commit.commit_states_kernel": _rule(counts="heads group"),
    "chunk_local.chunk_local_kernel": _rule(counts="heads group ab_stride a b", absent={"DELTA": "b u w v"}),
    "chunk_scan.chunk_scan_kernel": _SCAN,
    "register_scan.register_scan_kernel": _SCAN,
    "state_step.state_step_kernel": _STATE_STEP,
    "state_verify.state_verify_kernel": _STATE_STEP,
    "channel_decay.channel_decay_kernel": _rule(counts="heads", absent={"BOUNDED": "lower_bound"}),
    "channel_local.channel_pairs_kernel": _rule(counts="heads b b_stride"),
    "channel_local.channel_solve_kernel": _rule(counts="heads b b_stride"),
    "channel_scan.channel_scan_kernel": _rule(counts="heads"),
    "channel_step.channel_step_kernel": _CHANNEL_STEP,
    "channel_verify.channel_verify_kernel": _CHANNEL_STEP,
    "gated_norm.gated_rmsnorm_kernel": _rule(at_most="SILU", counts="rows groups"),
    "gated_norm.attention_head_gate_kernel": _rule(counts="heads head_dim"),
    "hyper_connection.mix_streams_kernel": _rule(free="PLACES", at_most="HAS_OUT", counts="num_tokens"),
    "hyper_connection.mix_all_streams_kernel": _rule(free="PLACES", at_most="HAS_OUT", counts="num_tokens steps"),
    "hyper_connection.join_streams_kernel": _rule(
        at_most="MIX HAS_BEFORE", counts="num_tokens num_splits rounds", absent={"MIX": "placement rounds"}
    ),
    "gated_sum.gated_sum_kernel": _rule(at_most="HAS_SCALE"),
    "gated_streams.place_and_norm_kernel": _rule(at_most="HAS_OUT"),
    "gated_streams.bend_kernel": _rule(counts="placed product_stride rank"),
    "ngram_embedding.ngram_rows_kernel": _rule(
        counts="heads first_head per_ngram end_token fill sizes offsets", absent={"SCALED": "scale"}
    ),
}

FORM_RULES: Mapping[str, FormRule] = _ATTENTION | _SELECTED | _ELEMENTWISE | _PRODUCTS | _RECURRENT
"""Kernel ("norm.rmsnorm_kernel") -> its rule. A kernel without one has none."""
