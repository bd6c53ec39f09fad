"""The page's Markdown without a browser, by Node: what becomes which element, and texts that cost a careless pattern
their square. A browser shows some of them in test_browser.py."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.entrypoints.page.routes import STATIC

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs Node")
LIMIT_S = 100
"""A guard, not a measure: texts in proportion take a second, the square of one of them many minutes."""
LONG = 400_000


def show(folder: Path, *texts: str) -> list[dict[str, Any]]:
    """What the module makes of each: how many nodes, and, of few, the nodes."""
    for name in ("markdown.js", "dom.js"):
        shutil.copy(STATIC / name, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    command = [str(NODE), str(Path(__file__).with_name("markdown_tree.mjs")), str(folder / "markdown.js")]
    given = json.dumps(texts)
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result: list[dict[str, Any]] = json.loads(done.stdout)
    return result


def link(url: str, text: str) -> list[Any]:
    return ["a", {"href": url, "target": "_blank", "rel": "noopener noreferrer"}, text]


MEANT: dict[str, list[Any]] = {
    "# One": [["h3", {}, "One"]],
    "## One ##  ": [["h4", {}, "One"]],
    "# C#": [["h3", {}, "C#"]],
    "#": [["p", {}, "#"]],
    "#  #": [["h3", {}]],
    "# *a*\r\nb": [["h3", {}, ["em", {}, "a"]], ["p", {}, "b"]],
    "- a\r\n- b": [["ul", {}, ["li", {}, "a\r"], ["li", {}, "b"]]],
    "2. a": [["ol", {"start": 2}, ["li", {}, "a"]]],
    "a `b` c": [["p", {}, "a ", ["code", {}, "b"], " c"]],
    "``a`b`` `c": [["p", {}, ["code", {}, "a`b"], " `c"]],
    "see http://a.b/c).": [["p", {}, "see ", link("http://a.b/c", "http://a.b/c"), ")."]],
    "xhttp://a.b": [["p", {}, "xhttp://a.b"]],
    "[a](http://b) [c](d)": [["p", {}, link("http://b", "a"), " [c](d)"]],
    "**a** __b__ ~~c~~": [["p", {}, ["strong", {}, "a"], " ", ["strong", {}, "b"], " ", ["del", {}, "c"]]],
    "---": [["hr", {}]],
    "> a\n> b": [["blockquote", {}, ["p", {}, "a", ["br", {}], "b"]]],
    "a ``` b": [["p", {}, "a ``` b"]],
    "``` a`b": [["p", {}, "``` a`b"]],
}


def test_what_becomes_of_a_text(tmp_path: Path) -> None:
    shown = show(tmp_path, *MEANT)
    assert {text: each["tree"] for text, each in zip(MEANT, shown, strict=True)} == MEANT


def test_code_and_tables(tmp_path: Path) -> None:
    code, other, table, none = show(
        tmp_path, "```js x\na `b`\n```\nc", "~~~ py\nd", "|a|b|\n|:-|--:|\n|`c`|d|\n", "a|b\n|"
    )
    figure, paragraph = code["tree"]
    assert figure[2][2] == ["span", {}, "js"] and figure[3][2] == ["code", {}, "a `b`"] and paragraph == ["p", {}, "c"]
    assert other["tree"][0][2][2] == ["span", {}, "py"]
    ((_, _, (_, _, head, body)),) = table["tree"]
    assert head[2][2:] == [["th", {"scope": "col"}, "a"], ["th", {"scope": "col"}, "b"]]
    assert body[2][2:] == [["td", {}, ["code", {}, "c"]], ["td", {}, "d"]]
    assert none["tree"][0][0] == "p"


HOSTILE: dict[str, str] = {
    "spaces of a heading": "# " + " " * LONG + "x",
    "spaces in a heading": "# x" + " " * LONG + "#x",
    "spaces and a carriage return": "# " + " " * LONG + "\rx",
    "hashes of a heading": "# " + "#" * LONG + "x",
    "dots behind a URL": "http://a" + "." * LONG + "b",
    "dots behind URLs": "http://a...... " * (LONG // 15),
    "URLs that begin in a word": "ahttp://" * (LONG // 8),
    "spaces of a table's line": "a|b\n" + " " * LONG + "x",
    "a table's line": "a|b\n" + "-" + " " * LONG + "x",
    "cells of a table's line": "a|b\n" + "-|" * (LONG // 2) + "x",
    "spaces of a fence": "```" + " " * LONG + "`",
    "letters of a fence": "```" + "a" * LONG + "`",
    "spaces of an item": "- " + " " * LONG + "x\ry",
    "spaces before an item": " " * LONG + "x",
    "a rule": "- " * (LONG // 2) + "x",
    "spaces of a rule": "- -" + " " * LONG + "x",
    "runs of backticks": " ".join("`" * n for n in range(900, 0, -1)),
    "links without an end": ("[" * 400 + "](http://" + "a" * 3000) * (LONG // 3400),
    "targets without an end": "[](http://" * (LONG // 10),
    "emphasis": "*a " * (LONG // 3),
    "nested emphasis": "*_" * (LONG // 2),
    "quotes": "> " * (LONG // 2),
    "lines": "a\n" * (LONG // 2),
    "lines of items": "- a\n" * (LONG // 4),
    "lines of a table": "a|b\n-|-\n" + "a|b\n" * (LONG // 4),
    "cells": "a|\n-|\n" + "|a" * (LONG // 2),
    "paragraphs": "a\n\n" * (LONG // 3),
    "lines of a quote": "> a\n" * (LONG // 4),
    "indented lines": "".join(" " * (n % 40) + "- a\n" for n in range(LONG // 24)),
}


def test_hostile_texts_take_time_in_proportion(tmp_path: Path) -> None:
    """All of them, with all of their lines."""
    shown = show(tmp_path, *HOSTILE.values())
    assert all(each["size"] > 1 for each in shown)
    sizes = dict(zip(HOSTILE, (each["size"] for each in shown), strict=True))
    assert sizes["lines"] == 2 + LONG - 1 and sizes["paragraphs"] > LONG // 2
