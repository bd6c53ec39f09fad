"""What `scripts/import_figures.py` counts, and that the package's imports are in order."""

from __future__ import annotations

from pathlib import Path

import import_figures
import pytest


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with one module for each way to be reached, or not to be."""
    name = f"closure_of_{tmp_path.name.replace('-', '_')}"
    files = {
        "__init__": "",
        "start": f"from {name} import top\nHERE = '{name}'\nTABLE = f'{{HERE}}.by_parts:run'\n",
        "top": f"def late():\n    from {name}.lazy import nested\n    return nested\n",
        "lazy": f"'''{name}.of_documents'''\nENTRY = '{name}.inner.by_string:run'\nnested = 1\n\n# the end\n",
        "inner/__init__": "a = 1\n",
        "inner/by_string": f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from {name} import of_types\n",
        "by_parts": "",
        "of_types": "",
        "of_documents": f"from {name} import top\n",
    }
    for path, source in files.items():
        file = tmp_path / name / f"{path}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_the_closure_has_what_would_be_imported(package: str, tmp_path: Path) -> None:
    reached = import_figures.closure(f"{package}.start", tmp_path)
    names = {module.removeprefix(package).removeprefix(".") for module in reached}
    assert names == {"", "start", "top", "lazy", "inner", "inner.by_string", "by_parts"}
    assert sum(import_figures.lines_of(module, tmp_path) for module in reached) == 3 + 3 + 5 + 1 + 3
    rooms = [
        import_figures.package_group(f"{package}.{name}", tmp_path) for name in ("top", "inner", "inner.by_string")
    ]
    assert rooms == [package, f"{package}.inner", f"{package}.inner"]
    ways = [module.removeprefix(f"{package}.") for module in import_figures.chain(reached, f"{package}.inner")]
    assert ways == ["start", "top", "lazy", "inner.by_string", "inner"]


def test_lines_of_a_class(tmp_path: Path) -> None:
    (tmp_path / "shapes.py").write_text("class A:\n    x = 1\n\n    y = 2\n\n\nclass B: ...\n")
    assert import_figures.class_lines("shapes", "A", tmp_path) == 4
    assert import_figures.class_lines(*import_figures.RUNNER) > 50


def test_serving_reaches_its_processes_and_kernels() -> None:
    reached = import_figures.closure(import_figures.SERVING)
    expected = {
        "managers.scheduler.scheduler_process",
        "managers.detokenizer.detokenizer_manager",
        "constrained.compile_process",
        "layers.attention.triton_backend",
        "layers.quantization.scaled_mm",
        "blocks.moe.kernels.topk",
        "blocks.recurrent_state.kernels.chunk_scan",
        "plan.families",
    }
    assert {f"sglang.srt.{module}" for module in expected} <= reached.keys()
    assert {module for module in reached if not module.startswith("sglang.srt")} <= {
        "sglang",
        "sglang.launch_server",
        "sglang.measuring",  # a command of a process of its own
        "sglang.version",
    }


def test_imports_have_no_cycles() -> None:
    assert import_figures.cycles("sglang") == []


def test_a_cycle_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "in_circles"
    package.mkdir()
    (package / "__init__.py").touch()
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from in_circles import "
    for name, needs in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")):
        (package / f"{name}.py").write_text(f"{guarded}{needs}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert import_figures.cycles("in_circles") == [["in_circles.a", "in_circles.b", "in_circles.c"]]


def test_an_arrow_upwards_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "in_layers"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "high.py").write_text("from in_layers import low\n")
    (package / "low.py").write_text("def f():\n    from in_layers import other\n")
    (package / "other.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    arrows = import_figures.arrows_upwards
    assert arrows(["in_layers"], ["high", "low", "other"]) == []
    assert arrows(["in_layers"], ["high", "other", "low"]) == [("in_layers.low", "in_layers.other")]
    assert arrows(["in_layers"], ["high", "other", "low"], ["in_layers.low -> in_layers.*"]) == []


def test_the_layers_are_those_of_the_linter() -> None:
    contract = import_figures.layered_contract()
    assert contract["containers"] == ["sglang.srt"] and "entrypoints" in contract["layers"]
