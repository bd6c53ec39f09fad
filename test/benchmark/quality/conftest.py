from __future__ import annotations

import sys
from pathlib import Path

QUALITY = Path(__file__).parents[3] / "benchmark" / "quality"
if str(QUALITY) not in sys.path:
    sys.path.insert(0, str(QUALITY))
