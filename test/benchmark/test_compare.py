"""The table of compare.py: above 1 is better than the peer, of times as of throughputs."""

from __future__ import annotations

from typing import Any

import compare


def side(factor: float) -> dict[str, Any]:
    """Throughputs times `factor`, times through it."""
    load = {key: 100 / factor if better_low else 100 * factor for key, (_, better_low) in compare.LOAD_COLUMNS.items()}
    return {
        "latency": [{"batch": 1, "decode_ms": 10 / factor, "prefill_tok_s": 1000 * factor}],
        "server": {"load": [{"concurrency": 64, **load}], "full_batch": {"median_itl_ms": 15 / factor}},
    }


def test_every_ratio_of_a_server_that_is_twice_as_good_is_two() -> None:
    lines = compare.table({"models/Tiny": {"ours": side(2), "peer_triton": side(1)}}).splitlines()
    rows = [line for line in lines if " peer_triton " in line]
    assert len(rows) == 2 + len(compare.LOAD_COLUMNS)
    assert all(line.endswith("(2.000x)") for line in rows)
    assert any("ours: 7.50 ms between tokens at batch 64, 1.500 of a step" in line for line in lines)


def test_a_peer_that_served_nothing_leaves_our_figures() -> None:
    text = compare.table({"models/Tiny": {"ours": side(1), "peer_triton": {}}})
    assert "output tok/s" in text and "x)" not in text


def test_a_step_has_as_many_tokens_as_the_largest_batch() -> None:
    """Memory is planned for a step of so many tokens; -1 would plan for one of a whole context."""
    flag, tokens = compare.IN_ONE_STEP
    assert flag == "--chunked-prefill-size" and int(tokens) == max(compare.BATCH_SIZES) * compare.INPUT_LEN
