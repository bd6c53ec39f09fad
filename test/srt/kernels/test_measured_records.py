"""Times measured on an owner's GPU: how they are kept and read, and what they decide. No GPU."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
import time
from pathlib import Path

import msgspec
import pytest

from sglang.srt.hardware.gpu_settings import FIELDS, GpuSettings, gpu_settings
from sglang.srt.kernels.measured import setting as setting_module
from sglang.srt.kernels.measured import store
from sglang.srt.kernels.measured.decision import decide
from sglang.srt.kernels.measured.records import Question, Record, Setting

SETTING = Setting("NVIDIA RTX PRO 6000", "595.10", "3.9.0", "2.13.0", "0.2.0", "abc", "600.00", "N/A/3090/14001")
LINEAR = Question("linear", "fp8_block", "4096x4096", 64)
TABLE, OTHER, THIRD = "tiles: BLOCK_M 64", "tiles: BLOCK_M 32", "tiles: BLOCK_M 16"


def record(candidate: str, *rounds: float, question: Question = LINEAR, problem: str = "") -> Record:
    return Record(question, candidate, rounds, 83e-6, problem)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "measured"


def test_records_come_back_and_newer_ones_take_the_place_of_older_ones(cache: Path) -> None:
    assert not store.anything_measured() and store.read(SETTING) == {}
    assert store.add(SETTING, [record(TABLE, 1e-5), record(OTHER, 2e-5)]) is None
    assert store.add(SETTING, [record(TABLE, 3e-5)]) is None
    assert store.anything_measured()
    assert {name: each.rounds for (_, name), each in store.read(SETTING).items()} == {TABLE: (3e-5,), OTHER: (2e-5,)}


@pytest.mark.parametrize("field", Setting.__struct_fields__)
def test_another_setting_has_other_records(cache: Path, field: str) -> None:
    store.add(SETTING, [record(TABLE, 1e-5)])
    assert store.read(msgspec.structs.replace(SETTING, **{field: "another"})) == {}


def test_a_file_under_the_name_of_another_setting_is_not_read(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    store.add(SETTING, [record(TABLE, 1e-5)])
    other = msgspec.structs.replace(SETTING, torch="2.14.0")
    store.path_of(SETTING).rename(store.path_of(other))
    assert store.read(other) == {} and "another setting" in caplog.text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"form": 1', '"form": 2'),
        ('"rounds"', '"times"'),
        ("[\n    0.00001\n   ]", "[]"),
        ("0.00001", "-1.0"),
        ("0.00001", '"fast"'),
        ('"tokens": 64', '"tokens": 6.5'),
        ("{", ""),
    ],
)
def test_a_bad_file_is_a_line_in_the_log(cache: Path, caplog: pytest.LogCaptureFixture, old: str, new: str) -> None:
    store.add(SETTING, [record(TABLE, 1e-5)])
    path = store.path_of(SETTING)
    assert len(store.read(SETTING)) == 1
    changed = path.read_text().replace(old, new, 1)
    assert changed != path.read_text()
    path.write_text(changed)
    assert store.read(SETTING) == {} and str(path) in caplog.text
    assert store.add(SETTING, [record(OTHER, 2e-5)]) is None, "and it is replaced by what is measured next"
    assert [name for _, name in store.read(SETTING)] == [OTHER]


def test_a_full_disk_costs_the_new_records_only(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add(SETTING, [record(TABLE, 1e-5)])

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left" in str(store.add(SETTING, [record(OTHER, 2e-5)]))
    assert [name for _, name in store.read(SETTING)] == [TABLE]
    assert sorted(path.suffix for path in cache.iterdir()) == [".json", ".lock"], "nothing half-written is left"


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert store.why_not_kept(SETTING) is not None
    assert store.add(SETTING, [record(TABLE, 1e-5)]) is not None
    assert store.read(SETTING) == {} and not store.anything_measured()


def test_of_two_servers_that_measure_at_once_neither_loses_records(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = store.read

    def slowly(setting: Setting) -> object:
        records = read(setting)
        time.sleep(0.01)
        return records

    monkeypatch.setattr(store, "read", slowly)
    names = [f"candidate {number}" for number in range(6)]
    threads = [threading.Thread(target=store.add, args=(SETTING, [record(name, 1e-5)])) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name for _, name in read(SETTING)) == names


# --- decisions --------------------------------------------------------------------------------------------------------


def chosen(*records: Record) -> str | None:
    decision = decide(TABLE, {each.candidate: each for each in records})
    return None if decision is None else decision.chosen.candidate


def test_a_choice_changes_only_beyond_the_noise() -> None:
    table = record(TABLE, 100e-6, 101e-6, 102e-6)
    assert chosen(table, record(OTHER, 90e-6, 91e-6, 92e-6)) == OTHER
    assert chosen(table, record(OTHER, 99e-6, 100e-6, 101e-6)) == TABLE, "faster in every round, within the noise"
    assert chosen(table, record(OTHER, 90e-6, 90e-6, 120e-6)) == TABLE, "rounds that lie far apart"
    assert chosen(table, record(OTHER, 90e-6, 91e-6)) == TABLE, "too few rounds"
    uneven = record(TABLE, 80e-6, 100e-6, 100e-6)
    assert chosen(uneven, record(OTHER, 79e-6, 79e-6, 79e-6)) == OTHER
    assert chosen(uneven, record(OTHER, 81e-6, 79e-6, 79e-6)) == TABLE, "slower in one round"
    assert chosen(table, record(OTHER, problem="wrong")) == TABLE
    assert chosen(table, record(OTHER, 90e-6, 91e-6, 92e-6), record(THIRD, 80e-6, 81e-6, 82e-6)) == THIRD
    exact = record(TABLE, 100e-6, 100e-6, 100e-6)
    assert chosen(exact, record(OTHER, 99.5e-6, 99.5e-6, 99.5e-6)) == TABLE, "a gain that is not worth a change"


def test_without_the_tables_own_time_nothing_is_decided() -> None:
    fast = record(OTHER, 1e-6, 1e-6, 1e-6)
    assert chosen(fast) is None
    assert chosen(record(TABLE, problem="it crashes"), fast) is None


def test_rounds_of_20_percent_noise_rarely_change_a_choice_between_equals_and_see_half_the_time() -> None:
    draw = random.Random(0)

    def times(seconds: float, rounds: int = 6) -> list[float]:
        return [seconds * draw.uniform(0.8, 1.2) for _ in range(rounds)]

    wrong = sum(chosen(record(TABLE, *times(1e-4)), record(OTHER, *times(1e-4))) == OTHER for _ in range(300))
    right = sum(chosen(record(TABLE, *times(1e-4)), record(OTHER, *times(5e-5))) == OTHER for _ in range(300))
    assert wrong == 0 and right > 285


def test_a_decision_says_both_times() -> None:
    decision = decide(TABLE, {TABLE: record(TABLE, 9e-5, 9e-5, 9e-5), OTHER: record(OTHER, 7e-5, 7e-5, 7.1e-5)})
    assert str(decision) == "measured here: 70 us, predicted 83; the table's took 90 us, predicted 83"


# --- the setting ------------------------------------------------------------------------------------------------------


def test_the_setting_is_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(words: object) -> str:
        asked.extend(words)  # type: ignore[arg-type]
        return "595.10, 600.00, [N/A], 3090, 14001\n"

    assert gpu_settings("0000:c1:00.0", run) == GpuSettings("595.10", "600.00", "[N/A]/3090/14001")
    assert "--id=0000:c1:00.0" in asked and len(FIELDS) == 5
    monkeypatch.setattr(setting_module, "pci_address", lambda gpu: "0000:c1:00.0")
    monkeypatch.setattr(setting_module, "device_name", lambda gpu: "NVIDIA GeForce RTX 5090")
    setting = setting_module.setting_here(0, run)
    assert setting is not None and setting.power_limit == "600.00" and len(setting.kernels) == 12
    assert json.loads(msgspec.json.encode(setting))["gpu"] == "NVIDIA GeForce RTX 5090"


@pytest.mark.parametrize("output", ["", "595.10, 600.00\n", None])
def test_a_driver_that_does_not_say_all_has_no_setting(output: str | None) -> None:
    def run(words: object) -> str:
        if output is None:
            raise FileNotFoundError("nvidia-smi")
        return output

    assert gpu_settings("0000:c1:00.0", run) is None and gpu_settings(None, run) is None


def test_nothing_measured_asks_no_driver(cache: Path) -> None:
    def asked(gpu: int) -> Setting:
        raise AssertionError("the driver is asked")

    assert setting_module.records_here(0, asked) == (None, {})
    store.add(SETTING, [record(TABLE, 1e-5)])
    assert setting_module.records_here(0, lambda gpu: None) == (None, {})
    assert len(setting_module.records_here(0, lambda gpu: SETTING)[1]) == 1
