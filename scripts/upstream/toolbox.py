"""Tools for changes: find a function or class by name, and rewrite what is inside it by its structure.

Nothing here knows line numbers or paths. Whatever is looked for and not found raises `Moved`.
"""

from __future__ import annotations
import __future__

import builtins
import textwrap
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import libcst as cst
import libcst.matchers as m

from upstream.tree import Tree

Definition = cst.FunctionDef | cst.ClassDef
Rewrite = Callable[[Definition], Definition]


class Moved(Exception):
    """A symbol or the structure that a change anchors on is not there; says what comes nearest."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """A definition: its file, its dotted name inside it (`Class.method`), and its syntax."""

    path: str
    name: str
    node: Definition


def find(tree: Tree, name: str, *, parameters: tuple[str, ...] = (), near: str = "") -> Anchor:
    """The only definition of `name` ("function" or "Class.method") whose path contains `near`.

    `parameters`: names that a function must still take. Raises Moved.
    """
    first, _, _ = name.partition(".")
    found = [
        Anchor(path, name, node)
        for path in tree.files_defining(first)
        if near in path and (node := _definition(tree.module(path), name)) is not None
    ]
    if not found:
        last = name.rpartition(".")[2]
        nearest = [f"{last} ({path})" for path in tree.files_defining(last) if "." in name]
        raise Moved(f"{name} is not defined; nearest: {', '.join(nearest or tree.nearest(last)) or 'nothing'}")
    if len(found) > 1:
        raise Moved(f"{name} is defined more than once: {', '.join(anchor.path for anchor in found)}")
    (anchor,) = found
    taken = parameter_names(anchor.node)
    if missing := [parameter for parameter in parameters if parameter not in taken]:
        raise Moved(f"{name} no longer takes {', '.join(missing)}; it takes {', '.join(taken)} ({anchor.path})")
    return anchor


def has(tree: Tree, *names: str) -> bool:
    """Whether the tree defines any of these functions or classes."""
    return any(tree.files_defining(name) for name in names)


def parameter_names(node: Definition) -> list[str]:
    if not isinstance(node, cst.FunctionDef):
        return []
    parameters = node.params
    return [p.name.value for p in (*parameters.posonly_params, *parameters.params, *parameters.kwonly_params)]


def _definition(module: cst.Module, name: str) -> Definition | None:
    body: Any = module
    for part in name.split("."):
        body = next((n for n in _definitions_in(body) if n.name.value == part), None)
        if body is None:
            return None
    return body


def _definitions_in(node: Any) -> list[Definition]:
    """Definitions directly in a module, class or function, also below `if` and `try`."""
    visitor = _Shallow()
    node.body.visit(visitor) if not isinstance(node, cst.Module) else node.visit(visitor)
    return visitor.found


class _Shallow(cst.CSTVisitor):
    """Does not look into what it finds. (A visitor with matchers would take a tenth of a second to be made.)"""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Definition] = []

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        self.found.append(node)
        return False

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:
        self.found.append(node)
        return False


def code(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


def statements(text: str) -> list[cst.BaseStatement]:
    """Parses statements; a comment above the first one stays with it."""
    return list(cst.parse_module("pass\n" + text).body[1:])  # comments at the top of a module belong to the module


def edit(tree: Tree, anchor: Anchor, *rewrites: Rewrite) -> None:
    """Stages the file of `anchor` with its definition rewritten. Raises Moved if a rewrite finds nothing to do."""
    node = anchor.node
    for rewrite in rewrites:
        rewritten = rewrite(node)
        if rewritten.deep_equals(node):
            raise Moved(f"{anchor.name} has nothing of the expected form to change ({anchor.path})")
        node = rewritten
    module = tree.module(anchor.path).deep_replace(anchor.node, node)
    tree.stage(anchor.path, module.code)


def ensure_import(tree: Tree, path: str, line: str, *, first: bool = False) -> None:
    """Stages `line` (an import) after the last top-level import of the file, or the `first`, unless it is there."""
    module = tree.module(path)
    (wanted,) = statements(line)
    if any(statement.deep_equals(wanted) for statement in module.body):
        return
    imports = m.SimpleStatementLine(body=[m.OneOf(m.Import(), m.ImportFrom())])
    places = [i for i, statement in enumerate(module.body) if m.matches(statement, imports) and not _future(statement)]
    opening = [
        i for i, statement in enumerate(module.body) if _future(statement) or (i == 0 and _is_docstring(statement))
    ]
    after = (places[0] if first else places[-1]) if places else max(opening, default=-1)
    body = [*module.body[: after + 1], wanted, *module.body[after + 1 :]]
    tree.stage(path, module.with_changes(body=body).code)


def _future(statement: cst.CSTNode) -> bool:
    return "from __future__" in code(statement)


def _is_docstring(statement: cst.CSTNode) -> bool:
    text = m.OneOf(m.SimpleString(), m.ConcatenatedString())
    return m.matches(statement, m.SimpleStatementLine(body=[m.Expr(text)]))


# Rewrites


def at_top(text: str) -> Rewrite:
    """Puts statements first in a function, after its docstring."""

    def rewrite(node: Definition) -> Definition:
        body = list(node.body.body)
        start = 1 if body and _is_docstring(body[0]) else 0
        body[start:start] = statements(text)
        return node.with_changes(body=node.body.with_changes(body=body))

    return rewrite


def before_last_return(text: str) -> Rewrite:
    """Puts statements before the return that ends a function."""

    def rewrite(node: Definition) -> Definition:
        body = list(node.body.body)
        if not body or not m.matches(body[-1], m.SimpleStatementLine(body=[m.Return()])):
            raise Moved(f"{node.name.value} no longer ends in a return")
        body[-1:-1] = statements(text)
        return node.with_changes(body=node.body.with_changes(body=body))

    return rewrite


def after_assignment(target: str, text: str) -> Rewrite:
    """Puts statements after the last one, at the function's own level, that assigns `target` anywhere inside it."""

    def assigns(statement: cst.CSTNode) -> bool:
        for found in m.findall(statement, m.AssignTarget()):
            names = found.target.elements if isinstance(found.target, cst.Tuple) else [found.target]
            if target in {code(name.value if isinstance(name, cst.Element) else name) for name in names}:
                return True
        return False

    def rewrite(node: Definition) -> Definition:
        body = list(node.body.body)
        places = [i for i, statement in enumerate(body) if assigns(statement)]
        if not places:
            raise Moved(f"{node.name.value} no longer assigns {target}")
        body[places[-1] + 1 : places[-1] + 1] = statements(text)
        return node.with_changes(body=node.body.with_changes(body=body))

    return rewrite


