"""Each row of attention over keys of one width: its tile forced, on lengths that it does not divide.

Only `scripts/execute_kernels.py` runs it, over executed PTX (`@interpreter.kernel_test`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import interpreter
import pytest
import torch
from ledger.rows.ledger_rows import parts_of, rows_of
from srt.layers.attention.reference import Problem, reference_decode, reference_extend, relative_error
from srt.layers.attention.test_attention_kernels import MLA_LATENTS, bound, run_decode, run_extend, sink_logits

CACHES = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
FEATURES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "cap_sinks": {"logit_cap": 30.0, "sinks": True},
    "window_cap_sinks": {"logit_cap": 30.0, "sinks": True, "window": 20},
    "window_both_ways": {"window": 20, "causal": False},
    "window_chunks": {"window": 20, "chunked": True},
}
"""Last word of a row's name -> what the launch has."""
REST = {"ctas_per_sm": 2, "waves": 1}


def rows(op: str) -> list[str]:
    return [row for row in rows_of(op) if row.split("/")[3] in CACHES and row.split("/")[4] in FEATURES]


def problem(words: list[str], lens: list[int], new: list[int]) -> Problem:
    dims = tuple(int(number) for number in words[0].split("x"))
    heads, latent = ((16, 1) if dims in MLA_LATENTS else (6, 2)), dims in MLA_LATENTS
    kv_dtype = None if words[2] == "bfloat16" else CACHES[words[2]]
    more = {} if kv_dtype is None else {"kv_dtype": kv_dtype}
    return Problem(lens, new, *heads, *dims, v_in_k=latent, device=interpreter.DEVICE, **more)


def check(p: Problem, feature: str, run: Any, reference: Any, tile: dict[str, int]) -> None:
    options = dict(FEATURES[feature])
    if "sinks" in options:
        options["sinks"] = sink_logits(p)
    expected = reference(p, p.head_dim**-0.5, **options)
    if "window" in options:
        options["sliding_window"] = options.pop("window")
    assert relative_error(run(p, tile, torch.bfloat16, **options), expected) < 2 * bound(p)


@interpreter.kernel_test
@pytest.mark.parametrize("row", rows("decode_attention"))
def test_decode(row: str) -> None:
    words, tile = parts_of(row)
    lens = [0, 2 * tile["BLOCK_N"] + 3]
    check(problem(words, lens, [1, 1]), words[3], run_decode, reference_decode, REST | tile)


@interpreter.kernel_test
@pytest.mark.parametrize("row", rows("extend_attention"))
def test_extend(row: str) -> None:
    words, tile = parts_of(row)
    lens, new = [0, tile["BLOCK_N"] + 5], [1, 37]
    check(problem(words, lens, new), words[3], run_extend, reference_extend, tile)
