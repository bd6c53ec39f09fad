"""The site of the documents builds without a warning, and loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from docs.commands import ROOT


def test_the_site_builds(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        loaded = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=[\"']?(https?://[^\"' >]+)", page.read_text())
        assert loaded == [], page

    measurements = (tmp_path / "results" / "index.html").read_text()
    for path in (ROOT / "docs" / "results").glob("2*.md"):
        assert f'href="{path.stem}.html"' in measurements
