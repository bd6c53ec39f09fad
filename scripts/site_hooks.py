"""Hooks of mkdocs.

The site does not have the files outside of docs/: a link to one becomes its text and the name of the file. Tables of
few columns and long cells get the headings of the columns in every cell, so that a phone can show each row as a card;
no line breaks behind the dashes of a flag, nor within one in a command.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>(?:\.\./)[^)\s]*)\)")
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
_HEADING = re.compile(r"<th(?:\s[^>]*)?>(.*?)</th>", re.DOTALL)
_CELL = re.compile(r"<td(?P<style>[^>]*)>(?P<content>.*?)</td>", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")
_COMMANDS = r"<pre>.*?</pre>"
_FLAG_IN_TEXT = re.compile(_COMMANDS + r"|(?<![\w-])--\w+(?=[^<>]*<)", re.DOTALL)
_FLAG_IN_COMMAND = re.compile(r"(?<![\w-])--\w[\w-]*(?=[^<>]*<)")
_CARD_COLUMNS = range(2, 5)
_CARD_CELL = 32
"""Characters of the longest cell from which a phone has too little room for the columns beside one another."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, match["target"].partition("#")[0]))
        if path.startswith("docs/"):
            return match[0]
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {path}, which does not exist")
        text = match["text"].strip("`")
        return f"`{path}`" if text in (path, posixpath.basename(path)) else f"{match['text']} (`{path}`)"

    return _LINK.sub(replaced, markdown)


def on_page_content(html: str, **_: Any) -> str:
    return _FLAG_IN_TEXT.sub(_flag, _TABLE.sub(_cards, html))


def _flag(match: re.Match[str]) -> str:
    """Returns the flag, or all flags of commands, as what does not break. In texts only the first word does not."""
    if match[0].startswith("<pre>"):
        return _FLAG_IN_COMMAND.sub(r'<span class="flag">\g<0></span>', match[0])
    return f'<span class="flag">{match[0]}</span>'


def _cards(match: re.Match[str]) -> str:
    """Returns the table with `data-cards`, and the heading of its column in each cell; unchanged if it fits a phone."""
    table = match[0]
    headings = [_TAG.sub("", heading) for heading in _HEADING.findall(table)]
    longest = max((len(_TAG.sub("", cell["content"])) for cell in _CELL.finditer(table)), default=0)
    if len(headings) not in _CARD_COLUMNS or longest <= _CARD_CELL:
        return table
    return _ROW.sub(lambda row: _labelled(row[0], headings), table).replace("<table>", "<table data-cards>", 1)


def _labelled(row: str, headings: list[str]) -> str:
    names = iter(headings)
    return _CELL.sub(lambda cell: f'<td{cell["style"]} data-label="{next(names)}">{cell["content"]}</td>', row)