def wrap_returns(template: str) -> Rewrite:
    """Every returned value becomes `template` with `{}` standing for it; functions defined inside are left alone."""

    class Wrap(cst.CSTTransformer):
        def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
            return False

        def visit_Lambda(self, node: cst.Lambda) -> bool:
            return False

        def leave_Return(self, original: cst.Return, updated: cst.Return) -> cst.Return:
            if updated.value is None:
                return updated
            text = code(updated.value)
            if isinstance(updated.value, cst.Tuple) and not updated.value.lpar:
                text = f"({text})"
            wrapped = cst.parse_expression(template.replace("{}", text))
            return updated.with_changes(value=wrapped, whitespace_after_return=cst.SimpleWhitespace(" "))

    return lambda node: node.with_changes(body=node.body.visit(Wrap()))


def replace(pattern: m.BaseMatcherNode, template: str, *, expected: int | None = None) -> Rewrite:
    """Replaces every outermost expression that matches; `{}` in the template is its own text.

    `expected`: how many there must be (any number above 0 when None).
    """

    class Replace(cst.CSTTransformer):
        count = 0

        def on_visit(self, node: cst.CSTNode) -> bool:
            return not m.matches(node, pattern)

        def on_leave(self, original: Any, updated: Any) -> Any:
            if not m.matches(original, pattern):
                return updated
            self.count += 1
            return cst.parse_expression(template.replace("{}", code(original)))

    def rewrite(node: Definition) -> Definition:
        transformer = Replace()
        rewritten = node.with_changes(body=node.body.visit(transformer))
        if transformer.count == 0 or (expected is not None and transformer.count != expected):
            raise Moved(
                f"{node.name.value} has {transformer.count} expressions of the expected form, not {expected or 'some'}"
            )
        return rewritten

    return rewrite


