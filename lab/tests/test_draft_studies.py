"""Predicted steps with drafts beside published records, and the trees that were counted."""

from __future__ import annotations

import card_records
import count_trees
import pytest


def test_records_stand_beside_predictions() -> None:
    rows = [line.split(" | ") for line in card_records.lines()]
    numbers = [row for row in rows if row[0].strip().isdigit()]
    assert [row[5].strip() for row in numbers] == ["188", "1,317", "261"]
    for *_, record, length, predicted, deviation in numbers:
        speed, published = (float(cell.replace(",", "")) for cell in (predicted, record))
        assert float(deviation.strip(" %")) == pytest.approx(100 * (speed / published - 1), abs=1)
        assert 1 < float(length) < 8


def test_the_best_tree_has_the_likeliest_nodes() -> None:
    assert count_trees.best_tree([[0.5, 0.3]], 2, branches=2) == (pytest.approx(1.8), [2])
    assert count_trees.best_tree([[0.5, 0.3]], 2, branches=1) == (pytest.approx(1.75), [1, 1])
    timed = count_trees.timed_case("qwen3-8b-eagle3")
    chain = timed(8, 4)
    assert count_trees.seconds(timed, 8, [1, 1, 1]) == pytest.approx(chain.seconds, rel=0.02)
    assert count_trees.seconds(timed, 8, [3]) < chain.seconds, "one pass of the draft in the place of three"
