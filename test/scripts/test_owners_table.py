"""From an owner's file to a table of the repository, and to constants of the cost model."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from sglang.bench import card
from sglang.measuring.record_ops import config_of, product_of
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.measured.questions import candidate_name
from sglang.srt.kernels.measured.records import Record, Setting, from_bytes, to_bytes
from sglang.tuning.candidate_times import predicted_with
from sglang.tuning.cost_model import constants_of
from sglang.tuning.ops import describe, parse_shape

ROOT = Path(__file__).parents[2]
CARD = arch_by_name("rtx-5090")
SETTING = Setting("NVIDIA GeForce RTX 5090", "595.10", "3.9.0", "2.13.0", "0.2.0", "abc", "575.00", "3090")


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


owners_table, refit = load("scripts/owners_table.py"), load("lab/kernels/card/refit_records.py")
SHAPES = [
    *(f"linear tokens={t} rows={n} cols=4096 scheme=fp8_block" for t in (16, 64, 512) for n in (4096, 6144, 12288)),
    *(f"fused_moe tokens={t} num_experts=128 top_k=8 hidden=2048 intermediate=768 scheme=fp8_block" for t in (64, 512)),
]


def rows() -> list[card.Row]:
    """What a card takes whose products have a higher latency and overhead than the cost model's."""
    truth = constants_of(CARD).replaced({"latency": 1.8e-6, "step_overhead": 2e-7})
    found = []
    for shape in SHAPES:
        op = parse_shape(shape)
        today = predicted_with(op, CARD, None, None)
        record = card.card_record(op, CARD, 1.0, None)
        assert today is not None and record is not None
        true = predicted_with(op, CARD, config_of(record.candidate), None, truth)
        assert true is not None
        found.append(card.Row(describe(op), today.seconds * 1e6, 0.1, true.seconds * 1e6, None, False, 1.0))
    return found


def test_the_texts_of_records_are_read_back() -> None:
    for shape in SHAPES:
        op = parse_shape(shape)
        record = card.card_record(op, CARD, 1e-5, None)
        assert record is not None and product_of(record.question) == op
        config = config_of(record.candidate)
        assert config is not None and candidate_name(config.variant, config.tiles) == record.candidate
    assert config_of("cublas") is None


def test_a_file_of_the_card_kit_becomes_a_table_with_its_provenance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = tmp_path / "card-times.json"
    records = card.records_of(rows(), CARD)
    assert len(records) == len(SHAPES) and all(len(record.rounds) == 1 for record in records.values())
    report = {"card": {}, "rows": [], "measured": json.loads(to_bytes(SETTING, records))}
    sent.write_text(json.dumps(report))
    assert owners_table.main([str(sent), "--from", "A. B., 2026-12-01"], tmp_path / "owners") == 0
    (path,) = (tmp_path / "owners").iterdir()
    table = from_bytes(path.read_bytes())
    assert table.provenance == "A. B., 2026-12-01" and table.setting == SETTING
    assert {(each.question, each.candidate): each for each in table.records} == records

    more = {key: Record(each.question, each.candidate, (1e-3,) * 3) for key, each in list(records.items())[:1]}
    (tmp_path / "tune.json").write_bytes(to_bytes(SETTING, more))
    assert owners_table.main([str(tmp_path / "tune.json"), "--from", "C. D."], tmp_path / "owners") == 0
    table = from_bytes(path.read_bytes())
    assert table.provenance == "A. B., 2026-12-01; C. D." and len(table.records) == len(records)
    assert sum(len(each.rounds) == 3 for each in table.records) == 1

    for content in ("{}", json.dumps({"rows": []}), "no JSON"):
        sent.write_text(content)
        assert owners_table.main([str(sent), "--from", "x"], tmp_path / "owners") == 2
        assert str(sent) in capsys.readouterr().err


def test_a_refit_says_how_the_error_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(to_bytes(SETTING, card.records_of(rows(), CARD), "A. B."))
    assert refit.main([str(path), "--rounds", "3"]) == 0
    said = capsys.readouterr().out
    today, others, fitted = (float(line.rsplit(" ", 1)[1]) for line in said.splitlines()[1:4])
    assert fitted < 0.7 * today and others < today and "step_overhead=" in said
    path.write_bytes(to_bytes(Setting("A card", *(["1"] * 7)), {}))
    assert refit.main([str(path)]) == 2
