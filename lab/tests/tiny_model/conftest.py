"""The training scripts are a package of their own, outside of the installed one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.insert(0, str(SCRIPTS))


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything of the model but its weights."""
    from tiny_model.layout import write_files

    directory = tmp_path_factory.mktemp("files")
    write_files(directory)
    return directory