def at_bottom(text: str) -> Rewrite:
    """Puts statements last in a function that does not end in a return."""

    def rewrite(node: Definition) -> Definition:
        body = list(node.body.body)
        if body and m.matches(body[-1], m.SimpleStatementLine(body=[m.Return()])):
            raise Moved(f"{node.name.value} now ends in a return")
        return node.with_changes(body=node.body.with_changes(body=[*body, *statements(text)]))

    return rewrite


def switch_imports(tree: Tree, path: str, modules: Mapping[str, str], names: tuple[str, ...]) -> int:
    """Stages `path` with each import of a module that is a key replaced, on SM12x, by the same names from the value.

    `names`: what the replacement has; an import of anything else is left alone. An import at any depth becomes
    `if is_sm12x(): from ... else: ...`. Returns how many there were.
    """

    class Switch(cst.CSTTransformer):
        count = 0

        def leave_SimpleStatementLine(self, original: Any, updated: cst.SimpleStatementLine) -> Any:
            ours = _ours(updated, modules, names)
            if ours is None:
                return updated
            self.count += 1
            branches = statements(f"if is_sm12x():\n    {ours}\nelse:\n    pass\n")[0]
            assert isinstance(branches, cst.If) and isinstance(branches.orelse, cst.Else)
            theirs = branches.orelse.with_changes(body=cst.IndentedBlock([updated.with_changes(leading_lines=[])]))
            return branches.with_changes(orelse=theirs, leading_lines=updated.leading_lines)

    transformer = Switch()
    switched = tree.module(path).visit(transformer)
    if transformer.count:
        tree.stage(path, switched.code)
        ensure_import(tree, path, "from sglang.srt.sm120.hardware import is_sm12x", first=True)
    return transformer.count


def _ours(line: cst.SimpleStatementLine, modules: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    """The statement that imports from us what `line` imports from one of `modules`; None if it does not."""
    statement = line.body[0] if len(line.body) == 1 else None
    if isinstance(statement, cst.Import) and len(statement.names) == 1:
        imported, alias = code(statement.names[0].name), statement.names[0].asname
        if imported in modules and alias is None:
            package, _, module = modules[imported].rpartition(".")
            return f"from {package} import {module}" + ("" if module == imported else f" as {imported}")
    if isinstance(statement, cst.ImportFrom) and statement.module and not isinstance(statement.names, cst.ImportStar):
        source = code(statement.module)
        if source in modules and all(code(name.name) in names for name in statement.names):
            what = (code(n.name) + (f" as {code(n.asname.name)}" if n.asname else "") for n in statement.names)
            return f"from {modules[source]} import {', '.join(what)}"
    return None


# Checks


def isolated(
    tree: Tree, name: str, namespace: Mapping[str, Any], *, near: str = "", imports: bool = True
) -> Callable[..., Any]:
    """The function `name` as the tree (with what is staged) has it, alone, without decorators.

    `namespace`: the globals that matter; every other one is `Anything`, which counts as false. `imports=False`: what
    the function itself imports comes from there, too.
    """
    node = find(tree, name, near=near).node
    if not isinstance(node, cst.FunctionDef):
        raise Moved(f"{name} is no longer a function")
    node = node.with_changes(decorators=[], leading_lines=[])
    text = code(node if imports else node.visit(_NoImports()))
    body = compile(textwrap.dedent(text), name, "exec", flags=_ANNOTATIONS, dont_inherit=True)
    scope = {used: Anything() for used in _names(body) if not hasattr(builtins, used)} | dict(namespace)
    exec(body, scope)
    return scope[name.rpartition(".")[2]]


class _NoImports(cst.CSTTransformer):
    def leave_Import(self, original: cst.Import, updated: cst.Import) -> cst.Pass:
        return cst.Pass()

    def leave_ImportFrom(self, original: cst.ImportFrom, updated: cst.ImportFrom) -> cst.Pass:
        return cst.Pass()


def _names(body: types.CodeType) -> set[str]:
    inner = (constant for constant in body.co_consts if isinstance(constant, types.CodeType))
    return set(body.co_names).union(*map(_names, inner))


_ANNOTATIONS = __future__.annotations.compiler_flag
"""Annotations stay text: their names need not exist here."""


class Anything:
    """Stands for whatever a check does not care about: false, callable, and so is every attribute and result."""

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Anything()


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
