"""Prints how large serving is and whether its imports are in order; `make imports` and CI run it.

    python scripts/import_figures.py           # four figures
    python scripts/import_figures.py --files   # before them the lines of every module that serving may import
    python scripts/import_figures.py --rooms   # before them the lines of every package, the largest first
    python scripts/import_figures.py --why sglang.srt.kernels.ledger_file   # the imports that lead there

The serving closure is counted without running anything. It starts at `sglang.launch_server` and holds

- every module of `sglang` that a module of the closure imports, at its top or inside a function; imports for type
  checkers alone (`if TYPE_CHECKING`) do not count;
- every module that a string in the code names, as processes and `python -m` do ("module:attribute", f-strings of
  constants too; docstrings do not count), and every one that a row of the kernel tables names;
- the `__init__.py` of every package that one of these lies in.

Its size is the number of lines in these files, blank lines and comments among them; data files do not count. Not in it
are other commands (`sglang.cli`, which is in front of `sglang serve` and of all of them, `sglang.bench`, ...), also
`sglang.dry_run`, which `--dry-run` runs instead of a server.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grimp
from importlinter import api

PYTHON = Path(__file__).parents[1] / "python"
SERVING = "sglang.launch_server"
INSTEAD_OF_SERVING = {"sglang.dry_run"}
KERNEL_TABLES = "sglang.srt.kernels.tables"
RUNNER = ("sglang.srt.model_executor.model_runner", "ModelRunner")


def path_of(module: str, root: Path = PYTHON) -> Path:
    """The path of a module or of a package's `__init__.py`. It need not exist."""
    path = root.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def lines_of(module: str, root: Path = PYTHON) -> int:
    return len(path_of(module, root).read_text(encoding="utf-8").splitlines())


def named_modules(source: str, modules: frozenset[str]) -> set[str]:
    """Those of `modules` that strings of the code name."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def text(node: ast.AST) -> str:
        match node:
            case ast.Constant(value=str(value)) if id(node) not in docstrings:
                return value
            case ast.JoinedStr(values=parts):
                return "".join(map(text, parts))
            case ast.FormattedValue(value=ast.Name(id=name)):
                return str(constants.get(name, ""))
        return ""

    return {name for node in ast.walk(tree) if (name := text(node).partition(":")[0]) in modules}


def packages_of(module: str) -> Iterator[str]:
    """The packages around it, which are imported before it."""
    parts = module.split(".")
    return (".".join(parts[:n]) for n in range(1, len(parts)))


def kernel_modules() -> set[str]:
    """Those that hold the candidates of every op."""
    from sglang.srt.kernels.tables import TABLES

    return {spec.entry.partition(":")[0] for specs in TABLES.values() for spec in specs if spec.entry}


def closure(start: str, root: Path = PYTHON) -> dict[str, str]:
    """Module -> the one that it is reached from, in the order of the distance from `start`."""
    graph = grimp.build_graph(start.partition(".")[0], exclude_type_checking_imports=True, cache_dir=None)
    modules = frozenset(graph.modules)
    reached, queue = {start: ""}, deque([start])
    while queue:
        module = queue.popleft()
        needs = graph.find_modules_directly_imported_by(module) | set(packages_of(module))
        needs |= named_modules(path_of(module, root).read_text(encoding="utf-8"), modules)
        needs |= kernel_modules() & modules if module == KERNEL_TABLES else set()
        for needed in sorted(needs - reached.keys() - INSTEAD_OF_SERVING):
            reached[needed] = module
            queue.append(needed)
    return reached


def package_group(module: str, root: Path = PYTHON) -> str:
    """The package of a module, at most three levels below `sglang`: `sglang.srt.plan`, `sglang.srt.plan.families`."""
    inside = [*packages_of(module), *([module] if root.joinpath(*module.split(".")).is_dir() else [])]
    return inside[:4][-1] if inside else module


def chain(reached: dict[str, str], module: str) -> list[str]:
    """How the closure comes to a module: from the start to it."""
    steps = [module]
    while reached[steps[-1]]:
        steps.append(reached[steps[-1]])
    return steps[::-1]


def class_lines(module: str, name: str, root: Path = PYTHON) -> int:
    tree = ast.parse(path_of(module, root).read_text(encoding="utf-8"))
    (definition,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return (definition.end_lineno or 0) - definition.lineno + 1


def cycles(package: str) -> list[list[str]]:
    """Groups of modules that import each other, also for the sake of type annotations: the strongly connected
    components (Tarjan) of more than one."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=False, cache_dir=None)
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


def layered_contract() -> dict[str, Any]:
    """The layers that pyproject.toml gives import-linter."""
    options = api.read_configuration(str(PYTHON.parent / "pyproject.toml"))["contracts_options"]
    (contract,) = (contract for contract in options if contract["type"] == "layers")
    return dict(contract)


def arrows_upwards(containers: list[str], layers: list[str], allowed: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Imports, direct or through modules of no layer, from a layer to one above it: (importer, imported). `allowed`:
    patterns of imports ("importer -> imported") that do not count."""
    package = containers[0].partition(".")[0]
    graph = grimp.build_graph(package, exclude_type_checking_imports=True, cache_dir=None)
    for pattern in allowed:
        for found in graph.find_matching_direct_imports(pattern):
            graph.remove_import(importer=found["importer"], imported=found["imported"])
    inside = [grimp.Layer(*(name.strip() for name in layer.split("|"))) for layer in layers]
    routes = [
        route
        for illegal in graph.find_illegal_dependencies_for_layers(inside, containers=set(containers))
        for route in illegal.routes
    ]
    return sorted((head, tail) for route in routes for head in route.heads for tail in route.tails)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="list the modules of the closure with their lines")
    parser.add_argument("--rooms", action="store_true", help="list its packages with their modules and lines")
    parser.add_argument("--why", metavar="MODULE", help="say which imports lead from serving to this module")
    args = parser.parse_args()
    sys.path.insert(0, str(PYTHON))  # this tree, whichever is installed
    reached = closure(SERVING)
    if args.why:
        print(" -> ".join(chain(reached, args.why)) if args.why in reached else f"serving never imports {args.why}")
        return 0
    if args.files:
        for module in sorted(reached):
            print(f"{lines_of(module):6} {module}")
    if args.rooms:
        rooms: dict[str, list[int]] = {}
        for module in reached:
            rooms.setdefault(package_group(module), []).append(lines_of(module))
        for room, lines in sorted(rooms.items(), key=lambda item: -sum(item[1])):
            print(f"{sum(lines):6} lines in {len(lines):3} modules of {room}")
    contract = layered_contract()
    upwards = arrows_upwards(contract["containers"], contract["layers"], contract.get("ignore_imports", ()))
    print(f"serving closure: {sum(map(lines_of, reached)):,} lines in {len(reached)} modules")
    print(f"{RUNNER[1]}: {class_lines(*RUNNER)} lines")
    print(f"import circles: {len(cycles('sglang'))}")
    print(f"arrows upwards: {len(upwards)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
