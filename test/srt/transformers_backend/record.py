"""What each class of transformers was found to do: in a file, of one release, and of later ones what differs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import transformers


def outcomes(path: Path) -> dict[str, str]:
    """Returns the outcomes by class with the installed release, as far as they are recorded."""
    recorded = json.loads(path.read_text())
    return recorded["outcomes"] | recorded.get("later", {}).get(transformers.__version__, {})


def check(path: Path, name: str, outcome: str) -> None:
    """Fails if another outcome is recorded, or none. With UPDATE_GOLDEN=1 records it."""
    if os.environ.get("UPDATE_GOLDEN") and outcomes(path).get(name) != outcome:
        recorded = json.loads(path.read_text())
        of_release = recorded["outcomes"]
        if recorded["transformers"] != transformers.__version__:
            of_release = recorded.setdefault("later", {}).setdefault(transformers.__version__, {})
        of_release[name] = outcome
        for each in (recorded["outcomes"], *recorded.get("later", {}).values()):
            in_order = dict(sorted(each.items()))
            each.clear()
            each.update(in_order)
        path.write_text(json.dumps(recorded, indent=1) + "\n")
    assert outcomes(path).get(name) == outcome
