"""Rows that are made of launches: their names, their forms, and when there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("triton")

from sglang.ledger import rules
from sglang.ledger.coverage import Coverage
from sglang.ledger.forms import facts_of, read_forms, write_forms
from sglang.ledger.launch_form import Launches, recording
from sglang.ledger.measure import variant_table
from sglang.ledger.record import recorded
from sglang.ledger.variant import Variant
from sglang.srt.configs.activation import SILU
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.ledger_file import RowKey, read_lock
from sglang.srt.layers.triton_ops import activation
from sglang.srt.plan.layer_spec import AttentionShape
from srt.kernels.census.every_model import launch_embedding_rows
from srt.kernels.census.gqa import launch_attention
from srt.kernels.census.mlp import launch_activation
from srt.kernels.census.products import launch_products

ARCH = arch_by_name("rtx-pro-6000-server")
Table = dict[RowKey, Variant]


def launched(*launches: Callable[[], None]) -> Launches:
    with recording("sm_120") as found:
        for launch in launches:
            launch()
    return found


def rows(op: str, part: str = "") -> Table:
    return {key: variant for key, variant in variant_table("sm120").items() if key[0] == op and part in key[1]}


def attention() -> Launches:
    """Of one token and of draft tokens, with a cap and sinks and without."""
    shape = AttentionShape(8, 2, 128, 128)
    layers = ((0.0, False), (30.0, False), (30.0, True))
    return launched(*(partial(launch_attention, shape, 0, *layer, ARCH) for layer in layers))


def test_another_block_is_another_row_of_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which was never measured, and takes the place of the one that nobody launches."""
    monkeypatch.setattr(activation, "SMALL_BLOCK", activation.SMALL_BLOCK | {"BLOCK": 4096})
    table = recorded("sm120", rows("silu_and_mul"), launched(lambda: launch_activation(SILU, 4096)))
    of_small = [tile for _, key, tile in table if key == "small"]
    assert of_small == ["w4 s3 BLOCK4096"]
    problems = rules.missing("sm120", read_lock("sm120"), table)
    assert any("silu_and_mul/small tile w4 s3 BLOCK4096 is not in the lock" in problem for problem in problems)


def test_parameters_that_changed_are_taken_from_launches() -> None:
    """The row keeps its name, and stays one that is only stepped down to."""
    before = rows("silu_and_mul")
    fewer = {key: {name: kind for name, kind in row.signature.items() if name != "size"} for key, row in before.items()}
    old = {key: replace(row, signature=fewer[key], default=False) for key, row in before.items()}
    table = recorded("sm120", old, launched(lambda: launch_activation(SILU, 4096)))
    assert table and {key: facts_of(row) for key, row in table.items()} == {
        key: facts_of(replace(row, default=False)) for key, row in before.items() if not key[1].endswith("/odd")
    }


def test_a_row_has_all_features_that_cost_no_form_of_their_own() -> None:
    """And each tile that is launched, called as the server looks for it."""
    found = attention()
    known = rows("decode_attention") | rows("extend_attention")
    missing = [key for key in known if key[0] == "decode_attention" and key[1].startswith("128x128/bfloat16/bfloat16/")]
    table = recorded("sm120", {key: variant for key, variant in known.items() if key not in missing}, found)
    made = {key: variant for key, variant in table.items() if key not in known or key in missing}
    assert {key[1].rpartition("/")[0] for key in made} == {"128x128/bfloat16/bfloat16"}
    assert {key[2] for key in made} == {key[2] for key in missing}
    assert all(variant.constexprs["HAS_GUESSES"] for variant in made.values())
    assert {variant.default for variant in made.values()} == {True, False}
    assert not Coverage(table).uncovered(found)


def test_a_format_of_weights_gets_rows_of_its_own() -> None:
    """Though another format's products are the same."""
    scheme = SCHEMES["fp8_tensor"]
    found = launched(lambda: launch_products(4096, 4096, True, scheme, False, ARCH))
    table = recorded("sm120", rows("linear", "fp8_channel") | rows("quantize_activation"), found)
    pieces = [key[1].split("/") for key in table if key[0] == "linear"]
    assert {piece[0] for piece in pieces} == {"few", "tiles"} and {piece[1] for piece in pieces} == {"fp8_tensor"}


def test_a_kernel_without_rows_gets_them() -> None:
    table = recorded("sm120", {}, launched(lambda: launch_embedding_rows(1000, 4096)))
    assert list(table) == [("embedding_rows", "all", "w4 s3 BLOCK1024")]


def test_a_row_says_how_it_differs_from_one_that_has_its_name() -> None:
    known = rows("embedding_rows")
    found = launched(*(partial(launch_embedding_rows, 1000, hidden) for hidden in (4096, 1001)))
    (name,) = known
    assert list(recorded("sm120", known, found)) == [name, (name[0], "all/size i32", name[2])]
    assert list(recorded("sm90", known, found)) == [name], "where not every launch has a row"


def test_forms_are_read_as_they_were_written(tmp_path: Path) -> None:
    table = variant_table("sm120")
    write_forms("sm120", table, tmp_path)
    assert read_forms("sm120", tmp_path) == table
