"""Options of `pytest test/quality`: which file holds the model, and where it is served.

python -m pytest -m quality test/quality --smollm2 FILE.gguf --device cuda    # GPU
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--smollm2", default="smollm2", help="SmolLM2-135M-Instruct in GGUF (default: of the package)")
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"))
    parser.addoption("--dtype", choices=("float32", "bfloat16"), help="(default: float32 on a CPU, bfloat16 on a GPU)")
