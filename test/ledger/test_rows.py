"""The names of the ledger's rows, as tests that launch each one read them."""

from __future__ import annotations

import pytest
from ledger.rows.ledger_rows import parts_of, rows_of

from sglang.srt.kernels.ledger_file import tile_key


@pytest.mark.parametrize("op", ["linear/tiles", "linear/few", "fused_moe/gate_up", "fused_moe/down"])
def test_tiles_are_read_as_they_were_written(op: str) -> None:
    rows = rows_of(op)
    assert len(rows) > 90 and len(set(rows)) == len(rows)
    for row in rows:
        words, tile = parts_of(row)
        assert f"{op.partition('/')[0]}/{'/'.join(words)}/{tile_key(tile)}" == row
