"""One version: that of `sglang.version`, of the image's label and of the newest heading of the changes.

What `/server_info` says is compared in test/http/test_native_api.py.
"""

from __future__ import annotations

import re

from docs.commands import ROOT
from sglang.version import __version__

HEADINGS = ["Added", "Changed", "Fixed", "Removed", "Known limits"]


def test_the_image_is_labelled_with_the_version() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    assert re.findall(r'org\.opencontainers\.image\.version="([^"]*)"', dockerfile) == [__version__]


def test_the_distribution_reads_it() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert 'version = { attr = "sglang.version.__version__" }' in text and 'dynamic = ["version"]' in text


def test_the_newest_heading_of_the_changes_has_it_and_a_date() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.*)$", changes, re.MULTILINE)
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", version) for version in versions)
    assert versions[0].partition(" - ")[0] == __version__
    for section in re.split(r"^## ", changes, flags=re.MULTILINE)[1:]:
        named = re.findall(r"^### (.*)$", section, re.MULTILINE)
        assert named == [heading for heading in HEADINGS if heading in named] and named
