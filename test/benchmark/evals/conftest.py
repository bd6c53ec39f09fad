from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
for folder in (ROOT / "benchmark" / "evals", ROOT / "scripts"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
