"""The models of `tuning` against this project's times of an H200, and counted instructions against the machine code."""

from __future__ import annotations

import json
import math

import count_instructions
import fit_h200
import machine_code
import pytest

from sglang.srt.hardware.arch import arch_by_name
from sglang.tuning import instructions
from sglang.tuning.ops import parse_shape
from sglang.tuning.predicted_times import predicted

CARD, H200 = arch_by_name("rtx-pro-6000-server"), arch_by_name("h200")
RUN = list(fit_h200.card_run())
ANOTHER_KERNEL = "gated_delta_rule"
"""Its prompts have another one since, which `test_card_times` compares with an H100's times."""


def test_the_file_has_the_whole_run() -> None:
    assert len(RUN) == 113
    assert sum(row.seconds for row in RUN if row.op.kind == "gated_delta_rule") == pytest.approx(1475e-6, rel=0.01)


@pytest.mark.parametrize(
    ("op", "most"),
    [("fused_moe", 0.10), ("decode_attention", 0.12), ("extend_attention", 0.15), (ANOTHER_KERNEL, 0.20)],
)
def test_an_h200_is_known(op: str, most: float) -> None:
    """Decode's times are of the tiles of that day; with those it was 0.09."""
    rows = [row for row in RUN if row.op.kind == op and (op != ANOTHER_KERNEL or row.op.tokens == 1)]
    errors = [fit_h200.error_of(row) for row in rows]
    assert fit_h200.rms(errors) < most
    assert abs(math.fsum(errors) / len(errors)) < 0.12


def test_the_parts_of_a_merge_are_counted() -> None:
    """One kv head and 32,768 tokens: 512 pieces, which took 32 rounds; now two."""
    shape = "decode_attention batch=1 context=32768 heads=12 kv_heads=1 head_dim=128"
    (measured,) = [row for row in RUN if row.op == parse_shape(shape)]
    then, now = math.exp(fit_h200.error_of(measured)) * measured.seconds, predicted(measured.op, H200)
    assert now is not None and then - now.seconds == pytest.approx(30 * 1.2e-6, rel=0.01)


# --- counts -----------------------------------------------------------------------------------------------------------


def test_a_count_comes_out_again() -> None:
    """The first of the tiles; Triton here may be another than the file's."""
    pytest.importorskip("triton")
    content = json.loads(instructions.COUNTS.read_text())
    form, name, count = next(count_instructions.tiles(CARD))
    assert count == pytest.approx(content["tiles"][form][name], rel=0.15)


def test_loops_of_machine_code() -> None:
    text = """
.L_x_1:
        /*0010*/                   LDS R1, [R2] ;
        /*0020*/              @!P0 HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
.L_x_2:
        /*0030*/                   IADD3 R1, R1, 0x1, RZ ;
        /*0040*/               @P1 BRA `(.L_x_2) ;
        /*0050*/                   NOP ;
        /*0060*/               @P2 BRA `(.L_x_1) ;
        /*0070*/                   EXIT ;
"""
    assert machine_code.loops(text) == [machine_code.Loop(0, 2), machine_code.Loop(1, 4)]
