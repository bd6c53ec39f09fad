"""sgl-kernel's record of what its kernels cost: its rules hold, and it is of these sources and of what nvcc gives."""

from __future__ import annotations

import json
from collections import Counter
from types import ModuleType

import pytest


def test_rules_hold_of_the_record(record: ModuleType) -> None:
    recorded = json.loads(record.FILE.read_text())
    assert set(recorded["rows"]) == set(record.TARGETS)
    for target, rows in recorded["rows"].items():
        sizes = Counter(name.split()[0] for name in rows)
        products = {} if target == "90a" else {"gate_up": 2, "down": 2}
        assert sizes == {"all_reduce": 3 * 3 * 2 + 2, "exchange": 2, **products}
        assert record.broken_rules(rows) == []


def test_record_is_of_these_sources(record: ModuleType) -> None:
    assert json.loads(record.FILE.read_text())["sources"] == record.sources_digest(), (
        "sgl-kernel/csrc has changed: run python sgl-kernel/record.py --update, which needs nvcc"
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"spills": 8}, "8 B spilled"),
        ({"stack": 16}, "a stack of 16 B"),
        ({"shared": 101_377}, "101377 B of shared memory"),
        ({"shared": 0}, "0 B of shared memory"),
        ({"instructions": {"QMMA.SF.16832.F32.E4M3.E2M1.E8": 64}}, "lacks"),
        ({"instructions": {"HMMA.16816.F32.BF16": 64}}, "multiplies with HMMA"),
    ],
)
def test_broken_rules_are_named(record: ModuleType, change: dict, says: str) -> None:
    rows = json.loads(record.FILE.read_text())["rows"]["120f"]
    name = "gate_up 64x128x128 4 stages"
    assert any(text.startswith(name) and says in text for text in record.broken_rules({name: rows[name] | change}))


@pytest.mark.parametrize(
    ("name", "lacks", "has", "says"),
    [
        ("all_reduce one_shot bfloat16", "MEMBAR.ALL.SYS", {}, "lacks MEMBAR.ALL.SYS"),
        ("all_reduce two_shot bfloat16 norm", "CCTL.IVALL", {}, "lacks CCTL.IVALL"),
        ("all_reduce packed bfloat16", "STG.E.128.STRONG.SYS", {}, "lacks STG.E.128.STRONG.SYS"),
        ("all_reduce packed float16 norm", "ACQBULK", {}, "lacks ACQBULK"),
        ("exchange packed", "LDG.E.128.STRONG.SYS", {}, "lacks LDG.E.128.STRONG.SYS"),
        ("exchange one_shot", "CCTL.IVALL", {}, "lacks CCTL.IVALL"),
        ("all_reduce two_shot_e4m3 bfloat16", "MEMBAR.ALL.SYS", {}, "lacks MEMBAR.ALL.SYS"),
        ("all_reduce packed float32", "", {"ATOMG.E.ADD.STRONG.SYS": 1}, "has ATOMG.E.ADD.STRONG.SYS, which no PCIe"),
        ("all_reduce one_shot float16", "", {"LDGMC.E.ADD": 1}, "has LDGMC.E.ADD"),
    ],
)
def test_collectives_without_their_order_are_named(
    record: ModuleType, name: str, lacks: str, has: dict, says: str
) -> None:
    row = json.loads(record.FILE.read_text())["rows"]["120f"][name]
    row["instructions"] = {each: count for each, count in row["instructions"].items() if each != lacks} | has
    assert any(text.startswith(f"{name}: {says}") for text in record.broken_rules({name: row}))


def test_a_falsified_row_differs(record: ModuleType) -> None:
    recorded = json.loads(record.FILE.read_text())
    rows = json.loads(json.dumps(recorded["rows"]["120f"]))
    assert record.differences(recorded, "120f", rows, recorded["nvcc"]) == []
    name = next(iter(rows))
    recorded["rows"]["120f"][name]["registers"] -= 1
    assert record.differences(recorded, "120f", rows, recorded["nvcc"])[0].startswith(f"sm_120f {name}")


@pytest.mark.thorough
def test_compiles_to_what_is_on_record(record: ModuleType) -> None:
    """Takes half a minute of nvcc. That the record is of these sources is tested without it."""
    compiler, dump = record.find_nvcc(), record.cuobjdump()
    if compiler is None or dump is None:
        pytest.skip("needs nvcc and cuobjdump")
    rows = record.compile_rows(dump, "120f")
    recorded = json.loads(record.FILE.read_text())
    assert record.broken_rules(rows) == []
    assert record.differences(recorded, "120f", rows, record.nvcc_version(compiler)) == []


WAYS = {"packed": "at most {}", "one_shot": "at most {}", "two_shot": "{}", "two_shot_e4m3": "{}"}


def test_documentation_has_the_registers_of_the_record(record: ModuleType) -> None:
    rows = json.loads(record.FILE.read_text())["rows"]["120f"]
    text = (record.ROOT.parent / "docs" / "kernels.md").read_text()
    for way, most in WAYS.items():
        registers = max(row["registers"] for name, row in rows.items() if name.startswith(f"all_reduce {way} "))
        assert f"| `{way}` | {most.format(registers)} |" in text
