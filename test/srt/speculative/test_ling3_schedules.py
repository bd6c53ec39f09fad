"""Ling 3.0 behind a real scheduler, for which transformers has no class that `matrix` could take: its drafts change
nothing in a schedule with aborts, retraction, cached prefixes and grammars, in graphs and on two ranks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from pairs import some_of

from srt.models import test_dflash_drafts, test_dspark_drafts
from srt.models.ling3_reference import CONFIG, save, weights
from srt.models.test_eagle3_drafts import save as save_draft
from srt.speculative.test_draft_matrix import on_ranks, outcome, same, server_args, without_drafts

LAYOUTS: dict[str, dict[str, Any]] = {
    "eager": {},
    "graphs": {},
    "TP2": {"tp_size": 2},
    "PP2": {"pp_size": 2},
}
LING = {"architectures": ["LingDSparkModel"]}
"""Under which name Ling's DSpark draft is published; its tensors are those of DeepSpec's other drafts."""
CASES = [(kind, layout) for kind in ("NEXTN", "DFLASH", "DSPARK", "NGRAM") for layout in LAYOUTS]


@functools.cache
def tensors() -> dict[str, Any]:
    return weights(CONFIG | {"num_nextn_predict_layers": 1})


def build(kind: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Writes the model and its draft. Returns where it is, and the flags."""
    target = save(folder / "target", CONFIG | {"num_nextn_predict_layers": 1}, tensors())
    flags: dict[str, Any] = {"speculative_algorithm": kind}
    if kind in ("DFLASH", "DSPARK"):
        drafts: Any = test_dflash_drafts if kind == "DFLASH" else test_dspark_drafts
        layers: dict[str, Any] = {"target_layer_ids": [1, 4]}
        keys = {"dflash_config": {"mask_token_id": 201, **layers}} if kind == "DFLASH" else layers | LING
        config = drafts.CONFIG | keys
        flags["speculative_draft_model_path"] = str(save_draft(folder / "draft", config, drafts.weights(config)))
    return target, flags


@pytest.mark.parametrize(
    ("kind", "layout"), some_of(CASES, [("NEXTN", "graphs"), ("DFLASH", "eager"), ("DSPARK", "PP2")])
)
def test_drafts_change_nothing(kind: str, layout: str, tmp_path: Path) -> None:
    target, flags = build(kind, tmp_path)
    plain = without_drafts(target, flags)
    assert plain.num_cached
    args = server_args(target, flags | LAYOUTS[layout])
    results = on_ranks(args, tmp_path) if LAYOUTS[layout] else [outcome(args, graphs=layout == "graphs")]
    for result in results:
        assert result.verified > 0
        same(result, plain)
