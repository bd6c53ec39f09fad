"""What is said before and behind the parts that need several GPUs: missing packages at once, and a table."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import parts
import pytest
import requirements


def install(folder: Path, name: str, *requires: str) -> None:
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {text}" for text in requires)]
    (info / "METADATA").write_text("\n".join(lines) + "\n")


def test_what_is_missing_is_named_with_who_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "web-frame", "not-there>=2", "never; python_version < '3'", "for-tests; extra == 'test'")
    install(tmp_path, "uses-extra", "web.frame", 'only-extra; extra == "full"')
    monkeypatch.syspath_prepend(str(tmp_path))
    assert requirements.missing(["Web_Frame>=1"]) == ["not-there (of web-frame 1.0)"]
    assert requirements.missing(["uses-extra[full]"]) == [
        "only-extra (of uses-extra 1.0)",
        "not-there (of web-frame 1.0)",
    ]
    assert requirements.missing(["gone; sys_platform == 'never'"]) == []


def test_the_projects_dependencies_are_read() -> None:
    names = requirements.named_dependencies()
    assert {"fastapi>=0.115", "torch>=2.9", "regex"} <= set(names)
    assert requirements.complaint() == "", "this environment serves"


def test_what_is_missing_and_not_needed_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(requirements, "named_dependencies", lambda: ["not-there"])
    monkeypatch.setattr(requirements, "IMPORTS", ("json",))
    assert requirements.complaint() == "" and "not-there (of sm120-sglang)" in capsys.readouterr().out
    monkeypatch.setattr(requirements, "IMPORTS", ("json", "not_there.at_all"))
    complaint = requirements.complaint()
    assert "No module named 'not_there'" in complaint and "not-there (of sm120-sglang)" in complaint


def test_a_part_ends_at_once_where_servers_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(requirements, "complaint", lambda: "No module named 'x'")
    assert parts.main(["answers", "--out", str(tmp_path / "out")]) == 2
    assert "No module named 'x'" in capsys.readouterr().out and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("right", "status"), [(True, 0), (None, 0), (False, 1)])
def test_the_table_and_the_status(
    right: bool | None, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(requirements, "complaint", lambda: "")
    rows = lambda bench: (bench.row("steps", "2.59 ms"), bench.row("ours / peer", "1.1x", "1.2x", right))  # noqa: E731
    monkeypatch.setitem(parts.PARTS, "load", (rows, 5.0))
    assert parts.main(["load", "--out", str(tmp_path), "--device", "cpu"]) == status
    said = {True: "  ok", False: "  WRONG", None: ""}[right]
    assert f"steps        2.59 ms\nours / peer  1.1x     1.2x{said}\n" in capsys.readouterr().out


class _Servers:
    """Each is up at once, or fails."""

    def __init__(self, *_: object) -> None:
        pass

    def start(self, name: str, *_: object, **__: object) -> Future[SimpleNamespace]:
        future: Future[SimpleNamespace] = Future()
        if name == "peer" and not self.peer_starts:
            future.set_exception(RuntimeError("no peer"))
        else:
            future.set_result(SimpleNamespace(start_seconds=1.0))
        return future

    peer_starts = True


@pytest.mark.parametrize(("slower", "starts", "wrong"), [(1.3, True, []), (1.1, True, ["64", "256"]), (1.3, False, [])])
def test_load_is_judged_beside_the_peers_of_the_same_run(
    slower: float, starts: bool, wrong: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that is `slower`; where it does not start, ours is measured all the same."""
    monkeypatch.setattr(parts, "Servers", _Servers)
    monkeypatch.setattr(_Servers, "peer_starts", starts)
    factor = lambda name: slower if "peer" in name else 1.0  # noqa: E731
    monkeypatch.setattr(parts.Bench, "alone", lambda _, name, server: (10 * factor(name), 2 * factor(name)))
    monkeypatch.setattr(parts.Bench, "served", lambda _, name, server: [600 / factor(name), 900 / factor(name)])
    window = parts.Window(tmp_path, 60)
    bench = parts.Bench(window, parts.EMBEDDED, cpu=False, peer_site="somewhere")
    parts.served_load(bench)
    assert bool(window.failures) != starts
    ratios = {row.name: row for row in bench.rows}
    assert len(ratios) == (4 if starts else 0)
    assert all(row.value == f"{slower:.2f}x" for row in ratios.values())
    assert [name.split()[0] for name, row in ratios.items() if not row.right] == wrong


def test_a_part_without_rows_has_shown_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "complaint", lambda: "")

    def fails(bench: parts.Bench) -> None:
        with bench.window.part("load"):
            raise RuntimeError("no server")

    monkeypatch.setitem(parts.PARTS, "load", (fails, 5.0))
    assert parts.main(["load", "--out", str(tmp_path), "--device", "cpu"]) == 1


@pytest.mark.parametrize(("models", "one_way"), [(1, False), (3, True)])
def test_slices_start_side_by_side_and_wait_for_their_turn(
    models: int, one_way: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []

    def steps(bench: parts.Bench, name: str, *flags: str, model: Path) -> str:
        log.append(f"{model.name} starts")
        assert ("--one-way" in flags) == one_way and "--max-total-tokens" in flags
        return model.name

    monkeypatch.setattr(parts.Bench, "steps", steps)
    monkeypatch.setattr(parts.Bench, "wait_for_turn", lambda _: log.append("turn"))
    monkeypatch.setattr(parts.Bench, "measured", lambda _, run: log.append(f"{run} measured"))
    names = [f"model{number}" for number in range(models)]
    folders = [tmp_path / name for name in names]
    parts.slice_(parts.Bench(parts.Window(tmp_path, 60), folders[0], cpu=False, models=folders))
    assert log == [*(f"{name} starts" for name in names), "turn", *(f"{name} measured" for name in names)]


def test_a_turn_comes_with_its_file_and_none_is_waited_for_behind_the_end(tmp_path: Path) -> None:
    file = tmp_path / "turn"
    bench = parts.Bench(parts.Window(tmp_path, 0.0), parts.EMBEDDED, cpu=True, turn=file)
    bench.wait_for_turn()
    bench.window.end += 600
    file.touch()
    bench.wait_for_turn()
