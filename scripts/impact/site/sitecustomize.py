"""Traces each Python process whose PYTHONPATH has this folder (see `tracing.py`)."""

import importlib.util
from pathlib import Path

spec = importlib.util.spec_from_file_location("impact_tracing", Path(__file__).parents[1] / "tracing.py")
assert spec is not None and spec.loader is not None
tracing = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tracing)
tracing.start()
