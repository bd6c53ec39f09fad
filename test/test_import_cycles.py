"""No module of the package needs itself, not even for the sake of type annotations."""

from __future__ import annotations

import grimp


def cycles(root: str) -> list[list[str]]:
    """Groups of modules that import each other: the strongly connected components (Tarjan) of more than one."""
    graph = grimp.build_graph(root, exclude_type_checking_imports=False, cache_dir=None)
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for imported in sorted(graph.find_modules_directly_imported_by(module)):
            if imported not in order:
                visit(imported)
                lowest[module] = min(lowest[module], lowest[imported])
            elif imported in stack:
                lowest[module] = min(lowest[module], order[imported])
        if lowest[module] == order[module]:
            position = stack.index(module)
            group, stack[position:] = stack[position:], []
            if len(group) > 1:
                groups.append(sorted(group))

    for module in sorted(graph.modules):
        if module not in order:
            visit(module)
    return groups


def test_imports_have_no_cycles() -> None:
    assert cycles("sglang") == []


def test_a_cycle_would_be_found(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    package = tmp_path / "in_circles"
    package.mkdir()
    (package / "__init__.py").touch()
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from in_circles import "
    for name, needs in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")):
        (package / f"{name}.py").write_text(f"{guarded}{needs}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert cycles("in_circles") == [["in_circles.a", "in_circles.b", "in_circles.c"]]
