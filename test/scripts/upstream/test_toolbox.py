"""The rewrites that changes are made of."""

from __future__ import annotations

from pathlib import Path

import libcst as cst
import libcst.matchers as m
import pytest
from upstream.toolbox import (
    Moved,
    after_assignment,
    at_bottom,
    at_top,
    before_last_return,
    code,
    edit,
    ensure_import,
    find,
    isolated,
    replace,
    switch_imports,
    wrap_returns,
)
from upstream.tree import Tree

PATH = "sglang/srt/module.py"


def tree_of(tmp_path: Path, text: str) -> Tree:
    (tmp_path / PATH).parent.mkdir(parents=True)
    (tmp_path / PATH).write_text(text)
    return Tree(tmp_path)


def rewritten(rewrite, text: str) -> str:
    (function,) = cst.parse_module(text).body
    assert isinstance(function, cst.FunctionDef)
    return code(rewrite(function))


def test_statements_keep_their_comments_and_the_functions_indentation() -> None:
    start, end = 'def f(a):\n    """Doc."""\n', "    return a\n"
    assert rewritten(at_top("# why\na = 1\n"), start + end) == start + "    # why\n    a = 1\n" + end
    assert rewritten(before_last_return("a += 1\n"), start + end) == start + "    a += 1\n" + end
    assert rewritten(at_bottom("b = 2\n"), "def f():\n    a = 1\n") == "def f():\n    a = 1\n    b = 2\n"


def test_after_the_last_assignment_at_any_depth() -> None:
    text = "def f(x):\n    if x:\n        a, b = 1, 2\n    else:\n        b = 3\n    return b\n"
    assert "        b = 3\n    b += 1\n    return b" in rewritten(after_assignment("b", "b += 1\n"), text)
    with pytest.raises(Moved, match="no longer assigns c"):
        rewritten(after_assignment("c", "c = 1\n"), text)


def test_returns_are_wrapped_but_not_those_of_inner_functions() -> None:
    inner = "    def g():\n        return 1\n"
    text = f"def f(x):\n{inner}    if x:\n        return\n    if g:\n        return x, g\n    return x\n"
    result = rewritten(wrap_returns("fit({}, 8)"), text)
    assert "return 1\n" in result and "return\n" in result
    assert "return fit((x, g), 8)\n" in result and "return fit(x, 8)\n" in result


def test_replacing_counts() -> None:
    text = "def f(a):\n    return g(a) + g(2)\n"
    call = m.Call(func=m.Name("g"))
    assert "h(g(a)) + h(g(2))" in rewritten(replace(call, "h({})"), text)
    with pytest.raises(Moved, match="has 2 expressions"):
        rewritten(replace(call, "h({})", expected=1), text)


def test_imports_go_behind_the_docstring_and_the_future(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, '"""Doc."""\nfrom __future__ import annotations\nx = 1\n')
    ensure_import(tree, PATH, "import os")
    ensure_import(tree, PATH, "import os")
    assert tree.text(PATH) == '"""Doc."""\nfrom __future__ import annotations\nimport os\nx = 1\n'
    compile(tree.text(PATH), PATH, "exec")


def test_switched_imports(tmp_path: Path) -> None:
    text = "import os\ntry:\n    import lib\nexcept ImportError:\n    pass\n"
    text += "def f():\n    from lib import (\n        a as b,\n    )\n    from lib import other\n"
    tree = tree_of(tmp_path, text)
    assert switch_imports(tree, PATH, {"lib": "sglang.srt.sm120.ours"}, ("a",)) == 2
    result = tree.text(PATH)
    assert "if is_sm12x():\n        from sglang.srt.sm120 import ours as lib\n    else:\n        import lib\n" in result
    assert "if is_sm12x():\n        from sglang.srt.sm120.ours import a as b\n" in result
    assert "    from lib import other\n" in result
    assert result.startswith("import os\nfrom sglang.srt.sm120.hardware import is_sm12x\n")
    compile(result, PATH, "exec")


def test_symbols_below_conditions_and_in_classes(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, "if x:\n    def f(a): return a\nclass C:\n    if y:\n        def m(self, k=1): return k\n")
    assert find(tree, "f", parameters=("a",)).path == PATH
    assert find(tree, "C.m", parameters=("k",)).node.name.value == "m"
    with pytest.raises(Moved, match=r"C\.n is not defined"):
        find(tree, "C.n")
    with pytest.raises(Moved, match="it takes a"):
        find(tree, "f", parameters=("b",))


def test_an_edit_without_effect_is_moved(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, "def f(a):\n    return a\n")
    with pytest.raises(Moved, match="nothing of the expected form"):
        edit(tree, find(tree, "f"), lambda node: node)
    assert not tree.staged


def test_isolated_functions_see_only_what_they_are_given(tmp_path: Path) -> None:
    tree = tree_of(
        tmp_path,
        "@cache\ndef f(n: Unknown):\n    import missing\n"
        "    if unknown() or other.flag:\n        return 0\n    return n * FACTOR\n",
    )
    assert isolated(tree, "f", {"FACTOR": 3}, imports=False)(2) == 6
