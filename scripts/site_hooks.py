"""Hooks of mkdocs.

The site does not have the files outside of docs/: a link to one becomes its text and the name of the file.
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

    return _LINK.sub(replaced, markdown)
