from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything of the model but its weights."""
    from tiny_model.layout import write_files

    directory = tmp_path_factory.mktemp("files")
    write_files(directory)
    return directory
