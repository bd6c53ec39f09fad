from __future__ import annotations

import sys
from pathlib import Path

EVALS = Path(__file__).parents[3] / "benchmark" / "evals"
if str(EVALS) not in sys.path:
    sys.path.insert(0, str(EVALS))
