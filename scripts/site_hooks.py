"""Hooks of mkdocs.

Links out of docs/ lead to files of the repository, which the site does not have: they become their text and the file's
name. The page of measurements lists all of them.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>(?:\.\./)[^)\s]*)\)")


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

    listed = _measurements() if page.file.src_uri == "results/index.md" else ""
    return _LINK.sub(replaced, markdown) + listed


def _measurements() -> str:
    pages = sorted((ROOT / "docs" / "results").glob("2*.md"), reverse=True)
    titles = ((page.name, page.read_text().partition("\n")[0].removeprefix("# ")) for page in pages)
    return "\n" + "\n".join(f"- {name[:10]}: [{title}]({name})" for name, title in titles) + "\n"
