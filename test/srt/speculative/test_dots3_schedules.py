"""dots3-note behind a real scheduler: tokens that steps verify see the windows and selections that decoding has, and
the layer that drafts has a window, in a schedule with aborts, retraction, cached prefixes and grammars, in graphs, on
ranks and in stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pairs import some_of

from srt.models.dots3_reference import CONFIG, weights
from srt.models.ling3_reference import save
from srt.speculative.test_draft_matrix import on_ranks, outcome, same, server_args, without_drafts

LAYOUTS: dict[str, dict[str, Any]] = {
    "eager": {},
    "graphs": {},
    "TP2": {"tp_size": 2},
    "EP2": {"tp_size": 2, "ep_size": 2},
    "DCP2": {"tp_size": 2, "dcp_size": 2},
    "PP2": {"pp_size": 2},
}
CASES = [(kind, layout) for kind in ("NGRAM", "NEXTN") for layout in LAYOUTS]


@pytest.mark.parametrize(("kind", "layout"), some_of(CASES, [("NGRAM", "DCP2"), ("NEXTN", "graphs")]))
def test_drafts_change_nothing(kind: str, layout: str, tmp_path: Path) -> None:
    target = save(tmp_path / "target", CONFIG, weights(draft=True))
    flags: dict[str, Any] = {"speculative_algorithm": kind}
    plain = without_drafts(target, flags)
    assert plain.num_cached
    args = server_args(target, flags | LAYOUTS[layout])
    results = on_ranks(args, tmp_path) if LAYOUTS[layout] else [outcome(args, graphs=layout == "graphs")]
    for result in results:
        assert result.verified > 0
        same(result, plain)
