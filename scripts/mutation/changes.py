"""Changes of one place in the server's core: where they are drawn, and how one is written into a tree."""

from __future__ import annotations

import ast
import difflib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRT = "python/sglang/srt"

ROOMS: dict[str, tuple[str, ...]] = {
    "step": (
        "managers/scheduler/batch_builder.py",
        "managers/scheduler/schedule_batch.py",
        "model_executor/step.py",
    ),
    "metadata": (
        "layers/attention/metadata.py",
        "layers/attention/sites.py",
        "layers/attention/page_table.py",
        "layers/attention/selection.py",
        "layers/attention/sparse_rows.py",
        "layers/attention/latent_chunks.py",
        "layers/attention/flashinfer_backend.py",
        "model_executor/device_state.py",
    ),
    "graphs": (
        "model_executor/graph_runner.py",
        "model_executor/graph_capture.py",
        "model_executor/draft_runner.py",
        "model_executor/step_output.py",
        "model_executor/model_runner.py",
    ),
    "cache tables": ("mem_cache/*.py",),
    "states": (
        "blocks/gated_delta/*.py",
        "blocks/kimi_delta/*.py",
        "blocks/mamba2/*.py",
        "blocks/recurrent_state/*.py",
        "mem_cache/checkpoint_table.py",
    ),
    "memory plan": (
        "plan/memory.py",
        "plan/attention_memory.py",
        "plan/capacity.py",
        "plan/capacity_plan.py",
        "plan/pool_sizes.py",
        "plan/state_rows.py",
    ),
}
"""The modules of each part of the core, below SRT; names may have wildcards."""


@dataclass(frozen=True)
class Change:
    """Lines of a module that others take the place of."""

    room: str
    module: str
    operator: str
    """cosmic-ray's name of the kind of change."""
    line: int
    """The first changed line, from 1."""
    before: tuple[str, ...]
    after: tuple[str, ...]
    statement: tuple[int, int]
    """First and last line of the statement around it. A test that runs one of them runs the change."""

    def difference(self) -> str:
        lines = [f"{self.module}:{self.line} ({self.operator})"]
        return "\n".join(lines + [f"-{line}" for line in self.before] + [f"+{line}" for line in self.after])

    def write(self, tree: Path) -> None:
        """Puts a changed module into a tree whose files are links to those of others. If the module has changed since,
        the same lines nearest to the place are meant. Raises ValueError if it has none."""
        path = tree / self.module
        lines = path.read_text(encoding="utf-8").splitlines()
        size, place = len(self.before), self.line - 1
        same = [at for at in range(len(lines)) if tuple(lines[at : at + size]) == self.before]
        if not same:
            raise ValueError(f"{self.module} no longer has the line {self.line} of the change")
        begin = min(same, key=lambda at: abs(at - place))
        lines[begin : begin + size] = self.after
        path.unlink()
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


class WithoutEffect(ast.NodeTransformer):
    """Takes out of a module what has no effect when it runs."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return ast.Pass()

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        """Conditions are in front of it; a message is a text."""
        return ast.Raise()

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return ast.Constant("")

    def visit_If(self, node: ast.If) -> ast.AST:
        return ast.Pass() if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit(node)


def effect(source: str) -> str:
    return ast.dump(WithoutEffect().visit(ast.parse(source)))


def statement_at(source: str, line: int) -> tuple[int, int]:
    """First and last line of the innermost statement there; of a statement with a body, its head alone."""
    spans = [(1, len(source.splitlines()))]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.stmt, ast.ExceptHandler)):
            body = getattr(node, "body", None)
            first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
            last = max(first, body[0].lineno - 1) if body else node.end_lineno or first
            if first <= line <= last:
                spans.append((first, last))
    return min(spans, key=lambda span: span[1] - span[0])


def change_between(room: str, module: str, operator: str, before: str, after: str) -> Change:
    old, new = before.splitlines(), after.splitlines()
    parts = [code for code in difflib.SequenceMatcher(None, old, new, False).get_opcodes() if code[0] != "equal"]
    begin, end, to_begin, to_end = parts[0][1], parts[-1][2], parts[0][3], parts[-1][4]
    return Change(
        room, module, operator, begin + 1, tuple(old[begin:end]), tuple(new[to_begin:to_end]),
        statement_at(before, begin + 1),
    )  # fmt: skip


def places(source: str) -> dict[int, list[tuple[str, int]]]:
    """What cosmic-ray can change in a module: (operator, occurrence), by line."""
    from cosmic_ray import ast as parsed
    from cosmic_ray import plugins

    nodes = list(parsed.ast_nodes(parsed.get_ast(source)))
    by_line: dict[int, list[tuple[str, int]]] = {}
    for name in sorted(plugins.operator_names()):
        operator = plugins.get_operator(name)
        if not operator.arguments():
            positions = (position for node in nodes for position in operator().mutation_positions(node))
            for occurrence, ((line, _), _) in enumerate(positions):
                by_line.setdefault(line, []).append((name, occurrence))
    return by_line


def changes_of(room: str, rng: random.Random) -> Iterator[Change]:
    """Those of a room in random order, one of each line."""
    from cosmic_ray import mutating, plugins

    paths = sorted({path for name in ROOMS[room] for path in (ROOT / SRT).glob(name) if path.stat().st_size})
    sources = {path: path.read_text(encoding="utf-8") for path in paths}
    lines = [(path, choices) for path in paths for _, choices in sorted(places(sources[path]).items())]
    rng.shuffle(lines)
    for path, choices in lines:
        source, (name, occurrence) = sources[path], rng.choice(choices)
        changed = mutating.mutate_code(source, plugins.get_operator(name)(), occurrence)
        try:
            if changed is not None and effect(changed) != effect(source):
                yield change_between(room, str(path.relative_to(ROOT)), name, source, changed)
        except SyntaxError:  # cosmic-ray takes the star of an argument for an operator
            continue


def draw(rooms: list[str], count: int, seed: int) -> list[Change]:
    """Equally many of every room, in turns. Lines are drawn first, so that one with many operators counts once."""
    rng = random.Random(seed)
    drawn = []
    for index, room in enumerate(rooms):
        drawn.append(list(islice(changes_of(room, rng), (count + len(rooms) - 1 - index) // len(rooms))))
    return [change for change in chain.from_iterable(zip_longest(*drawn)) if change is not None]
