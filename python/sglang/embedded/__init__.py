"""The model that ships with the package, so that a server can be tried without a download."""

from __future__ import annotations

from pathlib import Path

DEFAULT_MODEL_PATH = str(Path(__file__).parent / "tiny")
