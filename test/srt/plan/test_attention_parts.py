"""Values of which a grouped-query attention is made: each says one thing, and none hides another."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from sglang.srt.blocks.block_selection.spec import BlockIndexer
from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.configs.rope import unrotated
from sglang.srt.plan.attention_parts import CacheOfLayer, ElementGate, HeadGate, PerHead, Softmax, Values, Whole
from sglang.srt.plan.cache_spec import FULL, Window
from sglang.srt.plan.families.family import Family, Model
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.masks import CAUSAL, Chunks, Mask, RowBlock, SelectedBlocks, SlidingWindow, windowed
from sglang.srt.plan.weight_spec import Elements, Matrix

HEADS = GQA(8, 2, 64, unrotated(64))
PARALLEL = ParallelConfig("bfloat16", "bfloat16")


def parts_of(mixer: GQA) -> tuple[str, ...]:
    """Returns the parts of the product that makes q, k and v."""
    return next(m.parts for m in mixer.weights(512, 1) if isinstance(m, Matrix) and m.name == "attn.qkv")


@pytest.mark.parametrize(("record", "most"), [(GQA, 16), (Model, 8), (Family, 8)])
def test_records_stay_small(record: type, most: int) -> None:
    assert len(fields(record)) <= most


@pytest.mark.parametrize(
    ("mask", "window", "lifetime", "traits"),
    [
        (CAUSAL, 0, FULL, set()),
        (SlidingWindow(12), 12, Window(12), {"sliding_window"}),
        (SlidingWindow(12).lagging(4), 12, Window(15), {"sliding_window", "window_slack"}),
        (Chunks(12), 12, Window(12, chunked=True), {"sliding_window", "chunked"}),
        (SelectedBlocks(BlockIndexer(16, 32, 4)), 0, FULL, set()),
        (RowBlock(4, SlidingWindow(12)), 12, Window(12), {"sliding_window"}),
    ],
)
def test_masks(mask: Mask, window: int, lifetime: object, traits: set[str]) -> None:
    assert (mask.window, mask.lifetime, set(mask.traits)) == (window, lifetime, traits)
    mixer = replace(HEADS, mask=mask)
    assert mixer.caches(PARALLEL)[0].lifetime == lifetime
    assert all(traits <= need.traits for need in mixer.needs(PARALLEL) if need.op == "decode_attention")


def test_a_window_of_no_tokens_is_none() -> None:
    assert windowed(0) is CAUSAL and windowed(3) == SlidingWindow(3)


def test_chunks_keep_nothing_for_lagging_rows() -> None:
    with pytest.raises(TypeError, match="lag"):
        Chunks(12).lagging(2)


def test_ranks_share_tokens_of_causal_layers_only() -> None:
    sharing = {mask: replace(HEADS, mask=mask).effective_dcp_size(4, 2) for mask in (CAUSAL, SlidingWindow(12))}
    assert sharing == {CAUSAL: 2, SlidingWindow(12): 1}
    assert replace(HEADS, mask=RowBlock(4, CAUSAL)).effective_dcp_size(4, 2) == 1


def test_gates_and_the_parts_that_make_them() -> None:
    assert parts_of(HEADS) == ("q", "k", "v")
    assert parts_of(replace(HEADS, gate=ElementGate(own_projection=True))) == ("q", "k", "v", "gate")
    doubled, plain = (
        next(m.rows for m in each.weights(512, 1) if isinstance(m, Matrix))
        for each in (replace(HEADS, gate=ElementGate()), HEADS)
    )
    assert doubled - plain == 8 * 64
    ops = [[need.op for need in replace(HEADS, gate=HeadGate(softplus)).needs(PARALLEL)] for softplus in (False, True)]
    assert ["attention_head_gate" in each for each in ops] == [True, False], "torch computes softplus gates"


def test_a_layer_that_reads_another_cache_has_no_values_of_its_own() -> None:
    mixer = replace(HEADS, qk_norm=PerHead(), values=Values(64, from_keys=True, norm=True)).reading(3)
    assert (mixer.cache, mixer.values, mixer.caches(PARALLEL)) == (CacheOfLayer(3), Values(64), ())
    assert parts_of(mixer) == ("q",) and not any(need.op == "value_norm" for need in mixer.needs(PARALLEL))
    assert Elements(64) in mixer.weights(512, 1), "a norm of queries alone"


def test_norms_over_all_heads_span_ranks() -> None:
    assert not replace(HEADS, qk_norm=Whole()).defers_all_reduce and replace(HEADS, qk_norm=PerHead()).defers_all_reduce


def test_a_scale_of_zero_is_that_of_the_head_dim() -> None:
    assert HEADS.softmax_scale == 1 / 8 and replace(HEADS, softmax=Softmax(1.0)).softmax_scale == 1.0
