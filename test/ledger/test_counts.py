"""What an execution counts, by the layout of a card's memory, and what `explain --why-slow` says of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sglang.explain import main
from sglang.ledger.ptx.counts import Counts, class_of
from sglang.ledger.why_slow import busy, executed_counts, rows_of
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import arch_by_name

LANES = np.arange(32)
CARD = arch_by_name("rtx-pro-6000-server")
NOTHING = {
    "kernel": "k", "grid": [2, 1, 1], "threads": 32, "instructions": {}, "mma": {},
    "global": {"asked": 0, "sectors": 0, "touched": 0}, "shared": {"turns": 0, "conflicts": 0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("stride", "size", "sectors"),
    [(4, 4, 4), (16, 16, 16), (32, 4, 32), (0, 4, 1), (128, 16, 32)],
    ids=["neighbours", "vectors", "a sector each", "one place", "far apart"],
)
def test_sectors_of_a_warp(stride: int, size: int, sectors: int) -> None:
    counts = Counts()
    counts.global_access((LANES * stride + 4096).astype(np.uint64), LANES, size)
    assert (counts.sectors, counts.asked, counts.touched) == (sectors, 32 * size, 32 * sectors)


def test_sectors_are_each_warp_s_and_touched_once() -> None:
    counts = Counts()
    lanes = np.arange(64)
    counts.global_access((lanes % 32 * 4).astype(np.uint64), lanes, 4)
    counts.global_access((LANES * 4).astype(np.uint64), LANES, 4)
    assert (counts.sectors, counts.touched) == (12, 128)


@pytest.mark.parametrize(
    ("stride", "size", "turns", "conflicts"),
    [(4, 4, 1, 0), (8, 4, 2, 1), (128, 4, 32, 31), (0, 4, 1, 0), (2, 2, 1, 0), (16, 16, 4, 0), (128, 16, 32, 28),
     (8, 8, 2, 0), (144, 16, 4, 0)],
    ids=["neighbours", "every other word", "one bank", "one word", "halves of words", "vectors", "vectors of one bank",
         "pairs", "padded rows"],
)  # fmt: skip
def test_turns_of_shared_memory(stride: int, size: int, turns: int, conflicts: int) -> None:
    counts = Counts()
    counts.shared_access(LANES * stride, LANES, size)
    assert (counts.turns, counts.conflicts) == (turns, conflicts)


def test_warps_take_turns() -> None:
    counts = Counts()
    lanes = np.arange(64)
    counts.shared_access(lanes * 4, lanes, 4)
    assert (counts.turns, counts.conflicts) == (2, 0)


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("ld.global.v4.b32", "global"), ("ld.shared.b32", "shared"), ("st.shared::cta.b32", "shared"),
        ("ld.param.b64", "move"), ("atom.global.gpu.relaxed.add.u32", "global"), ("ld.local.b32", "local"),
        ("cp.async.cg.shared.global", "global"), ("cp.async.commit_group", "control"), ("fma.rn.f32", "float"),
        ("add.s32", "integer"), ("setp.lt.f32", "float"), ("ex2.approx.ftz.f32", "special"), ("div.s32", "integer"),
        ("div.full.f32", "special"), ("cvt.rn.bf16x2.f32", "convert"), ("bar.sync", "control"), ("mov.b32", "move"),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", "shared"), ("shfl.sync.bfly.b32", "shuffle"),
    ],
)  # fmt: skip
def test_classes(opcode: str, kind: str) -> None:
    assert class_of(opcode) == kind


def test_products_are_counted_by_type() -> None:
    counts = Counts()
    counts.instructions("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", 3)
    assert counts.content()["mma"] == {"m16n8k16 bf16": 3}
    assert counts.content()["instructions"] == {"mma": 3}


def test_units_by_their_rates() -> None:
    mma = 188 * 2_400_000_000 * 1024 // (2 * 16 * 8 * 16) // 1000
    times = busy({**NOTHING, "mma": {"m16n8k16 bf16": mma}, "instructions": {"move": 10**9}}, CARD)
    assert times["matrix unit"] == pytest.approx(1000, rel=0.1)  # a millisecond of 1,024 operations a clock and SM
    assert times["instructions"] == 0
    times = busy({**NOTHING, "global": {"asked": 0, "sectors": 0, "touched": 1_536_000}}, CARD)
    assert max(times, key=times.__getitem__) == "memory" and times["memory"] == pytest.approx(1, rel=0.01)


def test_the_largest_launch_of_a_row_counts(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    larger = {**NOTHING, "grid": [4, 2, 1]}
    path.write_text(json.dumps({"a": {"op/row": NOTHING}, "b": {"op/row": larger, "other/row": NOTHING}}))
    assert executed_counts(path)["op/row"]["grid"] == [4, 2, 1]
    assert list(rows_of("op", path)) == ["op/row"]
    with pytest.raises(UserError, match="known: op, other"):
        rows_of("o", path)


def test_explain_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--why-slow", "linear/gemv"]) == 0
    text = capsys.readouterr().out
    for word in ("instructions", "sectors of 32 B", "shared memory", "busy longest", "no GPU ran them"):
        assert word in text
    assert main(["--why-slow", "linear/gemv", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all(row.startswith("linear/gemv/") and counts["busy_us"] for row, counts in rows.items())
    assert main(["--why-slow", "gemm"]) == 2
    assert "known: " in capsys.readouterr().err
