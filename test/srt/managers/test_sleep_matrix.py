"""Sleep of both levels with every kind of model and what else a server has: tokens are those of before.

`make test` runs recurrent states, latents, sinks, compressed entries, and each feature with one kind; the rest is
`thorough`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from matrix import FEATURES, KINDS, cells, kinds, save_kind
from pairs import some_of

from .test_memory_control import Rank, prompt

BARE = ""
QUICK = [(BARE, kind) for kind in ("gated delta", "latents", "sinks", "compressed, 3 layers")]
CASES = [(BARE, kind) for kind in kinds(lacking="")]
for feature in ("fp8", "fp4", "host cache", "experts in main memory"):
    of_feature = [(feature, kind) for _, kind in cells(kinds(), feature=feature)]
    QUICK += of_feature[:1]
    CASES += of_feature


@pytest.mark.parametrize(("feature", "kind"), some_of(CASES, QUICK))
def test_tokens_are_those_of_before(feature: str, kind: str, tmp_path: Path) -> None:
    flags = dict(FEATURES[feature].flags) if feature else {}
    folder = save_kind(kind, tmp_path / "model")
    rank = Rank(folder, **{"page_size": KINDS[kind].page, **flags})
    expected = [rank.tokens(prompt(seed)) for seed in range(2)]
    for level in (1, 2):
        problem = rank.memory.sleep([], keep_weights=level == 1)
        if rank.runner.plan.expert_slots is not None and level == 2:
            assert "keep them in main memory" in problem
            return
        assert not problem
        assert not rank.memory.wake([], "key")
        assert rank.memory.state.serves, rank.memory.state.problem
        assert [rank.tokens(prompt(seed)) for seed in range(2)] == expected, level
