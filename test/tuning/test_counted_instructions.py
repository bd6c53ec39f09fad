"""What predicted times take from counted instructions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.hardware.arch import arch_by_name
from sglang.tuning import instructions
from sglang.tuning.attention_model import Prompt
from sglang.tuning.cost_model import LANES_PER_SM, SM120
from sglang.tuning.ops import Experts, parse_shape
from sglang.tuning.predicted_times import predicted
from sglang.tuning.rates import ceilings_of, rates_of
from sglang.tuning.streaming import ISSUED, LAUNCH, reading_seconds
from sglang.tuning.upstream_attention import PROMPT, PROMPT_TIMES

CARD, H200 = arch_by_name("rtx-pro-6000-server"), arch_by_name("h200")


def test_four_bits_without_instructions_for_them_take_longer_than_reading() -> None:
    """What the first prediction said was the time of reading: a third of the measured one."""
    for scheme in ("int4_g32", "nvfp4", "mxfp4"):
        op = Experts(16, 384, 8, 7168, 256, scheme)
        found = predicted(op, H200)
        assert found is not None and found.seconds > 1.5 * (2 * LAUNCH + reading_seconds(op.num_bytes, H200)), scheme


def test_prompts_of_one_stage_wait_for_keys_and_products_in_turn() -> None:
    """SGLang's kernels on an RTX PRO 6000, by counting, beside what was fitted on their times there."""
    rates, unit = rates_of(CARD), ceilings_of(CARD).products["half"] * 1e-6 / CARD.num_sms
    for dims in ((128, 128), (192, 128), (512, 512), (576, 512)):
        m, n, compiled = PROMPT[dims[0]]
        assert compiled.warps == 8 and compiled.occupancy == 1
        multiplied = 2.0 * m * n * sum(dims) / unit
        issued = m * n * 11.0 / (LANES_PER_SM * rates.clock * 1e-6 * ISSUED)
        arriving = n * sum(dims) * 2 / (rates.l2_bytes_per_clock * rates.clock) * 1e6 + SM120.latency * 1e6
        step = PROMPT_TIMES[str(dims[0])].busy
        assert multiplied + issued + arriving == pytest.approx(step, rel=0.17), dims


def test_every_form_that_is_widened_or_streamed_is_counted() -> None:
    for arch in (CARD, H200):
        for scheme in SCHEMES:
            counts = instructions.streamed(scheme, arch.name)
            assert 3 < counts.gate_up <= counts.down * 1.3 and 3 < counts.few_rows < 15
            if SCHEMES[scheme].bits == 4:
                unit = "wgmma" if arch == H200 else "mma"
                assert 2 < instructions.dequantize_cost(scheme, unit).each < 9
    assert instructions.dequantize_cost("mxfp8", "wgmma").each == instructions.OTHER


def test_more_columns_than_rows_share_the_widening_out() -> None:
    """What the tiles of e2m1 beside e4m3 were chosen by: where each warp converts weights that others convert, too, it
    takes more instructions."""
    counted = instructions.dequantize_cost("mxfp4_mxfp8", "mma", to_half=False).counted
    assert max(count for (_, m, n, _), count in counted.items() if n > m) < 3.6 < 4 < counted[1, 128, 128, 8]


def test_head_dims_that_nobody_counted_take_the_next() -> None:
    here = [instructions.pair_instructions((dim, dim), "sm_120") for dim in (64, 80, 128, 256, 512)]
    assert here == sorted(here) and here[1] == here[2] and here[4] == 2 * here[3]
    prompts = [
        predicted(parse_shape(f"extend_attention batch=1 new=8192 heads=8 kv_heads=1 head_dim={dim}"), CARD)
        for dim in (64, 128, 256)
    ]
    assert all(time is not None for time in prompts)
    assert Prompt(1, 8192, 8, 1, 64, 64).operations > 0


def test_the_files_say_how_they_were_made() -> None:
    content = json.loads(instructions.COUNTS.read_text())
    assert "count_instructions.py" in content["made by"] and content["triton"].startswith("3.")
    assert Path(instructions.COUNTS).stat().st_size < 12_000
