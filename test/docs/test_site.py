"""The site of the documents builds without a warning, and loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from docs.commands import ROOT


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """As `make site` does."""
    (flags,) = re.findall(r"mkdocs build (.*)", (ROOT / "Makefile").read_text())
    words = [sys.executable, "-m", "mkdocs", "build", *flags.split(), "--config-file", str(config)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run([*words, "--site-dir", str(site)], env=environment, capture_output=True, text=True)


def test_a_warning_ends_it(tmp_path: Path) -> None:
    config = tmp_path / "mkdocs.yml"
    config.write_text(
        f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: {ROOT / 'docs'}\nhooks: [{ROOT / 'scripts/site_hooks.py'}]\n"
        "nav:\n  - index.md\n"
    )
    done = build(config, tmp_path / "site")
    assert done.returncode != 0 and 'not included in the "nav"' in done.stderr, done.stderr


def test_the_site_builds(tmp_path: Path) -> None:
    done = build(ROOT / "mkdocs.yml", tmp_path)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) >= 20
    for page in pages:
        loaded = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=[\"']?(https?://[^\"' >]+)", page.read_text())
        assert loaded == [], page
