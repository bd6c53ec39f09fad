"""Muse-Spark behind a real scheduler, for which the oldest transformers that tests run with has no class that `matrix`
could take: drafts, graphs, ranks, stages and experts in main memory change nothing in a schedule with aborts,
retraction, cached prefixes and grammars."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from pairs import some_of

from srt.models import test_dflash_drafts, test_dspark_drafts
from srt.models.ling3_reference import save
from srt.models.muse_spark_reference import CONFIG, weights
from srt.models.test_eagle3_drafts import save as save_draft
from srt.speculative.test_draft_matrix import on_ranks, outcome, same, server_args, without_drafts

EP2 = {"tp_size": 2, "ep_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "eager": {},
    "graphs": {},
    "experts in main memory": {"enable_paged_experts": True},
    "fp8 cache": {"kv_cache_dtype": "fp8_e4m3"},
    "fp4 cache": {"kv_cache_dtype": "fp4_e2m1"},
    "main memory": {"enable_hierarchical_cache": True, "hicache_ratio": 3.0},
    "EP2": EP2,
    "PP2": {"pp_size": 2},
    "EP2 x PP2": EP2 | {"pp_size": 2},
    "DP2 x EP2": EP2 | {"attn_dp_size": 2},
    "EP2, two batches": EP2 | {"enable_two_batch_overlap": True, "two_batch_overlap_min_tokens": 2},
}
CASES = [(kind, layout) for kind in ("NGRAM", "DFLASH", "DSPARK") for layout in LAYOUTS]
QUICK = [("NGRAM", "experts in main memory"), ("DSPARK", "DP2 x EP2")]


@functools.cache
def tensors() -> dict[str, Any]:
    return weights()


def build(kind: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Writes the model and its draft. Returns where it is, and the flags."""
    target = save(folder / "target", CONFIG, tensors())
    flags: dict[str, Any] = {"speculative_algorithm": kind}
    if kind in ("DFLASH", "DSPARK"):
        drafts: Any = test_dflash_drafts if kind == "DFLASH" else test_dspark_drafts
        layers: dict[str, Any] = {"target_layer_ids": [1, 4]}
        keys = {"dflash_config": {"mask_token_id": 201, **layers}} if kind == "DFLASH" else layers
        config = drafts.CONFIG | keys
        flags["speculative_draft_model_path"] = str(save_draft(folder / "draft", config, drafts.weights(config)))
    return target, flags


@pytest.mark.parametrize(("kind", "layout"), some_of(CASES, QUICK))
def test_drafts_change_nothing(kind: str, layout: str, tmp_path: Path) -> None:
    target, flags = build(kind, tmp_path)
    cache = {key: value for key, value in LAYOUTS[layout].items() if key == "kv_cache_dtype"}
    plain = without_drafts(target, flags | cache)
    assert plain.num_cached
    args = server_args(target, flags | LAYOUTS[layout])
    alone = args.tp_size * args.pp_size == 1
    results = [outcome(args, graphs=layout == "graphs")] if alone else on_ranks(args, tmp_path)
    for result in results:
        assert result.verified > 0
        same(result, plain)
